//! Optimizers on the servers: the update rule of a tensor, and the state of a slice, with the
//! residuals of codecs.
//!
//! State is f32, one value an element of the slice, and stays on the rank that owns the slice. It
//! comes from tensors that lie whole on every rank, and returns by a step in which the owners
//! broadcast it in place of parameters. The residual of a rank's own contributions covers all
//! slices and differs between ranks.

use super::error::{JobError, UpdateRuleError};
use super::residual::WorkerResidual;
use gradlane_codec::{AdamOptions, SgdOptions};

/// The update of a tensor in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UpdateRule {
    /// Stochastic gradient descent.
    Sgd(SgdOptions),
    /// Adam or AdamW.
    Adam {
        /// Hyper-parameters.
        options: AdamOptions,
        /// Steps that the tensor has taken before; in asynchronous training, before its state was
        /// restored.
        steps: u64,
    },
}

impl UpdateRule {
    /// Checks the settings as torch does.
    ///
    /// # Errors
    /// [`UpdateRuleError`] with the invalid setting.
    pub fn validate(&self) -> Result<(), UpdateRuleError> {
        match self {
            UpdateRule::Sgd(options) => Ok(options.validate()?),
            UpdateRule::Adam { options, .. } => Ok(options.validate()?),
        }
    }
}

/// One kind of state, by torch's name for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateKind {
    /// `momentum_buffer` of SGD.
    MomentumBuffer,
    /// `exp_avg` of Adam.
    ExpAvg,
    /// `exp_avg_sq` of Adam.
    ExpAvgSq,
    /// The residual of this rank's contributions.
    WorkerResidual,
    /// The residual of the results of owned slices.
    OwnerResidual,
}

impl StateKind {
    /// Returns the kind with a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<StateKind> {
        match name {
            "momentum_buffer" => Some(StateKind::MomentumBuffer),
            "exp_avg" => Some(StateKind::ExpAvg),
            "exp_avg_sq" => Some(StateKind::ExpAvgSq),
            "worker_residual" => Some(StateKind::WorkerResidual),
            "owner_residual" => Some(StateKind::OwnerResidual),
            _ => None,
        }
    }

    /// Returns torch's name; residuals have names of our own.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            StateKind::MomentumBuffer => "momentum_buffer",
            StateKind::ExpAvg => "exp_avg",
            StateKind::ExpAvgSq => "exp_avg_sq",
            StateKind::WorkerResidual => "worker_residual",
            StateKind::OwnerResidual => "owner_residual",
        }
    }

    /// Whether it is a residual of a codec.
    #[must_use]
    pub fn is_residual(self) -> bool {
        matches!(self, StateKind::WorkerResidual | StateKind::OwnerResidual)
    }
}

/// The state that a step broadcasts in place of parameters.
///
/// State has four bytes an element. A tensor of four-byte elements takes them at once, one of
/// two-byte elements the lower half in part 0 and the upper half in part 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateRead {
    /// The kind of state.
    pub kind: StateKind,
    /// The half, for tensors of two-byte elements.
    pub part: u8,
}

/// State of one slice; empty where it has none.
#[derive(Debug, Default)]
pub(crate) struct SliceState {
    momentum_buffer: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
    worker_residual: WorkerResidual,
    owner_residual: Vec<f32>,
    /// Steps of the optimizer, where each push is one.
    counted: u64,
}

impl SliceState {
    /// Counts a step on top of those in the rule, and returns its rule.
    pub(crate) fn count(&mut self, rule: UpdateRule) -> UpdateRule {
        let before = self.counted;
        self.counted += 1;
        match rule {
            UpdateRule::Sgd(_) => rule,
            UpdateRule::Adam { options, steps } => {
                UpdateRule::Adam { options, steps: steps + before }
            }
        }
    }

    /// Returns the values of a kind.
    pub(crate) fn values(&mut self, kind: StateKind) -> &mut Vec<f32> {
        match kind {
            StateKind::MomentumBuffer => &mut self.momentum_buffer,
            StateKind::ExpAvg => &mut self.exp_avg,
            StateKind::ExpAvgSq => &mut self.exp_avg_sq,
            StateKind::WorkerResidual => &mut self.worker_residual.values,
            StateKind::OwnerResidual => &mut self.owner_residual,
        }
    }

    /// Returns the residual of this rank's contributions, with its snapshot.
    pub(crate) fn contributed(&mut self) -> &mut WorkerResidual {
        &mut self.worker_residual
    }

    /// Clears the optimizer's state.
    pub(crate) fn clear_optimizer(&mut self) {
        for kind in [StateKind::MomentumBuffer, StateKind::ExpAvg, StateKind::ExpAvgSq] {
            self.values(kind).clear();
        }
    }

