//! The operating system: system calls without a safe name in std, polling, descriptors, a clock, locks.

pub(crate) mod descriptors;
pub(crate) mod poller;
pub(crate) mod socket;
pub(crate) mod suspend_aware_clock;
#[allow(unsafe_code, reason = "calls the operating system")]
pub(crate) mod syscall;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose state stays valid when a holder panics.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
