//! Pulls, in the strategies in which workers ask for results: `kvstore` when all of a tensor is announced,
//! `deferred-pull` when the next iteration begins.

use super::owner::Owner;
use crate::api::{violation, Validated};
use crate::cx::Cx;
use crate::plan::PullRule;
use crate::transmit::Body;
use crate::worker::Submission;
use alloc::format;
use gradlane_units::{Rank, TensorId};
use gradlane_wire::{FrameHeader, FrameKind};

/// Sends the pulls that waited for the next iteration.
pub(crate) fn pull_deferred(cx: &mut Cx) {
    let step = cx.step();
    if cx.plan().strategy.pull != PullRule::NextStep || step.is_initial() {
        return;
    }
    for tensor in cx.plan().tensor_ids() {
        if cx.plan().takes_part(tensor, step) {
            pull(cx, tensor);
        }
    }
}

/// The owner of one slice of the tensor has announced it; the last announcement is followed by pulls.
pub(super) fn announced(cx: &mut Cx, tensor: TensorId) {
    if !cx.step().is_initial() && cx.announce(tensor) {
        pull(cx, tensor);
    }
}

/// Sends the pulls of a tensor once.
fn pull(cx: &mut Cx, tensor: TensorId) {
    if cx.pull(tensor) {
        return;
    }
    let step = cx.step();
    let priority = cx.priorities().priority(step, tensor);
    for slice in cx.plan().slices_of(tensor) {
        let owner = cx.plan().slice(slice).owner;
        if owner != cx.rank() {
            let header = cx.slice_header(FrameKind::Pull, step, slice, priority);
            cx.send_control_to(owner, header, Body::Empty);
        }
    }
}

pub(super) fn check_notify(cx: &Cx, from: Rank, header: &FrameHeader) -> Validated<()> {
    let (worker, tensor) = (cx.worker(), header.tensor);
    let expected = cx.plan().strategy.pull == PullRule::AfterNotice
        && header.step == worker.step()
        && from != cx.rank()
        && worker.submission(tensor) != Submission::Missing
        && worker.awaits_announcement(cx.plan(), tensor);
    if expected {
        return Ok(());
    }
    let (what, step) = (cx.describe(header), worker.step());
    violation(format!("{what}, which this rank does not expect in {step}"))
}

pub(super) fn check_pull(
    cx: &Cx,
    owner: &Owner,
    from: Rank,
    header: &FrameHeader,
) -> Validated<()> {
    let owned = owner.get(header.slice).ok_or("not owned")?;
    let kept = owner.pending(header.slice, header.step);
    let ready = kept.is_some_and(|pending| pending.to_pull.contains(from));
    let early = cx.plan().strategy.pull == PullRule::NextStep
        && owned.step == header.step
        && !owned.early_pulls.contains(&from);
    if ready || early {
        return Ok(());
    }
    violation(format!("{}, which is not to be pulled (again)", cx.describe(header)))
}