    /// Returns the bytes of a kind's values as they travel, in elements of `element_bytes`.
    ///
    /// # Errors
    /// When there is no such state for `elements` elements, or elements are not of 2 or 4 bytes.
    pub(crate) fn bytes(
        &mut self,
        read: StateRead,
        element_bytes: usize,
        elements: usize,
    ) -> Result<Vec<u8>, JobError> {
        let values = self.values(read.kind);
        if read.kind.is_residual() && values.is_empty() {
            // No residual so far.
            values.resize(elements, 0.0);
        }
        if read.kind == StateKind::OwnerResidual && values.len() > elements && elements > 0 {
            // Of an owner's residual only the first number of each value is not zero.
            let width = values.len() / elements;
            let mut first = SliceState::default();
            first.owner_residual.extend(values.iter().step_by(width));
            return first.bytes(read, element_bytes, elements);
        }
        if values.len() != elements {
            let (found, name) = (values.len(), read.kind.name());
            return Err(JobError::StateLength { name, found, expected: elements });
        }
        let words = values.iter().map(|value| value.to_bits());
        match element_bytes {
            4 => Ok(words.flat_map(u32::to_ne_bytes).collect()),
            2 => {
                let shift = 16 * u32::from(read.part.min(1));
                Ok(words.flat_map(|word| ((word >> shift) as u16).to_ne_bytes()).collect())
            }
            other => Err(JobError::StateElement(other)),
        }
    }
}

impl SliceState {
    /// Takes values from bytes as they travel, in elements of `element_bytes`: the reverse of
    /// [`SliceState::bytes`].
    ///
    /// # Errors
    /// When elements are not of 2 or 4 bytes.
    pub(crate) fn take_bytes(
        &mut self,
        part: StateRead,
        element_bytes: usize,
        bytes: &[u8],
    ) -> Result<(), JobError> {
        let values = self.values(part.kind);
        match element_bytes {
            4 => {
                let (words, _) = bytes.as_chunks();
                *values = words.iter().map(|word| f32::from_ne_bytes(*word)).collect();
            }
            2 => {
                let (halves, _) = bytes.as_chunks();
                values.resize(halves.len(), 0.0);
                let shift = 16 * u32::from(part.part.min(1));
                for (value, half) in values.iter_mut().zip(halves) {
                    let half = u32::from(u16::from_ne_bytes(*half)) << shift;
                    *value = f32::from_bits(value.to_bits() & !(0xFFFF << shift) | half);
                }
            }
            other => return Err(JobError::StateElement(other)),
        }
        Ok(())
    }
}

/// The part of a slice's state that a job takes along and gives back. A late rank may encode its
/// contribution while it reduces the others': each of the two has a part of its own.
#[derive(Debug)]
pub(crate) enum JobState {
    Slice(SliceState),
    WorkerResidual(WorkerResidual),
    OwnerResidual(Vec<f32>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_travels_whole_or_in_halves() {
        let mut state = SliceState::default();
        state.values(StateKind::ExpAvg).extend([1.5_f32, -0.0, f32::MIN_POSITIVE]);
        let read = |part| StateRead { kind: StateKind::ExpAvg, part };
        let whole = state.bytes(read(0), 4, 3).expect("it is there");
        let low = state.bytes(read(0), 2, 3).expect("it is there");
        let high = state.bytes(read(1), 2, 3).expect("it is there");
        for element in 0..3 {
            let half = |bytes: &[u8]| {
                u32::from(u16::from_ne_bytes([bytes[2 * element], bytes[2 * element + 1]]))
            };
            let word = u32::from_ne_bytes(whole[4 * element..][..4].try_into().expect("4 bytes"));
            assert_eq!(half(&low) | half(&high) << 16, word);
        }
        for (element_bytes, parts) in [(4, vec![(0, whole)]), (2, vec![(0, low), (1, high)])] {
            let mut taken = SliceState::default();
            for (part, bytes) in parts {
                taken.take_bytes(read(part), element_bytes, &bytes).expect("state");
            }
            assert_eq!(taken.exp_avg, state.exp_avg);
            assert!(taken.take_bytes(read(0), 8, &[0; 8]).is_err());
        }
        assert!(state.bytes(read(0), 4, 2).is_err());
        assert!(state.bytes(read(0), 8, 3).is_err());
        let other = StateRead { kind: StateKind::MomentumBuffer, part: 0 };
        assert!(state.bytes(other, 4, 3).is_err());
    }

    #[test]
    fn names_are_torchs() {
        for name in
            ["momentum_buffer", "exp_avg", "exp_avg_sq", "worker_residual", "owner_residual"]
        {
            assert_eq!(StateKind::from_name(name).map(StateKind::name), Some(name));
        }
        assert_eq!(StateKind::from_name("max_exp_avg_sq"), None);
    }
}
