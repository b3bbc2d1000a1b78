//! Ranks, their programs, the network between them, and faults.

use crate::common::model::{self, gradient};
use crate::common::node::Residuals;
use crate::common::toy::Toy;
use crate::common::{round, take_first, tensors, Node};
use gradlane_engine::{
    CodecSizes, EngineOptions, Event, Failure, GoingOn, Input, JobResult, PayloadDest, Plan,
    RingBytes, Scheme, Strategy, TensorSetting, Update,
};
use gradlane_units::{Rank, Rng, SliceId, Step, TensorId, Time};
use gradlane_wire::{FrameHeader, FrameKind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Virtual time that one action takes, in nanoseconds.
const ACTION_NS: u64 = 5_000;

/// Something that goes wrong.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// The rank's process ends.
    Kill(u32),
    /// The rank stands still until the others have long lost it; then it goes on.
    Stop(u32),
    /// The connection between two ranks breaks.
    Cut(u32, u32),
    /// The rank's program ends with an error.
    GiveUp(u32),
    /// From now on what the rank sends of slices is corrupted, and refused by those that it goes to.
    Spoil(u32),
}

/// The size of a cluster and of its training.
#[derive(Clone, Debug)]
pub struct Setting {
    pub ranks: u32,
    pub strategy: &'static str,
    pub sizes: Vec<u64>,
    pub slice_elems: u64,
    pub frame_bytes: u32,
    pub steps: u64,
    pub wire_depth: usize,
    /// The codec of every second tensor.
    pub codec: Option<Codec>,
    /// The seed of the tensors that go round a ring, and of where their sums end.
    pub rings: Option<u64>,
    /// Faults at most.
    pub faults: u32,
    /// Lanes of each rank.
    pub lanes: u32,
}

/// A codec with or without a residual.
#[derive(Clone, Copy, Debug)]
pub struct Codec {
    toy: Toy,
    keeps_residual: bool,
}

impl CodecSizes for Codec {
    fn name(&self) -> String {
        self.toy.name()
    }
    fn granule_elems(&self) -> u64 {
        self.toy.granule_elems()
    }
    fn bytes_max(&self, elements: u64) -> u64 {
        self.toy.bytes_max(elements)
    }
    fn is_fixed(&self) -> bool {
        self.toy.is_fixed()
    }
    fn residual_width(&self) -> u32 {
        u32::from(self.keeps_residual)
    }
    fn sizes(&self) -> Vec<u64> {
        self.toy.sizes()
    }
    fn ring_bytes(&self, _: u64, _: u32) -> Result<Option<RingBytes>, String> {
        Ok(None)
    }
}

impl Setting {
    pub fn small() -> Setting {
        Setting {
            ranks: 3,
            strategy: "p3",
            sizes: vec![5, 0, 9],
            slice_elems: 4,
            frame_bytes: 8,
            steps: 3,
            wire_depth: 2,
            codec: None,
            rings: None,
            faults: 2,
            lanes: 1,
        }
    }

    pub fn drawn(seed: u64) -> Setting {
        let mut rng = Rng::new(seed ^ 0x5e77);
        let count = 1 + rng.below(4);
        Setting {
            ranks: 2 + rng.below(4),
            strategy: ["p3", "slicing", "wfbp"][rng.below(3) as usize],
            sizes: (0..count).map(|_| u64::from(rng.below(24))).collect(),
            slice_elems: 2 + u64::from(rng.below(10)),
            frame_bytes: [4, 16, 1 << 16][rng.below(3) as usize],
            steps: 2 + u64::from(rng.below(4)),
            wire_depth: 1 + rng.below(4) as usize,
            codec: None,
            rings: None,
            faults: 2,
            lanes: 1,
        }
    }

    /// The same, with a drawn codec.
    pub fn encoded(self, seed: u64) -> Setting {
        let mut rng = Rng::new(seed ^ 0xc0dec);
        self.with_codec(1 + u64::from(rng.below(3)), rng.below(2) == 1, rng.below(2) == 1)
    }

    /// The same, with a codec whose encodings differ in length, or which keeps what it has not sent.
    pub fn with_codec(self, granule_elems: u64, varies: bool, keeps_residual: bool) -> Setting {
        let toy = Toy { granule_elems, varies, integer: false };
        Setting { codec: Some(Codec { toy, keeps_residual }), ..self }
    }

    /// The same, where most tensors go round a ring of two ranks to six. Their codec keeps nothing.
    pub fn with_rings(self, seed: u64) -> Setting {
        let ranks = 2 + Rng::new(seed ^ 0x0127).below(5);
        let codec = self.codec.map(|codec| Codec { keeps_residual: false, ..codec });
        Setting { ranks, codec, rings: Some(seed), faults: 3, ..self }
    }

    /// The same, with two lanes to four.
    pub fn with_lanes(self, seed: u64) -> Setting {
        Setting { lanes: 2 + Rng::new(seed ^ 0x1a9e).below(3), ..self }
    }

    /// The codec of a tensor.
    fn codec_of(&self, tensor: usize) -> Option<Codec> {
        self.codec.filter(|_| tensor.is_multiple_of(2))
    }

    fn plan(&self) -> Plan {
        let specs = tensors(&self.sizes).into_iter().enumerate();
        let mut rng = Rng::new(self.rings.unwrap_or_default());
        let coded = specs.map(|(index, spec)| {
            let codec = self.codec_of(index);
            let codec = codec.map(|codec| -> Box<dyn CodecSizes> { Box::new(codec) });
            let scheme = (self.rings.is_some() && rng.below(4) > 0).then_some(Scheme::Ring);
            TensorSetting { spec, scheme, codec }
        });
        let strategy = Strategy::named(self.strategy, Some(self.slice_elems), 7);
        let strategy = strategy.expect("a strategy");
        let plan = Plan::build(coded.collect(), strategy, Update::Worker, self.ranks);
        let mut plan = plan.expect("a plan");
        if self.rings.is_some() {
            // Tensors are smaller than a block of a ring, which would end on one rank.
            plan.slices.iter_mut().for_each(|slice| slice.owner = Rank(rng.below(self.ranks)));
        }
        plan
    }
}

enum Item {
    Frame(FrameHeader, Vec<u8>),
    Closed,
}

