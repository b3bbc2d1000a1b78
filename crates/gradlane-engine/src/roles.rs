//! Roles of ranks: who trains, who owns slices. Mostly every rank does both. Where servers are dedicated,
//! the ranks after those that train only serve: they collect, reduce and answer, give no gradient,
//! begin no step, and leave when the ranks that train have left.
//!
//! A server that is dedicated needs no worker's state: what it collects says which step it is in.

use crate::engine::Engine;
use crate::error::{Outstanding, PlanError};
use crate::io::Event;
use crate::plan::{Plan, TensorSetting, Update};
use crate::rank_set::RankSet;
use crate::server::OwnedSlice;
use crate::strategy::Strategy;
use alloc::format;
use alloc::vec::Vec;
use core::time::Duration;
use gradlane_units::{Rank, Step, TensorId};
use gradlane_wire::{FrameKind, PayloadForm};

/// How many ranks train, how many own slices, and whether these are the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roles {
    /// Ranks that train: the first ones.
    pub workers: u32,
    /// Ranks that own slices: the first ones, or those after the workers.
    pub servers: u32,
    /// Whether servers train nothing.
    pub dedicated: bool,
}

impl Roles {
    /// All ranks train and own slices.
    #[must_use]
    pub const fn shared(world_size: u32) -> Roles {
        Roles { workers: world_size, servers: world_size, dedicated: false }
    }

    /// All ranks train, and the first so many own slices.
    #[must_use]
    pub const fn first(world_size: u32, servers: u32) -> Roles {
        Roles { workers: world_size, servers, dedicated: false }
    }

    /// The first so many ranks train; so many after them own the slices, and only serve.
    #[must_use]
    pub const fn dedicated(workers: u32, servers: u32) -> Roles {
        Roles { workers, servers, dedicated: true }
    }

    /// How many ranks there are.
    #[must_use]
    pub const fn world_size(self) -> u32 {
        if self.dedicated {
            self.workers.saturating_add(self.servers)
        } else {
            self.workers
        }
    }

    /// How many ranks only serve.
    pub(crate) fn dedicated_servers(self) -> u32 {
        self.world_size() - self.workers
    }

    /// The rank of a server, by its number.
    pub(crate) fn server(self, number: Rank) -> Rank {
        Rank(number.0 + self.dedicated_servers().min(1) * self.workers)
    }

    /// Checks that there is somebody for either role.
    pub(crate) fn check(self) -> Result<(), PlanError> {
        let Roles { workers, servers, dedicated } = self;
        if workers == 0 {
            let what = "world_size is 0: a plan needs at least one rank that trains";
            return Err(PlanError::new(what));
        }
        if dedicated && workers.checked_add(servers).is_none() {
            return Err(PlanError::new("more than 2^32 ranks"));
        }
        if servers == 0 || (!dedicated && servers > workers) {
            return Err(PlanError::new(format!(
                "{servers} servers of {workers} ranks: slices need at least one, and each is a rank"
            )));
        }
        Ok(())
    }
}

impl Plan {
    /// Cuts tensors into slices and places them by the strategy's rules, as [`Plan::build_on`] does;
    /// every rank is a server.
    ///
    /// # Errors
    /// As [`Plan::build_on`].
    pub fn build<Tensor: Into<TensorSetting>>(
        tensors: Vec<Tensor>,
        strategy: Strategy,
        update: Update,
        world_size: u32,
    ) -> Result<Plan, PlanError> {
        Plan::build_on(tensors, strategy, update, world_size, world_size)
    }

    /// As [`Plan::build_for`], on the first `servers` ranks.
    ///
    /// # Errors
    /// As [`Plan::build_for`].
    pub fn build_on<Tensor: Into<TensorSetting>>(
        tensors: Vec<Tensor>,
        strategy: Strategy,
        update: Update,
        world_size: u32,
        servers: u32,
    ) -> Result<Plan, PlanError> {
        Plan::build_for(tensors, strategy, update, Roles::first(world_size, servers))
    }

    /// How many ranks train: all but those that only serve.
    #[must_use]
    pub fn workers(&self) -> u32 {
        self.world_size.saturating_sub(self.dedicated_servers)
    }

    /// Whether a rank trains.
    #[must_use]
    pub fn trains(&self, rank: Rank) -> bool {
        rank.0 < self.workers()
    }

