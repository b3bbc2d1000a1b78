//! Stragglers: the ranks whose contributions the slices of this rank wait for.
//!
//! An owner reduces a slice when the last contribution is complete. Its delay after the one before
//! it is the time that the other ranks waited for that rank and for its way through the network; a
//! rank's own contribution has none. Times are those of the turns of the I/O loop: contributions of
//! one turn are ties. A step of a slice that is never complete counts nothing.

use crate::metrics::{count, load, seconds};
use gradlane_engine::Plan;
use gradlane_units::{Rank, SliceId, Step, TensorId, Time};
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Contributions to one slice.
#[derive(Clone, Copy, Debug, Default)]
struct SliceProgress {
    step: Step,
    ranks: u32,
    latest: Time,
}

/// Contributions to the slices of one rank.
#[derive(Debug)]
pub(crate) struct ContributionTimes {
    rank: Rank,
    /// Number of ranks that contribute.
    workers: u32,
    /// Whether there is no other rank.
    is_alone: bool,
    /// By slice; only the slices that this rank owns are used.
    slices: Vec<SliceProgress>,
}

impl ContributionTimes {
    /// Makes times before step 1.
    pub(crate) fn new(plan: &Plan, rank: Rank) -> ContributionTimes {
        let slices = vec![SliceProgress::default(); plan.slices.len()];
        ContributionTimes { rank, workers: plan.workers(), is_alone: plan.world_size == 1, slices }
    }

    /// Notes this rank's contribution to all slices of a tensor.
    pub(crate) fn own_contribution(
        &mut self,
        plan: &Plan,
        tensor: TensorId,
        step: Step,
        now: Time,
        stats: &StragglerStats,
    ) {
        for slice in plan.slices_of(tensor) {
            if plan.slice(slice).owner == self.rank {
                self.arrived(slice, step, self.rank, now, stats);
            }
        }
    }

    /// Notes the complete contribution of a rank to a slice.
    pub(crate) fn arrived(
        &mut self,
        slice: SliceId,
        step: Step,
        from: Rank,
        now: Time,
        stats: &StragglerStats,
    ) {
        // In step 0 only rank 0 contributes, a single rank has nobody to wait for, and
        // contributions after the step's decision are not waited for.
        let Some(progress) = self.slices.get_mut(slice.index()) else {
            return;
        };
        if step < progress.step || step.0 == 0 || self.is_alone {
            return;
        }
        if progress.step != step {
            *progress = SliceProgress { step, ranks: 0, latest: now };
        }
        progress.ranks += 1;
        if progress.ranks == self.workers {
            stats.note(from, step, now.since(progress.latest));
        }
        progress.latest = now;
    }
}

/// Delays of one rank's contributions, as this rank's slices saw them.
#[derive(Debug, Default)]
struct RankStats {
    last_count: AtomicU64,
    late_ns: AtomicU64,
    late_ns_max: AtomicU64,
    late_step_max: AtomicU64,
}

/// Delays of all ranks' contributions.
#[derive(Debug)]
pub(crate) struct StragglerStats {
    ranks: Vec<RankStats>,
    gathered: AtomicU64,
    ties: AtomicU64,
}

impl StragglerStats {
    /// Makes statistics without delays.
    pub(crate) fn new(world_size: u32) -> StragglerStats {
        let ranks = (0..world_size).map(|_| RankStats::default()).collect();
        StragglerStats { ranks, gathered: AtomicU64::new(0), ties: AtomicU64::new(0) }
    }

    /// Notes a slice that the contribution of `rank` completed, with its delay after all others.
    pub(crate) fn note(&self, rank: Rank, step: Step, late: Duration) {
        count(&self.gathered, 1);
        let late_ns = u64::try_from(late.as_nanos()).unwrap_or(u64::MAX);
        if late_ns == 0 {
            return count(&self.ties, 1);
        }
        let Some(row) = self.ranks.get(rank.index()) else {
            return;
        };
        count(&row.last_count, 1);
        count(&row.late_ns, late_ns);
        if row.late_ns_max.fetch_max(late_ns, Ordering::Relaxed) < late_ns {
            row.late_step_max.store(step.0, Ordering::Relaxed);
        }
    }

