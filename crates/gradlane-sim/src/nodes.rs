//! Nodes of several ranks: the ranks that share a port, and their connections over it.
//!
//! Without sums on nodes every rank has connections to all others; what goes between two ranks of a
//! node stays inside. With them (`gradlane.init(local=...)`) the ranks of a node that carry each have
//! a channel to the ranks of the same number on the other nodes, and an engine that knows nodes alone.
//! `intra_node` has the sums within a node.

use crate::coded_tensors::ExpectedSizes;
use crate::error::SimError;
use crate::rank_lane::LaneId;
use crate::scenario::Scenario;
use gradlane_engine::{Plan, Scheme, TensorSpec};
use gradlane_units::TensorId;
use std::sync::Arc;

/// Which ranks share a port and a channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Topology {
    pub(crate) ranks: u32,
    pub(crate) per_node: u32,
    /// How many ranks, the last ones, only serve.
    serving: u32,
    /// How many ranks of a node carry for it; 0: every rank talks for itself.
    carriers: u32,
}

impl Topology {
    pub(crate) fn of(scenario: &Scenario, simulated: u32) -> Topology {
        let nodes = scenario.nodes.as_ref();
        Topology {
            ranks: simulated,
            per_node: nodes.map_or(1, |it| it.ranks),
            serving: scenario.serving,
            carriers: nodes.map_or(0, |it| it.carried.len() as u32),
        }
    }

    /// Whether ranks add up on their nodes.
    pub(crate) fn adds_up(self) -> bool {
        self.carriers > 0
    }

    /// Number of ranks that train.
    pub(crate) fn workers(self) -> u32 {
        self.ranks - self.serving
    }

    /// Number of nodes, each with a port.
    pub(crate) fn nodes(self) -> u32 {
        self.ranks / self.per_node
    }

    pub(crate) fn node(self, rank: u32) -> u32 {
        rank / self.per_node
    }

    /// The rank's number on its node.
    pub(crate) fn local(self, rank: u32) -> u32 {
        rank % self.per_node
    }

    /// Number of a rank in its channel.
    pub(crate) fn member(self, rank: u32) -> u32 {
        if self.adds_up() {
            self.node(rank)
        } else {
            rank
        }
    }

    /// The rank that is a member of another rank's channel.
    pub(crate) fn peer(self, rank: u32, member: u32) -> u32 {
        if self.adds_up() {
            member * self.per_node + self.local(rank)
        } else {
            member
        }
    }

    /// The ports that carry what goes from one rank to another: those of their nodes, or, within a
    /// node, a line of their own for each rank, which come after those of the nodes.
    pub(crate) fn ports(self, from: u32, to: u32) -> (u32, u32) {
        let (here, there) = (self.node(from), self.node(to));
        if here == there && self.per_node > 1 {
            (self.nodes() + from, self.nodes() + to)
        } else {
            (here, there)
        }
    }

    /// Number of ports with those within nodes.
    pub(crate) fn all_ports(self) -> u32 {
        self.nodes() + if self.per_node > 1 { self.ranks } else { 0 }
    }

    /// Whether a port is a node's.
    pub(crate) fn is_outside(self, port: u32) -> bool {
        port < self.nodes()
    }

    /// Bytes through an evenly loaded port over those of what all its rank's gradients are sent and
    /// come back as, by scheme: of a rank that trains, or of one that only serves.
    fn port_share(self, scheme: Scheme, serves: bool) -> f64 {
        let (ranks, local) = (f64::from(self.workers()), f64::from(self.per_node));
        match scheme {
            // What it gets from each worker is what it sends to each.
            Scheme::Ps if serves => return ranks / f64::from(self.serving) / 2.0,
            Scheme::Ps if self.serving > 0 => return 0.5,
            _ if serves => return 0.0,
            _ => {}
        }
        let nodes = ranks / local;
        match scheme {
            // A node's block, which has the bytes of its ranks' together, to each other node.
            Scheme::AllGather if self.adds_up() => nodes - 1.0,
            _ if self.adds_up() => (nodes - 1.0) / nodes,
            Scheme::AllGather | Scheme::GatherToRoot => local * (ranks - local),
            Scheme::Ring => (ranks - 1.0) / ranks,
            Scheme::Ps => local * (ranks - local) / ranks,
        }
    }
}

/// The channels of a cluster: one between all ranks, or one for each rank of a node that carries.
#[derive(Clone, Debug)]
pub(crate) struct Channels {
    pub(crate) topology: Topology,
    plans: Vec<Arc<Plan>>,
    /// By channel.
    expected: Vec<ExpectedSizes>,
    /// The profile's tensor that each of a plan's tensors is, or is a part of; by channel.
    tensors: Vec<Vec<TensorId>>,
    /// The plans of its lanes; by channel.
    lanes: Vec<Vec<Arc<Plan>>>,
}

