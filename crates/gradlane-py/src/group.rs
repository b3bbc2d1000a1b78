//! `Group` and `Work` for Python.

use crate::errors::{translate, Signals};
use crate::listener::{spent, Listener};
use gradlane_net::{
    Call, Element, Group as CoreGroup, GroupError as CoreError, GroupErrorKind, GroupOptions,
    Operation, Reduction, UserMemory, Work as CoreWork,
};
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;

pyo3::create_exception!(
    gradlane._core,
    GroupError,
    PyException,
    "A call of a group that failed. args: (message, kind, other ranks at fault)."
);

/// The exception for a failure of a group.
fn failed(error: &CoreError) -> PyErr {
    let kind = match error.kind {
        GroupErrorKind::Argument => return PyValueError::new_err(error.message.clone()),
        GroupErrorKind::TimedOut => "timed out",
        GroupErrorKind::Lost => "lost",
        GroupErrorKind::Mismatch => "mismatch",
        GroupErrorKind::Protocol => "protocol",
        GroupErrorKind::Closed => "closed",
        GroupErrorKind::Interrupted => "interrupted",
    };
    GroupError::new_err((error.message.clone(), kind, error.ranks.clone()))
}

fn seconds(value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("{value} s: {error}")))
}

fn memory(places: Vec<(usize, usize)>) -> Vec<UserMemory> {
    let memory = |(address, bytes)| {
        // SAFETY: the backend keeps the tensors of a call until its work is done, and its callers
        // leave them alone; this is what the stub file asks of them.
        unsafe { UserMemory::new(address, bytes) }
    };
    places.into_iter().map(memory).collect()
}

fn named<T>(value: Option<T>, name: &str, what: &str) -> PyResult<T> {
    value.ok_or_else(|| PyValueError::new_err(format!("{name:?} is no {what}")))
}

/// A call that has begun.
#[pyclass(frozen, module = "gradlane._core")]
pub(crate) struct Work {
    work: Arc<CoreWork>,
}

#[pymethods]
impl Work {
    /// Whether the call has ended.
    fn is_done(&self) -> bool {
        self.work.is_done()
    }

    /// The rank that a received message is from, else this rank; None while the call runs.
    fn result(&self) -> PyResult<Option<u32>> {
        match self.work.result() {
            None => Ok(None),
            Some(Ok(rank)) => Ok(Some(*rank)),
            Some(Err(error)) => Err(failed(error)),
        }
    }

    /// A number that no other work has while this one exists.
    fn key(&self) -> usize {
        Arc::as_ptr(&self.work) as usize
    }
}

/// Connections between the ranks of a process group, and the collectives over them.
#[pyclass(frozen, module = "gradlane._core")]
pub(crate) struct Group {
    group: CoreGroup,
}

#[pymethods]
impl Group {
    /// Connect to all ranks. Blocks until they are connected or the connect timeout is over.
    #[new]
    #[pyo3(signature = (listener, *, name, job, rank, peers, generation, secret, seal, connect_timeout_s, silence_timeout_s, spin_us))]
    #[allow(clippy::too_many_arguments, reason = "keywords of one Python call")]
    fn new(
        py: Python<'_>,
        listener: &Listener,
        name: String,
        job: String,
        rank: u32,
        peers: Vec<String>,
        generation: u32,
        secret: &[u8],
        seal: bool,
        connect_timeout_s: f64,
        silence_timeout_s: f64,
        spin_us: u64,
    ) -> PyResult<Group> {
        let options = GroupOptions {
            name,
            job,
            rank,
            size: u32::try_from(peers.len()).unwrap_or(u32::MAX),
            generation,
            seal,
            connect_timeout: seconds(connect_timeout_s)?,
            silence_timeout: seconds(silence_timeout_s)?,
            spin: Duration::from_micros(spin_us),
        };
        let listener = listener.take().ok_or_else(spent)?;
        let peers = peers.into_boxed_slice();
        let mut signals = Signals::default();
        let result = py.detach(|| {
            let mut interrupt = || signals.interrupt();
            CoreGroup::connect(listener, &options, &peers, secret, &mut interrupt)
        });
        match result {
            Ok(group) => Ok(Group { group }),
            Err(error) => Err(signals.translate(error)),
        }
    }

