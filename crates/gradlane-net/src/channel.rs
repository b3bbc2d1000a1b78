//! The application's side: the handle with its calls, their checks, and the results that they wait for.

pub(crate) mod blocks;
pub(crate) mod completion;
mod guard;
mod handle;
mod optimizer_state;
mod records;
pub(crate) mod shared;

pub use blocks::{Block, Blocks};
pub use completion::MembershipEvent;
pub use handle::Channel;
