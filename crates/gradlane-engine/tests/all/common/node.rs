//! One rank: its engine, its memory, the jobs that it does and the events that it hears.

use super::toy::Toy;
use gradlane_engine::{
    Engine, EngineOptions, Event, Failure, Input, Job, Memory, Operation, Payload, PayloadDest,
    Plan, Refusal, Region, Transmit,
};
use gradlane_units::{Rank, SliceId, SquareSum, Step, TensorId};
use gradlane_wire::FrameHeader;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Where one rank's block lies, and its bytes.
pub type Block = (Region, Vec<u8>);

/// One rank: its engine and its memory.
pub struct Node {
    pub engine: Engine,
    pub tensors: Vec<Vec<f32>>,
    pub parameters: Vec<Vec<f32>>,
    buffers: BTreeMap<u32, Vec<u8>>,
    pub jobs: Vec<Job>,
    /// Frames that the kernel does not have.
    pub unsent: VecDeque<Transmit>,
    /// Frames that the kernel has, and whose memory it has still to read.
    pub unread: VecDeque<Transmit>,
    pub ready: Vec<(TensorId, Step, bool)>,
    pub completed: Vec<Step>,
    pub applied: Vec<Applied>,
    pub switched: Vec<(u32, Step)>,
    /// Contributors of each step, as this rank heard of them.
    pub decided: Vec<(Step, Vec<Rank>)>,
    /// Steps that went on without this rank, and whether it was a whole step behind.
    pub left_out: Vec<(Step, bool)>,
    /// Blocks that were gathered, by rank.
    pub blocks: BTreeMap<(TensorId, Step), Vec<Option<Block>>>,
    /// Tensors whose blocks are all here and that this rank owes an answer.
    pub root_requests: Vec<(TensorId, Step)>,
    /// Sums of squares of all gradients, by step.
    pub squares: Vec<(Step, SquareSum)>,
    pub failure: Option<Failure>,
    pub suspicions: Vec<(Rank, Rank)>,
    /// `Event::ClaimNeeded` and `Event::MembersChanged`.
    pub membership: Vec<Event>,
    /// Peers whose connections are to be closed.
    pub disconnected: Vec<Rank>,
    /// What it tells the other lanes of its rank.
    pub news: Vec<Event>,
    pub closed: bool,
    pub dead: bool,
    /// Whether it sends nothing for now, so that what it would send waits in its queues.
    pub silent: bool,
    /// Frames in the order in which they were handed out.
    pub log: Vec<FrameHeader>,
    /// The codec, where the plan has one.
    pub toy: Option<Toy>,
    /// What the codec has not sent, where it keeps that.
    pub residuals: Option<Residuals>,
    /// Whether a peer that breaks the protocol ends the session, as over sockets, and not the test.
    pub(super) lenient: bool,
    /// Slices encoded, or being encoded, for other ranks, and not yet with the kernel.
    pub(super) ahead: BTreeMap<u32, BTreeSet<(Step, SliceId)>>,
}

/// What a codec has not sent, by slice.
#[derive(Default)]
pub struct Residuals {
    /// Of this rank's contributions.
    pub worker: BTreeMap<SliceId, Vec<f32>>,
    /// Of the results that it has reduced.
    pub owner: BTreeMap<SliceId, Vec<f32>>,
}

/// One `Event::Applied`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    pub slice: SliceId,
    pub rank: Rank,
    pub step: Step,
    pub version: u64,
    pub staleness: u64,
}

/// Takes the first frame to one of the peers out of a queue.
pub fn take_first(frames: &mut VecDeque<Transmit>, peer: Rank) -> Transmit {
    let position = frames.iter().position(|it| it.peer == peer).expect("it is there");
    frames.remove(position).expect("it is there")
}

impl Node {
    /// The bytes of a frame that the kernel reads now, and never again.
    pub fn read_frame(&mut self, transmit: &Transmit) -> Vec<u8> {
        let payload = self.payload(&transmit.payload);
        assert_eq!(payload.len(), transmit.header.length as usize);
        self.engine.tell(Input::Read(transmit.peer, transmit.header));
        payload
    }

