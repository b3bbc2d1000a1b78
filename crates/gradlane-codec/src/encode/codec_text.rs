//! The text that names a codec and its options, as in plans, overrides and on the command line.
//!
//! A text is a name and options: `qsgd:bits=4,bucket=512`. Options that are left out take the
//! defaults of the papers; [`CodecSpec`]'s `Display` gives the canonical text, with every option of
//! the method, so that two specs are equal exactly when their texts are. `encode.rs` says what else a new codec
//! needs.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use super::sparse::{DgcOptions, TopkOptions};
use super::TensorShape;

/// How the scale of a bucket follows from its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Norm {
    /// The largest magnitude: smaller variance.
    Max,
    /// The 2-norm: sparse codes, larger variance.
    L2,
}

/// Where the levels of a quantizer stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Levels {
    /// A sign and `2^(bits-1) - 1` magnitudes: zero is a level.
    Sign,
    /// The ends of `2^bits - 1` equal intervals over `[-scale, scale]`: zero is not a level.
    Uniform,
    /// `2^(bits-1)` magnitudes with both signs, where the bucket's variance is smallest.
    Optimal,
}

/// How many consecutive values share averages, or ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bucket {
    /// This number of values: a multiple of 32.
    Elements(u32),
    /// A column as CNTK cuts them, see [`TensorShape::column`].
    Column,
    /// The whole tensor, which then cannot be cut into slices.
    Tensor,
}

impl Bucket {
    /// Values of a bucket of a tensor; at least 1.
    pub fn elements(self, shape: &TensorShape) -> u64 {
        match self {
            Bucket::Elements(elements) => u64::from(elements),
            Bucket::Column => shape.column(),
            Bucket::Tensor => shape.elements().max(1),
        }
    }
}

impl fmt::Display for Bucket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bucket::Elements(elements) => write!(formatter, "{elements}"),
            Bucket::Column => formatter.write_str("column"),
            Bucket::Tensor => formatter.write_str("tensor"),
        }
    }
}

/// How the bits of a bucket lie on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Packing {
    /// In as few bytes as hold them.
    #[default]
    Bytes,
    /// In words of 32 bits, as CNTK packs a column.
    Cntk,
}

/// How a ring adds up what it encodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RingSums {
    /// Each hop decodes the sum so far, adds its values and encodes that.
    #[default]
    Hops,
    /// Every rank encodes once, to a scale that all share, and codes are added up as integers.
    Integer,
}

/// Options of QSGD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QsgdOptions {
    /// Bits of one code: 1, 2, 4, 8 or 16.
    pub bits: u32,
    /// Values that share a scale: a multiple of 32.
    pub bucket: u32,
    /// How the scale is found.
    pub norm: Norm,
    /// Where the levels stand.
    pub levels: Levels,
    /// How a ring adds up.
    pub ring: RingSums,
}

impl QsgdOptions {
    /// The bucket that the paper used with this many bits; of one bit it names none.
    pub const fn default_bucket(bits: u32) -> u32 {
        match bits {
            1 | 2 => 128,
            16 => 8192,
            _ => 512,
        }
    }
}

/// How eight bits are a float.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fp8Format {
    /// Four bits of exponent and three of mantissa: finer.
    #[default]
    E4M3,
    /// Five bits of exponent and two of mantissa: a wider range.
    E5M2,
}

/// The method of a codec, with all its options.
#[derive(Clone, Debug, PartialEq)]
pub enum Method {
    /// Values as they are.
    F32,
    /// The upper half of an f32, rounded to nearest even.
    Bf16,
    /// IEEE 754 binary16, rounded to nearest even; what is too large becomes infinity.
    F16,
    /// Signs and two averages of every bucket (Seide et al. 2014), and how the signs are packed.
    OneBit(Bucket, Packing),
    /// Stochastic rounding to few levels (Alistarh et al. 2017).
    Qsgd(QsgdOptions),
    /// Eight bits between the least and the greatest value of every bucket.
    Int8(Bucket),
    /// Floats of eight bits, scaled by bucket.
    Fp8(Fp8Format, Bucket),
    /// The largest values alone (Aji and Heafield 2017).
    Topk(TopkOptions),
    /// The largest values, with momentum taken before (Lin et al. 2018).
    Dgc(DgcOptions),
}

