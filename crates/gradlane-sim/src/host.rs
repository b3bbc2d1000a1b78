//! The host of a rank: the I/O threads, each of which does one thing after another, and the work
//! threads.

use crate::event_queue::EventKind;
use crate::node::IoTask;
use crate::pauses::pass;
use crate::simulation::{Clipping, Run};
use crate::trace::{Lane, Subject};
use gradlane_engine::{
    Engine, Event, Input, Job, JobResult, Operation, PayloadDest, Refusal, Scheme,
};
use gradlane_units::{Priority, Rank, TensorId, Time};
use gradlane_wire::FrameHeader;
use std::cmp::Reverse;

/// Settings of an optimizer for tensors that share them, to a server that trains nothing.
const SERVER_COMMAND_BYTES: usize = 60;

impl Run {
    /// A task for an I/O thread: done at once, or after the task that it is doing.
    pub(crate) fn hear(&mut self, rank: u32, input: IoTask) {
        let now = self.now;
        let thread = self.thread_of(rank, input);
        let io = &mut self.nodes[rank as usize].io[thread as usize];
        if io.inbox.is_empty() && io.busy_until <= now {
            self.handle(rank, thread, input);
            return;
        }
        io.inbox.push_back(input);
        if !std::mem::replace(&mut io.will_listen, true) {
            let listener = rank * self.lanes + thread;
            self.events.at(io.busy_until, EventKind::Listen, listener);
        }
    }

    /// The thread that hears of a task: that of a frame's lane, or the first.
    fn thread_of(&self, rank: u32, input: IoTask) -> u32 {
        match input {
            IoTask::Header(number) | IoTask::Frame(number, _) if self.lanes > 1 => {
                self.channels.lane_of(rank, &self.frames.get(number))
            }
            IoTask::JobDone(_, lane) => lane,
            _ => 0,
        }
    }

    /// A thread looks into its inbox; `listener` counts the threads of all ranks.
    pub(crate) fn listen(&mut self, listener: u32) {
        let (rank, thread) = (listener / self.lanes, listener % self.lanes);
        let io = &mut self.nodes[rank as usize].io[thread as usize];
        if io.busy_until > self.now {
            // It was stopped meanwhile, or has sent what another thread decided.
            return self.events.at(io.busy_until, EventKind::Listen, listener);
        }
        io.will_listen = false;
        while let Some(input) = self.nodes[rank as usize].io[thread as usize].inbox.pop_front() {
            self.handle(rank, thread, input);
            let io = &mut self.nodes[rank as usize].io[thread as usize];
            if io.busy_until > self.now {
                if !io.inbox.is_empty() {
                    io.will_listen = true;
                    self.events.at(io.busy_until, EventKind::Listen, listener);
                }
                return;
            }
        }
    }

    /// An I/O thread hears something now, tells the engine and does what it asks for. What it does
    /// to the outside happens when its time has passed.
    fn handle(&mut self, rank: u32, thread: u32, input: IoTask) {
        let begin = self.now;
        let (charges, leaves_out) = (*self.charges_of(rank), self.leaves_out());
        let frames = &mut self.frames;
        let node = &mut self.nodes[rank as usize];
        let engine = &mut node.engine;
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
            IoTask::JobDone(id, _) => {
                let result = node.results.remove(&id).unwrap_or(JobResult::Written);
                engine.handle(Input::JobDone(id, result))
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
            time = self.flush(rank, thread, peer, time);
        }
        time = self.pump(rank, thread, time);
        self.meters.io_ns += time - begin;
        self.nodes[rank as usize].io[thread as usize].busy_until = time;
        self.schedule_clock(rank);
    }

    /// Does what the engine asks for until it asks for nothing; the time when that is done.
    fn pump(&mut self, rank: u32, thread: u32, mut time: u64) -> u64 {
        let index = rank as usize;
        loop {
            let mut progressed = false;
            while let Some(job) = self.nodes[index].engine.poll_job() {
                progressed = true;
                self.start_job(rank, &job, time);
            }
            while let Some(transmit) = self.nodes[index].engine.poll_transmit() {
                progressed = true;
                time = self.offer(rank, thread, transmit, time);
            }
            while let Some(event) = self.nodes[index].engine.poll_event() {
                progressed = true;
                self.on_event(rank, event, time);
            }
            if !progressed {
                return time;
            }
        }
    }

