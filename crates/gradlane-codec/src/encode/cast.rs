//! `f32`, `bf16` and `f16`: every value on its own, rounded to nearest even, little-endian.

use super::lanes::{dispatch, Lanes, Wide, Words, Work, WIDTH};
use super::source::{Source, AHEAD};
use super::{check_arguments, check_length, Codec, CodecSpec, DecodeError, DrawKey, Method};
use crate::element::{Bf16, Element, Storage, F16, F32};
use crate::InstructionSet;

/// A plain change of type.
#[derive(Debug)]
pub(super) struct Cast {
    spec: CodecSpec,
    instruction_set: InstructionSet,
}

impl Cast {
    pub(super) fn new(instruction_set: InstructionSet, spec: &CodecSpec) -> Cast {
        Cast { spec: spec.clone(), instruction_set }
    }

    fn decode_to<const ADD: bool>(
        &self,
        encoded: &[u8],
        out: &mut [f32],
    ) -> Result<(), DecodeError> {
        check_length(self, encoded, out.len())?;
        match &self.spec.method {
            Method::Bf16 => dispatch(self.instruction_set, Decode::<Bf16, ADD>::new(encoded, out)),
            Method::F16 => dispatch(self.instruction_set, Decode::<F16, ADD>::new(encoded, out)),
            _ => dispatch(self.instruction_set, Decode::<F32, ADD>::new(encoded, out)),
        }
        Ok(())
    }
}

impl Codec for Cast {
    fn spec(&self) -> &CodecSpec {
        &self.spec
    }

    fn granule(&self) -> u64 {
        1
    }

    fn is_fixed_size(&self) -> bool {
        true
    }

    fn is_unbiased(&self) -> bool {
        self.spec.is_lossless()
    }

    fn max_wire_bytes(&self, elements: usize) -> usize {
        elements * if self.spec.is_lossless() { F32::BYTES } else { F16::BYTES }
    }

    fn encode(
        &self,
        key: &DrawKey,
        values: &[f32],
        residual: Option<&mut [f32]>,
        out: &mut [u8],
    ) -> usize {
        check_arguments(self, key, values, residual.as_deref(), out);
        let bytes = self.max_wire_bytes(values.len());
        let out = &mut out[..bytes];
        match &self.spec.method {
            Method::Bf16 => encode_as::<Bf16>(self.instruction_set, values, residual, out),
            Method::F16 => encode_as::<F16>(self.instruction_set, values, residual, out),
            _ => encode_as::<F32>(self.instruction_set, values, residual, out),
        }
        bytes
    }

    fn decode(&self, encoded: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
        self.decode_to::<false>(encoded, out)
    }

    fn decode_add(&self, encoded: &[u8], sum: &mut [f32]) -> Result<(), DecodeError> {
        self.decode_to::<true>(encoded, sum)
    }
}

/// Moves sixteen elements between memory and registers; for f32, f16 and bf16.
pub(super) trait Elements: Element<Accumulator = f32> {
    /// Reads and widens sixteen elements.
    ///
    /// # Safety
    ///
    /// Runs where the instructions of `R` are enabled; the elements are readable.
    unsafe fn load_wide<R: Lanes, const N: usize>(from: *const u8) -> Wide<R, N>
    where
        F16: Storage<R>,
        Bf16: Storage<R>;

    /// Rounds to sixteen elements and writes them.
    ///
    /// # Safety
    ///
    /// Runs where the instructions of `R` are enabled; the elements are writable.
    unsafe fn store_wide<R: Lanes, const N: usize>(value: Wide<R, N>, to: *mut u8)
    where
        F16: Storage<R>,
        Bf16: Storage<R>;
}

macro_rules! elements {
    ($($element:ident)*) => {$(
        impl Elements for $element {
            #[inline(always)]
            unsafe fn load_wide<R: Lanes, const N: usize>(from: *const u8) -> Wide<R, N>
            where
                F16: Storage<R>,
                Bf16: Storage<R>,
            {
                // SAFETY: forwarded, the caller's promise covers it.
                unsafe { Wide::load_as::<$element>(from) }
            }

            #[inline(always)]
            unsafe fn store_wide<R: Lanes, const N: usize>(value: Wide<R, N>, to: *mut u8)
            where
                F16: Storage<R>,
                Bf16: Storage<R>,
            {
                // SAFETY: forwarded, the caller's promise covers it.
                unsafe { value.store_as::<$element>(to) }
            }
        }
    )*};
}
elements!(F32 F16 Bf16);

/// The bits of infinity: those of finite numbers are below, but for the sign.
const INFINITY: u32 = 0x7f80_0000;

fn encode_as<E: Elements>(
    instruction_set: InstructionSet,
    values: &[f32],
    residual: Option<&mut [f32]>,
    out: &mut [u8],
) {
    assert_eq!(out.len(), values.len() * E::BYTES, "room for every element");
    let elements = values.len();
    match residual {
        None => {
            dispatch(
                instruction_set,
                Encode::<E, false>::new(Source::plain(values), elements, out),
            );
        }
        Some(residual) => {
            let source = Source::keeping(values, residual);
            dispatch(instruction_set, Encode::<E, true>::new(source, elements, out));
        }
    }
}

