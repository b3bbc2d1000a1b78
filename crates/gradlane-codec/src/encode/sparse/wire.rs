//! The bytes of a sparse slice: how many values, the values, and where they belong.
//!
//! | bytes | what |
//! | --- | --- |
//! | 4 | number of values, `count` (u32) |
//! | 4 × `count` | the values (f32), by increasing position |
//! | the rest | `count` numbers: how many positions are passed over before each value |
//!
//! With codes of few bits in place of the values, see `coded`.
//!
//! Numbers are little-endian; those passed over are of variable length, seven bits a byte, the
//! lowest first, and the highest bit says that more follow. Every set of values has exactly one
//! spelling: a position cannot occur twice, and spellings that are longer than necessary, positions
//! past the end and bytes left over are refused.

use thiserror::Error;

/// Bytes of the count.
pub(super) const COUNT_BYTES: usize = 4;
/// Bytes of a value.
const VALUE_BYTES: usize = 4;
/// Bits of a number that one byte holds.
const GROUP_BITS: u32 = 7;
/// The bit that says that more bytes follow.
const MORE: u8 = 0x80;

/// Bytes that are no sparse slice.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SparseError {
    /// The bytes end inside of the count, the values or the positions.
    #[error("{bytes} bytes are too few for {count} sparse values")]
    TooShort {
        /// How many bytes there are.
        bytes: usize,
        /// How many values they were to hold.
        count: usize,
    },
    /// There are more values than the slice has elements.
    #[error("{count} sparse values do not fit a slice of {elements} elements")]
    TooMany {
        /// How many values the bytes claim.
        count: usize,
        /// Elements of the slice.
        elements: usize,
    },
    /// A position lies past the end of the slice.
    #[error("sparse value {value} lies past the end of a slice of {elements} elements")]
    PastTheEnd {
        /// Which value, from 0.
        value: usize,
        /// Elements of the slice.
        elements: usize,
    },
    /// A number is spelled longer than necessary, or is larger than any position.
    #[error("the position of sparse value {value} is not spelled as positions are")]
    Misspelled {
        /// Which value, from 0.
        value: usize,
    },
    /// Bytes follow the last position.
    #[error("{bytes} bytes follow the last sparse value")]
    LeftOver {
        /// How many.
        bytes: usize,
    },
}

/// The most bytes that `count` values of a slice of this many elements take.
///
/// The positions passed over are no more than the elements, so that at most one in 128 elements
/// makes a number longer than a byte, one in 128² longer than two, and so on.
pub(crate) fn bytes_max(count: usize, elements: usize) -> usize {
    COUNT_BYTES + count * VALUE_BYTES + position_bytes_max(count, elements)
}

/// The most bytes that the positions of `count` values take.
pub(super) fn position_bytes_max(count: usize, elements: usize) -> usize {
    let mut bytes = count;
    let mut passable = elements >> GROUP_BITS;
    while passable > 0 {
        bytes += count.min(passable);
        passable >>= GROUP_BITS;
    }
    bytes
}

/// The bytes that `count` values of a slice take on average, at places that are drawn.
pub(crate) fn expected_bytes(count: usize, elements: usize) -> usize {
    COUNT_BYTES + count * VALUE_BYTES + expected_position_bytes(count, elements)
}

/// The bytes that the positions of `count` values take on average: a number is longer than a byte
/// where no value lies in 128 places, longer than two where none lies in 128² places, and so on.
pub(super) fn expected_position_bytes(count: usize, elements: usize) -> usize {
    let empty = 1.0 - count as f64 / elements.max(1) as f64;
    let mut bytes = count as f64;
    let mut places = 1_u64 << GROUP_BITS;
    while places <= elements as u64 {
        bytes += count as f64 * empty.powf(places as f64);
        places <<= GROUP_BITS;
    }
    bytes.round() as usize
}

