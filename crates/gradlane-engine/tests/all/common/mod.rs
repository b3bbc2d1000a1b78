//! A cluster of engines in one thread, with real bytes and a network that delivers in any order that
//! the seed says, as long as frames between two ranks keep their order (as over TCP).

pub mod model;
pub mod node;
pub mod round;
pub mod toy;

use gradlane_engine::{
    Failure, Input, Job, JobResult, Operation, Plan, Scheme, Strategy, TensorKind, TensorSpec,
    Update,
};
use gradlane_units::{Dtype, Priority, Rank, Rng, SliceId, Step, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind};
pub use node::{take_first, Node};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use toy::Toy;

/// The first frame of slice 0 in step 1, in which everything is as nought or as usual.
pub fn frame(kind: FrameKind, sender: Rank) -> FrameHeader {
    FrameHeader {
        kind,
        form: gradlane_wire::PayloadForm::Raw,
        flags: FrameFlags::NONE,
        step: Step(1),
        generation: 0,
        plan_version: 0,
        tensor: TensorId(0),
        slice: SliceId(0),
        priority: Priority(0),
        sender,
        offset: 0,
        block_bytes: 0,
        length: 0,
        hop: 0,
        payload_checksum: 0,
    }
}

/// Of the first 100 of 200 bytes that rank 1 gives as its block of tensor 0 in step 1.
pub fn block_header() -> FrameHeader {
    FrameHeader { block_bytes: 200, length: 100, ..frame(FrameKind::Block, Rank(1)) }
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
        kind: TensorKind::Parameter,
    };
    named.map(spec).collect()
}

pub fn plan(sizes: &[u64], strategy: &str, slice_elems: u64, world_size: u32) -> Arc<Plan> {
    let update = if strategy == "asgd" { Update::Server } else { Update::Worker };
    let strategy = Strategy::named(strategy, Some(slice_elems), 7).expect("a known strategy");
    let plan = Plan::build(tensors(sizes), strategy, update, world_size);
    Arc::new(plan.expect("a plan that can be built"))
}