    /// Ranks that train, but this one.
    pub(crate) fn workers_but(&self, rank: Rank) -> RankSet {
        RankSet::all_but(self.workers(), rank)
    }
}

impl Engine {
    /// Whether this rank trains nothing.
    pub(crate) fn is_dedicated_server(&self) -> bool {
        !self.plan.trains(self.rank())
    }

    /// Whether a frame of this kind may go from one rank to another: those that only serve push,
    /// pull and pass on nothing, and nobody sends them results.
    pub(crate) fn may_send(&self, kind: FrameKind, from: Rank) -> bool {
        let (sender, receiver) = (self.plan.trains(from), !self.is_dedicated_server());
        match kind {
            FrameKind::Push | FrameKind::Pull => sender,
            FrameKind::Broadcast | FrameKind::Notify => receiver,
            _ => sender && receiver,
        }
    }

    /// Whether this rank may leave: who only serves, not before all that train have left.
    pub(crate) fn may_leave(&self) -> bool {
        let mut workers = (0..self.plan.workers()).map(Rank);
        !self.is_dedicated_server() || workers.all(|rank| self.lifecycle.has_departed(rank))
    }

    /// How long a step may stand still. Where servers are dedicated they know best who is missing: they
    /// are to be the first to say so.
    pub(crate) fn progress_timeout(&self) -> Duration {
        let timeout = self.options.progress_timeout;
        if self.plan.dedicated_servers > 0 && !self.is_dedicated_server() {
            timeout.saturating_add(timeout / 4)
        } else {
            timeout
        }
    }

    /// The last step that is behind this rank: on one that only serves, the last of which it has
    /// reduced all that it owns.
    pub(crate) fn last_complete(&self) -> Option<Step> {
        if !self.is_dedicated_server() {
            return self.worker.last_complete();
        }
        let served = self.server.owned.iter().filter(|(&slice, _)| self.collects(slice, Step(1)));
        let least = served.map(|(_, owned)| owned.step).min();
        least.and_then(|step| step.0.checked_sub(1)).map(Step)
    }

    /// The last step that this rank takes part in, as its goodbye says: who only serves, as all that
    /// train have said.
    pub(crate) fn last_step(&self) -> Step {
        if self.is_dedicated_server() {
            self.lifecycle.last_departed()
        } else {
            self.worker.last_complete().unwrap_or_default()
        }
    }

    /// Whether this rank has done its part and waits for others.
    pub(crate) fn waits_for_others(&self) -> bool {
        if self.is_dedicated_server() {
            self.server.owned.values().any(OwnedSlice::is_collecting)
        } else {
            self.worker.waits_for_others()
        }
    }

    /// A rank that only serves has reduced a slice of a step, the first one perhaps: priorities are
    /// those of the next step from now on, and the ones before this step are done with.
    pub(crate) fn served(&mut self, step: Step) {
        if self.server.newest.is_some_and(|newest| newest >= step) {
            return;
        }
        self.server.newest = Some(step);
        if let Some(version) = self.priorities.enter(step.next()) {
            self.events.push_back(Event::PlanSwitched { version, step: step.next() });
        }
    }

    /// What a rank that only serves waits for: slices that some ranks have pushed, and others not.
    pub(crate) fn uncollected(&self) -> Outstanding {
        let mut outstanding = Outstanding::default();
        let mut missing = RankSet::empty(self.plan.world_size);
        let mut last: Option<TensorId> = None;
        for (&slice, owned) in &self.server.owned {
            if !owned.is_collecting() {
                continue;
            }
            outstanding.step = outstanding.step.max(owned.step);
            let tensor = self.plan.slice(slice).tensor;
            if last.replace(tensor) != Some(tensor) {
                let name = &self.plan.tensor(tensor).spec.name;
                outstanding.tensor_count += 1;
                if outstanding.tensors.len() < Outstanding::NAMES_MAX {
                    outstanding.tensors.push(name.clone());
                }
            }
            let form = owned.form.unwrap_or(PayloadForm::Raw);
            for rank in self.lacking(owned) {
                missing.insert(rank);
                let arrived = owned.contributions.received_bytes(rank);
                outstanding.bytes += self.plan.bytes_as(slice, form).saturating_sub(arrived);
            }
        }
        outstanding.ranks = missing.iter().collect();
        outstanding
    }
}
