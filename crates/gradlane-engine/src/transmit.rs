//! Messages of this rank, and the order in which they leave.

mod encode_queue;
mod order;
mod scheduler;

pub(crate) use encode_queue::{EncodeQueue, PendingEncode};
pub(crate) use order::{OrderKey, OrderKeys, PriorityTable};
pub(crate) use scheduler::{Body, Message, Scheduler};
