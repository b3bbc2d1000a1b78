//! A scenario: a profile, a cluster and a strategy. All that a simulation depends on is in here; the
//! same scenario gives the same report to the byte.

use crate::coded_tensors::{self, CodedTensor};
use crate::costs::{Costs, GOODPUT_SHARE, SEND_BUFFER_FLOOR_BYTES, SHARE_SPREAD};
use crate::error::SimError;
use crate::node_ranks::Nodes;
use crate::outputs::Outputs;
use crate::paths::Paths;
use crate::profile::{nanos, Profile};
use crate::straggling::Stops;
use crate::tensor_scheme::{settings, TensorScheme};
use gradlane_engine::{
    Plan, Roles, StragglerPolicy, Strategy, Synchrony, TensorSpec, Update, FRAME_BYTES_DEFAULT,
};
use gradlane_wire::{HEADER_BYTES, MAX_FRAME_BYTES};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A strategy by name, or with all its rules.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum StrategyChoice {
    /// One of [`Strategy::NAMES`].
    Named(String),
    /// Any combination of rules.
    Rules(Strategy),
}

/// The ports and the paths between them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Rate of every port in each direction, bits a second.
    pub rate_bps: f64,
    /// Share of the rate that carries frames: the rest is headers of packets (see
    /// [`crate::GOODPUT_SHARE`]).
    #[serde(default = "default_goodput_share")]
    pub goodput_share: f64,
    /// One-way time between any two ports, without queues.
    #[serde(default)]
    pub latency_s: f64,
    /// Bytes that a port queues before others wait in their connection.
    #[serde(default = "default_queue_bytes")]
    pub queue_bytes: u64,
    /// Bytes of a connection in the kernel, sent or not, that are not yet acknowledged; 0 is what the
    /// transport fits to the path.
    #[serde(default)]
    pub send_buffer_bytes: u64,
    /// The size that it fits to a short path.
    #[serde(default = "default_send_buffer_floor_bytes")]
    pub send_buffer_floor_bytes: u64,
    /// Connections hold unequally much, by up to this share more or less, drawn evenly for each, and so
    /// get unequal parts of the ports that they meet at.
    #[serde(default = "default_share_spread")]
    pub share_spread: f64,
    /// Another number, another draw of it.
    #[serde(default)]
    pub share_seed: u64,
    /// Whether each connection is paced to its part of the port, as the transport does (`pacing.rs`).
    #[serde(default = "default_paces")]
    pub paces: bool,
    /// Bytes of a connection that wait behind the port before the connection counts as busy.
    #[serde(default = "default_low_water_bytes")]
    pub low_water_bytes: u64,
    /// Bytes that connections send at once: frames are cut into pieces of this size. 0 is the kernel's
    /// largest packet with segmentation offload.
    #[serde(default)]
    pub piece_bytes: u64,
    /// Bytes that a port lets through at once after idling, where a token bucket shapes it, as in
    /// the lab; 0 is a wire.
    #[serde(default)]
    pub burst_bytes: u64,
    /// Share of every port that other traffic takes.
    #[serde(default)]
    pub background_share: f64,
    /// Bytes of one burst of it.
    #[serde(default = "default_background_burst_bytes")]
    pub background_burst_bytes: u64,
}

fn default_goodput_share() -> f64 {
    GOODPUT_SHARE
}
fn default_send_buffer_floor_bytes() -> u64 {
    SEND_BUFFER_FLOOR_BYTES
}
fn default_share_spread() -> f64 {
    SHARE_SPREAD
}
fn default_paces() -> bool {
    true
}
fn default_queue_bytes() -> u64 {
    200_000
}
/// One frame, as where the I/O thread paces: it hands out the next one when that is due.
fn default_low_water_bytes() -> u64 {
    u64::from(FRAME_BYTES_DEFAULT) + HEADER_BYTES as u64
}
fn default_background_burst_bytes() -> u64 {
    64_000
}

impl Network {
    /// Ports of this rate, all else as on the project's lab.
    #[must_use]
    pub fn new(rate_bps: f64) -> Network {
        Network {
            rate_bps,
            goodput_share: default_goodput_share(),
            latency_s: 0.0,
            queue_bytes: default_queue_bytes(),
            send_buffer_bytes: 0,
            send_buffer_floor_bytes: default_send_buffer_floor_bytes(),
            share_spread: default_share_spread(),
            share_seed: 0,
            paces: true,
            low_water_bytes: default_low_water_bytes(),
            piece_bytes: 0,
            burst_bytes: 0,
            background_share: 0.0,
            background_burst_bytes: default_background_burst_bytes(),
        }
    }

