//! `Channel` for Python.

use crate::errors::{translate, Signals};
use crate::listener::{spent, Listener};
use gradlane_net::{
    Channel as CoreChannel, ChannelError as CoreError, ChannelOptions, Direction, SgdOptions,
    UserMemory,
};
use gradlane_units::{Priority, Step, TensorId};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Deserialize;
use std::time::Duration;

/// One row of `set_optimizer`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OptimizerRow {
    tensor: u32,
    lr: f64,
    #[serde(default)]
    momentum: f64,
    #[serde(default)]
    dampening: f64,
    #[serde(default)]
    weight_decay: f64,
    #[serde(default)]
    nesterov: bool,
    #[serde(default)]
    maximize: bool,
}

/// A row of `take_trace`: time in nanoseconds of the monotonic clock, "tx" or "rx", kind of the
/// frame, peer, step, tensor, slice, priority.
type TraceRow = (u64, &'static str, u8, u32, u64, u32, u32, i32);

/// Connections to all ranks and the engine on its own threads, for one prepared model.
#[pyclass(frozen, module = "gradlane._core")]
pub(crate) struct Channel {
    channel: CoreChannel,
}

impl Channel {
    /// Runs a call that may wait: without the GIL, with Python's signal handlers.
    fn waiting<T: Send>(
        &self,
        py: Python<'_>,
        call: impl Send + FnOnce(&CoreChannel, &mut dyn FnMut() -> bool) -> Result<T, CoreError>,
    ) -> PyResult<T> {
        let mut signals = Signals::default();
        let result = py.detach(|| call(&self.channel, &mut || signals.interrupt()));
        result.map_err(|error| signals.translate(error))
    }
}

/// The memory at an address that Python vouches for.
fn memory(pointer: usize, nbytes: usize) -> UserMemory {
    // SAFETY: the adapter keeps the tensor alive and untouched until it is ready or the channel has
    // ended; this is what the stub file asks of callers.
    unsafe { UserMemory::new(pointer, nbytes) }
}

#[pymethods]
impl Channel {
    /// Connect to all ranks. Blocks until they are connected or the connect timeout is over.
    #[new]
    fn new(
        py: Python<'_>,
        listener: &Listener,
        options_json: &str,
        plan_json: &str,
        peers: Vec<String>,
        secret: &[u8],
    ) -> PyResult<Channel> {
        let options = ChannelOptions::from_json(options_json).map_err(translate)?;
        let listener = listener.take().ok_or_else(spent)?;
        let peers = peers.into_boxed_slice();
        let mut signals = Signals::default();
        let result = py.detach(|| {
            let mut interrupt = || signals.interrupt();
            CoreChannel::connect(listener, &options, plan_json, &peers, secret, &mut interrupt)
        });
        match result {
            Ok(channel) => Ok(Channel { channel }),
            Err(error) => Err(signals.translate(error)),
        }
    }

    /// Begin a step: 0 first, then 1, 2, …; the one before must be complete.
    fn step_begin(&self, step: u64) -> PyResult<()> {
        self.channel.step_begin(Step(step)).map_err(translate)
    }

    /// Hand over a gradient (in step 0 the tensor itself) until the tensor is ready in this step.
    fn gradient_ready(
        &self,
        tensor: u32,
        step: u64,
        pointer: usize,
        nbytes: usize,
    ) -> PyResult<()> {
        let memory = memory(pointer, nbytes);
        self.channel.gradient_ready(TensorId(tensor), Step(step), memory).map_err(translate)
    }

    /// Say that this rank has no gradient; what other ranks have lands in the memory.
    fn tensor_absent(&self, tensor: u32, step: u64, pointer: usize, nbytes: usize) -> PyResult<()> {
        let memory = memory(pointer, nbytes);
        self.channel.tensor_absent(TensorId(tensor), Step(step), memory).map_err(translate)
    }

    /// Register a parameter's own memory (update=server).
    fn set_parameter(&self, tensor: u32, pointer: usize, nbytes: usize) -> PyResult<()> {
        self.channel.set_parameter(TensorId(tensor), memory(pointer, nbytes)).map_err(translate)
    }

    /// Give hyper-parameters of SGD, a row a tensor, before the first gradient of the step.
    fn set_optimizer(&self, step: u64, rows_json: &str) -> PyResult<()> {
        let rows: Vec<OptimizerRow> = serde_json::from_str(rows_json).map_err(|error| {
            PyValueError::new_err(format!("optimizer settings of step {step}: {error}"))
        })?;
        let rows = rows.into_iter().map(|row| {
            let OptimizerRow { lr, momentum, dampening, weight_decay, nesterov, maximize, .. } =
                row;
            let options = SgdOptions { lr, momentum, dampening, weight_decay, nesterov, maximize };
            (TensorId(row.tensor), options)
        });
        self.channel.set_optimizer(rows.collect()).map_err(translate)
    }

    /// Say that the step's gradients are all given (`optimizer.step()` was called).
    fn step_end(&self, step: u64) -> PyResult<()> {
        self.channel.step_end(Step(step)).map_err(translate)
    }

    /// Say that a consumer waits for a tensor.
    fn needed(&self, tensor: u32, step: u64) -> PyResult<()> {
        self.channel.needed(TensorId(tensor), Step(step)).map_err(translate)
    }

    /// Wait until all these tensors are ready.
    fn wait(&self, py: Python<'_>, tensors: Vec<u32>, step: u64) -> PyResult<()> {
        let tensors: Vec<TensorId> = tensors.into_iter().map(TensorId).collect();
        self.waiting(py, move |channel, interrupt| channel.wait(&tensors, Step(step), interrupt))
    }

    /// Wait until the whole step is complete.
    fn wait_step(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.waiting(py, move |channel, interrupt| channel.wait_step(Step(step), interrupt))
    }

    /// Whether a tensor is ready; raises when the channel has failed.
    fn is_ready(&self, tensor: u32, step: u64) -> PyResult<bool> {
        self.channel.is_ready(TensorId(tensor), Step(step)).map_err(translate)
    }

    /// (tensor, absent) of what became ready in the step since the last call.
    fn take_ready(&self, step: u64) -> PyResult<Vec<(u32, bool)>> {
        let ready = self.channel.take_ready(Step(step)).map_err(translate)?;
        Ok(ready.into_iter().map(|(tensor, absent)| (tensor.0, absent)).collect())
    }

    /// On rank 0: another priority for every tensor, in force two steps later.
    fn switch_priorities(&self, priorities: Vec<i32>) -> PyResult<()> {
        let priorities = priorities.into_iter().map(Priority).collect();
        self.channel.switch_priorities(priorities).map_err(translate)
    }

    /// Counters as a JSON object.
    fn metrics_json(&self) -> String {
        self.channel.metrics().to_json()
    }

    /// Frames since the last call: (time_ns, "tx" or "rx", kind, peer, step, tensor, slice,
    /// priority).
    fn take_trace(&self) -> Vec<TraceRow> {
        let row = |entry: gradlane_net::TraceEntry| {
            let direction = match entry.direction {
                Direction::Sent => "tx",
                Direction::Received => "rx",
            };
            let header = entry.header;
            (
                entry.time_ns,
                direction,
                header.kind.code(),
                entry.peer.0,
                header.step.0,
                header.tensor.0,
                header.slice.0,
                header.priority.0,
            )
        };
        self.channel.take_trace().into_iter().map(row).collect()
    }

    /// Why the channel has failed, or None.
    fn failure(&self) -> Option<String> {
        self.channel.failure().map(|failure| failure.message)
    }

    /// Close in good order: goodbye both ways, threads joined.
    fn finish(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .map_err(|error| PyValueError::new_err(format!("timeout_s is {timeout_s}: {error}")))?;
        self.waiting(py, move |channel, interrupt| channel.finish(timeout, interrupt))
    }

    /// Tell all ranks why and stop; afterwards no memory is touched.
    fn abort(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.channel.abort(reason));
    }

    /// In a forked child: close all descriptors, leave the parent's threads alone.
    fn forget_in_child(&self) {
        self.channel.forget_in_child();
    }
}
