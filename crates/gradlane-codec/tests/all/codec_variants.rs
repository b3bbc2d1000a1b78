//! Every variant of every codec gives the bits of the oracle, at every length and alignment.

use crate::common::codecs::{assert_same_floats, codec, gradients, key, Floats, SPECS};
use crate::common::{self, Numbers, Placed};
use gradlane_codec::{narrow, widen, DrawKey, FloatDtype, InstructionSet};
use proptest::prelude::*;

/// Encodes and decodes with a variant and with the oracle, and compares everything that comes out.
fn compare(
    instruction_set: InstructionSet,
    text: &str,
    key: DrawKey,
    values: &[f32],
    before: Option<&[f32]>,
) {
    let length = values.len();
    let offset = length % 3;
    let what =
        || format!("{text} {instruction_set} {length} values, residual {}", before.is_some());
    let results = [instruction_set, InstructionSet::SCALAR].map(|instruction_set| {
        let codec = codec(instruction_set, text, &[length as u64]);
        let mut values = Floats::holding(values, offset);
        let mut residual = before.map(|before| Floats::holding(before, offset + 1));
        let mut out = Placed::room(codec.max_wire_bytes(length), offset);
        let kept = residual.as_mut().map(Floats::as_mut);
        let bytes = codec.encode(&key, values.as_mut(), kept, out.as_mut());
        out.assert_guards();
        let residual = residual.map(|mut residual| {
            residual.assert_guards();
            residual.as_mut().to_vec()
        });
        let encoded = out.as_mut()[..bytes].to_vec();
        let mut decoded = Floats::holding(values.as_mut(), offset);
        codec.decode(out.as_mut(), decoded.as_mut()).expect("what was encoded");
        decoded.assert_guards();
        let mut sum = Floats::holding(values.as_mut(), offset);
        codec.decode_add(out.as_mut(), sum.as_mut()).expect("what was encoded");
        sum.assert_guards();
        (encoded, residual, decoded.as_mut().to_vec(), sum.as_mut().to_vec())
    });
    let [(bytes, residual, decoded, sum), expected] = results;
    match text.split(':').next() {
        // A NaN may have any payload.
        Some(name @ ("f32" | "f16" | "bf16")) => {
            let dtype = FloatDtype::ALL.into_iter().find(|it| it.name() == name).unwrap();
            common::assert_same(dtype, &bytes, &expected.0, &what);
        }
        _ => assert_eq!(bytes, expected.0, "{}", what()),
    }
    assert_eq!(residual.is_some(), expected.1.is_some());
    if let (Some(found), Some(expected)) = (residual, expected.1) {
        assert_same_floats(&found, &expected, &what);
    }
    assert_same_floats(&decoded, &expected.2, &what);
    assert_same_floats(&sum, &expected.3, &what);
}

#[test]
fn variants_give_the_bits_of_the_oracle_at_every_length() {
    for instruction_set in InstructionSet::available() {
        for text in SPECS {
            for length in (0..300).chain([511, 512, 513, 1024, 2049, 8192, 8193, 20_000]) {
                let values = gradients(length as u64, length);
                let before = gradients(length as u64 + 1, length);
                compare(instruction_set, text, key(0), &values, None);
                compare(instruction_set, text, key(0), &values, Some(&before));
            }
        }
    }
}

#[test]
fn variants_agree_on_values_that_are_special() {
    let mut numbers = Numbers(11);
    for instruction_set in InstructionSet::available() {
        for text in SPECS {
            for round in 0..60 {
                let length = 40 + 13 * round;
                let floats = |bytes: Vec<u8>| -> Vec<f32> {
                    bytes.as_chunks::<4>().0.iter().map(|it| f32::from_ne_bytes(*it)).collect()
                };
                let values = floats(numbers.elements(FloatDtype::F32, length));
                let before = floats(numbers.elements(FloatDtype::F32, length));
                compare(instruction_set, text, key(0), &values, None);
                compare(instruction_set, text, key(0), &values, Some(&before));
                // The same without infinities and NaN, which hide all else of their bucket.
                let tame = |value: &f32| if value.is_finite() { *value } else { -0.0 };
                let values: Vec<f32> = values.iter().map(tame).collect();
                let before: Vec<f32> = before.iter().map(tame).collect();
                compare(instruction_set, text, key(0), &values, None);
                compare(instruction_set, text, key(0), &values, Some(&before));
                // And between values that barely differ.
                let near: Vec<f32> = values.iter().map(|value| 1.0 + value * 1e-45).collect();
                compare(instruction_set, text, key(0), &near, None);
                let small: Vec<f32> =
                    values.iter().map(|value| value.clamp(-1e-44, 1e-30)).collect();
                compare(instruction_set, text, key(0), &small, Some(&small));
            }
        }
    }
}

#[test]
fn elements_of_every_dtype_widen_and_narrow_as_their_own_kernels_do() {
    let mut numbers = Numbers(5);
    for length in (0..70).chain([1000]) {
        for dtype in FloatDtype::ALL {
            let bytes = numbers.elements(dtype, length);
            let mut values = vec![0.0; length];
            widen(dtype, &bytes, &mut values);
            let size = dtype.element_bytes();
            for (value, bytes) in values.iter().zip(bytes.chunks_exact(size)) {
                let expected = common::value_of(dtype, bytes) as f32;
                let same = value.to_bits() == expected.to_bits();
                assert!(same || value.is_nan() && expected.is_nan(), "{dtype} {value} {expected}");
            }
            let mut back = vec![0; bytes.len()];
            narrow(dtype, &values, &mut back);
            let expected: Vec<u8> =
                values.iter().flat_map(|it| common::bytes_of(dtype, f64::from(*it))).collect();
            common::assert_same(dtype, &back, &expected, &|| format!("{dtype} {length}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn variants_give_the_bits_of_the_oracle_anywhere(
        text in prop::sample::select(SPECS),
        seed: u64,
        step: u64,
        tensor: u32,
        leg: u32,
        granule in 0_u64..1 << 30,
        length in 0_usize..5000,
        exponent in -120_i32..120,
        with_residual: bool,
    ) {
        let scale = 2.0_f32.powi(exponent);
        let values: Vec<f32> = gradients(seed, length).iter().map(|it| it * scale).collect();
        let before: Vec<f32> = gradients(!seed, length).iter().map(|it| it * scale).collect();
        for instruction_set in InstructionSet::available() {
            let granule_elements = codec(instruction_set, text, &[length as u64]).granule();
            let first_element = granule * granule_elements;
            let key = DrawKey { seed, step, tensor, leg, first_element };
            compare(instruction_set, text, key, &values, with_residual.then_some(&before[..]));
        }
    }

    #[test]
    fn any_bytes_decode_to_the_same_values_with_every_variant(
        text in prop::sample::select(SPECS),
        length in 0_usize..700,
        seed: u64,
    ) {
        let mut numbers = Numbers(seed);
        let bytes = codec(InstructionSet::SCALAR, text, &[length as u64]).max_wire_bytes(length);
        let hostile: Vec<u8> = (0..bytes).map(|_| numbers.next() as u8).collect();
        let mut expected = vec![0.5; length];
        codec(InstructionSet::SCALAR, text, &[length as u64]).decode_add(&hostile, &mut expected).unwrap();
        for instruction_set in InstructionSet::available() {
            let mut found = vec![0.5; length];
            codec(instruction_set, text, &[length as u64]).decode_add(&hostile, &mut found).unwrap();
            assert_same_floats(&found, &expected, &|| format!("{text} {instruction_set} {length}"));
        }
    }
}
