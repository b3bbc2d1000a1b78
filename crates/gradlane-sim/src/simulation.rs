//! The run: events in the order of time, each handled as `gradlane-net`'s driver would. Here are the
//! loop and the accelerators; `host` has the threads of a rank, `network` connections and ports,
//! `outcome` what it comes to.

use crate::accelerator::{Accelerator, Turn};
use crate::connections::Connections;
use crate::costs::{Costs, PACKET_BYTES};
use crate::draws::fraction;
use crate::error::SimError;
use crate::event_queue::{EventKind, EventQueue};
use crate::fabric::Fabric;
use crate::frame_table::FrameTable;
use crate::intra_node::{IntraNode, LocalCharges};
use crate::joined_lanes::JoinedLanes;
use crate::node::Node;
use crate::nodes::Channels;
use crate::port::{Port, PortSharing};
use crate::processors::Processors;
use crate::profile::{nanos, Act, Profile, Script};
use crate::rank_groups::RankGroups;
use crate::rank_lane::{IoTask, RankLane, RankLanes};
use crate::report::{Histogram, Report};
use crate::scenario::Scenario;
use crate::schemes::{root_tensors, RootTensor};
use crate::straggling::{Pace, Stops};
use crate::trace::{Lane, Span, Subject, Trace};
use crate::window_jitter::WindowJitter;
use gradlane_engine::{Engine, EngineOptions, Input, Plan, Staleness};
use gradlane_units::{Priority, Rank, Rng, Step, TensorId};
use gradlane_wire::{sealed_bytes, HEADER_BYTES};
use std::collections::VecDeque;
use std::sync::Arc;

/// A report, the plan, and the trace if requested.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The figures.
    pub report: Report,
    /// The plan that was simulated; where several ranks of a node carry, that of the first.
    pub plan: Arc<Plan>,
    /// All spans, where asked for.
    pub trace: Option<Trace>,
}

/// Simulates a scenario.
///
/// # Errors
/// [`SimError::Argument`] for a scenario that makes no sense; the others are errors of the simulator
/// or the engine.
pub fn simulate(scenario: &Scenario) -> Result<Outcome, SimError> {
    scenario.validate()?;
    let mut run = Run::new(scenario)?;
    run.go(&scenario.profile)?;
    Ok(run.outcome(scenario))
}

/// Costs in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charges {
    /// Whether frames are sealed.
    seal: bool,
    pub(crate) send_frame: f64,
    pub(crate) send_byte: f64,
    pub(crate) receive_frame: f64,
    pub(crate) receive_byte: f64,
    pub(crate) work: f64,
    pub(crate) reduce_byte: f64,
    pub(crate) encode_byte: f64,
    pub(crate) decode_byte: f64,
    pub(crate) command: u64,
    pub(crate) wake: u64,
    pub(crate) between_steps: u64,
}

#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) channels: Channels,
    /// Sums within nodes whose ranks add up.
    pub(crate) intra_node: Option<IntraNode>,
    pub(crate) script: Script,
    /// By tensor number, of those that have a root.
    pub(crate) root_tensors: Vec<Option<RootTensor>>,
    pub(crate) charges: Charges,
    /// Of a switch that adds up.
    free_charges: Charges,
    /// The first rank that is such a switch; none is where there are not so many ranks.
    first_switch: u32,
    pub(crate) processors: Processors,
    pub(crate) fabric: Fabric,
    pub(crate) groups: RankGroups,
    pub(crate) clipping: Option<Clipping>,
    /// Number of tensors of blocks.
    pub(crate) blocks: usize,
    /// Of the scenario; fewer may be simulated.
    pub(crate) ranks: u32,
    pub(crate) ns_per_byte: f64,
    /// Between two ranks of a node.
    pub(crate) local_ns_per_byte: f64,
    pub(crate) latency: u64,
    /// Bytes that the kernel takes of a connection on average before the first is acknowledged.
    pub(crate) window_bytes: f64,
    pub(crate) window_jitter: WindowJitter,
    pub(crate) queue_bytes: u64,
    pub(crate) low_water_bytes: u64,
    pub(crate) piece_bytes: u32,
    /// Time of the bytes that a shaped port lets through at once; 0 is a wire.
    pub(crate) burst_ns: u64,
    /// Whether connections are paced to their parts of their ports.
    pub(crate) paces: bool,
    pub(crate) jitter: f64,
    pub(crate) background: Option<Background>,
    pub(crate) stops: Vec<Stops>,
    pub(crate) rng: Rng,
    pub(crate) now: u64,
    pub(crate) events: EventQueue,
    pub(crate) nodes: Vec<Node>,
    pub(crate) lanes: RankLanes,
    /// Of nodes; then, where these have several ranks, of every rank within its node.
    pub(crate) ports: Vec<Port>,
    pub(crate) sharing: PortSharing,
    pub(crate) connections: Connections,
    pub(crate) frames: FrameTable,
    pub(crate) finished: u32,
    pub(crate) meters: Meters,
    /// Pushes that owners applied one by one.
    pub(crate) staleness: Staleness,
    pub(crate) trace: Option<Trace>,
    pub(crate) failure: Option<SimError>,
}

