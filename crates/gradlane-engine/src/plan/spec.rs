//! Tensors as the user has them.

use crate::plan::Scheme;
use alloc::boxed::Box;
use alloc::string::String;
use gradlane_units::{CodecSizes, Dtype};
use serde::{Deserialize, Serialize};

/// When a tensor takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TensorKind {
    /// Trained: takes part in every step.
    Parameter,
    /// Spread from rank 0 at step 0 only: buffers, frozen parameters.
    Initial,
}

/// Where the optimizer runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Update {
    /// On each worker, with the averaged gradient.
    #[default]
    Worker,
    /// On the owner of the slice; parameters are broadcast.
    Server,
}

/// A tensor as the user has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Name in messages, as in `named_parameters()`.
    pub name: String,
    /// Number of elements.
    pub numel: u64,
    /// Type of the elements.
    pub dtype: Dtype,
    /// When the tensor takes part.
    #[serde(rename = "role")]
    pub kind: TensorKind,
}

/// A tensor, and how it is to be aggregated.
pub struct TensorSetting {
    /// The tensor as the user has it.
    pub spec: TensorSpec,
    /// How it is aggregated; none: as the strategy says.
    pub scheme: Option<Scheme>,
    /// How its slices travel after step 0; none: as they are.
    pub codec: Option<Box<dyn CodecSizes>>,
}

impl From<TensorSpec> for TensorSetting {
    fn from(spec: TensorSpec) -> TensorSetting {
        TensorSetting { spec, scheme: None, codec: None }
    }
}

impl From<(TensorSpec, Scheme)> for TensorSetting {
    fn from((spec, scheme): (TensorSpec, Scheme)) -> TensorSetting {
        TensorSetting { spec, scheme: Some(scheme), codec: None }
    }
}

impl From<(TensorSpec, Option<Box<dyn CodecSizes>>)> for TensorSetting {
    fn from((spec, codec): (TensorSpec, Option<Box<dyn CodecSizes>>)) -> TensorSetting {
        TensorSetting { spec, scheme: None, codec }
    }
}
