//! State that the threads of a channel share: commands to the I/O threads, results from them.

use crate::channel::blocks::GatheredBlock;
use crate::channel::completion::CompletionTable;
use crate::compute::{ResidualSquares, StateKind, StateRead, StateWrite, UpdateRule};
use crate::error::{ChannelError, ChannelFailure};
use crate::memory::{ScratchBuffer, UserMemory};
use crate::metrics::trace::Trace;
use crate::metrics::Metrics;
use crate::options::ChannelOptions;
use crate::sys::lock;
use crate::sys::poller::Poller;
use gradlane_engine::{Input, Journal, Plan, UsageError};
use gradlane_units::{SliceId, Step, TensorId};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock};

/// A call of an application thread, for the I/O threads.
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
    WorkerResidual(TensorId, Sender<Vec<f32>>),
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

#[derive(Debug)]
pub(crate) struct Shared {
    /// By I/O thread: where it sleeps.
    pub(crate) pollers: Vec<Poller>,
    pub(crate) commands: Mutex<Vec<Command>>,
    pub(crate) completion: CompletionTable,
    /// Complete blocks that were not taken yet.
    pub(crate) blocks: Mutex<BTreeMap<(TensorId, Step), Vec<GatheredBlock>>>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) trace: Trace,
    /// The engine's inputs and decisions, once the session has ended.
    pub(crate) journal: Mutex<Option<Journal>>,
    pub(crate) ended: OnceLock<SessionOutcome>,
    /// The first misuse that only the engine has noticed, an error of the next call.
    pub(crate) usage: Mutex<Option<UsageError>>,
}

impl Shared {
    /// Makes the state of a session before its first step, with a poller for each I/O thread.
    pub(crate) fn new(
        pollers: Vec<Poller>,
        plan: &Plan,
        options: &ChannelOptions,
        metrics: Arc<Metrics>,
    ) -> Shared {
        Shared {
            pollers,
            commands: Mutex::default(),
            completion: CompletionTable::new(plan.tensors.len()),
            blocks: Mutex::default(),
            metrics,
            trace: Trace::new(options.trace),
            journal: Mutex::new(None),
            ended: OnceLock::new(),
            usage: Mutex::new(None),
        }
    }

    /// Queues a command.
    pub(crate) fn command(&self, command: Command) {
        lock(&self.commands).push(command);
        self.wake(0);
    }

    /// Wakes an I/O thread that sleeps; 0 for the engine's needs.
    pub(crate) fn wake(&self, io_thread: usize) {
        if let Some(poller) = self.pollers.get(io_thread) {
            poller.wake();
        }
    }

    /// Keeps a misuse for the next call.
    pub(crate) fn note_usage(&self, error: UsageError) {
        // After the end, the reason of the end explains more.
        if !matches!(error, UsageError::Ended { .. }) {
            lock(&self.usage).get_or_insert(error);
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