/// How ranks know the norm of all gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clipping {
    /// By the owners' sums of squares.
    Measured,
    /// By all means: each rank waits for them.
    Whole,
}

impl Clipping {
    fn of(scenario: &Scenario, channels: &Channels) -> Option<Clipping> {
        let plan = channels.plan(0);
        let tensors = TensorId(plan.tensors.len() as u32);
        // Several leaders of a node have parts of tensors, and none knows all squares; nor are they
        // measured beside blocks that a leader collects.
        let leaders = scenario.nodes.as_ref().map_or(0, |nodes| nodes.carried.len());
        let has_blocks = plan.tensors.iter().any(|it| it.scheme.has_blocks());
        let known = leaders == 0 || (leaders == 1 && !has_blocks);
        let measured = known && plan.check_measurable_squares(tensors).is_ok();
        scenario.clips.then_some(if measured { Clipping::Measured } else { Clipping::Whole })
    }
}

/// Other traffic: bursts of `bytes`, `interval_ns` apart on average.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Background {
    pub(crate) bytes: u32,
    pub(crate) interval_ns: f64,
}

#[derive(Debug, Default)]
pub(crate) struct Meters {
    pub(crate) frames: u64,
    /// Bytes that left each port: those to a rank that stands for several count for each.
    pub(crate) port_bytes: Vec<u64>,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    pub(crate) io_ns: u64,
    pub(crate) work_ns: u64,
    pub(crate) tx: Histogram,
    pub(crate) rx: Histogram,
}

impl Run {
    fn new(scenario: &Scenario) -> Result<Run, SimError> {
        let mut channels = Channels::of(scenario, scenario.ranks())?;
        let groups = match scenario.representatives {
            0 => RankGroups::none(scenario.ranks()),
            count => RankGroups::of(channels.plan(0), count)?,
        };
        let peers = channels.plan(0).peers_at_busier_end();
        if groups.weights.len() < scenario.ranks() as usize {
            channels = Channels::of(scenario, groups.weights.len() as u32)?;
        }
        let mut rng = Rng::new(scenario.seed);
        let positions = scenario.profile.forward_positions();
        let priority = |tensor: &TensorId| Priority(-(positions[tensor.index()] as i32));
        let spread: Vec<f64> = groups
            .weights
            .iter()
            .map(|_| 1.0 + scenario.compute_spread * fraction(&mut rng))
            .collect();
        let nodes = (0..).zip(&spread).map(|(rank, &slowness)| {
            let joined = JoinedLanes::new(channels.lane_plans(rank));
            let mut node = new_node(scenario, joined, slowness);
            // A rank that only serves computes nothing: it has finished before it begins.
            node.accelerator.finished = rank >= channels.topology.workers();
            node
        });
        let nodes: Vec<Node> = nodes.collect();
        let lanes = (0..nodes.len() as u32).flat_map(|rank| {
            let priorities: Vec<Priority> = channels.tensors(rank).iter().map(priority).collect();
            let lanes = channels.lane_plans(rank).iter();
            let member = Rank(channels.topology.member(rank));
            lanes.map(move |plan| new_lane(scenario, plan, member, priorities.clone()))
        });
        let lanes = RankLanes::new(scenario.lanes, lanes.collect());
        let network = &scenario.network;
        let window_bytes = network.window_bytes(peers) as f64;
        let mut window_jitter = WindowJitter::new(network, scenario.lanes);
        let members = channels.plan(0).world_size as usize;
        let mut connections = Connections::new(nodes.len(), scenario.lanes as usize, members);
        connections.iter_mut().for_each(|it| window_jitter.begin(it, window_bytes));
        let ns_per_byte = 8e9 / network.goodput_bps();
        let topology = channels.topology;
        let background = (network.background_share > 0.0 && topology.nodes() > 1).then(|| {
            let bytes = network.background_burst_bytes as f64;
            let interval_ns = bytes * ns_per_byte / network.background_share;
            Background { bytes: bytes as u32, interval_ns }
        });
        let interval = nanos(scenario.outputs.utilization_interval_s);
        let ranks = nodes.len() as u32;
        let piece_bytes = match network.piece_bytes {
            0 => PACKET_BYTES,
            bytes => u32::try_from(bytes).unwrap_or(u32::MAX),
        };
        Ok(Run {
            script: Script::new(&scenario.profile).under_schemes(scenario),
            root_tensors: root_tensors(scenario),
            charges: Charges::new(scenario, &scenario.costs),
            free_charges: Charges::new(scenario, &Costs::FREE),
            first_switch: if scenario.switch_sums { scenario.workers } else { u32::MAX },
            processors: Processors::new(scenario, topology),
            fabric: Fabric::new(scenario, topology.nodes()),
            ranks: scenario.ranks(),
            ns_per_byte,
            local_ns_per_byte: LocalCharges::new(scenario).ns_per_byte(),
            latency: nanos(network.latency_s),
            window_bytes,
            window_jitter,
            queue_bytes: network.queue_bytes,
            low_water_bytes: network.low_water_bytes,
            piece_bytes,
            burst_ns: (network.burst_bytes as f64 * ns_per_byte) as u64,
            paces: network.paces,
            jitter: scenario.compute_jitter,
            background,
            stops: scenario.stops.clone(),
            rng,
            now: 0,
            events: EventQueue::default(),
            ports: (0..topology.all_ports()).map(|_| Port::default()).collect(),
            sharing: PortSharing::new(topology.all_ports(), scenario.lanes),
            nodes,
            lanes,
            connections,
            frames: FrameTable::default(),
            finished: scenario.serving,
            meters: Meters {
                port_bytes: vec![0; topology.nodes() as usize],
                tx: Histogram::new(interval),
                rx: Histogram::new(interval),
                ..Meters::default()
            },
            staleness: Staleness::new(ranks),
            trace: scenario.outputs.trace.then(|| Trace::new(&scenario.outputs)),
            failure: None,
            intra_node: IntraNode::of(scenario, &channels),
            clipping: Clipping::of(scenario, &channels),
            blocks: channels.plan(0).tensors.iter().filter(|it| it.scheme.has_blocks()).count(),
            channels,
            groups,
        })
    }

