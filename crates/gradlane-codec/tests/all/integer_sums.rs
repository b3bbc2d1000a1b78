//! Sums of codes over ranks: what is added up is what each rank rounded, to the last bit, in the layout
//! that the documentation states, by every variant alike.

use crate::common::codecs::{assert_same_floats, gradients, key, Floats};
use crate::common::{Numbers, Placed};
use gradlane_codec::{CodecSpec, DecodeError, DrawKey, InstructionSet, IntegerSums};
use proptest::prelude::*;

fn sums_of(instruction_set: InstructionSet, text: &str, ranks: u32) -> IntegerSums {
    let spec: CodecSpec = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
    IntegerSums::with(instruction_set, &spec, ranks).expect("it fits").expect("sums")
}

/// A rank's part: none where it has no gradient.
type Part = Option<(Vec<f32>, Option<Vec<f32>>)>;

/// The scales, the sums, the means and what each rank keeps.
type Round = (Vec<u8>, Vec<u8>, Vec<f32>, Vec<Option<Vec<f32>>>);

/// What a ring makes of the ranks' parts.
fn round(sums: &IntegerSums, elements: usize, parts: &[Part]) -> Round {
    let mut scales = vec![0; sums.scale_bytes(elements)];
    for (values, residual) in parts.iter().flatten() {
        let mut values = Floats::holding(values, elements % 3);
        sums.max_scales(values.as_mut(), residual.as_deref(), &mut scales);
        values.assert_guards();
    }
    let mut out = Placed::room(sums.sum_bytes(elements), elements % 5);
    sums.begin(&scales, elements, out.as_mut()).expect("its own scales");
    let zeros = vec![0.0; elements];
    let mut kept = Vec::new();
    for (rank, part) in parts.iter().enumerate() {
        let key = DrawKey { leg: rank as u32, ..key(0) };
        let (values, residual) = part.clone().unwrap_or((zeros.clone(), None));
        let mut residual = residual.map(|it| Floats::holding(&it, elements % 3 + 1));
        let lent = residual.as_mut().map(Floats::as_mut);
        sums.add(&key, &values, lent, out.as_mut()).expect("its own sums");
        kept.push(residual.map(|mut it| {
            it.assert_guards();
            it.as_mut().to_vec()
        }));
    }
    out.assert_guards();
    let mut means = vec![f32::MAX; elements];
    sums.mean(out.as_ref(), &mut means).expect("its own sums");
    (scales, out.as_ref().to_vec(), means, kept)
}

fn parts(elements: usize, ranks: u32, keep: bool, seed: u64) -> Vec<Part> {
    let part = |rank: u32| {
        let values = gradients(seed + u64::from(rank), elements);
        (values, keep.then(|| gradients(seed + 1000 + u64::from(rank), elements)))
    };
    (0..ranks).map(|rank| Some(part(rank))).collect()
}

const TEXTS: &[&str] = &[
    "qsgd:bits=2,ring=integer",
    "qsgd:bits=4,ring=integer",
    "qsgd:bits=8,ring=integer",
    "qsgd:bits=16,ring=integer,bucket=256",
    "qsgd:bits=8,ring=integer,bucket=96,norm=l2",
];

#[test]
fn variants_give_the_bits_of_the_oracle() {
    for instruction_set in InstructionSet::available() {
        for text in TEXTS {
            for (elements, ranks) in [
                (0, 3),
                (1, 2),
                (63, 5),
                (64, 7),
                (65, 3),
                (127, 9),
                (128, 2),
                (129, 40),
                (3000, 6),
            ] {
                let given = parts(elements, ranks, elements % 2 == 0, 9);
                let found = round(&sums_of(instruction_set, text, ranks), elements, &given);
                let right = round(&sums_of(InstructionSet::SCALAR, text, ranks), elements, &given);
                let what =
                    || format!("{text} {instruction_set}, {elements} values of {ranks} ranks");
                assert_eq!((&found.0, &found.1), (&right.0, &right.1), "{}", what());
                assert_same_floats(&found.2, &right.2, &what);
                for (found, right) in found.3.iter().zip(&right.3) {
                    assert_eq!(found.is_some(), right.is_some());
                    if let (Some(found), Some(right)) = (found, right) {
                        assert_same_floats(found, right, &what);
                    }
                }
            }
        }
    }
}

/// Reads a bucket's sums bit by bit from the layout as `docs/codecs.md` states it.
fn read_plainly(width: u32, elements: usize, bytes: &[u8]) -> Vec<u32> {
    let mut sums = vec![0_u32; elements];
    let (mut start, mut shift) = (0, 0);
    for bits in [16_usize, 8, 4, 2, 1].into_iter().filter(|&bits| width as usize & bits != 0) {
        for (index, sum) in sums.iter_mut().enumerate() {
            let code = if bits >= 8 {
                let at = start + index * bits / 8;
                (0..bits / 8).map(|byte| u32::from(bytes[at + byte]) << (8 * byte)).sum::<u32>()
            } else {
                let (per_byte, block) = (8 / bits, 128 / bits);
                let within = index % block;
                let count = (elements - (index - within)).min(block);
                let used = count.div_ceil(per_byte);
                let byte = bytes[start + (index - within) / per_byte + within % used];
                u32::from(byte) >> (within / used * bits) & ((1 << bits) - 1)
            };
            *sum |= code << shift;
        }
        start += (elements * bits).div_ceil(8);
        shift += bits;
    }
    assert_eq!(start, bytes.len());
    sums
}

