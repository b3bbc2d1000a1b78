//! The instruction sets that kernels are built for, and the choice of one at run time.
//!
//! An [`InstructionSet`] exists only for instructions that this machine has, so that holding one is the
//! permission to run its kernels. The choice is made once and kept.

use std::fmt;
use std::sync::OnceLock;

use thiserror::Error;

/// Environment variable that forces an instruction set by name.
const FORCED_BY: &str = "GRADLANE_SIMD";

/// An instruction set for which kernels are compiled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Instructions {
    /// One element at a time, written to be read: the oracle of all others.
    Scalar,
    /// 4 f32 lanes; f16 is converted lane by lane.
    #[cfg(target_arch = "x86_64")]
    Sse2,
    /// 8 f32 lanes, with F16C and POPCNT.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 16 f32 lanes (AVX-512F), with POPCNT.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// 4 f32 lanes.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// Compiled-in instruction sets, narrowest first.
const COMPILED: &[Instructions] = &[
    Instructions::Scalar,
    #[cfg(target_arch = "x86_64")]
    Instructions::Sse2,
    #[cfg(target_arch = "x86_64")]
    Instructions::Avx2,
    #[cfg(target_arch = "x86_64")]
    Instructions::Avx512,
    #[cfg(target_arch = "aarch64")]
    Instructions::Neon,
];

impl Instructions {
    fn name(self) -> &'static str {
        match self {
            Instructions::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Instructions::Sse2 => "sse2",
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => "neon",
        }
    }

    fn on_this_machine(self) -> bool {
        match self {
            Instructions::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Instructions::Sse2 => true,
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("f16c")
                    && is_x86_feature_detected!("popcnt")
            }
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => {
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("popcnt")
            }
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => std::arch::is_aarch64_feature_detected!("neon"),
        }
    }
}

/// An instruction set that this machine has and kernels can run with.
///
/// All of them give the same bits (see the crate's documentation), so that the choice is one of
/// speed alone.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct InstructionSet(Instructions);

impl InstructionSet {
    /// The oracle: one element at a time, on every machine.
    pub const SCALAR: InstructionSet = InstructionSet(Instructions::Scalar);

    /// Every instruction set that runs on this machine, narrowest registers first; never empty.
    pub fn available() -> impl Iterator<Item = InstructionSet> {
        COMPILED.iter().copied().filter(|one| one.on_this_machine()).map(InstructionSet)
    }

    /// The instruction set with this name: `scalar`, `sse2`, `avx2`, `avx512` or `neon`.
    ///
    /// # Errors
    ///
    /// [`InstructionSetError`] if the name is unknown or this machine lacks the instructions.
    pub fn by_name(name: &str) -> Result<InstructionSet, InstructionSetError> {
        InstructionSet::available()
            .find(|instruction_set| instruction_set.name() == name)
            .ok_or_else(|| InstructionSetError {
                name: name.to_owned(),
                available: InstructionSet::available()
                    .map(InstructionSet::name)
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    }

    /// The instruction set that the environment variable `GRADLANE_SIMD` asks for, otherwise the one with
    /// the widest registers.
    ///
    /// # Errors
    ///
    /// [`InstructionSetError`] if the variable names an instruction set that this machine does not have. A session
    /// asks for this once at its start, so that a mistyped variable is reported.
    pub fn from_environment() -> Result<InstructionSet, InstructionSetError> {
        match std::env::var_os(FORCED_BY) {
            Some(name) if !name.is_empty() => InstructionSet::by_name(&name.to_string_lossy()),
            _ => Ok(InstructionSet::widest()),
        }
    }

    /// The instruction set that kernels use unless told otherwise, chosen on the first call and kept.
    ///
    /// It is that of [`InstructionSet::from_environment`]; where that is an error it is the one with the
    /// widest registers, which gives the same bits.
    pub fn active() -> InstructionSet {
        static ACTIVE: OnceLock<InstructionSet> = OnceLock::new();
        *ACTIVE.get_or_init(|| {
            InstructionSet::from_environment().unwrap_or_else(|_| InstructionSet::widest())
        })
    }

    /// The short name used in reports and benchmarks.
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    pub(crate) fn instructions(self) -> Instructions {
        self.0
    }

    fn widest() -> InstructionSet {
        InstructionSet::available().last().unwrap_or(InstructionSet::SCALAR)
    }
}

impl fmt::Debug for InstructionSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// An instruction set was asked for by a name that this machine cannot serve.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "no kernels for instruction set {name:?} on this machine: set GRADLANE_SIMD to one of \
     {available}, or unset it"
)]
pub struct InstructionSetError {
    /// The name that was asked for.
    pub name: String,
    /// The names that would do, separated by commas.
    pub available: String,
}

#[cfg(test)]
mod tests {
    use super::InstructionSet;

    #[test]
    fn names_lead_back_to_their_variants() {
        assert_eq!(InstructionSet::available().next(), Some(InstructionSet::SCALAR));
        for instruction_set in InstructionSet::available() {
            assert_eq!(InstructionSet::by_name(instruction_set.name()), Ok(instruction_set));
        }
    }

    #[test]
    fn an_unknown_name_is_an_error_that_lists_what_would_do() {
        let message = InstructionSet::by_name("mmx").unwrap_err().to_string();
        assert!(message.contains("\"mmx\"") && message.contains("scalar"), "{message}");
    }

    #[test]
    fn the_active_variant_stays_the_same() {
        assert_eq!(InstructionSet::active(), InstructionSet::active());
        assert!(InstructionSet::available()
            .any(|instruction_set| instruction_set == InstructionSet::active()));
    }
}
