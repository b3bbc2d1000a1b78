//! The context that components work in: the plan, and what they may do outside their own state. Its fields are private:
//! a component asks (`worker`, `priority`) or does (`send`, `queue_job`, `slice_done`), and reaches no other one.

mod checks;
mod jobs;
mod memory;
mod messages;
mod results;
mod squares;

pub(crate) use jobs::Next;

use crate::api::{EngineOptions, Event};
use crate::buffers::BufferTable;
use crate::gradient_norm::Squares;
use crate::jobs::JobQueue;
use crate::kept_results::KeptResults;
use crate::plan::Plan;
use crate::rank_set::RankSet;
use crate::transmit::{EncodeQueue, OrderKeys, PriorityTable, Scheduler};
use crate::worker::Worker;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, SliceId, Step};
use gradlane_wire::{FrameHeader, FrameKind, MAX_FRAME_BYTES};

#[derive(Debug)]
pub(crate) struct Cx {
    plan: Arc<Plan>,
    rank: Rank,
    generation: u32,
    priorities: PriorityTable,
    keys: OrderKeys,
    tx: Scheduler,
    encodes: EncodeQueue,
    jobs: JobQueue,
    buffers: BufferTable,
    events: VecDeque<Event>,
    worker: Worker,
    squares: Squares,
    /// The last results, where training goes on without lost ranks.
    kept: KeptResults,
    /// Slices of the current step that have a result since ranks were lost, and the rank that it comes from. They are
    /// not contributed to again.
    sources: BTreeMap<SliceId, Rank>,
    /// Why a component cannot go on: the session ends.
    abort: Option<String>,
}

impl Cx {
    pub(crate) fn new(options: &EngineOptions, plan: Arc<Plan>) -> Cx {
        let rank = options.rank;
        let frame_bytes = options.frame_bytes.clamp(1, MAX_FRAME_BYTES);
        let keeps = options.going_on.is_some();
        Cx {
            rank,
            generation: options.generation,
            priorities: PriorityTable::new(plan.tensors.len()),
            keys: OrderKeys::new(plan.strategy.order),
            tx: Scheduler::new(rank, plan.world_size, frame_bytes, options.credit_bytes),
            encodes: EncodeQueue::new(rank, options.encoded_ahead),
            jobs: JobQueue::new(options.job_depth.max(1)),
            buffers: BufferTable::default(),
            events: VecDeque::new(),
            worker: Worker::new(&plan),
            squares: Squares::default(),
            kept: if keeps { KeptResults::new(&plan) } else { KeptResults::default() },
            sources: BTreeMap::new(),
            abort: None,
            plan,
        }
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    /// This rank's step, submissions and results, to be read.
    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }

    /// This rank's current step.
    pub(crate) fn step(&self) -> Step {
        self.worker.step()
    }

    pub(crate) fn priorities(&self) -> &PriorityTable {
        &self.priorities
    }

    /// Whether this rank trains nothing.
    pub(crate) fn is_dedicated_server(&self) -> bool {
        !self.plan.trains(self.rank)
    }

    /// All other ranks.
    pub(crate) fn others(&self) -> RankSet {
        RankSet::all_but(self.plan.world_size, self.rank).without(&self.plan.lost)
    }

    /// Tells the driver something.
    pub(crate) fn tell(&mut self, event: Event) {
        self.events.push_back(event);
    }

    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        if let Event::BufferFree(buffer) = event {
            self.buffers.recycle(buffer);
        }
        Some(event)
    }

    /// Asks for the end of the session; the first reason counts.
    pub(crate) fn abort(&mut self, reason: String) {
        self.abort.get_or_insert(reason);
    }

    pub(crate) fn take_abort(&mut self) -> Option<String> {
        self.abort.take()
    }

    /// "Push of slice 7 of "fc.weight" in step 3".
    pub(crate) fn describe(&self, header: &FrameHeader) -> String {
        let name = self.plan.tensors.get(header.tensor.index()).map(|it| it.spec.name.as_str());
        let SliceId(slice) = header.slice;
        let name = name.unwrap_or("an unknown tensor");
        format!("{:?} of slice {slice} of {name:?} in {}", header.kind, header.step)
    }
}

/// Priorities.
impl Cx {
    /// Priority of a slice's tensor in a step.
    pub(crate) fn priority(&self, step: Step, slice: SliceId) -> Priority {
        self.priorities.priority(step, self.plan.slice(slice).tensor)
    }

    /// A step begins: the priorities that are in force from it on take effect.
    pub(crate) fn enter_priorities(&mut self, step: Step) {
        if let Some(version) = self.priorities.enter(step) {
            self.events.push_back(Event::PlanSwitched { version, step });
        }
    }

    /// Priorities that are in force from a step on; their version.
    pub(crate) fn add_priorities(&mut self, from: Step, priorities: Vec<Priority>) -> u32 {
        self.priorities.add(from, priorities)
    }

    pub(crate) fn forget_priorities_after(&mut self, version: u32) {
        self.priorities.forget_after(version);
    }

    /// Goes on as if step 0 were complete, with these priorities.
    pub(crate) fn skip_initial(&mut self, priorities: Vec<Priority>) {
        self.priorities = PriorityTable::with(priorities);
        self.worker.skip_initial();
    }

    #[cfg(test)]
    pub(crate) fn priorities_mut(&mut self) -> &mut PriorityTable {
        &mut self.priorities
    }
}

/// Ranks are lost.
impl Cx {
    /// Which rank a frame about a slice's result comes from: its owner, or one that has the result since
    /// ranks were lost.
    pub(crate) fn sender_of(&self, header: &FrameHeader) -> Rank {
        let source = self.sources.get(&header.slice).filter(|_| header.step == self.step());
        match source {
            Some(&rank) if header.kind == FrameKind::Broadcast => rank,
            _ => self.plan.slice(header.slice).owner,
        }
    }

    /// Whether a slice has a result since ranks were lost.
    pub(crate) fn has_source(&self, slice: SliceId) -> bool {
        self.sources.contains_key(&slice)
    }

    /// Drops what is queued, and hands out control messages alone until [`Cx::resume`].
    pub(crate) fn suspend(&mut self) {
        self.tx.clear_slices();
        self.tx.hold_slices(true);
        self.encodes.clear();
    }

    pub(crate) fn resume(&mut self) {
        self.tx.hold_slices(false);
    }

    /// Nothing is queued for a peer any more, and nothing that was handed out for it is read.
    pub(crate) fn forget_peer(&mut self, peer: Rank) {
        self.tx.forget(peer);
    }

    /// Whether nothing is added up, copied or written, or read for one of these ranks.
    pub(crate) fn is_quiet(&self, members: &RankSet) -> bool {
        let is_quiet = |rank| rank == self.rank || self.tx.reads_nothing(rank);
        self.jobs.is_idle() && members.iter().all(is_quiet)
    }

    /// Goes on with a plan for other members. Only what this rank has submitted of its step is left, the results that
    /// are kept, and contributions that cannot be made again.
    pub(crate) fn restart(&mut self, plan: Arc<Plan>, sources: BTreeMap<SliceId, Rank>) {
        self.plan = plan;
        self.sources = sources;
        self.tx.clear_slices();
        self.encodes.restart();
        self.worker.restart();
        self.buffers.free_all_but(&self.kept.buffers(), &mut self.events);
    }
}