    pub fn new(plan: &Arc<Plan>, rank: u32, frame_bytes: u32, credit_bytes: u64) -> Node {
        let options = EngineOptions { frame_bytes, credit_bytes, ..EngineOptions::new(Rank(rank)) };
        Node::with_options(plan, options)
    }

    pub fn with_options(plan: &Arc<Plan>, options: EngineOptions) -> Node {
        let zeros = |plan: &Plan| {
            plan.tensors.iter().map(|it| vec![0.0; it.spec.numel as usize]).collect::<Vec<_>>()
        };
        let rank = options.rank.0;
        let mut engine = Engine::new(options, plan.clone());
        for peer in (0..plan.world_size).filter(|&peer| peer != rank) {
            engine.tell(Input::Writable(Rank(peer), true));
        }
        Node {
            engine,
            tensors: zeros(plan),
            parameters: zeros(plan),
            buffers: BTreeMap::new(),
            jobs: Vec::new(),
            unsent: VecDeque::new(),
            unread: VecDeque::new(),
            ready: Vec::new(),
            completed: Vec::new(),
            applied: Vec::new(),
            switched: Vec::new(),
            decided: Vec::new(),
            left_out: Vec::new(),
            blocks: BTreeMap::new(),
            root_requests: Vec::new(),
            squares: Vec::new(),
            failure: None,
            suspicions: Vec::new(),
            membership: Vec::new(),
            disconnected: Vec::new(),
            news: Vec::new(),
            closed: false,
            dead: false,
            silent: false,
            log: Vec::new(),
            toy: None,
            residuals: None,
            lenient: false,
            ahead: BTreeMap::new(),
        }
    }

    /// Says that the blocks of a tensor are done with; they must be as they were.
    pub fn release(&mut self, tensor: TensorId, step: Step) {
        let blocks = self.blocks.remove(&(tensor, step)).expect("blocks that were gathered");
        for (region, bytes) in blocks.into_iter().flatten() {
            // That of this rank is the application's again.
            if matches!(region.memory, Memory::Buffer(_)) {
                assert_eq!(self.read(region), bytes, "{tensor} in {step}");
            }
        }
        self.engine.handle(Input::ReleaseBlocks(tensor, step)).expect("a release");
        self.take_events();
    }

    fn keep(&mut self, tensor: TensorId, step: Step, blocks: &[Option<Region>]) {
        let blocks = blocks.iter().map(|it| it.map(|region| (region, self.read(region))));
        self.blocks.insert((tensor, step), blocks.collect());
    }

    fn bytes_of(&self, memory: Memory) -> Vec<u8> {
        let floats = |values: &Vec<f32>| values.iter().flat_map(|it| it.to_le_bytes()).collect();
        match memory {
            Memory::Gradient(tensor) => floats(&self.tensors[tensor.index()]),
            Memory::Parameter(tensor) => floats(&self.parameters[tensor.index()]),
            Memory::Buffer(buffer) => self.buffers[&buffer.id].clone(),
        }
    }

    pub fn read(&self, region: Region) -> Vec<u8> {
        let bytes = self.bytes_of(region.memory);
        bytes[region.offset as usize..(region.offset + region.length) as usize].to_vec()
    }

    /// The bytes of a frame after its header.
    pub fn payload(&self, payload: &Payload) -> Vec<u8> {
        match payload {
            Payload::None => Vec::new(),
            Payload::Inline(bytes) => bytes.clone(),
            Payload::Region(region) => self.read(*region),
        }
    }

    pub fn write(&mut self, region: Region, payload: &[u8]) {
        assert_eq!(payload.len() as u64, region.length);
        if let Memory::Buffer(buffer) = region.memory {
            self.buffers.entry(buffer.id).or_insert_with(|| vec![0; buffer.bytes as usize]);
        }
        let mut bytes = self.bytes_of(region.memory);
        let start = region.offset as usize;
        bytes[start..start + payload.len()].copy_from_slice(payload);
        let floats = || bytes.chunks(4).map(|it| f32::from_le_bytes(it.try_into().unwrap()));
        match region.memory {
            Memory::Gradient(tensor) => self.tensors[tensor.index()] = floats().collect(),
            Memory::Parameter(tensor) => self.parameters[tensor.index()] = floats().collect(),
            Memory::Buffer(buffer) => {
                self.buffers.insert(buffer.id, bytes);
            }
        }
    }

