//! Blocks: in each step every rank gives a block to every other (all-gather), and each has all blocks, in
//! rank order, until it releases them. Nothing is added: the application gives blocks their meaning
//! (factors of gradients, rows of sparse ones).
//!
//! A block's size is known when it is given; the plan bounds it. It travels in the plan's slices, by
//! priority, and lands in one buffer, which is as large as the block: each frame says how large that
//! is. The blocks of the step after this one may come before this one is complete, and blocks
//! that are not released may be read while later steps go on.
//!
//! Where a tensor has a root, blocks go to that rank alone, and it sends one back.

use crate::aggregator::Aggregator;
use crate::api::{violation, BufferRef, Event, Memory, PayloadDest, Region, UsageError, Validated};
use crate::cx::Cx;
use crate::plan::Plan;
use crate::rank_set::RankSet;
use crate::transmit::{Body, Message, OrderKey, PendingEncode};
use crate::worker::Submission;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;
use gradlane_units::{Rank, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

/// All blocks on this rank.
#[derive(Debug, Default)]
pub(crate) struct Gather {
    under_way: BTreeMap<(TensorId, Step), Blocks>,
    /// Blocks of other ranks that are complete and not released.
    held: BTreeMap<(TensorId, Step), Vec<BufferRef>>,
}

impl Gather {
    fn of(&self, tensor: TensorId, step: Step) -> Option<&Blocks> {
        self.under_way.get(&(tensor, step))
    }

    fn entry(&mut self, tensor: TensorId, step: Step) -> &mut Blocks {
        self.under_way.entry((tensor, step)).or_default()
    }

    /// This rank's block of a tensor has this many bytes; it is sent when the tensor is contributed.
    pub(crate) fn set_own(&mut self, tensor: TensorId, step: Step, bytes: u64) {
        self.entry(tensor, step).own_bytes = Some(bytes);
    }

    /// The blocks of a tensor in a step are no longer read.
    pub(crate) fn release(
        &mut self,
        cx: &mut Cx,
        tensor: TensorId,
        step: Step,
    ) -> Result<(), UsageError> {
        let Some(buffers) = self.held.remove(&(tensor, step)) else {
            let what = format!("there are no blocks of {tensor} in {step} to be released");
            return Err(UsageError::Argument(what));
        };
        buffers.into_iter().for_each(|buffer| cx.release(buffer));
        Ok(())
    }

    /// Queues a block of this many bytes, or word that there is none, for some ranks.
    fn send(
        &mut self,
        cx: &mut Cx,
        tensor: TensorId,
        step: Step,
        receivers: &RankSet,
        block: Option<u64>,
    ) {
        if receivers.is_empty() {
            return;
        }
        let bytes = block.unwrap_or(0);
        let priority = cx.priorities().priority(step, tensor);
        for (part, slice) in cx.plan().slices_of(tensor).enumerate() {
            let start = cx.plan().slice_start_bytes(slice);
            let end = bytes.min(start + cx.plan().slice_bytes(slice));
            if start >= end && part > 0 {
                break;
            }
            let mut header = cx.slice_header(FrameKind::Block, step, slice, priority);
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
            let key = cx.slice_key(step, priority, slice);
            cx.send_shared(receivers.clone(), key, Message { header, body });
            self.entry(tensor, step).unsent += receivers.len();
        }
    }

    /// Once all blocks are here and this rank's own has left, tells of them.
    fn complete(&mut self, cx: &mut Cx, tensor: TensorId, step: Step) {
        if let Some(root) = cx.plan().root(tensor) {
            return self.complete_root(cx, tensor, step, root);
        }
        let (ranks, others) = (cx.plan().workers(), cx.plan().workers() as usize - 1);
        let complete = |it: &Blocks| it.is_queued && it.unsent == 0 && it.here() == others;
        if !self.of(tensor, step).is_some_and(complete) {
            return;
        }
        if let Some(all) = self.under_way.remove(&(tensor, step)) {
            let blocks = all.regions(tensor, cx.rank(), ranks);
            self.ready(cx, tensor, step, blocks, all.buffers());
        }
    }

    /// A tensor of blocks is ready; the application releases their buffers.
    fn ready(
        &mut self,
        cx: &mut Cx,
        tensor: TensorId,
        step: Step,
        blocks: Vec<Option<Region>>,
        buffers: Vec<BufferRef>,
    ) {
        self.held.insert((tensor, step), buffers);
        let has_value = blocks.iter().any(Option::is_some);
        cx.tell(Event::BlocksReady { tensor, step, blocks });
        all_done(cx, tensor, has_value);
    }
}

/// All slices of a tensor are done.
fn all_done(cx: &mut Cx, tensor: TensorId, has_value: bool) {
    for slice in cx.plan().slices_of(tensor) {
        cx.slice_done(slice, has_value);
    }
}

/// Checks that a tensor may have a block of this many bytes.
pub(crate) fn check_bytes(plan: &Plan, tensor: TensorId, bytes: u64) -> Result<(), UsageError> {
    let planned = plan.tensor(tensor);
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

impl Aggregator for Gather {
    fn takes(&self, kind: FrameKind) -> bool {
        kind == FrameKind::Block
    }

    /// This rank's block is there, or it has none: the others get it, or the root.
    fn contribute(&mut self, cx: &mut Cx, tensor: TensorId) {
        let step = cx.step();
        let absent = cx.worker().submission(tensor) == Submission::Absent;
        let blocks = self.entry(tensor, step);
        blocks.is_queued = true;
        let bytes = blocks.own_bytes.filter(|_| !absent);
        let mut receivers = cx.plan().workers_but(cx.rank());
        if let Some(root) = cx.plan().root(tensor) {
            receivers = RankSet::empty(cx.plan().workers());
            if root != cx.rank() {
                receivers.insert(root);
            }
        }
        self.send(cx, tensor, step, &receivers, bytes);
        self.complete(cx, tensor, step);
    }

    fn check(&self, cx: &Cx, from: Rank, header: &FrameHeader) -> Validated<()> {
        let what = || cx.describe(header);
        if from == cx.rank() {
            return violation(format!("{} from this rank itself", what()));
        }
        let root = cx.plan().root(header.tensor);
        if let Some(root) = root.filter(|&root| root != cx.rank() && root != from) {
            return violation(format!("{}, but {root} is its root", what()));
        }
        let current = cx.step();
        if header.step != current && header.step != current.next() {
            return violation(format!("{}, but this rank is in {current}", what()));
        }
        if header.form != PayloadForm::Raw {
            return violation(format!("{} as encoded bytes", what()));
        }
        let is_current = header.step == current;
        let submitted = cx.worker().submission(header.tensor) != Submission::Missing;
        if root == Some(from) && !(is_current && submitted) {
            return violation(format!("{} as a result without a block of this rank", what()));
        }
        let known = self.of(header.tensor, header.step).and_then(|it| it.of.get(&from));
        let (arrived, size) = match known {
            None => (0, u64::from(header.block_bytes)),
            Some(Block::Arriving { buffer, received_bytes }) => (*received_bytes, buffer.bytes),
            Some(_) => return violation(format!("{} after the whole block", what())),
        };
        if is_current && !cx.worker().is_pending(header.tensor) {
            return violation(format!("{} after all blocks", what()));
        }
        let spec = &cx.plan().tensor(header.tensor).spec;
        let (element, total) = (spec.dtype.bytes(), u64::from(header.block_bytes));
        if total != size || total > spec.numel * element || !total.is_multiple_of(element) {
            let most = spec.numel * element;
            return violation(format!(
                "{} as part of a block of {total} bytes, after {arrived} of {size}; blocks are at \
                 most {most}",
                what()
            ));
        }
        let start = cx.plan().slice_start_bytes(header.slice);
        let slice_end = total.min(start + cx.plan().slice_bytes(header.slice));
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
        violation(format!(
            "{} with {} bytes at offset {} after {arrived} of {total}, last: {last}",
            what(),
            header.length,
            header.offset
        ))
    }

    fn land(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader) -> Validated<PayloadDest> {
        if header.length == 0 {
            return Ok(PayloadDest::Nothing);
        }
        let blocks = self.entry(header.tensor, header.step);
        let buffer = match blocks.of.get(&from) {
            Some(Block::Arriving { buffer, .. }) => *buffer,
            _ => {
                let buffer = cx.acquire(u64::from(header.block_bytes));
                blocks.of.insert(from, Block::Arriving { buffer, received_bytes: 0 });
                buffer
            }
        };
        Ok(PayloadDest::Region(buffer.whole().part(header.offset, header.length)))
    }

    fn take(&mut self, cx: &mut Cx, from: Rank, header: &FrameHeader) {
        let blocks = self.entry(header.tensor, header.step);
        let block = match blocks.of.get(&from) {
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
        blocks.of.insert(from, block);
        self.complete(cx, header.tensor, header.step);
    }

    fn read(&mut self, cx: &mut Cx, _to: Rank, header: &FrameHeader) {
        let FrameHeader { tensor, step, .. } = *header;
        if let Some(blocks) = self.under_way.get_mut(&(tensor, step)) {
            blocks.unsent -= 1;
            self.complete(cx, tensor, step);
        }
    }

    fn encoded(&mut self, _: &mut Cx, pending: PendingEncode, _: OrderKey, _: BufferRef) {
        unreachable!("{}: blocks are never encoded", pending.slice)
    }

    /// Ranks whose blocks of the current step are not here.
    fn missing(&self, cx: &Cx) -> RankSet {
        let (step, ranks) = (cx.step(), cx.plan().workers());
        let mut missing = RankSet::empty(ranks);
        for tensor in cx.plan().tensor_ids() {
            let has_blocks = cx.plan().tensor(tensor).scheme.has_blocks();
            let open = cx.plan().takes_part(tensor, step) && cx.worker().is_pending(tensor);
            if !has_blocks || !open {
                continue;
            }
            let blocks = self.of(tensor, step);
            match cx.plan().root(tensor) {
                Some(root) if root != cx.rank() => {
                    missing.insert(root);
                }
                _ => (0..ranks).map(Rank).for_each(|rank| {
                    if !blocks.is_some_and(|it| it.is_here(rank)) {
                        missing.insert(rank);
                    }
                }),
            }
        }
        missing.remove(cx.rank());
        missing
    }
}

// Gather to a root: every rank's block goes to one rank, the tensor's root, which returns one block to all
// (Project Adam, Chilimbi et al., OSDI 2014, section 4.3: factors to the server, the whole matrix
// back). The application makes the result; without a block there is none.
//
// The tensor is ready where the result is: on the root once it has left, elsewhere once it is here.
// Until then no rank gives a block of the next step, so a root hears of two steps at most.

impl Gather {
    /// The application has the root's result.
    pub(crate) fn send_result(
        &mut self,
        cx: &mut Cx,
        tensor: TensorId,
        step: Step,
        bytes: u64,
    ) -> Result<(), UsageError> {
        if self.of(tensor, step).is_none_or(|it| it.result != RootResult::Requested) {
            let name = &cx.plan().tensor(tensor).spec.name;
            let what = format!("no result of this rank is awaited for {name:?} in {step}");
            return Err(UsageError::Argument(what));
        }
        self.broadcast_result(cx, tensor, step, Some(bytes));
        Ok(())
    }

    fn broadcast_result(&mut self, cx: &mut Cx, tensor: TensorId, step: Step, bytes: Option<u64>) {
        let others = cx.plan().workers_but(cx.rank());
        self.entry(tensor, step).result = RootResult::Sent(bytes);
        self.send(cx, tensor, step, &others, bytes);
        self.complete_root(cx, tensor, step, cx.rank());
    }

    /// Requests the result once all blocks are here, and tells of the tensor when the result is.
    fn complete_root(&mut self, cx: &mut Cx, tensor: TensorId, step: Step, root: Rank) {
        let ranks = cx.plan().workers();
        let Some(all) = self.of(tensor, step).filter(|it| it.is_queued) else {
            return;
        };
        if root != cx.rank() {
            let result = all.of.get(&root).copied().filter(Block::is_here);
            if let Some(result) = result.filter(|_| all.unsent == 0) {
                self.take_result(cx, tensor, step, root, result);
            }
            return;
        }
        match all.result {
            RootResult::Collecting => {
                if all.here() + 1 < ranks as usize {
                    return;
                }
                let blocks = all.regions(tensor, cx.rank(), ranks);
                if blocks.iter().all(Option::is_none) {
                    return self.broadcast_result(cx, tensor, step, None);
                }
                let buffers = all.buffers();
                self.entry(tensor, step).result = RootResult::Requested;
                self.held.insert((tensor, step), buffers);
                cx.tell(Event::RootRequest { tensor, step, blocks });
            }
            RootResult::Sent(bytes) if all.unsent == 0 => {
                self.under_way.remove(&(tensor, step));
                all_done(cx, tensor, bytes.is_some());
            }
            RootResult::Requested | RootResult::Sent(_) => {}
        }
    }

    fn take_result(
        &mut self,
        cx: &mut Cx,
        tensor: TensorId,
        step: Step,
        root: Rank,
        result: Block,
    ) {
        self.under_way.remove(&(tensor, step));
        let (region, buffers) = match result {
            Block::Whole(buffer) => (Some(buffer.whole()), Vec::from([buffer])),
            Block::Empty => {
                let memory = Memory::Gradient(tensor);
                (Some(Region { memory, offset: 0, length: 0 }), Vec::new())
            }
            Block::Arriving { .. } | Block::Absent => (None, Vec::new()),
        };
        let ranks = (0..cx.plan().workers()).map(Rank);
        let blocks = ranks.map(|rank| region.filter(|_| rank == root)).collect();
        self.ready(cx, tensor, step, blocks, buffers);
    }
}

// The blocks of one tensor in one step.

/// The block of another rank.
#[derive(Clone, Copy, Debug)]
enum Block {
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
    fn is_here(&self) -> bool {
        !matches!(self, Block::Arriving { .. })
    }
}

/// The blocks of one tensor in one step.
#[derive(Debug, Default)]
struct Blocks {
    of: BTreeMap<Rank, Block>,
    /// Bytes of this rank's own block; none where it has none, or not yet.
    own_bytes: Option<u64>,
    /// Whether this rank's own block, or word that there is none, is on its way.
    is_queued: bool,
    /// Messages of this rank, one a slice and receiver, that are not yet with the kernel.
    unsent: u32,
    /// On the root.
    result: RootResult,
}

impl Blocks {
    /// Number of blocks of other ranks that are here.
    fn here(&self) -> usize {
        self.of.values().filter(|block| block.is_here()).count()
    }

    fn is_here(&self, rank: Rank) -> bool {
        self.of.get(&rank).is_some_and(Block::is_here)
    }

    /// All blocks by rank, as `rank` has them.
    fn regions(&self, tensor: TensorId, rank: Rank, ranks: u32) -> Vec<Option<Region>> {
        let of_this_rank =
            |bytes| Region { memory: Memory::Gradient(tensor), offset: 0, length: bytes };
        let block = |from: Rank| match self.of.get(&from) {
            Some(Block::Whole(buffer)) => Some(buffer.whole()),
            Some(Block::Empty) => Some(of_this_rank(0)),
            Some(_) => None,
            None => self.own_bytes.filter(|_| from == rank).map(of_this_rank),
        };
        (0..ranks).map(Rank).map(block).collect()
    }

    /// Where whole blocks lie.
    fn buffers(&self) -> Vec<BufferRef> {
        let whole = |block: &Block| match block {
            Block::Whole(buffer) => Some(*buffer),
            _ => None,
        };
        self.of.values().filter_map(whole).collect()
    }
}

/// How far the root of a tensor is with its result in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RootResult {
    /// Blocks are missing.
    #[default]
    Collecting,
    /// The application has all blocks.
    Requested,
    /// The result is on its way: this many bytes, or none.
    Sent(Option<u64>),
}
