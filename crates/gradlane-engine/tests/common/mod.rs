//! A cluster of engines in one thread, with real bytes and a network that delivers in any order that
//! the seed says, as long as frames between two ranks keep their order (as over TCP).

#![allow(dead_code, reason = "each test file uses its own part")]

pub mod model;
pub mod round;

use gradlane_engine::{
    Coding, Engine, EngineOptions, Event, Failure, Landing, Memory, Operation, Payload, Plan,
    Region, RingBytes, Role, Scheme, Strategy, TensorSpec, Transmit, Update, Work,
};
use gradlane_units::{Dtype, Priority, Rank, Rng, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Of the first 100 of 200 bytes that rank 1 gives as its block of tensor 0 in step 1.
pub fn block_header() -> FrameHeader {
    FrameHeader {
        kind: FrameKind::Block,
        codec: gradlane_wire::Codec::Raw,
        flags: FrameFlags::NONE,
        step: Step(1),
        generation: 0,
        plan_version: 0,
        tensor: TensorId(0),
        slice: SliceId(0),
        priority: Priority(0),
        sender: Rank(1),
        offset: 0,
        block_bytes: 200,
        length: 100,
        hop: 0,
        payload_crc: 0,
    }
}

/// Where one rank's block lies, and its bytes.
pub type Block = (Region, Vec<u8>);

/// One rank: its engine and its memory.
pub struct Node {
    pub engine: Engine,
    pub tensors: Vec<Vec<f32>>,
    pub parameters: Vec<Vec<f32>>,
    buffers: BTreeMap<u32, Vec<u8>>,
    works: Vec<Work>,
    unsent: VecDeque<Transmit>,
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
    pub questions: Vec<(TensorId, Step)>,
    pub failure: Option<Failure>,
    pub closed: bool,
    pub dead: bool,
    /// Frames in the order in which they were handed out.
    pub log: Vec<FrameHeader>,
    toy: Option<Toy>,
    /// Whether a peer that breaks the protocol ends the session, as over sockets, and not the test.
    lenient: bool,
    /// Slices encoded, or being encoded, for other ranks, and not yet with the kernel.
    ahead: BTreeMap<u32, BTreeSet<SliceId>>,
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

/// Frames on their way from one rank to another.
type Wire = VecDeque<(FrameHeader, Vec<u8>)>;

pub struct Cluster {
    pub nodes: Vec<Node>,
    pub rng: Rng,
    wires: BTreeMap<(u32, u32), Wire>,
    /// How many frames may be on a wire.
    pub wire_depth: usize,
}

pub fn tensors(sizes: &[u64]) -> Vec<TensorSpec> {
    let named = sizes.iter().enumerate();
    let spec = |(index, &numel): (usize, &u64)| TensorSpec {
        name: format!("layer{index}.weight"),
        numel,
        dtype: Dtype::F32,
        role: Role::Parameter,
    };
    named.map(spec).collect()
}

pub fn plan(sizes: &[u64], strategy: &str, slice_elems: u64, world_size: u32) -> Arc<Plan> {
    let update = if strategy == "asgd" { Update::Server } else { Update::Worker };
    let strategy = Strategy::named(strategy, Some(slice_elems), 7).expect("a known strategy");
    let plan = Plan::build(tensors(sizes), strategy, update, world_size);
    Arc::new(plan.expect("a plan that can be built"))
}

/// A codec that keeps the upper half of each number. When it varies, zeros are left out. With
/// integers a ring adds up codes of another kind, see `round`.
#[derive(Clone, Copy, Debug)]
pub struct Toy {
    pub granule_elems: u64,
    pub varies: bool,
    pub integer: bool,
}

impl Coding for Toy {
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

    fn encode(self, values: &[f32]) -> Vec<u8> {
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

    fn decode(self, bytes: &[u8], elements: usize) -> Vec<f32> {
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

/// Two tensors of a plan with a barrier between steps: neither is released before both are there.
pub fn releases_nothing_before_the_whole_step(plan: &Arc<Plan>) {
    let mut cluster = Cluster::new(plan, 64, 64, 5);
    cluster.step_zero();
    cluster.begin(Step(1));
    for node in &mut cluster.nodes {
        node.ready.clear();
        node.engine.gradient_ready(TensorId(1), Step(1)).expect("ok");
    }
    cluster.run();
    assert!(cluster.nodes.iter().all(|node| node.ready.is_empty()));
    for node in &mut cluster.nodes {
        node.engine.gradient_ready(TensorId(0), Step(1)).expect("ok");
    }
    cluster.run();
    assert!(cluster.nodes.iter().all(|node| node.ready.len() == 2));
}

/// A node that lost a rank in step 2, with the first tensor of that rank outstanding, says so.
pub fn names_the_lost(node: &Node, rank: Rank, seed: u64) {
    let failure = node.failure.as_ref().expect("a failure");
    assert_eq!(failure.peer, Some(rank), "seed {seed}: {failure}");
    assert_eq!(failure.last_complete, Some(Step(1)));
    assert!(failure.outstanding.tensors.contains(&"layer0.weight".to_string()), "{failure}");
    assert!(failure.outstanding.bytes > 0, "{failure}");
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
    let boxed = |toy: Toy| -> Box<dyn Coding> { Box::new(toy) };
    let tensors = tensors.into_iter().map(|(spec, toy)| (spec, toy.map(boxed))).collect();
    let plan = Plan::build(tensors, strategy, update, world_size);
    Arc::new(plan.expect("a plan that can be built"))
}

impl Cluster {
    /// As `new`, with this codec where the plan has one.
    pub fn with_toy(
        plan: &Arc<Plan>,
        toy: Toy,
        frame_bytes: u32,
        credit_bytes: u64,
        seed: u64,
    ) -> Cluster {
        let mut cluster = Cluster::new(plan, frame_bytes, credit_bytes, seed);
        cluster.nodes.iter_mut().for_each(|node| node.toy = Some(toy));
        cluster
    }

    pub fn new(plan: &Arc<Plan>, frame_bytes: u32, credit_bytes: u64, seed: u64) -> Cluster {
        let zeros = |plan: &Plan| {
            plan.tensors.iter().map(|it| vec![0.0; it.spec.numel as usize]).collect::<Vec<_>>()
        };
        let nodes = (0..plan.world_size).map(|rank| {
            let options =
                EngineOptions { frame_bytes, credit_bytes, ..EngineOptions::new(Rank(rank)) };
            let mut engine = Engine::new(options, plan.clone());
            for peer in (0..plan.world_size).filter(|&peer| peer != rank) {
                engine.handle_writable(Rank(peer), true);
            }
            Node {
                engine,
                tensors: zeros(plan),
                parameters: zeros(plan),
                buffers: BTreeMap::new(),
                works: Vec::new(),
                unsent: VecDeque::new(),
                ready: Vec::new(),
                completed: Vec::new(),
                applied: Vec::new(),
                switched: Vec::new(),
                decided: Vec::new(),
                left_out: Vec::new(),
                blocks: BTreeMap::new(),
                questions: Vec::new(),
                failure: None,
                closed: false,
                dead: false,
                log: Vec::new(),
                toy: None,
                lenient: false,
                ahead: BTreeMap::new(),
            }
        });
        Cluster {
            nodes: nodes.collect(),
            rng: Rng::new(seed),
            wires: BTreeMap::new(),
            wire_depth: 3,
        }
    }

    pub fn world(&self) -> u32 {
        self.nodes.len() as u32
    }

    /// Ranks that train: all but those that only serve.
    pub fn workers(&self) -> u32 {
        self.nodes[0].engine.plan().workers()
    }

    /// Spreads rank 0's values; afterwards all ranks that train hold them.
    pub fn step_zero(&mut self) {
        for rank in 0..self.workers() as usize {
            let engine = &mut self.nodes[rank].engine;
            engine.step_begin(Step(0)).expect("step 0 begins");
            for tensor in 0..engine.plan().tensors.len() as u32 {
                engine.gradient_ready(TensorId(tensor), Step(0)).expect("values");
            }
        }
        self.run();
    }

    /// Runs until nothing moves, one random action after another.
    pub fn run(&mut self) {
        let mut idle = 0;
        while idle < 60 {
            let node = self.rng.below(self.world()) as usize;
            let moved = match self.rng.below(5) {
                0 => self.take_work(node),
                1 => self.do_work(node),
                2 => self.hand_to_kernel(node),
                3 => self.transmit(node),
                _ => self.deliver(node),
            };
            idle = if moved { 0 } else { idle + 1 };
            if idle == 59 && self.sweep() {
                idle = 0;
            }
        }
        self.nodes.iter_mut().for_each(Node::take_events);
    }

    /// Runs until nothing moves and returns why the session failed, as each rank says it.
    pub fn run_to_failure(&mut self) -> Vec<String> {
        self.nodes.iter_mut().for_each(|node| node.lenient = true);
        self.run();
        self.nodes.iter().filter_map(|node| node.failure.as_ref().map(Failure::to_string)).collect()
    }

    /// A number of random actions.
    pub fn stir(&mut self, actions: u32) {
        for _ in 0..actions {
            let node = self.rng.below(self.world()) as usize;
            match self.rng.below(5) {
                0 => self.take_work(node),
                1 => self.do_work(node),
                2 => self.hand_to_kernel(node),
                3 => self.transmit(node),
                _ => self.deliver(node),
            };
        }
    }

    /// Every action once on every node: nothing is left only when nothing moves here.
    fn sweep(&mut self) -> bool {
        (0..self.nodes.len()).fold(false, |moved, node| {
            let actions = [
                self.take_work(node),
                self.do_work(node),
                self.transmit(node),
                self.hand_to_kernel(node),
                self.deliver(node),
            ];
            moved | actions.contains(&true)
        })
    }

    fn take_work(&mut self, node: usize) -> bool {
        let node = &mut self.nodes[node];
        let work = if node.dead { None } else { node.engine.poll_work() };
        let moved = work.is_some();
        if let Some(Work { operation: Operation::Encode { .. }, slice, .. }) = &work {
            let (plan, own) = (node.engine.plan(), node.engine.rank());
            let slice_of = plan.slice(*slice);
            let to = match plan.tensor(slice_of.tensor).scheme {
                Scheme::Ring => Rank((own.0 + 1) % plan.world_size),
                _ => slice_of.owner,
            };
            if to != own {
                let ahead = node.ahead.entry(to.0).or_default();
                assert!(ahead.insert(*slice), "{slice} is encoded twice");
                // The engine's default, and one that is more urgent than these.
                assert!(ahead.len() <= 5, "{} slices are encoded ahead", ahead.len());
            }
        }
        node.works.extend(work);
        moved
    }

    fn do_work(&mut self, index: usize) -> bool {
        let pick = self.rng.next_u64() as usize;
        let node = &mut self.nodes[index];
        if node.works.is_empty() || node.dead {
            return false;
        }
        let work = node.works.swap_remove(pick % node.works.len());
        match node.execute(&work) {
            Some(bytes) => node.engine.handle_encoded(work.id, bytes),
            None => node.engine.handle_work_done(work.id),
        }
        node.take_events();
        true
    }

    fn transmit(&mut self, node: usize) -> bool {
        let node = &mut self.nodes[node];
        if node.dead {
            return false;
        }
        let Some(transmit) = node.engine.poll_transmit() else {
            return false;
        };
        node.log.push(transmit.header);
        node.unsent.push_back(transmit);
        true
    }

    fn hand_to_kernel(&mut self, index: usize) -> bool {
        let pick = self.rng.next_u64() as usize;
        let node = &mut self.nodes[index];
        if node.unsent.is_empty() || node.dead {
            return false;
        }
        // Frames to one peer stay in order; which peer's goes first is up to the seed.
        let peer = node.unsent[pick % node.unsent.len()].peer;
        let position = node.unsent.iter().position(|it| it.peer == peer).expect("it was there");
        let wire = self.wires.entry((index as u32, peer.0)).or_default();
        if wire.len() >= self.wire_depth {
            return false;
        }
        let transmit = node.unsent.remove(position).expect("it was there");
        let payload = match &transmit.payload {
            Payload::None => Vec::new(),
            Payload::Inline(bytes) => bytes.clone(),
            Payload::Region(region) => node.read(*region),
        };
        assert_eq!(payload.len(), transmit.header.length as usize);
        wire.push_back((transmit.header, payload));
        let (kind, flags) = (transmit.header.kind, transmit.header.flags);
        let begins = kind == FrameKind::RingReduce && transmit.header.hop == 1;
        if (kind == FrameKind::Push || begins) && flags.contains(FrameFlags::LAST) {
            node.ahead.entry(peer.0).or_default().remove(&transmit.header.slice);
        }
        node.engine.handle_sent(&transmit);
        node.take_events();
        true
    }

    fn deliver(&mut self, index: usize) -> bool {
        let from = self.rng.below(self.world());
        let world = self.world();
        for from in (0..world).map(|offset| (from + offset) % world) {
            let wire = self.wires.entry((from, index as u32)).or_default();
            if let Some((header, payload)) = wire.pop_front() {
                if !self.nodes[index].dead {
                    self.nodes[index].receive(Rank(from), &header, &payload);
                }
                return true;
            }
        }
        false
    }

    /// Ends a node as SIGKILL would: its wires break, what was on them may be lost.
    pub fn kill(&mut self, rank: u32) {
        self.nodes[rank as usize].dead = true;
        for other in (0..self.world()).filter(|&other| other != rank) {
            self.wires.remove(&(rank, other));
            if !self.nodes[other as usize].dead {
                let node = &mut self.nodes[other as usize];
                node.engine.handle_peer_lost(Rank(rank), "connection closed");
                node.take_events();
            }
        }
    }

    pub fn begin(&mut self, step: Step) {
        let workers = self.workers() as usize;
        for node in &mut self.nodes[..workers] {
            node.engine.step_begin(step).expect("the step begins");
            node.take_events();
        }
    }

    /// Finishes all nodes and checks that each was closed and nothing leaked.
    pub fn finish(&mut self) {
        for node in &mut self.nodes {
            node.engine.finish();
            node.take_events();
        }
        self.run();
        for node in &self.nodes {
            assert!(node.closed, "{} was not closed: {:?}", node.engine.rank(), node.failure);
            assert_eq!(node.engine.buffers_in_use(), 0, "buffers leaked");
        }
    }

    pub fn switch(&mut self, priorities: &[i32]) {
        let priorities = priorities.iter().copied().map(Priority).collect();
        self.nodes[0].engine.switch_priorities(priorities).expect("a switch");
    }
}

impl Node {
    /// Says that the blocks of a tensor are done with; they must be as they were.
    pub fn release(&mut self, tensor: TensorId, step: Step) {
        let blocks = self.blocks.remove(&(tensor, step)).expect("blocks that were gathered");
        for (region, bytes) in blocks.into_iter().flatten() {
            // That of this rank is the application's again.
            if matches!(region.memory, Memory::Buffer(_)) {
                assert_eq!(self.read(region), bytes, "{tensor} in {step}");
            }
        }
        self.engine.release_blocks(tensor, step).expect("a release");
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

    fn write(&mut self, region: Region, payload: &[u8]) {
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
        let landing = match self.engine.handle_header(from, header) {
            Err(error) if self.lenient => {
                self.engine.reject_peer(from, &error.what);
                return self.take_events();
            }
            landing => landing.expect("a correct frame"),
        };
        match landing {
            Landing::Control => {
                self.engine.handle_control(from, header, payload).expect("a correct frame");
            }
            Landing::Nothing => self.engine.handle_frame(from, header).expect("a correct frame"),
            Landing::Region(region) => {
                self.write(region, payload);
                self.engine.handle_frame(from, header).expect("a correct frame");
            }
        }
        self.take_events();
    }

    fn floats(&self, region: Region) -> Vec<f32> {
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

    fn write_values(&mut self, region: Region, values: &[f32]) {
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
    fn write_encoded(&mut self, region: Region, values: &[f32]) -> (Vec<u8>, Option<u64>) {
        let toy = self.toy.expect("a codec");
        let bytes = toy.encode(values);
        self.write(Region { length: bytes.len() as u64, ..region }, &bytes);
        let used = bytes.len() as u64;
        assert!(used <= region.length);
        (bytes, toy.varies.then_some(used))
    }

    /// Does a piece of work; the bytes of an encoding, where they vary.
    fn execute(&mut self, work: &Work) -> Option<u64> {
        let slice = work.slice;
        let sums = self.engine.plan().scale_bytes(slice).is_some();
        match &work.operation {
            Operation::RingEncode { .. }
            | Operation::RingScale { .. }
            | Operation::RingBegin { .. }
            | Operation::RingAdd { .. } => {
                let elements = self.engine.plan().slice(slice).length as usize;
                return self.execute_round(&work.operation, elements);
            }
            Operation::Decode { .. } if sums => {
                return self.execute_round(&work.operation, 0);
            }
            Operation::Encode { input, output } => {
                let values = self.floats(*input);
                // Whoever lands there from now on must not change what is sent.
                return self.write_encoded(*output, &values).1;
            }
            Operation::Recode { inputs, absent, divisor, output, copy_to } => {
                let mean = self.decoded_mean(slice, inputs, *absent, *divisor);
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
            Operation::DecodeApply { inputs, absent, divisor, parameters, output } => {
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

    pub fn take_events(&mut self) {
        while let Some(event) = self.engine.poll_event() {
            match event {
                Event::TensorReady { tensor, step, absent } => {
                    self.ready.push((tensor, step, absent));
                }
                Event::BlocksReady { tensor, step, blocks } => self.keep(tensor, step, &blocks),
                Event::BlocksCollected { tensor, step, blocks } => {
                    self.keep(tensor, step, &blocks);
                    self.questions.push((tensor, step));
                }
                Event::StepComplete { step } => self.completed.push(step),
                Event::Applied { slice, rank, step, version, staleness } => {
                    self.applied.push(Applied { slice, rank, step, version, staleness });
                }
                Event::Decided { step, contributors } => self.decided.push((step, contributors)),
                Event::LeftOut { step, behind } => self.left_out.push((step, behind)),
                Event::Late { .. } => {}
                Event::PlanSwitched { version, step } => self.switched.push((version, step)),
                // Reading a buffer that is free, or writing past it, panics from now on.
                Event::BufferFree(buffer) => {
                    self.buffers.remove(&buffer.id);
                }
                Event::Closed => self.closed = true,
                Event::Failed(failure) => self.failure = Some(failure),
            }
        }
    }
}
