//! Updates on dedicated servers. A server has no program that could tell it the optimizer's settings, so
//! each rank that trains sends it a command for a step before its pushes of that step, and a push
//! without one is refused. What a command says is the driver's affair: it compares those of all ranks,
//! and says here whether results are parameters (`UpdatesReady`) or something else (`UpdatesPaused`).
//!
//! A server keeps the parameters of its slices in the buffers of their last results: rank 0's values
//! first. Each update reads the last one and writes the next.

use crate::api::{violation, BufferRef, Region, UsageError, Validated};
use crate::cx::Cx;
use crate::plan::Plan;
use crate::rank_set::RankSet;
use crate::transmit::Body;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId, Step};
use gradlane_wire::{FrameHeader, FrameKind};

/// Longest command: a few bytes, and this many a tensor.
const TENSOR_BYTES_MAX: usize = 64;

/// Bytes of the longest command.
fn command_bytes_max(plan: &Plan) -> usize {
    TENSOR_BYTES_MAX * (1 + plan.tensors.len())
}

/// Commands, and the parameters that dedicated servers keep.
#[derive(Debug, Default)]
pub(crate) struct ServerCommands {
    /// The step that this rank has sent its last command for.
    sent: Option<Step>,
    /// By rank that trains: the step that its last command is for.
    received: BTreeMap<Rank, Step>,
    /// Whether results are no parameters.
    paused: bool,
    /// By owned slice.
    parameters: BTreeMap<SliceId, BufferRef>,
}

impl ServerCommands {
    /// Sends a command for the current step to all servers, before its first contribution.
    pub(crate) fn send(&mut self, cx: &mut Cx, command: Vec<u8>) -> Result<(), UsageError> {
        let refuse = |why: &str| Err(UsageError::Argument(format!("a command to servers {why}")));
        let step = cx.step();
        if !cx.plan().commands_servers() || cx.is_dedicated_server() {
            return refuse("where no dedicated ones update parameters");
        }
        if step.is_initial() || cx.worker().has_submitted() || self.sent == Some(step) {
            return refuse("comes once a step, before its first contribution");
        }
        let (bytes, most) = (command.len(), command_bytes_max(cx.plan()));
        if bytes > most {
            return refuse(&format!("of {bytes} bytes; at most {most}"));
        }
        self.sent = Some(step);
        let mut servers = RankSet::empty(cx.plan().world_size);
        (cx.plan().workers()..cx.plan().world_size).for_each(|rank| {
            servers.insert(Rank(rank));
        });
        let header = cx.control_header(FrameKind::ServerCommand);
        cx.send_control(servers, header, Body::Inline(command));
        Ok(())
    }

    /// Checks that a rank may send a command of this length for this step.
    pub(crate) fn check(&self, cx: &Cx, from: Rank, header: &FrameHeader) -> Validated<()> {
        let what = || format!("a command of {} bytes for {}", header.length, header.step);
        if !cx.plan().commands_servers() || !cx.is_dedicated_server() || !cx.plan().trains(from) {
            return violation(format!("{} from {from} to {}", what(), cx.rank()));
        }
        let most = command_bytes_max(cx.plan());
        if header.length as usize > most {
            return violation(format!("{}; at most {most}", what()));
        }
        let last = self.received.get(&from).copied().unwrap_or_default();
        if header.step <= last {
            return violation(format!("{} after that for {last}", what()));
        }
        Ok(())
    }

    pub(crate) fn take(&mut self, from: Rank, header: &FrameHeader) {
        self.received.insert(from, header.step);
    }

    /// Checks that a push follows its rank's command.
    pub(super) fn check_push(&self, cx: &Cx, from: Rank, header: &FrameHeader) -> Validated<()> {
        let commanded = header.step.is_initial() || self.received.get(&from) == Some(&header.step);
        if commanded {
            return Ok(());
        }
        violation(format!("{} before the settings of its update", cx.describe(header)))
    }

    /// Whether results are parameters from now on.
    pub(super) fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Where the parameters of an owned slice are: with this rank's program, or here.
    pub(super) fn parameters(&self, cx: &Cx, slice: SliceId) -> Region {
        let kept = self.parameters.get(&slice);
        kept.map_or_else(|| cx.parameter_region(slice), |buffer| buffer.whole())
    }

    /// Keeps the result of an owned slice, if it is its parameters.
    pub(super) fn keep(&mut self, cx: &mut Cx, slice: SliceId, step: Step, result: BufferRef) {
        let is_kept = cx.plan().commands_servers()
            && cx.plan().takes_part(cx.plan().slice(slice).tensor, Step(1))
            && (step.is_initial() || !self.paused);
        if is_kept {
            cx.retain(result);
            if let Some(old) = self.parameters.insert(slice, result) {
                cx.release(old);
            }
        }
    }

    pub(super) fn drop_parameters(&mut self, cx: &mut Cx) {
        core::mem::take(&mut self.parameters).into_values().for_each(|it| cx.release(it));
    }
}
