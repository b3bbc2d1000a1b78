//! Options of the sparse codecs, and their texts.

use std::fmt;

use crate::encode::{CodecSpecError, DrawKey, Options};

/// Shares of the elements that deep gradient compression sends in its first steps: a quarter, then
/// a quarter of that, and so on (Lin et al. 2018, section 3.3).
const WARM_UP_RATIOS: [f64; 4] = [0.25, 0.0625, 0.015_625, 0.004];
const RATIO: f64 = 0.001;
const RATIO_ALLOWED: &str = "a number above 0, at most 1";

/// Options of `topk`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopkOptions {
    /// Share of the elements that a worker sends.
    pub ratio: f64,
    /// Share of the elements that an owner sends: up to the number of workers times `ratio` of the
    /// elements of a mean are not zero. As `ratio` unless given.
    pub broadcast_ratio: f64,
}

impl TopkOptions {
    /// The share that is sent on this leg.
    pub(crate) fn ratio_at(&self, key: &DrawKey) -> f64 {
        if key.leg == DrawKey::BROADCAST {
            self.broadcast_ratio
        } else {
            self.ratio
        }
    }

    /// The largest share that is sent on any leg.
    pub(crate) fn ratio_max(&self) -> f64 {
        self.ratio.max(self.broadcast_ratio)
    }

    pub(crate) fn parse(options: &mut Options<'_>) -> Result<TopkOptions, CodecSpecError> {
        let ratio = options.parsed("ratio", RATIO_ALLOWED, parse_ratio)?.unwrap_or(RATIO);
        let broadcast = options.parsed("broadcast_ratio", RATIO_ALLOWED, parse_ratio)?;
        Ok(TopkOptions { ratio, broadcast_ratio: broadcast.unwrap_or(ratio) })
    }
}

impl fmt::Display for TopkOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ratio={},broadcast_ratio={}", self.ratio, self.broadcast_ratio)
    }
}

/// Options of `dgc`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DgcOptions {
    /// How much is sent after the warm-up.
    pub topk: TopkOptions,
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
        let last = self.topk.ratio_at(key);
        if key.step >= self.warmup {
            return last;
        }
        let part = u128::from(key.step) * WARM_UP_RATIOS.len() as u128 / u128::from(self.warmup);
        last.max(WARM_UP_RATIOS[part as usize])
    }

    /// The largest share that is sent in any step on any leg.
    pub(crate) fn ratio_max(&self) -> f64 {
        let first = if self.warmup > 0 { WARM_UP_RATIOS[0] } else { 0.0 };
        self.topk.ratio_max().max(first)
    }

    pub(crate) fn parse(options: &mut Options<'_>) -> Result<DgcOptions, CodecSpecError> {
        let topk = TopkOptions::parse(options)?;
        let momentum = options.parsed("momentum", "at least 0 and below 1", |text| {
            text.parse().ok().filter(|momentum| (0.0..1.0).contains(momentum))
        })?;
        let clip = options.parsed("clip", "a 2-norm above 0, or 0 for none", |text| {
            text.parse().ok().filter(|clip: &f64| clip.is_finite() && *clip >= 0.0)
        })?;
        let warmup = options.parsed("warmup", "a number of steps", |text| text.parse().ok())?;
        Ok(DgcOptions {
            topk,
            momentum: momentum.unwrap_or(0.9),
            clip: clip.unwrap_or(0.0),
            warmup: warmup.unwrap_or(0),
        })
    }
}

impl fmt::Display for DgcOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DgcOptions { topk, momentum, clip, warmup } = self;
        write!(formatter, "{topk},momentum={momentum},clip={clip},warmup={warmup}")
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