/// Writes the values at these increasing positions and returns how many bytes that took.
///
/// A value is the first of `WIDTH` numbers.
///
/// # Panics
///
/// If `bytes` is shorter than [`bytes_max`], or a position is not within the values.
pub(crate) fn write<const WIDTH: usize>(
    values: &[[f32; WIDTH]],
    positions: &[u32],
    bytes: &mut [u8],
) -> usize {
    bytes[..COUNT_BYTES].copy_from_slice(&(positions.len() as u32).to_le_bytes());
    let (chosen, rest) = bytes[COUNT_BYTES..].split_at_mut(positions.len() * VALUE_BYTES);
    for (target, &at) in chosen.chunks_exact_mut(VALUE_BYTES).zip(positions) {
        target.copy_from_slice(&values[at as usize][0].to_le_bytes());
    }
    COUNT_BYTES + chosen.len() + write_positions(positions, rest)
}

/// Writes increasing positions to the front of `rest` and returns how many bytes that took.
pub(super) fn write_positions(positions: &[u32], mut rest: &mut [u8]) -> usize {
    let room = rest.len();
    let mut next = 0;
    for &at in positions {
        let mut passed = at - next;
        while passed >= u32::from(MORE) {
            rest[0] = passed as u8 | MORE;
            rest = &mut rest[1..];
            passed >>= GROUP_BITS;
        }
        rest[0] = passed as u8;
        rest = &mut rest[1..];
        next = at + 1;
    }
    room - rest.len()
}

/// Calls `take` with each position and value; positions increase and lie within the elements.
///
/// # Errors
///
/// [`SparseError`] if the bytes are no sparse slice of this many elements; some may be taken by then.
pub(crate) fn read(
    bytes: &[u8],
    elements: usize,
    mut take: impl FnMut(usize, f32),
) -> Result<(), SparseError> {
    let (count, values, positions) =
        parts(bytes, elements, |count| count.checked_mul(VALUE_BYTES))?;
    walk(count, positions, elements, |value, at| {
        let own = &values[value * VALUE_BYTES..][..VALUE_BYTES];
        take(at, f32::from_le_bytes([own[0], own[1], own[2], own[3]]));
    })
}

/// The number of values, their bytes, of which `value_bytes` says how many there are, and those of
/// the positions.
pub(super) fn parts(
    bytes: &[u8],
    elements: usize,
    value_bytes: impl Fn(usize) -> Option<usize>,
) -> Result<(usize, &[u8], &[u8]), SparseError> {
    let short = |count| SparseError::TooShort { bytes: bytes.len(), count };
    let (count, rest) = bytes.split_first_chunk::<COUNT_BYTES>().ok_or(short(0))?;
    let count = u32::from_le_bytes(*count) as usize;
    if count > elements {
        return Err(SparseError::TooMany { count, elements });
    }
    let value_bytes = value_bytes(count).ok_or(short(count))?;
    let (values, positions) = rest.split_at_checked(value_bytes).ok_or(short(count))?;
    Ok((count, values, positions))
}