    fn on_event(&mut self, rank: u32, event: Event, time: u64) {
        match event {
            Event::TensorReady { tensor, step, .. } if self.intra_node.is_some() => {
                self.pass_on(rank, tensor, step, time);
            }
            Event::TensorReady { tensor, step, .. } => {
                let time = time + self.charges.wake;
                self.tensor_is_here(rank, tensor, step, time);
            }
            Event::BlocksReady { tensor, step, .. } => {
                let engine = &mut self.nodes[rank as usize].engine;
                if let Err(error) = engine.handle(Input::ReleaseBlocks(tensor, step)) {
                    self.fail(rank, error.to_string());
                }
            }
            Event::RootRequest { tensor, step, .. } => {
                let node = &mut self.nodes[rank as usize];
                if let Err(error) = node.engine.handle(Input::ReleaseBlocks(tensor, step)) {
                    return self.fail(rank, error.to_string());
                }
                let takes = self.root_tensors[tensor.index()].map_or(0, |it| it.rebuild_ns);
                let free = node.root_requests.back().map_or(0, |last| last.0);
                let end =
                    free.max(time + self.charges.wake) + (takes as f64 * node.slowness) as u64;
                node.root_requests.push_back((end, tensor, step));
                self.events.at(end, EventKind::RootResult, rank);
            }
            Event::Failed(failure) => self.fail(rank, failure.to_string()),
            Event::Applied { rank: from, staleness, .. } => self.staleness.note(from, staleness),
            Event::StepComplete { .. }
            | Event::ContributorsDecided { .. }
            | Event::LeftOut { .. } => {
                self.noted_pace(rank, &event, time);
            }
            Event::SquaresReady { step, .. } => {
                self.tell_norm(rank, step, time + self.charges.wake);
            }
            Event::PlanSwitched { .. }
            | Event::Late { .. }
            | Event::BufferFree(_)
            | Event::Suspected { .. }
            | Event::Disconnect(_)
            | Event::TellLead(_)
            | Event::TellLanes(_)
            | Event::ClaimNeeded { .. }
            | Event::MembersChanged { .. }
            | Event::Closed => {}
        }
    }

    /// The root of a tensor has made its result.
    pub(crate) fn root_result(&mut self, rank: u32) {
        if let Some((_, tensor, step)) = self.nodes[rank as usize].root_requests.pop_front() {
            self.hear(rank, IoTask::Answer(tensor, step));
        }
    }

    fn start_job(&mut self, rank: u32, job: &Job, time: u64) {
        let copies = f64::from(self.ranks) / self.nodes.len() as f64;
        let cost = self.job_ns(rank, job, copies) as u64;
        let lane = self.channels.lane_of_slice(rank, job.slice);
        let node = &mut self.nodes[rank as usize];
        let thread = node.work_until.iter_mut().min().expect("there is a work thread");
        let begin = time.max(*thread);
        let end = begin + cost;
        *thread = end;
        node.jobs.push(Reverse((end, job.id, lane)));
        let result = self.channels.expected(rank).result_of(self.channels.plan(rank), job);
        if let JobResult::Encoded(_) = result {
            node.results.insert(job.id, result);
        }
        self.meters.work_ns += cost;
        self.events.at(end, EventKind::JobDone, rank);
        let plan = self.channels.plan(rank);
        let bytes = plan.slice_bytes(job.slice) as u32;
        let tensor = self.channels.tensor(rank, plan.slice(job.slice).tensor);
        let (slice, priority) = (job.slice, Priority(0));
        let subject = Subject::Slice { kind: None, tensor, slice, peer: rank, bytes, priority };
        self.span(rank, Lane::of_job(&job.operation), job.step, subject, begin, end);
    }

    /// The time of a job, where `copies` ranks stand for one.
    fn job_ns(&self, rank: u32, job: &Job, copies: f64) -> f64 {
        let charges = self.charges_of(rank);
        // Codecs cost by the values' bytes, whatever the encoding's length.
        let raw = self.channels.plan(rank).slice_bytes(job.slice) as f64;
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

    pub(crate) fn job_done(&mut self, rank: u32) {
        if self.is_stopped(rank, EventKind::JobDone) {
            return;
        }
        if let Some(Reverse((_, id, lane))) = self.nodes[rank as usize].jobs.pop() {
            self.hear(rank, IoTask::JobDone(id, lane));
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
