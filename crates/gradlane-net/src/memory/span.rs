//! Addresses of registered memory, and the borrows that they become.
//!
//! # The lifetime rule
//!
//! The engine lends each region to one user at a time: to a frame that is sent, to a frame that is
//! received, or to a job. A borrow ends before its user is reported to the engine as done. The
//! application leaves gradient memory alone from the call that registers it until the tensor is ready
//! or the session is over, and every borrow has ended before the application learns either.

use std::ops::{Deref, DerefMut};

/// An address with a number of bytes. Nothing can be read or written through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pointer: *mut u8,
    length: usize,
}

// SAFETY: an address gives no access to what lies there.
unsafe impl Send for Span {}

impl Span {
    /// No bytes.
    pub(crate) const EMPTY: Span = Span { pointer: std::ptr::dangling_mut(), length: 0 };

    /// Names `length` bytes at `pointer`.
    ///
    /// # Safety
    /// The bytes are initialized and belong to one allocation for as long as the lifetime rule lends
    /// them to a user.
    pub(crate) unsafe fn new(pointer: *mut u8, length: usize) -> Span {
        Span { pointer, length }
    }

    /// The first byte.
    pub(crate) fn pointer(self) -> *mut u8 {
        self.pointer
    }

    /// Number of bytes.
    pub(crate) fn length(self) -> usize {
        self.length
    }

    /// Borrows the bytes for reading.
    ///
    /// # Safety
    /// By the lifetime rule the bytes are lent to the caller, and nobody writes to them, until the
    /// borrow is dropped.
    pub(crate) unsafe fn read(self) -> ReadSpan {
        ReadSpan(self)
    }

    /// Borrows the bytes for writing.
    ///
    /// # Safety
    /// By the lifetime rule the bytes are lent to the caller alone until the borrow is dropped.
    pub(crate) unsafe fn write(self) -> WriteSpan {
        WriteSpan(self)
    }
}

/// Bytes that stay readable and unchanged while this value lives.
#[derive(Debug)]
pub(crate) struct ReadSpan(Span);

impl Deref for ReadSpan {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `Span::new` vouches for the allocation, `Span::read` for the time.
        unsafe { std::slice::from_raw_parts(self.0.pointer, self.0.length) }
    }
}

/// Bytes that belong to this value alone while it lives.
#[derive(Debug)]
pub(crate) struct WriteSpan(Span);

impl WriteSpan {
    /// Borrows no bytes.
    pub(crate) const fn empty() -> WriteSpan {
        WriteSpan(Span::EMPTY)
    }
}

impl Deref for WriteSpan {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `Span::new` vouches for the allocation, `Span::write` for the time.
        unsafe { std::slice::from_raw_parts(self.0.pointer, self.0.length) }
    }
}

impl DerefMut for WriteSpan {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `Span::write` vouches that nobody else touches the bytes.
        unsafe { std::slice::from_raw_parts_mut(self.0.pointer, self.0.length) }
    }
}

/// A source and a destination of one job, which may be the same memory: each may be absent.
#[derive(Debug)]
pub(crate) struct InPlace {
    source: Option<ReadSpan>,
    dest: Option<WriteSpan>,
    /// Whether `dest` is the source, too.
    is_shared: bool,
}

impl InPlace {
    /// Borrows both.
    ///
    /// # Safety
    /// As for [`Span::read`] and [`Span::write`]. Two different spans do not overlap.
    pub(crate) unsafe fn new(source: Option<Span>, dest: Option<Span>) -> InPlace {
        let is_shared = source.is_some() && source == dest;
        // SAFETY: the caller vouches for both, and memory that is both is borrowed once.
        let source = source.filter(|_| !is_shared).map(|span| unsafe { span.read() });
        // SAFETY: as above.
        let dest = dest.map(|span| unsafe { span.write() });
        InPlace { source, dest, is_shared }
    }

    /// The bytes to read.
    pub(crate) fn source(&self) -> Option<&[u8]> {
        if self.is_shared {
            return self.dest.as_deref();
        }
        self.source.as_deref()
    }

    /// Fills the destination with the source's bytes, or with zeros where there is no source, and
    /// returns it. The two are equally long.
    pub(crate) fn seed_dest(&mut self) -> Option<&mut [u8]> {
        let dest = self.dest.as_deref_mut()?;
        match &self.source {
            Some(source) => dest.copy_from_slice(source),
            None if self.is_shared => {}
            None => dest.fill(0),
        }
        Some(dest)
    }

    /// The bytes to write.
    pub(crate) fn dest(&mut self) -> Option<&mut [u8]> {
        self.dest.as_deref_mut()
    }
}

/// The f32 values that bytes are, where they are aligned.
pub(crate) fn as_f32(bytes: &[u8]) -> Option<&[f32]> {
    // SAFETY: every pattern of bits is an f32.
    let (before, values, after) = unsafe { bytes.align_to::<f32>() };
    (before.is_empty() && after.is_empty()).then_some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_source_and_destination_is_borrowed_once() {
        let mut bytes = [1_u8, 2, 3];
        // SAFETY: `bytes` outlives the spans and is used through them alone.
        let span = unsafe { Span::new(bytes.as_mut_ptr(), 3) };
        // SAFETY: as above.
        let mut both = unsafe { InPlace::new(Some(span), Some(span)) };
        assert_eq!(both.source(), Some([1, 2, 3].as_slice()));
        both.dest().expect("a destination")[0] = 7;
        assert_eq!(both.source(), Some([7, 2, 3].as_slice()));
        // SAFETY: as above; there is nothing to borrow.
        let mut neither = unsafe { InPlace::new(None, None) };
        assert!(neither.source().is_none() && neither.dest().is_none());
    }

    #[test]
    fn only_aligned_bytes_are_values() {
        let values = [1.5_f32, -2.0];
        // SAFETY: f32 values are initialized bytes.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), 8) };
        assert_eq!(as_f32(bytes), Some(values.as_slice()));
        assert_eq!(as_f32(&bytes[1..5]), None);
        assert_eq!(as_f32(&bytes[..0]), Some([].as_slice()));
    }
}
