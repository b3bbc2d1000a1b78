//! Tests of the engine: clusters of ranks in one thread.

mod all_gather;
mod asynchronous;
mod cluster;
mod common;
mod dedicated_servers;
mod encoded;
mod fast_forward;
mod gather_to_root;
mod going_on;
mod hostile;
mod ring;
mod ring_quantized;
mod sent_and_read;
mod server_commands;
mod squares;
mod stragglers;
