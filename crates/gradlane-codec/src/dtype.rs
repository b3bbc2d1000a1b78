//! The element types that gradients and parameters may have.
//!
//! A dtype says how many bytes an element takes and in which type its sums are formed. Bytes are
//! always in the machine's own order: kernels see memory, never frames.

use std::fmt;

/// The type of one element of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    /// IEEE 754 binary32, `torch.float32`.
    F32,
    /// IEEE 754 binary16, `torch.float16`; sums are formed in f32.
    F16,
    /// The upper half of a binary32, `torch.bfloat16`; sums are formed in f32.
    Bf16,
    /// IEEE 754 binary64, `torch.float64`.
    F64,
}

impl Dtype {
    /// Every dtype, in the order of declaration.
    pub const ALL: [Dtype; 4] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::F64];

    /// Bytes that one element takes.
    pub const fn element_bytes(self) -> usize {
        match self {
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::F32 => 4,
            Dtype::F64 => 8,
        }
    }

    /// The dtype in which sums are formed and optimizer state is kept: f64 for f64, f32 for all
    /// others.
    pub const fn accumulator(self) -> Dtype {
        match self {
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => Dtype::F32,
            Dtype::F64 => Dtype::F64,
        }
    }

    /// The short name used in plans, reports and benchmarks: `f32`, `f16`, `bf16` or `f64`.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::F64 => "f64",
        }
    }

    /// The dtype with this short name, or `None` if there is none.
    pub fn from_name(name: &str) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::Dtype;

    #[test]
    fn names_round_trip() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
            assert_eq!(dtype.to_string(), dtype.name());
        }
        assert_eq!(Dtype::from_name("float32"), None);
    }

    #[test]
    fn accumulators_are_never_narrower() {
        for dtype in Dtype::ALL {
            assert!(dtype.accumulator().element_bytes() >= dtype.element_bytes());
            assert_eq!(dtype.accumulator().accumulator(), dtype.accumulator());
        }
    }
}
