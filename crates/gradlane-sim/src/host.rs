//! The host of a rank: the threads of its lanes, each of which does one thing after another, and their work
//! threads.

use crate::event_queue::EventKind;
use crate::pauses::pass;
use crate::rank_lane::{IoTask, LaneId};
use crate::simulation::{Clipping, Run};
use crate::trace::{Lane, Subject};
use gradlane_engine::{
    Engine, Event, Input, Job, JobResult, LaneNews, Operation, PayloadDest, Refusal, Scheme,
};
use gradlane_units::{Priority, Rank, TensorId, Time};
use gradlane_wire::FrameHeader;
use std::cmp::Reverse;

/// Settings of an optimizer for tensors that share them, to a server that trains nothing.
const SERVER_COMMAND_BYTES: usize = 60;

impl Run {
    /// A task for a lane's thread: done at once, or after the task that it is doing.
    pub(crate) fn hear(&mut self, id: LaneId, input: IoTask) {
        let now = self.now;
        let io = &mut self.lanes[id].io;
        if io.inbox.is_empty() && io.busy_until <= now && self.may_run_from(id) <= now {
            return self.handle(id, input);
        }
        let io = &mut self.lanes[id].io;
        io.inbox.push_back(input);
        if !std::mem::replace(&mut io.will_listen, true) {
            let at = self.may_run_from(id);
            self.events.at(at, EventKind::Listen, self.lanes.number(id));
        }
    }

    /// A task for all lanes of a rank.
    pub(crate) fn hear_in_all(&mut self, rank: u32, input: IoTask) {
        (0..self.lanes.each()).for_each(|lane| self.hear(LaneId { rank, lane }, input));
    }

    /// A task for those lanes of a rank that carry a part of a tensor of its channel.
    pub(crate) fn hear_in_lanes_of(&mut self, rank: u32, tensor: TensorId, input: IoTask) {
        for lane in 0..self.lanes.each() {
            let id = LaneId { rank, lane };
            if self.channels.lane_plan(id).has_slices_of(tensor) {
                self.hear(id, input);
            }
        }
    }

    /// When a lane's thread has done its last task, and has a processor.
    fn may_run_from(&self, id: LaneId) -> u64 {
        let done_at = self.lanes[id].io.busy_until;
        if self.processors.are_enough() {
            return done_at;
        }
        self.processors.free_at(self.channels.topology.node(id.rank), done_at)
    }

    /// A lane's thread looks into its inbox.
    pub(crate) fn listen(&mut self, id: LaneId) {
        let number = self.lanes.number(id);
        loop {
            let runs_from = self.may_run_from(id);
            let io = &mut self.lanes[id].io;
            if io.inbox.is_empty() {
                io.will_listen = false;
                return;
            }
            if runs_from > self.now {
                return self.events.at(runs_from, EventKind::Listen, number);
            }
            if let Some(input) = io.inbox.pop_front() {
                self.handle(id, input);
            }
        }
    }

