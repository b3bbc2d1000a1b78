//! The session: its clock, its end in good order or not, and the switch of priorities that all ranks make
//! together.

mod clock;
mod failure;
mod goodbye;
mod priority_switch;

pub(crate) use clock::Clock;
pub(crate) use failure::{Blame, REASON_BYTES_MAX};
pub(crate) use goodbye::Session;
pub(crate) use priority_switch::PrioritySwitch;
