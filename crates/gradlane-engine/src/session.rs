//! The session: its end in good order or not, and the switch of priorities that all ranks make
//! together.

mod blame;
mod goodbye;
mod interrupted_step;
mod priority_switch;

pub(crate) use blame::{Blame, REASON_BYTES_MAX};
pub(crate) use goodbye::Session;
pub(crate) use interrupted_step::{Changes, Findings, Holdings, Phase};
pub(crate) use priority_switch::PrioritySwitch;
