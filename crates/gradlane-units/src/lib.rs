//! Names and units shared by every layer.
//!
//! A number that crosses a function boundary has a type or a unit in its name. Everything here is
//! plain data: no clock, no dependence on the host.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod codec_sizes;
mod dtype;
mod identity;
mod quantity;
mod rng;
mod square_sum;

pub use codec_sizes::{CodecSizes, RingBytes};
pub use dtype::Dtype;
pub use identity::{Priority, Rank, SliceId, Step, TensorId};
pub use quantity::{Bytes, Rate, Time};
pub use rng::Rng;
pub use square_sum::SquareSum;
