//! Ranks that stop or fall behind, event by event.

use crate::draws::fraction;
use crate::event_queue::EventKind;
use crate::node::Node;
use crate::profile::nanos;
use crate::rank_lane::{IoTask, LaneId};
use crate::report::StragglerFigures;
use crate::scenario::Scenario;
use crate::simulation::{Charges, Run};
use gradlane_engine::{Engine, Event, Input, PayloadDest, Refusal};
use gradlane_units::{Step, TensorId};

/// Steps at most before those that count: deadlines follow from steps that were measured.
const SETTLING_STEPS: usize = 8;
impl Run {
    pub(crate) fn leaves_out(&self) -> bool {
        self.channels.plan(0).strategy.synchrony.stragglers().is_some()
    }

    /// A step has ended on a rank; whether it looks where the others are before the next.
    pub(crate) fn looks_around(&mut self, rank: u32) -> bool {
        let looks = self.leaves_out();
        let node = &mut self.nodes[rank as usize];
        let more = node.accelerator.step < node.accelerator.steps;
        if looks && more {
            node.pace.between_steps = true;
            // A program comes to its next step when lanes have told each other that this one is submitted.
            let Charges { command, wake, .. } = self.charges;
            let tells = if self.lanes.each() > 1 { command + 2 * wake } else { 0 };
            self.events.at(self.now + tells, EventKind::Pace, rank);
        }
        looks && more
    }

    /// A rank between two steps begins the next or passes it, once it knows enough.
    pub(crate) fn keep_pace(&mut self, rank: u32) {
        if self.is_stopped(rank, EventKind::Pace, rank) {
            return;
        }
        let node = &mut self.nodes[rank as usize];
        let step = node.accelerator.step;
        let Some(&was_in) = node.pace.was_in.get(&step).filter(|_| node.pace.between_steps) else {
            return;
        };
        let goes_on = node.pace.behind == step || node.pace.decided > step;
        let more = step < node.accelerator.steps;
        if was_in || !goes_on || !more {
            node.pace.between_steps = false;
            self.begin_next(rank);
            return self.events.at(self.now, EventKind::Compute, rank);
        }
        if node.pace.complete >= step {
            node.pace.passed += 1;
            node.accelerator.pass(self.now);
            self.hear_in_all(rank, IoTask::Pass(Step(step + 1)));
            self.events.at(self.now, EventKind::Pace, rank);
        }
    }

    /// Whether a rank is stopped now; the event of it or of its lane comes again when it runs.
    pub(crate) fn is_stopped(&mut self, rank: u32, kind: EventKind, subject: u32) -> bool {
        let until = self.nodes[rank as usize].stopped_until;
        if until > self.now {
            self.events.at(until, kind, subject);
        }
        until > self.now
    }

    /// Something has changed that a rank between two steps may wait for.
    pub(crate) fn noted_pace(&mut self, rank: u32, event: &Event, time: u64) {
        let node = &mut self.nodes[rank as usize];
        node.pace.note(rank, event);
        if node.pace.between_steps {
            self.events.at(time + self.charges.wake, EventKind::Pace, rank);
        }
    }

    /// Rank 0 looks again at the complete ranks when a deadline is over.
    pub(crate) fn schedule_clock(&mut self, id: LaneId) {
        let lane = &mut self.lanes[id];
        let Some(due) = lane.engine.decision_timeout() else {
            return;
        };
        if lane.clock_at != due.0 {
            lane.clock_at = due.0;
            self.events.at(due.0.max(self.now), EventKind::Clock, self.lanes.number(id));
        }
    }

    pub(crate) fn look_at_clock(&mut self, id: LaneId) {
        let lane = &mut self.lanes[id];
        if lane.clock_at <= self.now {
            lane.clock_at = 0;
            self.hear(id, IoTask::Clock);
        }
    }

    pub(crate) fn schedule_stop(&mut self, rank: u32) {
        let Some(stops) = self.stops.iter().copied().find(|stops| stops.rank == rank) else {
            return;
        };
        let runs_s = stops.burst_s / stops.share - stops.burst_s;
        let runs_ns = nanos(runs_s * (0.5 + fraction(&mut self.rng)));
        let from = self.nodes[rank as usize].stopped_until.max(self.now);
        self.events.at(from + runs_ns, EventKind::Stop, rank);
    }

    /// A rank stops now.
    pub(crate) fn stop(&mut self, rank: u32) {
        let stops = self.stops.iter().find(|stops| stops.rank == rank);
        let over = self.finished as usize == self.nodes.len();
        let Some(burst_ns) = stops.map(|stops| nanos(stops.burst_s)).filter(|_| !over) else {
            return;
        };
        let now = self.now;
        for lane in self.lanes.of(rank) {
            lane.io.busy_until = lane.io.busy_until.max(now) + burst_ns;
        }
        let node = &mut self.nodes[rank as usize];
        node.stopped_until = now + burst_ns;
        node.accelerator.stand_still(burst_ns);
        self.schedule_stop(rank);
    }

    /// Figures of ranks left out and stopped, or `None` where the scenario has neither.
    pub(crate) fn straggler_figures(&self, scenario: &Scenario) -> Option<StragglerFigures> {
        if self.stops.is_empty() && !self.leaves_out() {
            return None;
        }
        let steps = scenario.steps as usize;
        let first = SETTLING_STEPS.min(steps / 2);
        let is_stopped = |rank: u32| self.stops.iter().any(|stops| stops.rank == rank);
        let others: Vec<&Node> = (0..)
            .zip(&self.nodes)
            .filter(|&(rank, _)| !is_stopped(rank))
            .map(|(_, node)| node)
            .collect();
        let length = |node: &&Node| {
            let ends = &node.accelerator.forward_ends;
            (ends[steps] - ends[first]) as f64 / 1e9 / (steps - first) as f64
        };
        let outs = |node: &Node| node.pace.was_in.values().filter(|&&it| !it).count() as u64;
        Some(StragglerFigures {
            others_step_s_mean: others.iter().map(length).sum::<f64>() / others.len() as f64,
            left_out_steps: self.nodes.iter().map(outs).collect(),
            passed_steps: self.nodes.iter().map(|node| node.pace.passed).collect(),
        })
    }
}

/// A rank begins a step without a part in it; all that comes of it lands as after any other.
pub(crate) fn pass(engine: &mut Engine, step: Step) -> Result<PayloadDest, Refusal> {
    engine.handle(Input::StepPass(step))?;
    let taking_part: Vec<TensorId> = (0..engine.plan().tensors.len() as u32)
        .map(TensorId)
        .filter(|&tensor| engine.plan().takes_part(tensor, step))
        .collect();
    for tensor in taking_part {
        engine.handle(Input::TensorAbsent(tensor, step))?;
    }
    engine.handle(Input::StepEnd(step))
}
