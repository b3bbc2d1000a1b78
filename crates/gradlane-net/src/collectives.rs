//! Collectives between the ranks of a group: sums, gathers, broadcasts, messages, as programs of
//! `torch.distributed` call them, beside the channels of training.
//!
//! | file | holds |
//! | --- | --- |
//! | `call` | a call of one rank, and what the ranks have to agree on |
//! | `schedule` | messages and computations of a rank's part in a collective, as data |
//! | `element` | types of elements and reductions |
//! | `memory`, `scratch` | the memory of calls, and of strands |
//! | `frame` | the fields of a frame |
//! | `limits` | lengths from which messages go another way |
//! | `peers` | frames that wait for each peer, bytes under way, presence |
//! | `running` | collectives that have begun |
//! | `points` | messages between two ranks |
//! | `state` | the state of a group: calls, frames and time in, frames and ended works out |
//! | `links` | connections |
//! | `group` | the handle, and the threads that drive it |
//! | `work`, `error` | the end of a call |
//! | `hostile` | a peer that sends what it likes, for tests and `gradlane-fuzz` |
//!
//! `state` and what it is made of know no sockets and no threads.

mod call;
mod element;
mod error;
mod frame;
mod group;
#[cfg(any(test, feature = "fuzzing"))]
mod hostile;
#[cfg(test)]
mod hostile_tests;
mod limits;
mod links;
#[allow(unsafe_code, reason = "borrows the memory of collectives")]
mod memory;
mod peers;
mod points;
mod running;
mod schedule;
mod scratch;
#[cfg(test)]
mod simulation;
mod state;
mod work;

pub use call::{Call, Operation};
pub use element::{Element, Reduction};
pub use error::{GroupError, GroupErrorKind};
pub use group::{Group, GroupOptions};
#[cfg(feature = "fuzzing")]
pub use hostile::{hostile_peer, Outcome};
pub use work::Work;
