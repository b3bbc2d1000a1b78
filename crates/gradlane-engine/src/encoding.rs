//! Encodings: what the engine knows of a codec is how long an encoded slice is at most. What is in it
//! is the driver's: the engine hands out jobs that encode and decode, and moves the buffers.
//!
//! Contributions are encoded late, most urgent first, and only so many ahead of sending: what is
//! encoded and waits for its socket holds a buffer, and can no longer be passed over.

use crate::engine::Engine;
use crate::error::PlanError;
use crate::io::{BufferRef, Job, Operation};
use crate::jobs::Running;
use crate::plan::{Plan, Update};
use crate::scheduler::{Body, Message, OrderKey};
use crate::server::Contribution;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use gradlane_units::{CodecSizes, Rank, RingBytes, SliceId, Step, TensorId};
use gradlane_wire::{FrameKind, PayloadForm};
use serde::{Deserialize, Serialize};

/// How the slices of one tensor travel after step 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodecPlan {
    /// The codec, in the canonical text of `gradlane-codec`.
    #[serde(rename = "codec")]
    pub name: String,
    /// Sizes of the tensor's dimensions in the order of its storage, which some codecs go by.
    pub sizes: Vec<u64>,
    /// Slices begin at multiples of so many elements.
    pub granule_elems: u64,
    /// Whether every encoding of a slice is equally long.
    pub fixed: bool,
    /// Numbers that are kept for each value of what encoding loses, to be added the next time; 0: none.
    pub residual_width: u32,
    /// For each length of a slice, in elements, the most bytes of its encoding.
    pub bytes: Vec<(u64, u64)>,
    /// On a ring that adds up codes as integers: for each length of a slice the bytes of its scales,
    /// which go round first. Else empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scales: Vec<(u64, u64)>,
}

impl CodecPlan {
    /// The most bytes of an encoded slice of so many elements; none for a length of no slice.
    #[must_use]
    pub fn bytes_max(&self, elements: u64) -> Option<u64> {
        of_length(&self.bytes, elements)
    }

    /// Bytes of the scales of a slice of so many elements, where they go round first.
    #[must_use]
    pub fn scale_bytes(&self, elements: u64) -> Option<u64> {
        of_length(&self.scales, elements)
    }
}

impl CodecPlan {
    /// The same on a ring, where codes may be added up as integers.
    ///
    /// # Errors
    /// When the codec cannot go round a ring of so many ranks.
    pub(crate) fn round_ring(
        mut self,
        tensor: &str,
        codec: &dyn CodecSizes,
        world_size: u32,
    ) -> Result<CodecPlan, PlanError> {
        for (length, bytes) in &mut self.bytes {
            let on_ring = codec.ring_bytes(*length, world_size).map_err(|why| {
                let codec = &self.name;
                PlanError::new(format!(
                    "tensor {tensor:?} has scheme ring and codec {codec:?}: {why}"
                ))
            })?;
            if let Some(RingBytes { scales, sums }) = on_ring {
                self.scales.push((*length, scales));
                *bytes = sums;
            }
        }
        Ok(self)
    }
}

fn of_length(sizes: &[(u64, u64)], elements: u64) -> Option<u64> {
    sizes.iter().find(|(length, _)| *length == elements).map(|&(_, bytes)| bytes)
}

impl Plan {
    /// The most bytes of a slice in one form or the other.
    ///
    /// # Panics
    /// When the tensor has no encoding and is asked for as encoded.
    #[must_use]
    pub fn bytes_as(&self, slice: SliceId, form: PayloadForm) -> u64 {
        match form {
            PayloadForm::Raw => self.slice_bytes(slice),
            PayloadForm::Encoded => {
                let Some(encoding) = self.codec(slice) else {
                    unreachable!("{slice} is of a tensor without an encoding");
                };
                let elements = self.slice(slice).length;
                encoding.bytes_max(elements).expect("a plan has the size of each of its slices")
            }
        }
    }

    /// Bytes of the scales of a slice whose codes a ring adds up as integers; none where it does not.
    #[must_use]
    pub fn scale_bytes(&self, slice: SliceId) -> Option<u64> {
        self.codec(slice)?.scale_bytes(self.slice(slice).length)
    }

    /// Numbers that are kept for each value of a tensor of what its encoding loses.
    #[must_use]
    pub fn residual_width(&self, tensor: TensorId) -> usize {
        let encoding = self.tensor(tensor).codec.as_ref();
        encoding.map_or(0, |encoding| encoding.residual_width as usize)
    }

    /// The encoding of the tensor that a slice is part of.
    #[must_use]
    pub fn codec(&self, slice: SliceId) -> Option<&CodecPlan> {
        self.tensor(self.slice(slice).tensor).codec.as_ref()
    }

