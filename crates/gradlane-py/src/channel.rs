//! `Channel` for Python.

use crate::blocks::Blocks;
use crate::errors::{translate, Signals};
use crate::listener::{spent, Listener};
use crate::squares::{root, SquareSum};
use gradlane_net::{
    AdamOptions, Channel as CoreChannel, ChannelError as CoreError, ChannelOptions, Direction,
    MembershipEvent, SgdOptions, StateKind, StateRead, StateWrite, UpdateRule, UserMemory,
};
use gradlane_units::{Priority, Rank, SliceId, Step, TensorId};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Deserialize;
use std::time::Duration;

/// One row of `set_optimizer`: settings that some tensors share.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
enum OptimizerRow {
    Sgd {
        tensors: Vec<u32>,
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
    },
    Adam {
        tensors: Vec<u32>,
        /// Steps that each of the tensors has taken.
        steps: Vec<u64>,
        lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        #[serde(default)]
        weight_decay: f64,
        #[serde(default)]
        decoupled_weight_decay: bool,
        #[serde(default)]
        maximize: bool,
    },
}

impl OptimizerRow {
    /// The rule of each tensor; `None` when the row has not as many steps as tensors.
    fn rules(self) -> Option<Vec<(TensorId, UpdateRule)>> {
        match self {
            OptimizerRow::Sgd {
                tensors,
                lr,
                momentum,
                dampening,
                weight_decay,
                nesterov,
                maximize,
            } => {
                let options =
                    SgdOptions { lr, momentum, dampening, weight_decay, nesterov, maximize };
                let rule = UpdateRule::Sgd(options);
                Some(tensors.into_iter().map(|tensor| (TensorId(tensor), rule)).collect())
            }
            OptimizerRow::Adam {
                tensors,
                steps,
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                decoupled_weight_decay,
                maximize,
            } => {
                let options = AdamOptions {
                    lr,
                    beta1,
                    beta2,
                    eps,
                    weight_decay,
                    decoupled_weight_decay,
                    maximize,
                };
                let rule =
                    |(tensor, steps)| (TensorId(tensor), UpdateRule::Adam { options, steps });
                (tensors.len() == steps.len())
                    .then(|| tensors.into_iter().zip(steps).map(rule).collect())
            }
        }
    }
}

/// The kind of state with a name.
fn state_kind(name: &str) -> PyResult<StateKind> {
    StateKind::from_name(name)
        .ok_or_else(|| PyValueError::new_err(format!("{name:?} is no state of an optimizer")))
}