/// A call of a rank's program that a lane has not taken, with the values of its tensor.
type Call = (Input, Option<Vec<f32>>);

/// What a rank's program does next.
#[derive(Default)]
struct Program {
    /// The step that it is in, if it has begun one.
    step: Option<u64>,
    /// Tensors that it still has to submit, the last one first.
    left: usize,
    /// The means that it got, by step and tensor.
    means: BTreeMap<(u64, usize), Vec<u32>>,
    /// Lanes whose part of a mean is here, and whether any had a value.
    parts: BTreeMap<(u64, usize), (u32, bool)>,
    finished: bool,
}

/// By generation: the step of its change, and its members.
type Memberships = BTreeMap<u32, (u64, Vec<u32>)>;

pub struct World {
    setting: Setting,
    /// That of the start.
    plan: Arc<Plan>,
    /// By rank, and by lane of it.
    nodes: Vec<Node>,
    /// By node: what its engine has not been told by its rank's program and other lanes.
    calls: Vec<VecDeque<Call>>,
    programs: Vec<Program>,
    /// By lane and generation: the owner of each slice.
    owners: BTreeMap<(u32, u32), Vec<Rank>>,
    /// Nodes and generations that they have gone on with.
    told: BTreeSet<(u32, u32)>,
    /// By pair of nodes.
    wires: BTreeMap<(u32, u32), VecDeque<Item>>,
    /// Frames whose header was taken and whose payload is still arriving.
    arriving: BTreeMap<(u32, u32), (FrameHeader, Vec<u8>, PayloadDest)>,
    /// Pairs of nodes of which the first sends nothing more to the second.
    cut: BTreeSet<(u32, u32)>,
    stopped: BTreeSet<u32>,
    /// Whether a rank was stopped or cut off: it may be left out and end.
    may_end: BTreeSet<u32>,
    /// By generation: the register in the job's store.
    register: BTreeMap<u32, Vec<u8>>,
    /// Whether the store was lost, too.
    lost_store: bool,
    /// The rank whose slices are corrupted.
    spoiled: Option<u32>,
    /// Ranks that have refused some of them.
    refused: BTreeSet<u32>,
    faults: VecDeque<(u64, Fault)>,
    /// Faults that have struck.
    struck: u32,
    taken: u64,
    now: Time,
    rng: Rng,
    /// Whether frames of an old membership may arrive in a new one (a canary).
    mixes: bool,
    /// Whether ranks do not hear which results others have (a canary).
    hides_results: bool,
}

impl World {
    pub fn new(setting: &Setting, seed: u64) -> World {
        let plan = Arc::new(setting.plan());
        plan.check_goes_on().expect("training goes on under it");
        let lanes = setting.lanes;
        let parts: Vec<Arc<Plan>> =
            (0..lanes).map(|lane| Arc::new(plan.lane(lane, lanes))).collect();
        let node = |index| {
            let (rank, lane) = (index / lanes, index % lanes);
            let going_on = GoingOn {
                min_ranks: 1,
                collect: Duration::from_millis(200),
                answer: Duration::from_secs(2),
            };
            let options = EngineOptions {
                frame_bytes: setting.frame_bytes,
                credit_bytes: 64,
                going_on: Some(going_on),
                ..EngineOptions::new(Rank(rank))
            };
            let mut node = Node::with_options(&parts[lane as usize], options);
            node.toy = setting.codec.map(|codec| codec.toy);
            let keeps = setting.codec.is_some_and(|codec| codec.keeps_residual);
            node.residuals = keeps.then(Residuals::default);
            node
        };
        World {
            nodes: (0..setting.ranks * lanes).map(node).collect(),
            calls: (0..setting.ranks * lanes).map(|_| VecDeque::new()).collect(),
            programs: (0..setting.ranks).map(|_| Program::default()).collect(),
            setting: setting.clone(),
            owners: (0..).zip(&parts).map(|(lane, it)| ((lane, 0), owners_of(it))).collect(),
            told: BTreeSet::new(),
            wires: BTreeMap::new(),
            arriving: BTreeMap::new(),
            cut: BTreeSet::new(),
            stopped: BTreeSet::new(),
            may_end: BTreeSet::new(),
            register: BTreeMap::new(),
            lost_store: false,
            spoiled: None,
            refused: BTreeSet::new(),
            faults: VecDeque::new(),
            struck: 0,
            taken: 0,
            now: Time::ZERO,
            rng: Rng::new(seed),
            mixes: false,
            hides_results: false,
            plan,
        }
    }

    /// A cluster of any size with one fault to three, so that enough ranks are left each time.
    pub fn with_drawn_faults(setting: &Setting, seed: u64) -> World {
        let mut world = World::new(setting, seed);
        let mut rng = Rng::new(seed ^ 0xfa01);
        let mut left: Vec<u32> = (0..setting.ranks).collect();
        let mut at = u64::from(rng.below(4_000));
        for _ in 0..=rng.below(setting.faults) {
            if left.len() < 2 {
                break;
            }
            let rank = left.swap_remove(rng.below(left.len() as u32) as usize);
            let fault = match rng.below(5) {
                0 => Fault::Stop(rank),
                1 if left.len() > 1 => {
                    Fault::Cut(rank, left[rng.below(left.len() as u32) as usize])
                }
                _ => Fault::Kill(rank),
            };
            world.plan_fault(at, fault);
            // At once, in the middle of the change, or much later.
            at +=
                [0, u64::from(rng.below(300)), u64::from(rng.below(6_000))][rng.below(3) as usize];
        }
        world
    }

    pub fn plan_fault(&mut self, action: u64, fault: Fault) {
        self.faults.push_back((action, fault));
    }

    pub fn mix_memberships(&mut self) {
        self.mixes = true;
    }