    /// A lane's thread hears something now, tells the engine and does what it asks for. What it does
    /// to the outside happens when its time has passed.
    fn handle(&mut self, id: LaneId, input: IoTask) {
        let begin = self.now;
        let rank = id.rank;
        let (charges, leaves_out) = (*self.charges_of(rank), self.leaves_out());
        let frames = &mut self.frames;
        let lane = &mut self.lanes[id];
        let engine = &mut lane.engine;
        if leaves_out {
            engine.tell(Input::Time(Time(begin)));
        }
        let mut time = begin;
        let result = match input {
            IoTask::Header(number) => {
                let header = frames.get(number);
                engine.handle(Input::Header(header.sender, header))
            }
            IoTask::Frame(number, is_new) => {
                let (header, control) = frames.remove(number);
                let weight = f64::from(self.groups.weights[header.sender.index()]);
                let bytes = f64::from(charges.frame_bytes(header.length));
                let cost = charges.receive_frame + charges.receive_byte * bytes;
                time += (cost * weight) as u64;
                receive(engine, &header, &control, is_new)
            }
            IoTask::Writable(peer) => engine.handle(Input::Writable(Rank(peer), true)),
            IoTask::JobDone(job) => {
                let result = lane.results.remove(&job).unwrap_or(JobResult::Written);
                engine.handle(Input::JobDone(job, result))
            }
            IoTask::Told => {
                let news = lane.told.pop_front().expect("what was told is kept until it is heard");
                engine.handle(Input::Told(news))
            }
            IoTask::Begin(step) => {
                let begun = engine.handle(Input::StepBegin(step));
                let commanded = match engine.plan().commands_servers() && !step.is_initial() {
                    true => engine.handle(Input::ServerCommand(vec![0; SERVER_COMMAND_BYTES])),
                    false => Ok(PayloadDest::Nothing),
                };
                let measured = match self.clipping {
                    Some(Clipping::Measured) => {
                        let tensors = TensorId(engine.plan().tensors.len() as u32);
                        engine.handle(Input::MeasureSquares(tensors, step))
                    }
                    _ => Ok(PayloadDest::Nothing),
                };
                begun.and(commanded).and(measured)
            }
            IoTask::Gradient(tensor, step) => {
                time += charges.command;
                let planned = self.channels.plan(rank).tensor(tensor);
                match planned.scheme {
                    // A profile knows no sizes of single steps: blocks are as large as they may be.
                    Scheme::AllGather => {
                        let bytes = planned.spec.numel * planned.spec.dtype.bytes();
                        engine.handle(Input::BlockReady(tensor, step, bytes))
                    }
                    Scheme::GatherToRoot => {
                        let whole = planned.spec.numel * planned.spec.dtype.bytes();
                        let root = self.root_tensors[tensor.index()];
                        let bytes = root.map_or(whole, |it| it.block_bytes);
                        engine.handle(Input::BlockReady(tensor, step, bytes))
                    }
                    _ => engine.handle(Input::GradientReady(tensor, step)),
                }
            }
            IoTask::Needed(tensor, step) => {
                // Need is a wish: a tensor that became ready in the meantime needs nothing.
                engine.handle(Input::TensorNeeded(tensor, step)).or(Ok(PayloadDest::Nothing))
            }
            IoTask::Answer(tensor, step) => {
                time += charges.command;
                let planned = &self.channels.plan(rank).tensor(tensor).spec;
                let bytes = self.root_tensors[tensor.index()]
                    .map_or(planned.numel * planned.dtype.bytes(), |it| it.result_bytes);
                engine.handle(Input::RootResultReady(tensor, step, bytes))
            }
            IoTask::Pass(step) => pass(engine, step),
            // The clock was read above.
            IoTask::Clock => Ok(PayloadDest::Nothing),
            IoTask::End(step) => engine.handle(Input::StepEnd(step)),
        };
        if let Err(refusal) = result {
            self.fail(rank, refusal.to_string());
            return;
        }
        if matches!(input, IoTask::Header(_)) && !leaves_out {
            // It takes no time, and makes the engine ask for nothing.
            return;
        }
        if let IoTask::Writable(peer) = input {
            time = self.flush(id, peer, time);
        }
        time = self.pump(id, time);
        self.meters.io_ns += time - begin;
        self.lanes[id].io.busy_until = time;
        if !self.processors.are_enough() {
            self.processors.occupy(self.channels.topology.node(rank), time);
        }
        self.schedule_clock(id);
    }

    /// Does what the engine asks for until it asks for nothing; the time when that is done.
    fn pump(&mut self, id: LaneId, mut time: u64) -> u64 {
        loop {
            let mut progressed = false;
            while let Some(job) = self.lanes[id].engine.poll_job() {
                progressed = true;
                self.start_job(id, &job, time);
            }
            while let Some(transmit) = self.lanes[id].engine.poll_transmit() {
                progressed = true;
                time = self.offer(id, transmit, time);
            }
            while let Some(event) = self.lanes[id].engine.poll_event() {
                progressed = true;
                self.on_event(id, event, time);
            }
            if !progressed {
                return time;
            }
        }
    }

