//! Rank 0's part: it decides the contributors of each step once, for all slices of the step together. No
//! rank is ever in for one slice and out for another.
//!
//! A rank says when it begins a step and when all its gradients of the step are queued. A step is
//! decided when the rule has enough of these. Those that are not in it are late: they take its
//! result and go on. No step is decided while some rank is more than `ahead_steps` steps behind, since
//! that rank has to keep all results that it has not come to.

use super::median_window::MedianWindow;
use crate::api::{violation, Validated};
use crate::plan::{Cutoff, StragglerPolicy};
use crate::rank_set::RankSet;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::vec::Vec;
use core::time::Duration;
use gradlane_units::{Rank, Step, Time};

/// The least that `Cutoff::Adaptive` waits beyond half of the ranks: this part of a step.
const SPREAD_PART: u32 = 20;
/// The slower half may be as far behind the middle as the faster is before it; ranks are not quite alike.
const SPREAD_TIMES: u32 = 2;
/// Nearly all steps are within three times the usual difference from the usual step.
const DEVIATION_TIMES: u32 = 3;

/// How a rank begins a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepEntry {
    Train,
    /// It contributes nothing, to be with the others again in the next step.
    Pass,
    /// It does something together with all ranks, which is no training: no rank is left out.
    Barrier,
}

/// How far a rank is in its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RankState {
    Training,
    /// All its gradients are queued.
    Complete(Time),
    /// It contributes nothing, to be with the others again in the next step.
    Passing,
}

#[derive(Clone, Copy, Debug)]
struct RankProgress {
    step: Step,
    is_barrier: bool,
    begun_at: Time,
    presence: RankState,
}

/// The progress of all ranks, as rank 0 knows it.
#[derive(Debug)]
pub(crate) struct Coordinator {
    rule: StragglerPolicy,
    /// By rank.
    progress: Vec<RankProgress>,
    /// The last step that was decided.
    decided: Step,
    /// Its contributors.
    last: RankSet,
    /// When steps were decided that some rank may still be in.
    decided_at: BTreeMap<Step, Time>,
    /// From a decision until half of the next step's contributors were complete.
    spans: MedianWindow,
    /// From the first of a step's contributors until half of them were complete.
    leads: MedianWindow,
}

impl Coordinator {
    pub(crate) fn new(rule: StragglerPolicy, world_size: u32) -> Coordinator {
        let start = RankProgress {
            step: Step(0),
            is_barrier: false,
            begun_at: Time::ZERO,
            presence: RankState::Training,
        };
        Coordinator {
            rule,
            progress: alloc::vec![start; world_size as usize],
            decided: Step(0),
            last: RankSet::all(world_size),
            decided_at: BTreeMap::new(),
            spans: MedianWindow::default(),
            leads: MedianWindow::default(),
        }
    }

    /// Goes on as if all ranks had been in all steps up to this one.
    pub(crate) fn fast_forward(&mut self, step: Step) {
        self.decided = step;
        self.last = RankSet::all(self.progress.len() as u32);
        self.decided_at.clear();
        for progress in &mut self.progress {
            progress.step = step;
        }
    }

    /// A rank has begun a step.
    pub(crate) fn begun(
        &mut self,
        rank: Rank,
        step: Step,
        entry: StepEntry,
        now: Time,
    ) -> Validated<()> {
        self.check_alike(rank, step, entry)?;
        let passes = entry == StepEntry::Pass;
        let last_excluded = self.decided > Step(0) && !self.last.contains(rank);
        let decided = self.decided;
        let progress = &mut self.progress[rank.index()];
        if step != progress.step.next() || step > decided.next() {
            let at = progress.step;
            return violation(format!("beginning {step} after {at}, when {decided} is decided"));
        }
        if passes && step > decided && !last_excluded {
            return violation(format!("passing {step} after it was in {decided}"));
        }
        let presence = if passes { RankState::Passing } else { RankState::Training };
        *progress =
            RankProgress { step, is_barrier: entry == StepEntry::Barrier, begun_at: now, presence };
        let first = self.progress.iter().map(|it| it.step).min().unwrap_or_default();
        self.decided_at.retain(|&step, _| step >= first || step >= decided);
        Ok(())
    }

