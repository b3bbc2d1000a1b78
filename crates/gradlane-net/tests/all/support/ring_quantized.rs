//! What all ranks must have after steps of a ring whose sums are encoded: worked out slice by slice,
//! hop after hop, as the definitions say.

use super::encoded::Aggregation;
use super::gradient;
use gradlane_codec::{build, narrow, widen, Codec, DrawKey, FloatDtype, IntegerSums, TensorShape};
use gradlane_engine::{Plan, Slice, TensorSpec};
use gradlane_units::TensorId;
use std::ops::Range;
use std::sync::Arc;

/// One tensor's aggregation as it is defined.
pub struct RingOracle {
    spec: TensorSpec,
    index: u32,
    world_size: u32,
    slices: Vec<Slice>,
    codec: Arc<dyn Codec>,
    sums: Option<IntegerSums>,
    pub worker_residuals: Vec<Vec<f32>>,
    pub owner_residual: Vec<f32>,
}

fn part(slice: &Slice) -> Range<usize> {
    slice.start as usize..(slice.start + slice.length) as usize
}

impl RingOracle {
    pub fn new(codec: &str, index: u32, plan: &Plan) -> RingOracle {
        let spec = plan.tensor(TensorId(index)).spec.clone();
        let text: gradlane_codec::CodecSpec = codec.parse().expect("a codec");
        let sums = IntegerSums::new(&text, plan.world_size).expect("sums that fit");
        let codec = build(&text, &TensorShape::new(&[spec.numel]));
        let zeros = vec![0.0; if codec.keeps_residual() { spec.numel as usize } else { 0 }];
        RingOracle {
            spec,
            index,
            world_size: plan.world_size,
            slices: plan.slices_of(TensorId(index)).map(|id| *plan.slice(id)).collect(),
            codec,
            sums,
            worker_residuals: vec![zeros.clone(); plan.world_size as usize],
            owner_residual: zeros,
        }
    }

    fn key(&self, step: u64, leg: u32, slice: &Slice) -> DrawKey {
        DrawKey { seed: 0, step, tensor: self.index, leg, first_element: slice.start }
    }

    /// The memory of every rank after a step in which each rank has these values, or none.
    pub fn step(&mut self, step: u64, values: impl Fn(u32) -> Option<Vec<f32>>) -> Vec<u8> {
        let given: Vec<Option<Vec<f32>>> = (0..self.world_size).map(values).collect();
        let mut all = Vec::new();
        for slice in self.slices.clone() {
            let given: Vec<Option<Vec<f32>>> =
                given.iter().map(|it| it.as_ref().map(|it| it[part(&slice)].to_vec())).collect();
            all.extend(match self.sums {
                Some(sums) => self.codes(sums, step, &slice, &given),
                None => self.hops(step, &slice, &given),
            });
        }
        let dtype = FloatDtype::of(self.spec.dtype).expect("a tensor that is encoded");
        let mut bytes = vec![0; all.len() * dtype.element_bytes()];
        narrow(dtype, &all, &mut bytes);
        bytes
    }

    fn hops(&mut self, step: u64, slice: &Slice, given: &[Option<Vec<f32>>]) -> Vec<f32> {
        let (codec, keeps) = (Arc::clone(&self.codec), self.codec.keeps_residual());
        let elements = slice.length as usize;
        let mut room = vec![0; codec.max_wire_bytes(elements)];
        let mut sum: Option<Vec<f32>> = None;
        for hop in 1..self.world_size {
            let rank = (slice.owner.0 + hop) % self.world_size;
            let Some(own) = &given[rank as usize] else { continue };
            let mut total = own.clone();
            if let Some(sum) = &sum {
                total.iter_mut().zip(sum).for_each(|(own, sum)| *own += sum);
            }
            let key = self.key(step, rank, slice);
            let kept = &mut self.worker_residuals[rank as usize];
            let residual = keeps.then(|| &mut kept[part(slice)]);
            let used = codec.encode(&key, &total, residual, &mut room);
            codec.decode(&room[..used], &mut total).expect("its own encoding");
            sum = Some(total);
        }
        let own = given[slice.owner.index()].clone();
        let zero = if sum.is_none() || own.is_none() { 0.0 } else { -0.0 };
        let mut mean = match (sum, own) {
            (Some(sum), Some(own)) => sum.iter().zip(own).map(|(sum, own)| sum + own).collect(),
            (sum, own) => sum.or(own).expect("a gradient of some rank"),
        };
        if keeps {
            // Only a checkpoint can have left something here: it goes with the mean.
            let late = &mut self.worker_residuals[slice.owner.index()][part(slice)];
            mean.iter_mut().zip(late.iter()).for_each(|(mean, late)| *mean += late);
            late.fill(0.0);
        }
        mean.iter_mut().for_each(|it| *it = (*it + zero) / self.world_size as f32);
        let key = self.key(step, DrawKey::BROADCAST, slice);
        let residual = keeps.then(|| &mut self.owner_residual[part(slice)]);
        let used = codec.encode(&key, &mean, residual, &mut room);
        codec.decode(&room[..used], &mut mean).expect("its own encoding");
        mean
    }

    fn codes(
        &mut self,
        sums: IntegerSums,
        step: u64,
        slice: &Slice,
        given: &[Option<Vec<f32>>],
    ) -> Vec<f32> {
        let keeps = self.codec.keeps_residual();
        let elements = slice.length as usize;
        let mut scales = vec![0; sums.scale_bytes(elements)];
        for (rank, values) in given.iter().enumerate() {
            let kept = keeps.then(|| &self.worker_residuals[rank][part(slice)]);
            if let Some(values) = values {
                sums.max_scales(values, kept, &mut scales);
            }
        }
        let mut bytes = vec![0; sums.sum_bytes(elements)];
        sums.begin(&scales, elements, &mut bytes).expect("its own scales");
        for (rank, values) in given.iter().enumerate() {
            let key = self.key(step, rank as u32, slice);
            let kept = &mut self.worker_residuals[rank];
            let residual = (keeps && values.is_some()).then(|| &mut kept[part(slice)]);
            let values = values.clone().unwrap_or_else(|| vec![0.0; elements]);
            sums.add(&key, &values, residual, &mut bytes).expect("its own sums");
        }
        let mut mean = vec![0.0; elements];
        sums.mean(&bytes, &mut mean).expect("its own sums");
        mean
    }

    /// A rank's gradient of a step, as `gradient` makes it.
    pub fn usual_values(&self, rank: u32, step: u64) -> Vec<f32> {
        let bytes = gradient(rank, step, self.index as usize, &self.spec).bytes;
        let mut values = vec![0.0; self.spec.numel as usize];
        widen(
            FloatDtype::of(self.spec.dtype).expect("a tensor that is encoded"),
            &bytes,
            &mut values,
        );
        values
    }
}

impl Aggregation for RingOracle {
    fn usual_step(&mut self, step: u64) -> Vec<u8> {
        let all: Vec<Vec<f32>> =
            (0..self.world_size).map(|rank| self.usual_values(rank, step)).collect();
        self.step(step, |rank| Some(all[rank as usize].clone()))
    }

    fn worker_residual(&self, rank: usize) -> &[f32] {
        &self.worker_residuals[rank]
    }
}