    /// Whether a frame of this kind may carry a slice as encoded bytes. Step 0 spreads exact values,
    /// and parameters that were updated on a server are exact as well.
    #[must_use]
    pub fn may_be_encoded(&self, kind: FrameKind, slice: SliceId, step: Step) -> bool {
        let carries = match kind {
            FrameKind::Push | FrameKind::RingReduce | FrameKind::RingBroadcast => true,
            FrameKind::RingScale => self.scale_bytes(slice).is_some(),
            FrameKind::Broadcast => self.update == Update::Worker,
            _ => false,
        };
        carries && step.0 > 0 && self.codec(slice).is_some()
    }
}

/// A contribution that waits to be encoded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingEncode {
    pub(crate) slice: SliceId,
    pub(crate) step: Step,
}

/// Contributions to one owner.
#[derive(Debug, Default)]
struct Lane {
    waiting: BTreeMap<OrderKey, PendingEncode>,
    /// Being encoded, or encoded and not yet with the kernel.
    ahead: BTreeSet<OrderKey>,
    /// The entry of this lane in `EncodeQueue::heads`.
    indexed: Option<OrderKey>,
}

/// Contributions to be encoded, and those that are encoded and wait for their sockets.
#[derive(Debug)]
pub(crate) struct EncodeQueue {
    own: Rank,
    /// Slices towards one owner that are encoded ahead. One more goes if it is more urgent than all
    /// of these.
    ahead_max: usize,
    lanes: BTreeMap<Rank, Lane>,
    /// The most urgent contribution of each lane that may be encoded now.
    heads: BTreeSet<(OrderKey, Rank)>,
    unsent: BTreeMap<(SliceId, Step), (OrderKey, Rank, BufferRef)>,
}

impl EncodeQueue {
    pub(crate) fn new(own: Rank, ahead_max: usize) -> EncodeQueue {
        EncodeQueue {
            own,
            ahead_max: ahead_max.max(1),
            lanes: BTreeMap::new(),
            heads: BTreeSet::new(),
            unsent: BTreeMap::new(),
        }
    }

    pub(crate) fn push(&mut self, owner: Rank, key: OrderKey, waiting: PendingEncode) {
        self.lanes.entry(owner).or_default().waiting.insert(key, waiting);
        self.reindex(owner);
    }

    /// The key of the most urgent contribution that may be encoded now.
    pub(crate) fn first(&self) -> Option<OrderKey> {
        self.heads.first().map(|&(key, _)| key)
    }

    /// Takes that contribution.
    pub(crate) fn pop(&mut self) -> Option<(OrderKey, PendingEncode)> {
        let (key, owner) = self.heads.first().copied()?;
        let lane = self.lanes.get_mut(&owner)?;
        let waiting = lane.waiting.remove(&key)?;
        // What stays here waits for the other ranks, not for a socket.
        if owner != self.own {
            lane.ahead.insert(key);
        }
        self.reindex(owner);
        Some((key, waiting))
    }

    /// A contribution is encoded and queued for its owner.
    pub(crate) fn note_encoded(
        &mut self,
        waiting: PendingEncode,
        key: OrderKey,
        owner: Rank,
        buffer: BufferRef,
    ) {
        self.unsent.insert((waiting.slice, waiting.step), (key, owner, buffer));
    }

    /// All of a contribution is with the kernel; returns its buffer.
    pub(crate) fn note_sent(&mut self, slice: SliceId, step: Step) -> Option<BufferRef> {
        let (key, owner, buffer) = self.unsent.remove(&(slice, step))?;
        if let Some(lane) = self.lanes.get_mut(&owner) {
            lane.ahead.remove(&key);
        }
        self.reindex(owner);
        Some(buffer)
    }

    /// What was taken to be encoded goes nowhere.
    pub(crate) fn drop_encoded(&mut self, key: OrderKey, owner: Rank) {
        if let Some(lane) = self.lanes.get_mut(&owner) {
            lane.ahead.remove(&key);
        }
        self.reindex(owner);
    }

    /// Takes back contributions to a step that nobody has begun to encode; their slices.
    pub(crate) fn withdraw(&mut self, step: Step) -> Vec<SliceId> {
        let mut slices = Vec::new();
        let owners: Vec<Rank> = self.lanes.keys().copied().collect();
        for owner in owners {
            if let Some(lane) = self.lanes.get_mut(&owner) {
                lane.waiting.retain(|_, waiting| {
                    let goes = waiting.step == step;
                    if goes {
                        slices.push(waiting.slice);
                    }
                    !goes
                });
            }
            self.reindex(owner);
        }
        slices
    }

