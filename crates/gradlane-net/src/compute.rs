//! Jobs: the engine's operations, run by kernels on threads of their own.
//!
//! `prepare` is the only place that knows the list of operations: it turns each into a [`Job`] with the
//! borrowed memory, the codec and the state that it needs. `state` keeps it between jobs, `jobs`
//! has the threads, starts jobs and reports them. `kernels`, `encoded` and `quantized_ring` compute.

mod encoded;
mod error;
pub(crate) mod jobs;
#[allow(unsafe_code, reason = "calls kernels that may work in place")]
mod kernels;
pub(crate) mod planned_codecs;
#[allow(unsafe_code, reason = "borrows the memory of jobs")]
mod prepare;
mod quantized_ring;
mod residual;
pub(crate) mod server_command;
mod server_optimizer;
mod state;

pub use error::UpdateRuleError;
pub use residual::ResidualSquares;
pub use server_command::StateWrite;
pub use server_optimizer::{StateKind, StateRead, UpdateRule};
