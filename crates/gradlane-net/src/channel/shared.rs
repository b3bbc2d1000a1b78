//! State that the threads of a channel share: commands to the lanes, results from them.

use crate::channel::completion::CompletionTable;
use crate::compute::{ResidualSquares, StateKind, StateRead, StateWrite, UpdateRule};
use crate::error::{ChannelError, ChannelFailure};
use crate::memory::{MemoryError, MemoryTable, ScratchBuffer, UserMemory};
use crate::metrics::trace::Trace;
use crate::metrics::Metrics;
use crate::options::ChannelOptions;
use crate::sys::lock;
use crate::sys::poller::Poller;
use gradlane_engine::{Failure, Input, Journal, Memory, Plan, Refusal, Region, UsageError};
use gradlane_units::{Rank, SliceId, Step, TensorId};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock};

/// A call of an application thread, for a lane.
#[derive(Debug)]
pub(crate) enum Command {
    /// For the engine as it is.
    Engine(Input),
    /// For the engine, once the memory of its tensor is registered.
    Contribute(UserMemory, Input),
    ReleaseBlocks(TensorId, Step, Vec<ScratchBuffer>),
    Needed(Vec<TensorId>, Step),
    SetParameter(TensorId, UserMemory),
    SetOptimizer(Vec<(TensorId, UpdateRule)>),
    ReadState(StateRead, Step),
    WriteState(StateWrite, Step),
    WriteParameters(Vec<TensorId>, Step),
    /// Replies with each slice's first element and values.
    WorkerResidual(TensorId, Sender<Vec<(u64, Vec<f32>)>>),
    ResidualSquares(SliceId, usize, Sender<ResidualSquares>),
    ClearState,
    LoadState(StateKind, Vec<(SliceId, Vec<f32>)>),
    /// All ranks are connected to all.
    AllConnected,
    ReportQueueStats,
    Abort(String),
}

/// The end of the session.
#[derive(Debug)]
pub(crate) enum SessionOutcome {
    /// Every rank said goodbye.
    Closed,
    /// A rank failed, was lost or gave up.
    Failed(ChannelFailure),
}

/// The end of all lanes but in good order.
#[derive(Debug)]
pub(crate) enum StopCause {
    Failed(Failure),
    /// A bug in this program, with the text of the panic.
    Panicked(String),
}

/// What the thread of a lane shares with those of the application and of jobs.
#[derive(Debug)]
pub(crate) struct LaneInbox {
    /// The part of the plan that the lane carries.
    pub(crate) plan: Arc<Plan>,
    /// Where the thread sleeps.
    pub(crate) poller: Poller,
    pub(crate) commands: Mutex<Vec<Command>>,
    pub(crate) trace: Trace,
    /// The engine's inputs and decisions, once the session has ended.
    pub(crate) journal: Mutex<Option<Journal>>,
}

impl LaneInbox {
    /// Queues a command.
    pub(crate) fn command(&self, command: Command) {
        lock(&self.commands).push(command);
        self.poller.wake();
    }
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) lanes: Vec<LaneInbox>,
    pub(crate) completion: CompletionTable,
    /// Complete blocks that were not taken yet.
    pub(crate) blocks: Mutex<BTreeMap<(TensorId, Step), Vec<GatheredBlock>>>,
    pub(crate) metrics: Arc<Metrics>,
    /// Why all lanes stop, if they do before the ranks have said goodbye.
    pub(crate) stop: OnceLock<StopCause>,
    pub(crate) ended: OnceLock<SessionOutcome>,
    /// The first misuse that only the engine has noticed, an error of the next call.
    pub(crate) usage: Mutex<Option<UsageError>>,
}

impl Shared {
    /// Makes the state of a session before its first step, with a poller for each lane.
    pub(crate) fn new(
        pollers: Vec<Poller>,
        plan: &Plan,
        options: &ChannelOptions,
        metrics: Arc<Metrics>,
    ) -> Shared {
        let count = pollers.len() as u32;
        let lane = |(lane, poller)| LaneInbox {
            plan: Arc::new(plan.lane(lane, count)),
            poller,
            commands: Mutex::default(),
            trace: Trace::new(options.trace),
            journal: Mutex::new(None),
        };
        let lanes: Vec<LaneInbox> = (0..).zip(pollers).map(lane).collect();
        let plans = lanes.iter().map(|lane| &*lane.plan);
        Shared {
            completion: CompletionTable::new(plans),
            lanes,
            blocks: Mutex::default(),
            metrics,
            stop: OnceLock::new(),
            ended: OnceLock::new(),
            usage: Mutex::new(None),
        }
    }

