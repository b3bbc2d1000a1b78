//! The application's side: the handle with its calls, their checks, and the results that they wait for.

pub(crate) mod blocks;
pub(crate) mod completion;
pub(crate) mod gathered;
mod guard;
mod handle;
pub(crate) mod membership_news;
mod optimizer_state;
mod records;
pub(crate) mod shared;
mod waits;

pub use blocks::{Block, Blocks};
pub use handle::Channel;
pub use membership_news::MembershipEvent;
