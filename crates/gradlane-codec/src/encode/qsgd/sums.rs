//! Sums of codes with a scale that all ranks share: encoded once, added up as integers on a ring.
//!
//! First the largest scale of each bucket is found over all ranks; then each rank rounds its values
//! to levels of that scale and adds the codes to those that came. A sum of `N` codes of `b` bits needs
//! `b + ceil(log2 N)` bits, and stands for the mean (sum - N h) × (scale / (h N)).

use super::fields::{Layout, WIDTH_MAX};
use super::{kernel, oracle, Qsgd, SCALE_BYTES};
use crate::element::{Bf16, Storage, F16};
use crate::encode::bucket_quantizer::wanted;
use crate::encode::draw::Draws;
use crate::encode::lanes::{dispatch, Lanes, Work};
use crate::encode::source::Source;
use crate::encode::{CodecSpec, DecodeError, DrawKey, Method, RingSums};
use crate::InstructionSet;

/// Sums of `qsgd` codes over the ranks of a ring, for one tensor.
///
/// Values and residuals are those of a range of the tensor that begins with a bucket; encodings of
/// parts that are cut at buckets follow one another. The bits are the same for every [`InstructionSet`].
#[derive(Clone, Copy, Debug)]
pub struct IntegerSums {
    instruction_set: InstructionSet,
    qsgd: Qsgd,
    /// Elements of a bucket.
    bucket: usize,
    ranks: u32,
    /// Bits of a sum.
    width: u32,
}

impl IntegerSums {
    /// The sums of a codec over `ranks` ranks, or `None` where its text does not ask for them.
    ///
    /// # Errors
    ///
    /// When a sum of one code a rank does not fit; the text says what would.
    pub fn new(spec: &CodecSpec, ranks: u32) -> Result<Option<IntegerSums>, String> {
        IntegerSums::with(InstructionSet::active(), spec, ranks)
    }

    /// [`IntegerSums::new`] with the kernels for a given instruction set: the bits are the same.
    ///
    /// # Errors
    ///
    /// As for [`IntegerSums::new`].
    pub fn with(
        instruction_set: InstructionSet,
        spec: &CodecSpec,
        ranks: u32,
    ) -> Result<Option<IntegerSums>, String> {
        let options = match &spec.method {
            Method::Qsgd(options) if options.ring == RingSums::Integer => *options,
            _ => return Ok(None),
        };
        let width = options.bits + ranks.max(1).next_power_of_two().ilog2();
        if width > WIDTH_MAX {
            return Err(format!(
                "codec {:?} adds up codes of {} bits of {ranks} ranks, which takes {width} bits, and \
                 sums have {WIDTH_MAX}: use fewer bits, or ring=hops",
                spec.to_string(),
                options.bits,
            ));
        }
        let bucket = options.bucket as usize;
        Ok(Some(IntegerSums { instruction_set, qsgd: Qsgd::new(options), bucket, ranks, width }))
    }

    /// Bits of a sum.
    pub fn bits(&self) -> u32 {
        self.width
    }

    /// Bytes of the scales of `elements` elements.
    pub fn scale_bytes(&self, elements: usize) -> usize {
        elements.div_ceil(self.bucket) * SCALE_BYTES
    }

    /// Bytes of the sums of `elements` elements, their scales included.
    pub fn sum_bytes(&self, elements: usize) -> usize {
        let (whole, rest) = (elements / self.bucket, elements % self.bucket);
        let last = if rest == 0 { 0 } else { self.bucket_bytes(rest) };
        whole * self.bucket_bytes(self.bucket) + last
    }

    #[inline(always)]
    fn bucket_bytes(&self, elements: usize) -> usize {
        SCALE_BYTES + Layout::new(self.width, elements).bytes
    }

    /// Makes each scale the larger of what it is and that of these values with their residual; NaN is
    /// larger than all numbers.
    ///
    /// # Panics
    ///
    /// When there are not as many scales as buckets, or residuals as values.
    pub fn max_scales(&self, values: &[f32], residual: Option<&[f32]>, scales: &mut [u8]) {
        assert_eq!(scales.len(), self.scale_bytes(values.len()), "a scale for every bucket");
        assert!(residual.is_none_or(|it| it.len() == values.len()), "a residual for every value");
        dispatch(self.instruction_set, MaxScales { sums: self, values, residual, scales });
    }

    /// Sums of nothing, with these scales.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] when there are not as many scales as buckets.
    ///
    /// # Panics
    ///
    /// When `out` is shorter than [`IntegerSums::sum_bytes`].
    pub fn begin(&self, scales: &[u8], elements: usize, out: &mut [u8]) -> Result<(), DecodeError> {
        check(elements, self.scale_bytes(elements), scales.len())?;
        let mut out = &mut out[..self.sum_bytes(elements)];
        let mut left = elements;
        for scale in scales.chunks_exact(SCALE_BYTES) {
            let (bucket, rest) = out.split_at_mut(self.bucket_bytes(left.min(self.bucket)));
            bucket.fill(0);
            bucket[..SCALE_BYTES].copy_from_slice(scale);
            left = left.saturating_sub(self.bucket);
            out = rest;
        }
        Ok(())
    }

