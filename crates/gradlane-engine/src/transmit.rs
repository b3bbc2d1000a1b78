//! Messages of this rank, and the order in which they leave.

mod encode_queue;
mod message;
mod order_key;
mod priorities;
mod queue;
mod scheduler;

pub(crate) use encode_queue::{EncodeQueue, PendingEncode};
pub(crate) use message::{Body, Message};
pub(crate) use order_key::{OrderKey, OrderKeys};
pub(crate) use priorities::PriorityTable;
pub(crate) use scheduler::Scheduler;