/// Calls `take` with the number of each value and its position.
pub(super) fn walk(
    count: usize,
    positions: &[u8],
    elements: usize,
    mut take: impl FnMut(usize, usize),
) -> Result<(), SparseError> {
    let mut rest = positions.iter();
    let mut next = 0_u64;
    for value in 0..count {
        let (mut passed, mut shift) = (0_u64, 0);
        loop {
            let Some(&byte) = rest.next() else {
                return Err(SparseError::TooShort { bytes: positions.len(), count });
            };
            passed |= u64::from(byte & !MORE) << shift;
            shift += GROUP_BITS;
            if byte & MORE == 0 {
                // A last group of zeros says nothing that the one before had not said.
                if byte == 0 && shift > GROUP_BITS {
                    return Err(SparseError::Misspelled { value });
                }
                break;
            }
            if shift > u32::BITS {
                return Err(SparseError::Misspelled { value });
            }
        }
        let at = next + passed;
        if at >= elements as u64 {
            return Err(SparseError::PastTheEnd { value, elements });
        }
        take(value, at as usize);
        next = at + 1;
    }
    match rest.len() {
        0 => Ok(()),
        bytes => Err(SparseError::LeftOver { bytes }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spelled(values: &[f32], positions: &[u32]) -> Vec<u8> {
        let mut bytes = vec![0xaa; bytes_max(positions.len(), values.len())];
        let used = write(values.as_chunks::<1>().0, positions, &mut bytes);
        bytes.truncate(used);
        bytes
    }

    fn taken(bytes: &[u8], elements: usize) -> Result<Vec<(usize, f32)>, SparseError> {
        let mut found = Vec::new();
        read(bytes, elements, |at, value| found.push((at, value)))?;
        Ok(found)
    }

    #[test]
    fn the_layout_is_as_documented() {
        let mut values = vec![0.0; 1_000];
        (values[3], values[4], values[700]) = (1.5, -2.0, 0.25);
        let bytes = spelled(&values, &[3, 4, 700]);
        let mut expected = vec![3, 0, 0, 0];
        expected.extend([1.5_f32, -2.0, 0.25].iter().flat_map(|value| value.to_le_bytes()));
        // 3 passed over, none, and 695 = 5 * 128 + 55.
        expected.extend([3, 0, 55 | 0x80, 5]);
        assert_eq!(bytes, expected);
        assert_eq!(taken(&bytes, 1_000).unwrap(), [(3, 1.5), (4, -2.0), (700, 0.25)]);
    }

    #[test]
    fn hostile_bytes_are_refused_for_what_they_are() {
        let good = spelled(&[1.0; 300], &[7, 299]);
        assert!(taken(&good, 300).is_ok());
        assert_eq!(taken(&good, 299), Err(SparseError::PastTheEnd { value: 1, elements: 299 }));
        assert_eq!(taken(&good, 1), Err(SparseError::TooMany { count: 2, elements: 1 }));
        let mut longer = good.clone();
        longer.push(0);
        assert_eq!(taken(&longer, 300), Err(SparseError::LeftOver { bytes: 1 }));
        for length in 0..good.len() {
            assert!(matches!(taken(&good[..length], 300), Err(SparseError::TooShort { .. })));
        }
        let one = |positions: &[u8]| {
            let mut bytes = vec![1, 0, 0, 0, 0, 0, 0, 0];
            bytes.extend(positions);
            taken(&bytes, usize::MAX)
        };
        assert_eq!(one(&[0x80, 0]), Err(SparseError::Misspelled { value: 0 }));
        assert_eq!(one(&[0xff; 9]), Err(SparseError::Misspelled { value: 0 }));
        assert_eq!(
            taken(&u32::MAX.to_le_bytes(), 5),
            Err(SparseError::TooMany { count: u32::MAX as usize, elements: 5 })
        );
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_within_the_bound(
            chosen in proptest::collection::btree_set(0..40_000_u32, 0..200),
        ) {
            let values: Vec<f32> = (0..40_000).map(|at| at as f32).collect();
            let positions: Vec<u32> = chosen.into_iter().collect();
            let bytes = spelled(&values, &positions);
            let found = taken(&bytes, values.len()).unwrap();
            let expected: Vec<_> =
                positions.iter().map(|&at| (at as usize, values[at as usize])).collect();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn any_bytes_are_read_or_refused(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            elements in 0..400_usize,
        ) {
            let mut last = None;
            let result = read(&bytes, elements, |at, _| {
                assert!(at < elements && last < Some(at));
                last = Some(at);
            });
            if result.is_ok() {
                // One spelling for everything: what was read is written back to the same bytes.
                let mut values = vec![0.0; elements];
                let mut positions = Vec::new();
                read(&bytes, elements, |at, value| {
                    values[at] = value;
                    positions.push(at as u32);
                }).unwrap();
                prop_assert_eq!(spelled(&values, &positions), bytes);
            }
        }
    }
}
