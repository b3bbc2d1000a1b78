//! What every codec promises, held against plain statements of it.

use crate::common::codecs::{codec, decoded, encoded, gradients, key, SPECS};
use gradlane_codec::{build, CodecSpec, DecodeError, DrawKey, InstructionSet, TensorShape};

/// The largest distance of a value of these buckets from what is decoded for it.
fn error_bound(text: &str, bucket: &[f32]) -> f64 {
    let largest = bucket.iter().fold(0.0_f64, |all, value| all.max(f64::from(value.abs())));
    let norm = bucket.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    let scale = if text.contains("norm=l2") { norm } else { largest };
    let half = |bits: i32| match bits {
        // Optimal levels may leave nearly all of the range to two of them.
        _ if text.contains("optimal") => 0.5,
        _ if bits == 1 || text.contains("uniform") => 2.0_f64.powi(bits - 1) - 0.5,
        _ => 2.0_f64.powi(bits - 1) - 1.0,
    };
    let bound = match text.split(':').next() {
        Some("f32") => 0.0,
        Some("bf16") => largest * 2.0_f64.powi(-8),
        Some("f16") => largest * 2.0_f64.powi(-11) + 2.0_f64.powi(-25),
        // An average lies among the values of one sign.
        Some("onebit") => largest,
        Some("int8") => largest * 2.0 / 255.0 / 2.0,
        // Half the distance of two numbers between the largest power of two and the next one.
        Some("fp8") if text.contains("e5m2") => largest / 8.0,
        Some("fp8") => largest / 16.0,
        _ => {
            let bits = text.split("bits=").nth(1).and_then(|rest| rest.split(',').next());
            scale / half(bits.expect("bits").parse().expect("a number"))
        }
    };
    bound * (1.0 + 1e-5) + largest * 2.0_f64.powi(-23)
}

#[test]
fn what_is_decoded_is_near_what_was_encoded() {
    for text in SPECS {
        for length in (0..300).chain([20_000]) {
            let codec = codec(InstructionSet::active(), text, &[length as u64]);
            let values = gradients(length as u64, length);
            let back = decoded(&*codec, &encoded(&*codec, key(0), &values), length);
            let bucket = (codec.granule() as usize).max(1);
            for (values, back) in values.chunks(bucket).zip(back.chunks(bucket)) {
                let bound = error_bound(text, values);
                for (value, back) in values.iter().zip(back) {
                    let error = f64::from((value - back).abs());
                    assert!(error <= bound, "{text} {length}: {value} came back as {back}");
                }
            }
        }
    }
}

#[test]
fn residuals_conserve_what_was_to_be_sent() {
    for text in SPECS {
        for length in 0..300 {
            let codec = codec(InstructionSet::active(), text, &[length as u64]);
            let values = gradients(1, length);
            let before = gradients(2, length);
            let mut residual = before.clone();
            let mut out = vec![0; codec.max_wire_bytes(length)];
            let bytes = codec.encode(&key(0), &values, Some(&mut residual), &mut out);
            let sent = decoded(&*codec, &out[..bytes], length);
            for index in 0..length {
                let wanted = values[index] + before[index];
                let kept = sent[index] + residual[index];
                // One rounding of the difference, one of this sum.
                let rounding = (sent[index].abs() + residual[index].abs()) * f32::EPSILON;
                let off = (wanted - kept).abs();
                assert!(off <= rounding, "{text} {length} {index}: {wanted} is sent as {kept}");
            }
            let mut sum = vec![1.0; length];
            codec.decode_add(&out[..bytes], &mut sum).expect("what was encoded");
            let expected: Vec<f32> = sent.iter().map(|value| 1.0 + value).collect();
            assert_eq!(sum, expected, "{text} {length}");
        }
    }
}

#[test]
fn over_many_steps_residuals_bring_everything_across() {
    let length = 700;
    for text in
        ["onebit:bucket=64", "onebit:bucket=tensor", "qsgd:bits=2,residual=on", "int8", "fp8"]
    {
        let codec = codec(InstructionSet::active(), text, &[length as u64]);
        let mut residual = vec![0.0; length];
        let (mut wanted, mut arrived) = (vec![0.0_f64; length], vec![0.0_f64; length]);
        for step in 0..200 {
            let values = gradients(step, length);
            let mut out = vec![0; codec.max_wire_bytes(length)];
            let key = DrawKey { step, ..key(0) };
            let bytes = codec.encode(&key, &values, Some(&mut residual), &mut out);
            let sent = decoded(&*codec, &out[..bytes], length);
            for index in 0..length {
                wanted[index] += f64::from(values[index]);
                arrived[index] += f64::from(sent[index]);
            }
        }
        for index in 0..length {
            let missing = wanted[index] - arrived[index] - f64::from(residual[index]);
            assert!(missing.abs() < 1e-6, "{text}: {missing} of element {index} is lost");
        }
    }
}

