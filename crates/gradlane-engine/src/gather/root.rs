//! Gather to a root: every rank's block goes to one rank, the tensor's root, which returns one block to all
//! (Project Adam, Chilimbi et al., OSDI 2014, section 4.3: factors to the server, the whole matrix
//! back). The application makes the result; without a block there is none.
//!
//! The tensor is ready where the result is: on the root once it has left, elsewhere once it is here.
//! Until then no rank gives a block of the next step, so a root hears of two steps at most.

use super::blocks::{Block, RootResult};
use super::{all_done, Gather};
use crate::api::{Event, Memory, Region, UsageError};
use crate::cx::Cx;
use alloc::format;
use alloc::vec::Vec;
use gradlane_units::{Rank, Step, TensorId};

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
    pub(super) fn complete_root(&mut self, cx: &mut Cx, tensor: TensorId, step: Step, root: Rank) {
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
