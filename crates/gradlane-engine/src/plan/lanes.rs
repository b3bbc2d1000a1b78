//! How the slices of a plan are dealt to lanes: the connections of a pair of ranks, each with a thread of its own
//! at both ends.
//!
//! Every lane carries the same share of each owner's bytes, and as far as slices are equally long, of each
//! tensor's: so each has its part of every priority. Who adds up what, and in which order, stays as it
//! is, so no result changes with the number of lanes.

use crate::plan::{Plan, TensorKind};
use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use gradlane_units::{Rank, SliceId, TensorId};

/// Bytes dealt so far to each lane, of the slices of an owner that take part in the same steps.
type Loads = BTreeMap<(bool, Rank), Vec<u64>>;

impl Plan {
    /// The part of this plan that one lane carries: all tensors, and the slices that are dealt to it. A tensor
    /// of which it has none takes part in no step there. All slices of a tensor with blocks are in one lane.
    ///
    /// # Panics
    /// When there is no such lane.
    #[must_use]
    pub fn lane(&self, lane: u32, lanes: u32) -> Plan {
        assert!(lane < lanes, "there are {lanes} lanes");
        let lane_of = self.lanes_of_slices(lanes);
        let mut part = Plan { lane, other_lanes: lanes - 1, ..self.clone() };
        part.slices.clear();
        for tensor in self.tensor_ids() {
            let first = part.slices.len() as u32;
            for slice in self.slices_of(tensor).filter(|slice| lane_of[slice.index()] == lane) {
                part.slices.push(*self.slice(slice));
                part.whole.push(slice);
            }
            part.tensors[tensor.index()].slices = first..part.slices.len() as u32;
        }
        part
    }

    /// The lane that each slice is dealt to, where there are so many.
    #[must_use]
    pub fn lanes_of_slices(&self, lanes: u32) -> Vec<u32> {
        let mut loads = Loads::new();
        let mut lane_of = Vec::with_capacity(self.slices.len());
        for tensor in self.tensor_ids() {
            self.deal(tensor, lanes as usize, &mut loads, &mut lane_of);
        }
        lane_of
    }

    /// The number that a slice of a lane's plan has in the whole plan; the same number where this is no lane's.
    #[must_use]
    pub fn in_whole_plan(&self, slice: SliceId) -> SliceId {
        self.whole.get(slice.index()).copied().unwrap_or(slice)
    }

    /// Whether a lane's plan has slices of a tensor.
    #[must_use]
    pub fn has_slices_of(&self, tensor: TensorId) -> bool {
        !self.tensor(tensor).slices.is_empty()
    }

    /// Deals the slices of a tensor, which come after those that are dealt already.
    fn deal(&self, tensor: TensorId, lanes: usize, loads: &mut Loads, lane_of: &mut Vec<u32>) {
        let planned = self.tensor(tensor);
        let is_initial = planned.spec.kind == TensorKind::Initial;
        let mut place = |owner: Rank, bytes: u64| {
            let loads = loads.entry((is_initial, owner)).or_insert_with(|| vec![0; lanes]);
            let (lane, load) =
                loads.iter_mut().enumerate().min_by_key(|(_, load)| **load).expect("lanes");
            *load = load.saturating_add(bytes);
            lane as u32
        };
        if planned.scheme.has_blocks() {
            let owner = self.slices_of(tensor).next().map_or(Rank(0), |it| self.slice(it).owner);
            let bytes = self.slices_of(tensor).map(|it| self.message_bytes(it)).sum();
            let lane = place(owner, bytes);
            return lane_of.extend(self.slices_of(tensor).map(|_| lane));
        }
        let place = |slice| place(self.slice(slice).owner, self.message_bytes(slice));
        lane_of.extend(self.slices_of(tensor).map(place));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Strategy, TensorSpec, Update};
    use alloc::string::ToString;
    use gradlane_units::{Dtype, Step};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_slice_is_in_one_lane_and_lanes_are_even(
            sizes in prop::collection::vec(0_u64..40_000, 1..30),
            ranks in 1_u32..6,
            lanes in 1_u32..6,
            strategy in prop::sample::select(vec!["p3", "wfbp", "ring", "kvstore"]),
        ) {
            let spec = |(number, &numel): (usize, &u64)| TensorSpec {
                name: number.to_string(),
                numel,
                dtype: Dtype::F32,
                kind: if number % 5 == 4 { TensorKind::Initial } else { TensorKind::Parameter },
            };
            let strategy = Strategy::named(strategy, Some(1_000), 0).expect("a strategy");
            let specs: Vec<TensorSpec> = sizes.iter().enumerate().map(spec).collect();
            let plan = Plan::build(specs, strategy, Update::Worker, ranks).expect("a plan");
            let parts: Vec<Plan> = (0..lanes).map(|lane| plan.lane(lane, lanes)).collect();
            let mut found = vec![0; plan.slices.len()];
            for part in &parts {
                for slice in part.slice_ids() {
                    let whole = part.in_whole_plan(slice);
                    prop_assert_eq!(part.slice(slice), plan.slice(whole));
                    found[whole.index()] += 1;
                }
                for tensor in plan.tensor_ids() {
                    prop_assert!(part.slices_of(tensor).all(|it| part.slice(it).tensor == tensor));
                    let takes_part = part.has_slices_of(tensor) && plan.takes_part(tensor, Step(1));
                    prop_assert_eq!(part.takes_part(tensor, Step(1)), takes_part);
                }
            }
            prop_assert!(found.iter().all(|&count| count == 1));
            let longest = plan.slice_ids().map(|it| plan.message_bytes(it)).max().unwrap_or(0);
            for owner in (0..ranks).map(Rank) {
                let bytes = |part: &Plan| -> u64 {
                    let kind = |it: SliceId| part.tensor(part.slice(it).tensor).spec.kind;
                    let own = part.slice_ids().filter(|&it| part.slice(it).owner == owner);
                    let own = own.filter(|&it| kind(it) == TensorKind::Parameter);
                    own.map(|it| part.message_bytes(it)).sum()
                };
                let loads: Vec<u64> = parts.iter().map(bytes).collect();
                let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
                prop_assert!(most - least <= longest, "{loads:?}");
            }
        }
    }
}
