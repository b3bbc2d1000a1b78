//! Ranks that steps counted, where stragglers are left out, and how late the others were.
//!
//! The I/O thread writes, application threads read. All ranks know which ranks were left out; rank
//! 0, which decides, knows how late they were.

use crate::metrics::seconds;
use gradlane_engine::Event;
use gradlane_units::{Rank, Step};
use serde::Serialize;
use std::collections::BTreeMap;

/// Decided steps that can be queried.
const STEPS_KEPT: usize = 64;

/// Statistics of one rank.
#[derive(Clone, Copy, Debug, Default)]
struct RankParticipation {
    left_out: u64,
    late: u64,
    late_ns: u64,
    late_ns_max: u64,
    late_step_max: u64,
}

/// Statistics of all decided steps.
#[derive(Debug)]
pub(crate) struct ParticipationStats {
    rank: Rank,
    decided: Step,
    /// By step: whether it counted this rank, of the last ones.
    participated: BTreeMap<Step, bool>,
    /// The last step that this rank was so late for that it should pass the next.
    behind: Option<Step>,
    ranks: Vec<RankParticipation>,
}

/// This rank's part in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepParticipation {
    /// Whether the step counted this rank; `None` where that is not known.
    pub participated: Option<bool>,
    /// Whether it was so late that the next step would go on without it, too.
    pub behind: bool,
    /// The last step whose contributors are known.
    pub decided: Step,
}

impl ParticipationStats {
    /// Makes statistics without a decided step.
    pub(crate) fn new(rank: Rank, world_size: u32) -> ParticipationStats {
        let ranks = vec![RankParticipation::default(); world_size as usize];
        ParticipationStats {
            rank,
            decided: Step(0),
            participated: BTreeMap::new(),
            behind: None,
            ranks,
        }
    }

    /// Notes an event of the engine that is about contributors.
    pub(crate) fn note(&mut self, event: &Event) {
        match event {
            Event::ContributorsDecided { step, contributors } => {
                self.decided = *step;
                self.participated.insert(*step, contributors.contains(&self.rank));
                if self.participated.len() > STEPS_KEPT {
                    self.participated.pop_first();
                }
                for (rank, row) in self.ranks.iter_mut().enumerate() {
                    row.left_out += u64::from(!contributors.contains(&Rank(rank as u32)));
                }
            }
            Event::LeftOut { step, behind: true } => self.behind = Some(*step),
            Event::Late { rank, step, lateness } => {
                let late_ns = u64::try_from(lateness.as_nanos()).unwrap_or(u64::MAX);
                if let Some(row) = self.ranks.get_mut(rank.index()) {
                    row.late += 1;
                    row.late_ns += late_ns;
                    if late_ns >= row.late_ns_max {
                        (row.late_ns_max, row.late_step_max) = (late_ns, step.0);
                    }
                }
            }
            _ => {}
        }
    }

    pub(crate) fn in_step(&self, step: Step) -> StepParticipation {
        StepParticipation {
            participated: self.participated.get(&step).copied(),
            behind: self.behind == Some(step),
            decided: self.decided,
        }
    }

    /// Returns the last decided step, and a row a rank; none where nothing was decided.
    pub(crate) fn snapshot(&self) -> (u64, Vec<LeftOutSnapshot>) {
        if self.decided.0 == 0 {
            return (0, Vec::new());
        }
        let row = |row: &RankParticipation| LeftOutSnapshot {
            left_out_steps: row.left_out,
            late_count: row.late,
            left_out_late_s: seconds(row.late_ns),
            late_s_max: seconds(row.late_ns_max),
            late_step_max: row.late_step_max,
        };
        (self.decided.0, self.ranks.iter().map(row).collect())
    }
}

/// How often one rank was left out, and, on rank 0, how late its gradients were then.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftOutSnapshot {
    /// Steps that went on without its gradients.
    pub left_out_steps: u64,
    /// Those of them whose gradients were ready later.
    pub late_count: u64,
    /// Sum of their delays after the decision, in seconds.
    pub left_out_late_s: f64,
    /// The longest of them.
    pub late_s_max: f64,
    /// The step of the longest.
    pub late_step_max: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn counts_who_was_left_out_and_how_late_they_were() {
        let mut participation = ParticipationStats::new(Rank(1), 3);
        assert_eq!(participation.snapshot(), (0, Vec::new()));
        for (step, contributors) in [(1, vec![Rank(0), Rank(2)]), (2, vec![Rank(0), Rank(1)])] {
            participation.note(&Event::ContributorsDecided { step: Step(step), contributors });
        }
        participation.note(&Event::LeftOut { step: Step(1), behind: true });
        for ms in [5, 2] {
            let lateness = Duration::from_millis(ms);
            participation.note(&Event::Late { rank: Rank(1), step: Step(ms), lateness });
        }
        let in_step =
            StepParticipation { participated: Some(false), behind: true, decided: Step(2) };
        assert_eq!(participation.in_step(Step(1)), in_step);
        assert_eq!(participation.in_step(Step(2)).participated, Some(true));
        assert_eq!(participation.in_step(Step(3)).participated, None);
        let (decided, rows) = participation.snapshot();
        assert_eq!(decided, 2);
        let out: Vec<u64> = rows.iter().map(|row| row.left_out_steps).collect();
        assert_eq!(out, [0, 1, 1]);
        assert_eq!((rows[1].late_count, rows[1].late_step_max), (2, 5));
        assert!((rows[1].left_out_late_s - 0.007).abs() < 1e-12);
    }
}
