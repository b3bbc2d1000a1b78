//! What the mean of a tensor must be, to the last bit, by the scheme that the plan gives it.

use gradlane_engine::{Plan, Scheme};
use gradlane_units::{Rng, TensorId};

/// A rank's gradient in a step: values whose sum depends on the order of addition.
pub fn gradient(rank: u32, tensor: usize, step: u64, numel: u64) -> Vec<f32> {
    let mut rng = Rng::new(u64::from(rank) << 40 | (tensor as u64) << 20 | step);
    let value = move || {
        let bits = rng.next_u64();
        let magnitude = 10.0_f32.powi((bits % 9) as i32 - 4);
        ((bits >> 32) as u32 as f32 / u32::MAX as f32 - 0.5) * magnitude
    };
    std::iter::repeat_with(value).take(numel as usize).collect()
}

/// The mean over all ranks that train of a tensor. `gradient` is a rank's, none where it has no gradient; that
/// counts as zeros. Servers add in rank order; on a ring the rank after a slice's owner is first.
pub fn mean(plan: &Plan, tensor: TensorId, gradient: impl Fn(u32) -> Option<Vec<f32>>) -> Vec<f32> {
    let world = plan.workers();
    let numel = plan.tensor(tensor).spec.numel as usize;
    let parts: Vec<Vec<f32>> =
        (0..world).map(|rank| gradient(rank).unwrap_or_else(|| vec![0.0; numel])).collect();
    let mut means = Vec::new();
    for slice in plan.slices_of(tensor).map(|id| plan.slice(id)) {
        let first = match plan.tensor(tensor).scheme {
            Scheme::Ps => 0,
            Scheme::AllGather | Scheme::GatherToRoot => panic!("blocks have no mean"),
            Scheme::Ring => slice.owner.0 + 1,
        };
        let mean = |element: u64| {
            let value = |turn: u32| parts[((first + turn) % world) as usize][element as usize];
            let sum = (1..world).fold(value(0), |sum, turn| sum + value(turn));
            sum / world as f32
        };
        means.extend((slice.start..slice.start + slice.length).map(mean));
    }
    means
}