    fn go(&mut self, profile: &Profile) -> Result<(), SimError> {
        for rank in 0..self.nodes.len() as u32 {
            let slowness = self.draw_slowness(rank);
            self.nodes[rank as usize].accelerator.slowness = slowness;
            if !self.nodes[rank as usize].accelerator.finished {
                self.events.at(0, EventKind::Compute, rank);
            }
            if self.background.is_some() && self.channels.topology.local(rank) == 0 {
                self.schedule_background(rank);
            }
            self.schedule_stop(rank);
        }
        while let Some((time, kind, subject)) = self.events.next() {
            self.now = time;
            match kind {
                EventKind::Depart => self.depart(subject),
                EventKind::Arrive => self.arrive(subject),
                EventKind::Listen => self.listen(self.lanes.id(subject)),
                EventKind::JobDone => self.job_done(self.lanes.id(subject)),
                EventKind::Compute => self.compute(subject),
                EventKind::RootResult => self.root_result(subject),
                EventKind::Background => self.burst(subject),
                EventKind::Local => self.act_on_node(subject),
                EventKind::Stop => self.stop(subject),
                EventKind::Pace => self.keep_pace(subject),
                EventKind::Clock => self.look_at_clock(self.lanes.id(subject)),
                EventKind::Line => self.leave_line(subject),
                EventKind::News => self.take_news(self.lanes.id(subject)),
            }
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
        }
        self.check_finished(profile)
    }

    fn check_finished(&self, profile: &Profile) -> Result<(), SimError> {
        let Some((rank, node)) =
            self.nodes.iter().enumerate().find(|(_, node)| !node.accelerator.finished)
        else {
            return Ok(());
        };
        let waits_for = match node.accelerator.blocked {
            Some(tensor) => format!("tensor {:?}", profile.tensors[tensor.index()].name),
            None => "nothing".to_string(),
        };
        let step = node.accelerator.step;
        Err(SimError::Stuck { rank: rank as u32, step, waits_for })
    }

    /// Returns the costs of a rank's host; a switch has none.
    pub(crate) fn charges_of(&self, rank: u32) -> &Charges {
        if self.is_switch(rank) {
            &self.free_charges
        } else {
            &self.charges
        }
    }

    /// Whether a rank is a switch that adds up.
    pub(crate) fn is_switch(&self, rank: u32) -> bool {
        rank >= self.first_switch
    }

    pub(crate) fn draw_slowness(&mut self, rank: u32) -> f64 {
        let jitter = if self.jitter > 0.0 { self.jitter * fraction(&mut self.rng) } else { 0.0 };
        self.nodes[rank as usize].slowness * (1.0 + jitter)
    }

