//! What every frame from a peer must satisfy before it is looked at by what it is about: its sender,
//! its generation, the size of control frames, the slice and its route, whether bytes are where they
//! can be.

use crate::engine::Engine;
use crate::receive::Validated;
use crate::scheme::Scheme;
use alloc::format;
use alloc::string::String;
use gradlane_units::Rank;
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

/// Longest reason in an abort frame.
const ABORT_TEXT_BYTES_MAX: u32 = 4096;

impl Engine {
    /// What any frame must satisfy.
    pub(crate) fn check_header(&self, from: Rank, header: &FrameHeader) -> Validated<()> {
        let refuse = |what: String| Err(what);
        if header.sender != from {
            return refuse(format!("a frame in the name of {}", header.sender));
        }
        if header.generation != self.options.generation {
            let (found, own) = (header.generation, self.options.generation);
            return refuse(format!("a frame of generation {found}, this rank is in {own}"));
        }
        match header.kind {
            FrameKind::Heartbeat | FrameKind::Goodbye | FrameKind::PlanSwitchAck => {
                (header.length == 0).then_some(()).ok_or_else(|| {
                    format!("{:?} with a payload of {} bytes", header.kind, header.length)
                })
            }
            FrameKind::Abort => (header.length <= ABORT_TEXT_BYTES_MAX)
                .then_some(())
                .ok_or_else(|| format!("an abort with a reason of {} bytes", header.length)),
            FrameKind::Suspect => (header.length == 4)
                .then_some(())
                .ok_or_else(|| format!("a suspicion of {} bytes", header.length)),
            FrameKind::PlanSwitch => self.check_switch_length(header),
            FrameKind::StepBegun | FrameKind::GradientsQueued | FrameKind::Contributors => {
                self.validate_straggler_frame(from, header)
            }
            _ => self.check_slice_header(from, header),
        }
    }

    /// What every frame about a slice must satisfy.
    fn check_slice_header(&self, from: Rank, header: &FrameHeader) -> Validated<()> {
        let serves = header.kind == FrameKind::Broadcast && self.is_async(header.step);
        if self.lifecycle.has_departed(from) && !serves {
            return Err(format!("{} after its goodbye", self.describe(header)));
        }
        let Some(slice) = self.plan.slices.get(header.slice.index()) else {
            let count = self.plan.slices.len();
            return Err(format!("{}, but there are {count} slices", header.slice));
        };
        if slice.tensor != header.tensor {
            let (found, right) = (header.tensor, slice.tensor);
            return Err(format!("{} as part of {found}; it is of {right}", header.slice));
        }
        if !self.plan.takes_part(slice.tensor, header.step) {
            return Err(format!("{}, a tensor that is not trained", self.describe(header)));
        }
        let version = self.priorities.version(header.step);
        if header.plan_version != version && !(self.switches_alone() && header.step.0 > 0) {
            return Err(format!(
                "{} under plan version {}, this rank has {version}",
                self.describe(header),
                header.plan_version
            ));
        }
        self.check_route(from, header)?;
        if header.kind == FrameKind::Block {
            return self.check_block(from, header);
        }
        let encoded = header.form == PayloadForm::Encoded;
        let has_body = !matches!(header.kind, FrameKind::Notify | FrameKind::Pull)
            && !header.flags.contains(FrameFlags::ABSENT);
        let may_be_encoded =
            has_body && self.plan.may_be_encoded(header.kind, header.slice, header.step);
        if encoded && !may_be_encoded {
            return Err(format!("{} as encoded bytes", self.describe(header)));
        }
        let is_scales = header.kind == FrameKind::RingScale;
        let shares = self.plan.scale_bytes(header.slice).is_some() && header.step.0 > 0;
        if is_scales && !(shares && encoded == has_body) {
            return Err(format!("{}, whose ranks share no scales", self.describe(header)));
        }
        let bytes = if has_body { self.bytes_of(header) } else { 0 };
        // Where encodings differ in length, the last frame says how long this one is.
        let varies = !is_scales
            && encoded
            && self.plan.codec(header.slice).is_some_and(|encoding| !encoding.fixed);
        let end = header.offset.checked_add(u64::from(header.length));
        let last = header.flags.contains(FrameFlags::LAST);
        let fits = end.is_some_and(|end| end <= bytes && (varies || last == (end == bytes)));
        let moves = header.length > 0 || last;
        if fits && moves {
            return Ok(());
        }
        Err(format!(
            "{} with {} bytes at offset {} of {bytes}, last: {last}",
            self.describe(header),
            header.length,
            header.offset
        ))
    }

    /// The sender must be the one that sends this, to this rank, in the tensor's scheme.
    fn check_route(&self, from: Rank, header: &FrameHeader) -> Validated<()> {
        if !self.may_send(header.kind, from) {
            let own = self.rank();
            return Err(format!(
                "{} from {from} to {own}, of which one only serves",
                self.describe(header)
            ));
        }
        let scheme = self.plan.tensor(header.tensor).scheme;
        let right = match header.kind {
            FrameKind::RingScale | FrameKind::RingReduce | FrameKind::RingBroadcast => Scheme::Ring,
            FrameKind::Block if scheme.has_blocks() => scheme,
            FrameKind::Block => Scheme::AllGather,
            _ => Scheme::Ps,
        };
        if scheme != right {
            let name = scheme.name();
            return Err(format!("{}, a tensor of scheme {name}", self.describe(header)));
        }
        match scheme {
            Scheme::Ps => {}
            Scheme::Ring => return self.check_round(from, header),
            Scheme::AllGather | Scheme::GatherToRoot if from == self.rank() => {
                return Err(format!("{} from this rank itself", self.describe(header)));
            }
            Scheme::GatherToRoot => {
                let owner = self.plan.slice(header.slice).owner;
                if owner == self.rank() || owner == from {
                    return Ok(());
                }
                return Err(format!("{}, but {owner} answers for it", self.describe(header)));
            }
            Scheme::AllGather => return Ok(()),
        }
        let owner = match header.kind {
            FrameKind::Push | FrameKind::Pull => self.rank(),
            _ => from,
        };
        let right = self.plan.slice(header.slice).owner;
        if right != owner {
            return Err(format!("{}, but {right} owns it", self.describe(header)));
        }
        Ok(())
    }
}
