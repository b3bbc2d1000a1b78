//! What every codec promises, held against plain statements of it.

mod common;

use gradlane_codec::{build, Codec, CodecSpec, Place, TensorShape};

const SPECS: [&str; 6] =
    ["f32", "bf16", "f16", "qsgd", "qsgd:bits=2,bucket=32,norm=l2", "qsgd:bits=16,levels=uniform"];

fn place(first_element: u64) -> Place {
    Place { seed: 7, step: 3, tensor: 1, leg: 2, first_element }
}

fn codec(text: &str, elements: usize) -> std::sync::Arc<dyn Codec> {
    let spec: CodecSpec = text.parse().expect("a spec");
    build(&spec, &TensorShape::new(&[elements as u64]))
}

fn wave(length: usize) -> Vec<f32> {
    (0..length).map(|index| ((index * 37 % 101) as f32 - 50.0) / 13.0).collect()
}

fn encoded(codec: &dyn Codec, place: Place, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; codec.max_wire_bytes(values.len())];
    let length = codec.encode(&place, values, None, &mut out);
    out.truncate(length);
    out
}

#[test]
fn residuals_conserve_what_was_to_be_sent() {
    for text in SPECS {
        for length in 0..300 {
            let codec = codec(text, length);
            let values = wave(length);
            let before: Vec<f32> = values.iter().rev().map(|value| value / 7.0).collect();
            let mut residual = before.clone();
            let mut out = vec![0; codec.max_wire_bytes(length)];
            let bytes = codec.encode(&place(0), &values, Some(&mut residual), &mut out);
            let mut sent = vec![f32::NAN; length];
            codec.decode(&out[..bytes], &mut sent).expect("what was encoded");
            for index in 0..length {
                let wanted = values[index] + before[index];
                let kept = sent[index] + residual[index];
                assert!((wanted - kept).abs() <= 4e-6, "{text} {length} {index}: {wanted} {kept}");
            }
            let mut sum = vec![1.0; length];
            codec.decode_add(&out[..bytes], &mut sum).expect("what was encoded");
            let expected: Vec<f32> = sent.iter().map(|value| 1.0 + value).collect();
            assert_eq!(sum, expected, "{text} {length}");
        }
    }
}

#[test]
fn cutting_at_granules_changes_nothing() {
    for text in SPECS {
        let codec = codec(text, 20_000);
        let values = wave(20_000);
        let whole = encoded(&*codec, place(0), &values);
        let cut = codec.granule().next_multiple_of(64) as usize;
        let mut parts = encoded(&*codec, place(0), &values[..cut]);
        parts.extend(encoded(&*codec, place(cut as u64), &values[cut..]));
        assert!(parts == whole, "{text}");
    }
}