    fn on_event(&mut self, id: LaneId, event: Event, time: u64) {
        let rank = id.rank;
        let joined = &mut self.nodes[rank as usize].joined;
        match event {
            Event::TensorReady { tensor, step, .. } => {
                let Some(time) = joined.tensor(tensor, time) else {
                    return;
                };
                if self.intra_node.is_some() {
                    return self.pass_on(rank, tensor, step, time);
                }
                let time = time + self.charges.wake;
                self.tensor_is_here(rank, tensor, step, time);
            }
            Event::BlocksReady { tensor, step, .. } => {
                let engine = &mut self.lanes[id].engine;
                if let Err(error) = engine.handle(Input::ReleaseBlocks(tensor, step)) {
                    self.fail(rank, error.to_string());
                }
            }
            Event::RootRequest { tensor, step, .. } => {
                let engine = &mut self.lanes[id].engine;
                if let Err(error) = engine.handle(Input::ReleaseBlocks(tensor, step)) {
                    return self.fail(rank, error.to_string());
                }
                let node = &mut self.nodes[rank as usize];
                let takes = self.root_tensors[tensor.index()].map_or(0, |it| it.rebuild_ns);
                let free = node.root_requests.back().map_or(0, |last| last.0);
                let end =
                    free.max(time + self.charges.wake) + (takes as f64 * node.slowness) as u64;
                node.root_requests.push_back((end, tensor, step));
                self.events.at(end, EventKind::RootResult, rank);
            }
            Event::Failed(failure) => self.fail(rank, failure.to_string()),
            Event::Applied { rank: from, staleness, .. } => self.staleness.note(from, staleness),
            Event::StepComplete { .. } => {
                if let Some(time) = joined.step(time) {
                    self.noted_pace(rank, &event, time);
                }
            }
            // The first lane has told the others before.
            Event::ContributorsDecided { .. } if id.lane > 0 => {}
            Event::ContributorsDecided { .. } | Event::LeftOut { .. } => {
                self.noted_pace(rank, &event, time);
            }
            Event::SquaresReady { step, .. } => {
                if let Some(time) = joined.squares(time) {
                    self.tell_norm(rank, step, time + self.charges.wake);
                }
            }
            Event::TellLead(news) => self.tell_lane(LaneId { rank, lane: 0 }, news, time),
            Event::TellLanes(news) => {
                for lane in 1..self.lanes.each() {
                    self.tell_lane(LaneId { rank, lane }, news.clone(), time);
                }
            }
            Event::PlanSwitched { .. }
            | Event::Late { .. }
            | Event::BufferFree(_)
            | Event::Suspected { .. }
            | Event::Disconnect(_)
            | Event::ClaimNeeded { .. }
            | Event::MembersChanged { .. }
            | Event::Closed => {}
        }
    }

    /// Another lane of the rank tells a lane something at `time`, and wakes its thread.
    fn tell_lane(&mut self, id: LaneId, news: LaneNews, time: u64) {
        let time = time + self.charges.wake;
        let waiting = &mut self.lanes[id].news;
        let at = waiting.partition_point(|&(other, _)| other <= time);
        waiting.insert(at, (time, news));
        self.events.at(time, EventKind::News, self.lanes.number(id));
    }

    /// A lane is told something now.
    pub(crate) fn take_news(&mut self, id: LaneId) {
        if self.is_stopped(id.rank, EventKind::News, self.lanes.number(id)) {
            return;
        }
        let lane = &mut self.lanes[id];
        if let Some((_, news)) = lane.news.pop_front() {
            lane.told.push_back(news);
            self.hear(id, IoTask::Told);
        }
    }

    /// The root of a tensor has made its result.
    pub(crate) fn root_result(&mut self, rank: u32) {
        if let Some((_, tensor, step)) = self.nodes[rank as usize].root_requests.pop_front() {
            self.hear_in_lanes_of(rank, tensor, IoTask::Answer(tensor, step));
        }
    }