    /// Bits a second of frames that a port carries.
    #[must_use]
    pub fn goodput_bps(&self) -> f64 {
        self.rate_bps * self.goodput_share
    }

    /// Bytes that the kernel takes of a connection before the first of them is acknowledged. Fitted to
    /// the path it is the floor plus twice the bandwidth-delay product, doubled by the kernel. Few peers
    /// share out the floors of three (`gradlane-net`'s `connection_flow.rs`, which lets fast connections
    /// hold more; why not here is in decision 39).
    pub(crate) fn window_bytes(&self, peers: u32) -> u64 {
        if self.send_buffer_bytes > 0 {
            return self.send_buffer_bytes.min(WINDOW_BYTES_MAX);
        }
        let product = self.goodput_bps() / 8.0 * 2.0 * self.latency_s;
        let floor_bytes = self.send_buffer_floor_bytes;
        let floor_bytes = floor_bytes.max(3 * floor_bytes / u64::from(peers.max(1)));
        (floor_bytes + (4.0 * product) as u64).min(WINDOW_BYTES_MAX)
    }

    fn validate(&self) -> Result<(), SimError> {
        let refuse = |text: String| Err(SimError::Argument(text));
        if !(1e3..=1e15).contains(&self.rate_bps) {
            return refuse(format!("network.rate_bps is {}: use 1e3 to 1e15", self.rate_bps));
        }
        if !(self.goodput_share > 0.0 && self.goodput_share <= 1.0) {
            let share = self.goodput_share;
            return refuse(format!("network.goodput_share is {share}: use more than 0, to 1"));
        }
        if !(0.0..=10.0).contains(&self.latency_s) {
            return refuse(format!("network.latency_s is {}: use 0 to 10", self.latency_s));
        }
        if !(0.0..=SPREAD_MAX).contains(&self.share_spread) {
            let spread = self.share_spread;
            return refuse(format!("network.share_spread is {spread}: use 0 to {SPREAD_MAX}"));
        }
        if !(0.0..=0.95).contains(&self.background_share) {
            let share = self.background_share;
            return refuse(format!("network.background_share is {share}: use 0 to 0.95"));
        }
        let burst = self.background_burst_bytes;
        if self.background_share > 0.0 && !(1_000..=100_000_000).contains(&burst) {
            return refuse(format!(
                "network.background_burst_bytes is {burst}: use 1,000 to 100,000,000"
            ));
        }
        if self.piece_bytes != 0 && self.piece_bytes < 256 {
            let piece = self.piece_bytes;
            return refuse(format!("network.piece_bytes is {piece}: use 0, or 256 and more"));
        }
        Ok(())
    }
}

/// All that a simulation depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The computation of one step.
    pub profile: Profile,
    /// Number of ranks, each a worker.
    pub workers: u32,
    /// The first `servers` ranks are servers, too; none: all.
    #[serde(default)]
    pub servers: Option<u32>,
    /// Ranks beside the workers that own all slices, and only serve.
    #[serde(default)]
    pub serving: u32,
    /// Which of them share nodes; none: each has a node and a port of its own.
    #[serde(default)]
    pub nodes: Option<Nodes>,
    /// How they synchronize.
    pub strategy: StrategyChoice,
    /// When steps go on without ranks that are late; none: they wait.
    #[serde(default)]
    pub stragglers: Option<StragglerPolicy>,
    /// Ranks that are stopped for moments; each once.
    #[serde(default)]
    pub stops: Vec<Stops>,
    /// Slice size of a strategy that is named; none is its own.
    #[serde(default)]
    pub slice_elems: Option<u64>,
    /// Where the optimizer runs.
    #[serde(default)]
    pub update: Update,
    /// Codecs of tensors, by name; the others travel as they are.
    #[serde(default)]
    pub codecs: BTreeMap<String, CodedTensor>,
    /// Schemes of tensors, by name; the others have the strategy's.
    #[serde(default)]
    pub schemes: BTreeMap<String, TensorScheme>,
    /// A plan for the profile's tensors instead of the one that the strategy makes.
    #[serde(default)]
    pub plan: Option<Plan>,
    /// The network.
    pub network: Network,
    /// Ports and ways that differ from the network's.
    #[serde(default)]
    pub paths: Paths,
    /// Whether the ranks that only serve are switches, which add up at any rate and take no time.
    #[serde(default)]
    pub switch_sums: bool,
    /// The host.
    #[serde(default)]
    pub costs: Costs,
    /// Whether connections are sealed: frames have tags, and bytes are encrypted.
    #[serde(default)]
    pub seal: bool,
    /// Most payload bytes in one frame.
    #[serde(default = "default_frame_bytes")]
    pub frame_bytes: u32,
    /// Bytes chosen for a peer and not yet with its kernel; 0 is one frame.
    #[serde(default)]
    pub credit_bytes: u64,
    /// Jobs handed out at once, shared by the lanes.
    #[serde(default = "default_work_depth")]
    pub work_depth: usize,
    /// Connections of a pair of ranks, each with a thread of its own at both ends and its share of the slices.
    #[serde(default = "default_lanes")]
    pub lanes: u32,
    /// Threads that execute jobs, shared by the lanes, of which each has one at least.
    #[serde(default = "default_work_threads")]
    pub work_threads: usize,
    /// Processors of a host, for the threads of its lanes and those that execute jobs; 0: one for each.
    #[serde(default)]
    pub processors: u32,
    /// Steps.
    #[serde(default = "default_steps")]
    pub steps: u32,
    /// Decides placements, spreads and background traffic.
    #[serde(default)]
    pub seed: u64,
    /// Ranks compute slower by up to this share, drawn evenly for each rank.
    #[serde(default)]
    pub compute_spread: f64,
    /// Each rank's step is longer by up to this share, drawn evenly for each step.
    #[serde(default)]
    pub compute_jitter: f64,
    /// Simulate ranks that own nothing as groups of this many representatives; 0 simulates every
    /// rank.
    #[serde(default)]
    pub representatives: u32,
    /// Gradients are clipped by the norm of all of them: no parameter is updated before that is known.
    #[serde(default)]
    pub clips: bool,
    /// Contents of the outcome.
    #[serde(default)]
    pub outputs: Outputs,
}