    pub(crate) fn compute(&mut self, rank: u32) {
        if self.is_stopped(rank, EventKind::Compute, rank) {
            return;
        }
        loop {
            let index = rank as usize;
            let turn = self.nodes[index].accelerator.turn(&self.script, self.now);
            match turn {
                Turn::Until(time) => return self.events.at(time, EventKind::Compute, rank),
                Turn::Waits(tensor) => {
                    let step = Step(self.nodes[index].accelerator.step - 1);
                    if self.intra_node.is_none() {
                        self.hear_in_all(rank, IoTask::Needed(tensor, step));
                    }
                    return;
                }
                Turn::Rebuilds(tensor, waited, until) => {
                    self.ends_wait(rank, tensor, waited);
                    let now = self.now;
                    let node = &mut self.nodes[rank as usize];
                    let since = std::mem::replace(&mut node.computes_since, until);
                    let step = Step(node.accelerator.step);
                    self.span(rank, Lane::Forward, step, Subject::Step, since, now);
                    let subject = Subject::Tensor(tensor);
                    self.span(rank, Lane::Rebuild, step, subject, now, until);
                    return self.events.at(until, EventKind::Compute, rank);
                }
                Turn::Finished => {
                    self.finished += 1;
                    let node = &self.nodes[index];
                    let (step, since) = (Step(node.accelerator.step), node.computes_since);
                    self.span(rank, Lane::Forward, step, Subject::Step, since, self.now);
                    return;
                }
                Turn::Did(act, waited) => {
                    if !self.acted(rank, act, waited) {
                        return;
                    }
                }
            }
        }
    }

    /// The accelerator has done something; whether it goes on at once.
    fn acted(&mut self, rank: u32, act: Act, waited: u64) -> bool {
        let now = self.now;
        let node = &mut self.nodes[rank as usize];
        let step = Step(node.accelerator.step);
        match act {
            Act::Need(tensor) => self.ends_wait(rank, tensor, waited),
            Act::ForwardEnd => {
                let since = std::mem::replace(&mut node.computes_since, now);
                self.span(rank, Lane::Forward, step, Subject::Step, since, now);
                if self.channels.carries(rank) {
                    self.hear_in_all(rank, IoTask::Begin(step));
                }
            }
            Act::Ready(tensor) if self.intra_node.is_some() => {
                self.give_to_node(rank, tensor, step);
            }
            Act::Ready(tensor) => {
                self.hear_in_lanes_of(rank, tensor, IoTask::Gradient(tensor, step));
            }
            Act::StepEnd => {
                let since = node.computes_since;
                self.span(rank, Lane::Backward, step, Subject::Step, since, now);
                if self.intra_node.is_some() {
                    self.end_on_node(rank, step);
                } else {
                    self.hear_in_all(rank, IoTask::End(step));
                }
                if self.looks_around(rank) {
                    return false;
                }
                self.begin_next(rank);
            }
        }
        true
    }

    /// A rank's next step begins.
    pub(crate) fn begin_next(&mut self, rank: u32) {
        let slowness = self.draw_slowness(rank);
        let begin = self.now + self.charges.between_steps;
        let node = &mut self.nodes[rank as usize];
        node.computes_since = begin;
        node.accelerator.next_step(begin, slowness);
    }

    /// A rank has the result of a tensor from a time on.
    pub(crate) fn tensor_is_here(&mut self, rank: u32, tensor: TensorId, step: Step, time: u64) {
        let node = &mut self.nodes[rank as usize];
        if self.clipping.is_some() && node.clipped_step < step.0 {
            node.unclipped.push((tensor, time));
            let is_whole = node.unclipped.len() == self.root_tensors.len();
            match self.clipping {
                Some(Clipping::Whole) if is_whole => self.norm_is_known(rank, step, time),
                Some(Clipping::Measured) => self.norm_if_measured(rank, step),
                _ => {}
            }
            return;
        }
        self.tensor_is_usable(rank, tensor, step, time);
    }

    /// A rank may have the norm: it needs the owners' squares, and the means of blocks, which none owns.
    pub(crate) fn norm_if_measured(&mut self, rank: u32, step: Step) {
        let plan = self.channels.plan(rank);
        let is_block = |tensor: TensorId| plan.tensor(tensor).scheme.has_blocks();
        let node = &self.nodes[rank as usize];
        let times = node.unclipped.iter().filter(|it| is_block(it.0)).map(|it| it.1);
        let Some(squares_at) = node.squares_at.filter(|_| times.clone().count() == self.blocks)
        else {
            return;
        };
        let time = times.fold(squares_at, u64::max);
        self.norm_is_known(rank, step, time);
    }