    /// Checks that all ranks begin a barrier step so; otherwise the others would wait forever.
    fn check_alike(&self, rank: Rank, step: Step, entry: StepEntry) -> Validated<()> {
        let is_barrier = entry == StepEntry::Barrier;
        let words = |is_barrier: bool| if is_barrier { "gathers all ranks" } else { "trains" };
        let differs = |other: &RankProgress| other.step == step && other.is_barrier != is_barrier;
        let others = match self.progress.iter().position(differs) {
            Some(other) => format!("{} {}", Rank(other as u32), words(!is_barrier)),
            None if is_barrier && step <= self.decided => "others have gone on".into(),
            None => return Ok(()),
        };
        violation(format!(
            "{step}, in which {rank} {} and {others}: what all ranks do together between two steps \
             of training, they have to do after the same one",
            words(is_barrier)
        ))
    }

    /// Whether no rank may be left out of a step.
    fn is_barrier(&self, step: Step) -> bool {
        self.progress.iter().any(|it| it.step == step && it.is_barrier)
    }

    /// All gradients of a rank are queued. If the step was decided without it: since when.
    pub(crate) fn completed(
        &mut self,
        rank: Rank,
        step: Step,
        now: Time,
    ) -> Validated<Option<Duration>> {
        let progress = &mut self.progress[rank.index()];
        if (progress.step, progress.presence) != (step, RankState::Training) {
            return violation(format!("the end of {step} in {}", progress.step));
        }
        progress.presence = RankState::Complete(now);
        Ok(self.decided_at.get(&step).map(|&since| now.since(since)))
    }

    /// The next step's contributors, once they are known.
    pub(crate) fn decide(&mut self, now: Time) -> Option<(Step, RankSet)> {
        let step = self.decided.next();
        if self.lagging().next().is_some() {
            return None;
        }
        let complete = self.complete(step);
        let is_barrier = self.is_barrier(step);
        let enough = match self.rule.cutoff {
            _ if is_barrier => complete.len() as usize == self.progress.len(),
            Cutoff::Backup { ranks } => complete.len() + ranks >= self.progress.len() as u32,
            Cutoff::Deadline { .. } | Cutoff::Adaptive => {
                let is_due = || self.deadline().is_some_and(|deadline| now >= deadline);
                complete.len() >= self.min_contributors()
                    && (self.expected(&complete).next().is_none() || is_due())
            }
        };
        if !enough {
            return None;
        }
        if !is_barrier {
            self.note_span(&complete);
        }
        self.decided = step;
        self.decided_at.insert(step, now);
        self.last = complete.clone();
        Some((step, complete))
    }

    /// When `decide` wants to be asked again, whatever else happens.
    pub(crate) fn deadline(&self) -> Option<Time> {
        let step = self.decided.next();
        let mut complete = self.completions(&self.complete(step));
        complete.sort_unstable();
        if (complete.len() as u32) < self.min_contributors() || self.is_barrier(step) {
            return None;
        }
        let usual = match self.rule.cutoff {
            Cutoff::Backup { .. } => return None,
            Cutoff::Deadline { .. } => {
                *self.decided_at.get(&self.decided)? + self.spans.median()?
            }
            Cutoff::Adaptive => complete[self.min_contributors() as usize - 1],
        };
        Some(usual + self.allowance()?)
    }

    /// How much later than half of the ranks a rank may be.
    fn allowance(&self) -> Option<Duration> {
        let span = self.spans.median()?;
        match self.rule.cutoff {
            Cutoff::Backup { .. } => None,
            Cutoff::Deadline { percent } => Some(span * (percent.saturating_sub(100)) / 100),
            Cutoff::Adaptive => {
                let among = self.leads.median()? * SPREAD_TIMES;
                let between = self.spans.median_abs_deviation()? * DEVIATION_TIMES;
                Some(among.max(between).max(span / SPREAD_PART))
            }
        }
    }

