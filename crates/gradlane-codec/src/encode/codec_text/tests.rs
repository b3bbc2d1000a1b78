//! Texts of codecs: their canonical form, and what errors say.

use super::{CodecSpec, CodecSpecError};

fn canonical(text: &str) -> String {
    let spec: CodecSpec = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
    let printed = spec.to_string();
    assert_eq!(printed.parse::<CodecSpec>().as_ref(), Ok(&spec), "{text}");
    printed
}

#[test]
fn texts_have_one_canonical_form() {
    assert_eq!(canonical("f32"), "f32");
    assert_eq!(canonical(" bf16 "), "bf16");
    assert_eq!(canonical("f16:residual=on"), "f16:residual=on");
    assert_eq!(canonical("onebit"), "onebit:bucket=column");
    assert_eq!(canonical("onebit:bucket=64"), "onebit:bucket=64");
    assert_eq!(canonical("onebit:residual=off"), "onebit:bucket=column,residual=off");
    assert_eq!(canonical("int8"), "int8:bucket=512");
    assert_eq!(canonical("int8:bucket=tensor"), "int8:bucket=tensor");
    assert_eq!(canonical("fp8"), "fp8:format=e4m3,bucket=128");
    assert_eq!(
        canonical("fp8: bucket=column, format=e5m2, residual=on"),
        "fp8:format=e5m2,bucket=column,residual=on"
    );
    assert_eq!(canonical("qsgd"), "qsgd:bits=4,bucket=512,norm=max,levels=sign");
    assert_eq!(canonical("qsgd:bits=1"), "qsgd:bits=1,bucket=128,norm=max,levels=uniform");
    assert_eq!(canonical("qsgd:bits=2"), "qsgd:bits=2,bucket=128,norm=max,levels=sign");
    assert_eq!(canonical("qsgd:bits=16"), "qsgd:bits=16,bucket=8192,norm=max,levels=sign");
    assert_eq!(
        canonical("qsgd: levels=uniform, norm=l2, bits=8, residual=on"),
        "qsgd:bits=8,bucket=512,norm=l2,levels=uniform,residual=on"
    );
}

#[test]
fn errors_say_what_would_do() {
    let message = |text: &str| text.parse::<CodecSpec>().unwrap_err().to_string();
    assert!(message("gzip").contains("qsgd"), "{}", message("gzip"));
    assert!(message("qsgd:bits=3").contains("2, 4, 8 or 16"));
    assert!(message("qsgd:bits=1,levels=sign").contains("leaves no bit for a magnitude"));
    assert!(message("qsgd:bits=8,levels=optimal").contains("bits=2 and bits=4"));
    assert!(message("qsgd:levels=optimal,ring=integer").contains("stand for the same"));
    assert!(message("qsgd:bucket=100").contains("multiple of 32"));
    assert!(message("qsgd:bukket=64").contains("bits, bucket, norm, levels"));
    assert!(message("fp8:format=e3m4").contains("e4m3 or e5m2"));
    assert!(message("qsgd:4").contains("key=value"));
    assert!(message("f32:residual=on").contains("none"));
    assert_eq!(
        "qsgd:bits=4,bits=4".parse::<CodecSpec>(),
        Err(CodecSpecError::Repeated { codec: "qsgd", option: "bits".to_owned() })
    );
}