    pub(crate) fn clear(&mut self) {
        self.lanes.clear();
        self.heads.clear();
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.unsent.is_empty() && self.lanes.values().all(|lane| lane.waiting.is_empty())
    }

    fn reindex(&mut self, owner: Rank) {
        let Some(lane) = self.lanes.get_mut(&owner) else {
            return;
        };
        let head = lane.waiting.first_key_value().map(|(&key, _)| key).filter(|key| {
            let free = lane.ahead.len() < self.ahead_max;
            let urgent = lane.ahead.first().is_none_or(|first| key < first);
            free || (urgent && lane.ahead.len() == self.ahead_max)
        });
        if head == lane.indexed {
            return;
        }
        if let Some(old) = core::mem::replace(&mut lane.indexed, head) {
            self.heads.remove(&(old, owner));
        }
        if let Some(key) = head {
            self.heads.insert((key, owner));
        }
    }
}

impl Engine {
    /// In this step this rank's contributions travel as they are, whatever the plan says. All ranks
    /// have to do the same before they contribute: a session whose ranks do not fails.
    ///
    /// # Errors
    /// For another step than the current one, after a contribution, or in an ended session.
    pub(crate) fn send_raw(&mut self, step: Step) -> Result<(), crate::error::UsageError> {
        use crate::error::UsageError;
        self.check_step("send_raw", step)?;
        if self.worker.has_contributed() {
            let text = "send_raw comes before the step's first contribution";
            return Err(UsageError::Argument(text.into()));
        }
        self.worker.raw = true;
        Ok(())
    }

    /// In which form this rank's contribution to a slice travels in the current step.
    pub(crate) fn own_form(&self, slice: SliceId) -> PayloadForm {
        let step = self.worker.step;
        let encoded = self.plan.may_be_encoded(FrameKind::Push, slice, step) && !self.worker.raw;
        if encoded {
            PayloadForm::Encoded
        } else {
            PayloadForm::Raw
        }
    }

    /// In which form a slice's result comes in the current step, as far as that is known.
    pub(crate) fn result_form(&self, slice: SliceId) -> PayloadForm {
        let state = self.worker.slice(slice);
        let may = self.plan.may_be_encoded(FrameKind::Broadcast, slice, self.worker.step);
        if state.received_bytes > 0 || !may || self.worker.raw {
            state.form
        } else {
            PayloadForm::Encoded
        }
    }

    /// A contribution that is to be encoded takes its turn.
    pub(crate) fn start_encode(&mut self, key: OrderKey, waiting: PendingEncode) -> Job {
        let PendingEncode { slice, step } = waiting;
        let output = self.buffers.acquire(self.plan.bytes_as(slice, PayloadForm::Encoded));
        let input = self.gradient_region(slice);
        let operation = Operation::Encode { input, output: output.whole() };
        self.hand_out(slice, step, operation, Running::Encode { waiting, key, output })
    }

    /// A contribution is encoded: from now on its gradient memory may be written.
    pub(crate) fn encoded(&mut self, waiting: PendingEncode, key: OrderKey, output: BufferRef) {
        let PendingEncode { slice, step } = waiting;
        if self.uses_ring(slice) {
            self.encoded_round(waiting, key, output);
            return;
        }
        let owner = self.plan.slice(slice).owner;
        let priority = self.priorities.priority(step, self.plan.slice(slice).tensor);
        self.worker.slice_mut(slice).push_sent = true;
        if !self.contributes(self.rank(), step) {
            // The step has gone on without this rank in the meantime.
            self.encodes.drop_encoded(key, owner);
            self.buffers.release(output, &mut self.events);
        } else if owner == self.rank() {
            self.add_part(slice, owner, Contribution::Encoded(output), priority);
        } else {
            self.encodes.note_encoded(waiting, key, owner, output);
            let mut header = self.slice_header(FrameKind::Push, step, slice, priority);
            header.form = PayloadForm::Encoded;
            let body = Body::Region(output.whole());
            self.scheduler.push(owner, key, Message { header, body });
        }
        self.install_if_open(slice);
    }

    /// The last frame of a contribution is with the kernel.
    pub(crate) fn contribution_sent(&mut self, slice: SliceId, step: Step) {
        match self.encodes.note_sent(slice, step) {
            Some(buffer) => self.buffers.release(buffer, &mut self.events),
            None => {
                self.worker.slice_mut(slice).push_sent = true;
                self.install_if_open(slice);
            }
        }
    }
}

#[cfg(test)]
#[path = "encoding_tests.rs"]
mod tests;