#[test]
fn the_bytes_are_those_of_the_documentation() {
    for (text, half, ranks) in [(TEXTS[0], 1, 5), (TEXTS[1], 7, 3), (TEXTS[2], 127, 4)] {
        let sums = sums_of(InstructionSet::active(), text, ranks);
        for elements in [1, 63, 64, 65, 100, 128] {
            let given = parts(elements, ranks, false, 4);
            let (scales, bytes, means, _) = round(&sums, elements, &given);
            assert_eq!(bytes[..4], scales[..4], "a bucket begins with its scale");
            let scale = f32::from_le_bytes(scales[..4].try_into().unwrap());
            let largest = given.iter().flatten().flat_map(|(values, _)| values);
            assert_eq!(scale, largest.fold(0.0_f32, |top, value| top.max(value.abs())));
            let zero = half * ranks;
            let level = scale / zero as f32;
            let read = read_plainly(sums.bits(), elements, &bytes[4..]);
            let most = read.iter().copied().max().unwrap_or(0);
            assert!(most <= 2 * zero && 2 * zero < 1 << sums.bits());
            let right = |sum: &u32| (*sum as i32 - zero as i32) as f32 * level;
            assert_eq!(means, read.iter().map(right).collect::<Vec<f32>>());
        }
    }
}

#[test]
fn the_mean_is_within_a_level_of_the_exact_one() {
    for (text, half) in [(TEXTS[1], 7.0), (TEXTS[2], 127.0), (TEXTS[3], 32767.0)] {
        let (elements, ranks) = (5_000, 7);
        let given = parts(elements, ranks, false, 1);
        let (_, _, means, _) =
            round(&sums_of(InstructionSet::active(), text, ranks), elements, &given);
        let exact = |index: usize| {
            let all = given.iter().flatten().map(|(values, _)| f64::from(values[index]));
            all.sum::<f64>() / f64::from(ranks)
        };
        let top = given.iter().flatten().flat_map(|it| &it.0).fold(0.0_f32, |a, b| a.max(b.abs()));
        let worst =
            (0..elements).map(|it| (exact(it) - f64::from(means[it])).abs()).fold(0.0, f64::max);
        assert!(worst <= f64::from(top) / half * 1.0001, "{text}: off by {worst}");
        // Unbiased: the mean of 5,000 errors of at most a level and 7 ranks each.
        let bias = (0..elements).map(|it| exact(it) - f64::from(means[it])).sum::<f64>();
        let bias = (bias / elements as f64).abs();
        let deviation = f64::from(top) / half / (4.0 * elements as f64 * f64::from(ranks)).sqrt();
        // Six standard deviations: the seeds are fixed, another one fails once in 5e8.
        assert!(bias < 6.0 * deviation, "{text}: biased by {bias}");
    }
}

#[test]
fn what_is_not_sent_is_kept() {
    let (elements, ranks) = (1_500, 3);
    let given = parts(elements, ranks, true, 2);
    let (_, _, means, kept) =
        round(&sums_of(InstructionSet::active(), TEXTS[1], ranks), elements, &given);
    let parts = given.iter().flatten();
    let top = parts.flat_map(|it| &it.0).fold(0.0_f32, |top, value| top.max(value.abs()));
    for index in 0..elements {
        let wanted: f64 = given
            .iter()
            .flatten()
            .map(|(values, residual)| f64::from(values[index] + residual.as_ref().unwrap()[index]))
            .sum();
        let left: f64 = kept.iter().map(|it| f64::from(it.as_ref().unwrap()[index])).sum();
        let sent = f64::from(means[index]) * f64::from(ranks);
        assert!((wanted - left - sent).abs() <= 1e-6 * f64::from(top), "element {index}");
    }
}

#[test]
fn a_rank_without_a_gradient_adds_zeros() {
    let elements = 700;
    let sums = sums_of(InstructionSet::active(), TEXTS[2], 3);
    let mut given = parts(elements, 3, false, 3);
    given[1] = None;
    let (_, _, means, _) = round(&sums, elements, &given);
    given[1] = Some((vec![0.0; elements], None));
    assert_eq!(means, round(&sums, elements, &given).2);
    let none = round(&sums, elements, &[None, None, None]);
    assert!(none.2.iter().all(|it| it.to_bits() == 0));
}

#[test]
fn what_is_not_finite_reaches_everyone_and_stays_in_its_bucket() {
    let elements = 1_100;
    let sums = sums_of(InstructionSet::active(), TEXTS[2], 3);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut given = parts(elements, 3, true, 5);
        let before = given.clone();
        given[2].as_mut().unwrap().0[600] = bad;
        let (_, _, means, kept) = round(&sums, elements, &given);
        for (index, mean) in means.iter().enumerate() {
            assert_eq!(mean.is_nan(), (512..1024).contains(&index), "element {index}");
        }
        for (kept, before) in kept.iter().zip(before.iter().flatten()) {
            assert_eq!(kept.as_ref().unwrap()[512..1024], before.1.as_ref().unwrap()[512..1024]);
        }
    }
}