    pub fn receive(&mut self, from: Rank, header: &FrameHeader, payload: &[u8]) {
        let landing = match self.engine.handle(Input::Header(from, *header)) {
            Err(Refusal::Protocol(error)) if self.lenient => {
                self.engine.tell(Input::RejectPeer(from, error.what));
                return self.take_events();
            }
            landing => landing.expect("a correct frame"),
        };
        match landing {
            PayloadDest::Control => {
                self.engine
                    .handle(Input::Control(from, *header, payload.to_vec()))
                    .expect("a correct frame");
            }
            PayloadDest::Nothing => {
                self.engine.handle(Input::Frame(from, *header)).expect("a correct frame");
            }
            PayloadDest::Region(region) => {
                self.write(region, payload);
                self.engine.handle(Input::Frame(from, *header)).expect("a correct frame");
            }
        }
        self.take_events();
    }

    pub(super) fn floats(&self, region: Region) -> Vec<f32> {
        let bytes = self.read(region);
        bytes.chunks(4).map(|it| f32::from_le_bytes(it.try_into().unwrap())).collect()
    }

    fn mean(&self, inputs: &[Region], absent: bool, divisor: u32) -> Vec<f32> {
        let mut sum = self.floats(inputs[0]);
        for &input in &inputs[1..] {
            for (total, value) in sum.iter_mut().zip(self.floats(input)) {
                *total += value;
            }
        }
        let zero = if absent { 0.0 } else { -0.0 };
        sum.iter().map(|total| (total + zero) / divisor as f32).collect()
    }