/// A row of `take_trace`: time in nanoseconds of the monotonic clock, "tx" or "rx", kind of the
/// frame, peer, step, tensor, slice, priority.
type TraceRow = (u64, &'static str, u8, u32, u64, u32, u32, i32);

/// A row of `take_timeline`: begin and end as in `TraceRow`; "tx", "rx" or "work"; kind of the frame
/// or work; peer; step; tensor, slice and offset in it; bytes; priority.
type TimelineRow = ((u64, u64), &'static str, String, u32, u64, (u32, u32, u64), u64, i32);

fn way(direction: Direction) -> &'static str {
    match direction {
        Direction::Sent => "tx",
        Direction::Received => "rx",
    }
}

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

/// Tensor, slice, and the sum of the squares of its residual.
type SliceSquares = (u32, u32, f64);

/// A row of `next_changes`.
type MembershipRow = (&'static str, u32, Vec<u32>, u64, String);

/// The memory at an address that Python vouches for.
fn memory(pointer: usize, nbytes: usize) -> UserMemory {
    // SAFETY: the adapter keeps the tensor alive and untouched until it is ready or the channel has
    // ended; this is what the stub file asks of callers.
    unsafe { UserMemory::new(pointer, nbytes) }
}

#[pymethods]
impl Channel {
    /// Connect to all ranks. Blocks until they are connected, the connect timeout is over, or `watch`
    /// raises, which is called every 50 ms.
    #[new]
    #[pyo3(signature = (listener, options_json, plan_json, peers, secret, watch = None))]
    fn new(
        py: Python<'_>,
        listener: &Listener,
        options_json: &str,
        plan_json: &str,
        peers: Vec<String>,
        secret: &[u8],
        watch: Option<Py<PyAny>>,
    ) -> PyResult<Channel> {
        let options = ChannelOptions::from_json(options_json).map_err(translate)?;
        let listener = listener.take().ok_or_else(spent)?;
        let peers = peers.into_boxed_slice();
        let mut signals = Signals::with_watch(watch);
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

    /// Begin a step that this rank takes no part in: it was left out of the one before.
    fn step_pass(&self, step: u64) -> PyResult<()> {
        self.channel.step_pass(Step(step)).map_err(translate)
    }

    /// Begin a step that no rank is left out of; all ranks have to begin it so.
    fn step_barrier(&self, step: u64) -> PyResult<()> {
        self.channel.step_barrier(Step(step)).map_err(translate)
    }

    /// Wait until the contributors of the current step are known.
    fn wait_decided(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        self.waiting(py, move |channel, interrupt| channel.wait_decided(Step(step), interrupt))
    }

    /// (whether the step counted this rank, or None; whether it was a whole step behind; the last step
    /// whose contributors are known).
    fn participation(&self, step: u64) -> (Option<bool>, bool, u64) {
        let part = self.channel.participation(Step(step));
        (part.participated, part.behind, part.decided.0)
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

    /// Hand over this rank's block of a tensor of scheme `gather` until the tensor is ready.
    fn block_ready(&self, tensor: u32, step: u64, pointer: usize, nbytes: usize) -> PyResult<()> {
        let memory = memory(pointer, nbytes);
        self.channel.block_ready(TensorId(tensor), Step(step), memory).map_err(translate)
    }

    /// Say that this rank has no block in this step.
    fn block_absent(&self, tensor: u32, step: u64) -> PyResult<()> {
        self.channel.block_absent(TensorId(tensor), Step(step)).map_err(translate)
    }

    /// Hand over the root's result for the blocks of a tensor, which all ranks get, until the tensor is
    /// ready.
    fn root_result_ready(
        &self,
        tensor: u32,
        step: u64,
        pointer: usize,
        nbytes: usize,
    ) -> PyResult<()> {
        let memory = memory(pointer, nbytes);
        self.channel.root_result_ready(TensorId(tensor), Step(step), memory).map_err(translate)
    }

    /// (tensor, step) whose blocks are all here and wait for the result of this rank, their root, each
    /// once. Waits for one unless told not to.
    #[pyo3(signature = (*, wait = true))]
    fn next_root_requests(&self, py: Python<'_>, wait: bool) -> PyResult<Vec<(u32, u64)>> {
        let requests = if wait {
            self.waiting(py, move |channel, interrupt| channel.next_root_requests(interrupt))?
        } else {
            self.channel.take_root_requests().map_err(translate)?
        };
        Ok(requests.into_iter().map(|(tensor, step)| (tensor.0, step.0)).collect())
    }

    /// News of the membership, where training goes on when ranks are lost, each once: (kind, generation,
    /// members, step, text). Kind "members": from this step on training goes on with these, for the reason
    /// in the text. Kind "claim": write the text into the store's register of this generation, unless it
    /// holds one, and call `answer_claim`. Waits for some unless told not to.
    #[pyo3(signature = (*, wait = true))]
    fn next_changes(&self, py: Python<'_>, wait: bool) -> PyResult<Vec<MembershipRow>> {
        let changes = if wait {
            self.waiting(py, move |channel, interrupt| channel.next_changes(interrupt))?
        } else {
            self.channel.take_changes().map_err(translate)?
        };
        let numbers = |members: Vec<Rank>| members.into_iter().map(|rank| rank.0).collect();
        let row = |event| match event {
            MembershipEvent::ClaimNeeded { generation, value } => {
                let text = value.iter().map(|byte| format!("{byte:02x}")).collect();
                ("claim", generation, Vec::new(), 0, text)
            }
            MembershipEvent::Changed { generation, members, step, reason } => {
                ("members", generation, numbers(members), step.0, reason)
            }
        };
        Ok(changes.into_iter().map(row).collect())
    }

    /// Tell what the store's register of a generation holds; None: the store does not answer.
    #[pyo3(signature = (generation, text))]
    fn answer_claim(&self, generation: u32, text: Option<&str>) -> PyResult<()> {
        let digits = |pair: &[u8]| {
            let text = std::str::from_utf8(pair).ok()?;
            u8::from_str_radix(text, 16).ok()
        };
        let read = |text: &str| text.as_bytes().chunks(2).map(digits).collect::<Option<Vec<u8>>>();
        let value = text.map(|text| {
            let what = format!("the register of generation {generation} holds {text:?}");
            read(text).ok_or_else(|| PyValueError::new_err(what))
        });
        self.channel.answer_claim(generation, value.transpose()?);
        Ok(())
    }

    /// All ranks' blocks of a tensor that is ready, once; None before that.
    fn take_blocks(&self, tensor: u32, step: u64) -> PyResult<Option<Blocks>> {
        let blocks = self.channel.take_blocks(TensorId(tensor), Step(step)).map_err(translate)?;
        Ok(blocks.map(Blocks::new))
    }

    /// Register a parameter's own memory (update=server).
    fn set_parameter(&self, tensor: u32, pointer: usize, nbytes: usize) -> PyResult<()> {
        self.channel.set_parameter(TensorId(tensor), memory(pointer, nbytes)).map_err(translate)
    }

    /// Give hyper-parameters, a row for tensors that share them, before the step's first gradient.
    fn set_optimizer(&self, step: u64, rows_json: &str) -> PyResult<()> {
        let refuse = |text: String| {
            PyValueError::new_err(format!("optimizer settings of step {step}: {text}"))
        };
        let rows: Vec<OptimizerRow> =
            serde_json::from_str(rows_json).map_err(|error| refuse(error.to_string()))?;
        let mut rules = Vec::new();
        for row in rows {
            let row = row.rules().ok_or_else(|| refuse("not as many steps as tensors".into()))?;
            rules.extend(row);
        }
        self.channel.set_optimizer(&rules).map_err(translate)
    }

    /// Make the step that has just begun one that broadcasts optimizer state.
    fn read_state(&self, name: &str, part: u8) -> PyResult<()> {
        let read = StateRead { kind: state_kind(name)?, part };
        self.channel.read_state(read).map_err(translate)
    }

    /// Make the step that has just begun one that hands optimizer state to dedicated servers.
    fn write_state(&self, name: &str, part: u8, clear: bool) -> PyResult<()> {
        let state = StateRead { kind: state_kind(name)?, part };
        self.channel.write_state(StateWrite { state, clear }).map_err(translate)
    }

    /// Make the step that has just begun one that hands parameters to dedicated servers.
    fn write_parameters(&self, tensors: Vec<u32>) -> PyResult<()> {
        let tensors: Vec<TensorId> = tensors.into_iter().map(TensorId).collect();
        self.channel.write_parameters(&tensors).map_err(translate)
    }

    /// Let this rank's contributions to the step that has just begun travel as they are.
    fn send_raw(&self, step: u64) -> PyResult<()> {
        self.channel.send_raw(Step(step)).map_err(translate)
    }

    /// Have the owners add up the squares of the gradients of the first so many tensors in the step that
    /// has just begun.
    fn measure_squares(&self, tensors: u32, step: u64) -> PyResult<()> {
        self.channel.measure_squares(TensorId(tensors), Step(step)).map_err(translate)
    }

    /// Wait for the norm of a step's gradients; means may still be on their way. `blocks` is the sum of
    /// those that no rank owns.
    #[pyo3(signature = (step, blocks=None))]
    fn wait_norm(&self, py: Python<'_>, step: u64, blocks: Option<&SquareSum>) -> PyResult<f64> {
        let mut sum = self
            .waiting(py, move |channel, interrupt| channel.wait_squares(Step(step), interrupt))?;
        if let Some(blocks) = blocks {
            sum.merge(blocks.sum());
        }
        Ok(root(&sum))
    }

    /// Whether the owners can do that for the first so many tensors.
    fn has_measurable_squares(&self, tensors: u32) -> bool {
        !self.channel.goes_on()
            && self.channel.plan().check_measurable_squares(TensorId(tensors)).is_ok()
    }

    /// Copy what encoding this rank's contributions to a tensor has lost to an address with room for
    /// `count` f32 values.
    fn copy_worker_residual(
        &self,
        py: Python<'_>,
        tensor: u32,
        pointer: usize,
        count: usize,
    ) -> PyResult<()> {
        let values = self.waiting(py, move |channel, interrupt| {
            channel.worker_residual(TensorId(tensor), interrupt)
        })?;
        let aligned = pointer != 0 && pointer.is_multiple_of(align_of::<f32>());
        if values.len() != count || !aligned {
            let found = values.len();
            return Err(PyValueError::new_err(format!(
                "{pointer:#x} has room for {count} f32 values, tensor {tensor} has {found}"
            )));
        }
        let room = std::ptr::with_exposed_provenance_mut::<f32>(pointer);
        // SAFETY: the adapter holds a contiguous f32 tensor of that many elements during the call;
        // this is what the stub file asks of callers. The address is aligned and not null.
        unsafe { room.copy_from_nonoverlapping(values.as_ptr(), count) };
        Ok(())
    }

    /// The squared norms of this rank's residuals: (tensor, slice, squares) from a slice on, until about so
    /// many numbers are read, and the slice to go on with.
    fn residual_squares(
        &self,
        py: Python<'_>,
        first: u32,
        elements_max: usize,
    ) -> PyResult<(Vec<SliceSquares>, u32)> {
        let found = self.waiting(py, move |channel, interrupt| {
            channel.residual_squares(SliceId(first), elements_max, interrupt)
        })?;
        let rows = found.rows.iter().map(|(tensor, slice, squares)| (tensor.0, slice.0, *squares));
        Ok((rows.collect(), found.next.0))
    }

    /// Forget all optimizer state.
    fn clear_state(&self) -> PyResult<()> {
        self.channel.clear_state().map_err(translate)
    }

    /// Keep what this rank owns of a tensor's state: `count` f32 values at an address.
    fn load_state(&self, tensor: u32, name: &str, pointer: usize, count: usize) -> PyResult<()> {
        let kind = state_kind(name)?;
        if pointer == 0 || !pointer.is_multiple_of(align_of::<f32>()) {
            return Err(PyValueError::new_err(format!("{pointer:#x} is no address of f32 values")));
        }
        let values = std::ptr::with_exposed_provenance::<f32>(pointer);
        // SAFETY: the adapter holds a contiguous f32 tensor of that many elements during the call;
        // this is what the stub file asks of callers. The address is aligned and not null.
        let values = unsafe { std::slice::from_raw_parts(values, count) };
        self.channel.load_state(TensorId(tensor), kind, values).map_err(translate)
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

    /// Wait for something that became ready and was not taken; returns it as `take_ready` does.
    fn next_ready(&self, py: Python<'_>, step: u64) -> PyResult<Vec<(u32, bool)>> {
        let ready =
            self.waiting(py, move |channel, interrupt| channel.next_ready(Step(step), interrupt))?;
        Ok(ready.into_iter().map(|(tensor, absent)| (tensor.0, absent)).collect())
    }

    /// All other ranks have connected to all: one that says nothing is silent from now on.
    fn all_connected(&self) {
        self.channel.all_connected();
    }

    /// On rank 0: another priority for every tensor, in force two steps later.
    fn switch_priorities(&self, priorities: Vec<i32>) -> PyResult<()> {
        let priorities: Vec<Priority> = priorities.into_iter().map(Priority).collect();
        self.channel.switch_priorities(&priorities).map_err(translate)
    }

    /// Counters as a JSON object. Asks the I/O thread for some of them, so without the GIL.
    fn metrics_json(&self, py: Python<'_>) -> String {
        py.detach(|| self.channel.metrics().to_json())
    }

    /// Nanoseconds that threads of the program have waited so far.
    fn waited_ns(&self) -> u64 {
        self.channel.waited_ns()
    }

    /// Frames since the last call: (time_ns, "tx" or "rx", kind, peer, step, tensor, slice,
    /// priority).
    fn take_trace(&self) -> Vec<TraceRow> {
        let row = |entry: gradlane_net::TraceEntry| {
            let header = entry.header;
            (
                entry.time_ns,
                way(entry.direction),
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

    /// The records since the last call of this or of `take_trace`, and how much fell out
    /// before: rows of ((begin_ns, end_ns), "tx", "rx" or "work", kind, peer, step, (tensor,
    /// slice, offset), bytes, priority).
    fn take_timeline(&self) -> (Vec<TimelineRow>, u64) {
        let plan = self.channel.plan();
        let frames = self.channel.take_trace().into_iter().map(|entry| {
            let (way, bytes, header) = (way(entry.direction), entry.bytes(), entry.header);
            let kind = header.kind.name().to_owned();
            let place = (header.tensor.0, header.slice.0, header.offset);
            let times = (entry.begin_ns, entry.time_ns);
            (times, way, kind, entry.peer.0, header.step.0, place, bytes, header.priority.0)
        });
        let jobs = self.channel.take_jobs().into_iter().map(|work| {
            let kind = format!("{:?}", work.kind).to_lowercase();
            let place = (plan.slice(work.slice).tensor.0, work.slice.0, 0);
            let times = (work.begin_ns, work.end_ns);
            (times, "work", kind, self.channel.rank().0, work.step.0, place, work.bytes, 0)
        });
        (frames.chain(jobs).collect(), self.channel.trace_dropped())
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
