//! A sign of life in shared memory, which needs neither the GIL nor a turn of the interpreter.

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::{pyclass, pymethods, PyResult};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Whether the count goes on, and what wakes its thread.
#[derive(Default)]
struct State {
    stopped: Mutex<bool>,
    changed: Condvar,
}

fn lock(mutex: &Mutex<bool>) -> MutexGuard<'_, bool> {
    // The flag is right whoever panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts up in memory until it is stopped or dropped.
#[pyclass(frozen)]
pub struct Pulse {
    state: Arc<State>,
    /// In a forked child there is no thread, and its lock may be held for ever.
    process: u32,
}

#[pymethods]
impl Pulse {
    /// Adds one to the `u64` at `pointer` every `interval_s` seconds. The memory must stay until
    /// `stop` has returned.
    #[new]
    fn new(pointer: usize, interval_s: f64) -> PyResult<Pulse> {
        let interval = Duration::try_from_secs_f64(interval_s)
            .map_err(|error| PyValueError::new_err(format!("interval_s: {error}")))?;
        if pointer == 0 || !pointer.is_multiple_of(align_of::<AtomicU64>()) {
            return Err(PyValueError::new_err(format!("no aligned address: {pointer}")));
        }
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        std::thread::Builder::new()
            .name("gradlane-pulse".to_owned())
            .stack_size(64 << 10)
            .spawn(move || count(&shared, pointer, interval))
            .map_err(|error| PyOSError::new_err(format!("no thread for signs of life: {error}")))?;
        Ok(Pulse { state, process: std::process::id() })
    }

    /// Counts no more from now on.
    fn stop(&self) {
        if std::process::id() == self.process {
            *lock(&self.state.stopped) = true;
            self.state.changed.notify_all();
        }
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.stop();
    }
}

fn count(state: &State, pointer: usize, interval: Duration) {
    let mut stopped = lock(&state.stopped);
    while !*stopped {
        // SAFETY: `new` has checked the alignment, and its caller keeps the memory until `stop` has
        // returned, which waits for the lock that is held here. Other processes only read it.
        unsafe { AtomicU64::from_ptr(pointer as *mut u64) }.fetch_add(1, Ordering::Relaxed);
        let waited = state.changed.wait_timeout(stopped, interval);
        stopped = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}