    /// Checks that a rank that sends what is corrupted has evicted one other at most, and was then left, unless it had
    /// nothing more to send.
    pub fn check_spoiled(&self, seed: u64, spoiled: u32) {
        let failed: Vec<u32> = (0..self.setting.ranks)
            .filter(|&rank| rank != spoiled && !self.has_closed(rank))
            .collect();
        let text = self.describe();
        if text.contains("before another rank had all values to start from") {
            let others = self.setting.ranks as usize - 1;
            assert_eq!(failed.len(), others, "seed {seed}: some went on {text}");
            return;
        }
        assert!(failed.len() < 2, "seed {seed}: ranks {failed:?} were evicted {text}");
        let alone = self.refused.iter().eq(&failed);
        assert!(failed.is_empty() || alone || !self.has_closed(spoiled), "seed {seed} {text}");
        self.check_all_means(seed);
    }

    /// The store is lost, as with its host, rank 0.
    pub fn lose_store(&mut self) {
        self.lost_store = true;
    }

    /// Checks the end of a session whose rank 0 was lost while its values spread: whoever is left goes on, if any
    /// of them has all values, or all end with the same words, which name rank 0.
    pub fn check_start(&self, seed: u64) {
        let left = (1..self.setting.ranks).filter(|&rank| !self.is_dead(rank));
        if left.clone().any(|rank| self.has_closed(rank)) {
            return self.check(seed);
        }
        let mut texts = BTreeSet::new();
        for rank in left {
            let failure = self.failure(rank);
            let failure =
                failure.unwrap_or_else(|| panic!("seed {seed}: no end {}", self.describe()));
            assert!(!failure.timed_out, "seed {seed}: {failure}");
            assert!(failure.peer.is_none_or(|it| it == Rank(0)), "seed {seed}: {failure}");
            texts.insert(failure.reason.clone());
        }
        let first = texts.first().expect("somebody is left");
        let names = first.starts_with("rank 0 was lost") || self.lost_store;
        assert!(texts.len() == 1 && names, "seed {seed}: {texts:#?} {}", self.describe());
    }

    pub fn hide_results(&mut self) {
        self.hides_results = true;
    }

    pub fn actions(&self) -> u64 {
        self.taken
    }

    pub fn run_and_check(&mut self, seed: u64) {
        self.run();
        self.check(seed);
    }

    /// Runs until every rank that is left is through, or nothing moves any more.
    pub fn run(&mut self) {
        let mut idle = 0;
        while !self.is_over() {
            self.taken += 1;
            assert!(self.taken < 400_000, "no end: {}", self.describe());
            while self.faults.front().is_some_and(|&(at, _)| at <= self.taken) {
                let (_, fault) = self.faults.pop_front().expect("it was there");
                self.strike(fault);
            }
            let node = self.rng.below(self.nodes.len() as u32);
            let action = self.rng.below(self.actions_of_a_node());
            let moved = self.act(node, action);
            idle = if moved { 0 } else { idle + 1 };
            if idle > 40 && !self.sweep() && !self.pass_time() {
                break;
            }
        }
    }

    fn is_over(&self) -> bool {
        (0..self.setting.ranks)
            .all(|rank| self.is_dead(rank) || self.has_closed(rank) || self.failure(rank).is_some())
    }

    /// What a node may do: with one lane, calls are taken as they are made.
    fn actions_of_a_node(&self) -> u32 {
        if self.setting.lanes == 1 {
            6
        } else {
            7
        }
    }

    /// The numbers of a rank's lanes among the nodes.
    fn lanes_of(&self, rank: u32) -> Range<u32> {
        rank * self.setting.lanes..(rank + 1) * self.setting.lanes
    }

    fn rank_of(&self, node: u32) -> u32 {
        node / self.setting.lanes
    }

    /// The node that a lane of a rank is connected to at a peer.
    fn peer_of(&self, node: u32, rank: u32) -> u32 {
        rank * self.setting.lanes + node % self.setting.lanes
    }

