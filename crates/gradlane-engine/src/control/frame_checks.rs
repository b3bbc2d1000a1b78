//! Checks of control frames: the length of each kind.

use super::interrupted_step::Holdings;
use crate::membership::Membership;
use crate::plan::Plan;
use crate::violation::{violation, Validated};
use alloc::format;
use gradlane_units::SquareSum;
use gradlane_wire::{FrameHeader, FrameKind};

/// Longest reason in an abort frame.
const ABORT_TEXT_BYTES_MAX: u32 = 4096;

/// Checks the length of a control frame.
pub(crate) fn check_control(plan: &Plan, header: &FrameHeader) -> Validated<()> {
    let FrameHeader { kind, length, .. } = *header;
    match kind {
        FrameKind::Abort if length <= ABORT_TEXT_BYTES_MAX => Ok(()),
        FrameKind::Abort => violation(format!("an abort with a reason of {length} bytes")),
        FrameKind::SquareSum => {
            let bytes = SquareSum::BYTES_MIN as u32..=SquareSum::BYTES_MAX as u32;
            if bytes.contains(&length) {
                return Ok(());
            }
            violation(format!("a sum of squares of {length} bytes"))
        }
        FrameKind::Membership => {
            let most = Membership::message_bytes_max(plan.world_size);
            if length as usize <= most {
                return Ok(());
            }
            violation(format!("a message on membership of {length} bytes; at most {most}"))
        }
        FrameKind::Holdings => {
            let expected = Holdings::payload_bytes(plan);
            if length as usize == expected {
                return Ok(());
            }
            violation(format!("holdings of {length} bytes instead of {expected}"))
        }
        FrameKind::Suspect | FrameKind::Resumed if length == 4 => Ok(()),
        FrameKind::Resumed => violation(format!("a resumption of {length} bytes")),
        FrameKind::Suspect => violation(format!("a suspicion of {length} bytes")),
        FrameKind::PlanSwitch => {
            let expected = 8 + 4 * plan.tensors.len() as u64;
            if u64::from(length) == expected {
                return Ok(());
            }
            violation(format!("a priority vector of {length} bytes instead of {expected}"))
        }
        _ if length == 0 => Ok(()),
        _ => violation(format!("{kind:?} with a payload of {length} bytes")),
    }
}
