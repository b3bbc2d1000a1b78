//! Tests of the transport: ranks over loopback sockets.

mod all_gather;
mod asynchronous;
mod collectives;
mod conformance;
mod dedicated_servers;
mod encoded;
mod failures;
mod frame_path;
mod going_on;
mod metrics;
mod ring_quantized;
mod rings;
mod sealing;
mod server_commands;
mod straggler_residuals;
mod support;
mod training;
mod unsafe_files;