    fn nodes_of(&self, rank: u32) -> impl Iterator<Item = &Node> + '_ {
        self.lanes_of(rank).map(|it| &self.nodes[it as usize])
    }

    fn is_dead(&self, rank: u32) -> bool {
        self.nodes_of(rank).all(|node| node.dead)
    }

    fn has_closed(&self, rank: u32) -> bool {
        self.nodes_of(rank).all(|node| node.closed)
    }

    fn failure(&self, rank: u32) -> Option<&Failure> {
        self.nodes_of(rank).find_map(|node| node.failure.as_ref())
    }

    /// The last step that is complete in all lanes.
    fn last_complete(&self, rank: u32) -> Option<Step> {
        self.nodes_of(rank).map(|node| node.completed.last().copied()).min().flatten()
    }

    fn describe(&self) -> String {
        let of = |node: &Node| {
            let engine = &node.engine;
            format!(
                "\n{}: at {} due {:?} dead {} closed {} failed {:?} changes {:?} waits {:?}",
                engine.rank(),
                self.now.0,
                engine.poll_timeout(),
                node.dead,
                node.closed,
                node.failure.as_ref().map(ToString::to_string),
                node.membership,
                engine.outstanding()
            )
        };
        self.nodes.iter().map(of).collect()
    }

    /// Whether a node does anything.
    fn is_alive(&self, node: u32) -> bool {
        let (rank, of) = (self.rank_of(node), &self.nodes[node as usize]);
        !of.dead && !of.closed && self.failure(rank).is_none() && !self.stopped.contains(&rank)
    }

    fn strike(&mut self, fault: Fault) {
        self.struck += 1;
        match fault {
            Fault::Kill(rank) => {
                if self.has_closed(rank) {
                    return;
                }
                for node in self.lanes_of(rank) {
                    self.nodes[node as usize].dead = true;
                    self.peers_of(node).into_iter().for_each(|it| self.close(node, it));
                }
            }
            Fault::Stop(rank) => {
                if self.has_closed(rank) {
                    return;
                }
                self.stopped.insert(rank);
                self.may_end.insert(rank);
                for node in self.lanes_of(rank) {
                    for peer in self.peers_of(node) {
                        self.close(node, peer);
                        self.wires.entry((peer, node)).or_default().push_back(Item::Closed);
                    }
                }
            }
            Fault::Spoil(rank) => {
                self.spoiled = Some(rank);
            }
            Fault::GiveUp(rank) => {
                let lane = self.drawn_lane();
                let node = self.lanes_of(rank).start + lane;
                if self.is_alive(node) {
                    self.may_end.insert(rank);
                    self.nodes[node as usize]
                        .engine
                        .tell(Input::Abort("ValueError in its program".to_owned()));
                    self.listen(node);
                    self.leave_if_ended(rank);
                }
            }
            Fault::Cut(one, other) => {
                self.may_end.insert(one);
                self.may_end.insert(other);
                // All connections, or that of one lane.
                let lane = self.drawn_lane();
                let is_whole = self.setting.lanes == 1 || self.rng.below(2) == 0;
                for node in self.lanes_of(one) {
                    if is_whole || node % self.setting.lanes == lane {
                        let peer = self.peer_of(node, other);
                        self.close(node, peer);
                        self.close(peer, node);
                    }
                }
            }
        }
    }

    fn drawn_lane(&mut self) -> u32 {
        match self.setting.lanes {
            1 => 0,
            lanes => self.rng.below(lanes),
        }
    }

    /// The nodes that a node has connections to.
    fn peers_of(&self, node: u32) -> Vec<u32> {
        let others = (0..self.setting.ranks).filter(|&it| it != self.rank_of(node));
        others.map(|it| self.peer_of(node, it)).collect()
    }

    /// Nothing more comes from a node to another one: what was on the way arrives in part.
    fn close(&mut self, from: u32, to: u32) {
        let kept = self.rng.below(6) as usize;
        let wire = self.wires.entry((from, to)).or_default();
        if wire.iter().any(|item| matches!(item, Item::Closed)) {
            return;
        }
        wire.truncate(kept);
        wire.push_back(Item::Closed);
        self.cut.insert((from, to));
    }

    fn act(&mut self, node: u32, action: u32) -> bool {
        if !self.is_alive(node) {
            return false;
        }
        self.now = Time(self.now.0 + ACTION_NS);
        self.nodes[node as usize].engine.tell(Input::Time(self.now));
        let moved = match action {
            0 => self.take_job(node),
            1 => self.do_job(node),
            2 => self.send(node),
            3 => self.choose(node),
            4 => self.receive(node),
            5 => self.go_on(self.rank_of(node)),
            _ => self.take_call(node),
        };
        self.listen(node);
        self.leave_if_ended(self.rank_of(node));
        moved
    }

    /// A rank whose session is over sends what it has still to say, and closes its connections: all lanes fail as
    /// one, or all have closed.
    fn leave_if_ended(&mut self, rank: u32) {
        let failure = self.failure(rank).cloned();
        if failure.is_none() && !self.has_closed(rank) {
            return;
        }
        for index in self.lanes_of(rank) {
            let node = &mut self.nodes[index as usize];
            if let Some(failure) = &failure {
                node.engine.tell(Input::EndAs(failure.clone()));
            }
            let mut last = Vec::new();
            while let Some(transmit) = node.unread.pop_front() {
                last.push((transmit.peer, transmit.header, node.read_frame(&transmit)));
            }
            while let Some(transmit) =
                node.unsent.pop_front().or_else(|| node.engine.poll_transmit())
            {
                node.engine.tell(Input::Sent(transmit.peer, transmit.header));
                last.push((transmit.peer, transmit.header, node.read_frame(&transmit)));
            }
            for (peer, header, payload) in last {
                let peer = peer.0 * self.setting.lanes + index % self.setting.lanes;
                self.put_on_wire((index, peer), header, payload);
            }
            for peer in self.peers_of(index) {
                if self.cut.insert((index, peer)) {
                    self.wires.entry((index, peer)).or_default().push_back(Item::Closed);
                }
            }
        }
    }

    fn sweep(&mut self) -> bool {
        let mut moved = false;
        for node in 0..self.nodes.len() as u32 {
            for action in 0..self.actions_of_a_node() {
                moved |= self.act(node, action);
            }
        }
        moved
    }

    /// Nothing moves: time passes until an engine wants to look again, or a rank that stood still goes on.
    fn pass_time(&mut self) -> bool {
        let limit = Time(self.now.0 + 60_000_000_000);
        let all = 0..self.nodes.len() as u32;
        let alive: Vec<u32> = all.filter(|&it| self.is_alive(it)).collect();
        let due = |&node: &u32| self.nodes[node as usize].engine.poll_timeout();
        let next = alive.iter().filter_map(due).min().filter(|&at| at < limit);
        if let Some(next) = next {
            self.now = self.now.max(next);
            for node in alive {
                self.nodes[node as usize].engine.tell(Input::Time(self.now));
                self.listen(node);
                self.leave_if_ended(self.rank_of(node));
            }
            return true;
        }
        // Faults that are still to come strike now.
        if let Some((_, fault)) = self.faults.pop_front() {
            self.strike(fault);
            return true;
        }
        self.stopped.pop_first().is_some()
    }

    /// A lane takes the next call of its rank's program, or news of another lane.
    fn take_call(&mut self, node: u32) -> bool {
        let Some((input, values)) = self.calls[node as usize].pop_front() else {
            return false;
        };
        let node = &mut self.nodes[node as usize];
        if let (Some(values), Input::GradientReady(tensor, _)) = (values, &input) {
            node.tensors[tensor.index()] = values;
        }
        node.engine.handle(input).expect("a call that fits");
        true
    }

    /// Has a lane take a call, in its turn.
    fn call(&mut self, node: u32, input: Input, values: Option<Vec<f32>>) {
        self.calls[node as usize].push_back((input, values));
        if self.setting.lanes == 1 {
            self.take_call(node);
        }
    }

    fn take_job(&mut self, node: u32) -> bool {
        let node = &mut self.nodes[node as usize];
        let job = node.engine.poll_job();
        let moved = job.is_some();
        node.jobs.extend(job);
        moved
    }

    fn do_job(&mut self, node: u32) -> bool {
        let pick = self.rng.next_u64() as usize;
        let node = &mut self.nodes[node as usize];
        if node.jobs.is_empty() {
            return false;
        }
        let job = node.jobs.swap_remove(pick % node.jobs.len());
        let result = node.execute(&job).map_or(JobResult::Written, JobResult::Encoded);
        node.engine.tell(Input::JobDone(job.id, result));
        true
    }

    fn choose(&mut self, node: u32) -> bool {
        let node = &mut self.nodes[node as usize];
        let Some(transmit) = node.engine.poll_transmit() else {
            return false;
        };
        node.unsent.push_back(transmit);
        true
    }

    /// The kernel takes a frame, or reads the memory of one that it has.
    fn send(&mut self, node: u32) -> bool {
        let pick = self.rng.next_u64();
        let (takes_first, pick) = (pick >> 63 == 0, pick as usize);
        (takes_first && self.hand_to_kernel(node, pick))
            || self.read(node, pick)
            || self.hand_to_kernel(node, pick)
    }

    fn hand_to_kernel(&mut self, node: u32, pick: usize) -> bool {
        // A full wire to one peer holds up no other.
        let of = &self.nodes[node as usize];
        let has_room = |peer: Rank| {
            let pair = (node, self.peer_of(node, peer.0));
            let unread = of.unread.iter().filter(|it| it.peer == peer).count();
            let held = self.wires.get(&pair).map_or(0, VecDeque::len) + unread;
            self.cut.contains(&pair) || held < self.setting.wire_depth
        };
        let unsent = of.unsent.iter().map(|it| it.peer);
        let open: Vec<Rank> = unsent.filter(|&it| has_room(it)).collect();
        let Some(&peer) = open.get(pick % open.len().max(1)) else {
            return false;
        };
        let node = &mut self.nodes[node as usize];
        let transmit = take_first(&mut node.unsent, peer);
        node.engine.tell(Input::Sent(peer, transmit.header));
        node.unread.push_back(transmit);
        true
    }

    fn read(&mut self, node: u32, pick: usize) -> bool {
        let of = &mut self.nodes[node as usize];
        if of.unread.is_empty() {
            return false;
        }
        let peer = of.unread[pick % of.unread.len()].peer;
        let transmit = take_first(&mut of.unread, peer);
        let payload = of.read_frame(&transmit);
        self.put_on_wire((node, self.peer_of(node, peer.0)), transmit.header, payload);
        true
    }

    fn put_on_wire(&mut self, pair: (u32, u32), header: FrameHeader, payload: Vec<u8>) {
        if !self.cut.contains(&pair) {
            self.wires.entry(pair).or_default().push_back(Item::Frame(header, payload));
        }
    }

    fn receive(&mut self, node: u32) -> bool {
        let first = self.rng.below(self.setting.ranks);
        let ranks = self.setting.ranks;
        for rank in (0..ranks).map(|offset| (first + offset) % ranks) {
            let from = self.peer_of(node, rank);
            if let Some((header, payload, dest)) = self.arriving.remove(&(from, node)) {
                self.land(rank, node, &header, &payload, dest);
                return true;
            }
            match self.wires.entry((from, node)).or_default().pop_front() {
                Some(Item::Frame(header, _))
                    if self.spoiled == Some(rank) && !header.kind.is_control() =>
                {
                    let reason = format!("{} sent a corrupted payload", Rank(rank));
                    let by = self.rank_of(node);
                    self.refused.insert(by);
                    self.nodes[node as usize].engine.tell(Input::RejectPeer(Rank(rank), reason));
                    self.lose(node, rank);
                    return true;
                }
                Some(Item::Frame(header, payload)) => {
                    self.announce(from, node, header, payload);
                    return true;
                }
                Some(Item::Closed) => {
                    self.lose(node, rank);
                    return true;
                }
                None => {}
            }
        }
        false
    }

    fn announce(&mut self, from: u32, to: u32, header: FrameHeader, mut payload: Vec<u8>) {
        if self.hides_results && header.kind == FrameKind::Holdings {
            // After the generation, in four bytes.
            payload[4..].fill(0);
        }
        let held = self.mixes && !header.kind.is_control() && self.rng.below(20) == 0;
        if held {
            // Behind what was sent after it.
            self.wires.entry((from, to)).or_default().push_back(Item::Frame(header, payload));
            return;
        }
        let rank = Rank(self.rank_of(from));
        let engine = &mut self.nodes[to as usize].engine;
        let dest = engine.handle(Input::Header(rank, header)).expect("a correct frame");
        self.arriving.insert((from, to), (header, payload, dest));
    }

    fn land(
        &mut self,
        from: u32,
        to: u32,
        header: &FrameHeader,
        payload: &[u8],
        dest: PayloadDest,
    ) {
        let (node, from) = (&mut self.nodes[to as usize], Rank(from));
        let taken = match dest {
            PayloadDest::Control => {
                node.engine.handle(Input::Control(from, *header, payload.to_vec()))
            }
            PayloadDest::Nothing => node.engine.handle(Input::Frame(from, *header)),
            PayloadDest::Region(region) => {
                node.write(region, payload);
                node.engine.handle(Input::Frame(from, *header))
            }
        };
        taken.expect("a correct frame");
    }

    /// A node notices that its connection to a rank is gone.
    fn lose(&mut self, node: u32, rank: u32) {
        let peer = self.peer_of(node, rank);
        self.arriving.remove(&(peer, node));
        self.wires.remove(&(peer, node));
        let is_told = self.cut.contains(&(node, peer));
        let of = &mut self.nodes[node as usize];
        of.unsent.retain(|transmit| transmit.peer != Rank(rank));
        of.unread.retain(|transmit| transmit.peer != Rank(rank));
        of.engine.tell(Input::PeerLost(Rank(rank), "connection closed".to_owned()));
        if !is_told {
            self.close(node, peer);
        }
    }

    /// The rank's program takes its next step, if it can.
    fn go_on(&mut self, rank: u32) -> bool {
        let index = rank as usize;
        let last_complete = self.last_complete(rank);
        let program = &mut self.programs[index];
        let done =
            program.step.is_none_or(|step| program.left == 0 && last_complete == Some(Step(step)));
        if !done {
            let (Some(step), Some(tensor)) = (program.step, program.left.checked_sub(1)) else {
                return false;
            };
            program.left = tensor;
            let id = TensorId(tensor as u32);
            // Sometimes a rank has no gradient, and for some tensors none has.
            let absent = step > 0 && gradient_is_absent(rank, tensor, step);
            let of = if step == 0 { 0 } else { rank };
            let values = gradient(of, tensor, step, self.setting.sizes[tensor]);
            for node in self.lanes_of(rank) {
                if !self.carries(node, id) {
                    continue;
                }
                match absent {
                    true => self.call(node, Input::TensorAbsent(id, Step(step)), None),
                    false => {
                        let input = Input::GradientReady(id, Step(step));
                        self.call(node, input, Some(values.clone()));
                    }
                }
            }
            return true;
        }
        let next = program.step.map_or(0, |step| step + 1);
        let input = if program.step == Some(self.setting.steps) {
            if program.finished {
                return false;
            }
            program.finished = true;
            Input::Finish
        } else {
            program.step = Some(next);
            program.left = self.setting.sizes.len();
            Input::StepBegin(Step(next))
        };
        self.lanes_of(rank).for_each(|node| self.call(node, input.clone(), None));
        true
    }

    /// Whether a node has a part of a tensor.
    fn carries(&self, node: u32, tensor: TensorId) -> bool {
        self.nodes[node as usize].engine.plan().has_slices_of(tensor)
    }

    /// Takes events: notes means, and spoils their memory, which is the program's again.
    fn listen(&mut self, index: u32) {
        let rank = self.rank_of(index);
        let node = &mut self.nodes[index as usize];
        node.take_events();
        for (tensor, step, absent) in std::mem::take(&mut node.ready) {
            self.note_part(index, tensor, step, absent);
        }
        for peer in std::mem::take(&mut self.nodes[index as usize].disconnected) {
            if !self.cut.contains(&(index, self.peer_of(index, peer.0))) {
                self.lose(index, peer.0);
                self.nodes[index as usize].take_events();
            }
        }
        let claims = std::mem::take(&mut self.nodes[index as usize].membership);
        for event in claims {
            if let Event::ClaimNeeded { generation, value } = &event {
                let held = (!self.lost_store).then(|| {
                    self.register.entry(*generation).or_insert_with(|| value.clone()).clone()
                });
                let answer = Input::ClaimAnswered(*generation, held);
                let node = &mut self.nodes[index as usize];
                node.engine.handle(answer).expect("an answer");
                node.take_events();
            }
            self.nodes[index as usize].membership.push(event);
        }
        let lead = self.lanes_of(rank).start;
        for event in std::mem::take(&mut self.nodes[index as usize].news) {
            match event {
                Event::TellLead(news) => self.call(lead, Input::Told(news), None),
                Event::TellLanes(news) => {
                    let others = self.lanes_of(rank).skip(1);
                    others.for_each(|it| self.call(it, Input::Told(news.clone()), None));
                }
                event => unreachable!("{event:?} is for no lane"),
            }
        }
        self.note_owners(index);
    }

    /// A lane's part of a mean is here.
    fn note_part(&mut self, index: u32, tensor: TensorId, step: Step, absent: bool) {
        let rank = self.rank_of(index);
        let count = self.lanes_of(rank).filter(|&it| self.carries(it, tensor)).count() as u32;
        let (node, key) = (&mut self.nodes[index as usize], (step.0, tensor.index()));
        let program = &mut self.programs[rank as usize];
        let values = &mut node.tensors[tensor.index()];
        let (here, has_value) = program.parts.entry(key).or_default();
        (*here, *has_value) = (*here + 1, *has_value | !absent);
        assert!(*here <= count, "{tensor} was released twice in {step}");
        let mean = program.means.entry(key).or_insert_with(|| vec![0; values.len()]);
        let plan = node.engine.plan();
        for slice in plan.slices_of(tensor).map(|id| plan.slice(id)) {
            let range = slice.start as usize..(slice.start + slice.length) as usize;
            let bits = values[range.clone()].iter().map(|it| it.to_bits());
            mean[range].iter_mut().zip(bits).for_each(|(to, from)| *to = from);
        }
        values.fill(f32::NAN);
        if *here == count && !*has_value {
            mean.clear();
        }
    }

    /// Notes who owns the slices in a membership that a lane has gone on with; it is the same on all ranks.
    fn note_owners(&mut self, index: u32) {
        let node = &self.nodes[index as usize];
        let lane = index % self.setting.lanes;
        for event in &node.membership {
            let Event::MembersChanged { generation, .. } = event else {
                continue;
            };
            if self.told.insert((index, *generation)) {
                let owners = owners_of(node.engine.plan());
                let first =
                    self.owners.entry((lane, *generation)).or_insert_with(|| owners.clone());
                assert_eq!(*first, owners, "owners of generation {generation} at node {index}");
            }
        }
    }

    /// The members of each generation and the step of its change, as the ranks have heard of them in a lane.
    pub fn memberships(&self, lane: u32) -> Memberships {
        let all: Vec<u32> = (0..self.setting.ranks).collect();
        let mut known = BTreeMap::from([(0, (0, all))]);
        let mut reasons: BTreeMap<u32, String> = BTreeMap::new();
        for node in self.nodes.iter().skip(lane as usize).step_by(self.setting.lanes as usize) {
            for event in &node.membership {
                let Event::MembersChanged { generation, members, step, reason } = event else {
                    continue;
                };
                let members: Vec<u32> = members.iter().map(|rank| rank.0).collect();
                let told = known.entry(*generation).or_insert_with(|| (step.0, members.clone()));
                assert_eq!(*told, (step.0, members), "generation {generation} at two ranks");
                let first = reasons.entry(*generation).or_insert_with(|| reason.clone());
                assert_eq!(first, reason, "generation {generation} for two reasons");
            }
        }
        known
    }

    /// Checks that slices keep their owner while it is left, and are owned by members.
    fn check_owners(&self, seed: u64, lane: u32) {
        let (owners, memberships) =
            (|| self.owners.range((lane, 0)..(lane + 1, 0)), self.memberships(lane));
        for ((_, before), ((_, generation), after)) in owners().zip(owners().skip(1)) {
            let members = &memberships[generation].1;
            for (old, new) in before.iter().zip(after) {
                assert!(members.contains(&new.0), "seed {seed}: {new} owns, and is lost");
                assert!(old == new || !members.contains(&old.0), "seed {seed}: {old} owns no more");
            }
        }
    }

    /// Checks what every rank that is left has got.
    pub fn check(&self, seed: u64) {
        (0..self.setting.lanes).for_each(|lane| self.check_owners(seed, lane));
        let ranks = || 0..self.setting.ranks;
        let fails_with = |rank, text: &str| {
            self.failure(rank).is_some_and(|failure| failure.to_string().contains(text))
        };
        let lost_start = |rank| fails_with(rank, "values to start from");
        // Where too few are left at once, nobody goes on.
        let removed = self.struck;
        let stalled = |rank| fails_with(rank, "did not agree") || fails_with(rank, "no majority");
        let may_stall = 2 * (self.setting.ranks - removed) <= self.setting.ranks && removed > 1;
        let nobody = !ranks().any(|rank| self.has_closed(rank));
        if ranks().any(lost_start) || (nobody && may_stall && ranks().any(stalled)) {
            for rank in ranks() {
                assert!(
                    self.is_dead(rank) || self.failure(rank).is_some(),
                    "seed {seed}: rank {rank} went on alone {}",
                    self.describe()
                );
            }
            return;
        }
        // The only one that was left and had the last results was lost before it had spread them.
        let lacks_results =
            |rank| self.struck > 1 && fails_with(rank, "others may have ended with them");
        for rank in ranks() {
            // After two losses at the end, a rank may find nobody left to agree with; it is through.
            let is_through = self.last_complete(rank) == Some(Step(self.setting.steps));
            let excused = self.is_dead(rank)
                || lacks_results(rank)
                || self.may_end.contains(&rank)
                || (is_through && self.struck > 1)
                || (may_stall && stalled(rank));
            let closed = self.has_closed(rank);
            assert!(closed || excused, "seed {seed}: rank {rank} {}", self.describe());
            if closed {
                let in_use: usize = self.nodes_of(rank).map(|it| it.engine.buffers_in_use()).sum();
                assert_eq!(in_use, 0, "seed {seed}: buffers leaked {}", self.describe());
                let steps = self.programs[rank as usize].means.keys().map(|key| key.0).max();
                let has_any = !self.setting.sizes.is_empty();
                assert_eq!(steps, has_any.then_some(self.setting.steps), "seed {seed}");
            }
        }
        if nobody && ranks().any(lacks_results) {
            return;
        }
        assert!(!nobody, "seed {seed}: nobody is left {}", self.describe());
        self.check_all_means(seed);
        for tensor in 0..self.setting.sizes.len() {
            if self.setting.codec_of(tensor).is_some_and(|codec| codec.keeps_residual) {
                (0..self.setting.lanes).for_each(|lane| self.check_held_back(seed, lane, tensor));
            }
        }
    }

    fn check_all_means(&self, seed: u64) {
        let memberships: Vec<Memberships> =
            (0..self.setting.lanes).map(|lane| self.memberships(lane)).collect();
        for step in 1..=self.setting.steps {
            for tensor in 0..self.setting.sizes.len() {
                self.check_means(seed, &memberships, step, tensor);
            }
        }
    }

    /// Generations whose members a mean of this step may be over. A change is in the step that it names; before,
    /// the members of before count, after it, the new.
    fn may_be_over(memberships: &Memberships, step: u64) -> Vec<u32> {
        let begins: Vec<(u32, u64)> =
            memberships.iter().map(|(&it, (step, _))| (it, *step)).collect();
        let ends = |index: usize| begins.get(index + 1).is_none_or(|&(_, end)| step <= end);
        let may =
            begins.iter().enumerate().filter(|&(index, &(_, begin))| begin <= step && ends(index));
        may.map(|(_, &(generation, _))| generation).collect()
    }

    /// Checks a tensor whose codec holds back what it has not sent: each contribution has counted once, and
    /// what is held back at the end is what the means lack, but for what a lost owner held back.
    fn check_held_back(&self, seed: u64, lane: u32, tensor: usize) {
        let memberships = &self.memberships(lane);
        let ranks = 0..self.setting.ranks;
        let closed = || ranks.clone().filter(|&rank| self.has_closed(rank)).map(|it| it as usize);
        let first = closed().next().expect("a rank is left");
        let node = |rank: usize| &self.nodes[rank * self.setting.lanes as usize + lane as usize];
        let plan = node(first).engine.plan();
        for id in plan.slices_of(TensorId(tensor as u32)) {
            let slice = plan.slice(id);
            let range = slice.start as usize..(slice.start + slice.length) as usize;
            let mut may = vec![HeldBack::nothing(self.setting.ranks, range.len())];
            for step in 1..=self.setting.steps {
                let found = self.programs[first].means[&(step, tensor)].get(range.clone());
                let mut after = Vec::new();
                for (before, generation) in may.iter().flat_map(|it| {
                    Self::may_be_over(memberships, step).into_iter().map(move |to| (it, to))
                }) {
                    if generation < before.generation {
                        continue;
                    }
                    let mut next = before.clone();
                    next.generation = generation;
                    let owner = |it| self.owners[&(lane, it)][id.index()];
                    if owner(generation) != owner(before.generation) {
                        next.owner.fill(0.0);
                    }
                    let part = |rank| {
                        gradient(rank, tensor, step, self.setting.sizes[tensor])[range.clone()]
                            .to_vec()
                    };
                    let members = &memberships[&generation].1;
                    let right = next.mean(members, |rank| {
                        (!gradient_is_absent(rank, tensor, step)).then(|| part(rank))
                    });
                    if right.is_none_or(|right| found == Some(&right[..])) && !after.contains(&next)
                    {
                        after.push(next);
                    }
                }
                assert!(
                    !after.is_empty(),
                    "seed {seed}: slice {slice:?} in step {step} is no mean of what was held back {}",
                    self.describe()
                );
                may = after;
            }
            let is_held = |it: &HeldBack| {
                let owner = self.owners[&(lane, it.generation)][id.index()].index();
                closed().all(|rank| {
                    let of = node(rank).residuals.as_ref().expect("it keeps residuals");
                    same(of.worker.get(&id), &it.worker[rank])
                        && (rank != owner || same(of.owner.get(&id), &it.owner))
                })
            };
            assert!(may.iter().any(is_held), "seed {seed}: {slice:?} holds back something else");
        }
    }

    /// The bits of a slice's mean over all ranks, as a ring adds it up; none where no rank has a gradient.
    fn ring_mean(&self, id: SliceId, step: u64) -> Option<Vec<u32>> {
        let slice = *self.plan.slice(id);
        let range = slice.start as usize..(slice.start + slice.length) as usize;
        let (tensor, numel) = (slice.tensor.index(), self.setting.sizes[slice.tensor.index()]);
        let given = |rank| {
            let has = !gradient_is_absent(rank, tensor, step);
            has.then(|| gradient(rank, tensor, step, numel))
        };
        if (0..self.setting.ranks).all(|rank| given(rank).is_none()) {
            return None;
        }
        let mean = match self.setting.codec_of(tensor) {
            Some(codec) => round::expected(&self.plan, id, codec.toy, |rank| {
                given(rank).map(|values| values[range.clone()].to_vec())
            }),
            None => model::mean(&self.plan, slice.tensor, given)[range].to_vec(),
        };
        Some(mean.iter().map(|value| value.to_bits()).collect())
    }

    fn check_means(&self, seed: u64, memberships: &[Memberships], step: u64, tensor: usize) {
        let of = |rank: usize| {
            let mean = self.programs[rank].means.get(&(step, tensor))?;
            Some((rank, mean)).filter(|_| self.has_closed(rank as u32))
        };
        let means: Vec<(usize, &Vec<u32>)> = (0..self.programs.len()).filter_map(of).collect();
        let (_, first) = means[0];
        for (rank, mean) in &means {
            assert!(
                mean == &first,
                "seed {seed}: rank {rank}, step {step}, tensor {tensor} {}",
                self.describe()
            );
        }
        let codec = self.setting.codec_of(tensor);
        if codec.is_some_and(|codec| codec.keeps_residual) {
            return;
        }
        let lanes = self.plan.lanes_of_slices(self.setting.lanes);
        for id in self.plan.slices_of(TensorId(tensor as u32)) {
            let memberships = &memberships[lanes[id.index()] as usize];
            let may = Self::may_be_over(memberships, step);
            let slice = self.plan.slice(id);
            let range = slice.start as usize..(slice.start + slice.length) as usize;
            let fits = |generation: &u32| {
                let right = if *generation == 0 && self.plan.tensors[tensor].scheme == Scheme::Ring
                {
                    self.ring_mean(id, step)
                } else {
                    let (members, numel) = (&memberships[generation].1, self.setting.sizes[tensor]);
                    let mean = mean_of(codec.is_some(), members, tensor, step, numel);
                    mean.map(|mean| mean[range.clone()].to_vec())
                };
                right.is_none_or(|right| first.get(range.clone()) == Some(&right[..]))
            };
            assert!(
                may.iter().any(fits),
                "seed {seed}: slice {slice:?} in step {step} is the mean of no membership {}",
                self.describe()
            );
        }
    }
}

