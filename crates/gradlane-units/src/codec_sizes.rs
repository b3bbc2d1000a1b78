//! What a plan needs to know of a codec: lengths, never values. `gradlane-codec` has the codecs, and
//! the engine, which knows none of them, plans with these numbers.

use alloc::string::String;
use alloc::vec::Vec;

/// Bytes of a slice on a ring where codes are added up as integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingBytes {
    /// Of the scales of its buckets, which go round first.
    pub scales: u64,
    /// Of the scales and the sums of codes.
    pub sums: u64,
}

/// A codec for one tensor, as plans need to know it.
pub trait CodecSizes {
    /// Its canonical text.
    fn name(&self) -> String;
    /// Sizes of the tensor's dimensions in the order of its storage, where it goes by them.
    fn sizes(&self) -> Vec<u64>;
    /// Slices begin at multiples of so many elements, at least 1.
    fn granule_elems(&self) -> u64;
    /// The most bytes of so many encoded elements.
    fn bytes_max(&self, elements: u64) -> u64;
    /// Whether that is also the least.
    fn is_fixed(&self) -> bool;
    /// Numbers that are kept for each value of what encoding loses, to be added the next time; 0: none.
    fn residual_width(&self) -> u32;
    /// How a ring adds up so many elements of each of so many ranks: none where every hop decodes,
    /// adds and encodes.
    ///
    /// # Errors
    /// When the codec cannot go round a ring of so many ranks; the text says why.
    fn ring_bytes(&self, elements: u64, world_size: u32) -> Result<Option<RingBytes>, String> {
        let _ = (elements, world_size);
        Ok(None)
    }
}
