//! All open descriptors of gradlane in this program, so that a forked child can close them.
//!
//! The table has no lock: at the moment of a fork another thread may hold any lock, and the child
//! would wait for it forever.

use crate::sys::syscall;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, Ordering};

const SLOTS: usize = 16_384;
const FREE: i32 = -1;

static OPEN: [AtomicI32; SLOTS] = [const { AtomicI32::new(FREE) }; SLOTS];

/// An open descriptor that is in the table until it is dropped.
#[derive(Debug)]
pub(crate) struct ForkTracked<T: AsFd> {
    /// `None` only while it is being dropped.
    owner: Option<T>,
    slot: Option<usize>,
}

impl<T: AsFd> ForkTracked<T> {
    /// Adds a descriptor to the table. When the table is full, children keep it open.
    pub(crate) fn new(owner: T) -> ForkTracked<T> {
        let descriptor = owner.as_fd().as_raw_fd();
        let slot = OPEN.iter().position(|slot| {
            slot.compare_exchange(FREE, descriptor, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        ForkTracked { owner: Some(owner), slot }
    }

    /// Returns the owner of the descriptor.
    pub(crate) fn get(&self) -> &T {
        match &self.owner {
            Some(owner) => owner,
            None => unreachable!("the owner is there until it is dropped"),
        }
    }
}

impl<T: AsFd> AsFd for ForkTracked<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.get().as_fd()
    }
}

impl<T: AsFd> Drop for ForkTracked<T> {
    fn drop(&mut self) {
        let descriptor = self.as_fd().as_raw_fd();
        // The entry goes before the descriptor closes: the number may be in use again right after.
        // A missing entry means that this is a forked child, which has closed the descriptor
        // already.
        let ours = self.slot.is_none_or(|slot| {
            let order = (Ordering::AcqRel, Ordering::Relaxed);
            OPEN[slot].compare_exchange(descriptor, FREE, order.0, order.1).is_ok()
        });
        if !ours {
            std::mem::forget(self.owner.take());
        }
    }
}

/// A tracked descriptor without a type of its own.
pub(crate) type ForkTrackedFd = ForkTracked<OwnedFd>;

/// Closes every descriptor in the table. Only for a forked child, in which no thread uses them and
/// no owner is dropped.
pub(crate) fn close_all_inherited() {
    for slot in &OPEN {
        let descriptor = slot.swap(FREE, Ordering::AcqRel);
        if descriptor != FREE {
            syscall::close_inherited(descriptor);
        }
    }
}