impl Method {
    /// The name before the colon.
    pub const fn name(&self) -> &'static str {
        match self {
            Method::F32 => "f32",
            Method::Bf16 => "bf16",
            Method::F16 => "f16",
            Method::OneBit(..) => "onebit",
            Method::Qsgd(_) => "qsgd",
            Method::Int8(_) => "int8",
            Method::Fp8(..) => "fp8",
            Method::Topk(_) => "topk",
            Method::Dgc(_) => "dgc",
        }
    }

    /// Whether what is not sent is kept and added to the next step's values unless the spec says
    /// otherwise: where the method is biased by more than rounding.
    pub const fn keeps_residual_by_default(&self) -> bool {
        match self {
            Method::OneBit(..) => true,
            Method::F32 | Method::Bf16 | Method::F16 => false,
            Method::Qsgd(_) | Method::Int8(_) | Method::Fp8(..) => false,
            Method::Topk(_) | Method::Dgc(_) => true,
        }
    }
}

/// A codec by its name and options: parsed from and printed as text.
#[derive(Clone, Debug, PartialEq)]
pub struct CodecSpec {
    /// The method, with its options.
    pub method: Method,
    /// Whether a residual is kept (error feedback); `residual=on` or `residual=off` in the text.
    pub residual: bool,
}

impl CodecSpec {
    /// The spec of a method, with its own default for the residual.
    pub fn new(method: Method) -> CodecSpec {
        let residual = method.keeps_residual_by_default();
        CodecSpec { method, residual }
    }

    /// Values as they are: what `"f32"` parses to.
    pub fn f32() -> CodecSpec {
        CodecSpec::new(Method::F32)
    }

    /// Whether nothing is lost, so that no codec has to run at all for f32 tensors.
    pub fn is_lossless(&self) -> bool {
        self.method == Method::F32
    }
}

impl fmt::Display for CodecSpec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.method.name())?;
        let mut separator = ":";
        match &self.method {
            Method::F32 | Method::Bf16 | Method::F16 => {}
            Method::OneBit(bucket, packing) => {
                write!(formatter, ":bucket={bucket}")?;
                if *packing == Packing::Cntk {
                    formatter.write_str(",packing=cntk")?;
                }
                separator = ",";
            }
            Method::Int8(bucket) => {
                write!(formatter, ":bucket={bucket}")?;
                separator = ",";
            }
            Method::Fp8(format, bucket) => {
                let format = match format {
                    Fp8Format::E4M3 => "e4m3",
                    Fp8Format::E5M2 => "e5m2",
                };
                write!(formatter, ":format={format},bucket={bucket}")?;
                separator = ",";
            }
            Method::Qsgd(QsgdOptions { bits, bucket, norm, levels, ring }) => {
                let norm = match norm {
                    Norm::Max => "max",
                    Norm::L2 => "l2",
                };
                let levels = match levels {
                    Levels::Sign => "sign",
                    Levels::Uniform => "uniform",
                    Levels::Optimal => "optimal",
                };
                write!(formatter, ":bits={bits},bucket={bucket},norm={norm},levels={levels}")?;
                if *ring == RingSums::Integer {
                    formatter.write_str(",ring=integer")?;
                }
                separator = ",";
            }
            Method::Topk(options) => {
                write!(formatter, ":{options}")?;
                separator = ",";
            }
            Method::Dgc(options) => {
                write!(formatter, ":{options}")?;
                separator = ",";
            }
        }
        if self.residual != self.method.keeps_residual_by_default() {
            let residual = if self.residual { "on" } else { "off" };
            write!(formatter, "{separator}residual={residual}")?;
        }
        Ok(())
    }
}

/// Why a text names no codec.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CodecSpecError {
    /// The name before the colon is unknown.
    #[error("no codec is named {found:?}; write one of {NAMES}, with options after a colon")]
    UnknownName {
        /// The text in its place.
        found: String,
    },
    /// An option has no equals sign.
    #[error("in codec {codec:?}, {found:?} is no option; options are written as key=value")]
    NoValue {
        /// The codec's name.
        codec: &'static str,
        /// The text in its place.
        found: String,
    },
    /// An option that the codec does not have.
    #[error("codec {codec:?} has no option {option:?}; its options are {allowed}")]
    UnknownOption {
        /// The codec's name.
        codec: &'static str,
        /// The text in its place.
        option: String,
        /// The options that would do.
        allowed: String,
    },
    /// An option given twice.
    #[error("codec {codec:?} is given {option:?} twice; say it once")]
    Repeated {
        /// The codec's name.
        codec: &'static str,
        /// The option.
        option: String,
    },
    /// A value that the option cannot have.
    #[error("codec {codec:?} cannot have {option}={found}; {option} is {allowed}")]
    BadValue {
        /// The codec's name.
        codec: &'static str,
        /// The option.
        option: &'static str,
        /// The text in its place.
        found: String,
        /// The values that would do.
        allowed: &'static str,
    },
}

