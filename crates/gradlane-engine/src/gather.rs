//! Gather: in each step every rank gives a block to every other, and each has all blocks, in rank
//! order, until it says that it is done with them. Nothing is added: what blocks mean is up to who
//! asked for them (factors of gradients, rows of sparse ones).
//!
//! A block's size is known when it is given; the plan bounds it. It travels in the plan's slices, by
//! priority, and lands in one buffer, which is as large as the block: each frame says how large that
//! is. The blocks of the step after this one may come before this one is complete, and blocks
//! that are not released may be read while later steps go on.
//!
//! Where one rank answers for all (scheme `answer`), blocks go to that rank alone: see `answer`.

use crate::answer::Answer;
use crate::engine::Engine;
use crate::error::UsageError;
use crate::io::{BufferRef, Event, Memory, PayloadDest, Region};
use crate::rank_set::RankSet;
use crate::receive::{range, Validated};
use crate::scheduler::{Body, Message};
use crate::worker::Submission;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;
use gradlane_units::{Rank, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

/// The block of another rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Block {
    Arriving {
        buffer: BufferRef,
        received_bytes: u64,
    },
    Whole(BufferRef),
    /// A block without bytes.
    Empty,
    Absent,
}

impl Block {
    pub(crate) fn is_here(&self) -> bool {
        !matches!(self, Block::Arriving { .. })
    }
}

/// The blocks of one tensor in one step.
#[derive(Debug, Default)]
pub(crate) struct Gathering {
    pub(crate) blocks: BTreeMap<Rank, Block>,
    /// Bytes of this rank's own block; none where it has none, or not yet.
    own_bytes: Option<u64>,
    /// Whether this rank's own block, or that there is none, is on its way.
    pub(crate) is_queued: bool,
    /// Slices of what this rank sends, for each rank, that are not yet with the kernel.
    pub(crate) unsent: u32,
    /// The owner's, where it answers for all.
    pub(crate) answer: Answer,
}

impl Gathering {
    /// All blocks by rank, as `rank` has them.
    pub(crate) fn regions(
        &self,
        tensor: TensorId,
        rank: Rank,
        world_size: u32,
    ) -> Vec<Option<Region>> {
        let of_this_rank =
            |bytes| Region { memory: Memory::Gradient(tensor), offset: 0, length: bytes };
        let block = |from: Rank| match self.blocks.get(&from) {
            Some(Block::Whole(buffer)) => Some(buffer.whole()),
            Some(Block::Empty) => Some(of_this_rank(0)),
            Some(_) => None,
            None => self.own_bytes.filter(|_| from == rank).map(of_this_rank),
        };
        (0..world_size).map(Rank).map(block).collect()
    }

    /// Where whole blocks lie.
    pub(crate) fn buffers(&self) -> Vec<BufferRef> {
        let whole = |block: &Block| match block {
            Block::Whole(buffer) => Some(*buffer),
            _ => None,
        };
        self.blocks.values().filter_map(whole).collect()
    }
}

/// All blocks on this rank.
#[derive(Debug, Default)]
pub(crate) struct Gather {
    under_way: BTreeMap<(TensorId, Step), Gathering>,
    /// Blocks of others that are complete and not released.
    held: BTreeMap<(TensorId, Step), Vec<BufferRef>>,
}

impl Gather {
    pub(crate) fn of(&self, tensor: TensorId, step: Step) -> Option<&Gathering> {
        self.under_way.get(&(tensor, step))
    }

    pub(crate) fn entry(&mut self, tensor: TensorId, step: Step) -> &mut Gathering {
        self.under_way.entry((tensor, step)).or_default()
    }

    pub(crate) fn forget(&mut self, tensor: TensorId, step: Step) -> Option<Gathering> {
        self.under_way.remove(&(tensor, step))
    }

    /// Keeps buffers until the application releases them.
    pub(crate) fn hold(&mut self, tensor: TensorId, step: Step, buffers: Vec<BufferRef>) {
        self.held.insert((tensor, step), buffers);
    }
}

impl Engine {
    /// This rank's block of a tensor is ready in memory that the driver knows as
    /// `Memory::Gradient`, and is so many bytes. The engine owns that memory until the tensor is ready.
    ///
    /// # Errors
    /// As [`Engine::gradient_ready`], for a tensor of another scheme, and for a size that is over the
    /// plan's or no whole number of elements.
    pub(crate) fn block_ready(
        &mut self,
        tensor: TensorId,
        step: Step,
        bytes: u64,
    ) -> Result<(), UsageError> {
        self.check_call(tensor, step, "block_ready")?;
        self.check_block_bytes(tensor, bytes)?;
        if self.worker.tensor(tensor).submission == Submission::Missing {
            self.gather.entry(tensor, step).own_bytes = Some(bytes);
        }
        self.contribute(tensor, step, Submission::Gradient, "block_ready")
    }