/// The encoding of values as elements `E`; `out` has room for as many as the source has.
struct Encode<'a, E, const KEEP: bool> {
    source: Source<KEEP>,
    elements: usize,
    out: &'a mut [u8],
    element: std::marker::PhantomData<E>,
}

impl<'a, E: Elements, const KEEP: bool> Encode<'a, E, KEEP> {
    fn new(source: Source<KEEP>, elements: usize, out: &'a mut [u8]) -> Self {
        Encode { source, elements, out, element: std::marker::PhantomData }
    }

    /// Encodes the elements from `start` on, one after another.
    #[inline(always)]
    fn rest(&mut self, start: usize) {
        for at in start..self.elements {
            // SAFETY: source and bytes have that many elements.
            unsafe {
                let to = self.out.as_mut_ptr().add(at * E::BYTES);
                let wanted = self.source.wanted_one(at);
                <E as Storage<f32>>::store(wanted, to);
                let sent = <E as Storage<f32>>::load(to);
                // What becomes infinite, or was, keeps its residual.
                if sent.is_finite() {
                    self.source.keep_one(at, wanted, sent);
                }
            }
        }
    }
}

impl<E: Elements, const KEEP: bool> Work for Encode<'_, E, KEEP> {
    type Output = ();

    fn run_plainly(mut self) {
        self.rest(0);
    }

    #[inline(always)]
    unsafe fn run<R, const N: usize>(mut self)
    where
        R: Lanes,
        F16: Storage<R>,
        Bf16: Storage<R>,
    {
        let mut at = 0;
        // SAFETY: the caller enables the instructions; sixteen elements from `at` on are in range.
        unsafe {
            while self.elements - at >= WIDTH {
                let to = self.out.as_mut_ptr().add(at * E::BYTES);
                self.source.fetch(at + AHEAD);
                let wanted = self.source.wanted::<R, N>(at);
                E::store_wide(wanted, to);
                if KEEP {
                    let sent = E::load_wide::<R, N>(to);
                    let magnitude = Words::and(Wide::words(sent), Words::same(!(1 << 31)));
                    let finite = Words::less(magnitude, Words::same(INFINITY));
                    self.source.keep_where(at, finite, wanted, sent);
                }
                at += WIDTH;
            }
        }
        self.rest(at);
    }
}

/// The decoding of elements `E`, as many as `out` has; `ADD` adds them to what it holds.
struct Decode<'a, E, const ADD: bool> {
    encoded: &'a [u8],
    out: &'a mut [f32],
    element: std::marker::PhantomData<E>,
}

impl<'a, E: Elements, const ADD: bool> Decode<'a, E, ADD> {
    fn new(encoded: &'a [u8], out: &'a mut [f32]) -> Self {
        assert_eq!(encoded.len(), out.len() * E::BYTES, "the length was checked");
        Decode { encoded, out, element: std::marker::PhantomData }
    }

    /// Decodes the elements from `start` on, one after another.
    #[inline(always)]
    fn rest(self, start: usize) {
        for (at, slot) in self.out.iter_mut().enumerate().skip(start) {
            // SAFETY: there are as many elements as slots.
            let value =
                unsafe { <E as Storage<f32>>::load(self.encoded.as_ptr().add(at * E::BYTES)) };
            *slot = if ADD { *slot + value } else { value };
        }
    }
}

impl<E: Elements, const ADD: bool> Work for Decode<'_, E, ADD> {
    type Output = ();

    fn run_plainly(self) {
        self.rest(0);
    }

    #[inline(always)]
    unsafe fn run<R, const N: usize>(self)
    where
        R: Lanes,
        F16: Storage<R>,
        Bf16: Storage<R>,
    {
        let mut at = 0;
        // SAFETY: the caller enables the instructions; sixteen elements from `at` on are in range.
        unsafe {
            while self.out.len() - at >= WIDTH {
                let value = E::load_wide::<R, N>(self.encoded.as_ptr().add(at * E::BYTES));
                let to = self.out.as_mut_ptr().add(at);
                let value = if ADD { Wide::add(Wide::load(to), value) } else { value };
                value.store(to);
                at += WIDTH;
            }
        }
        self.rest(at);
    }
}

/// Reads as many elements of two or four bytes as there are values.
pub(super) fn widen_from<E: Elements>(
    instruction_set: InstructionSet,
    elements: &[u8],
    values: &mut [f32],
) {
    dispatch(instruction_set, Decode::<E, false>::new(elements, values));
}

/// Writes values as elements of two or four bytes.
pub(super) fn narrow_to<E: Elements>(
    instruction_set: InstructionSet,
    values: &[f32],
    elements: &mut [u8],
) {
    encode_as::<E>(instruction_set, values, None, elements);
}