    /// Adds the codes of values to sums; the residual, where one is kept, is added before and replaced by what was
    /// not sent.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] when the bytes are no sums of this many elements, or a scale is smaller than that
    /// of the values; what the sums then hold is not said.
    ///
    /// # Panics
    ///
    /// When the residual has another length than the values, or the key is not where a bucket
    /// begins.
    pub fn add(
        &self,
        key: &DrawKey,
        values: &[f32],
        residual: Option<&mut [f32]>,
        sums: &mut [u8],
    ) -> Result<(), DecodeError> {
        check(values.len(), self.sum_bytes(values.len()), sums.len())?;
        assert_eq!(key.first_element % self.bucket as u64, 0, "a slice begins with a bucket");
        let fits = residual.as_ref().is_none_or(|it| it.len() == values.len());
        assert!(fits, "a residual for every value");
        dispatch(self.instruction_set, Add { sums: self, key, values, residual, out: sums })
    }

    /// The means that the sums of all ranks stand for.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] when the bytes are no sums of as many elements as `out` has.
    pub fn mean(&self, sums: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
        check(out.len(), self.sum_bytes(out.len()), sums.len())?;
        dispatch(self.instruction_set, Means { of: self, sums, out });
        Ok(())
    }

    /// The sum of zeros alone, and the distance of two means.
    #[inline(always)]
    fn grid(&self, scale: f32) -> (u32, f32) {
        let zero = self.ranks * self.qsgd.half as u32;
        (zero, scale / zero as f32)
    }
}

fn check(elements: usize, expected_bytes: usize, found_bytes: usize) -> Result<(), DecodeError> {
    if expected_bytes == found_bytes {
        return Ok(());
    }
    let codec = "qsgd (ring=integer)";
    Err(DecodeError::Length { codec, elements, expected_bytes, found_bytes })
}

fn read_scale(bytes: &[u8]) -> (f32, &[u8]) {
    let (scale, rest) = bytes.split_first_chunk::<SCALE_BYTES>().expect("the length was checked");
    (f32::from_le_bytes(*scale), rest)
}

struct MaxScales<'a> {
    sums: &'a IntegerSums,
    values: &'a [f32],
    residual: Option<&'a [f32]>,
    scales: &'a mut [u8],
}

impl MaxScales<'_> {
    /// Gives the range of every bucket to `scale_of`, and keeps the larger scale.
    #[inline(always)]
    fn each(self, mut scale_of: impl FnMut(Qsgd, &[f32], Option<&[f32]>) -> f32) {
        let MaxScales { sums, values, residual, scales } = self;
        let buckets = values.chunks(sums.bucket).zip(scales.chunks_exact_mut(SCALE_BYTES));
        for (index, (values, bytes)) in buckets.enumerate() {
            let residual = residual.map(|all| &all[index * sums.bucket..][..values.len()]);
            let own = scale_of(sums.qsgd, values, residual).to_bits();
            // Magnitudes are ordered as their bits are, NaN at the end.
            let (received, _) = read_scale(bytes);
            let larger = f32::from_bits(own.max(received.abs().to_bits()));
            bytes.copy_from_slice(&oracle::scale_or_nothing(larger).to_le_bytes());
        }
    }
}

impl Work for MaxScales<'_> {
    type Output = ();

    fn run_plainly(self) {
        self.each(|qsgd, values, residual| {
            oracle::scale_of(qsgd, (0..values.len()).map(|at| wanted(values, residual, at)))
        });
    }

    #[inline(always)]
    unsafe fn run<R, const N: usize>(self)
    where
        R: Lanes,
        F16: Storage<R>,
        Bf16: Storage<R>,
    {
        self.each(
            #[inline(always)]
            |qsgd, values, residual| {
                // SAFETY: the caller enables the instructions; sources are of whole slices, and only
                // read.
                unsafe {
                    match residual {
                        None => kernel::scale_of::<R, N, false>(
                            qsgd,
                            Source::plain(values),
                            values.len(),
                        ),
                        Some(residual) => kernel::scale_of::<R, N, true>(
                            qsgd,
                            Source::reading(values, residual),
                            values.len(),
                        ),
                    }
                }
            },
        );
    }
}

struct Add<'a> {
    sums: &'a IntegerSums,
    key: &'a DrawKey,
    values: &'a [f32],
    residual: Option<&'a mut [f32]>,
    out: &'a mut [u8],
}

/// One bucket of an [`Add`].
struct AddBucket<'a> {
    draws: Draws,
    values: &'a [f32],
    residual: Option<&'a mut [f32]>,
    scale: f32,
    /// Room for the codes.
    codes: &'a mut [u8],
    sums: &'a mut [u8],
    layout: Layout,
}

