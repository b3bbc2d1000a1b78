//! The traits of an element type and of a register that generic kernels are built on.
//!
//! An [`Element`] is a type in memory, a [`Register`] holds some lanes of its accumulator type, and
//! [`Storage`] moves between the two. The accumulator type is itself a register of one lane: the
//! tail of a slice is computed with it, by the same operations as the body.

use half::{bf16, f16};

/// Lanes of one floating-point type, with the four operations and the square root, each rounded on
/// its own.
///
/// The methods are unsafe because a register may need instructions that only some machines have:
/// they are called inside a function that enables them. Pointers may be unaligned.
pub(crate) trait Register: Copy {
    /// The type of one lane.
    type Lane: Accumulator;
    /// How many lanes a register has.
    const LANES: usize;

    /// The same value in all lanes.
    unsafe fn splat(value: Self::Lane) -> Self;
    /// Reads `LANES` values.
    unsafe fn load(from: *const u8) -> Self;
    /// Writes `LANES` values.
    unsafe fn store(self, to: *mut u8);
    /// `self + other`.
    unsafe fn add(self, other: Self) -> Self;
    /// `self - other`.
    unsafe fn subtract(self, other: Self) -> Self;
    /// `self * other`.
    unsafe fn multiply(self, other: Self) -> Self;
    /// `self / other`.
    unsafe fn divide(self, other: Self) -> Self;
    /// The square root, correctly rounded; NaN below zero.
    unsafe fn square_root(self) -> Self;
}

/// A type in which sums are formed: f32 or f64.
pub(crate) trait Accumulator:
    Register<Lane = Self>
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
{
    /// Positive zero.
    const ZERO: Self;
    /// The nearest value to `value`.
    fn from_f64(value: f64) -> Self;
    /// The square root, correctly rounded.
    fn root(self) -> Self;
}

/// The nearest value to `value`, in every lane.
///
/// # Safety
///
/// Runs where the instructions of `R` are enabled.
#[inline(always)]
pub(crate) unsafe fn splat<R: Register>(value: f64) -> R {
    // SAFETY: the caller enables the instructions of `R`.
    unsafe { R::splat(Accumulator::from_f64(value)) }
}

/// A type that tensors are made of; one element can be held in a register of one lane.
pub(crate) trait Element: Storage<<Self as Element>::Accumulator> {
    /// The type in which its sums are formed.
    type Accumulator: Accumulator;
    /// Bytes that one element takes in memory.
    const BYTES: usize;
}

/// Moves elements between memory and registers of their accumulator type.
pub(crate) trait Storage<R: Register> {
    /// Reads and widens `R::LANES` elements.
    unsafe fn load(from: *const u8) -> R;
    /// Rounds `R::LANES` values to nearest even and writes them; NaN stays NaN and becomes quiet.
    unsafe fn store(value: R, to: *mut u8);
}

/// Elements of `torch.float32`.
pub(crate) struct F32;
/// Elements of `torch.float16`.
pub(crate) struct F16;
/// Elements of `torch.bfloat16`.
pub(crate) struct Bf16;
/// Elements of `torch.float64`.
pub(crate) struct F64;

impl Element for F32 {
    type Accumulator = f32;
    const BYTES: usize = 4;
}

impl Element for F16 {
    type Accumulator = f32;
    const BYTES: usize = 2;
}

impl Element for Bf16 {
    type Accumulator = f32;
    const BYTES: usize = 2;
}

impl Element for F64 {
    type Accumulator = f64;
    const BYTES: usize = 8;
}

impl<R: Register<Lane = f32>> Storage<R> for F32 {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> R {
        // SAFETY: forwarded, the caller's promise covers it.
        unsafe { R::load(from) }
    }
    #[inline(always)]
    unsafe fn store(value: R, to: *mut u8) {
        // SAFETY: forwarded, the caller's promise covers it.
        unsafe { value.store(to) }
    }
}

impl<R: Register<Lane = f64>> Storage<R> for F64 {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> R {
        // SAFETY: forwarded, the caller's promise covers it.
        unsafe { R::load(from) }
    }
    #[inline(always)]
    unsafe fn store(value: R, to: *mut u8) {
        // SAFETY: forwarded, the caller's promise covers it.
        unsafe { value.store(to) }
    }
}

impl Storage<f32> for F16 {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> f32 {
        // SAFETY: the caller promises two readable bytes.
        f16::from_bits(unsafe { from.cast::<u16>().read_unaligned() }).to_f32()
    }
    #[inline(always)]
    unsafe fn store(value: f32, to: *mut u8) {
        // SAFETY: the caller promises two writable bytes.
        unsafe {
            to.cast::<u16>().write_unaligned(f16::from_f32(value).to_bits());
        }
    }
}

impl Storage<f32> for Bf16 {
    #[inline(always)]
    unsafe fn load(from: *const u8) -> f32 {
        // SAFETY: the caller promises two readable bytes.
        bf16::from_bits(unsafe { from.cast::<u16>().read_unaligned() }).to_f32()
    }
    #[inline(always)]
    unsafe fn store(value: f32, to: *mut u8) {
        // SAFETY: the caller promises two writable bytes.
        unsafe {
            to.cast::<u16>().write_unaligned(bf16::from_f32(value).to_bits());
        }
    }
}

/// Makes a plain floating-point type a register of one lane.
macro_rules! one_lane {
    ($float:ty, $from_f64:expr) => {
        impl Register for $float {
            type Lane = $float;
            const LANES: usize = 1;

            #[inline(always)]
            unsafe fn splat(value: $float) -> $float {
                value
            }
            #[inline(always)]
            unsafe fn load(from: *const u8) -> $float {
                // SAFETY: the caller promises as many readable bytes as the type has.
                unsafe { from.cast::<$float>().read_unaligned() }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut u8) {
                // SAFETY: the caller promises as many writable bytes as the type has.
                unsafe { to.cast::<$float>().write_unaligned(self) }
            }
            #[inline(always)]
            unsafe fn add(self, other: $float) -> $float {
                self + other
            }
            #[inline(always)]
            unsafe fn subtract(self, other: $float) -> $float {
                self - other
            }
            #[inline(always)]
            unsafe fn multiply(self, other: $float) -> $float {
                self * other
            }
            #[inline(always)]
            unsafe fn divide(self, other: $float) -> $float {
                self / other
            }
            #[inline(always)]
            unsafe fn square_root(self) -> $float {
                self.sqrt()
            }
        }

        impl Accumulator for $float {
            const ZERO: $float = 0.0;

            #[inline(always)]
            fn from_f64(value: f64) -> $float {
                $from_f64(value)
            }
            #[inline(always)]
            fn root(self) -> $float {
                self.sqrt()
            }
        }
    };
}

#[allow(clippy::cast_possible_truncation)]
#[inline(always)]
fn nearest_f32(value: f64) -> f32 {
    value as f32
}

one_lane!(f32, nearest_f32);
one_lane!(f64, std::convert::identity);
