//! Sums within nodes whose ranks add up before anything goes to the network: `NodeChannel` of
//! `python/gradlane/training/node/`, in virtual time.
//!
//! A rank copies each part of a gradient that another one carries to where that one reads it, one
//! after another. When all of the node's ranks have spoken, the carrier adds up, one part after
//! another, and gives the mean to the channel between nodes. Every rank copies the result out for
//! itself. A gradient is there when all of its parts are.
//!
//! Over a collective of a given rate (`Nodes::rate_bps`) a part is at its carrier after its bytes at
//! this rate, added up on the way, and back after as long.

use crate::event_queue::EventKind;
use crate::node::IoTask;
use crate::nodes::Channels;
use crate::scenario::Scenario;
use crate::simulation::Run;
use crate::trace::{Lane, Subject};
use gradlane_units::{Step, TensorId};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Times of a byte and a word within a node, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalCharges {
    copy_byte: f64,
    /// Of each rank's contribution.
    sum_byte: f64,
    word: u64,
}

impl LocalCharges {
    pub(crate) fn new(scenario: &Scenario) -> LocalCharges {
        let (costs, word) = (&scenario.costs, (scenario.costs.local_word_s * 1e9) as u64);
        match scenario.nodes.as_ref().and_then(|it| it.rate_bps) {
            Some(rate_bps) => LocalCharges { copy_byte: 8e9 / rate_bps, sum_byte: 0.0, word },
            None => LocalCharges {
                copy_byte: costs.local_copy_byte_s * 1e9,
                sum_byte: costs.local_sum_byte_s * 1e9,
                word,
            },
        }
    }

    /// Time of a byte between two ranks of a node.
    pub(crate) fn ns_per_byte(self) -> f64 {
        self.copy_byte
    }
}

/// Something that a rank does at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum NodeAction {
    /// It hears that a rank of its node has spoken about a part that it carries.
    Hear(TensorId, Step),
    /// It has added up a part.
    Summed(TensorId, Step),
    /// It has a part of this tensor's mean.
    Land(TensorId, Step),
}

/// One rank's side of its node.
#[derive(Debug)]
pub(crate) struct LocalRank {
    /// When its copies to others are done.
    in_until: u64,
    /// When its copies of means are done.
    out_until: u64,
    /// When its sums are done.
    sums_until: u64,
    /// How many of the node have spoken about each part that it carries.
    heard: Vec<u32>,
    /// How many parts it has given to its channel in this step.
    given: usize,
    /// The step that its accelerator has ended and its channel not.
    ended: Option<Step>,
    /// How many parts of each tensor's mean are here.
    landed: Vec<u32>,
    due: BinaryHeap<Reverse<(u64, u64, NodeAction)>>,
    made: u64,
}

/// All nodes' sums.
#[derive(Debug)]
pub(crate) struct IntraNode {
    charges: LocalCharges,
    ranks: Vec<LocalRank>,
    /// The parts of each tensor: local rank that carries it, its number there.
    parts: Vec<Vec<(u32, TensorId)>>,
}

impl IntraNode {
    /// Of clusters whose ranks do not add up: none.
    pub(crate) fn of(scenario: &Scenario, channels: &Channels) -> Option<IntraNode> {
        let topology = channels.topology;
        if !topology.adds_up() {
            return None;
        }
        let count = scenario.profile.tensors.len();
        let mut parts = vec![Vec::new(); count];
        for local in (0..topology.per_node).filter(|&local| channels.carries(local)) {
            for (index, tensor) in channels.tensors(local).iter().enumerate() {
                parts[tensor.index()].push((local, TensorId(index as u32)));
            }
        }
        let rank = |rank| LocalRank {
            in_until: 0,
            out_until: 0,
            sums_until: 0,
            heard: vec![0; if channels.carries(rank) { channels.tensors(rank).len() } else { 0 }],
            given: 0,
            ended: None,
            landed: vec![0; count],
            due: BinaryHeap::new(),
            made: 0,
        };
        let ranks = (0..topology.ranks).map(rank).collect();
        Some(IntraNode { charges: LocalCharges::new(scenario), ranks, parts })
    }
}

impl Run {
    fn node_sums(&mut self) -> &mut IntraNode {
        self.intra_node.as_mut().expect("ranks add up on their nodes")
    }

    fn will_do(&mut self, rank: u32, time: u64, doing: NodeAction) {
        let local = &mut self.node_sums().ranks[rank as usize];
        local.made += 1;
        local.due.push(Reverse((time, local.made, doing)));
        self.events.at(time, EventKind::Local, rank);
    }

