//! The report of a finished run.

use crate::coded_tensors::ExpectedSizes;
use crate::node::Node;
use crate::report::{median, Report, StalenessFigures, TensorWait, Utilization};
use crate::scenario::Scenario;
use crate::simulation::{Outcome, Run};
use gradlane_engine::{Plan, Scheme};
use gradlane_units::{SliceId, Step, TensorId};
use gradlane_wire::{FrameKind, PayloadForm};
use std::sync::Arc;

impl Run {
    /// Bytes through the busiest port in a step, one way, without frame headers.
    fn port_bytes(&self, scenario: &Scenario) -> f64 {
        let of = |serves: bool| {
            let plans = self.channels.plans().iter();
            plans.map(|plan| self.port_bytes_of(plan, scenario.ranks(), serves)).sum::<f64>()
        };
        let trains = of(false) + self.result_bytes();
        if scenario.serving > 0 && !scenario.switch_sums {
            trains.max(of(true))
        } else {
            trains
        }
    }

    fn port_bytes_of(&self, plan: &Plan, ranks: u32, serves: bool) -> f64 {
        let sizes = ExpectedSizes::of(plan);
        let slices = (0..plan.slices.len() as u32).map(SliceId);
        let taking_part = slices.filter(|&it| plan.takes_part(plan.slice(it).tensor, Step(1)));
        let bytes = taking_part.map(|slice| {
            let scheme = plan.tensor(plan.slice(slice).tensor).scheme;
            if scheme == Scheme::GatherToRoot {
                return 0.0;
            }
            let share = self.channels.port_share(scheme, ranks, serves);
            if scheme == Scheme::AllGather {
                return share * plan.slice_bytes(slice) as f64;
            }
            let travels = |kind| {
                let encoded = plan.may_be_encoded(kind, slice, Step(1));
                let form = if encoded { PayloadForm::Encoded } else { PayloadForm::Raw };
                let expected = sizes.bytes(plan, slice, kind == FrameKind::Broadcast);
                expected.filter(|_| encoded).unwrap_or_else(|| plan.bytes_as(slice, form))
            };
            let round_trip = travels(FrameKind::Push) + travels(FrameKind::Broadcast);
            share * round_trip as f64
        });
        bytes.sum()
    }

    /// Of those, the bytes to the roots of whole tensors and back; other traffic is even.
    fn result_bytes(&self) -> f64 {
        let topology = self.channels.topology;
        let others = f64::from(topology.workers() - topology.per_node);
        let mut sent = vec![0.0; topology.nodes() as usize];
        let mut received = sent.clone();
        let plan = self.channels.plan(0);
        for (index, root) in self.root_tensors.iter().enumerate() {
            let Some(root) = root else { continue };
            let Some(owner) = plan.root(TensorId(index as u32)) else { continue };
            let (block, result) = (root.block_bytes as f64, root.result_bytes as f64);
            let home = topology.node(owner.0) as usize;
            let local = f64::from(topology.per_node);
            for node in 0..(topology.workers() / topology.per_node) as usize {
                let owns = node == home;
                sent[node] += if owns { others * result } else { local * block };
                received[node] += if owns { others * block } else { local * result };
            }
        }
        sent.into_iter().chain(received).fold(0.0, f64::max)
    }

    fn staleness_figures(&self) -> Option<StalenessFigures> {
        let tallies = self.staleness.by_rank();
        let pushes: u64 = tallies.iter().map(|tally| tally.pushes).sum();
        let sum: u64 = tallies.iter().map(|tally| tally.sum).sum();
        (pushes > 0).then(|| StalenessFigures {
            pushes,
            mean: sum as f64 / pushes as f64,
            max: tallies.iter().map(|tally| tally.max).max().unwrap_or_default(),
        })
    }

    /// Adds up a run that has finished.
    pub(crate) fn outcome(self, scenario: &Scenario) -> Outcome {
        assert_eq!(self.frames.len(), 0, "a frame was sent and has not arrived");
        let sent = self.meters.sent_bytes;
        assert_eq!(sent, self.meters.received_bytes, "as many bytes arrive as were sent");
        let steps = scenario.steps as usize;
        let training = &self.nodes[..self.channels.topology.workers() as usize];
        let ranks = training.len() as f64;
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / ranks;
        let steps_s: Vec<f64> = (0..steps)
            .map(|step| {
                let length = |node: &Node| {
                    let ends = &node.accelerator.forward_ends;
                    (ends[step + 1] - ends[step]) as f64 / 1e9
                };
                mean(&mut training.iter().map(length))
            })
            .collect();
        let waits = scenario.profile.tensors.iter().enumerate().map(|(index, tensor)| {
            let waited = |node: &Node| node.accelerator.waited[index] as f64 / 1e9;
            let wait_s = mean(&mut training.iter().map(waited)) / steps as f64;
            TensorWait { name: tensor.name.clone(), wait_s }
        });
        let step_s = median(&steps_s);
        let goodput_bps = scenario.network.goodput_bps();
        let port_bytes = self.port_bytes(scenario);
        let compute_s = scenario.profile.compute_s;
        let rebuilds: u64 = self.script.rebuild_ns.iter().sum();
        let rebuild_s = rebuilds as f64 / 1e9;
        let all: f64 = steps_s.iter().sum();
        let per_step = |bytes: &u64| *bytes as f64 / steps as f64;
        let topology = self.channels.topology;
        // Folded ranks have a port each.
        let weighted =
            |port: usize| f64::from(self.groups.weights[port * topology.per_node as usize]);
        let real_ports = f64::from(scenario.ranks() / topology.per_node);
        let speakers = f64::from(self.channels.speakers());
        let sent_weighted: f64 =
            self.meters.port_bytes.iter().enumerate().map(|(r, &b)| b as f64 * weighted(r)).sum();
        let interval_s = scenario.outputs.utilization_interval_s;
        let utilization = (interval_s > 0.0).then(|| Utilization {
            interval_s,
            tx: self.meters.tx.shares(f64::from(topology.nodes())),
            rx: self.meters.rx.shares(f64::from(topology.nodes())),
        });
        let tx_mean = sent_weighted / real_ports / steps as f64;
        let plan = Arc::clone(self.channels.plan(0));
        let report = Report {
            strategy: plan.strategy.name.clone(),
            workers: scenario.workers,
            serving: scenario.serving,
            ranks_per_node: topology.per_node,
            rate_bps: scenario.network.rate_bps,
            step_s,
            scaling_factor: compute_s / step_s,
            port_bound_s: (compute_s + rebuild_s).max(port_bytes * 8.0 / goodput_bps),
            compute_s,
            rebuild_s,
            waits: waits.collect(),
            tx_bytes_per_step_mean: tx_mean,
            tx_bytes_per_step_max: self.meters.port_bytes.iter().map(per_step).fold(0.0, f64::max),
            tx_utilization: tx_mean * self.ns_per_byte * steps as f64 / (all * 1e9),
            io_utilization: self.meters.io_ns as f64
                / speakers
                / f64::from(self.lanes.each())
                / (all * 1e9),
            work_utilization: self.meters.work_ns as f64 / speakers / (all * 1e9),
            steps_s,
            utilization,
            staleness: self.staleness_figures(),
            stragglers: self.straggler_figures(scenario),
            frames: self.meters.frames,
            bytes: sent,
            events: self.events.made(),
            simulated_ranks: self.nodes.len() as u32,
            end_s: self.now as f64 / 1e9,
        };
        Outcome { report, plan, trace: self.trace }
    }
}
