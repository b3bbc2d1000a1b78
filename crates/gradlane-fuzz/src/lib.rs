//! What must hold for any bytes that come from elsewhere, as functions of such bytes.
//!
//! Tests give them drawn inputs for some seconds in every run; `fuzz/` gives them those that libFuzzer finds by
//! coverage. Each `check` returns whether an input came past the first refusal, so that a driver notices
//! inputs of which none does. An input that breaks a property panics.
#![forbid(unsafe_code)]

pub mod codec;
pub mod engine;
pub mod group;
pub mod seal;
pub mod wire;
