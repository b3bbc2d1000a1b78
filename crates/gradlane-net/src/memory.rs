//! The memory that frames are sent from and received into: gradients and parameters that the
//! application registers, and scratch buffers from a pool.
//!
//! A region of the engine becomes a [`Span`], an address, after a check of its bounds. A span becomes a
//! borrow, a [`ReadSpan`] or a [`WriteSpan`], by an `unsafe` call that vouches for the lifetime rule
//! (see `span`). Everything that reads or writes through a borrow is safe code.

#[allow(unsafe_code, reason = "turns addresses into borrows")]
mod span;
#[allow(unsafe_code, reason = "knows which addresses are registered; allocates buffers")]
mod table;

pub(crate) use span::{as_f32, InPlace, ReadSpan, Span, WriteSpan};
pub use table::UserMemory;
pub(crate) use table::{MemoryError, MemoryTable, ScratchBuffer};