    pub(super) fn write_values(&mut self, region: Region, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|it| it.to_le_bytes()).collect();
        self.write(region, &bytes);
    }

    /// The mean of encoded contributions.
    fn decoded_mean(
        &self,
        slice: SliceId,
        inputs: &[Region],
        absent: bool,
        divisor: u32,
    ) -> Vec<f32> {
        let toy = self.toy.expect("a codec");
        let elements = self.engine.plan().slice(slice).length as usize;
        let decode = |region: &Region| toy.decode(&self.read(*region), elements);
        let mut sum = decode(&inputs[0]);
        for input in &inputs[1..] {
            for (total, value) in sum.iter_mut().zip(decode(input)) {
                *total += value;
            }
        }
        let zero = if absent { 0.0 } else { -0.0 };
        sum.iter().map(|total| (total + zero) / divisor as f32).collect()
    }

    /// Encodes into a buffer that may be larger; the bytes used, where they vary.
    pub(super) fn write_encoded(
        &mut self,
        region: Region,
        values: &[f32],
    ) -> (Vec<u8>, Option<u64>) {
        let toy = self.toy.expect("a codec");
        let bytes = toy.encode(values);
        self.write(Region { length: bytes.len() as u64, ..region }, &bytes);
        let used = bytes.len() as u64;
        assert!(used <= region.length);
        (bytes, toy.varies.then_some(used))
    }

    /// Does a job; the bytes of an encoding, where they vary.
    pub fn execute(&mut self, job: &Job) -> Option<u64> {
        let slice = job.slice;
        let sums = self.engine.plan().scale_bytes(slice).is_some();
        match &job.operation {
            Operation::RingEncode { .. }
            | Operation::RingMaxScales { .. }
            | Operation::RingBeginCodes { .. }
            | Operation::RingAddCodes { .. } => {
                let elements = self.engine.plan().slice(slice).length as usize;
                return self.execute_round(&job.operation, elements);
            }
            Operation::Decode { .. } if sums => {
                return self.execute_round(&job.operation, 0);
            }
            Operation::Encode { input, output } => {
                let mut values = self.floats(*input);
                if let Some(residuals) = &mut self.residuals {
                    Toy::hold_back(&mut values, residuals.worker.entry(slice).or_default());
                }
                // Whoever lands there from now on must not change what is sent.
                return self.write_encoded(*output, &values).1;
            }
            Operation::DecodeReduceEncode { inputs, absent, divisor, output, copy_to } => {
                let mut mean = self.decoded_mean(slice, inputs, *absent, *divisor);
                if let Some(residuals) = &mut self.residuals {
                    Toy::hold_back(&mut mean, residuals.owner.entry(slice).or_default());
                }
                let (bytes, used) = self.write_encoded(*output, &mean);
                if let Some(region) = copy_to {
                    let decoded = self.toy.expect("a codec").decode(&bytes, mean.len());
                    self.write_values(*region, &decoded);
                }
                return used;
            }
            Operation::Decode { from, to } => {
                let elements = self.engine.plan().slice(slice).length as usize;
                let decoded = self.toy.expect("a codec").decode(&self.read(*from), elements);
                self.write_values(*to, &decoded);
            }
            Operation::DecodeReduceApply { inputs, absent, divisor, parameters, output } => {
                let mean = self.decoded_mean(slice, inputs, *absent, *divisor);
                let updated: Vec<f32> =
                    self.floats(*parameters).iter().zip(&mean).map(|(p, g)| p - g).collect();
                self.write_values(*output, &updated);
            }
            other => self.execute_raw(other),
        }
        None
    }

    fn execute_raw(&mut self, operation: &Operation) {
        let bytes =
            |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|it| it.to_le_bytes()).collect() };
        match operation {
            Operation::Reduce { inputs, absent, divisor, output, copy_to } => {
                let mean = bytes(&self.mean(inputs, *absent, *divisor));
                self.write(*output, &mean);
                if let Some(region) = copy_to {
                    self.write(*region, &mean);
                }
            }
            Operation::ReduceApply { inputs, absent, divisor, parameters, output } => {
                let mean = self.mean(inputs, *absent, *divisor);
                let updated: Vec<f32> =
                    self.floats(*parameters).iter().zip(&mean).map(|(p, g)| p - g).collect();
                self.write(*output, &bytes(&updated));
            }
            Operation::Copy { from, to } => {
                let payload = self.read(*from);
                self.write(*to, &payload);
            }
            other => unreachable!("{other:?} is of encoded slices"),
        }
    }

    /// The sum of the squares of a region's values.
    pub(super) fn square_sum(&self, region: Region) -> SquareSum {
        let mut sum = SquareSum::default();
        self.floats(region).iter().for_each(|&value| sum.add_square_of(f64::from(value)));
        sum
    }

    pub fn take_events(&mut self) {
        while let Some(event) = self.engine.poll_event() {
            match event {
                Event::TensorReady { tensor, step, absent } => {
                    self.ready.push((tensor, step, absent));
                }
                Event::BlocksReady { tensor, step, blocks } => self.keep(tensor, step, &blocks),
                Event::RootRequest { tensor, step, blocks } => {
                    self.keep(tensor, step, &blocks);
                    self.root_requests.push((tensor, step));
                }
                Event::StepComplete { step } => self.completed.push(step),
                Event::Applied { slice, rank, step, version, staleness } => {
                    self.applied.push(Applied { slice, rank, step, version, staleness });
                }
                Event::ContributorsDecided { step, contributors } => {
                    if !contributors.contains(&self.engine.rank()) {
                        // What was encoded is dropped, but for pushes that have begun.
                        self.ahead.values_mut().for_each(|it| it.retain(|it| it.0 != step));
                    }
                    self.decided.push((step, contributors));
                }
                Event::SquaresReady { step, sum } => self.squares.push((step, sum)),
                Event::LeftOut { step, behind } => self.left_out.push((step, behind)),
                Event::Late { .. } => {}
                Event::PlanSwitched { version, step } => self.switched.push((version, step)),
                // Reading a buffer that is free, or writing past it, panics from now on.
                Event::BufferFree(buffer) => {
                    self.buffers.remove(&buffer.id);
                }
                Event::Suspected { by, suspect } => self.suspicions.push((by, suspect)),
                Event::ClaimNeeded { .. } | Event::MembersChanged { .. } => {
                    self.membership.push(event);
                }
                Event::Disconnect(peer) => self.disconnected.push(peer),
                Event::TellLead(_) | Event::TellLanes(_) => self.news.push(event),
                Event::Closed => self.closed = true,
                Event::Failed(failure) => self.failure = Some(failure),
            }
        }
    }
}