impl Channels {
    /// The channels of a scenario of which so many ranks are simulated.
    ///
    /// # Errors
    /// As [`Scenario::plan`].
    pub(crate) fn of(scenario: &Scenario, simulated: u32) -> Result<Channels, SimError> {
        let topology = Topology::of(scenario, simulated);
        let whole = scenario.profile.specs();
        let all = || (0..whole.len() as u32).map(TensorId).collect();
        let Some(nodes) = scenario.nodes.as_ref().filter(|_| topology.adds_up()) else {
            let plan = Arc::new(scenario.plan(simulated, whole.clone())?);
            return Ok(Channels {
                topology,
                expected: vec![ExpectedSizes::of(&plan)],
                lanes: vec![lanes_of(&plan, scenario.lanes)],
                plans: vec![plan],
                tensors: vec![all()],
            });
        };
        let mut channels = Channels {
            topology,
            plans: Vec::new(),
            expected: Vec::new(),
            tensors: Vec::new(),
            lanes: Vec::new(),
        };
        for carried in &nodes.carried {
            let part = |&(tensor, numel): &(u32, u64)| TensorSpec {
                numel,
                ..whole[tensor as usize].clone()
            };
            let specs = carried.iter().map(part).collect();
            let plan = Arc::new(scenario.plan(topology.nodes(), specs)?);
            channels.lanes.push(lanes_of(&plan, scenario.lanes));
            channels.expected.push(ExpectedSizes::of(&plan));
            channels.plans.push(plan);
            channels.tensors.push(carried.iter().map(|it| TensorId(it.0)).collect());
        }
        Ok(channels)
    }

    /// The plan of a rank's channel; of one that carries nothing that of the first.
    pub(crate) fn plan(&self, rank: u32) -> &Arc<Plan> {
        self.plans.get(self.number(rank)).unwrap_or(&self.plans[0])
    }

    /// The bytes that encodings of a rank's channel are expected to take.
    pub(crate) fn expected(&self, rank: u32) -> &ExpectedSizes {
        self.expected.get(self.number(rank)).unwrap_or(&self.expected[0])
    }

    /// The plans of the lanes of a rank's channel.
    pub(crate) fn lane_plans(&self, rank: u32) -> &[Arc<Plan>] {
        self.lanes.get(self.number(rank)).unwrap_or(&self.lanes[0])
    }

    /// The plan of a lane.
    pub(crate) fn lane_plan(&self, id: LaneId) -> &Arc<Plan> {
        &self.lane_plans(id.rank)[id.lane as usize]
    }

    /// The profile's tensor that a tensor of a rank's channel is, or is a part of.
    pub(crate) fn tensor(&self, rank: u32, part: TensorId) -> TensorId {
        self.tensors[self.number(rank)][part.index()]
    }

    /// The profile's tensors that those of [`Channels::plan`] are.
    pub(crate) fn tensors(&self, rank: u32) -> &[TensorId] {
        self.tensors.get(self.number(rank)).unwrap_or(&self.tensors[0])
    }

    /// Whether a rank has anything to do with its channel.
    pub(crate) fn carries(&self, rank: u32) -> bool {
        self.tensors.get(self.number(rank)).is_some_and(|it| !it.is_empty())
    }

    /// All plans.
    pub(crate) fn plans(&self) -> &[Arc<Plan>] {
        &self.plans
    }

    /// Ranks with something to send or hear.
    pub(crate) fn speakers(&self) -> u32 {
        if self.topology.adds_up() {
            self.topology.nodes() * self.plans.len() as u32
        } else {
            self.topology.ranks
        }
    }

    /// Of what a scheme's round trip is, the share that passes an evenly loaded port, of a rank that
    /// trains or of one that only serves. Ranks that are folded count.
    pub(crate) fn port_share(&self, scheme: Scheme, ranks: u32, serves: bool) -> f64 {
        Topology { ranks, ..self.topology }.port_share(scheme, serves)
    }

    fn number(&self, rank: u32) -> usize {
        if self.topology.adds_up() {
            self.topology.local(rank) as usize
        } else {
            0
        }
    }
}

/// The plans of a channel's lanes.
fn lanes_of(plan: &Arc<Plan>, lanes: u32) -> Vec<Arc<Plan>> {
    match lanes {
        1 => vec![Arc::clone(plan)],
        _ => (0..lanes).map(|lane| Arc::new(plan.lane(lane, lanes))).collect(),
    }
}
