//! Where a kernel reads the values to be sent, and where it writes the residual.

use super::lanes::{Lanes, Mask, Wide};

/// How far ahead values are fetched at least, in elements.
pub(super) const AHEAD: usize = 512;

/// Asks for the cache line of an address, which need not be valid.
#[inline(always)]
pub(super) fn fetch(address: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 machine has SSE; a prefetch of any address does nothing that is seen.
    unsafe {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    // Whether it helps on other machines was not measured.
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// The values of a bucket and, where `KEEP`, their residual.
///
/// The pointers are to as many elements as the bucket has.
#[derive(Clone, Copy)]
pub(super) struct Source<const KEEP: bool> {
    values: *const f32,
    residual: *mut f32,
}

impl Source<false> {
    pub(super) fn plain(values: &[f32]) -> Source<false> {
        Source { values: values.as_ptr(), residual: std::ptr::null_mut() }
    }
}

impl Source<true> {
    pub(super) fn keeping(values: &[f32], residual: &mut [f32]) -> Source<true> {
        assert_eq!(values.len(), residual.len(), "a residual has as many elements as the values");
        Source { values: values.as_ptr(), residual: residual.as_mut_ptr() }
    }

    /// A source whose residual is only read: nothing may be kept through it.
    pub(super) fn reading(values: &[f32], residual: &[f32]) -> Source<true> {
        assert_eq!(values.len(), residual.len(), "a residual has as many elements as the values");
        Source { values: values.as_ptr(), residual: residual.as_ptr().cast_mut() }
    }
}

impl<const KEEP: bool> Source<KEEP> {
    /// Returns value plus residual of sixteen elements from `at` on.
    ///
    /// # Safety
    ///
    /// Runs where the instructions of `R` are enabled; the elements are in range.
    #[inline(always)]
    pub(super) unsafe fn wanted<R: Lanes, const N: usize>(self, at: usize) -> Wide<R, N> {
        // SAFETY: as the caller promises.
        unsafe {
            let value = Wide::load(self.values.add(at));
            if KEEP {
                Wide::add(value, Wide::load(self.residual.add(at)))
            } else {
                value
            }
        }
    }

    /// Asks for the cache lines of sixteen elements from `at` on, which may lie past the end: a
    /// kernel that computes on one bucket has the next one fetched meanwhile.
    #[inline(always)]
    pub(super) fn fetch(self, at: usize) {
        fetch(self.values.wrapping_add(at));
        if KEEP {
            fetch(self.residual.wrapping_add(at));
        }
    }

    /// Keeps what was not sent of sixteen elements from `at` on.
    ///
    /// # Safety
    ///
    /// As for [`Source::wanted`].
    #[inline(always)]
    pub(super) unsafe fn keep<R: Lanes, const N: usize>(
        self,
        at: usize,
        wanted: Wide<R, N>,
        sent: Wide<R, N>,
    ) {
        if KEEP {
            // SAFETY: as the caller promises.
            unsafe { Wide::subtract(wanted, sent).store(self.residual.add(at)) };
        }
    }

    /// [`Source::keep`], where the mask says yes; elsewhere what was kept before stays.
    ///
    /// # Safety
    ///
    /// As for [`Source::wanted`].
    #[inline(always)]
    pub(super) unsafe fn keep_where<R: Lanes, const N: usize>(
        self,
        at: usize,
        mask: Mask<R, N>,
        wanted: Wide<R, N>,
        sent: Wide<R, N>,
    ) {
        if KEEP {
            // SAFETY: as the caller promises.
            unsafe {
                let residual = self.residual.add(at);
                Wide::select(mask, Wide::subtract(wanted, sent), Wide::load(residual))
                    .store(residual);
            }
        }
    }

    /// Returns value plus residual of element `at`.
    ///
    /// # Safety
    ///
    /// The element is in range.
    #[inline(always)]
    pub(super) unsafe fn wanted_one(self, at: usize) -> f32 {
        // SAFETY: as the caller promises.
        unsafe {
            let value = self.values.add(at).read();
            if KEEP {
                value + self.residual.add(at).read()
            } else {
                value
            }
        }
    }

    /// Keeps what was not sent of element `at`.
    ///
    /// # Safety
    ///
    /// The element is in range.
    #[inline(always)]
    pub(super) unsafe fn keep_one(self, at: usize, wanted: f32, sent: f32) {
        if KEEP {
            // SAFETY: as the caller promises.
            unsafe { self.residual.add(at).write(wanted - sent) };
        }
    }
}
