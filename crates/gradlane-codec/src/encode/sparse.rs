//! Sparse codecs: only the largest values travel, exactly; the others are kept for later steps.
//!
//! `topk` sends the largest of values and residual (Aji and Heafield 2017); with `bits` as codes of a
//! few levels, of each bucket of values, with a residual that may decay (SparseLoCo, Sarfi et al. 2025). `dgc` is deep gradient
//! compression (Lin et al. 2018): momentum is taken before the selection, an element that was sent
//! begins without momentum, and the first steps send more. What always holds:
//!
//! - The selection is exact: the `ratio` of the elements that are encoded at once, rounded up, and of
//!   equal magnitudes those that come first. Without `bucket` a cut into slices is part of the result.
//! - Without `bits`, what is sent is what was added up, bit for bit, and leaves zero behind. Sent and
//!   kept together are what there was, with `bits` up to one rounding.
//! - NaN and infinity are larger than all numbers, so that they are sent first. They are never kept:
//!   one bad step does not spoil those after it.

mod coded;
mod dgc;
mod options;
mod selection;
mod topk;
mod wire;

pub(crate) use dgc::Dgc;
pub use options::{DgcOptions, SentShares, TopkOptions};
pub(crate) use topk::Topk;
pub use wire::SparseError;
