//! Tests of the simulator.

mod cluster;
mod codecs;
mod fabric;
mod golden;
mod lanes;
mod nodes;
mod ring_fused;
mod schemes;
mod serving;
mod straggling;
