//! The memory of a call while it runs, and what is computed in it.
//!
//! # The lifetime rule
//!
//! The application leaves the memory of a call alone until its work is done, and no other call that runs
//! writes to it. A schedule has no two users of the same bytes in a round of which one writes, and computes
//! after the round. A borrow is dropped before the round, or with all others when the group ends, before any work
//! is reported as done. Scratch memory belongs to its strand and is dropped after it.

use super::element::{combine, divide, Element, Reduction, PIECE_BYTES};
use super::schedule::{Local, Memory, Place};
use crate::memory::{ReadSpan, Span, UserMemory, WriteSpan};

/// How a call reduces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arithmetic {
    pub(super) element: Element,
    pub(super) reduction: Reduction,
    /// Number of ranks, which means divide by.
    pub(super) ranks: u32,
}

/// Names the memory that the application has handed over.
pub(super) fn user_span(memory: UserMemory) -> Span {
    if memory.bytes() == 0 {
        // Tensors without elements have no address.
        return Span::EMPTY;
    }
    // SAFETY: whoever made the `UserMemory` vouches for it until the work is done.
    unsafe { Span::new(memory.address() as *mut u8, memory.bytes()) }
}

/// Names the memory of a strand, which stays where it is.
pub(super) fn scratch_span(memory: &mut [u8]) -> Span {
    // SAFETY: the strand keeps the allocation until no span of it is in use.
    unsafe { Span::new(memory.as_mut_ptr(), memory.len()) }
}

/// The memory that the places of one strand name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spans<'a> {
    pub(super) user: &'a [Span],
    pub(super) scratch: &'a [Span],
}

impl Spans<'_> {
    /// Returns the addresses of a place.
    ///
    /// # Panics
    /// When the place is outside of its memory, which no schedule names.
    pub(super) fn span(self, place: Place) -> Span {
        if place.length == 0 {
            return Span::EMPTY;
        }
        let whole = match place.memory {
            Memory::User(index) => self.user[index],
            Memory::Scratch(index) => self.scratch[index],
        };
        part(whole, place.start, place.length)
    }

    /// Computes what follows a round.
    pub(super) fn run(self, local: &Local, arithmetic: Arithmetic) {
        match local {
            Local::Copy { from, into } => copy(self.span(*from), self.span(*into)),
            Local::Reduce { inputs, into } => {
                let inputs: Vec<Span> = inputs.iter().map(|it| self.span(*it)).collect();
                reduce(&inputs, self.span(*into), arithmetic);
            }
        }
    }
}

/// Returns a range of a span.
///
/// # Panics
/// When it is not inside.
pub(super) fn part(whole: Span, start: usize, length: usize) -> Span {
    let end = start.checked_add(length);
    assert!(end.is_some_and(|end| end <= whole.length()), "{start} and {length} of {whole:?}");
    // SAFETY: the range is inside of an allocation that `whole` names.
    unsafe { Span::new(whole.pointer().add(start), length) }
}

/// Borrows memory to send.
pub(super) fn read(span: Span) -> ReadSpan {
    // SAFETY: by the lifetime rule nobody writes to what a round sends.
    unsafe { span.read() }
}

/// Borrows memory to receive into.
pub(super) fn write(span: Span) -> WriteSpan {
    // SAFETY: by the lifetime rule a round gives each byte that it receives to one message alone.
    unsafe { span.write() }
}

/// Copies bytes, unless they are there already.
pub(super) fn copy(from: Span, into: Span) {
    if from.pointer() != into.pointer() {
        // SAFETY: both are in allocations that their spans name; they may overlap.
        unsafe { std::ptr::copy(from.pointer(), into.pointer(), from.length().min(into.length())) };
    }
}

/// Reduces the inputs in their order, some kilobytes at a time; `into` may be one of them.
fn reduce(inputs: &[Span], into: Span, arithmetic: Arithmetic) {
    let Arithmetic { element, reduction, ranks } = arithmetic;
    let mut sum = [0_u8; PIECE_BYTES];
    for start in (0..into.length()).step_by(PIECE_BYTES) {
        let length = PIECE_BYTES.min(into.length() - start);
        let sum = &mut sum[..length];
        for (index, input) in inputs.iter().enumerate() {
            let values = read(part(*input, start, length));
            if index == 0 {
                sum.copy_from_slice(&values);
            } else {
                combine(element, reduction, sum, &values);
            }
        }
        if reduction == Reduction::Mean {
            divide(element, sum, ranks);
        }
        write(part(into, start, length)).copy_from_slice(sum);
    }
}

/// Names the memory of a test or a fuzz target, which keeps it until the call has ended.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn lent_memory(values: &mut [i32]) -> UserMemory {
    let address = if values.is_empty() { 0 } else { values.as_mut_ptr() as usize };
    // SAFETY: the simulation keeps the values, and fills them again only when the work is done.
    unsafe { UserMemory::new(address, size_of_val(values)) }
}
