//! Answers: every rank's block goes to one rank, the tensor's owner, which answers with one block for
//! all (Project Adam, Chilimbi et al., OSDI 2014, section 4.3: factors to the server, the whole
//! matrix back). What an answer is made of is up to the application; without a block there is none.
//!
//! The tensor is ready where the answer is: on the owner once it has left, elsewhere once it is here.
//! Until then no rank gives a block of the next step, so an owner hears of two steps at most.

use crate::engine::Engine;
use crate::error::UsageError;
use crate::gather::Block;
use crate::io::{Event, Memory, Region};
use crate::plan::Plan;
use crate::scheme::Scheme;
use alloc::format;
use alloc::vec::Vec;
use gradlane_units::{Rank, Step, TensorId};

/// How far the owner of a tensor is with its answer in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Blocks are missing.
    #[default]
    Collecting,
    /// The application has all blocks.
    Asked,
    /// It is on its way: so many bytes, or none.
    Given(Option<u64>),
}

impl Plan {
    /// The rank that answers for a tensor; none where every rank gets all blocks, and of tensors
    /// without blocks.
    #[must_use]
    pub fn root(&self, tensor: TensorId) -> Option<Rank> {
        let planned = self.tensor(tensor);
        let first = self.slices.get(planned.slices.start as usize)?;
        (planned.scheme == Scheme::GatherToRoot).then_some(first.owner)
    }
}

impl Engine {
    /// The owner's answer to a tensor's blocks is ready in memory that the driver knows from now on as
    /// `Memory::Gradient`. The engine owns it until the tensor is ready.
    ///
    /// # Errors
    /// Where this rank was not asked in this step (see [`Event::RootRequest`]) or has answered, and
    /// as [`Engine::block_ready`].
    pub(crate) fn root_result_ready(
        &mut self,
        tensor: TensorId,
        step: Step,
        bytes: u64,
    ) -> Result<(), UsageError> {
        self.check_call(tensor, step, "root_result_ready")?;
        self.check_block_bytes(tensor, bytes)?;
        let gathering = self.gather.of(tensor, step);
        if gathering.is_none_or(|it| it.answer != Answer::Asked) {
            let name = &self.plan.tensor(tensor).spec.name;
            let what = format!("nobody waits for an answer of this rank for {name:?} in {step}");
            return Err(UsageError::Argument(what));
        }
        self.lifecycle.progressed();
        self.send_answer(tensor, step, Some(bytes));
        Ok(())
    }

    /// Sends the owner's answer to all.
    fn send_answer(&mut self, tensor: TensorId, step: Step, bytes: Option<u64>) {
        let others = self.plan.workers_but(self.rank());
        self.gather.entry(tensor, step).answer = Answer::Given(bytes);
        self.send_block(tensor, step, &others, bytes);
        self.complete_answer(tensor, step);
    }

    /// Asks the application once all blocks are here, and tells of the tensor when the answer is.
    pub(crate) fn complete_answer(&mut self, tensor: TensorId, step: Step) {
        let Some(owner) = self.plan.root(tensor) else {
            return;
        };
        let workers = self.plan.workers();
        let Some(gathering) = self.gather.of(tensor, step).filter(|it| it.is_queued) else {
            return;
        };
        if owner != self.rank() {
            let answer = gathering.blocks.get(&owner).filter(|block| block.is_here());
            if let Some(&answer) = answer.filter(|_| gathering.unsent == 0) {
                self.take_answer(tensor, step, owner, answer);
            }
            return;
        }
        match gathering.answer {
            Answer::Collecting => {
                let here = gathering.blocks.values().filter(|block| block.is_here()).count();
                if here + 1 < workers as usize {
                    return;
                }
                let blocks = gathering.regions(tensor, self.rank(), workers);
                if blocks.iter().all(Option::is_none) {
                    return self.send_answer(tensor, step, None);
                }
                let buffers = gathering.buffers();
                self.gather.entry(tensor, step).answer = Answer::Asked;
                self.gather.hold(tensor, step, buffers);
                self.events.push_back(Event::RootRequest { tensor, step, blocks });
            }
            Answer::Given(bytes) if gathering.unsent == 0 => {
                self.gather.forget(tensor, step);
                self.blocks_done(tensor, bytes.is_some());
            }
            Answer::Asked | Answer::Given(_) => {}
        }
    }

    fn take_answer(&mut self, tensor: TensorId, step: Step, owner: Rank, answer: Block) {
        self.gather.forget(tensor, step);
        let (region, buffers) = match answer {
            Block::Whole(buffer) => (Some(buffer.whole()), Vec::from([buffer])),
            Block::Empty => (
                Some(Region { memory: Memory::Gradient(tensor), offset: 0, length: 0 }),
                Vec::new(),
            ),
            Block::Arriving { .. } | Block::Absent => (None, Vec::new()),
        };
        self.gather.hold(tensor, step, buffers);
        let ranks = (0..self.plan.workers()).map(Rank);
        let blocks = ranks.map(|rank| region.filter(|_| rank == owner)).collect();
        self.events.push_back(Event::BlocksReady { tensor, step, blocks });
        self.blocks_done(tensor, region.is_some());
    }

    /// Ranks that hold up a tensor that is answered: who owes the owner a block, or the owner.
    pub(crate) fn suspects_answer(&self, tensor: TensorId, owner: Rank) -> Vec<Rank> {
        let gathering = self.gather.of(tensor, self.worker.step);
        if owner != self.rank() {
            return Vec::from([owner]);
        }
        let is_here =
            |rank: Rank| gathering.and_then(|it| it.blocks.get(&rank)).is_some_and(Block::is_here);
        (0..self.plan.workers()).map(Rank).filter(|&rank| !is_here(rank)).collect()
    }
}
