//! Any bytes as the text of a codec, as an encoding and as values: no panic, nothing read or written
//! beside its place, and every variant gives the same.

use arbitrary::{Arbitrary, Unstructured};
use gradlane_codec::{build_with, CodecSpec, DrawKey, InstructionSet, IntegerSums, TensorShape};

const TEXTS: &[&str] = &[
    "f32",
    "bf16",
    "f16",
    "onebit",
    "onebit:bucket=64",
    "onebit:bucket=tensor",
    "onebit:packing=cntk",
    "onebit:bucket=64,packing=cntk",
    "qsgd:bits=1",
    "qsgd:bits=2",
    "qsgd:bits=4,levels=optimal",
    "qsgd:bits=4",
    "qsgd:bits=8,levels=uniform",
    "qsgd:bits=16,bucket=64,norm=l2",
    "qsgd:bits=8,ring=integer",
    "qsgd:bits=2,bucket=96,ring=integer",
    "int8",
    "fp8:bucket=32",
    "fp8:format=e5m2",
    "topk:ratio=0.1",
    "topk:ratio=0.1,bits=2",
    "topk:ratio=0.02,bits=4,bucket=64,decay=0.9",
    "topk:ratio=0.5,bits=8,bucket=96",
    "dgc:ratio=0.01,clip=1",
];

#[derive(Arbitrary, Debug)]
struct Case<'a> {
    known: u8,
    edit: Option<(u8, u8)>,
    elements: u16,
    column: u8,
    granule: u32,
    seed: u64,
    with_residual: bool,
    text: &'a str,
    bytes: &'a [u8],
}

fn same(one: &[f32], other: &[f32]) -> bool {
    one.iter().zip(other).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
}

/// Checks bytes in a codec. Returns whether they decode.
///
/// # Panics
/// Where variants differ, or something is read or written beside its place.
pub fn check(bytes: &[u8]) -> bool {
    Case::arbitrary_take_rest(Unstructured::new(bytes)).is_ok_and(|case| encode_and_decode(&case))
}

/// Parses a text. What it means is written as a text of the same meaning.
fn parse(text: &str) -> Option<CodecSpec> {
    let spec = text.parse::<CodecSpec>().ok()?;
    assert_eq!(spec.to_string().parse::<CodecSpec>().as_ref(), Ok(&spec));
    Some(spec)
}

/// Returns a known codec, or what it has become by the change of a character.
fn spec(case: &Case<'_>) -> CodecSpec {
    let known = TEXTS[usize::from(case.known) % TEXTS.len()];
    let mut text = known.as_bytes().to_vec();
    if let Some((at, byte)) = case.edit {
        let at = usize::from(at) % text.len();
        text[at] = b' ' + byte % 95;
    }
    let edited = parse(std::str::from_utf8(&text).expect("ASCII"));
    edited.or_else(|| parse(known)).expect("a known text")
}

fn encode_and_decode(case: &Case<'_>) -> bool {
    let spec = parse(case.text).unwrap_or_else(|| spec(case));
    let elements = usize::from(case.elements) % 3000;
    let column = u64::from(case.column).max(1);
    let shape = TensorShape::new(&[(elements as u64).div_ceil(column), column]);

    // Bytes from a peer, as they are and in the length that the elements ask for.
    let scalar = build_with(InstructionSet::SCALAR, &spec, &shape);
    let mut sum = vec![0.25; elements];
    let _ = scalar.decode_add(case.bytes, &mut sum);
    let mut encoded = case.bytes.to_vec();
    encoded.resize(scalar.max_wire_bytes(elements), 0x5a);
    let mut sum = vec![0.25; elements];
    let decoded = scalar.decode_add(&encoded, &mut sum);

    // The same bytes as values.
    let float = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
    let mut values: Vec<f32> = case.bytes.as_chunks::<4>().0.iter().map(float).collect();
    values.truncate(elements);
    let first_element = u64::from(case.granule) * scalar.granule();
    let key = DrawKey { seed: case.seed, step: 1, tensor: 2, leg: 3, first_element };
    let mut residual = vec![0.5; values.len() * scalar.residual_width()];
    let mut out = vec![0; scalar.max_wire_bytes(values.len())];
    let kept = case.with_residual.then_some(&mut residual[..]);
    let bytes = scalar.encode(&key, &values, kept, &mut out);

    for instruction_set in InstructionSet::available() {
        let codec = build_with(instruction_set, &spec, &shape);
        let mut other_sum = vec![0.25; elements];
        assert_eq!(codec.decode_add(&encoded, &mut other_sum), decoded);
        assert!(
            decoded.is_err() || same(&other_sum, &sum),
            "{spec} decodes otherwise with {instruction_set}"
        );
        let mut other_residual = vec![0.5; residual.len()];
        let mut other = vec![0; out.len()];
        let kept = case.with_residual.then_some(&mut other_residual[..]);
        assert_eq!(codec.encode(&key, &values, kept, &mut other), bytes);
        assert!(same(&other_residual, &residual), "{spec} keeps otherwise with {instruction_set}");
        let mut back = [vec![0.0; values.len()], vec![0.0; values.len()]];
        codec.decode(&out[..bytes], &mut back[0]).expect("what was encoded");
        codec.decode(&other[..bytes], &mut back[1]).expect("what was encoded");
        assert!(same(&back[0], &back[1]), "{spec} encodes otherwise with {instruction_set}");
    }
    add_codes(case, &spec, elements, key);
    decoded.is_ok()
}

/// The same bytes as sums of codes that came round a ring.
fn add_codes(case: &Case<'_>, spec: &CodecSpec, elements: usize, key: DrawKey) {
    let ranks = u32::from(case.column).max(1);
    let with = |instruction_set| IntegerSums::with(instruction_set, spec, ranks).ok().flatten();
    let Some(scalar) = with(InstructionSet::SCALAR) else {
        return;
    };
    let mut sums = case.bytes.to_vec();
    assert_eq!(
        scalar.mean(&sums, &mut vec![0.0; elements]).is_ok(),
        sums.len() == scalar.sum_bytes(elements)
    );
    sums.resize(scalar.sum_bytes(elements), 0x5a);
    let values: Vec<f32> = (0..elements).map(|it| it as f32 * 0.25 - 100.0).collect();
    let run = |of: &IntegerSums| {
        let (mut sums, mut means) = (sums.clone(), vec![0.0; elements]);
        let mut residual = vec![0.5; elements];
        of.mean(&sums, &mut means).expect("their length");
        let kept = case.with_residual.then_some(&mut residual[..]);
        let added = of.add(&key, &values, kept, &mut sums);
        (added.is_ok().then_some((sums, residual)), means)
    };
    let right = run(&scalar);
    for instruction_set in InstructionSet::available() {
        let found = run(&with(instruction_set).expect("as the scalar one"));
        assert!(same(&found.1, &right.1), "{spec} has other means with {instruction_set}");
        assert_eq!(found.0, right.0, "{spec} adds otherwise with {instruction_set}");
    }
}
