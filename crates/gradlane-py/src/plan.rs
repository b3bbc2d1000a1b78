//! `plan_json`: the plan of a model from its tensor table.

use gradlane_engine::{Plan, Scheme, Strategy, TensorSpec, Update};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Deserialize;

/// A row of the tensor table; one without a scheme has the strategy's.
#[derive(Deserialize)]
struct TensorRow {
    #[serde(flatten)]
    spec: TensorSpec,
    scheme: Option<Scheme>,
}

/// Build a plan and return it as JSON, the same text for the same arguments.
///
/// tensors_json is a list of {"name", "numel", "dtype", "role"}, and "scheme" where it is another
/// one than the strategy's; update is "worker" or "server".
#[pyfunction]
#[pyo3(signature = (tensors_json, strategy, slice_elems, seed, update, world_size))]
pub(crate) fn plan_json(
    tensors_json: &str,
    strategy: &str,
    slice_elems: Option<u64>,
    seed: u64,
    update: &str,
    world_size: u32,
) -> PyResult<String> {
    let refuse = |text: String| PyValueError::new_err(text);
    let tensors: Vec<TensorRow> = serde_json::from_str(tensors_json)
        .map_err(|error| refuse(format!("tensor table: {error}")))?;
    let update: Update = serde_json::from_value(update.into()).map_err(|_| {
        refuse(format!("unknown update {update:?}; known are \"worker\" and \"server\""))
    })?;
    let strategy =
        Strategy::named(strategy, slice_elems, seed).map_err(|error| refuse(error.to_string()))?;
    let own = strategy.scheme;
    let tensors = tensors.into_iter().map(|row| (row.spec, row.scheme.unwrap_or(own))).collect();
    let plan = Plan::build_mixed(tensors, strategy, update, world_size)
        .map_err(|error| refuse(error.to_string()))?;
    serde_json::to_string(&plan).map_err(|error| refuse(error.to_string()))
}
