//! `gradlane._core`: the compiled core for Python. Translation only: numbers, text and addresses
//! in, results and exceptions out; every decision is made below.
//!
//! The GIL is released in every call that blocks, and Python's signal handlers run every 50 ms
//! while one waits.

mod awake;
mod blocks;
mod channel;
mod codec;
mod errors;
mod group;
mod listener;
mod log_to_stderr;
mod plan;
mod pulse;
mod simulate;
mod squares;

/// The compiled core of gradlane.
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use crate::awake::keep_awake;
    #[pymodule_export]
    use crate::blocks::Blocks;
    #[pymodule_export]
    use crate::channel::Channel;
    #[pymodule_export]
    use crate::codec::Codec;
    #[pymodule_export]
    use crate::errors::{ChannelError, ChannelTimeout};
    #[pymodule_export]
    use crate::group::{Group, GroupError, Work};
    #[pymodule_export]
    use crate::listener::Listener;
    #[pymodule_export]
    use crate::plan::{codec_json, plan_json};
    #[pymodule_export]
    use crate::pulse::Pulse;
    #[pymodule_export]
    use crate::simulate::simulate;
    #[pymodule_export]
    use crate::squares::SquareSum;

    /// Runs when the module is imported.
    #[pymodule_init]
    fn init(_module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        crate::log_to_stderr::install();
        // A mistyped variable would else be ignored by the kernels.
        gradlane_codec::InstructionSet::from_environment()
            .map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))?;
        Ok(())
    }
}
