//! Sparse codecs: only the largest values travel, exactly; the others are kept for later steps.
//!
//! `topk` sends the largest of values and residual (Aji and Heafield 2017). `dgc` is deep gradient
//! compression (Lin et al. 2018): momentum is taken before the selection, an element that was sent
//! begins without momentum, and the first steps send more. What always holds:
//!
//! - The selection is exact: the `ratio` of the elements that are encoded at once, rounded up, and of
//!   equal magnitudes those that come first. A cut into slices is part of the result.
//! - What is sent is what was added up, bit for bit, and leaves zero behind. Sent and kept together are
//!   what there was.
//! - NaN and infinity are larger than all numbers, so that they are sent first. They are never kept:
//!   one bad step does not spoil those after it.

mod dgc;
mod options;
mod selection;
mod topk;
mod wire;

pub(crate) use dgc::Dgc;
pub use options::{DgcOptions, TopkOptions};
pub(crate) use topk::Topk;
pub use wire::SparseError;
