//! A journal of all that an engine and its driver said to each other, and its replay.
//!
//! An engine's decisions follow from its inputs alone: replayed into a new engine, the inputs of a
//! run over real sockets give the same landings, frames, works and events, one by one. Without a
//! journal, nothing is kept and nothing is paid but a branch a call.

use crate::engine::Engine;
use crate::error::{ProtocolError, UsageError};
use crate::io::{Event, Landing, Transmit, Work, WorkId};
use crate::options::EngineOptions;
use crate::plan::Plan;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Deref;
use gradlane_units::{Priority, Rank, Step, TensorId, Time};
use gradlane_wire::FrameHeader;

/// What a driver told its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the method of Engine with its name and arguments")]
pub enum Input {
    StepBegin(Step),
    StepPass(Step),
    StepGather(Step),
    GradientReady(TensorId, Step),
    TensorAbsent(TensorId, Step),
    BlockReady(TensorId, Step, u64),
    AnswerReady(TensorId, Step, u64),
    ReleaseBlocks(TensorId, Step),
    TensorNeeded(TensorId, Step),
    SendRaw(Step),
    StepEnd(Step),
    SwitchPriorities(Vec<Priority>),
    Writable(Rank, bool),
    FrameBytes(Rank, u32),
    Sent(Transmit),
    Header(Rank, FrameHeader),
    Frame(Rank, FrameHeader),
    Control(Rank, FrameHeader, Vec<u8>),
    WorkDone(WorkId),
    Encoded(WorkId, u64),
    Now(Time),
    PeerLost(Rank, String),
    Suspect(Rank),
    BlameLink(Rank, Rank),
    RejectPeer(Rank, String),
    UpdatesReady,
    UpdatesPaused,
    Finish,
    Abort(String),
    PollTransmit,
    PollWork,
    PollEvent,
}

/// What the engine decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing but a new state.
    Done,
    /// It refused, for this reason.
    Refused(String),
    /// A payload lands here.
    Landing(Landing),
    /// The next frame.
    Transmit(Option<Transmit>),
    /// The next piece of work.
    Work(Option<Work>),
    /// The next event.
    Event(Option<Event>),
}

/// All that was said, in order.
#[derive(Clone, Debug)]
pub struct Journal {
    options: EngineOptions,
    plan: Arc<Plan>,
    entries: Vec<(Input, Decision)>,
}

/// Where a replay went another way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("entry {entry}, {input}: decided {recorded}, and {replayed} when replayed")]
pub struct Divergence {
    /// Number of the entry.
    pub entry: usize,
    /// The input.
    pub input: String,
    /// What was decided.
    pub recorded: String,
    /// What the replay decided.
    pub replayed: String,
}

impl Journal {
    /// All entries.
    #[must_use]
    pub fn entries(&self) -> &[(Input, Decision)] {
        &self.entries
    }

    /// The same run with one entry less, to see whether a replay notices.
    #[must_use]
    pub fn without(&self, entry: usize) -> Journal {
        let mut changed = self.clone();
        changed.entries.remove(entry);
        changed
    }

    /// Tells a new engine the same.
    ///
    /// # Errors
    /// [`Divergence`] at the first decision that is another one.
    pub fn replay(&self) -> Result<(), Divergence> {
        let mut engine = Engine::new(self.options.clone(), Arc::clone(&self.plan));
        for (number, (input, recorded)) in self.entries.iter().enumerate() {
            let replayed = tell(&mut engine, input);
            if replayed != *recorded {
                return Err(Divergence {
                    entry: number,
                    input: format!("{input:?}"),
                    recorded: format!("{recorded:?}"),
                    replayed: format!("{replayed:?}"),
                });
            }
        }
        Ok(())
    }
}

