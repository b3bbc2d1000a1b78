//! The switch to another priority vector, at the same step boundary on all ranks.
//!
//! Rank 0 observes the forward order and announces a new vector. It holds back its own contributions
//! to the step before the switch until every rank has acknowledged, so no rank can reach the switch
//! without the vector. Where ranks may be in different steps, each takes the vector up at a step of its
//! own.

use crate::api::{violation, UsageError, Validated};
use crate::cx::Cx;
use crate::rank_set::RankSet;
use crate::transmit::Body;
use alloc::format;
use alloc::string::ToString;
use alloc::vec::Vec;
use gradlane_units::{Priority, Rank, Step, TensorId};
use gradlane_wire::{FrameHeader, FrameKind, MAX_FRAME_BYTES};

/// Rank 0's side of a switch.
#[derive(Debug)]
struct Pending {
    /// Version announced.
    version: u32,
    /// First step whose contributions wait for the acknowledgements.
    hold_from: Step,
    /// Ranks that have not acknowledged.
    missing: RankSet,
    /// Contributions held back, in the order in which they came.
    held: Vec<TensorId>,
}

#[derive(Debug, Default)]
pub(crate) struct PrioritySwitch {
    pending: Option<Pending>,
}

/// Steps from a rank's own to the one from which new priorities are in force, at most.
const STEPS_AHEAD_MAX: u64 = 3;

impl PrioritySwitch {
    /// Announces another vector, on rank 0.
    pub(crate) fn announce(
        &mut self,
        cx: &mut Cx,
        priorities: Vec<Priority>,
    ) -> Result<(), UsageError> {
        let refuse = |message: &str| Err(UsageError::Argument(message.to_string()));
        if cx.rank() != Rank(0) {
            return refuse("only rank 0 may switch priorities");
        }
        if priorities.len() != cx.plan().tensors.len() {
            return refuse("a priority vector has one entry a tensor");
        }
        let independent = cx.plan().switches_independently();
        let next = cx.step().next();
        let from = if independent { next } else { next.next() };
        let unfinished = self.pending.is_some() || cx.priorities().newest().1 >= from;
        if !cx.worker().has_begun() || unfinished {
            return refuse("the last switch of priorities is not finished");
        }
        let mut payload = Vec::with_capacity(8 + 4 * priorities.len());
        payload.extend_from_slice(&from.0.to_le_bytes());
        for priority in &priorities {
            payload.extend_from_slice(&priority.0.to_le_bytes());
        }
        if payload.len() > MAX_FRAME_BYTES as usize {
            return refuse("too many tensors for one priority vector");
        }
        if cx.priorities().newest().0 == u32::MAX {
            return refuse("priorities were switched 4294967295 times: open a new session");
        }
        let version = cx.add_priorities(from, priorities);
        let missing = cx.others();
        if missing.is_empty() {
            return Ok(());
        }
        let header =
            FrameHeader { plan_version: version, ..cx.control_header(FrameKind::PlanSwitch) };
        cx.send_control(missing.clone(), header, Body::Inline(payload));
        if !independent {
            let held = Vec::new();
            self.pending = Some(Pending { version, hold_from: next, missing, held });
        }
        Ok(())
    }

    /// Ranks were lost: all go on with the newest priorities that all have.
    pub(crate) fn settle(&mut self, cx: &mut Cx, version: u32) {
        self.pending = None;
        cx.forget_priorities_after(version);
    }

    /// Holds back this rank's contribution of a tensor, if the switch needs it; whether it does.
    pub(crate) fn holds(&mut self, step: Step, tensor: TensorId) -> bool {
        let pending = self.pending.as_mut().filter(|it| step >= it.hold_from);
        pending.map(|it| it.held.push(tensor)).is_some()
    }