#[test]
fn cutting_at_granules_changes_nothing() {
    let shape = [40, 480];
    let values = gradients(3, 40 * 480);
    for text in SPECS.iter().filter(|text| !text.contains("tensor")) {
        let codec = codec(InstructionSet::active(), text, &shape);
        let granule = codec.granule() as usize;
        let whole = encoded(&*codec, key(0), &values);
        for granules in [1, 2, 3, 7] {
            let mut parts = Vec::new();
            let slice = granule * granules;
            for (index, slice_values) in values.chunks(slice).enumerate() {
                parts.extend(encoded(&*codec, key((index * slice) as u64), slice_values));
            }
            assert!(parts == whole, "{text} in slices of {slice} elements");
        }
    }
}

#[test]
fn draws_differ_by_seed_step_tensor_leg_and_element() {
    let values = vec![0.3; 1024];
    let here = key(0);
    let others = [
        DrawKey { seed: 8, ..here },
        DrawKey { step: 4, ..here },
        DrawKey { tensor: 2, ..here },
        DrawKey { leg: 3, ..here },
        DrawKey { leg: DrawKey::BROADCAST, ..here },
        DrawKey { first_element: 512, ..here },
        DrawKey { first_element: 512 << 32, ..here },
    ];
    // The largest value of a bucket is the scale and not rounded at random.
    let values: Vec<f32> = values.iter().enumerate().map(|(i, v)| v + (i % 512) as f32).collect();
    for text in SPECS.iter().filter(|text| text.starts_with("qsgd:") && !text.contains("bucket")) {
        let codec = codec(InstructionSet::active(), text, &[1 << 50]);
        let values = &values[..512];
        let one = encoded(&*codec, DrawKey { first_element: 0, ..here }, values);
        assert_eq!(one, encoded(&*codec, here, values), "{text} is not reproducible");
        for other in others {
            let granule = codec.granule();
            let first_element = other.first_element.next_multiple_of(granule);
            let other = DrawKey { first_element, ..other };
            assert_ne!(one, encoded(&*codec, other, values), "{text} {other:?}");
        }
    }
}

