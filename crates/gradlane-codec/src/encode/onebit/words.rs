//! The packing of bits in CNTK (`ColumnQuantizer.h`): a column has whole words of 32 bits, and of W words
//! bit k of word w, from the lowest, is that of value w + k W. Bits that no value needs are 0.

const WORD_BITS: usize = 32;
const WORD_BYTES: usize = WORD_BITS / 8;

/// Bytes of the words of a column.
pub(super) fn bytes(elements: usize) -> usize {
    elements.div_ceil(WORD_BITS) * WORD_BYTES
}

/// The bit of a value in the words, counted from the lowest of the first byte.
fn bit_in_words(value: usize, words: usize) -> usize {
    value % words * WORD_BITS + value / words
}

/// Writes bits, of which value i has bit i mod 8 of byte i / 8, as words.
pub(super) fn pack(elements: usize, bits: &[u8], out: &mut [u8]) {
    let words = out.len() / WORD_BYTES;
    out.fill(0);
    for value in 0..elements {
        let to = bit_in_words(value, words);
        out[to / 8] |= (bits[value / 8] >> (value % 8) & 1) << (to % 8);
    }
}

/// The opposite of [`pack`]; `bits` are zeros before.
pub(super) fn unpack(elements: usize, packed: &[u8], bits: &mut [u8]) {
    let words = packed.len() / WORD_BYTES;
    for value in 0..elements {
        let from = bit_in_words(value, words);
        bits[value / 8] |= (packed[from / 8] >> (from % 8) & 1) << (value % 8);
    }
}