fn default_frame_bytes() -> u32 {
    FRAME_BYTES_DEFAULT
}
fn default_work_depth() -> usize {
    2
}
fn default_lanes() -> u32 {
    1
}
fn default_work_threads() -> usize {
    1
}
fn default_steps() -> u32 {
    3
}

impl Scenario {
    /// A cluster with the transport's defaults.
    #[must_use]
    pub fn new(profile: Profile, workers: u32, strategy: &str, network: Network) -> Scenario {
        Scenario {
            profile,
            workers,
            servers: None,
            serving: 0,
            nodes: None,
            strategy: StrategyChoice::Named(strategy.to_string()),
            stragglers: None,
            stops: Vec::new(),
            slice_elems: None,
            update: Update::Worker,
            codecs: BTreeMap::new(),
            schemes: BTreeMap::new(),
            plan: None,
            network,
            paths: Paths::default(),
            switch_sums: false,
            costs: Costs::default(),
            seal: false,
            frame_bytes: default_frame_bytes(),
            credit_bytes: 0,
            work_depth: default_work_depth(),
            lanes: default_lanes(),
            work_threads: default_work_threads(),
            processors: 0,
            steps: default_steps(),
            seed: 0,
            compute_spread: 0.0,
            compute_jitter: 0.0,
            representatives: 0,
            clips: false,
            outputs: Outputs::default(),
        }
    }

    /// Reads a scenario from a JSON object.
    ///
    /// # Errors
    /// [`SimError::Argument`] when it is no such object or a value makes no sense.
    pub fn from_json(json: &str) -> Result<Scenario, SimError> {
        let scenario: Scenario = serde_json::from_str(json)
            .map_err(|error| SimError::Argument(format!("scenario: {error}")))?;
        scenario.validate()?;
        Ok(scenario)
    }

