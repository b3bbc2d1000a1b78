//! `topk` and `dgc` as codecs: what is sent and kept, against plain restatements of the papers.

use gradlane_codec::{
    build_with, Codec, CodecSpec, DecodeError, DrawKey, InstructionSet, TensorShape,
};
use proptest::prelude::*;
use std::sync::Arc;

fn codec(instruction_set: InstructionSet, text: &str) -> Arc<dyn Codec> {
    let spec: CodecSpec = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
    build_with(instruction_set, &spec, &TensorShape::new(&[1]))
}

fn key(step: u64, leg: u32) -> DrawKey {
    DrawKey { seed: 7, step, tensor: 3, leg, first_element: 0 }
}

/// Encodes, with a look at the bound, and gives the bytes and what they decode to.
fn sent(
    codec: &dyn Codec,
    key: &DrawKey,
    values: &[f32],
    residual: Option<&mut [f32]>,
) -> (Vec<u8>, Vec<f32>) {
    let mut bytes = vec![0xaa; codec.max_wire_bytes_at(key, values.len())];
    let used = codec.encode(key, values, residual, &mut bytes);
    bytes.truncate(used);
    let mut decoded = vec![f32::NAN; values.len()];
    codec.decode(&bytes, &mut decoded).expect("own bytes decode");
    (bytes, decoded)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Numbers that look like a gradient: of both signs and many magnitudes.
fn gradient(seed: u32, elements: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    (0..elements).map(|_| next() * next() * next()).collect()
}

#[test]
fn what_is_sent_and_kept_is_what_there_was() {
    for elements in [1, 63, 64, 65, 1_000, 50_000] {
        for instruction_set in InstructionSet::available() {
            let codec = codec(instruction_set, "topk:ratio=0.01");
            let mut residual = vec![0.0; elements];
            for step in 0..5 {
                let values = gradient(step + 1, elements);
                let before: Vec<f32> = values.iter().zip(&residual).map(|(a, b)| a + b).collect();
                let (_, decoded) =
                    sent(&*codec, &key(u64::from(step), 0), &values, Some(&mut residual));
                let after: Vec<f32> = decoded.iter().zip(&residual).map(|(a, b)| a + b).collect();
                assert_eq!(after, before, "{elements} elements, step {step}");
                let chosen = decoded.iter().filter(|&&value| value != 0.0).count();
                assert_eq!(chosen, elements.div_ceil(100));
                // Nothing that was kept is larger than what was sent.
                let least = decoded.iter().filter(|&&value| value != 0.0).map(|one| one.abs());
                let least = least.fold(f32::INFINITY, f32::min);
                assert!(residual.iter().all(|kept| kept.abs() <= least));
            }
        }
    }
}

#[test]
fn a_tensor_costs_six_bytes_for_a_thousand_elements() {
    let codec = codec(InstructionSet::active(), "topk:ratio=0.001");
    let values = gradient(5, 1_000_000);
    let (bytes, _) = sent(&*codec, &key(0, 0), &values, None);
    let bound = codec.max_wire_bytes(values.len());
    assert!(bytes.len() <= bound && bound < 6_200, "{} of at most {bound}", bytes.len());
    assert!(bytes.len() > 5_800, "four bytes a value and about two a position: {}", bytes.len());
}

#[test]
fn an_owner_may_send_more_than_a_worker() {
    let codec = codec(InstructionSet::active(), "topk:ratio=0.01,broadcast_ratio=0.04");
    let values = gradient(2, 1_000);
    let count = |leg| {
        let (_, decoded) = sent(&*codec, &key(0, leg), &values, None);
        decoded.iter().filter(|&&value| value != 0.0).count()
    };
    assert_eq!((count(0), count(3), count(DrawKey::BROADCAST)), (10, 10, 40));
}

#[test]
fn what_is_not_finite_arrives_and_is_not_kept() {
    let texts = ["topk:ratio=0.001", "dgc:ratio=0.001", "topk:ratio=0.002,bits=2,bucket=512"];
    for text in texts {
        let codec = codec(InstructionSet::active(), text);
        let mut residual = vec![0.0; 2_000 * codec.residual_width()];
        let mut values = gradient(9, 2_000);
        (values[17], values[18], values[1_999]) = (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
        let (_, decoded) = sent(&*codec, &key(0, 0), &values, Some(&mut residual));
        assert!(decoded.iter().any(|value| !value.is_finite()), "{text}: it was hidden");
        assert!(residual.iter().all(|kept| kept.is_finite()), "{text}: it was kept");
        let (_, decoded) = sent(&*codec, &key(1, 0), &gradient(10, 2_000), Some(&mut residual));
        assert!(decoded.iter().all(|value| value.is_finite()), "{text}: it came again");
    }
}

/// Algorithm 4 of Lin et al. 2018, one element at a time, with sorting as its selection.
fn dgc_by_the_paper(gradients: &[Vec<f32>], momentum: f32, counts: &[usize]) -> Vec<Vec<f32>> {
    let elements = gradients[0].len();
    let (mut u, mut v) = (vec![0.0_f32; elements], vec![0.0_f32; elements]);
    let mut sent = Vec::new();
    for (gradient, &count) in gradients.iter().zip(counts) {
        for at in 0..elements {
            u[at] = momentum * u[at] + gradient[at];
            v[at] += u[at];
        }
        let mut order: Vec<usize> = (0..elements).collect();
        order.sort_by(|&one, &other| v[other].abs().total_cmp(&v[one].abs()).then(one.cmp(&other)));
        let mut step = vec![0.0; elements];
        for &at in &order[..count] {
            step[at] = v[at];
            (u[at], v[at]) = (0.0, 0.0);
        }
        sent.push(step);
    }
    sent
}

#[test]
fn dgc_is_the_papers() {
    let gradients: Vec<Vec<f32>> = (1..=9).map(|step| gradient(step, 2_000)).collect();
    let counts = [500, 500, 125, 125, 32, 32, 20, 20, 20];
    let expected = dgc_by_the_paper(&gradients, 0.9, &counts);
    for instruction_set in InstructionSet::available() {
        let codec = codec(instruction_set, "dgc:ratio=0.01,momentum=0.9,warmup=8");
        let mut state = vec![0.0; 4_000];
        for (step, (gradient, expected)) in gradients.iter().zip(&expected).enumerate() {
            let (_, decoded) = sent(&*codec, &key(step as u64, 1), gradient, Some(&mut state));
            assert_eq!(bits(&decoded), bits(expected), "{} step {step}", instruction_set.name());
        }
    }
}

/// The compression of SparseLoCo (Sarfi et al. 2025), one element at a time: the error accumulator
/// decays, the largest of each bucket are sent, what their codes leave stays.
fn sparse_loco_by_the_paper(
    differences: &[Vec<f32>],
    (decay, count, bucket): (f32, usize, usize),
    sent_as: &[Vec<f32>],
) -> Vec<f32> {
    let mut error = vec![0.0_f32; differences[0].len()];
    for (difference, sent) in differences.iter().zip(sent_as) {
        for at in 0..error.len() {
            error[at] = decay * error[at] + difference[at];
        }
        for start in (0..error.len()).step_by(bucket) {
            let mut order: Vec<usize> = (start..error.len().min(start + bucket)).collect();
            order.sort_by(|&a, &b| error[b].abs().total_cmp(&error[a].abs()).then(a.cmp(&b)));
            let mut chosen = order[..count].to_vec();
            chosen.sort_unstable();
            let found: Vec<usize> =
                (start..error.len().min(start + bucket)).filter(|&at| sent[at] != 0.0).collect();
            assert_eq!(found, chosen);
            for at in chosen {
                assert_eq!(sent[at].signum(), error[at].signum());
                error[at] -= sent[at];
            }
        }
    }
    error
}

#[test]
fn codes_with_a_decay_are_sparse_locos() {
    let differences: Vec<Vec<f32>> = (1..=9).map(|step| gradient(step, 2_048)).collect();
    for (bits, count) in [(2, 6), (4, 6), (8, 6)] {
        for instruction_set in InstructionSet::available() {
            let text = format!("topk:ratio=0.01,bits={bits},bucket=512,decay=0.95");
            let codec = codec(instruction_set, &text);
            assert_eq!(codec.granule(), 512);
            let mut error = vec![0.0; 2_048];
            let mut sent_as = Vec::new();
            for (step, difference) in differences.iter().enumerate() {
                let (_, decoded) =
                    sent(&*codec, &key(step as u64, 1), difference, Some(&mut error));
                sent_as.push(decoded);
            }
            let expected = sparse_loco_by_the_paper(&differences, (0.95, count, 512), &sent_as);
            assert_eq!(self::bits(&error), self::bits(&expected), "{}", instruction_set.name());
        }
    }
}

#[test]
fn what_an_owner_keeps_does_not_decay() {
    let decaying = codec(InstructionSet::active(), "topk:ratio=0.01,bits=2,decay=0.5");
    let plain = codec(InstructionSet::active(), "topk:ratio=0.01,bits=2");
    let (mut one_error, mut other_error) = (vec![0.0; 1_000], vec![0.0; 1_000]);
    for step in 0..4 {
        let values = gradient(step + 1, 1_000);
        let at = key(u64::from(step), DrawKey::BROADCAST);
        let (one, _) = sent(&*decaying, &at, &values, Some(&mut one_error));
        let (other, _) = sent(&*plain, &at, &values, Some(&mut other_error));
        assert_eq!(one, other);
    }
}

#[test]
fn two_percent_at_two_bits_take_a_fifth_of_a_bit_a_value() {
    let codec = codec(InstructionSet::active(), "topk:ratio=0.02,bits=2,bucket=4096");
    let values = gradient(5, 1_024_000);
    let (bytes, decoded) = sent(&*codec, &key(0, 0), &values, None);
    let bits_a_value = bytes.len() as f64 * 8.0 / values.len() as f64;
    assert!(bits_a_value < 0.23, "{bits_a_value}");
    assert!(codec.max_wire_bytes(values.len()) as f64 * 8.0 / (values.len() as f64) < 0.29);
    assert_eq!(decoded.iter().filter(|&&it| it != 0.0).count(), 250 * 82);
}

#[test]
fn zeros_are_not_sent_as_codes() {
    let codec = codec(InstructionSet::active(), "topk:ratio=0.5,bits=2,bucket=64");
    let mut values = vec![0.0; 256];
    (values[7], values[200]) = (0.25, -3.0);
    for residual in [None, Some(&mut vec![0.0; 256][..])] {
        let (bytes, decoded) = sent(&*codec, &key(0, 0), &values, residual);
        assert_eq!(decoded, values);
        assert_eq!(bytes.len(), 4 + 4 * 8 + 1 + 3);
    }
    let (bytes, decoded) = sent(&*codec, &key(0, 0), &[0.0; 256], None);
    assert_eq!((bytes.len(), decoded), (4 + 4 * 8, vec![0.0; 256]));
}

#[test]
fn an_owner_has_no_momentum_of_its_own() {
    let dgc = codec(InstructionSet::active(), "dgc:ratio=0.01");
    let topk = codec(InstructionSet::active(), "topk:ratio=0.01");
    let (mut state, mut residual) = (vec![0.0; 2_000], vec![0.0; 1_000]);
    for step in 0..4 {
        let values = gradient(step + 1, 1_000);
        let at = key(u64::from(step), DrawKey::BROADCAST);
        let (one, _) = sent(&*dgc, &at, &values, Some(&mut state));
        let (other, _) = sent(&*topk, &at, &values, Some(&mut residual));
        assert_eq!(one, other);
    }
}

#[test]
fn wrong_bytes_are_errors_that_say_what_is_wrong() {
    let codec = codec(InstructionSet::active(), "topk:ratio=0.5");
    let error = codec.decode(&[3, 0, 0, 0], &mut [0.0; 2]).unwrap_err();
    assert!(matches!(error, DecodeError::Sparse(_)));
    assert!(error.to_string().contains("3 sparse values"), "{error}");
    let (mut bytes, _) = sent(&*codec, &key(0, 0), &[1.0, 2.0, 3.0, 4.0], None);
    bytes.push(0);
    assert!(codec.decode_add(&bytes, &mut [0.0; 4]).is_err());
}

const TEXTS: &[&str] = &["topk:ratio=0.02", "topk:ratio=0.02,bits=2", "topk:bits=4,bucket=64"];

proptest! {
    #[test]
    fn variants_send_and_keep_the_same_bits(
        rows in proptest::collection::vec(any::<u32>(), 1..600),
        text in proptest::sample::select(vec![
            "topk:ratio=0.004", "topk:ratio=0.02", "topk:ratio=0.3", "dgc:ratio=0.02",
            "topk:ratio=0.02,bits=2", "topk:ratio=0.3,bits=4,bucket=32,decay=0.9",
            "topk:ratio=0.004,bits=8,bucket=160", "topk:ratio=0.02,bucket=64",
        ]),
        steps in 1..3_u64,
    ) {
        let values: Vec<f32> = rows.iter().map(|&bits| f32::from_bits(bits)).collect();
        let run = |instruction_set| {
            let codec = codec(instruction_set, text);
            let mut residual = vec![0.0; values.len() * codec.residual_width()];
            let mut all = Vec::new();
            for step in 0..steps {
                all.push(sent(&*codec, &key(step, 0), &values, Some(&mut residual)).0);
            }
            (all, bits(&residual))
        };
        let expected = run(InstructionSet::SCALAR);
        for instruction_set in InstructionSet::available() {
            prop_assert_eq!(run(instruction_set), expected.clone(), "{}", instruction_set.name());
        }
    }

    #[test]
    fn decode_add_adds_what_decode_gives(
        seed in 1..1_000_u32, elements in 1..3_000_usize, text in proptest::sample::select(TEXTS),
    ) {
        let codec = codec(InstructionSet::active(), text);
        let (bytes, decoded) = sent(&*codec, &key(0, 0), &gradient(seed, elements), None);
        let mut sum = gradient(seed + 1, elements);
        let expected: Vec<f32> = sum.iter().zip(&decoded).map(|(a, b)| a + b).collect();
        codec.decode_add(&bytes, &mut sum).unwrap();
        prop_assert_eq!(bits(&sum), bits(&expected));
    }

    #[test]
    fn any_bytes_decode_or_are_refused(
        bytes in proptest::collection::vec(any::<u8>(), 0..120),
        elements in 0..300_usize,
        text in proptest::sample::select(TEXTS),
    ) {
        let codec = codec(InstructionSet::active(), text);
        let mut out = vec![0.0; elements];
        let one = codec.decode(&bytes, &mut out).is_ok();
        let other = codec.decode_add(&bytes, &mut out).is_ok();
        prop_assert_eq!(one, other);
    }
}

#[test]
fn encodings_are_as_long_as_expected() {
    let texts = [
        "topk:ratio=0.001",
        "topk:ratio=0.01,broadcast_ratio=0.3",
        "topk:ratio=0.02,broadcast_ratio=0.08,bits=2,bucket=4096,decay=0.95",
        "topk:ratio=0.05,bits=8,bucket=128",
        "dgc:ratio=0.01,broadcast_ratio=0.04,warmup=40",
        "qsgd:bits=4",
    ];
    let instruction_set = InstructionSet::available().next().expect("there is one");
    for text in texts {
        let codec = codec(instruction_set, text);
        for elements in [1_000, 50_000] {
            let values = gradient(5, elements);
            for (leg, is_mean) in [(0, false), (DrawKey::BROADCAST, true)] {
                let (bytes, _) = sent(&*codec, &key(50, leg), &values, None);
                let expected = codec.expected_wire_bytes(elements, is_mean);
                let off = bytes.len().abs_diff(expected);
                assert!(off <= 3 + expected / 50, "{text}, {elements}: {off} of {expected}");
                assert!(expected <= codec.max_wire_bytes(elements));
            }
        }
    }
}