    /// A rank's backward has a gradient.
    pub(crate) fn give_to_node(&mut self, rank: u32, tensor: TensorId, step: Step) {
        let topology = self.channels.topology;
        let first = rank - topology.local(rank);
        for (carrier, part) in self.node_sums().parts[tensor.index()].clone() {
            let to = first + carrier;
            let bytes = self.part_bytes(to, part);
            let now = self.now;
            let sums = self.node_sums();
            let (charges, local) = (sums.charges, &mut sums.ranks[rank as usize]);
            let at = if to == rank {
                now
            } else {
                local.in_until = local.in_until.max(now) + (charges.copy_byte * bytes) as u64;
                local.in_until + charges.word
            };
            self.will_do(to, at, NodeAction::Hear(part, step));
        }
    }

    /// A rank's backward is over.
    pub(crate) fn end_on_node(&mut self, rank: u32, step: Step) {
        self.node_sums().ranks[rank as usize].ended = Some(step);
        self.end_if_all_given(rank);
    }

    /// The rank's channel has the mean over nodes of a part.
    pub(crate) fn pass_on(&mut self, carrier: u32, part: TensorId, step: Step, time: u64) {
        let topology = self.channels.topology;
        let tensor = self.channels.tensor(carrier, part);
        let bytes = self.part_bytes(carrier, part);
        let first = carrier - topology.local(carrier);
        for rank in first..first + topology.per_node {
            let sums = self.node_sums();
            let charges = sums.charges;
            let told = if rank == carrier { time } else { time + charges.word };
            let local = &mut sums.ranks[rank as usize];
            local.out_until = local.out_until.max(told) + (charges.copy_byte * bytes) as u64;
            let at = local.out_until;
            self.will_do(rank, at, NodeAction::Land(tensor, step));
        }
    }

    /// A rank has the norm of a step's gradients: it tells those of its node whose means it passes on.
    pub(crate) fn tell_norm(&mut self, rank: u32, step: Step, time: u64) {
        let topology = self.channels.topology;
        let Some(word) = self.intra_node.as_ref().map(|sums| sums.charges.word) else {
            self.nodes[rank as usize].squares_at = Some(time);
            return self.norm_if_measured(rank, step);
        };
        let first = rank - topology.local(rank);
        for other in first..first + topology.per_node {
            let told = if other == rank { time } else { time + word };
            self.norm_is_known(other, step, told);
        }
    }

    /// It is time for something on a rank.
    pub(crate) fn act_on_node(&mut self, rank: u32) {
        let Some(Reverse((_, _, doing))) = self.node_sums().ranks[rank as usize].due.pop() else {
            return;
        };
        match doing {
            NodeAction::Hear(part, step) => self.hear_part(rank, part, step),
            NodeAction::Summed(part, step) => {
                self.hear(rank, IoTask::Gradient(part, step));
                self.node_sums().ranks[rank as usize].given += 1;
                self.end_if_all_given(rank);
            }
            NodeAction::Land(tensor, step) => self.land(rank, tensor, step),
        }
    }

    fn hear_part(&mut self, rank: u32, part: TensorId, step: Step) {
        let per_node = self.channels.topology.per_node;
        let bytes = self.part_bytes(rank, part);
        let now = self.now;
        let sums = self.node_sums();
        let (charges, local) = (sums.charges, &mut sums.ranks[rank as usize]);
        local.heard[part.index()] += 1;
        if local.heard[part.index()] < per_node {
            return;
        }
        local.heard[part.index()] = 0;
        let begin = local.sums_until.max(now);
        let end = begin + (charges.sum_byte * bytes * f64::from(per_node)) as u64;
        local.sums_until = end;
        let subject = Subject::Tensor(self.channels.tensor(rank, part));
        self.span(rank, Lane::Reduce, step, subject, begin, end);
        self.will_do(rank, end, NodeAction::Summed(part, step));
    }

    fn end_if_all_given(&mut self, rank: u32) {
        let local = &mut self.node_sums().ranks[rank as usize];
        if local.heard.is_empty() || local.given < local.heard.len() {
            return;
        }
        if let Some(step) = local.ended.take() {
            local.given = 0;
            self.hear(rank, IoTask::End(step));
        }
    }

    fn land(&mut self, rank: u32, tensor: TensorId, step: Step) {
        let sums = self.node_sums();
        let whole = sums.parts[tensor.index()].len() as u32;
        let landed = &mut sums.ranks[rank as usize].landed[tensor.index()];
        *landed += 1;
        if *landed == whole {
            *landed = 0;
            let time = self.now + self.charges.wake;
            self.tensor_is_here(rank, tensor, step, time);
        }
    }

    fn part_bytes(&self, carrier: u32, part: TensorId) -> f64 {
        let spec = &self.channels.plan(carrier).tensor(part).spec;
        (spec.numel * spec.dtype.bytes()) as f64
    }
}