    /// Whether a tensor may have a block of so many bytes.
    pub(crate) fn check_block_bytes(&self, tensor: TensorId, bytes: u64) -> Result<(), UsageError> {
        let planned = self.plan.tensor(tensor);
        let (name, element) = (&planned.spec.name, planned.spec.dtype.bytes());
        let most = planned.spec.numel * element;
        if !planned.scheme.has_blocks() {
            let message = format!("tensor {name:?} has no blocks: use gradient_ready");
            return Err(UsageError::Argument(message));
        }
        if bytes > most || !bytes.is_multiple_of(element) {
            return Err(UsageError::Argument(format!(
                "a block of {bytes} bytes for tensor {name:?}, whose blocks are at most {most} bytes \
                 in elements of {element}"
            )));
        }
        Ok(())
    }

    /// The consumer is done with the blocks of a tensor in a step.
    ///
    /// # Errors
    /// When there are none, or they were released before.
    pub(crate) fn release_blocks(
        &mut self,
        tensor: TensorId,
        step: Step,
    ) -> Result<(), UsageError> {
        let Some(buffers) = self.gather.held.remove(&(tensor, step)) else {
            let what = format!("there are no blocks of {tensor} in {step} to be released");
            return Err(UsageError::Argument(what));
        };
        for buffer in buffers {
            self.buffers.release(buffer, &mut self.events);
        }
        Ok(())
    }

    /// This rank's block is there, or it has none: the others get it, or who answers for it.
    pub(crate) fn contribute_block(&mut self, tensor: TensorId) {
        let step = self.worker.step;
        let absent = self.worker.tensor(tensor).submission == Submission::Absent;
        let gathering = self.gather.entry(tensor, step);
        gathering.is_queued = true;
        let bytes = gathering.own_bytes.filter(|_| !absent);
        let mut receivers = self.plan.workers_but(self.rank());
        if let Some(owner) = self.plan.root(tensor) {
            receivers = RankSet::empty(self.plan.workers());
            if owner != self.rank() {
                receivers.insert(owner);
            }
        }
        self.send_block(tensor, step, &receivers, bytes);
        self.complete_blocks(tensor, step);
    }

    /// Queues a block of so many bytes, or that there is none, for some ranks.
    pub(crate) fn send_block(
        &mut self,
        tensor: TensorId,
        step: Step,
        receivers: &RankSet,
        block: Option<u64>,
    ) {
        if receivers.is_empty() {
            return;
        }
        let bytes = block.unwrap_or(0);
        let priority = self.priorities.priority(step, tensor);
        for (part, slice) in self.plan.slices_of(tensor).enumerate() {
            let start = self.plan.slice_start_bytes(slice);
            let end = bytes.min(start + self.plan.slice_bytes(slice));
            if start >= end && part > 0 {
                break;
            }
            let mut header = self.slice_header(FrameKind::Block, step, slice, priority);
            header.offset = start;
            // The plan's bound is below 2^32.
            header.block_bytes = bytes as u32;
            if block.is_none() {
                header.flags = FrameFlags::ABSENT;
            }
            let memory = Memory::Gradient(tensor);
            let body = match end - start {
                0 => Body::Empty,
                length => Body::Region(Region { memory, offset: start, length }),
            };
            let key = self.slice_key(step, priority, slice);
            self.scheduler.push_shared(receivers.clone(), key, Message { header, body });
            self.gather.entry(tensor, step).unsent += receivers.len();
        }
    }

    /// The last frame of a slice of this rank's block is with the kernel.
    pub(crate) fn sent_block(&mut self, tensor: TensorId, step: Step) {
        if let Some(gathering) = self.gather.under_way.get_mut(&(tensor, step)) {
            gathering.unsent -= 1;
            self.complete_blocks(tensor, step);
        }
    }

    /// What a frame of a block must satisfy.
    pub(crate) fn check_block(&self, from: Rank, header: &FrameHeader) -> Validated<()> {
        let what = || self.describe(header);
        let current = self.worker.step;
        if header.step != current && header.step != current.next() {
            return Err(format!("{}, but this rank is in {current}", what()));
        }
        if header.form != PayloadForm::Raw {
            return Err(format!("{} as encoded bytes", what()));
        }
        let answers = self.plan.root(header.tensor).is_some_and(|owner| owner == from);
        let state = self.worker.tensor(header.tensor);
        if answers && (header.step != current || state.submission == Submission::Missing) {
            return Err(format!("{} as an answer without a block of this rank", what()));
        }
        let key = (header.tensor, header.step);
        let complete = header.step == current && self.worker.tensor(header.tensor).pending == 0;
        let known = self.gather.under_way.get(&key).and_then(|it| it.blocks.get(&from));
        let (arrived, size) = match known {
            None => (0, u64::from(header.block_bytes)),
            Some(Block::Arriving { buffer, received_bytes }) => (*received_bytes, buffer.bytes),
            Some(_) => return Err(format!("{} after the whole block", what())),
        };
        if complete {
            return Err(format!("{} after all blocks", what()));
        }
        let spec = &self.plan.tensor(header.tensor).spec;
        let (element, total) = (spec.dtype.bytes(), u64::from(header.block_bytes));
        if total != size || total > spec.numel * element || !total.is_multiple_of(element) {
            let most = spec.numel * element;
            return Err(format!(
                "{} as part of a block of {total} bytes, after {arrived} of {size}; blocks are at \
                 most {most}",
                what()
            ));
        }
        let start = self.plan.slice_start_bytes(header.slice);
        let slice_end = total.min(start + self.plan.slice_bytes(header.slice));
        let end = header.offset.saturating_add(u64::from(header.length));
        let is_empty = total == 0 && start == 0 && header.length == 0;
        let inside = header.offset >= start && end <= slice_end && header.length > 0;
        let last = header.flags.contains(FrameFlags::LAST);
        let absent = header.flags.contains(FrameFlags::ABSENT);
        let fits = header.offset == arrived
            && (is_empty || inside)
            && last == (end == slice_end)
            && (total == 0 || !absent);
        if fits {
            return Ok(());
        }
        Err(format!(
            "{} with {} bytes at offset {} after {arrived} of {total}, last: {last}",
            what(),
            header.length,
            header.offset
        ))
    }