    /// Ranks that are in at least, where there is a deadline.
    fn min_contributors(&self) -> u32 {
        match self.rule.cutoff {
            Cutoff::Adaptive => half(self.progress.len()) as u32 + 1,
            _ => 1,
        }
    }

    /// Whether the deadline is all that is waited for, and may pass.
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        self.lagging().next().is_none().then(|| self.deadline()).flatten()
    }

    /// Ranks that the next decision waits for.
    pub(crate) fn awaited(&self) -> RankSet {
        let mut awaited = RankSet::empty(self.progress.len() as u32);
        let step = self.decided.next();
        let complete = self.complete(step);
        let held: Vec<Rank> = self.lagging().collect();
        let missing = self.ranks().filter(|&rank| held.is_empty() && !complete.contains(rank));
        for rank in held.iter().copied().chain(missing) {
            awaited.insert(rank);
        }
        awaited
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> {
        (0..self.progress.len() as u32).map(Rank)
    }

    /// Ranks that are so far behind that no further step may be decided.
    fn lagging(&self) -> impl Iterator<Item = Rank> + '_ {
        let next = self.decided.next().0;
        let first = next.saturating_sub(u64::from(self.rule.ahead_steps));
        self.ranks().filter(move |rank| self.progress[rank.index()].step.0 < first)
    }

    /// Ranks that are complete in a step.
    fn complete(&self, step: Step) -> RankSet {
        let mut complete = RankSet::empty(self.progress.len() as u32);
        for rank in self.ranks() {
            let progress = self.progress[rank.index()];
            if progress.step == step && matches!(progress.presence, RankState::Complete(_)) {
                complete.insert(rank);
            }
        }
        complete
    }

    /// Ranks that are not complete in the next step and may be before its deadline: contributors of
    /// the last one, and ranks that have begun this one in time. A rank that is late is not awaited.
    fn expected<'a>(&'a self, complete: &'a RankSet) -> impl Iterator<Item = Rank> + 'a {
        let step = self.decided.next();
        let in_time = self.begins_in_time(complete);
        self.ranks().filter(move |&rank| {
            let progress = self.progress[rank.index()];
            if progress.step == step {
                let late = in_time.is_some_and(|until| progress.begun_at > until);
                progress.presence == RankState::Training && !late
            } else {
                self.last.contains(rank)
            }
        })
    }

    /// Until when a rank may have begun the next step that is to be complete before the deadline, as
    /// long as others take: known once half of all ranks are complete.
    fn begins_in_time(&self, complete: &RankSet) -> Option<Time> {
        let mut begun: Vec<Time> =
            complete.iter().map(|rank| self.progress[rank.index()].begun_at).collect();
        begun.sort_unstable();
        let is_half = begun.len() > half(self.progress.len());
        Some(begun[half(begun.len())] + self.allowance()?).filter(|_| is_half)
    }

    /// When the ranks of a set were complete.
    fn completions(&self, set: &RankSet) -> Vec<Time> {
        let at = |rank: Rank| match self.progress[rank.index()].presence {
            RankState::Complete(at) => at,
            _ => Time::ZERO,
        };
        set.iter().map(at).collect()
    }

    fn note_span(&mut self, complete: &RankSet) {
        let Some(&since) = self.decided_at.get(&self.decided) else {
            return;
        };
        let mut times = self.completions(complete);
        times.sort_unstable();
        if let (Some(&first), Some(&middle)) = (times.first(), times.get(half(times.len()))) {
            self.spans.record(middle.since(since));
            self.leads.record(middle.since(first));
        }
    }
}

/// Index of the last of the faster half of `count`.
const fn half(count: usize) -> usize {
    count.saturating_sub(1) / 2
}

#[cfg(test)]
#[path = "coordinator_tests.rs"]
mod tests;