    fn start_job(&mut self, id: LaneId, job: &Job, time: u64) {
        let rank = id.rank;
        let copies = f64::from(self.ranks) / self.nodes.len() as f64;
        let cost = self.job_ns(id, job, copies) as u64;
        let host = self.channels.topology.node(rank);
        let lane = &mut self.lanes[id];
        let thread = lane.work_until.iter_mut().min().expect("there is a work thread");
        let begin = self.processors.free_at(host, time.max(*thread));
        let end = begin + cost;
        *thread = end;
        self.processors.occupy(host, end);
        lane.jobs.push(Reverse((end, job.id)));
        let plan = self.channels.lane_plan(id);
        let result = self.channels.expected(rank).result_of(plan, job);
        if let JobResult::Encoded(_) = result {
            lane.results.insert(job.id, result);
        }
        self.meters.work_ns += cost;
        self.events.at(end, EventKind::JobDone, self.lanes.number(id));
        let bytes = plan.slice_bytes(job.slice) as u32;
        let tensor = self.channels.tensor(rank, plan.slice(job.slice).tensor);
        let (slice, priority) = (plan.in_whole_plan(job.slice), Priority(0));
        let subject = Subject::Slice { kind: None, tensor, slice, peer: rank, bytes, priority };
        self.span(rank, Lane::of_job(&job.operation), job.step, subject, begin, end);
    }

    /// The time of a job, where `copies` ranks stand for one.
    fn job_ns(&self, id: LaneId, job: &Job, copies: f64) -> f64 {
        let charges = self.charges_of(id.rank);
        // Codecs cost by the values' bytes, whatever the encoding's length.
        let raw = self.channels.lane_plan(id).slice_bytes(job.slice) as f64;
        let (encode, decode) = (charges.encode_byte * raw, charges.decode_byte * raw);
        let ns = match &job.operation {
            Operation::Copy { from, .. } => charges.reduce_byte * from.length as f64,
            Operation::Reduce { inputs, output, .. }
            | Operation::ReduceApply { inputs, output, .. } => {
                charges.reduce_byte * inputs.len() as f64 * copies * output.length as f64
            }
            Operation::AddSquares { input } => charges.reduce_byte * input.length as f64,
            Operation::Encode { .. } => encode,
            Operation::Decode { .. } => decode,
            Operation::DecodeReduceEncode { inputs, copy_to, .. } => {
                let own = if copy_to.is_some() { decode } else { 0.0 };
                inputs.len() as f64 * copies * decode + encode + own
            }
            Operation::RingEncode { received, copy_to, .. } => {
                let decodes = u8::from(received.is_some()) + u8::from(copy_to.is_some());
                encode + f64::from(decodes) * decode
            }
            // Scales are found in one pass over the values, which encoding makes as well.
            Operation::RingMaxScales { .. } => decode,
            Operation::RingBeginCodes { .. } => encode + decode,
            Operation::RingAddCodes { copy_to, .. } => {
                encode + decode + if copy_to.is_some() { decode } else { 0.0 }
            }
            Operation::DecodeReduceApply { inputs, .. } => {
                inputs.len() as f64 * copies * decode + charges.reduce_byte * raw
            }
        };
        charges.work + ns
    }

    pub(crate) fn job_done(&mut self, id: LaneId) {
        if self.is_stopped(id.rank, EventKind::JobDone, self.lanes.number(id)) {
            return;
        }
        if let Some(Reverse((_, job))) = self.lanes[id].jobs.pop() {
            self.hear(id, IoTask::JobDone(job));
        }
    }
}

/// A frame is here; `control` is the payload of one that is about the session. These are small, and
/// never heard of before they are whole.
fn receive(
    engine: &mut Engine,
    header: &FrameHeader,
    control: &[u8],
    is_new: bool,
) -> Result<PayloadDest, Refusal> {
    let from = header.sender;
    let landing = is_new.then(|| engine.handle(Input::Header(from, *header))).transpose()?;
    engine.handle(match landing {
        Some(PayloadDest::Control) => Input::Control(from, *header, control.to_vec()),
        _ => Input::Frame(from, *header),
    })
}