#[test]
fn a_scale_below_the_values_is_refused() {
    for instruction_set in InstructionSet::available() {
        let sums = sums_of(instruction_set, TEXTS[1], 2);
        let values = gradients(1, 1_000);
        for scale in [0.0, 1e-9, -1.0, f32::INFINITY, f32::from_bits(1)] {
            let mut out = vec![0; sums.sum_bytes(1_000)];
            let scales = [scale, 1.0].map(f32::to_le_bytes).concat();
            sums.begin(&scales, 1_000, &mut out).expect("two scales");
            let found = sums.add(&key(0), &values, None, &mut out);
            assert_eq!(found, Err(DecodeError::Scale { bucket: 0 }), "{scale}");
        }
    }
}

#[test]
fn lengths_are_checked() {
    let sums = sums_of(InstructionSet::active(), TEXTS[1], 2);
    let mut short = vec![0; sums.sum_bytes(100) - 1];
    assert!(matches!(sums.mean(&short, &mut [0.0; 100]), Err(DecodeError::Length { .. })));
    let added = sums.add(&key(0), &[0.0; 100], None, &mut short);
    assert!(matches!(added, Err(DecodeError::Length { .. })));
    let begun = sums.begin(&[0; 5], 100, &mut vec![0; sums.sum_bytes(100)]);
    assert!(matches!(begun, Err(DecodeError::Length { .. })));
}

#[test]
fn a_sum_has_room_for_all_ranks_or_is_refused() {
    let spec: CodecSpec = "qsgd:bits=8,ring=integer".parse().unwrap();
    for (ranks, bits) in [(2, 9), (3, 10), (4, 10), (5, 11), (8, 11), (9, 12), (65_536, 24)] {
        assert_eq!(IntegerSums::new(&spec, ranks).unwrap().unwrap().bits(), bits, "{ranks}");
    }
    let error = IntegerSums::new(&spec, 65_537).expect_err("25 bits");
    assert!(error.contains("ring=hops"), "{error}");
    let hops: CodecSpec = "qsgd:bits=8,ring=hops".parse().unwrap();
    assert!(IntegerSums::new(&hops, 4).unwrap().is_none());
    assert_eq!(hops.to_string(), "qsgd:bits=8,bucket=512,norm=max,levels=sign");
    assert_eq!(spec.to_string(), "qsgd:bits=8,bucket=512,norm=max,levels=sign,ring=integer");
    let uniform = "qsgd:levels=uniform,ring=integer".parse::<CodecSpec>().expect_err("no zeros");
    assert!(uniform.to_string().contains("levels"), "{uniform}");
}

#[test]
fn a_sum_of_the_most_ranks_does_not_overflow() {
    // Every rank sends the largest code of every value.
    let spec: CodecSpec = "qsgd:bits=4,ring=integer".parse().unwrap();
    for ranks in [2_u32, 3, 64, 1000] {
        let sums = IntegerSums::new(&spec, ranks).unwrap().unwrap();
        let given: Vec<Part> = (0..ranks).map(|_| Some((vec![2.0; 300], None))).collect();
        let (_, _, means, _) = round(&sums, 300, &given);
        let level = 2.0 / (7 * ranks) as f32;
        assert!(means.iter().all(|it| *it == (7 * ranks) as f32 * level), "{ranks}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    /// Whatever bytes come, all variants make the same of them, and nothing panics.
    #[test]
    fn any_bytes_are_sums_or_an_error(
        text in proptest::sample::select(TEXTS),
        elements in 1..700_usize,
        ranks in 1..40_u32,
        seed in any::<u64>(),
    ) {
        let plain = sums_of(InstructionSet::SCALAR, text, ranks);
        let mut numbers = Numbers(seed);
        let mut bytes: Vec<u8> =
            (0..plain.sum_bytes(elements)).map(|_| numbers.next() as u8).collect();
        if seed % 2 == 0 {
            bytes[..4].copy_from_slice(&1.5_f32.to_le_bytes());
        }
        let values = gradients(seed, elements);
        let run = |instruction_set: InstructionSet| {
            let sums = sums_of(instruction_set, text, ranks);
            let mut out = bytes.clone();
            let mut means = vec![0.0; elements];
            sums.mean(&out, &mut means).expect("the right length");
            let added = sums.add(&key(0), &values, None, &mut out);
            (added.clone(), added.is_ok().then_some(out), means)
        };
        let right = run(InstructionSet::SCALAR);
        for instruction_set in InstructionSet::available() {
            let found = run(instruction_set);
            prop_assert_eq!(&found.0, &right.0);
            prop_assert_eq!(&found.1, &right.1);
            assert_same_floats(&found.2, &right.2, &|| format!("{text} {instruction_set}"));
        }
    }
}