    /// A rank has the norm of a step's gradients: the means that are here may be used.
    pub(crate) fn norm_is_known(&mut self, rank: u32, step: Step, time: u64) {
        let node = &mut self.nodes[rank as usize];
        node.clipped_step = step.0;
        node.squares_at = None;
        for (tensor, since) in std::mem::take(&mut node.unclipped) {
            self.tensor_is_usable(rank, tensor, step, time.max(since));
        }
    }

    fn tensor_is_usable(&mut self, rank: u32, tensor: TensorId, step: Step, time: u64) {
        let accelerator = &mut self.nodes[rank as usize].accelerator;
        if accelerator.result(tensor, step.0, time) {
            self.events.at(time, EventKind::Compute, rank);
        }
    }

    /// Forward has a tensor for which it has waited.
    fn ends_wait(&mut self, rank: u32, tensor: TensorId, waited: u64) {
        if waited == 0 {
            return;
        }
        let now = self.now;
        let node = &mut self.nodes[rank as usize];
        let step = Step(node.accelerator.step);
        let since = std::mem::replace(&mut node.computes_since, now);
        self.span(rank, Lane::Forward, step, Subject::Step, since, now - waited);
        let subject = Subject::Tensor(tensor);
        self.span(rank, Lane::Wait, step, subject, now - waited, now);
    }

    pub(crate) fn span(
        &mut self,
        rank: u32,
        lane: Lane,
        step: Step,
        subject: Subject,
        begin_ns: u64,
        end_ns: u64,
    ) {
        if let Some(trace) = &mut self.trace {
            trace.note(Span { rank, lane, step, subject, begin_ns, end_ns });
        }
    }

    pub(crate) fn fail(&mut self, rank: u32, reason: String) {
        let time_s = format!("{:.6}", self.now as f64 / 1e9);
        self.failure.get_or_insert(SimError::Engine { time_s, rank, reason });
    }
}

impl Charges {
    fn new(scenario: &Scenario, costs: &Costs) -> Charges {
        let sealed = |byte_s: f64| if scenario.seal { byte_s * 1e9 } else { 0.0 };
        Charges {
            seal: scenario.seal,
            send_frame: costs.send_frame_s * 1e9,
            send_byte: costs.send_byte_s * 1e9 + sealed(costs.seal_byte_s),
            receive_frame: costs.receive_frame_s * 1e9,
            receive_byte: costs.receive_byte_s * 1e9 + sealed(costs.open_byte_s),
            work: costs.work_s * 1e9,
            reduce_byte: costs.reduce_byte_s * 1e9,
            encode_byte: costs.encode_byte_s * 1e9,
            decode_byte: costs.decode_byte_s * 1e9,
            command: nanos(costs.command_s),
            wake: nanos(costs.wake_s),
            between_steps: nanos(costs.between_steps_s),
        }
    }

    /// Returns the bytes of a frame with a payload of `length` bytes.
    pub(crate) fn frame_bytes(&self, length: u32) -> u32 {
        if self.seal {
            sealed_bytes(length as usize) as u32
        } else {
            HEADER_BYTES as u32 + length
        }
    }
}

fn new_node(scenario: &Scenario, joined: JoinedLanes, slowness: f64) -> Node {
    Node {
        accelerator: Accelerator::new(scenario.profile.tensors.len(), u64::from(scenario.steps)),
        joined,
        root_requests: VecDeque::new(),
        computes_since: 0,
        pace: Pace::default(),
        stopped_until: 0,
        clipped_step: 0,
        squares_at: None,
        unclipped: Vec::new(),
        slowness,
    }
}

/// A lane with this plan, of a member of its channel.
fn new_lane(
    scenario: &Scenario,
    plan: &Arc<Plan>,
    member: Rank,
    priorities: Vec<Priority>,
) -> RankLane {
    let credit_bytes = match scenario.credit_bytes {
        0 => u64::from(scenario.frame_bytes),
        bytes => bytes,
    };
    let options = EngineOptions {
        frame_bytes: scenario.frame_bytes,
        credit_bytes,
        job_depth: scenario.work_depth.div_ceil(scenario.lanes as usize),
        ..EngineOptions::new(member)
    };
    let mut engine = Engine::after_initial(options, Arc::clone(plan), priorities);
    for peer in (0..plan.world_size).map(Rank).filter(|&peer| peer != member) {
        engine.tell(Input::Writable(peer, true));
    }
    RankLane::new(engine, scenario.work_threads_of_lane())
}
