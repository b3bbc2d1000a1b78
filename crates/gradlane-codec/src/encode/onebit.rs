//! 1-bit SGD: the sign of every value and two averages for a bucket (Seide et al. 2014; as in CNTK a
//! column, or a bucket of consecutive values, Grubic et al. 2018).
//!
//! A value that is at least zero (minus zero is) is sent as the average of all such values of its
//! bucket, any other as the average of the others. It is biased and lives by its residual.

mod kernel;
mod oracle;
mod words;

use super::bucket_quantizer::Quantizer;
use super::lanes::Lanes;
use super::source::Source;
use super::{DrawKey, Packing};

/// Bytes of the two averages, each an f32, before the bits.
const AVERAGES_BYTES: usize = 8;
/// Values that are summed in f32 before their sum goes into one of f64: long columns lose nothing.
const RUN: usize = 1024;

/// Signs and averages of a bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct OneBit {
    packing: Packing,
}

impl OneBit {
    pub(super) fn new(packing: Packing) -> OneBit {
        OneBit { packing }
    }

    /// Has a bucket encoded in bytes, and packs its bits into `out`.
    #[inline(always)]
    fn pack(self, elements: usize, out: &mut [u8], encode: impl FnOnce(&mut [u8])) {
        match self.packing {
            Packing::Bytes => encode(out),
            Packing::Cntk => {
                let mut plain = vec![0; AVERAGES_BYTES + elements.div_ceil(8)];
                encode(&mut plain);
                out[..AVERAGES_BYTES].copy_from_slice(&plain[..AVERAGES_BYTES]);
                words::pack(elements, &plain[AVERAGES_BYTES..], &mut out[AVERAGES_BYTES..]);
            }
        }
    }

    /// Has a bucket decoded from its encoding in bytes.
    #[inline(always)]
    fn unpack(self, elements: usize, bytes: &[u8], decode: impl FnOnce(&[u8])) {
        match self.packing {
            Packing::Bytes => decode(bytes),
            Packing::Cntk => {
                let mut plain = vec![0; AVERAGES_BYTES + elements.div_ceil(8)];
                plain[..AVERAGES_BYTES].copy_from_slice(&bytes[..AVERAGES_BYTES]);
                words::unpack(elements, &bytes[AVERAGES_BYTES..], &mut plain[AVERAGES_BYTES..]);
                decode(&plain);
            }
        }
    }
}

/// The average of values by their sum and number; zero without values.
#[allow(clippy::cast_possible_truncation)]
#[inline(always)]
fn average(sum: f64, count: usize) -> f32 {
    if count == 0 {
        0.0
    } else {
        (sum / count as f64) as f32
    }
}

impl Quantizer for OneBit {
    const IS_UNBIASED: bool = false;

    fn bucket_bytes(self, elements: usize) -> usize {
        AVERAGES_BYTES
            + match self.packing {
                Packing::Bytes => elements.div_ceil(8),
                Packing::Cntk => words::bytes(elements),
            }
    }

    fn encode_plainly(
        self,
        _place: &DrawKey,
        values: &[f32],
        residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) {
        self.pack(values.len(), out, |plain| oracle::encode(values, residual, plain));
    }

    fn decode_plainly(self, bytes: &[u8], out: &mut [f32], set: fn(&mut f32, f32)) {
        self.unpack(out.len(), bytes, |plain| oracle::decode(plain, out, set));
    }

    #[inline(always)]
    unsafe fn encode<R: Lanes, const N: usize, const KEEP: bool>(
        self,
        _place: &DrawKey,
        source: Source<KEEP>,
        elements: usize,
        out: &mut [u8],
    ) {
        self.pack(
            elements,
            out,
            #[inline(always)]
            |plain| {
                // SAFETY: forwarded, the caller's promise covers it.
                unsafe { kernel::encode::<R, N, KEEP>(source, elements, plain) }
            },
        );
    }

    #[inline(always)]
    unsafe fn decode<R: Lanes, const N: usize, const ADD: bool>(
        self,
        bytes: &[u8],
        out: &mut [f32],
    ) {
        self.unpack(
            out.len(),
            bytes,
            #[inline(always)]
            |plain| {
                // SAFETY: forwarded, the caller's promise covers it.
                unsafe { kernel::decode::<R, N, ADD>(plain, out) }
            },
        );
    }
}