/// Two tensors of a plan with a barrier between steps: neither is released before both are there.
pub fn releases_nothing_before_the_whole_step(plan: &Arc<Plan>) {
    let mut cluster = Cluster::new(plan, 64, 64, 5);
    cluster.step_zero();
    cluster.begin(Step(1));
    for node in &mut cluster.nodes {
        node.ready.clear();
        node.engine.handle(Input::GradientReady(TensorId(1), Step(1))).expect("ok");
    }
    cluster.run();
    assert!(cluster.nodes.iter().all(|node| node.ready.is_empty()));
    for node in &mut cluster.nodes {
        node.engine.handle(Input::GradientReady(TensorId(0), Step(1))).expect("ok");
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
        let nodes =
            (0..plan.world_size).map(|rank| Node::new(plan, rank, frame_bytes, credit_bytes));
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
            engine.handle(Input::StepBegin(Step(0))).expect("step 0 begins");
            let tensors = (0..engine.plan().tensors.len() as u32).map(TensorId);
            for tensor in tensors.filter(|&it| engine.plan().has_slices_of(it)).collect::<Vec<_>>()
            {
                engine.handle(Input::GradientReady(tensor, Step(0))).expect("values");
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
        let job = if node.dead { None } else { node.engine.poll_job() };
        let moved = job.is_some();
        if let Some(Job { operation: Operation::Encode { .. }, slice, step, .. }) = &job {
            let (plan, own) = (node.engine.plan(), node.engine.rank());
            let slice_of = plan.slice(*slice);
            let to = match plan.tensor(slice_of.tensor).scheme {
                Scheme::Ring => Rank((own.0 + 1) % plan.world_size),
                _ => slice_of.owner,
            };
            if to != own {
                let ahead = node.ahead.entry(to.0).or_default();
                assert!(ahead.insert((*step, *slice)), "{slice} is encoded twice in {step}");
                // The engine's default, and one that is more urgent than these.
                assert!(ahead.len() <= 5, "{} slices are encoded ahead", ahead.len());
            }
        }
        node.jobs.extend(job);
        moved
    }

    fn do_work(&mut self, index: usize) -> bool {
        let pick = self.rng.next_u64() as usize;
        let node = &mut self.nodes[index];
        if node.jobs.is_empty() || node.dead {
            return false;
        }
        let job = node.jobs.swap_remove(pick % node.jobs.len());
        if let Operation::AddSquares { input } = job.operation {
            let sum = node.square_sum(input);
            node.engine.tell(Input::JobDone(job.id, JobResult::Squares(sum)));
            node.take_events();
            return true;
        }
        let result = node.execute(&job).map_or(JobResult::Written, JobResult::Encoded);
        node.engine.tell(Input::JobDone(job.id, result));
        node.take_events();
        true
    }

    fn transmit(&mut self, node: usize) -> bool {
        let node = &mut self.nodes[node];
        if node.dead || node.silent {
            return false;
        }
        let Some(transmit) = node.engine.poll_transmit() else {
            return false;
        };
        node.log.push(transmit.header);
        node.unsent.push_back(transmit);
        true
    }

    /// The kernel takes a frame, or reads the memory of one that it has.
    fn hand_to_kernel(&mut self, index: usize) -> bool {
        let pick = self.rng.next_u64();
        let node = &self.nodes[index];
        if node.dead || (node.unsent.is_empty() && node.unread.is_empty()) {
            return false;
        }
        let (takes_first, pick) = (pick >> 63 == 0, pick as usize);
        (takes_first && self.send(index, pick)) || self.read(index, pick) || self.send(index, pick)
    }

    fn send(&mut self, index: usize, pick: usize) -> bool {
        let node = &mut self.nodes[index];
        if node.unsent.is_empty() {
            return false;
        }
        // Frames to one peer stay in order; which peer's goes first is up to the seed.
        let peer = node.unsent[pick % node.unsent.len()].peer;
        let wire = self.wires.entry((index as u32, peer.0)).or_default();
        let unread = node.unread.iter().filter(|it| it.peer == peer).count();
        if wire.len() + unread >= self.wire_depth {
            return false;
        }
        let transmit = take_first(&mut node.unsent, peer);
        node.engine.tell(Input::Sent(peer, transmit.header));
        node.unread.push_back(transmit);
        node.take_events();
        true
    }

    fn read(&mut self, index: usize, pick: usize) -> bool {
        let node = &mut self.nodes[index];
        if node.unread.is_empty() {
            return false;
        }
        let peer = node.unread[pick % node.unread.len()].peer;
        let transmit = take_first(&mut node.unread, peer);
        let (kind, flags) = (transmit.header.kind, transmit.header.flags);
        let begins = kind == FrameKind::RingReduce && transmit.header.hop == 1;
        if (kind == FrameKind::Push || begins) && flags.contains(FrameFlags::LAST) {
            let sent = (transmit.header.step, transmit.header.slice);
            node.ahead.entry(peer.0).or_default().remove(&sent);
        }
        let payload = node.read_frame(&transmit);
        let wire = self.wires.entry((index as u32, peer.0)).or_default();
        wire.push_back((transmit.header, payload));
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
                node.engine.tell(Input::PeerLost(Rank(rank), "connection closed".to_owned()));
                node.take_events();
            }
        }
    }

    pub fn begin(&mut self, step: Step) {
        let workers = self.workers() as usize;
        for node in &mut self.nodes[..workers] {
            node.engine.handle(Input::StepBegin(step)).expect("the step begins");
            node.take_events();
        }
    }

    /// Finishes all nodes and checks that each was closed and nothing leaked.
    pub fn finish(&mut self) {
        for node in &mut self.nodes {
            node.engine.handle(Input::Finish).expect("always taken");
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
        self.nodes[0].engine.handle(Input::SwitchPriorities(priorities)).expect("a switch");
    }
}
