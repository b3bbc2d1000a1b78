//! Options of the sparse codecs, and their texts.

use std::fmt;

use crate::encode::codec_text::{parse_elements, ELEMENTS_ALLOWED};
use crate::encode::{CodecSpecError, DrawKey, Options};

/// Bits of a value that is sent as it is.
pub(crate) const F32_BITS: u32 = 32;

/// Shares of the elements that deep gradient compression sends in its first steps: a quarter, then
/// a quarter of that, and so on (Lin et al. 2018, section 3.3).
const WARM_UP_RATIOS: [f64; 4] = [0.25, 0.0625, 0.015_625, 0.004];
const RATIO: f64 = 0.001;
const RATIO_ALLOWED: &str = "a number above 0, at most 1";

/// Shares of the elements that a sparse codec sends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SentShares {
    /// Share of the elements that a worker sends.
    pub ratio: f64,
    /// Share of the elements that an owner sends: up to the number of workers times `ratio` of the
    /// elements of a mean are not zero. As `ratio` unless given.
    pub broadcast_ratio: f64,
}

impl SentShares {
    /// The share that is sent on this leg.
    pub(crate) fn at(&self, key: &DrawKey) -> f64 {
        self.of(key.leg == DrawKey::BROADCAST)
    }

    /// The largest share that is sent on any leg.
    pub(crate) fn max(&self) -> f64 {
        self.ratio.max(self.broadcast_ratio)
    }

    /// The share that is sent of a contribution, or of a mean.
    pub(crate) fn of(&self, is_mean: bool) -> f64 {
        if is_mean {
            self.broadcast_ratio
        } else {
            self.ratio
        }
    }

    fn parse(options: &mut Options<'_>) -> Result<SentShares, CodecSpecError> {
        let ratio = options.parsed("ratio", RATIO_ALLOWED, parse_ratio)?.unwrap_or(RATIO);
        let broadcast = options.parsed("broadcast_ratio", RATIO_ALLOWED, parse_ratio)?;
        Ok(SentShares { ratio, broadcast_ratio: broadcast.unwrap_or(ratio) })
    }
}

impl fmt::Display for SentShares {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ratio={},broadcast_ratio={}", self.ratio, self.broadcast_ratio)
    }
}

/// Options of `topk`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopkOptions {
    /// How much is sent.
    pub shares: SentShares,
    /// Bits of a value that is sent: 2, 4 or 8; [`F32_BITS`] for values as they are.
    pub bits: u32,
    /// Consecutive values of which the share is sent, and that have levels of their own; a whole
    /// slice where there is none.
    pub bucket: Option<u32>,
    /// Share of a worker's residual that is left when the next values are added, above 0; 1: all.
    pub decay: f32,
}

impl TopkOptions {
    /// The share of the residual that is left on this leg: that of an owner does not decay.
    pub(crate) fn decay_at(&self, key: &DrawKey) -> f32 {
        if key.leg == DrawKey::BROADCAST {
            1.0
        } else {
            self.decay
        }
    }

    pub(crate) fn parse(options: &mut Options<'_>) -> Result<TopkOptions, CodecSpecError> {
        let shares = SentShares::parse(options)?;
        let widths = [("2", 2), ("4", 4), ("8", 8), ("32", F32_BITS)];
        let bits = options.choice("bits", "2, 4, 8 or 32", &widths)?;
        let bucket = options.parsed("bucket", ELEMENTS_ALLOWED, parse_elements)?;
        let decay = options.parsed("decay", "above 0, at most 1", |text| {
            text.parse().ok().filter(|&decay: &f32| decay > 0.0 && decay <= 1.0)
        })?;
        Ok(TopkOptions {
            shares,
            bits: bits.unwrap_or(F32_BITS),
            bucket,
            decay: decay.unwrap_or(1.0),
        })
    }
}

impl fmt::Display for TopkOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TopkOptions { shares, bits, bucket, decay } = self;
        write!(formatter, "{shares}")?;
        if *bits != F32_BITS {
            write!(formatter, ",bits={bits}")?;
        }
        if let Some(bucket) = bucket {
            write!(formatter, ",bucket={bucket}")?;
        }
        if *decay < 1.0 {
            write!(formatter, ",decay={decay}")?;
        }
        Ok(())
    }
}

/// Options of `dgc`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DgcOptions {
    /// How much is sent after the warm-up.
    pub shares: SentShares,
    /// Momentum that is taken before the selection; the optimizer has none then.
    pub momentum: f32,
    /// Largest 2-norm of a step's gradient, 0 for no limit. The caller clips all gradients of a rank
    /// together to this over the square root of the number of ranks (Lin et al. 2018, section 3.2).
    pub clip: f64,
    /// Steps over which what is sent falls from a quarter to the ratio, in four parts.
    pub warmup: u64,
}