/// Every codec's name, for messages.
const NAMES: &str = "f32, bf16, f16, fp8, onebit, qsgd, int8, topk, dgc";
/// The most values that may share a scale.
const BUCKET_MAX: u32 = 1 << 20;
/// The numbers of values that a bucket may have.
pub(super) const ELEMENTS_ALLOWED: &str = "a multiple of 32 from 32 to 1048576";
const BUCKET: &str = "column, tensor, or a multiple of 32 from 32 to 1048576";
/// Values that share ends unless the text says otherwise: as many as share a scale in 8-bit QSGD.
const INT8_BUCKET: Bucket = Bucket::Elements(512);

/// Values that share a scale of `fp8` unless the text says otherwise.
const FP8_BUCKET: Bucket = Bucket::Elements(128);

impl FromStr for CodecSpec {
    type Err = CodecSpecError;

    fn from_str(text: &str) -> Result<CodecSpec, CodecSpecError> {
        let (name, rest) = text.trim().split_once(':').unwrap_or((text.trim(), ""));
        let (method, mut options) = match name {
            "f32" => (Method::F32, Options::split("f32", rest)?),
            "bf16" => (Method::Bf16, Options::split("bf16", rest)?),
            "f16" => (Method::F16, Options::split("f16", rest)?),
            "onebit" => {
                let mut options = Options::split("onebit", rest)?;
                let bucket = options.parsed("bucket", BUCKET, parse_bucket)?;
                let packings = [("bytes", Packing::Bytes), ("cntk", Packing::Cntk)];
                let packing = options.choice("packing", "bytes or cntk", &packings)?;
                let bucket = bucket.unwrap_or(Bucket::Column);
                (Method::OneBit(bucket, packing.unwrap_or_default()), options)
            }
            "qsgd" => {
                let mut options = Options::split("qsgd", rest)?;
                (Method::Qsgd(qsgd(&mut options)?), options)
            }
            "topk" => {
                let mut options = Options::split("topk", rest)?;
                (Method::Topk(TopkOptions::parse(&mut options)?), options)
            }
            "dgc" => {
                let mut options = Options::split("dgc", rest)?;
                (Method::Dgc(DgcOptions::parse(&mut options)?), options)
            }
            "int8" => {
                let mut options = Options::split("int8", rest)?;
                let bucket = options.parsed("bucket", BUCKET, parse_bucket)?;
                (Method::Int8(bucket.unwrap_or(INT8_BUCKET)), options)
            }
            "fp8" => {
                let mut options = Options::split("fp8", rest)?;
                let formats = [("e4m3", Fp8Format::E4M3), ("e5m2", Fp8Format::E5M2)];
                let format = options.choice("format", "e4m3 or e5m2", &formats)?;
                let bucket = options.parsed("bucket", BUCKET, parse_bucket)?;
                let bucket = bucket.unwrap_or(FP8_BUCKET);
                (Method::Fp8(format.unwrap_or_default(), bucket), options)
            }
            _ => return Err(CodecSpecError::UnknownName { found: name.to_owned() }),
        };
        let mut spec = CodecSpec::new(method);
        if !spec.is_lossless() {
            let choices = [("on", true), ("off", false)];
            if let Some(residual) = options.choice("residual", "on or off", &choices)? {
                spec.residual = residual;
            }
            if !spec.residual && matches!(&spec.method, Method::Topk(it) if it.decay < 1.0) {
                return Err(CodecSpecError::BadValue {
                    codec: "topk",
                    option: "residual",
                    found: "off".to_owned(),
                    allowed: "on, whose share decay says; leave decay out to keep none",
                });
            }
            if !spec.residual && matches!(spec.method, Method::Dgc(_)) {
                return Err(CodecSpecError::BadValue {
                    codec: "dgc",
                    option: "residual",
                    found: "off".to_owned(),
                    allowed: "on, where its momentum lies, too; topk takes residual=off",
                });
            }
        }
        options.finish()?;
        Ok(spec)
    }
}

