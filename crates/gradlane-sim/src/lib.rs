//! The engine over virtual time: a cluster of the same engines that `gradlane-net` drives, on a
//! modelled network, with hosts that charge time for frames and reductions.
//!
//! A [`Scenario`] says everything; [`simulate`] gives a [`Report`] and, where asked for, a
//! [`Trace`]. Same scenario, same bytes.
//!
//! [`ring_fused`] is a separate, small model of Horovod, as one of the papers has it.

#![forbid(unsafe_code)]

mod accelerator;
mod coded_tensors;
mod connections;
mod costs;
mod draws;
mod error;
mod event_queue;
mod fabric;
mod frame_table;
mod host;
mod intra_node;
mod joined_lanes;
mod network;
mod node;
mod node_ranks;
mod node_sums;
mod nodes;
mod outcome;
mod outputs;
mod paths;
mod pauses;
mod port;
mod processors;
mod profile;
mod rank_groups;
mod rank_lane;
mod report;
mod request;
pub mod ring_fused;
mod scenario;
mod schemes;
mod simulation;
mod straggling;
mod tensor_scheme;
mod trace;
mod window_jitter;

pub use coded_tensors::CodedTensor;
pub use costs::{Costs, GOODPUT_SHARE};
pub use error::SimError;
pub use node_ranks::Nodes;
pub use outputs::Outputs;
pub use paths::{Link, Paths, PortRate, Racks};
pub use profile::{Profile, ProfiledTensor, TENSORS_MAX};
pub use report::{Report, StragglerFigures, TensorWait, Utilization};
pub use request::run_request;
pub use scenario::{Network, Scenario, StrategyChoice};
pub use simulation::{simulate, Outcome};
pub use straggling::Stops;
pub use tensor_scheme::TensorScheme;
pub use trace::{Lane, Span, Subject, Trace};
