//! A codec whose every byte a test can tell beforehand, and plans with it.

use super::round;
use gradlane_engine::{CodecSizes, Plan, RingBytes, Strategy, TensorSpec, Update};
use std::sync::Arc;

/// A codec that keeps the upper half of each number. When it varies, zeros are left out. With
/// integers a ring adds up codes of another kind, see `round`.
#[derive(Clone, Copy, Debug)]
pub struct Toy {
    pub granule_elems: u64,
    pub varies: bool,
    pub integer: bool,
}

impl CodecSizes for Toy {
    fn name(&self) -> String {
        "toy".to_string()
    }
    fn granule_elems(&self) -> u64 {
        self.granule_elems
    }
    fn bytes_max(&self, elements: u64) -> u64 {
        if self.varies {
            1 + 6 * elements
        } else {
            2 * elements
        }
    }
    fn is_fixed(&self) -> bool {
        !self.varies
    }
    fn residual_width(&self) -> u32 {
        0
    }
    fn sizes(&self) -> Vec<u64> {
        Vec::new()
    }
    fn ring_bytes(&self, elements: u64, _: u32) -> Result<Option<RingBytes>, String> {
        Ok(self.integer.then(|| round::ring_bytes(elements)))
    }
}

impl Toy {
    pub fn keep(value: f32) -> f32 {
        f32::from_bits(value.to_bits() & 0xffff_0000)
    }

    /// Adds what was not sent so far to values, and keeps what will not be sent of them.
    pub fn hold_back(values: &mut [f32], residual: &mut Vec<f32>) {
        residual.resize(values.len(), 0.0);
        for (value, kept) in values.iter_mut().zip(residual) {
            *value += *kept;
            *kept = *value - Toy::keep(*value);
        }
    }

    pub(super) fn encode(self, values: &[f32]) -> Vec<u8> {
        let upper = |value: &f32| ((value.to_bits() >> 16) as u16).to_le_bytes();
        if !self.varies {
            return values.iter().flat_map(upper).collect();
        }
        let mut bytes = vec![0xEE];
        for (index, value) in values.iter().enumerate().filter(|(_, it)| it.to_bits() >> 16 != 0) {
            bytes.extend((index as u32).to_le_bytes());
            bytes.extend(upper(value));
        }
        bytes
    }

    pub(super) fn decode(self, bytes: &[u8], elements: usize) -> Vec<f32> {
        let value = |upper: &[u8]| f32::from_bits(u32::from_le_bytes([0, 0, upper[0], upper[1]]));
        if !self.varies {
            return bytes.chunks_exact(2).map(value).collect();
        }
        assert_eq!((bytes[0], bytes.len() % 6), (0xEE, 1));
        let mut values = vec![0.0; elements];
        for entry in bytes[1..].chunks_exact(6) {
            let index = u32::from_le_bytes(entry[..4].try_into().unwrap());
            values[index as usize] = value(&entry[4..]);
        }
        values
    }
}

/// A plan in which some tensors are encoded.
pub fn encoded_plan(
    tensors: Vec<(TensorSpec, Option<Toy>)>,
    strategy: &str,
    slice_elems: u64,
    world_size: u32,
    update: Update,
) -> Arc<Plan> {
    let strategy = Strategy::named(strategy, Some(slice_elems), 7).expect("a known strategy");
    let boxed = |toy: Toy| -> Box<dyn CodecSizes> { Box::new(toy) };
    let tensors = tensors.into_iter().map(|(spec, toy)| (spec, toy.map(boxed))).collect();
    let plan = Plan::build(tensors, strategy, update, world_size);
    Arc::new(plan.expect("a plan that can be built"))
}