    /// Checks its nodes.
    fn check_nodes(&self, nodes: &Nodes) -> Result<(), SimError> {
        let refuse = |text: &str| Err(SimError::Argument(format!("nodes{text}")));
        let workers = self.workers;
        if nodes.ranks == 0 || !workers.is_multiple_of(nodes.ranks) {
            return refuse(&format!(
                ".ranks is {}, which {workers} workers do not fill",
                nodes.ranks
            ));
        }
        if nodes.rate_bps.is_some_and(|rate| !(1e3..=1e18).contains(&rate)) {
            return refuse(".rate_bps: use 1e3 to 1e18");
        }
        if self.plan.is_some() || self.representatives > 0 || self.servers.is_some() {
            return refuse(" cannot be used with a given plan, representatives or servers");
        }
        if nodes.carried.is_empty() {
            return Ok(());
        }
        if self.update == Update::Server {
            return refuse(".carried: sums on nodes go with no update on servers");
        }
        let is_rooted = |scheme: &TensorScheme| matches!(scheme, TensorScheme::Adam { .. });
        if let Some((name, _)) = self.schemes.iter().find(|it| is_rooted(it.1)) {
            return refuse(&format!(".carried: tensor {name:?} has one owner, and nodes are none"));
        }
        if nodes.carried.len() > 1 && !self.codecs.is_empty() {
            return refuse(".carried: shares of tensors are not encoded");
        }
        if nodes.carried.len() > nodes.ranks as usize {
            return refuse(&format!(".carried: there are {} ranks on a node", nodes.ranks));
        }
        let mut left: Vec<u64> = self.profile.tensors.iter().map(|it| it.numel).collect();
        for &(tensor, numel) in nodes.carried.iter().flatten() {
            let rest = left.get(tensor as usize).and_then(|left| left.checked_sub(numel));
            let Some(rest) = rest else {
                return refuse(&format!(".carried: tensor {tensor} has no such {numel} elements"));
            };
            left[tensor as usize] = rest;
        }
        match left.iter().position(|&numel| numel > 0) {
            Some(tensor) => refuse(&format!(".carried: nobody carries all of tensor {tensor}")),
            None => Ok(()),
        }
    }

    /// Checks every value.
    ///
    /// # Errors
    /// [`SimError::Argument`] naming the field, its value and what is allowed.
    pub fn validate(&self) -> Result<(), SimError> {
        let refuse = |text: String| Err(SimError::Argument(text));
        self.profile.validate()?;
        self.network.validate()?;
        self.costs.validate()?;
        if self.workers == 0 || self.workers > WORKERS_MAX {
            return refuse(format!("workers is {}: use 1 to {WORKERS_MAX}", self.workers));
        }
        if self.clips && self.update == Update::Server {
            return refuse(
                "clips cannot be used with updates on servers: they need no norm".into(),
            );
        }
        if let Some(nodes) = &self.nodes {
            self.check_nodes(nodes)?;
        }
        self.validate_serving()?;
        let local = self.nodes.as_ref().map_or(1, |it| it.ranks.max(1));
        self.paths.validate(self.ranks() / local, self.representatives)?;
        if self.switch_sums && self.serving == 0 {
            return refuse("switch_sums needs ranks that only serve: use serving 1".into());
        }
        if self.lanes == 0 || self.lanes > 64 {
            return refuse(format!("lanes is {}: use 1 to 64", self.lanes));
        }
        if self.work_threads == 0 || self.work_threads > 256 {
            return refuse(format!("work_threads is {}: use 1 to 256", self.work_threads));
        }
        if self.plan.is_some() && !self.codecs.is_empty() {
            return refuse("codecs cannot be used with a given plan, which has its own".into());
        }
        if self.plan.is_some() && !self.schemes.is_empty() {
            return refuse("schemes cannot be used with a given plan, which has its own".into());
        }
        if self.representatives > 0 && !self.schemes.is_empty() {
            return refuse("representatives cannot be used with schemes of tensors: use 0".into());
        }
        if self.plan.is_some() && self.representatives > 0 {
            return refuse("representatives cannot be used with a given plan: use 0".into());
        }
        for (index, stops) in self.stops.iter().enumerate() {
            stops.validate(self.workers)?;
            if self.stops[..index].iter().any(|other| other.rank == stops.rank) {
                return refuse(format!("stops names rank {} twice", stops.rank));
            }
        }
        if self.stops.len() >= self.workers as usize {
            return refuse("stops names all ranks: at least one has to run".into());
        }
        if self.representatives > 0 && !(self.stops.is_empty() && self.stragglers.is_none()) {
            return refuse("representatives cannot be used where ranks are late: use 0".into());
        }
        if self.plan.is_some() && self.stragglers.is_some() {
            return refuse("stragglers cannot be used with a given plan, which has its own".into());
        }
        if self.steps == 0 || self.steps > 100_000 {
            return refuse(format!("steps is {}: use 1 to 100,000", self.steps));
        }
        if self.frame_bytes < 64 || self.frame_bytes > MAX_FRAME_BYTES {
            return refuse(format!(
                "frame_bytes is {}: use 64 to {MAX_FRAME_BYTES}",
                self.frame_bytes
            ));
        }
        for (name, share) in
            [("compute_spread", self.compute_spread), ("compute_jitter", self.compute_jitter)]
        {
            if !(0.0..=10.0).contains(&share) {
                return refuse(format!("{name} is {share}: use 0 to 10"));
            }
        }
        if !(0.0..=1e6).contains(&self.outputs.utilization_interval_s) {
            let interval = self.outputs.utilization_interval_s;
            return refuse(format!("outputs.utilization_interval_s is {interval}: use 0 to 1e6 s"));
        }
        let interval = nanos(self.outputs.utilization_interval_s);
        if self.outputs.utilization_interval_s > 0.0 && interval < 1_000 {
            return refuse("outputs.utilization_interval_s is below a microsecond".into());
        }
        Ok(())
    }