/// What is held back of a slice, by one account of the memberships that its means are over.
#[derive(Clone, Debug, PartialEq)]
struct HeldBack {
    generation: u32,
    /// By rank.
    worker: Vec<Vec<f32>>,
    owner: Vec<f32>,
}

impl HeldBack {
    fn nothing(ranks: u32, elements: usize) -> HeldBack {
        let none = vec![0.0; elements];
        HeldBack { generation: 0, worker: vec![none.clone(); ranks as usize], owner: none }
    }

    /// The bits of the next mean over some ranks; none where no rank has a gradient.
    fn mean(
        &mut self,
        members: &[u32],
        gradient: impl Fn(u32) -> Option<Vec<f32>>,
    ) -> Option<Vec<u32>> {
        let mut present = 0;
        let mut mean: Option<Vec<f32>> = None;
        for &rank in members {
            let Some(mut part) = gradient(rank) else {
                continue;
            };
            present += 1;
            Toy::hold_back(&mut part, &mut self.worker[rank as usize]);
            let sent = part.into_iter().map(Toy::keep);
            mean = Some(match mean {
                None => sent.collect(),
                Some(sum) => sum.into_iter().zip(sent).map(|(sum, value)| sum + value).collect(),
            });
        }
        let mut mean = mean?;
        let zero = if present < members.len() { 0.0 } else { -0.0 };
        mean.iter_mut().for_each(|sum| *sum = (*sum + zero) / members.len() as f32);
        Toy::hold_back(&mut mean, &mut self.owner);
        Some(mean.into_iter().map(|value| Toy::keep(value).to_bits()).collect())
    }
}

