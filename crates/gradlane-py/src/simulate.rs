//! `simulate`: a scenario as JSON in, a report as JSON out.

use gradlane_sim::SimError;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

/// Simulate a scenario and return its report, both as JSON; the same text for the same scenario.
///
/// {"model": "cluster", ...} runs a cluster of engines in virtual time, {"model": "ring-fused", ...}
/// evaluates the model of fused buffers and rings. ValueError names what makes no sense.
#[pyfunction]
pub(crate) fn simulate(py: Python<'_>, scenario_json: &str) -> PyResult<String> {
    py.detach(|| gradlane_sim::run_request(scenario_json)).map_err(|error| match error {
        SimError::Argument(text) => PyValueError::new_err(text),
        other => PyRuntimeError::new_err(other.to_string()),
    })
}