    fn validate_serving(&self) -> Result<(), SimError> {
        let refuse = |text: String| Err(SimError::Argument(text));
        let serving = self.serving;
        if serving > WORKERS_MAX - self.workers {
            return refuse(format!("serving is {serving}: use {WORKERS_MAX} ranks at most"));
        }
        let other = self.servers.is_some() || self.plan.is_some() || self.representatives > 0;
        let stopped = self.stragglers.is_some() || !self.stops.is_empty();
        if serving > 0 && (other || stopped || self.nodes.is_some()) {
            return refuse(format!(
                "serving is {serving}, which cannot be used with servers, nodes, representatives, \
                 stops, stragglers or a given plan"
            ));
        }
        Ok(())
    }

    /// Threads that execute the jobs of one lane.
    pub(crate) fn work_threads_of_lane(&self) -> usize {
        self.work_threads.div_ceil(self.lanes as usize)
    }

    /// Number of ranks that train, and of those that only serve.
    pub(crate) fn ranks(&self) -> u32 {
        self.workers + self.serving
    }

    /// The plan for so many ranks and tensors: the profile's, or parts of them.
    ///
    /// # Errors
    /// [`SimError::Argument`] when none can be made, or the given one is not for this scenario.
    pub(crate) fn plan(&self, ranks: u32, specs: Vec<TensorSpec>) -> Result<Plan, SimError> {
        let Some(plan) = &self.plan else {
            let schemes = self.schemes_of_members(&specs);
            let rows = coded_tensors::rows(specs, &self.codecs)?;
            let tensors = rows.into_iter().map(Into::into).collect();
            let tensors = settings(tensors, &schemes)?;
            let roles = match self.serving {
                0 => Roles::first(ranks, self.servers.unwrap_or(ranks)),
                serving => Roles::dedicated(ranks - serving, serving),
            };
            return Plan::build_for(tensors, self.strategy()?, self.update, roles)
                .map_err(|error| SimError::Argument(error.to_string()));
        };
        let refuse = |text: String| Err(SimError::Argument(text));
        if plan.world_size != ranks || plan.dedicated_servers > 0 {
            return refuse(format!("plan is for {} ranks, not for {ranks}", plan.world_size));
        }
        let own = plan.tensors.iter().map(|tensor| &tensor.spec);
        if !own.eq(specs.iter()) {
            return refuse("plan and profile have different tensors".into());
        }
        plan.validate().map_err(|error| SimError::Argument(format!("plan: {error}")))?;
        Ok(plan.clone())
    }

    /// The schemes of a channel's tensors: where it connects nodes, their blocks are those of all
    /// ranks of a node, as one.
    fn schemes_of_members(&self, specs: &[TensorSpec]) -> BTreeMap<String, TensorScheme> {
        let mut schemes = self.schemes.clone();
        let Some(nodes) = self.nodes.as_ref().filter(|it| !it.carried.is_empty()) else {
            return schemes;
        };
        schemes.retain(|name, _| specs.iter().any(|it| it.name == *name));
        for scheme in schemes.values_mut() {
            if let TensorScheme::Sfb { block_bytes, .. } = scheme {
                *block_bytes = block_bytes.saturating_mul(u64::from(nodes.ranks));
            }
        }
        schemes
    }

    /// The strategy with all its rules.
    ///
    /// # Errors
    /// [`SimError::Argument`] for an unknown name.
    pub fn strategy(&self) -> Result<Strategy, SimError> {
        let mut strategy = match &self.strategy {
            StrategyChoice::Named(name) => Strategy::named(name, self.slice_elems, self.seed)
                .map_err(|error| SimError::Argument(error.to_string()))?,
            StrategyChoice::Rules(strategy) => strategy.clone(),
        };
        if let Some(rule) = self.stragglers {
            strategy.synchrony = Synchrony::BackupWorkers(rule);
        }
        Ok(strategy)
    }
}

/// Most by which connections are unequal.
pub(crate) const SPREAD_MAX: f64 = 0.9;

/// Most that a kernel takes of a connection.
const WINDOW_BYTES_MAX: u64 = 1 << 30;

/// Most ranks.
const WORKERS_MAX: u32 = 100_000;
