//! The element types that are added up, encoded and updated.
//!
//! [`Dtype`] names what a tensor holds; a [`FloatDtype`] is one that has arithmetic. Bytes are always
//! in the machine's own order: kernels see memory, never frames.

use gradlane_units::Dtype;
use std::fmt;

/// The type of an element with arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FloatDtype {
    /// IEEE 754 binary32, `torch.float32`.
    F32,
    /// IEEE 754 binary16, `torch.float16`; sums are formed in f32.
    F16,
    /// The upper half of a binary32, `torch.bfloat16`; sums are formed in f32.
    Bf16,
    /// IEEE 754 binary64, `torch.float64`.
    F64,
}

impl FloatDtype {
    /// Every dtype, in the order of declaration.
    pub const ALL: [FloatDtype; 4] =
        [FloatDtype::F32, FloatDtype::F16, FloatDtype::Bf16, FloatDtype::F64];

    /// Bytes that one element takes.
    pub const fn element_bytes(self) -> usize {
        self.dtype().bytes() as usize
    }

    /// The dtype in which sums are formed and optimizer state is kept: f64 for f64, f32 for all
    /// others.
    pub const fn accumulator(self) -> FloatDtype {
        match self {
            FloatDtype::F32 | FloatDtype::F16 | FloatDtype::Bf16 => FloatDtype::F32,
            FloatDtype::F64 => FloatDtype::F64,
        }
    }

    /// The name of the same [`Dtype`].
    pub const fn name(self) -> &'static str {
        self.dtype().name()
    }

    /// The same type as plans name it.
    pub const fn dtype(self) -> Dtype {
        match self {
            FloatDtype::F32 => Dtype::F32,
            FloatDtype::F16 => Dtype::F16,
            FloatDtype::Bf16 => Dtype::Bf16,
            FloatDtype::F64 => Dtype::F64,
        }
    }

    /// The type with arithmetic of a tensor's elements, or `None` for plain bytes.
    pub const fn of(dtype: Dtype) -> Option<FloatDtype> {
        match dtype {
            Dtype::F32 => Some(FloatDtype::F32),
            Dtype::F16 => Some(FloatDtype::F16),
            Dtype::Bf16 => Some(FloatDtype::Bf16),
            Dtype::F64 => Some(FloatDtype::F64),
            Dtype::U8 => None,
        }
    }
}

impl fmt::Display for FloatDtype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::FloatDtype;
    use gradlane_units::Dtype;

    #[test]
    fn types_with_arithmetic_are_those_of_plans() {
        for dtype in FloatDtype::ALL {
            assert_eq!(FloatDtype::of(dtype.dtype()), Some(dtype));
            assert_eq!(dtype.to_string(), dtype.dtype().to_string());
            assert_eq!(dtype.element_bytes() as u64, dtype.dtype().bytes());
        }
        assert_eq!(FloatDtype::of(Dtype::U8), None);
    }

    #[test]
    fn accumulators_are_never_narrower() {
        for dtype in FloatDtype::ALL {
            assert!(dtype.accumulator().element_bytes() >= dtype.element_bytes());
            assert_eq!(dtype.accumulator().accumulator(), dtype.accumulator());
        }
    }
}
