//! What jobs on encoded sums compute in these tests, and what all ranks must have after them.

use super::node::Node;
use super::toy::Toy;
use gradlane_engine::{Operation, Plan, Region, RingBytes};
use gradlane_units::SliceId;

/// Levels of the toy's codes.
const LEVELS: f32 = 1000.0;

fn code(value: f32, scale: f32) -> i32 {
    if scale > 0.0 {
        (value / scale * LEVELS).round() as i32
    } else {
        0
    }
}

fn value(sum: i32, scale: f32, ranks: u32) -> f32 {
    sum as f32 * (scale / LEVELS / ranks as f32)
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |top, value| top.max(value.abs()))
}

/// A scale for the slice, then a number of 32 bits for each element.
pub fn ring_bytes(elements: u64) -> RingBytes {
    RingBytes { scales: 4, sums: 4 + 4 * elements }
}

/// The mean that all ranks must have of a slice: hop by hop, or by codes.
pub fn expected(
    plan: &Plan,
    slice: SliceId,
    toy: Toy,
    given: impl Fn(u32) -> Option<Vec<f32>>,
) -> Vec<f32> {
    let (world, owner) = (plan.world_size, plan.slice(slice).owner.0);
    if toy.integer {
        let all: Vec<Vec<f32>> = (0..world).filter_map(&given).collect();
        let scale = all.iter().fold(0.0, |top: f32, values| top.max(largest(values)));
        let sum = |index: usize| all.iter().map(|values| code(values[index], scale)).sum();
        let elements = plan.slice(slice).length as usize;
        return (0..elements).map(|index| value(sum(index), scale, world)).collect();
    }
    let mut sum: Option<Vec<f32>> = None;
    let add = |sum: &Option<Vec<f32>>, own: Vec<f32>| match sum {
        Some(sum) => sum.iter().zip(own).map(|(sum, own)| sum + own).collect(),
        None => own,
    };
    for rank in (1..world).map(|hop| (owner + hop) % world) {
        if let Some(own) = given(rank) {
            sum = Some(add(&sum, own).into_iter().map(Toy::keep).collect());
        }
    }
    let own = given(owner);
    let zero = if sum.is_none() || own.is_none() { 0.0 } else { -0.0 };
    let sum = own.map(|own| add(&sum, own)).or(sum).unwrap_or_default();
    sum.iter().map(|total| Toy::keep((total + zero) / world as f32)).collect()
}

impl Node {
    fn scale_of(&self, region: Region) -> f32 {
        self.floats(Region { length: 4, ..region })[0]
    }

    fn sums_of(&self, region: Region) -> Vec<i32> {
        let bytes = self.read(region);
        let all = bytes[4..].chunks(4).map(|it| i32::from_le_bytes(it.try_into().unwrap()));
        all.collect()
    }

    fn write_sums(&mut self, region: Region, scale: f32, sums: &[i32]) {
        let mut bytes = scale.to_le_bytes().to_vec();
        bytes.extend(sums.iter().flat_map(|it| it.to_le_bytes()));
        self.write(region, &bytes);
    }

    fn add_codes(&mut self, region: Region, scale: f32, mut sums: Vec<i32>, own: Option<Region>) {
        if let Some(own) = own {
            let values = self.floats(own);
            assert!(largest(&values) <= scale, "the scale of all ranks covers this one");
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += code(value, scale));
        }
        self.write_sums(region, scale, &sums);
    }

    fn means(&self, region: Region) -> Vec<f32> {
        let (scale, ranks) = (self.scale_of(region), self.engine.plan().world_size);
        self.sums_of(region).into_iter().map(|sum| value(sum, scale, ranks)).collect()
    }

    /// Does a job on an encoded sum; the bytes of an encoding, where they vary.
    pub(super) fn execute_round(&mut self, operation: &Operation, elements: usize) -> Option<u64> {
        let toy = self.toy.expect("a codec");
        match operation {
            Operation::RingEncode { received, own, divisor, output, copy_to } => {
                let came = received.map(|it| toy.decode(&self.read(it), elements));
                let own = own.map(|it| self.floats(it));
                let absent = came.is_none() || own.is_none();
                let mut sum = match (came, own) {
                    (Some(came), Some(own)) => came.iter().zip(own).map(|(a, b)| a + b).collect(),
                    (came, own) => came.or(own).expect("a job on something"),
                };
                if *divisor > 1 {
                    let zero = if absent { 0.0 } else { -0.0 };
                    sum.iter_mut().for_each(|it| *it = (*it + zero) / *divisor as f32);
                }
                let (bytes, used) = self.write_encoded(*output, &sum);
                if let Some(region) = copy_to {
                    self.write_values(*region, &toy.decode(&bytes, elements));
                }
                return used;
            }
            Operation::RingMaxScales { received, own, output } => {
                let came = received.map_or(0.0, |it| self.scale_of(it));
                let scale = largest(&self.floats(*own)).max(came);
                self.write(*output, &scale.to_le_bytes());
            }
            Operation::RingBeginCodes { scales, own, output } => {
                let came = scales.map_or(0.0, |it| self.scale_of(it));
                let scale = own.map_or(0.0, |it| largest(&self.floats(it))).max(came);
                self.add_codes(*output, scale, vec![0; elements], *own);
            }
            Operation::RingAddCodes { sums, own, copy_to } => {
                self.add_codes(*sums, self.scale_of(*sums), self.sums_of(*sums), *own);
                if let Some(region) = copy_to {
                    let means = self.means(*sums);
                    self.write_values(*region, &means);
                }
            }
            Operation::Decode { from, to } => {
                let means = self.means(*from);
                self.write_values(*to, &means);
            }
            other => unreachable!("{other:?} is of servers"),
        }
        None
    }
}