    pub(crate) fn land_block(&mut self, from: Rank, header: &FrameHeader) -> PayloadDest {
        if header.length == 0 {
            return PayloadDest::Nothing;
        }
        let gathering = self.gather.under_way.entry((header.tensor, header.step)).or_default();
        let buffer = match gathering.blocks.get(&from) {
            Some(Block::Arriving { buffer, .. }) => *buffer,
            _ => {
                let buffer = self.buffers.acquire(u64::from(header.block_bytes));
                gathering.blocks.insert(from, Block::Arriving { buffer, received_bytes: 0 });
                buffer
            }
        };
        PayloadDest::Region(range(Memory::Buffer(buffer), header.offset, header.length))
    }

    pub(crate) fn take_block(&mut self, from: Rank, header: &FrameHeader) {
        let gathering = self.gather.under_way.entry((header.tensor, header.step)).or_default();
        let block = match gathering.blocks.get(&from) {
            Some(&Block::Arriving { buffer, received_bytes }) => {
                let received_bytes = received_bytes + u64::from(header.length);
                if received_bytes < buffer.bytes {
                    Block::Arriving { buffer, received_bytes }
                } else {
                    Block::Whole(buffer)
                }
            }
            _ if header.flags.contains(FrameFlags::ABSENT) => Block::Absent,
            _ => Block::Empty,
        };
        gathering.blocks.insert(from, block);
        self.complete_blocks(header.tensor, header.step);
    }

    /// Once all blocks are here and this rank's own has left, tells of them.
    fn complete_blocks(&mut self, tensor: TensorId, step: Step) {
        if self.plan.root(tensor).is_some() {
            return self.complete_answer(tensor, step);
        }
        let others = self.plan.workers() as usize - 1;
        let complete = self.gather.of(tensor, step).is_some_and(|it| {
            let here = it.blocks.values().filter(|block| block.is_here()).count();
            it.is_queued && it.unsent == 0 && here == others
        });
        if !complete {
            return;
        }
        let Some(gathering) = self.gather.forget(tensor, step) else {
            return;
        };
        let blocks = gathering.regions(tensor, self.rank(), self.plan.workers());
        self.gather.hold(tensor, step, gathering.buffers());
        let has_value = blocks.iter().any(Option::is_some);
        self.events.push_back(Event::BlocksReady { tensor, step, blocks });
        self.blocks_done(tensor, has_value);
    }

    /// A tensor of blocks is ready.
    pub(crate) fn blocks_done(&mut self, tensor: TensorId, has_value: bool) {
        for slice in self.plan.slices_of(tensor) {
            self.slice_done(slice, has_value);
        }
    }

    /// Ranks whose blocks of the current step are not here.
    pub(crate) fn suspects_blocks(&self) -> Vec<Rank> {
        let step = self.worker.step;
        let tensors = (0..self.plan.tensors.len() as u32).map(TensorId);
        let open = tensors.filter(|&tensor| {
            self.plan.tensor(tensor).scheme.has_blocks()
                && self.plan.takes_part(tensor, step)
                && self.worker.tensor(tensor).pending > 0
        });
        let mut missing = RankSet::empty(self.plan.workers());
        for tensor in open {
            if let Some(owner) = self.plan.root(tensor) {
                let ranks = self.suspects_answer(tensor, owner);
                ranks.into_iter().filter(|&rank| rank != self.rank()).for_each(|rank| {
                    missing.insert(rank);
                });
                continue;
            }
            let gathering = self.gather.under_way.get(&(tensor, step));
            let is_here = |rank: &Rank| {
                gathering.and_then(|it| it.blocks.get(rank)).is_some_and(Block::is_here)
            };
            let ranks = (0..self.plan.workers()).map(Rank);
            for rank in ranks.filter(|rank| *rank != self.rank() && !is_here(rank)) {
                missing.insert(rank);
            }
        }
        missing.iter().collect()
    }
}
