//! Sums within nodes, event by event: see [`IntraNode`].

use crate::event_queue::EventKind;
use crate::intra_node::{IntraNode, NodeAction};
use crate::rank_lane::IoTask;
use crate::simulation::Run;
use crate::trace::{Lane, Subject};
use gradlane_units::{Step, TensorId};
use std::cmp::Reverse;

/// Times of one part within a node, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct PartTimes {
    /// Of one rank's contribution on its way to the carrier.
    contributed_ns: u64,
    /// Of all contributions at the carrier.
    collected_ns: u64,
    /// Of the result on its way to each rank.
    passed_on_ns: u64,
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
            let in_ns = self.part_times(to, part).contributed_ns;
            let now = self.now;
            let sums = self.node_sums();
            let (charges, local) = (sums.charges, &mut sums.ranks[rank as usize]);
            let at = if to == rank {
                now
            } else {
                local.in_until = local.in_until.max(now) + in_ns;
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
        let out_ns = self.part_times(carrier, part).passed_on_ns;
        let first = carrier - topology.local(carrier);
        for rank in first..first + topology.per_node {
            let sums = self.node_sums();
            let charges = sums.charges;
            let told = if rank == carrier { time } else { time + charges.word };
            let local = &mut sums.ranks[rank as usize];
            local.out_until = local.out_until.max(told) + out_ns;
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
                self.hear_in_lanes_of(rank, part, IoTask::Gradient(part, step));
                self.node_sums().ranks[rank as usize].given += 1;
                self.end_if_all_given(rank);
            }
            NodeAction::Land(tensor, step) => self.land(rank, tensor, step),
        }
    }

    fn hear_part(&mut self, rank: u32, part: TensorId, step: Step) {
        let per_node = self.channels.topology.per_node;
        let collected_ns = self.part_times(rank, part).collected_ns;
        let now = self.now;
        let local = &mut self.node_sums().ranks[rank as usize];
        local.heard[part.index()] += 1;
        if local.heard[part.index()] < per_node {
            return;
        }
        local.heard[part.index()] = 0;
        let begin = local.sums_until.max(now);
        let end = begin + collected_ns;
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
            self.hear_in_all(rank, IoTask::End(step));
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

    /// The times of a part within a node. A tensor of blocks has the bytes of a node's.
    fn part_times(&self, carrier: u32, part: TensorId) -> PartTimes {
        let planned = self.channels.plan(carrier).tensor(part);
        let bytes = (planned.spec.numel * planned.spec.dtype.bytes()) as f64;
        let topology = self.channels.topology;
        let charges = self.intra_node.as_ref().expect("ranks add up on their nodes").charges;
        let per_node = f64::from(topology.per_node);
        if planned.scheme.has_blocks() {
            let block_ns = charges.block_byte * bytes;
            return PartTimes {
                contributed_ns: (block_ns / per_node) as u64,
                collected_ns: block_ns as u64,
                passed_on_ns: (block_ns * f64::from(topology.nodes())) as u64,
            };
        }
        PartTimes {
            contributed_ns: (charges.copy_byte * bytes) as u64,
            collected_ns: (charges.sum_byte * bytes * per_node) as u64,
            passed_on_ns: (charges.copy_byte * bytes) as u64,
        }
    }
}