fn tell(engine: &mut Engine, input: &Input) -> Decision {
    match input {
        Input::StepBegin(step) => usage_of(&engine.step_begin(*step)),
        Input::StepPass(step) => usage_of(&engine.step_pass(*step)),
        Input::StepGather(step) => usage_of(&engine.step_gather(*step)),
        Input::GradientReady(tensor, step) => usage_of(&engine.gradient_ready(*tensor, *step)),
        Input::TensorAbsent(tensor, step) => usage_of(&engine.tensor_absent(*tensor, *step)),
        Input::BlockReady(tensor, step, bytes) => {
            usage_of(&engine.block_ready(*tensor, *step, *bytes))
        }
        Input::AnswerReady(tensor, step, bytes) => {
            usage_of(&engine.answer_ready(*tensor, *step, *bytes))
        }
        Input::ReleaseBlocks(tensor, step) => usage_of(&engine.release_blocks(*tensor, *step)),
        Input::TensorNeeded(tensor, step) => usage_of(&engine.tensor_needed(*tensor, *step)),
        Input::SendRaw(step) => usage_of(&engine.send_raw(*step)),
        Input::StepEnd(step) => usage_of(&engine.step_end(*step)),
        Input::SwitchPriorities(vector) => usage_of(&engine.switch_priorities(vector.clone())),
        Input::Header(from, header) => landing_of(&engine.handle_header(*from, header)),
        Input::Frame(from, header) => protocol_of(&engine.handle_frame(*from, header)),
        Input::Control(from, header, payload) => {
            protocol_of(&engine.handle_control(*from, header, payload))
        }
        Input::PollTransmit => Decision::Transmit(engine.poll_transmit()),
        Input::PollWork => Decision::Work(engine.poll_work()),
        Input::PollEvent => Decision::Event(engine.poll_event()),
        _ => {
            note(engine, input);
            Decision::Done
        }
    }
}

/// Inputs that decide nothing by themselves.
fn note(engine: &mut Engine, input: &Input) {
    match input {
        Input::Writable(peer, writable) => engine.handle_writable(*peer, *writable),
        Input::FrameBytes(peer, bytes) => engine.handle_frame_bytes(*peer, *bytes),
        Input::Sent(transmit) => engine.handle_sent(transmit),
        Input::WorkDone(id) => engine.handle_work_done(*id),
        Input::Encoded(id, bytes) => engine.handle_encoded(*id, *bytes),
        Input::Now(now) => engine.handle_time(*now),
        Input::PeerLost(peer, reason) => engine.handle_peer_lost(*peer, reason),
        Input::Suspect(peer) => drop(engine.suspect(*peer)),
        Input::BlameLink(one, other) => engine.blame_link(*one, *other),
        Input::RejectPeer(peer, reason) => engine.reject_peer(*peer, reason),
        Input::UpdatesReady => engine.updates_ready(),
        Input::UpdatesPaused => engine.updates_paused(),
        Input::Finish => engine.finish(),
        Input::Abort(reason) => engine.abort(reason),
        _ => unreachable!("{input:?} decides something"),
    }
}

fn usage_of(result: &Result<(), UsageError>) -> Decision {
    match result {
        Ok(()) => Decision::Done,
        Err(error) => Decision::Refused(error.to_string()),
    }
}

fn protocol_of(result: &Result<(), ProtocolError>) -> Decision {
    match result {
        Ok(()) => Decision::Done,
        Err(error) => Decision::Refused(error.to_string()),
    }
}

fn landing_of(result: &Result<Landing, ProtocolError>) -> Decision {
    match result {
        Ok(landing) => Decision::Landing(*landing),
        Err(error) => Decision::Refused(error.to_string()),
    }
}

/// An engine that can keep a journal. It is used like the engine itself.
#[derive(Debug)]
pub struct JournaledEngine {
    engine: Engine,
    journal: Option<Journal>,
}

impl Deref for JournaledEngine {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

/// Methods that hand on to the engine and note what was said.
macro_rules! journaled {
    ($($name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?,
        $input:expr, $decision:expr;)+) => {
        $(
            #[doc = concat!("[`Engine::", stringify!($name), "`].")]
            #[allow(clippy::missing_errors_doc, reason = "as the engine's")]
            pub fn $name(&mut self, $($argument: $type),*) $(-> $result)? {
                if self.journal.is_none() {
                    return self.engine.$name($($argument),*);
                }
                let input = $input;
                let result = self.engine.$name($($argument),*);
                let decide = $decision;
                let decision = decide(&result);
                if let Some(journal) = &mut self.journal {
                    journal.entries.push((input, decision));
                }
                result
            }
        )+
    };
}

impl JournaledEngine {
    /// An engine before step 0, with or without a journal.
    ///
    /// # Panics
    /// As [`Engine::new`].
    #[must_use]
    pub fn new(options: EngineOptions, plan: Arc<Plan>, keep: bool) -> JournaledEngine {
        let journal = keep.then(|| Journal {
            options: options.clone(),
            plan: Arc::clone(&plan),
            entries: Vec::new(),
        });
        JournaledEngine { engine: Engine::new(options, plan), journal }
    }

