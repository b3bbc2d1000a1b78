//! Plans with codecs, and what all ranks must have under one: worked out here tensor by tensor, with
//! nothing cut into slices and no owner.

use super::{each_rank, gradient, never, run_step, specs, tensor, world, TEST_TIMEOUT};
use gradlane_codec::{build, narrow, widen, Codec, DrawKey, FloatDtype, TensorShape};
use gradlane_engine::{CodecSizes, Plan, Strategy, TensorSpec, Update};
use gradlane_net::TensorCodec;
use gradlane_units::{Dtype, TensorId};
use std::sync::Arc;

/// What all ranks must have of one tensor, step after step.
pub trait Aggregation {
    /// The memory of every rank after the next step, in which all have their usual gradients.
    fn usual_step(&mut self, step: u64) -> Vec<u8>;
    /// What encoding a rank's contributions has lost so far.
    fn worker_residual(&self, rank: usize) -> &[f32];
}

/// Trains and compares every tensor and residual on every rank with `expected`, which makes what
/// a tensor of the plan must be, by its number.
pub fn trains_as<A: Aggregation>(
    json: &str,
    codec: &'static str,
    expected: impl Fn(u32, &Plan) -> A + Send + Sync + 'static,
) {
    let plan: Plan = serde_json::from_str(json).expect("a plan");
    each_rank(world(plan.world_size, json), move |channel| {
        let specs = specs(&channel);
        let mut oracles: Vec<A> =
            (0..specs.len() as u32).map(|index| expected(index, channel.plan())).collect();
        let initial = run_step(&channel, 0).expect("step 0");
        for (index, spec) in specs.iter().enumerate() {
            assert_eq!(initial[index].bytes, gradient(0, 0, index, spec).bytes, "exact");
        }
        for step in 1..=2 {
            let tensors = run_step(&channel, step).expect("a step");
            for (oracle, (found, spec)) in oracles.iter_mut().zip(tensors.iter().zip(&specs)) {
                let right = oracle.usual_step(step);
                assert!(found.bytes == right, "{codec}, {:?}, step {step}", spec.name);
            }
        }
        for (index, oracle) in oracles.iter().enumerate() {
            let tensor = TensorId(index as u32);
            let found = channel.worker_residual(tensor, &mut never).expect("a residual");
            assert_eq!(found, oracle.worker_residual(channel.rank().index()));
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
        let metrics = channel.metrics();
        assert_eq!((metrics.outgoing_frames, metrics.jobs_in_flight), (0, 0));
    });
}

/// A plan as JSON in which every tensor has this codec, but where it changes nothing.
pub fn plan_encoded(
    tensors: Vec<TensorSpec>,
    codec: &str,
    strategy: &str,
    slice_elems: u64,
    world_size: u32,
    update: Update,
) -> String {
    let strategy = Strategy::named(strategy, Some(slice_elems), 7).expect("a strategy");
    plan_encoded_by(tensors, codec, strategy, world_size, update)
}

/// The same by a strategy with rules of its own.
pub fn plan_encoded_by(
    tensors: Vec<TensorSpec>,
    codec: &str,
    strategy: Strategy,
    world_size: u32,
    update: Update,
) -> String {
    let coded = tensors.into_iter().map(|spec| {
        let codec = TensorCodec::parse(codec, spec.dtype, &[spec.numel]).expect("a codec");
        let boxed = codec.map(|codec| -> Box<dyn CodecSizes> { Box::new(codec) });
        (spec, boxed)
    });
    let plan = Plan::build(coded.collect(), strategy, update, world_size).expect("a plan");
    serde_json::to_string(&plan).expect("JSON")
}

/// Tensors of the sizes at which codecs have ends, and a large one.
pub fn odd_sizes(dtype: Dtype) -> Vec<TensorSpec> {
    [1, 63, 64, 65, 100_000].map(|numel| tensor(&format!("of {numel}"), numel, dtype)).to_vec()
}

/// One tensor's aggregation as it is defined.
#[derive(Clone)]
pub struct Oracle {
    spec: TensorSpec,
    index: u32,
    codec: Arc<dyn Codec>,
    pub worker_residuals: Vec<Vec<f32>>,
    pub owner_residual: Vec<f32>,
    /// By rank, all that was ever decoded of what it sent.
    pub sent: Vec<Vec<f64>>,
}

impl Oracle {
    pub fn new(codec: &str, index: u32, spec: &TensorSpec, world_size: u32) -> Oracle {
        let codec = build(&codec.parse().expect("a codec"), &TensorShape::new(&[spec.numel]));
        let width = if codec.keeps_residual() { codec.residual_width() } else { 0 };
        let zeros = vec![0.0; spec.numel as usize * width];
        Oracle {
            spec: spec.clone(),
            index,
            codec,
            worker_residuals: vec![zeros.clone(); world_size as usize],
            owner_residual: zeros,
            sent: vec![vec![0.0; spec.numel as usize]; world_size as usize],
        }
    }

    fn key(&self, step: u64, leg: u32) -> DrawKey {
        DrawKey { seed: 0, step, tensor: self.index, leg, first_element: 0 }
    }

    /// The memory of every rank after a step in which each rank has these values.
    pub fn step(&mut self, step: u64, values: impl Fn(u32) -> Vec<f32>) -> Vec<u8> {
        let all: Vec<u32> = (0..self.worker_residuals.len() as u32).collect();
        self.step_of(&all, step, values)
    }

    /// The memory of every rank after a step that only these ranks contribute to: of the others
    /// nothing is sent, lost or kept.
    pub fn step_of(
        &mut self,
        ranks: &[u32],
        step: u64,
        values: impl Fn(u32) -> Vec<f32>,
    ) -> Vec<u8> {
        let elements = self.spec.numel as usize;
        let keeps = self.codec.keeps_residual();
        let mut sum = vec![0.0; elements];
        let mut encoded = vec![0; self.codec.max_wire_bytes(elements)];
        for (position, &rank) in ranks.iter().enumerate() {
            let key = self.key(step, rank);
            let residual = keeps.then_some(self.worker_residuals[rank as usize].as_mut_slice());
            let used = self.codec.encode(&key, &values(rank), residual, &mut encoded);
            let done = match position {
                0 => self.codec.decode(&encoded[..used], &mut sum),
                _ => self.codec.decode_add(&encoded[..used], &mut sum),
            };
            done.expect("its own encoding");
            let mut alone = vec![0.0; elements];
            self.codec.decode(&encoded[..used], &mut alone).expect("its own encoding");
            let sent = self.sent[rank as usize].iter_mut();
            sent.zip(alone).for_each(|(sent, value)| *sent += f64::from(value));
        }
        sum.iter_mut().for_each(|value| *value /= ranks.len() as f32);
        let key = self.key(step, DrawKey::BROADCAST);
        let residual = keeps.then_some(self.owner_residual.as_mut_slice());
        let used = self.codec.encode(&key, &sum, residual, &mut encoded);
        self.codec.decode(&encoded[..used], &mut sum).expect("its own encoding");
        let dtype = FloatDtype::of(self.spec.dtype).expect("a tensor that is encoded");
        let mut bytes = vec![0; elements * dtype.element_bytes()];
        narrow(dtype, &sum, &mut bytes);
        bytes
    }
}

impl Aggregation for Oracle {
    fn usual_step(&mut self, step: u64) -> Vec<u8> {
        let (spec, index) = (self.spec.clone(), self.index as usize);
        self.step(step, |rank| {
            let bytes = gradient(rank, step, index, &spec).bytes;
            let mut values = vec![0.0; spec.numel as usize];
            widen(
                FloatDtype::of(spec.dtype).expect("a tensor that is encoded"),
                &bytes,
                &mut values,
            );
            values
        })
    }

    fn worker_residual(&self, rank: usize) -> &[f32] {
        &self.worker_residuals[rank]
    }
}
