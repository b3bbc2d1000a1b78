//! Sums within nodes whose ranks add up before anything goes to the network: `NodeChannel` of
//! `python/gradlane/training/node/`, in virtual time.
//!
//! A rank copies each part of a gradient that another one carries to where that one reads it, one
//! after another. When all of the node's ranks have spoken, the carrier adds up, one part after
//! another, and gives the mean to the channel between nodes. Every rank copies the result out for
//! itself. A gradient is there when all of its parts are.
//!
//! Blocks are copied in place of added up: the carrier puts those of its node below one another, and
//! every rank copies those of all nodes.
//!
//! Over a collective of a given rate (`Nodes::rate_bps`) a part is at its carrier after its bytes at
//! this rate, added up on the way, and back after as long.

use crate::nodes::Channels;
use crate::scenario::Scenario;
use gradlane_units::{Step, TensorId};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Times of a byte and a word within a node, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalCharges {
    pub(crate) copy_byte: f64,
    /// Of each rank's contribution.
    pub(crate) sum_byte: f64,
    /// Of blocks, which go through the host's memory wherever gradients are added up.
    pub(crate) block_byte: f64,
    pub(crate) word: u64,
}

impl LocalCharges {
    pub(crate) fn new(scenario: &Scenario) -> LocalCharges {
        let (costs, word) = (&scenario.costs, (scenario.costs.local_word_s * 1e9) as u64);
        let block_byte = costs.local_copy_byte_s * 1e9;
        let (copy_byte, sum_byte) = match scenario.nodes.as_ref().and_then(|it| it.rate_bps) {
            Some(rate_bps) => (8e9 / rate_bps, 0.0),
            None => (block_byte, costs.local_sum_byte_s * 1e9),
        };
        LocalCharges { copy_byte, sum_byte, block_byte, word }
    }

    /// Time of a byte between two ranks of a node.
    pub(crate) fn ns_per_byte(self) -> f64 {
        self.copy_byte
    }
}

/// Something that a rank does at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum NodeAction {
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
    pub(crate) in_until: u64,
    /// When its copies of means are done.
    pub(crate) out_until: u64,
    /// When its sums are done.
    pub(crate) sums_until: u64,
    /// How many of the node have spoken about each part that it carries.
    pub(crate) heard: Vec<u32>,
    /// How many parts it has given to its channel in this step.
    pub(crate) given: usize,
    /// The step that its accelerator has ended and its channel not.
    pub(crate) ended: Option<Step>,
    /// How many parts of each tensor's mean are here.
    pub(crate) landed: Vec<u32>,
    pub(crate) due: BinaryHeap<Reverse<(u64, u64, NodeAction)>>,
    pub(crate) made: u64,
}

/// All nodes' sums.
#[derive(Debug)]
pub(crate) struct IntraNode {
    pub(crate) charges: LocalCharges,
    pub(crate) ranks: Vec<LocalRank>,
    /// The parts of each tensor: local rank that carries it, its number there.
    pub(crate) parts: Vec<Vec<(u32, TensorId)>>,
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
