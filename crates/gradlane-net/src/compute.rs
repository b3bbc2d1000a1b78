//! Jobs: what the engine asks to be computed, run by kernels on threads of their own.

pub(crate) mod codecs;
mod encoded;
pub(crate) mod job_queue;
pub(crate) mod job_runner;
mod kernels;
mod optimizer;
mod quantized_ring;
mod residual;

pub use optimizer::{StateKind, StateRead, UpdateRule, UpdateRuleError};