impl DgcOptions {
    /// The share that is sent on this leg in this step.
    pub(crate) fn ratio_at(&self, key: &DrawKey) -> f64 {
        let last = self.shares.at(key);
        if key.step >= self.warmup {
            return last;
        }
        let part = u128::from(key.step) * WARM_UP_RATIOS.len() as u128 / u128::from(self.warmup);
        last.max(WARM_UP_RATIOS[part as usize])
    }

    /// The largest share that is sent in any step on any leg.
    pub(crate) fn ratio_max(&self) -> f64 {
        let first = if self.warmup > 0 { WARM_UP_RATIOS[0] } else { 0.0 };
        self.shares.max().max(first)
    }

    pub(crate) fn parse(options: &mut Options<'_>) -> Result<DgcOptions, CodecSpecError> {
        let shares = SentShares::parse(options)?;
        let momentum = options.parsed("momentum", "at least 0 and below 1", |text| {
            text.parse().ok().filter(|momentum| (0.0..1.0).contains(momentum))
        })?;
        let clip = options.parsed("clip", "a 2-norm above 0, or 0 for none", |text| {
            text.parse().ok().filter(|clip: &f64| clip.is_finite() && *clip >= 0.0)
        })?;
        let warmup = options.parsed("warmup", "a number of steps", |text| text.parse().ok())?;
        Ok(DgcOptions {
            shares,
            momentum: momentum.unwrap_or(0.9),
            clip: clip.unwrap_or(0.0),
            warmup: warmup.unwrap_or(0),
        })
    }
}

impl fmt::Display for DgcOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DgcOptions { shares, momentum, clip, warmup } = self;
        write!(formatter, "{shares},momentum={momentum},clip={clip},warmup={warmup}")
    }
}

fn parse_ratio(text: &str) -> Option<f64> {
    text.parse().ok().filter(|&ratio| ratio > 0.0 && ratio <= 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CodecSpec, Method};

    fn parsed(text: &str) -> CodecSpec {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn texts_have_one_canonical_form() {
        for (text, canonical) in [
            ("topk", "topk:ratio=0.001,broadcast_ratio=0.001"),
            ("topk:ratio=1e-2,residual=off", "topk:ratio=0.01,broadcast_ratio=0.01,residual=off"),
            ("topk:bits=32,decay=1", "topk:ratio=0.001,broadcast_ratio=0.001"),
            (
                "topk: decay=0.95, bucket=4096, bits=2, ratio=0.02",
                "topk:ratio=0.02,broadcast_ratio=0.02,bits=2,bucket=4096,decay=0.95",
            ),
            (
                "dgc:warmup=40,clip=0.5",
                "dgc:ratio=0.001,broadcast_ratio=0.001,momentum=0.9,clip=0.5,warmup=40",
            ),
        ] {
            assert_eq!(parsed(text).to_string(), canonical);
            assert_eq!(parsed(canonical), parsed(text));
        }
    }

    #[test]
    fn options_out_of_range_are_refused_with_what_would_do() {
        for text in [
            "topk:ratio=0",
            "topk:ratio=1.5",
            "topk:ratio=nan",
            "topk:momentum=0.9",
            "topk:bits=1",
            "topk:bits=16",
            "topk:bucket=100",
            "topk:bucket=tensor",
            "topk:decay=0",
            "topk:decay=1.5",
            "topk:decay=nan",
            "topk:decay=0.95,residual=off",
            "dgc:bits=2",
            "dgc:decay=0.9",
            "dgc:residual=off",
            "dgc:momentum=1",
            "dgc:clip=-1",
            "dgc:clip=inf",
            "dgc:warmup=-4",
        ] {
            assert!(text.parse::<CodecSpec>().is_err(), "{text}");
        }
        let message = "topk:ratio=2".parse::<CodecSpec>().unwrap_err().to_string();
        assert!(message.contains("at most 1"), "{message}");
    }

    #[test]
    fn the_warm_up_falls_to_the_ratio_in_four_parts() {
        let Method::Dgc(options) = parsed("dgc:warmup=8").method else { panic!("it is dgc") };
        let ratio = |step| {
            let key = DrawKey { seed: 0, step, tensor: 0, leg: 0, first_element: 0 };
            options.ratio_at(&key)
        };
        let expected = [0.25, 0.25, 0.0625, 0.0625, 0.015_625, 0.015_625, 0.004, 0.004, 0.001];
        assert_eq!((0..9).map(ratio).collect::<Vec<_>>(), expected);
        assert_eq!(options.ratio_max(), 0.25);
    }
}