    /// Queues a command for each lane.
    pub(crate) fn tell_all(&self, command: impl Fn() -> Command) {
        self.lanes.iter().for_each(|lane| lane.command(command()));
    }

    /// Queues a command for the first lane, for what concerns the whole session.
    pub(crate) fn tell_first(&self, command: Command) {
        if let Some(lane) = self.lanes.first() {
            lane.command(command);
        }
    }

    /// Queues a command for each lane that carries a part of a tensor.
    pub(crate) fn tell_lanes_of(&self, tensor: TensorId, command: impl Fn() -> Command) {
        let carries = |lane: &&LaneInbox| lane.plan.has_slices_of(tensor);
        self.lanes.iter().filter(carries).for_each(|lane| lane.command(command()));
    }

    /// Stops all lanes; the first cause stands.
    pub(crate) fn stop(&self, cause: StopCause) {
        // A second cause changes nothing.
        let _ = self.stop.set(cause);
        self.lanes.iter().for_each(|lane| lane.poller.wake());
    }

    /// Whether all lanes stop.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.get().is_some()
    }

    /// Keeps a misuse for the next call.
    pub(crate) fn note_usage(&self, refusal: Refusal) {
        match refusal {
            // After the end, the reason of the end explains more.
            Refusal::Usage(UsageError::Ended { .. }) => {}
            Refusal::Usage(error) => drop(lock(&self.usage).get_or_insert(error)),
            Refusal::Protocol(error) => unreachable!("no call is a frame: {error}"),
        }
    }

    /// Ends the session for all waits and calls; the first reason stands.
    pub(crate) fn end(&self, ended: SessionOutcome) {
        // A second end changes nothing.
        let _ = self.ended.set(ended);
        self.metrics.queue_stats.close();
        self.completion.publish_end();
    }

    /// Ends the session after a panic of an I/O thread.
    pub(crate) fn end_by_panic(&self, text: &str) {
        self.end(SessionOutcome::Failed(ChannelFailure {
            message: format!("the I/O thread panicked: {text}"),
            last_complete: self.completion.last_complete(),
            peer: None,
            timed_out: false,
        }));
    }

    /// Returns an error when the session is over.
    pub(crate) fn outcome_error(&self) -> Option<ChannelError> {
        Some(match self.ended.get()? {
            SessionOutcome::Failed(failure) => ChannelError::Failed(failure.clone()),
            SessionOutcome::Closed => ChannelError::Closed("the channel is closed".to_owned()),
        })
    }

    /// Returns an error when the session is over or was misused.
    pub(crate) fn check(&self) -> Result<(), ChannelError> {
        if let Some(ended) = self.outcome_error() {
            return Err(ended);
        }
        match lock(&self.usage).take() {
            Some(error) => Err(ChannelError::Usage(error)),
            None => Ok(()),
        }
    }
}

/// Returns the text of a panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no text".to_owned())
}

// Gathered blocks on their way from a lane to the application.

/// A block as the driver hands it over.
#[derive(Debug)]
pub(crate) enum GatheredBlock {
    Absent,
    Own(u64),
    Empty,
    Other(ScratchBuffer, usize),
}

/// Moves gathered blocks out of the memory of the channel of `rank`.
pub(crate) fn take_out(
    memory: &mut MemoryTable,
    rank: Rank,
    blocks: &[Option<Region>],
) -> Result<Vec<GatheredBlock>, MemoryError> {
    let block = |(index, block): (usize, &Option<Region>)| match block {
        None => Ok(GatheredBlock::Absent),
        Some(region) if index == rank.index() => Ok(GatheredBlock::Own(region.length)),
        Some(Region { memory: Memory::Buffer(buffer), length, .. }) => {
            Ok(GatheredBlock::Other(memory.take(*buffer)?, *length as usize))
        }
        Some(_) => Ok(GatheredBlock::Empty),
    };
    blocks.iter().enumerate().map(block).collect()
}