#[test]
fn what_is_not_finite_is_carried_and_its_residual_kept() {
    for text in SPECS {
        let length = 1500;
        let codec = codec(InstructionSet::active(), text, &[length as u64]);
        let bucket = codec.granule() as usize;
        for broken in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 77, 1499] {
                let mut values = gradients(4, length);
                values[at] = broken;
                let before = gradients(5, length);
                let mut residual = before.clone();
                let mut out = vec![0; codec.max_wire_bytes(length)];
                let bytes = codec.encode(&key(0), &values, Some(&mut residual), &mut out);
                let sent = decoded(&*codec, &out[..bytes], length);
                let buckets = at / bucket * bucket..(at / bucket + 1) * bucket;
                for index in 0..length {
                    if buckets.contains(&index) {
                        // Single values keep their infinity; whole buckets are NaN.
                        assert!(!sent[index].is_finite(), "{text} {broken} {index}");
                        assert!(bucket == 1 || sent[index].is_nan(), "{text} {broken} {index}");
                        assert_eq!(residual[index], before[index], "{text} {broken} {index}");
                    } else {
                        assert!(sent[index].is_finite(), "{text} {broken} {index}");
                        assert!(residual[index].is_finite(), "{text} {broken} {index}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_ends_of_the_range_of_f32_are_finite_or_nan_but_never_noise() {
    let tiny = f32::from_bits(1);
    let rows: [&[f32]; 6] = [
        &[f32::MAX, -f32::MAX, 1.0, 0.0],
        &[tiny, -tiny, 0.0, -0.0],
        &[f32::MIN_POSITIVE, -f32::MIN_POSITIVE, tiny],
        &[1e-30, 2e-30, -3e-31],
        &[0.0, -0.0],
        &[f32::MAX, f32::MAX, f32::MAX],
    ];
    for text in SPECS {
        for row in rows {
            let values: Vec<f32> = row.iter().copied().cycle().take(40).collect();
            let codec = codec(InstructionSet::active(), text, &[40]);
            let back = decoded(&*codec, &encoded(&*codec, key(0), &values), 40);
            let largest = row.iter().fold(0.0_f32, |all, value| all.max(value.abs()));
            for (value, back) in values.iter().zip(&back) {
                let near = (value - back).abs() <= largest * 2.0 + 1e-29;
                assert!(near || back.is_nan() || back.is_infinite(), "{text} {row:?}: {back}");
            }
        }
    }
}

#[test]
fn zeros_come_back_as_zeros() {
    for text in SPECS {
        let codec = codec(InstructionSet::active(), text, &[200]);
        let back = decoded(&*codec, &encoded(&*codec, key(0), &[0.0; 200]), 200);
        assert!(back.iter().all(|value| value.to_bits() == 0), "{text}: {back:?}");
    }
}

#[test]
fn lengths_are_exact_and_others_are_refused() {
    for text in SPECS {
        for length in (0..300).chain([100_000]) {
            let codec = codec(InstructionSet::active(), text, &[length as u64]);
            assert!(codec.is_fixed_size());
            let bytes = encoded(&*codec, key(0), &gradients(1, length));
            assert_eq!(bytes.len(), codec.max_wire_bytes(length), "{text} {length}");
            let mut out = vec![0.0; length];
            let longer = [&bytes[..], &[0]].concat();
            let error = codec.decode(&longer, &mut out).unwrap_err();
            let DecodeError::Length { elements, expected_bytes, found_bytes, .. } = error else {
                panic!("{text} {length}: {error}");
            };
            assert_eq!((elements, expected_bytes), (length, bytes.len()));
            assert_eq!(found_bytes, bytes.len() + 1);
            if let Some((_, shorter)) = bytes.split_last() {
                assert!(codec.decode(shorter, &mut out).is_err(), "{text} {length}");
                assert!(codec.decode_add(shorter, &mut out).is_err(), "{text} {length}");
            }
        }
    }
}

#[test]
fn ratios_are_those_of_the_layouts() {
    let elements = 10_000_000;
    let ratio = |text: &str| {
        let spec: CodecSpec = text.parse().unwrap();
        let codec = build(&spec, &TensorShape::new(&[10_000, 1000]));
        4.0 * elements as f64 / codec.max_wire_bytes(elements) as f64
    };
    for (text, expected) in [
        ("f32", 1.0),
        ("f16", 2.0),
        ("qsgd:bits=1", 4.0 * 128.0 / (4.0 + 16.0)),
        ("qsgd:bits=2", 4.0 * 128.0 / (4.0 + 32.0)),
        ("qsgd:bits=2,levels=optimal", 4.0 * 128.0 / (5.0 + 32.0)),
        ("qsgd:bits=4,levels=optimal", 4.0 * 512.0 / (11.0 + 256.0)),
        ("qsgd:bits=4", 4.0 * 512.0 / (4.0 + 256.0)),
        ("qsgd:bits=8", 4.0 * 512.0 / (4.0 + 512.0)),
        ("qsgd:bits=16", 4.0 * 8192.0 / (4.0 + 16384.0)),
        ("onebit:bucket=64", 16.0),
        ("onebit", 4.0 * 1000.0 / (8.0 + 125.0)),
        ("onebit:packing=cntk", 4.0 * 1000.0 / (8.0 + 128.0)),
        ("int8", 4.0 * 512.0 / (8.0 + 512.0)),
        ("fp8", 4.0 * 128.0 / (1.0 + 128.0)),
    ] {
        assert!((ratio(text) / expected - 1.0).abs() < 1e-4, "{text}: {}", ratio(text));
    }
    assert!(ratio("qsgd:bits=4") >= 7.8);
}

#[test]
fn columns_are_runs_along_the_last_size() {
    // A 3 x 3 convolution: its columns have three values, which is little to share two averages.
    let codec = codec(InstructionSet::active(), "onebit", &[8, 4, 3, 3]);
    assert_eq!(codec.granule(), 3);
    assert_eq!(codec.max_wire_bytes(3), 9);
    assert_eq!(codec.max_wire_bytes(8 * 4 * 3 * 3), 8 * 4 * 3 * 9);
    let back = decoded(&*codec, &encoded(&*codec, key(0), &[1.0, -2.0, 3.0, -4.0, 0.0, -1.0]), 6);
    assert_eq!(back, [2.0, -2.0, 2.0, -2.5, 0.0, -2.5]);
}

#[test]
fn what_is_said_of_codecs_is_what_they_are() {
    for text in SPECS {
        let spec: CodecSpec = text.parse().unwrap();
        let codec = codec(InstructionSet::active(), text, &[64]);
        assert_eq!(codec.spec(), &spec);
        assert_eq!(codec.is_unbiased(), text.starts_with("qsgd") || *text == "f32", "{text}");
        assert_eq!(codec.keeps_residual(), text.starts_with("onebit"), "{text}");
    }
    let on: CodecSpec = "qsgd:bits=2,residual=on".parse().unwrap();
    assert!(build(&on, &TensorShape::new(&[64])).keeps_residual());
}

#[test]
#[should_panic(expected = "in granules of 512")]
fn a_slice_in_the_middle_of_a_bucket_is_refused() {
    encoded(&*codec(InstructionSet::active(), "qsgd", &[2048]), key(64), &[1.0; 64]);
}