    /// Takes a vector that rank 0 has announced.
    pub(crate) fn take(
        cx: &mut Cx,
        from: Rank,
        header: &FrameHeader,
        payload: &[u8],
    ) -> Validated<()> {
        let mut words = payload.chunks_exact(4).map(|word| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(word);
            u32::from_le_bytes(bytes)
        });
        let (Some(low), Some(high)) = (words.next(), words.next()) else {
            return violation(format!("a priority vector of {} bytes", payload.len()));
        };
        let step = Step(u64::from(low) | u64::from(high) << 32);
        let (newest, newest_from) = cx.priorities().newest();
        let next = Some(header.plan_version) == newest.checked_add(1);
        let independent = cx.plan().switches_independently();
        // Rank 0 is in this rank's step, or in one beside it; a rank that trains nothing is in none.
        let far = !cx.is_dedicated_server() && step.0 > cx.step().0.saturating_add(STEPS_AHEAD_MAX);
        let late = step <= cx.step() || step <= newest_from;
        if from != Rank(0) || !next || ((late || far) && !independent) {
            return violation(format!(
                "priorities of version {} from {step}; this rank has version {newest} and is in {}",
                header.plan_version,
                cx.step()
            ));
        }
        let priorities: Vec<Priority> = words.map(|word| Priority(word as i32)).collect();
        if priorities.len() != cx.plan().tensors.len() {
            return violation(format!("{} priorities", priorities.len()));
        }
        if independent {
            cx.add_priorities(cx.step().next(), priorities);
            return Ok(());
        }
        cx.add_priorities(step, priorities);
        let mut ack = cx.control_header(FrameKind::PlanSwitchAck);
        ack.plan_version = header.plan_version;
        cx.send_control_to(from, ack, Body::Empty);
        Ok(())
    }

    /// A rank has taken up the priorities that this one announced. With the last acknowledgement the
    /// contributions that were held back are returned.
    pub(crate) fn take_ack(
        &mut self,
        from: Rank,
        header: &FrameHeader,
    ) -> Validated<Vec<TensorId>> {
        let version = header.plan_version;
        let expected = self.pending.as_mut().filter(|it| it.version == version);
        let Some(pending) = expected.filter(|it| it.missing.contains(from)) else {
            return violation(format!("an unexpected acknowledgement of plan version {version}"));
        };
        pending.missing.remove(from);
        if !pending.missing.is_empty() {
            return Ok(Vec::new());
        }
        Ok(self.pending.take().map(|it| it.held).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Engine, EngineOptions, Input, Plan, Strategy, TensorKind, TensorSpec, Update};
    use gradlane_units::Dtype;

    /// An engine of one tensor in its first step.
    fn engine(rank: u32) -> Engine {
        let spec = TensorSpec {
            name: "weight".to_string(),
            numel: 1,
            dtype: Dtype::F32,
            kind: TensorKind::Parameter,
        };
        let strategy = Strategy::named("p3", None, 0).expect("a strategy");
        let plan = Plan::build(alloc::vec![spec], strategy, Update::Worker, 2);
        let plan = alloc::sync::Arc::new(plan.expect("a plan"));
        Engine::after_initial(EngineOptions::new(Rank(rank)), plan, alloc::vec![Priority(0)])
    }

    #[test]
    fn priorities_of_steps_that_no_rank_is_near_are_refused() {
        for step in [u64::MAX, u64::MAX - 1, 5] {
            let mut engine = engine(1);
            engine.handle(Input::StepBegin(Step(1))).expect("it begins");
            let mut payload = step.to_le_bytes().to_vec();
            payload.extend_from_slice(&7_i32.to_le_bytes());
            let length = payload.len() as u32;
            let header = FrameHeader {
                kind: FrameKind::PlanSwitch,
                form: gradlane_wire::PayloadForm::Raw,
                flags: gradlane_wire::FrameFlags::NONE,
                step: Step(1),
                generation: 0,
                plan_version: 1,
                tensor: TensorId(0),
                slice: gradlane_units::SliceId(0),
                priority: Priority(0),
                sender: Rank(0),
                offset: 0,
                length,
                block_bytes: 0,
                hop: 0,
                payload_checksum: 0,
            };
            engine.handle(Input::Header(Rank(0), header)).expect("its form is right");
            let refused = engine.handle(Input::Control(Rank(0), header, payload));
            let error = refused.expect_err("no rank is near that step");
            assert!(error.to_string().contains("priorities of version 1"), "{error}");
        }
    }

    #[test]
    fn versions_run_out_in_words() {
        let mut engine = engine(0);
        engine.priorities_mut().set_version(u32::MAX);
        let refused = engine.handle(Input::SwitchPriorities(alloc::vec![Priority(1)]));
        assert!(refused.is_err_and(|error| error.to_string().contains("4294967295 times")));
    }
}
