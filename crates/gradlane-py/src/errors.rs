//! Errors of the core as Python exceptions, and signals while a call waits.

use gradlane_net::ChannelError as CoreError;
use pyo3::exceptions::{PyException, PyOSError, PyValueError};
use pyo3::prelude::*;

pyo3::create_exception!(
    gradlane._core,
    ChannelError,
    PyException,
    "A session that has failed or cannot begin. args: (message, last complete step or None, rank at \
     fault or None)."
);
pyo3::create_exception!(
    gradlane._core,
    ChannelTimeout,
    ChannelError,
    "Nothing happened in time. args as for ChannelError."
);

/// Runs Python's signal handlers while a call waits without the GIL, and keeps what they raise.
#[derive(Default)]
pub(crate) struct Signals {
    /// Called along with the handlers; raises when the call must end.
    watch: Option<Py<PyAny>>,
    raised: Option<PyErr>,
}

impl Signals {
    pub(crate) fn with_watch(watch: Option<Py<PyAny>>) -> Signals {
        Signals { watch, raised: None }
    }

    /// Whether a handler or the watch has raised something, so that the call must end.
    pub(crate) fn interrupt(&mut self) -> bool {
        if self.raised.is_none() {
            self.raised = Python::attach(|py| {
                py.check_signals()?;
                self.watch.as_ref().map_or(Ok(()), |watch| watch.call0(py).map(drop))
            })
            .err();
        }
        self.raised.is_some()
    }

    /// The exception that a handler has raised.
    pub(crate) fn raised(self) -> Option<PyErr> {
        self.raised
    }

    /// The exception for an error of the core; what a handler has raised comes first.
    pub(crate) fn translate(self, error: CoreError) -> PyErr {
        match (self.raised, error) {
            (Some(raised), CoreError::Interrupted) => raised,
            (_, error) => translate(error),
        }
    }
}

/// The exception for an error of the core.
pub(crate) fn translate(error: CoreError) -> PyErr {
    let message = error.to_string();
    match error {
        CoreError::Argument(_) => PyValueError::new_err(message),
        CoreError::Usage(gradlane_engine::UsageError::Ended { .. }) => {
            ChannelError::new_err((message, None::<u64>, None::<u32>))
        }
        CoreError::Usage(_) => PyValueError::new_err(message),
        CoreError::System(_) => PyOSError::new_err(message),
        CoreError::Refused { peer, .. } => {
            ChannelError::new_err((message, None::<u64>, Some(peer.0)))
        }
        CoreError::TimedOut { last_complete, peer, .. } => ChannelTimeout::new_err((
            message,
            last_complete.map(|step| step.0),
            peer.map(|rank| rank.0),
        )),
        CoreError::Failed(failure) => {
            let last_complete = failure.last_complete.map(|step| step.0);
            let arguments = (message, last_complete, failure.peer.map(|rank| rank.0));
            if failure.timed_out {
                ChannelTimeout::new_err(arguments)
            } else {
                ChannelError::new_err(arguments)
            }
        }
        CoreError::Closed(_) | CoreError::Interrupted => {
            ChannelError::new_err((message, None::<u64>, None::<u32>))
        }
    }
}