impl Add<'_> {
    /// Gives every bucket to `add`, which gives back the scale of its values.
    #[inline(always)]
    fn each(self, mut add: impl FnMut(Qsgd, AddBucket<'_>) -> bool) -> Result<(), DecodeError> {
        let Add { sums, key, values, mut residual, mut out } = self;
        let bits = sums.qsgd.options.bits as usize;
        let mut codes = vec![0; (sums.bucket.min(values.len()) * bits).div_ceil(8)];
        for (bucket, values) in values.chunks(sums.bucket).enumerate() {
            let start = bucket * sums.bucket;
            let first_element = key.first_element + start as u64;
            let layout = Layout::new(sums.width, values.len());
            let (bytes, rest) = out.split_at_mut(SCALE_BYTES + layout.bytes);
            out = rest;
            let (scale, _) = read_scale(bytes);
            let added = add(
                sums.qsgd,
                AddBucket {
                    draws: Draws::of_bucket(&DrawKey { first_element, ..*key }),
                    values,
                    residual: residual.as_deref_mut().map(|all| &mut all[start..][..values.len()]),
                    scale,
                    codes: &mut codes[..(values.len() * bits).div_ceil(8)],
                    sums: &mut bytes[SCALE_BYTES..],
                    layout,
                },
            );
            if !added {
                return Err(DecodeError::Scale { bucket });
            }
        }
        Ok(())
    }
}

/// Whether a shared scale is one, and at least a rank's own; NaN is larger than all numbers.
fn covers(shared: f32, own: f32) -> bool {
    let is_scale = oracle::scale_or_nothing(shared).to_bits() == shared.to_bits();
    is_scale && shared.to_bits() >= own.to_bits()
}

impl Work for Add<'_> {
    type Output = Result<(), DecodeError>;

    fn run_plainly(self) -> Self::Output {
        self.each(|qsgd, bucket| {
            let AddBucket { draws, values, residual, scale, codes, sums, layout } = bucket;
            let all = (0..values.len()).map(|at| wanted(values, residual.as_deref(), at));
            let covered = covers(scale, oracle::scale_of(qsgd, all));
            if covered {
                oracle::quantize(qsgd, draws, scale, values, residual, codes);
                layout.add_plainly(qsgd.options.bits, sums, codes);
            }
            covered
        })
    }

    #[inline(always)]
    unsafe fn run<R, const N: usize>(self) -> Self::Output
    where
        R: Lanes,
        F16: Storage<R>,
        Bf16: Storage<R>,
    {
        self.each(
            #[inline(always)]
            |qsgd, bucket| {
                let AddBucket { draws, values, residual, scale, codes, sums, layout } = bucket;
                let count = values.len();
                // SAFETY: the caller enables the instructions; sources are of whole slices.
                unsafe {
                    let covered = match residual {
                        None => {
                            let source = Source::plain(values);
                            quantize::<R, N, false>(qsgd, draws, source, count, scale, codes)
                        }
                        Some(residual) => {
                            let source = Source::keeping(values, residual);
                            quantize::<R, N, true>(qsgd, draws, source, count, scale, codes)
                        }
                    };
                    if covered {
                        layout.add::<R, N>(qsgd.options.bits, sums, codes);
                    }
                    covered
                }
            },
        )
    }
}

/// Writes the codes of a bucket to a scale that others share; whether that is large enough.
///
/// # Safety
///
/// As for [`kernel::encode`].
#[inline(always)]
unsafe fn quantize<R: Lanes, const N: usize, const KEEP: bool>(
    qsgd: Qsgd,
    draws: Draws,
    source: Source<KEEP>,
    elements: usize,
    scale: f32,
    codes: &mut [u8],
) -> bool {
    // SAFETY: as the caller promises.
    unsafe {
        let covered = covers(scale, kernel::scale_of::<R, N, KEEP>(qsgd, source, elements));
        if covered {
            kernel::quantize::<R, N, KEEP>(qsgd, draws, source, elements, scale, codes);
        }
        covered
    }
}

struct Means<'a> {
    of: &'a IntegerSums,
    sums: &'a [u8],
    out: &'a mut [f32],
}

impl Means<'_> {
    /// Gives every bucket's layout, sums, grid and values to `decode`.
    #[inline(always)]
    fn each(self, mut decode: impl FnMut(Layout, &[u8], (u32, f32), &mut [f32])) {
        let Means { of, mut sums, out } = self;
        for out in out.chunks_mut(of.bucket) {
            let layout = Layout::new(of.width, out.len());
            let (bytes, rest) = sums.split_at(SCALE_BYTES + layout.bytes);
            sums = rest;
            let (scale, bytes) = read_scale(bytes);
            decode(layout, bytes, of.grid(scale), out);
        }
    }
}

impl Work for Means<'_> {
    type Output = ();

    fn run_plainly(self) {
        self.each(|layout, sums, grid, out| layout.values_from(0, sums, grid, out));
    }

    #[inline(always)]
    unsafe fn run<R, const N: usize>(self)
    where
        R: Lanes,
        F16: Storage<R>,
        Bf16: Storage<R>,
    {
        self.each(
            #[inline(always)]
            |layout, sums, grid, out| {
                // SAFETY: the caller enables the instructions.
                unsafe { layout.values::<R, N>(sums, grid, out) }
            },
        );
    }
}
