//! Roles of ranks: which ones train, and which ones own slices. Mostly every rank does both. Dedicated
//! servers follow the ranks that train: they collect, reduce and broadcast, contribute no gradient,
//! begin no step, and leave when the ranks that train have left.

use crate::api::PlanError;
use crate::plan::{Plan, Scheme, Update};
use crate::rank_set::RankSet;
use alloc::format;
use gradlane_units::{Rank, TensorId};

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

    /// All ranks train, and the first `servers` own slices.
    #[must_use]
    pub const fn first(world_size: u32, servers: u32) -> Roles {
        Roles { workers: world_size, servers, dedicated: false }
    }

    /// The first `workers` ranks train; `servers` ranks after them own the slices, and only serve.
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

    /// Checks that either role has a rank.
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
    /// How many ranks train: all but those that only serve.
    #[must_use]
    pub fn workers(&self) -> u32 {
        self.world_size.saturating_sub(self.dedicated_servers)
    }

    /// Whether a rank trains.
    #[must_use]
    pub fn trains(&self, rank: Rank) -> bool {
        rank.0 < self.workers() && !self.lost.contains(rank)
    }

    /// Whether the ranks that train tell dedicated servers how to update parameters.
    #[must_use]
    pub fn commands_servers(&self) -> bool {
        self.dedicated_servers > 0 && self.update == Update::Server
    }

    /// Ranks that train, but this one.
    pub(crate) fn workers_but(&self, rank: Rank) -> RankSet {
        RankSet::all_but(self.workers(), rank).without(&self.lost)
    }

    /// To how many others a rank sends gradients and results.
    #[must_use]
    pub fn peers_sent_to(&self, rank: Rank) -> u32 {
        let others = if self.dedicated_servers == 0 {
            self.world_size - 1
        } else if !self.trains(rank) {
            self.workers()
        } else if self.tensors.iter().all(|tensor| tensor.scheme == Scheme::Ps) {
            self.dedicated_servers
        } else {
            self.world_size - 1
        };
        let is_ring = self.tensors.iter().all(|tensor| tensor.scheme == Scheme::Ring);
        if is_ring && !self.tensors.is_empty() {
            others.min(1)
        } else {
            others
        }
    }

    /// How many connections share the busier end of one: many workers meet at the port of one dedicated
    /// server. Without dedicated servers all ranks send to as many.
    #[must_use]
    pub fn peers_at_busier_end(&self) -> u32 {
        self.peers_sent_to(Rank(0)).max(self.peers_sent_to(Rank(self.world_size - 1)))
    }

    /// The root of a tensor; none where every rank gets all blocks, and of tensors
    /// without blocks.
    #[must_use]
    pub fn root(&self, tensor: TensorId) -> Option<Rank> {
        let planned = self.tensor(tensor);
        let first = self.slices.get(planned.slices.start as usize)?;
        (planned.scheme == Scheme::GatherToRoot).then_some(first.owner)
    }
}