    /// Returns the number of complete slices, and of those whose last two contributions were ties.
    pub(crate) fn slices(&self) -> (u64, u64) {
        (load(&self.gathered), load(&self.ties))
    }

    /// Returns a row a rank.
    pub(crate) fn snapshot(&self) -> Vec<StragglerSnapshot> {
        let row = |stats: &RankStats| StragglerSnapshot {
            last_count: load(&stats.last_count),
            late_s: seconds(load(&stats.late_ns)),
            late_s_max: seconds(load(&stats.late_ns_max)),
            late_step_max: load(&stats.late_step_max),
        };
        self.ranks.iter().map(row).collect()
    }
}

/// Delays of one rank's contributions to slices of this rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StragglerSnapshot {
    /// Slices that it completed.
    pub last_count: u64,
    /// Sum of its delays after the contribution before, in seconds.
    pub late_s: f64,
    /// The longest of them.
    pub late_s_max: f64,
    /// The step of the longest.
    pub late_step_max: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradlane_engine::{Strategy, TensorKind, TensorSpec, Update};
    use gradlane_units::Dtype;

    fn plan(world_size: u32) -> Plan {
        let spec = TensorSpec {
            name: "weight".to_owned(),
            numel: 8,
            dtype: Dtype::F32,
            kind: TensorKind::Parameter,
        };
        let strategy = Strategy::named("p3", Some(2), 0).expect("a strategy");
        Plan::build(vec![spec], strategy, Update::Worker, world_size).expect("a plan")
    }

    #[test]
    fn the_last_rank_is_late_by_what_it_came_after_the_one_before() {
        let plan = plan(3);
        let own = (0..4).map(SliceId).find(|&it| plan.slice(it).owner == Rank(1));
        let slice = own.expect("a slice of rank 1");
        let stats = StragglerStats::new(3);
        let mut times = ContributionTimes::new(&plan, Rank(1));
        for (step, late_ns) in [(1, 700), (2, 200)] {
            times.own_contribution(&plan, TensorId(0), Step(step), Time(100), &stats);
            times.arrived(slice, Step(step), Rank(0), Time(300), &stats);
            times.arrived(slice, Step(step), Rank(2), Time(300 + late_ns), &stats);
        }
        let rows = stats.snapshot();
        assert_eq!(rows[2].last_count, 2);
        assert_eq!((rows[2].late_s * 1e9).round(), 900.0);
        assert_eq!((rows[2].late_s_max * 1e9).round(), 700.0);
        assert_eq!(rows[2].late_step_max, 1);
        assert_eq!(rows[0].last_count + rows[1].last_count, 0);
        assert_eq!(stats.slices(), (2, 0));
    }

    #[test]
    fn what_comes_in_one_turn_came_together_and_what_is_not_whole_counts_nothing() {
        let plan = plan(2);
        let slice = (0..4).map(SliceId).find(|&it| plan.slice(it).owner == Rank(0));
        let slice = slice.expect("a slice of rank 0");
        let stats = StragglerStats::new(2);
        let mut times = ContributionTimes::new(&plan, Rank(0));
        times.arrived(slice, Step(0), Rank(1), Time(10), &stats);
        times.arrived(slice, Step(1), Rank(1), Time(20), &stats);
        // The other rank's part of step 1 never comes.
        times.arrived(slice, Step(2), Rank(1), Time(50), &stats);
        times.arrived(slice, Step(2), Rank(0), Time(50), &stats);
        assert_eq!(stats.slices(), (1, 1));
        assert!(stats.snapshot().iter().all(|row| row.last_count == 0));
    }
}
