//! Ranks, their programs, the network between them, and faults.

use crate::common::model::{self, gradient};
use crate::common::node::Residuals;
use crate::common::toy::Toy;
use crate::common::{round, tensors, Node};
use gradlane_engine::{
    CodecSizes, EngineOptions, Event, GoingOn, Input, PayloadDest, Plan, RingBytes, Scheme,
    Strategy, TensorSetting, Update,
};
use gradlane_units::{Rank, Rng, SliceId, Step, TensorId, Time};
use gradlane_wire::{FrameHeader, FrameKind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
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

/// What a rank's program does next.
#[derive(Default)]
struct Program {
    /// The step that it is in, if it has begun one.
    step: Option<u64>,
    /// Tensors that it still has to submit, the last one first.
    left: usize,
    /// The means that it got, by step and tensor.
    means: BTreeMap<(u64, usize), Vec<u32>>,
    finished: bool,
}

pub struct World {
    setting: Setting,
    /// That of the start.
    plan: Arc<Plan>,
    nodes: Vec<Node>,
    programs: Vec<Program>,
    /// By generation: the owner of each slice.
    owners: BTreeMap<u32, Vec<Rank>>,
    /// Ranks and generations that they have gone on with.
    told: BTreeSet<(u32, u32)>,
    wires: BTreeMap<(u32, u32), VecDeque<Item>>,
    /// Frames whose header was taken and whose payload is still arriving.
    arriving: BTreeMap<(u32, u32), (FrameHeader, Vec<u8>, PayloadDest)>,
    /// Pairs, the lower rank first, that are connected no more; each side has been told, or will be.
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
        let node = |rank| {
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
            let mut node = Node::with_options(&plan, options);
            node.toy = setting.codec.map(|codec| codec.toy);
            let keeps = setting.codec.is_some_and(|codec| codec.keeps_residual);
            node.residuals = keeps.then(Residuals::default);
            node
        };
        World {
            nodes: (0..setting.ranks).map(node).collect(),
            programs: (0..setting.ranks).map(|_| Program::default()).collect(),
            setting: setting.clone(),
            owners: BTreeMap::from([(0, owners_of(&plan))]),
            told: BTreeSet::new(),
            wires: BTreeMap::new(),
            arriving: BTreeMap::new(),
            cut: BTreeSet::new(),
            stopped: BTreeSet::new(),
            may_end: BTreeSet::new(),
            register: BTreeMap::new(),
            lost_store: false,
            spoiled: None,
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

    /// Checks that a rank that sends what is corrupted has evicted one other at most, and was then left.
    pub fn check_spoiled(&self, seed: u64, spoiled: u32) {
        let failed: Vec<u32> = (0..self.setting.ranks)
            .filter(|&rank| rank != spoiled && !self.nodes[rank as usize].closed)
            .collect();
        let text = self.describe();
        if text.contains("before another rank had all values to start from") {
            assert_eq!(failed.len(), self.nodes.len() - 1, "seed {seed}: some went on {text}");
            return;
        }
        assert!(failed.len() < 2, "seed {seed}: ranks {failed:?} were evicted {text}");
        assert!(failed.is_empty() || !self.nodes[spoiled as usize].closed, "seed {seed} {text}");
        let memberships = self.memberships();
        for step in 1..=self.setting.steps {
            for tensor in 0..self.setting.sizes.len() {
                self.check_means(seed, &memberships, step, tensor);
            }
        }
    }

    /// The store is lost, as with its host, rank 0.
    pub fn lose_store(&mut self) {
        self.lost_store = true;
    }

    /// Checks the end of a session whose rank 0 was lost while its values spread: whoever is left goes on, if any
    /// of them has all values, or all end with the same words, which name rank 0.
    pub fn check_start(&self, seed: u64) {
        let left: Vec<&Node> = self.nodes[1..].iter().filter(|node| !node.dead).collect();
        if left.iter().any(|node| node.closed) {
            return self.check(seed);
        }
        let mut texts = BTreeSet::new();
        for node in &left {
            let failure = node.failure.as_ref();
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
            let node = self.rng.below(self.setting.ranks);
            let action = self.rng.below(6);
            let moved = self.act(node, action);
            idle = if moved { 0 } else { idle + 1 };
            if idle > 40 && !self.sweep() && !self.pass_time() {
                break;
            }
        }
    }

    fn is_over(&self) -> bool {
        (0..self.nodes.len()).all(|index| {
            let node = &self.nodes[index];
            node.dead || node.closed || node.failure.is_some()
        })
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

    fn is_alive(&self, rank: u32) -> bool {
        let node = &self.nodes[rank as usize];
        !node.dead && !node.closed && node.failure.is_none() && !self.stopped.contains(&rank)
    }

    fn strike(&mut self, fault: Fault) {
        self.struck += 1;
        match fault {
            Fault::Kill(rank) => {
                if self.nodes[rank as usize].closed {
                    return;
                }
                self.nodes[rank as usize].dead = true;
                (0..self.setting.ranks)
                    .filter(|&it| it != rank)
                    .for_each(|it| self.close(rank, it));
            }
            Fault::Stop(rank) => {
                if self.nodes[rank as usize].closed {
                    return;
                }
                self.stopped.insert(rank);
                self.may_end.insert(rank);
                (0..self.setting.ranks).filter(|&it| it != rank).for_each(|it| {
                    self.close(rank, it);
                    self.wires.entry((it, rank)).or_default().push_back(Item::Closed);
                });
            }
            Fault::Spoil(rank) => {
                self.spoiled = Some(rank);
            }
            Fault::GiveUp(rank) => {
                if self.is_alive(rank) {
                    self.may_end.insert(rank);
                    self.nodes[rank as usize].engine.abort("ValueError in its program");
                    self.listen(rank);
                    self.leave_if_ended(rank);
                }
            }
            Fault::Cut(one, other) => {
                self.may_end.insert(one);
                self.may_end.insert(other);
                self.close(one, other);
                self.close(other, one);
            }
        }
    }

    /// Nothing more comes from a rank to another one: what was on the way arrives in part.
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

    fn act(&mut self, rank: u32, action: u32) -> bool {
        if !self.is_alive(rank) {
            return false;
        }
        self.now = Time(self.now.0 + ACTION_NS);
        self.nodes[rank as usize].engine.handle_time(self.now);
        let moved = match action {
            0 => self.take_job(rank),
            1 => self.do_job(rank),
            2 => self.send(rank),
            3 => self.choose(rank),
            4 => self.receive(rank),
            _ => self.go_on(rank),
        };
        self.listen(rank);
        self.leave_if_ended(rank);
        moved
    }

    /// A rank whose session is over sends what it has still to say, and closes its connections.
    fn leave_if_ended(&mut self, rank: u32) {
        let node = &mut self.nodes[rank as usize];
        if node.failure.is_none() && !node.closed {
            return;
        }
        while let Some(transmit) = node.unsent.pop_front().or_else(|| node.engine.poll_transmit()) {
            let payload = node.payload(&transmit.payload);
            node.engine.handle_sent(&transmit);
            if !self.cut.contains(&(rank, transmit.peer.0)) {
                let wire = self.wires.entry((rank, transmit.peer.0)).or_default();
                wire.push_back(Item::Frame(transmit.header, payload));
            }
        }
        for other in (0..self.setting.ranks).filter(|&it| it != rank) {
            if self.cut.insert((rank, other)) {
                self.wires.entry((rank, other)).or_default().push_back(Item::Closed);
            }
        }
    }

    fn sweep(&mut self) -> bool {
        let mut moved = false;
        for rank in 0..self.setting.ranks {
            for action in 0..6 {
                moved |= self.act(rank, action);
            }
        }
        moved
    }

    /// Nothing moves: time passes until an engine wants to look again, or a rank that stood still goes on.
    fn pass_time(&mut self) -> bool {
        let limit = Time(self.now.0 + 60_000_000_000);
        let alive: Vec<u32> = (0..self.setting.ranks).filter(|&it| self.is_alive(it)).collect();
        let due = |&rank: &u32| self.nodes[rank as usize].engine.poll_timeout();
        let next = alive.iter().filter_map(due).min().filter(|&at| at < limit);
        if let Some(next) = next {
            self.now = self.now.max(next);
            for rank in alive {
                self.nodes[rank as usize].engine.handle_time(self.now);
                self.listen(rank);
                self.leave_if_ended(rank);
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

    fn take_job(&mut self, rank: u32) -> bool {
        let node = &mut self.nodes[rank as usize];
        let job = node.engine.poll_job();
        let moved = job.is_some();
        node.jobs.extend(job);
        moved
    }

    fn do_job(&mut self, rank: u32) -> bool {
        let pick = self.rng.next_u64() as usize;
        let node = &mut self.nodes[rank as usize];
        if node.jobs.is_empty() {
            return false;
        }
        let job = node.jobs.swap_remove(pick % node.jobs.len());
        match node.execute(&job) {
            Some(bytes) => node.engine.handle_encoded(job.id, bytes),
            None => node.engine.handle_job_done(job.id),
        }
        true
    }

    fn choose(&mut self, rank: u32) -> bool {
        let node = &mut self.nodes[rank as usize];
        let Some(transmit) = node.engine.poll_transmit() else {
            return false;
        };
        node.unsent.push_back(transmit);
        true
    }

    fn send(&mut self, rank: u32) -> bool {
        let pick = self.rng.next_u64() as usize;
        // A full wire to one peer holds up no other.
        let unsent = &self.nodes[rank as usize].unsent;
        let has_room = |peer: Rank| {
            let wire = self.wires.get(&(rank, peer.0));
            self.cut.contains(&(rank, peer.0))
                || wire.is_none_or(|wire| wire.len() < self.setting.wire_depth)
        };
        let open: Vec<Rank> = unsent.iter().map(|it| it.peer).filter(|&it| has_room(it)).collect();
        let Some(&peer) = open.get(pick % open.len().max(1)) else {
            return false;
        };
        let node = &mut self.nodes[rank as usize];
        let position = node.unsent.iter().position(|it| it.peer == peer).expect("it was there");
        let transmit = node.unsent.remove(position).expect("it was there");
        let payload = node.payload(&transmit.payload);
        if !self.cut.contains(&(rank, peer.0)) {
            let wire = self.wires.entry((rank, peer.0)).or_default();
            wire.push_back(Item::Frame(transmit.header, payload));
        }
        node.engine.handle_sent(&transmit);
        true
    }

    fn receive(&mut self, rank: u32) -> bool {
        let first = self.rng.below(self.setting.ranks);
        let ranks = self.setting.ranks;
        for from in (0..ranks).map(|offset| (first + offset) % ranks) {
            if let Some((header, payload, dest)) = self.arriving.remove(&(from, rank)) {
                self.land(from, rank, &header, &payload, dest);
                return true;
            }
            match self.wires.entry((from, rank)).or_default().pop_front() {
                Some(Item::Frame(header, _))
                    if self.spoiled == Some(from) && !header.kind.is_control() =>
                {
                    let reason = format!("{} sent a corrupted payload", Rank(from));
                    self.nodes[rank as usize].engine.reject_peer(Rank(from), &reason);
                    self.lose(rank, from);
                    return true;
                }
                Some(Item::Frame(header, payload)) => {
                    self.announce(from, rank, header, payload);
                    return true;
                }
                Some(Item::Closed) => {
                    self.lose(rank, from);
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
        let engine = &mut self.nodes[to as usize].engine;
        let dest = engine.handle_header(Rank(from), &header).expect("a correct frame");
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
            PayloadDest::Control => node.engine.handle_control(from, header, payload),
            PayloadDest::Nothing => node.engine.handle_frame(from, header),
            PayloadDest::Region(region) => {
                node.write(region, payload);
                node.engine.handle_frame(from, header)
            }
        };
        taken.expect("a correct frame");
    }

    /// A rank notices that a connection is gone.
    fn lose(&mut self, rank: u32, peer: u32) {
        self.arriving.remove(&(peer, rank));
        self.wires.remove(&(peer, rank));
        let is_told = self.cut.contains(&(rank, peer));
        let node = &mut self.nodes[rank as usize];
        node.unsent.retain(|transmit| transmit.peer != Rank(peer));
        node.engine.handle_peer_lost(Rank(peer), "connection closed");
        if !is_told {
            self.close(rank, peer);
        }
    }

    /// The rank's program takes its next step, if it can.
    fn go_on(&mut self, rank: u32) -> bool {
        let index = rank as usize;
        let (node, program) = (&mut self.nodes[index], &mut self.programs[index]);
        let done = program
            .step
            .is_none_or(|step| program.left == 0 && node.completed.last() == Some(&Step(step)));
        if !done {
            let (Some(step), Some(tensor)) = (program.step, program.left.checked_sub(1)) else {
                return false;
            };
            program.left = tensor;
            let id = TensorId(tensor as u32);
            // Sometimes a rank has no gradient, and for some tensors none has.
            let absent = step > 0 && gradient_is_absent(rank, tensor, step);
            if !absent {
                let of = if step == 0 { 0 } else { rank };
                node.tensors[tensor] = gradient(of, tensor, step, self.setting.sizes[tensor]);
            }
            let input = match absent {
                true => Input::TensorAbsent(id, Step(step)),
                false => Input::GradientReady(id, Step(step)),
            };
            node.engine.handle(input).expect("a contribution");
            return true;
        }
        if program.step == Some(self.setting.steps) {
            if program.finished {
                return false;
            }
            program.finished = true;
            node.engine.handle(Input::Finish).expect("always taken");
            return true;
        }
        let next = program.step.map_or(0, |step| step + 1);
        program.step = Some(next);
        program.left = self.setting.sizes.len();
        node.engine.handle(Input::StepBegin(Step(next))).expect("the step begins");
        true
    }

    /// Takes events: notes means, and spoils their memory, which is the program's again.
    fn listen(&mut self, rank: u32) {
        let index = rank as usize;
        let node = &mut self.nodes[index];
        node.take_events();
        for (tensor, step, absent) in std::mem::take(&mut node.ready) {
            let values = &mut node.tensors[tensor.index()];
            let bits = values.iter().map(|it| it.to_bits()).collect();
            let mean = if absent { Vec::new() } else { bits };
            values.fill(f32::NAN);
            let old = self.programs[index].means.insert((step.0, tensor.index()), mean);
            assert!(old.is_none(), "{tensor} was released twice in {step}");
        }
        for peer in std::mem::take(&mut self.nodes[index].disconnected) {
            if !self.cut.contains(&(rank, peer.0)) {
                self.lose(rank, peer.0);
                self.nodes[index].take_events();
            }
        }
        let claims = std::mem::take(&mut self.nodes[index].membership);
        for event in claims {
            if let Event::ClaimNeeded { generation, value } = &event {
                let held = (!self.lost_store).then(|| {
                    self.register.entry(*generation).or_insert_with(|| value.clone()).clone()
                });
                let answer = Input::ClaimAnswered(*generation, held);
                self.nodes[index].engine.handle(answer).expect("an answer");
                self.nodes[index].take_events();
            }
            self.nodes[index].membership.push(event);
        }
        self.note_owners(rank);
    }

    /// Notes who owns the slices in a membership that a rank has gone on with; it is the same on all ranks.
    fn note_owners(&mut self, rank: u32) {
        let node = &self.nodes[rank as usize];
        for event in &node.membership {
            let Event::MembersChanged { generation, .. } = event else {
                continue;
            };
            if self.told.insert((rank, *generation)) {
                let owners = owners_of(node.engine.plan());
                let first = self.owners.entry(*generation).or_insert_with(|| owners.clone());
                assert_eq!(*first, owners, "owners of generation {generation} at rank {rank}");
            }
        }
    }

    /// The members of each generation and the step of its change, as the ranks have heard of them.
    pub fn memberships(&self) -> BTreeMap<u32, (u64, Vec<u32>)> {
        let all: Vec<u32> = (0..self.setting.ranks).collect();
        let mut known = BTreeMap::from([(0, (0, all))]);
        let mut reasons: BTreeMap<u32, String> = BTreeMap::new();
        for node in &self.nodes {
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
    fn check_owners(&self, seed: u64, memberships: &BTreeMap<u32, (u64, Vec<u32>)>) {
        for ((_, before), (generation, after)) in self.owners.iter().zip(self.owners.iter().skip(1))
        {
            let members = &memberships[generation].1;
            for (old, new) in before.iter().zip(after) {
                assert!(members.contains(&new.0), "seed {seed}: {new} owns, and is lost");
                assert!(old == new || !members.contains(&old.0), "seed {seed}: {old} owns no more");
            }
        }
    }

    /// Checks what every rank that is left has got.
    pub fn check(&self, seed: u64) {
        let memberships = self.memberships();
        self.check_owners(seed, &memberships);
        let lost_start = |node: &Node| {
            node.failure.as_ref().is_some_and(|it| it.to_string().contains("values to start from"))
        };
        // Where too few are left at once, nobody goes on.
        let removed = self.struck;
        let stalled = |node: &Node| {
            let says = |it: &gradlane_engine::Failure, text| it.to_string().contains(text);
            let failure = node.failure.as_ref();
            failure.is_some_and(|it| says(it, "did not agree") || says(it, "no majority"))
        };
        let may_stall = 2 * (self.setting.ranks - removed) <= self.setting.ranks && removed > 1;
        let nobody = !self.nodes.iter().any(|node| node.closed);
        if self.nodes.iter().any(lost_start)
            || (nobody && may_stall && self.nodes.iter().any(stalled))
        {
            for (rank, node) in self.nodes.iter().enumerate() {
                assert!(
                    node.dead || node.failure.is_some(),
                    "seed {seed}: rank {rank} went on alone {}",
                    self.describe()
                );
            }
            return;
        }
        // The only one that was left and had the last results was lost before it had spread them.
        let lacks_results = |node: &Node| {
            let failure = node.failure.as_ref().map(ToString::to_string);
            self.struck > 1
                && failure.is_some_and(|it| it.contains("others may have ended with them"))
        };
        for (rank, node) in self.nodes.iter().enumerate() {
            let rank = rank as u32;
            // After two losses at the end, a rank may find nobody left to agree with; it is through.
            let is_through = node.completed.last() == Some(&Step(self.setting.steps));
            let excused = node.dead
                || lacks_results(node)
                || self.may_end.contains(&rank)
                || (is_through && self.struck > 1)
                || (may_stall && stalled(node));
            assert!(node.closed || excused, "seed {seed}: rank {rank} {}", self.describe());
            if node.closed {
                assert_eq!(node.engine.buffers_in_use(), 0, "seed {seed}: buffers leaked");
                let steps = self.programs[rank as usize].means.keys().map(|key| key.0).max();
                let has_any = !self.setting.sizes.is_empty();
                assert_eq!(steps, has_any.then_some(self.setting.steps), "seed {seed}");
            }
        }
        let survivors = self.nodes.iter().filter(|node| node.closed).count();
        if survivors == 0 && self.nodes.iter().any(lacks_results) {
            return;
        }
        assert!(survivors > 0, "seed {seed}: nobody is left {}", self.describe());
        for step in 1..=self.setting.steps {
            for tensor in 0..self.setting.sizes.len() {
                self.check_means(seed, &memberships, step, tensor);
            }
        }
        for tensor in 0..self.setting.sizes.len() {
            if self.setting.codec_of(tensor).is_some_and(|codec| codec.keeps_residual) {
                self.check_held_back(seed, &memberships, tensor);
            }
        }
    }

    /// Generations whose members a mean of this step may be over. A change is in the step that it names; before,
    /// the members of before count, after it, the new.
    fn may_be_over(memberships: &BTreeMap<u32, (u64, Vec<u32>)>, step: u64) -> Vec<u32> {
        let begins: Vec<(u32, u64)> =
            memberships.iter().map(|(&it, (step, _))| (it, *step)).collect();
        let ends = |index: usize| begins.get(index + 1).is_none_or(|&(_, end)| step <= end);
        let may =
            begins.iter().enumerate().filter(|&(index, &(_, begin))| begin <= step && ends(index));
        may.map(|(_, &(generation, _))| generation).collect()
    }

    /// Checks a tensor whose codec holds back what it has not sent: each contribution has counted once, and
    /// what is held back at the end is what the means lack, but for what a lost owner held back.
    fn check_held_back(
        &self,
        seed: u64,
        memberships: &BTreeMap<u32, (u64, Vec<u32>)>,
        tensor: usize,
    ) {
        let closed = || (0..self.nodes.len()).filter(|&rank| self.nodes[rank].closed);
        let first = closed().next().expect("a rank is left");
        let plan = self.nodes[first].engine.plan();
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
                    if self.owners[&generation][id.index()]
                        != self.owners[&before.generation][id.index()]
                    {
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
                let owner = self.owners[&it.generation][id.index()].index();
                closed().all(|rank| {
                    let of = self.nodes[rank].residuals.as_ref().expect("it keeps residuals");
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

    fn check_means(
        &self,
        seed: u64,
        memberships: &BTreeMap<u32, (u64, Vec<u32>)>,
        step: u64,
        tensor: usize,
    ) {
        let of = |rank: usize| {
            let mean = self.programs[rank].means.get(&(step, tensor))?;
            Some((rank, mean)).filter(|_| self.nodes[rank].closed)
        };
        let means: Vec<(usize, &Vec<u32>)> = (0..self.nodes.len()).filter_map(of).collect();
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
        let may = Self::may_be_over(memberships, step);
        for id in self.plan.slices_of(TensorId(tensor as u32)) {
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