/// Whether a residual, perhaps of zeros that nobody has touched, has these bits.
fn same(found: Option<&Vec<f32>>, right: &[f32]) -> bool {
    let Some(found) = found else {
        return right.iter().all(|value| *value == 0.0);
    };
    found.iter().map(|it| it.to_bits()).eq(right.iter().map(|it| it.to_bits()))
}

fn owners_of(plan: &Plan) -> Vec<Rank> {
    plan.slices.iter().map(|slice| slice.owner).collect()
}

fn gradient_is_absent(rank: u32, tensor: usize, step: u64) -> bool {
    let mut rng = Rng::new(u64::from(rank) * 77 + tensor as u64 * 1_001 + step * 13);
    rng.below(6) == 0 || (tensor as u64 + step).is_multiple_of(7)
}

/// The bits of the mean over some ranks; none where no rank has a gradient. The last rank encodes nothing.
fn mean_of(
    is_encoded: bool,
    members: &[u32],
    tensor: usize,
    step: u64,
    numel: u64,
) -> Option<Vec<u32>> {
    let is_lossy = is_encoded && members.len() > 1;
    let keep = |value: f32| if is_lossy { Toy::keep(value) } else { value };
    let part = |rank: u32| gradient(rank, tensor, step, numel).into_iter().map(keep);
    let has = |rank: u32| !gradient_is_absent(rank, tensor, step);
    let present: Vec<u32> = members.iter().copied().filter(|&rank| has(rank)).collect();
    let first = *present.first()?;
    let mut sum: Vec<f32> = part(first).collect();
    for &rank in &present[1..] {
        for (total, value) in sum.iter_mut().zip(part(rank)) {
            *total += value;
        }
    }
    let zero = if present.len() < members.len() { 0.0 } else { -0.0 };
    let divisor = members.len() as f32;
    Some(sum.iter().map(|total| keep((total + zero) / divisor).to_bits()).collect())
}
