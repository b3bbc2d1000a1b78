//! The sizes of a codec: lengths, never values. `gradlane-codec` has the codecs, and the engine, which
//! knows none of them, plans with these numbers.

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

/// The sizes of a codec for one tensor.
pub trait CodecSizes {
    /// Its canonical text.
    fn name(&self) -> String;
    /// Sizes of the tensor's dimensions in the order of its storage, where it goes by them.
    fn sizes(&self) -> Vec<u64>;
    /// Slices begin at multiples of this many elements, at least 1.
    fn granule_elems(&self) -> u64;
    /// The most bytes of `elements` encoded elements.
    fn bytes_max(&self, elements: u64) -> u64;
    /// The bytes of `elements` encoded elements on average: of a rank's contribution, or of a mean.
    fn bytes_expected(&self, elements: u64, is_mean: bool) -> u64 {
        let _ = is_mean;
        self.bytes_max(elements)
    }
    /// Whether [`CodecSizes::bytes_max`] is also the least.
    fn is_fixed(&self) -> bool;
    /// Numbers a value in the residual (error feedback); 0: no residual.
    fn residual_width(&self) -> u32;
    /// The sizes of a slice on a ring that adds up codes as integers, or `None` where every hop
    /// decodes, adds and encodes.
    ///
    /// # Errors
    /// When the codec cannot go round a ring of `world_size` ranks; the text says why.
    fn ring_bytes(&self, elements: u64, world_size: u32) -> Result<Option<RingBytes>, String> {
        let _ = (elements, world_size);
        Ok(None)
    }
}
