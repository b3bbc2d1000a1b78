//! A journal of all that an engine and its driver said to each other, and its replay.
//!
//! An engine's decisions follow from its inputs alone: replayed into a new engine, the inputs of a
//! run over real sockets give the same landings, frames, jobs and events, one by one. Without a
//! journal, nothing is kept and nothing is paid but a branch a call.

use crate::api::{
    EngineOptions, Event, Failure, Input, Job, JobId, PayloadDest, ProtocolError, Transmit,
    UsageError,
};
use crate::engine::Engine;
use crate::plan::Plan;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Deref;
use gradlane_units::{Rank, SquareSum, Time};
use gradlane_wire::FrameHeader;

/// A call of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is the method of Engine with its name and arguments")]
pub enum Call {
    Handle(Input),
    Writable(Rank, bool),
    FrameBytes(Rank, u32),
    Sent(Transmit),
    Header(Rank, FrameHeader),
    Frame(Rank, FrameHeader),
    Control(Rank, FrameHeader, Vec<u8>),
    JobDone(JobId),
    Encoded(JobId, u64),
    Squares(JobId, SquareSum),
    Now(Time),
    PeerLost(Rank, String),
    Suspect(Rank),
    BlameLink(Rank, Rank),
    RejectPeer(Rank, String),
    Abort(String),
    EndAs(Failure),
    PollTransmit,
    PollJob,
    PollEvent,
}

/// The engine's decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing but a new state.
    Done,
    /// It refused, for this reason.
    Refused(String),
    /// A payload lands here.
    PayloadDest(PayloadDest),
    /// The next frame.
    Transmit(Option<Transmit>),
    /// The next job.
    Job(Option<Job>),
    /// The next event.
    Event(Option<Event>),
}

/// All that was said, in order.
#[derive(Clone, Debug)]
pub struct Journal {
    options: EngineOptions,
    plan: Arc<Plan>,
    entries: Vec<(Call, Decision)>,
}

/// Where a replay went another way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("entry {entry}, {call}: decided {recorded}, and {replayed} when replayed")]
pub struct Divergence {
    /// Number of the entry.
    pub entry: usize,
    /// The call, as recorded.
    pub call: String,
    /// The recorded decision.
    pub recorded: String,
    /// The decision of the replay.
    pub replayed: String,
}

impl Journal {
    /// All entries.
    #[must_use]
    pub fn entries(&self) -> &[(Call, Decision)] {
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
        for (number, (call, recorded)) in self.entries.iter().enumerate() {
            let replayed = tell(&mut engine, call);
            if replayed != *recorded {
                return Err(Divergence {
                    entry: number,
                    call: format!("{call:?}"),
                    recorded: format!("{recorded:?}"),
                    replayed: format!("{replayed:?}"),
                });
            }
        }
        Ok(())
    }
}

fn tell(engine: &mut Engine, call: &Call) -> Decision {
    match call {
        Call::Handle(input) => usage_of(&engine.handle(input.clone())),
        Call::Header(from, header) => landing_of(&engine.handle_header(*from, header)),
        Call::Frame(from, header) => protocol_of(&engine.handle_frame(*from, header)),
        Call::Control(from, header, payload) => {
            protocol_of(&engine.handle_control(*from, header, payload))
        }
        Call::PollTransmit => Decision::Transmit(engine.poll_transmit()),
        Call::PollJob => Decision::Job(engine.poll_job()),
        Call::PollEvent => Decision::Event(engine.poll_event()),
        _ => {
            note(engine, call);
            Decision::Done
        }
    }
}

/// Calls that decide nothing by themselves.
fn note(engine: &mut Engine, call: &Call) {
    match call {
        Call::Writable(peer, writable) => engine.handle_writable(*peer, *writable),
        Call::FrameBytes(peer, bytes) => engine.handle_frame_bytes(*peer, *bytes),
        Call::Sent(transmit) => engine.handle_sent(transmit),
        Call::JobDone(id) => engine.handle_job_done(*id),
        Call::Encoded(id, bytes) => engine.handle_encoded(*id, *bytes),
        Call::Squares(id, sum) => engine.handle_squares(*id, sum),
        Call::Now(now) => engine.handle_time(*now),
        Call::PeerLost(peer, reason) => engine.handle_peer_lost(*peer, reason),
        Call::Suspect(peer) => drop(engine.suspect(*peer)),
        Call::BlameLink(one, other) => engine.blame_link(*one, *other),
        Call::RejectPeer(peer, reason) => engine.reject_peer(*peer, reason),
        Call::Abort(reason) => engine.abort(reason),
        Call::EndAs(failure) => engine.end_as(failure),
        _ => unreachable!("{call:?} decides something"),
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

fn landing_of(result: &Result<PayloadDest, ProtocolError>) -> Decision {
    match result {
        Ok(landing) => Decision::PayloadDest(*landing),
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

/// Methods that hand on to the engine, and note the call and the decision.
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
        handle(input: Input) -> Result<(), UsageError>,Call::Handle(input.clone()), usage_of;
        handle_writable(peer: Rank, writable: bool),
            Call::Writable(peer, writable), |&()| Decision::Done;
        handle_frame_bytes(peer: Rank, frame_bytes: u32),
            Call::FrameBytes(peer, frame_bytes), |&()| Decision::Done;
        handle_sent(transmit: &Transmit), Call::Sent(transmit.clone()), |&()| Decision::Done;
        handle_header(from: Rank, header: &FrameHeader) -> Result<PayloadDest, ProtocolError>,
            Call::Header(from, *header), landing_of;
        handle_frame(from: Rank, header: &FrameHeader) -> Result<(), ProtocolError>,
            Call::Frame(from, *header), protocol_of;
        handle_control(from: Rank, header: &FrameHeader, payload: &[u8])
            -> Result<(), ProtocolError>,
            Call::Control(from, *header, payload.to_vec()), protocol_of;
        handle_job_done(id: JobId), Call::JobDone(id), |&()| Decision::Done;
        handle_encoded(id: JobId, bytes: u64), Call::Encoded(id, bytes), |&()| Decision::Done;
        handle_squares(id: JobId, sum: &SquareSum),
            Call::Squares(id, sum.clone()), |&()| Decision::Done;
        handle_time(now: Time), Call::Now(now), |&()| Decision::Done;
        handle_peer_lost(peer: Rank, reason: &str),
            Call::PeerLost(peer, reason.to_string()), |&()| Decision::Done;
        suspect(peer: Rank) -> bool,
            Call::Suspect(peer), |_: &bool| Decision::Done;
        blame_link(one: Rank, other: Rank),
            Call::BlameLink(one, other), |&()| Decision::Done;
        reject_peer(peer: Rank, reason: &str),
            Call::RejectPeer(peer, reason.to_string()), |&()| Decision::Done;
        abort(reason: &str), Call::Abort(reason.to_string()), |&()| Decision::Done;
        end_as(failure: &Failure), Call::EndAs(failure.clone()), |&()| Decision::Done;
        poll_transmit() -> Option<Transmit>, Call::PollTransmit,
            |result: &Option<Transmit>| Decision::Transmit(result.clone());
        poll_job() -> Option<Job>, Call::PollJob,
            |result: &Option<Job>| Decision::Job(result.clone());
        poll_event() -> Option<Event>, Call::PollEvent,
            |result: &Option<Event>| Decision::Event(result.clone());
    }
}
