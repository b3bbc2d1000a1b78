//! What the lanes of a rank have done of a step, put together: a tensor is there, a step complete and the squares
//! known once every lane has its part. `gradlane-net`'s `channel/completion.rs`, in virtual time.

use gradlane_engine::Plan;
use gradlane_units::TensorId;
use std::sync::Arc;

/// Something of which several lanes have a part, in each step anew.
#[derive(Clone, Copy, Debug, Default)]
struct Parts {
    count: u32,
    /// Parts that are there.
    ready: u32,
    /// When the last of them was.
    ready_at: u64,
}

impl Parts {
    /// Notes that a part is there from `time` on. With the last one returns when all are.
    fn note(&mut self, time: u64) -> Option<u64> {
        self.ready += 1;
        self.ready_at = self.ready_at.max(time);
        if self.ready < self.count {
            return None;
        }
        let whole_at = self.ready_at;
        *self = Parts { count: self.count, ..Parts::default() };
        Some(whole_at)
    }
}

/// The parts of one rank.
#[derive(Debug)]
pub(crate) struct JoinedLanes {
    tensors: Vec<Parts>,
    step: Parts,
    squares: Parts,
}

impl JoinedLanes {
    /// Nothing of any step, in lanes with these plans.
    pub(crate) fn new(lanes: &[Arc<Plan>]) -> JoinedLanes {
        let tensors = lanes.first().map_or(0, |plan| plan.tensors.len() as u32);
        let carry = |tensor| lanes.iter().filter(|plan| plan.has_slices_of(tensor)).count() as u32;
        let parts = |count| Parts { count, ..Parts::default() };
        let all = parts(lanes.len() as u32);
        let tensors = (0..tensors).map(|tensor| parts(carry(TensorId(tensor)))).collect();
        JoinedLanes { tensors, step: all, squares: all }
    }

    /// A lane has its part of a tensor; with the last one returns when all have.
    pub(crate) fn tensor(&mut self, tensor: TensorId, time: u64) -> Option<u64> {
        self.tensors[tensor.index()].note(time)
    }

    /// A step is complete in a lane; with the last one returns when it is in all.
    pub(crate) fn step(&mut self, time: u64) -> Option<u64> {
        self.step.note(time)
    }

    /// A lane has its squares; with the last one returns when all have.
    pub(crate) fn squares(&mut self, time: u64) -> Option<u64> {
        self.squares.note(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_with_the_last_one_when_the_latest_is_there() {
        let mut parts = Parts { count: 3, ..Parts::default() };
        for step in [100, 200] {
            assert_eq!(parts.note(step + 7), None);
            assert_eq!(parts.note(step + 9), None);
            assert_eq!(parts.note(step + 2), Some(step + 9));
        }
    }
}