    /// The journal so far; nothing is kept afterwards.
    pub fn take_journal(&mut self) -> Option<Journal> {
        self.journal.take()
    }

    journaled! {
        step_begin(step: Step) -> Result<(), UsageError>, Input::StepBegin(step), usage_of;
        step_pass(step: Step) -> Result<(), UsageError>, Input::StepPass(step), usage_of;
        step_gather(step: Step) -> Result<(), UsageError>, Input::StepGather(step), usage_of;
        gradient_ready(tensor: TensorId, step: Step) -> Result<(), UsageError>,
            Input::GradientReady(tensor, step), usage_of;
        tensor_absent(tensor: TensorId, step: Step) -> Result<(), UsageError>,
            Input::TensorAbsent(tensor, step), usage_of;
        block_ready(tensor: TensorId, step: Step, bytes: u64) -> Result<(), UsageError>,
            Input::BlockReady(tensor, step, bytes), usage_of;
        answer_ready(tensor: TensorId, step: Step, bytes: u64) -> Result<(), UsageError>,
            Input::AnswerReady(tensor, step, bytes), usage_of;
        release_blocks(tensor: TensorId, step: Step) -> Result<(), UsageError>,
            Input::ReleaseBlocks(tensor, step), usage_of;
        tensor_needed(tensor: TensorId, step: Step) -> Result<(), UsageError>,
            Input::TensorNeeded(tensor, step), usage_of;
        send_raw(step: Step) -> Result<(), UsageError>, Input::SendRaw(step), usage_of;
        step_end(step: Step) -> Result<(), UsageError>, Input::StepEnd(step), usage_of;
        switch_priorities(priorities: Vec<Priority>) -> Result<(), UsageError>,
            Input::SwitchPriorities(priorities.clone()), usage_of;
        handle_writable(peer: Rank, writable: bool),
            Input::Writable(peer, writable), |&()| Decision::Done;
        handle_frame_bytes(peer: Rank, frame_bytes: u32),
            Input::FrameBytes(peer, frame_bytes), |&()| Decision::Done;
        handle_sent(transmit: &Transmit), Input::Sent(transmit.clone()), |&()| Decision::Done;
        handle_header(from: Rank, header: &FrameHeader) -> Result<Landing, ProtocolError>,
            Input::Header(from, *header), landing_of;
        handle_frame(from: Rank, header: &FrameHeader) -> Result<(), ProtocolError>,
            Input::Frame(from, *header), protocol_of;
        handle_control(from: Rank, header: &FrameHeader, payload: &[u8])
            -> Result<(), ProtocolError>,
            Input::Control(from, *header, payload.to_vec()), protocol_of;
        handle_work_done(id: WorkId), Input::WorkDone(id), |&()| Decision::Done;
        handle_encoded(id: WorkId, bytes: u64), Input::Encoded(id, bytes), |&()| Decision::Done;
        handle_time(now: Time), Input::Now(now), |&()| Decision::Done;
        handle_peer_lost(peer: Rank, reason: &str),
            Input::PeerLost(peer, reason.to_string()), |&()| Decision::Done;
        suspect(peer: Rank) -> bool,
            Input::Suspect(peer), |_: &bool| Decision::Done;
        blame_link(one: Rank, other: Rank),
            Input::BlameLink(one, other), |&()| Decision::Done;
        reject_peer(peer: Rank, reason: &str),
            Input::RejectPeer(peer, reason.to_string()), |&()| Decision::Done;
        updates_ready(), Input::UpdatesReady, |&()| Decision::Done;
        updates_paused(), Input::UpdatesPaused, |&()| Decision::Done;
        finish(), Input::Finish, |&()| Decision::Done;
        abort(reason: &str), Input::Abort(reason.to_string()), |&()| Decision::Done;
        poll_transmit() -> Option<Transmit>, Input::PollTransmit,
            |result: &Option<Transmit>| Decision::Transmit(result.clone());
        poll_work() -> Option<Work>, Input::PollWork,
            |result: &Option<Work>| Decision::Work(result.clone());
        poll_event() -> Option<Event>, Input::PollEvent,
            |result: &Option<Event>| Decision::Event(result.clone());
    }
}