    /// Begin a collective.
    #[allow(clippy::too_many_arguments, reason = "one Python call")]
    fn begin(
        &self,
        py: Python<'_>,
        operation: &str,
        element: &str,
        reduction: &str,
        root: u32,
        inputs: Vec<(usize, usize)>,
        outputs: Vec<(usize, usize)>,
        timeout_s: f64,
        is_waited_for: bool,
    ) -> PyResult<Work> {
        let call = Call {
            operation: named(Operation::from_name(operation), operation, "operation")?,
            element: named(Element::from_name(element), element, "type of elements")?,
            reduction: named(Reduction::from_name(reduction), reduction, "reduction")?,
            root,
            inputs: memory(inputs),
            outputs: memory(outputs),
        };
        let timeout = seconds(timeout_s)?;
        let begun = py.detach(|| self.group.begin(&call, Some(timeout), is_waited_for));
        begun.map(|work| Work { work }).map_err(|error| failed(&error))
    }

    /// Begin to send a message.
    fn send(
        &self,
        py: Python<'_>,
        to: u32,
        tag: u32,
        pointer: usize,
        nbytes: usize,
        timeout_s: f64,
    ) -> PyResult<Work> {
        self.message(py, Operation::Send, Some(to), tag, (pointer, nbytes), timeout_s)
    }

    /// Begin to receive a message, from any rank where there is none given.
    fn receive(
        &self,
        py: Python<'_>,
        source: Option<u32>,
        tag: u32,
        pointer: usize,
        nbytes: usize,
        timeout_s: f64,
    ) -> PyResult<Work> {
        self.message(py, Operation::Receive, source, tag, (pointer, nbytes), timeout_s)
    }

    /// Wait until a work is done; timeout_s None: as long as it takes.
    fn wait(&self, py: Python<'_>, work: &Work, timeout_s: Option<f64>) -> PyResult<u32> {
        let timeout = timeout_s.map(seconds).transpose()?;
        let mut signals = Signals::default();
        let result =
            py.detach(|| self.group.wait(&work.work, timeout, &mut || signals.interrupt()));
        result.map_err(|error| signals.raised().unwrap_or_else(|| failed(&error)))
    }

    /// Serve the sockets once without waiting; whether a work is done.
    fn poll(&self, py: Python<'_>, work: &Work) -> bool {
        py.detach(|| self.group.poll(&work.work))
    }

    /// Have a work returned by `next_ended`.
    fn watch(&self, work: &Work) {
        self.group.watch(&work.work);
    }

    /// Key of the oldest watched work that has ended and that no thread has taken for `age_s`; None when the group is
    /// closed.
    fn next_ended(&self, py: Python<'_>, age_s: f64) -> PyResult<Option<usize>> {
        let age = seconds(age_s)?;
        let ended = py.detach(|| self.group.next_ended(age));
        Ok(ended.map(|work| Arc::as_ptr(&work) as usize))
    }

    /// Number of collectives that this rank has begun.
    fn begun(&self) -> u64 {
        self.group.begun()
    }

    /// Leave the group; calls that run fail.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.group.close());
    }

    /// Wait until the connections of a closed group have ended, two seconds at most.
    fn join(&self, py: Python<'_>) {
        py.detach(|| self.group.join());
    }
}

impl Group {
    fn message(
        &self,
        py: Python<'_>,
        operation: Operation,
        peer: Option<u32>,
        tag: u32,
        place: (usize, usize),
        timeout_s: f64,
    ) -> PyResult<Work> {
        let timeout = seconds(timeout_s)?;
        let Some(memory) = memory(vec![place]).pop() else {
            return Err(translate(gradlane_net::ChannelError::Argument("no memory".to_owned())));
        };
        let begun =
            py.detach(|| self.group.begin_message(operation, peer, tag, memory, Some(timeout)));
        begun.map(|work| Work { work }).map_err(|error| failed(&error))
    }
}