fn qsgd(options: &mut Options<'_>) -> Result<QsgdOptions, CodecSpecError> {
    let widths = [("1", 1), ("2", 2), ("4", 4), ("8", 8), ("16", 16)];
    let bits = options.choice("bits", "1, 2, 4, 8 or 16", &widths)?.unwrap_or(4);
    let bucket = options.parsed("bucket", ELEMENTS_ALLOWED, parse_elements)?;
    let bucket = bucket.unwrap_or(QsgdOptions::default_bucket(bits));
    let norms = [("max", Norm::Max), ("l2", Norm::L2)];
    let norm = options.choice("norm", "max or l2", &norms)?.unwrap_or(Norm::Max);
    let kinds =
        [("sign", Levels::Sign), ("uniform", Levels::Uniform), ("optimal", Levels::Optimal)];
    let levels = options.choice("levels", "sign, uniform or optimal", &kinds)?;
    // One bit has no sign and a magnitude beside zero.
    let levels = levels.unwrap_or(if bits == 1 { Levels::Uniform } else { Levels::Sign });
    let sums = [("hops", RingSums::Hops), ("integer", RingSums::Integer)];
    let ring = options.choice("ring", "hops or integer", &sums)?.unwrap_or_default();
    let refused = match levels {
        Levels::Uniform if ring == RingSums::Integer => Some((
            "uniform",
            "sign with ring=integer, where a rank without a gradient adds zeros and uniform levels \
             have none",
        )),
        Levels::Optimal if ring == RingSums::Integer => Some((
            "optimal",
            "sign with ring=integer, where all ranks' codes are added up and stand for the same \
             levels",
        )),
        Levels::Sign if bits == 1 => {
            Some(("sign", "uniform with bits=1: a sign alone leaves no bit for a magnitude"))
        }
        Levels::Optimal if !matches!(bits, 2 | 4) => Some((
            "optimal",
            "sign or uniform with this many bits; optimal goes with bits=2 and bits=4",
        )),
        _ => None,
    };
    if let Some((found, allowed)) = refused {
        let found = found.to_owned();
        return Err(CodecSpecError::BadValue { codec: "qsgd", option: "levels", found, allowed });
    }
    Ok(QsgdOptions { bits, bucket, norm, levels, ring })
}

/// The options of a text, taken one after another; what is left over at the end is an error.
pub(crate) struct Options<'a> {
    codec: &'static str,
    given: Vec<(&'a str, &'a str)>,
    asked_for: Vec<&'static str>,
}

impl<'a> Options<'a> {
    fn split(codec: &'static str, text: &'a str) -> Result<Options<'a>, CodecSpecError> {
        let mut given: Vec<(&str, &str)> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let Some((key, value)) = part.split_once('=') else {
                return Err(CodecSpecError::NoValue { codec, found: part.to_owned() });
            };
            let (key, value) = (key.trim(), value.trim());
            if given.iter().any(|(other, _)| *other == key) {
                return Err(CodecSpecError::Repeated { codec, option: key.to_owned() });
            }
            given.push((key, value));
        }
        Ok(Options { codec, given, asked_for: Vec::new() })
    }

    fn take(&mut self, option: &'static str) -> Option<&'a str> {
        self.asked_for.push(option);
        let index = self.given.iter().position(|(key, _)| *key == option)?;
        Some(self.given.remove(index).1)
    }

    /// An option that has one of a few values.
    pub(crate) fn choice<T: Copy>(
        &mut self,
        option: &'static str,
        allowed: &'static str,
        choices: &[(&str, T)],
    ) -> Result<Option<T>, CodecSpecError> {
        self.parsed(option, allowed, |text| {
            choices.iter().find(|(name, _)| *name == text).map(|(_, value)| *value)
        })
    }

    /// An option whose text a function understands.
    pub(crate) fn parsed<T>(
        &mut self,
        option: &'static str,
        allowed: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, CodecSpecError> {
        let Some(found) = self.take(option) else { return Ok(None) };
        parse(found).map(Some).ok_or_else(|| CodecSpecError::BadValue {
            codec: self.codec,
            option,
            found: found.to_owned(),
            allowed,
        })
    }

    fn finish(self) -> Result<(), CodecSpecError> {
        let Some((option, _)) = self.given.first() else { return Ok(()) };
        let allowed =
            if self.asked_for.is_empty() { "none".to_owned() } else { self.asked_for.join(", ") };
        let option = (*option).to_owned();
        Err(CodecSpecError::UnknownOption { codec: self.codec, option, allowed })
    }
}

fn parse_bucket(text: &str) -> Option<Bucket> {
    match text {
        "column" => Some(Bucket::Column),
        "tensor" => Some(Bucket::Tensor),
        _ => parse_elements(text).map(Bucket::Elements),
    }
}

pub(super) fn parse_elements(text: &str) -> Option<u32> {
    let bucket = text.parse().ok()?;
    ((32..=BUCKET_MAX).contains(&bucket) && bucket % 32 == 0).then_some(bucket)
}

#[cfg(test)]
mod tests;
