//! Encoded sums on a ring. With any codec each hop decodes the sum so far, adds this rank's gradient
//! and encodes that: one job a hop, and error feedback on each rank of what it encodes. The owner
//! does not encode a sum but the mean, once.
//!
//! Where codes are added up as integers, the scales of a slice's buckets go round first, from the
//! second rank after the owner to the first one after it. That rank knows the largest scale of all and
//! begins the sum; the others add their codes to it. So a slice takes N - 1 hops more, and is rounded
//! once a rank.
//!
//! A rank without a gradient passes on an encoded sum unchanged.

use super::slice::{adds_codes, on_last, own_gradient, RingSlice};
use crate::api::{violation, BufferRef, Job, Operation, Validated};
use crate::cx::Cx;
use crate::jobs::{Contribution, RingWritten, Running, Then, Written};
use alloc::format;
use alloc::vec::Vec;
use gradlane_units::{SliceId, Step};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};

/// One hop of an encoded sum; on the owner, the mean, which goes into place in the same pass.
pub(super) fn start_sum(cx: &mut Cx, slice: SliceId, step: Step, received: Contribution) -> Job {
    let own = own_gradient(cx, slice);
    let last = on_last(cx, slice, step);
    let came = received.buffer();
    let copy_to = last.copy_to;
    let (operation, output, spent) = match came {
        Some(sums) if adds_codes(cx, slice) => {
            (Operation::RingAddCodes { sums: sums.whole(), own, copy_to }, sums, None)
        }
        _ => {
            let output = cx.acquire(cx.plan().bytes_as(slice, PayloadForm::Encoded));
            let operation = Operation::RingEncode {
                received: came.map(BufferRef::whole),
                own,
                divisor: last.divisor,
                output: output.whole(),
                copy_to,
            };
            (operation, output, came)
        }
    };
    start_encoded(cx, slice, step, operation, output, spent)
}

/// Enlarges the scales so far by this rank's.
pub(super) fn start_scales(cx: &mut Cx, slice: SliceId, step: Step, received: Contribution) -> Job {
    let came = received.buffer();
    let bytes = cx.plan().scale_bytes(slice).expect("a slice whose scales go round");
    let buffer = came.unwrap_or_else(|| cx.acquire(bytes));
    let operation = Operation::RingMaxScales {
        received: came.map(BufferRef::whole),
        own: cx.gradient_region(slice),
        output: buffer.whole(),
    };
    let then = Then::Wrote(buffer, Written::Ring(RingWritten::Scales));
    cx.start(operation, Running { slice, step, spent: Vec::new(), then })
}

/// Begins a sum of codes: this rank knows the scales of all.
pub(super) fn start_codes(cx: &mut Cx, slice: SliceId, step: Step, received: Contribution) -> Job {
    let own = own_gradient(cx, slice);
    let spent = received.buffer();
    let output = cx.acquire(cx.plan().bytes_as(slice, PayloadForm::Encoded));
    let scales = spent.map(BufferRef::whole);
    let operation = Operation::RingBeginCodes { scales, own, output: output.whole() };
    start_encoded(cx, slice, step, operation, output, spent)
}

fn start_encoded(
    cx: &mut Cx,
    slice: SliceId,
    step: Step,
    operation: Operation,
    output: BufferRef,
    spent: Option<BufferRef>,
) -> Job {
    let then = Then::Wrote(output, Written::Ring(RingWritten::Sum(PayloadForm::Encoded)));
    cx.start(operation, Running { slice, step, spent: spent.into_iter().collect(), then })
}

/// Checks that scales come before sums, and all frames of a slice in one form.
pub(super) fn check_lap(cx: &Cx, state: &RingSlice, header: &FrameHeader) -> Validated<()> {
    let what = || cx.describe(header);
    let is_scales = header.kind == FrameKind::RingScale;
    if is_scales && state.scaled {
        return violation(format!("{} a second time", what()));
    }
    let shares = cx.plan().scale_bytes(header.slice).is_some();
    if !is_scales && shares && header.form == PayloadForm::Encoded && !state.scaled {
        return violation(format!("{} before its scales had this rank's", what()));
    }
    let absent = header.flags.contains(FrameFlags::ABSENT);
    let has_gradient = !cx.worker().has_nothing(cx.plan(), header.slice);
    if !is_scales && state.scaled && absent && has_gradient {
        return violation(format!("{} with nothing, though this rank has a gradient", what()));
    }
    if state.is_arriving_unlike(header) {
        return violation(format!("{} as {:?} after another", what(), header.form));
    }
    Ok(())
}
