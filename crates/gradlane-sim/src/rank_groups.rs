//! Symmetry: ranks that own no slice do the same thing at the same time, so a few of them may stand
//! for all.
//!
//! Exact are the bytes of every port, the work of every owner and the order of frames. Not exact is
//! the order among the ranks of a group: a frame to a group occupies the sender's port for all
//! of them and arrives when the last has it. With more representatives the difference gets smaller;
//! it is nothing where each stands for itself.

use crate::error::SimError;
use gradlane_engine::{Granularity, Placement, Plan, Scheme, Synchrony};

/// How many real ranks each simulated rank stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankGroups {
    pub(crate) weights: Vec<u32>,
}

impl RankGroups {
    /// Every rank stands for itself.
    pub(crate) fn none(workers: u32) -> RankGroups {
        RankGroups { weights: vec![1; workers as usize] }
    }

    /// The owners of a plan for `workers` ranks, and `representatives` for all others; nothing is
    /// folded where that is not fewer.
    ///
    /// # Errors
    /// When the strategy's placement depends on the number of ranks, or not all tensors have servers:
    /// without them every rank is one of its own.
    pub(crate) fn of(plan: &Plan, representatives: u32) -> Result<RankGroups, SimError> {
        if plan.tensors.iter().any(|tensor| tensor.scheme != Scheme::Ps) {
            return Err(SimError::Argument(format!(
                "representatives is {representatives}, but not all tensors have servers, and every \
                 rank has its own place in a ring: use 0"
            )));
        }
        let strategy = &plan.strategy;
        let stays = matches!(strategy.placement, Placement::Even)
            && matches!(strategy.granularity, Granularity::Slices { .. });
        if !stays {
            return Err(SimError::Argument(format!(
                "representatives is {representatives}, but strategy {:?} places slices in a way \
                 that depends on the number of ranks: use 0",
                strategy.name
            )));
        }
        if strategy.synchrony == Synchrony::Async {
            return Err(SimError::Argument(format!(
                "representatives is {representatives}, but strategy {:?} applies each rank's \
                 gradients alone, and none can stand for another: use 0",
                strategy.name
            )));
        }
        let owners = (plan.slices.len() as u32).min(plan.world_size);
        let others = plan.world_size - owners;
        if others <= representatives {
            return Ok(RankGroups::none(plan.world_size));
        }
        let mut weights = vec![1; owners as usize];
        let share = |index: u32| {
            let bound = |i: u32| u64::from(others) * u64::from(i) / u64::from(representatives);
            (bound(index + 1) - bound(index)) as u32
        };
        weights.extend((0..representatives).map(share));
        Ok(RankGroups { weights })
    }
}
