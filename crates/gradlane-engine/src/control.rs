//! One rank's session: who is in, the switch of priorities, which ranks count in a step, time-outs, blame, and the end in
//! good order or not. It tells the lane what to do, and carries no slice itself.

pub(crate) mod blame;
mod contributors;
mod coordinator;
mod interrupted_step;
mod lost_ranks;
mod median_window;
mod priority_switch;
mod session;

pub(crate) use coordinator::StepEntry;

use crate::api::{violation, EngineOptions, Event, Failure, Outstanding, UsageError, Validated};
use crate::lane::Lane;
use crate::membership::Membership;
use crate::plan::Plan;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use blame::{Blame, REASON_BYTES_MAX};
use contributors::{check_frame, Contributors};
use gradlane_units::{Priority, Rank, SquareSum, Step, TensorId, Time};
use gradlane_wire::{escaped, FrameHeader, FrameKind};
use interrupted_step::{Changes, Holdings, Phase};
use priority_switch::PrioritySwitch;
use session::{Clock, Session};

#[derive(Debug)]
pub(crate) struct Control {
    session: Session,
    switch: PrioritySwitch,
    contributors: Contributors,
    /// Agreement on who goes on, where training does when ranks are lost and this lane leads.
    membership: Option<Membership>,
    changes: Changes,
    siblings: Siblings,
    clock: Clock,
    options: EngineOptions,
}

impl Control {
    pub(crate) fn new(mut options: EngineOptions, plan: &Plan) -> Control {
        let rank = options.rank;
        if plan.dedicated_servers > 0 && plan.trains(rank) {
            // Dedicated servers know best which rank is missing: they are to be the first to say so.
            let timeout = &mut options.progress_timeout;
            *timeout = timeout.saturating_add(*timeout / 4);
        }
        let membership = options.going_on.clone().map(|going_on| {
            let refused = plan.check_goes_on();
            assert!(refused.is_ok(), "{refused:?}");
            Membership::new(rank, plan.world_size, going_on)
        });
        Control {
            session: Session::new(plan, rank),
            switch: PrioritySwitch::default(),
            contributors: Contributors::new(plan, rank),
            membership: membership.filter(|_| plan.lane == 0),
            changes: Changes::default(),
            siblings: Siblings::default(),
            clock: Clock::new(),
            options,
        }
    }

    pub(crate) fn fast_forward(&mut self, step: Step) {
        self.contributors.fast_forward(step);
    }

    pub(crate) fn check_open(&self) -> Result<(), UsageError> {
        self.session.check_open()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.session.has_ended()
    }

    /// Notes that something moved.
    pub(crate) fn progressed(&mut self) {
        self.clock.progressed();
    }

    /// Whether training goes on when ranks are lost.
    fn goes_on(&self) -> bool {
        self.options.going_on.is_some()
    }

    /// Whether slices are neither taken nor contributed: a membership changes.
    pub(crate) fn drops_slices(&self) -> bool {
        self.changes.now.as_ref().is_some_and(|change| change.phase != Phase::Resuming)
    }
}

/// Steps.
impl Control {
    /// A step has begun.
    pub(crate) fn on_step_begun(&mut self, lane: &mut Lane, step: Step, entry: StepEntry) {
        self.clock.progressed();
        self.check_departed(lane);
        if lane.cx.worker().is_complete() {
            lane.cx.tell(Event::StepComplete { step });
        }
        lane.begin_contributing(entry == StepEntry::Pass);
        if lane.cx.plan().drops_stragglers(step) {
            self.contributors.on_step_begun(lane, entry, &mut self.clock);
        }
    }

    /// This rank has passed a step whose contributors were known.
    pub(crate) fn note_passed(&mut self, lane: &mut Lane, step: Step) {
        self.contributors.note_passed(&mut lane.cx, step, self.clock.now());
    }

    /// A tensor of the current step was submitted. Its contributions wait while a membership changes, and where a switch of
    /// priorities holds them back.
    pub(crate) fn on_submitted(&mut self, lane: &mut Lane, tensor: TensorId, step: Step) {
        self.clock.progressed();
        if !self.drops_slices() && !self.switch.holds(step, tensor) {
            lane.contribute(tensor);
        }
        if lane.cx.plan().drops_stragglers(step) {
            self.contributors.on_submitted(lane, tensor, &mut self.clock);
        }
    }

    /// Announces another priority vector, on rank 0.
    pub(crate) fn switch_priorities(
        &mut self,
        lane: &mut Lane,
        priorities: Vec<Priority>,
    ) -> Result<(), UsageError> {
        self.session.check_open()?;
        if self.changes.now.is_some() {
            // The order of sending alone would change.
            return Ok(());
        }
        self.switch.announce(&mut lane.cx, priorities)
    }
}

/// Frames.
impl Control {
    /// Whether a frame is of a membership that is over, or of a rank that is in none.
    pub(crate) fn drops(&self, lane: &Lane, from: Rank, kind: FrameKind) -> bool {
        lane.cx.plan().lost.contains(from) || (self.drops_slices() && !kind.is_control())
    }

    /// Whether the lane still hears of frames that were sent to a peer.
    pub(crate) fn counts_sent(&self, peer: Rank) -> bool {
        !(self.session.has_lost(peer) && self.goes_on())
    }

    /// Checks any frame before its payload is taken. Returns whether the lane is to say where that goes.
    pub(crate) fn check(&self, lane: &Lane, from: Rank, header: &FrameHeader) -> Validated<bool> {
        let cx = &lane.cx;
        cx.check_sender(from, header)?;
        if self.drops(lane, from, header.kind) {
            return Ok(false);
        }
        if header.kind.is_about_steps() {
            check_frame(cx, from, header)?;
        } else if header.kind == FrameKind::ServerCommand {
            lane.check_command(from, header)?;
        } else if header.kind.is_control() {
            check_control(cx.plan(), header)?;
        } else if self.session.has_departed(from) && !cx.serves_to_the_end(header, from) {
            return violation(format!("{} after its goodbye", cx.describe(header)));
        } else {
            return Ok(true);
        }
        Ok(false)
    }

    /// Takes a control frame.
    pub(crate) fn take(
        &mut self,
        lane: &mut Lane,
        from: Rank,
        header: &FrameHeader,
        payload: &[u8],
    ) -> Validated<()> {
        if self.drops(lane, from, header.kind) {
            return Ok(());
        }
        match header.kind {
            FrameKind::Membership | FrameKind::Holdings | FrameKind::Resumed => {
                self.take_change(lane, from, header, payload)
            }
            // They are taken up anew from what all ranks have.
            FrameKind::PlanSwitch | FrameKind::PlanSwitchAck if self.drops_slices() => Ok(()),
            kind if kind.is_about_steps() && self.has_ended() => Ok(()),
            kind if kind.is_about_steps() => {
                self.contributors.take(lane, from, (header, payload), &mut self.clock)
            }
            FrameKind::PlanSwitch => PrioritySwitch::take(&mut lane.cx, from, header, payload),
            FrameKind::PlanSwitchAck => {
                let held = self.switch.take_ack(from, header)?;
                held.into_iter().for_each(|tensor| lane.contribute(tensor));
                Ok(())
            }
            FrameKind::Goodbye => {
                self.session.depart(from, header.step);
                self.leave_the_lost(lane);
                self.check_departed(lane);
                Ok(())
            }
            FrameKind::Abort => {
                self.peer_aborted(lane, from, payload);
                Ok(())
            }
            FrameKind::ServerCommand => {
                lane.take_command(from, header);
                Ok(())
            }
            FrameKind::SquareSum if self.has_ended() => Ok(()),
            FrameKind::SquareSum => lane.cx.take_squares(from, header, payload),
            FrameKind::Suspect => self.session.take_suspicion(&mut lane.cx, from, payload),
            _ => Ok(()),
        }
    }
}

/// Time.
impl Control {
    /// When [`Control::handle_time`] wants to be called at the latest.
    pub(crate) fn poll_timeout(&self, lane: &Lane) -> Option<Time> {
        if self.has_ended() {
            return None;
        }
        // Whether a dedicated server waits is looked at when the time has come.
        let waits = lane.cx.is_dedicated_server() || lane.waits_for_others();
        let deadline = waits.then(|| self.clock.deadline(self.options.progress_timeout));
        let agreement = self.membership.as_ref().and_then(Membership::poll_timeout);
        let siblings = self.siblings.poll_timeout();
        self.decision_timeout().into_iter().chain(deadline).chain(agreement).chain(siblings).min()
    }

    /// When rank 0 wants to look again at the progress of the ranks.
    pub(crate) fn decision_timeout(&self) -> Option<Time> {
        self.contributors.decision_timeout()
    }

    /// It is `now`. Without progress for the progress timeout the session fails.
    pub(crate) fn handle_time(&mut self, lane: &mut Lane, now: Time) {
        self.clock.advance(now);
        if self.has_ended() {
            return;
        }
        if self.goes_on() {
            self.tell_membership_time(lane);
        } else {
            self.settle(lane);
        }
        let now = self.clock.now();
        if self.decision_timeout().is_some_and(|due| due <= now) {
            self.contributors.decide(lane, &mut self.clock);
            self.end_if_aborted(lane);
        }
        let timeout = self.options.progress_timeout;
        if now < self.clock.deadline(timeout) || self.has_ended() {
            return;
        }
        if lane.waits_for_others() {
            let outstanding = self.outstanding(lane);
            let ranks: Vec<String> = outstanding.ranks.iter().map(|it| it.to_string()).collect();
            let reason = format!(
                "no progress for {} s: waiting for {}, connected but not taking part (if it evaluates, \
                 saves or loads for longer than that: progress_timeout_s, on all ranks)",
                timeout.as_secs_f64(),
                ranks.join(", ")
            );
            let culprit = outstanding.ranks.first().copied();
            self.fail(lane, culprit.map_or(Blame::Nobody, Blame::Rank), &reason, true);
        } else if lane.cx.is_dedicated_server() {
            // The ranks that train are between two steps.
            self.clock.progressed();
        }
    }

    /// Tensors, bytes and ranks that this rank waits for in the current step.
    pub(crate) fn outstanding(&self, lane: &Lane) -> Outstanding {
        let undecided = !lane.cx.is_dedicated_server() && lane.is_undecided();
        let awaited = undecided.then(|| self.contributors.awaited(lane.cx.plan().world_size));
        lane.outstanding(awaited.as_ref())
    }
}

/// The end in good order.
impl Control {
    /// After a call: ends the session where a component cannot go on, or says goodbye.
    pub(crate) fn settle(&mut self, lane: &mut Lane) {
        self.end_if_aborted(lane);
        if self.changes.now.is_some() {
            self.advance_change(lane);
        }
        self.send_goodbye_when_done(lane);
    }

    pub(crate) fn end_if_aborted(&mut self, lane: &mut Lane) {
        if let Some(reason) = lane.cx.take_abort() {
            self.fail(lane, Blame::Nobody, &reason, false);
        }
    }

    /// There will be no more steps: sends what is owed, then goodbye. In the middle of a step that
    /// this rank has not finished contributing to, this is an abort.
    pub(crate) fn finish(&mut self, lane: &mut Lane) {
        let begun = lane.cx.worker().has_begun();
        if self.check_open().is_ok() && begun && !lane.cx.worker().has_submitted_all() {
            let (rank, step) = (lane.cx.rank(), lane.cx.step());
            let reason = format!("{rank} closed its session in the middle of {step}");
            self.fail(lane, Blame::Nobody, &reason, false);
        } else if self.session.finish() {
            if begun {
                lane.pull_deferred();
            }
            self.send_goodbye_when_done(lane);
        }
    }

    /// While leaving: says goodbye once nothing is owed, and reports when all ranks have.
    fn send_goodbye_when_done(&mut self, lane: &mut Lane) {
        if !self.session.is_leaving() || self.changes.now.is_some() {
            return;
        }
        let worker = lane.cx.worker();
        let complete = !worker.has_begun() || worker.is_complete();
        // A lost rank that has left has all that was owed to it.
        let all_left = self.session.have_departed(lane.cx.others().iter());
        let idle = lane.has_delivered_all(all_left && self.goes_on()) && lane.cx.has_sent_all();
        // In asynchronous training a goodbye says that this rank pushes no more; it serves the others
        // until they have said the same.
        let may = self.may_leave(lane) && self.siblings_let_leave(lane);
        if !complete || !may || !(idle || self.session.serves_to_the_end()) {
            return;
        }
        let last_step = self.last_step(lane);
        self.session.send_goodbye(&mut lane.cx, last_step);
        if let Some(membership) = &mut self.membership {
            membership.note_goodbye();
        }
        if all_left && idle && lane.cx.has_sent_all() && lane.has_replied_to_all() {
            self.leave(lane);
        }
    }

    /// All have left: nothing is kept for them any more.
    fn close(&mut self, lane: &mut Lane) {
        lane.close();
        self.session.close(&mut lane.cx);
    }

    /// Whether this rank may leave: a dedicated server, not before all that train have left.
    fn may_leave(&self, lane: &Lane) -> bool {
        let workers = (0..lane.cx.plan().workers()).map(Rank);
        !lane.cx.is_dedicated_server() || self.session.have_departed(workers)
    }

    /// The last step that this rank takes part in, as its goodbye says: a dedicated server's is that of
    /// all that train.
    fn last_step(&self, lane: &Lane) -> Step {
        if lane.cx.is_dedicated_server() {
            self.session.last_departed()
        } else {
            lane.cx.worker().last_complete().unwrap_or_default()
        }
    }
}

/// Failures.
impl Control {
    /// Fails when a rank that has left is needed for the current step.
    fn check_departed(&mut self, lane: &mut Lane) {
        let worker = lane.cx.worker();
        let complete = !worker.has_begun() || worker.is_complete();
        if self.has_ended() || complete || self.session.serves_to_the_end() {
            return;
        }
        let step = worker.step();
        if let Some((peer, last)) = self.session.departed_before(step) {
            let reason = format!(
                "{peer} left in good order after {last}, but {step} needs it: do all ranks run \
                 the same number of steps?"
            );
            self.fail(lane, Blame::Rank(peer), &reason, false);
        }
    }

    /// The connection to a peer is gone.
    pub(crate) fn handle_peer_lost(&mut self, lane: &mut Lane, peer: Rank, reason: &str) {
        lane.cx.set_writable(peer, false);
        if self.goes_on() {
            self.lose_connection(lane, peer, reason);
        } else if self.session.lose(peer) {
            let reason = format!("{peer} was lost: {reason}");
            self.fail(lane, Blame::Rank(peer), &reason, false);
        }
    }

    /// Asks the other ranks whether they hear a peer.
    pub(crate) fn suspect(&mut self, lane: &mut Lane, peer: Rank) -> Result<(), UsageError> {
        if self.session.suspect(&mut lane.cx, peer) {
            return Ok(());
        }
        Err(UsageError::Argument(format!("there is no rank to ask for {peer}")))
    }

    /// A peer hears nothing of another one, and this rank hears both.
    pub(crate) fn blame_link(&mut self, lane: &mut Lane, one: Rank, other: Rank) {
        if self.goes_on() {
            // The ranks collect what each has lost, and agree on who leaves.
            return;
        }
        let (first, second) = (one.min(other), one.max(other));
        let reason = format!(
            "the link between {first} and {second} is cut: one hears nothing of the other, and \
             another rank hears both; check the network between their hosts"
        );
        self.fail(lane, Blame::Link, &reason, false);
    }

    /// Gives up and tells the other ranks why.
    pub(crate) fn abort(&mut self, lane: &mut Lane, reason: &str) {
        self.fail(lane, Blame::Nobody, reason, false);
    }

    /// A peer broke the protocol. Where training goes on without lost ranks, either of the two may be at fault: their
    /// link is cut, and the ranks agree on who leaves.
    pub(crate) fn reject_peer(&mut self, lane: &mut Lane, peer: Rank, reason: &str) {
        if self.goes_on() {
            return self.drop_peer(lane, peer, reason);
        }
        self.fail(lane, Blame::Rank(peer), reason, false);
    }

    fn peer_aborted(&mut self, lane: &mut Lane, peer: Rank, payload: &[u8]) {
        let (blame, text) = Blame::read(lane.cx.plan(), payload);
        if self.goes_on() && blame != Blame::All {
            return self.drop_peer(lane, peer, &format!("it gave up: {text}"));
        }
        match blame {
            Blame::Link | Blame::All => self.fail(lane, blame, &text, false),
            // A rank that was given up, and goes on, is told so as well.
            Blame::Rank(culprit) if culprit != peer => {
                self.fail(lane, blame, &format!("{text} (reported by {peer})"), false);
            }
            _ => self.fail(lane, Blame::Rank(peer), &format!("{peer} gave up: {text}"), false),
        }
    }

    /// Ends the session once: drops all queues, tells the other ranks, reports.
    fn fail(&mut self, lane: &mut Lane, blame: Blame, reason: &str, timed_out: bool) {
        if self.session.is_over() {
            return;
        }
        // Parts of it come from other ranks and their programs, and it is printed on all.
        let reason = escaped(reason.as_bytes(), REASON_BYTES_MAX);
        let failure = Failure {
            peer: blame.rank(),
            notice: blame.payload(&reason),
            reason,
            outstanding: self.outstanding(lane),
            last_complete: lane.last_complete(),
            timed_out,
        };
        self.session.fail(&mut lane.cx, &failure);
        lane.cx.tell(Event::Failed(failure));
    }

    /// Another lane of this rank has failed: this one tells its peers the same, and ends without an event.
    pub(crate) fn end_as(&mut self, lane: &mut Lane, failure: &Failure) {
        if !self.session.is_over() {
            self.session.fail(&mut lane.cx, failure);
        }
    }
}

// The other lanes of this rank, where training goes on when ranks are lost. In the first lane the ranks agree on who
// goes on; it tells the others, and each of them finishes the step in flight with its own peers. It says goodbye
// when the others need nobody any more, so all of a rank's lanes are there until no rank needs any.

/// What a lane knows of the others of its rank.
#[derive(Debug, Default)]
pub(crate) struct Siblings {
    /// In the first: lanes in which all ranks have said goodbye, and nothing is owed.
    through: u32,
    /// In the others: whether the first has been told that of this one.
    has_told: bool,
    /// In the first: peers that another lane has lost, until when the peer may end this lane's connection too and
    /// say why, and the reason.
    lost: BTreeMap<Rank, (Time, String)>,
}

impl Siblings {
    /// Whether all have said goodbye in this lane, which is not the first.
    pub(crate) fn is_through(&self) -> bool {
        self.has_told
    }

    /// All have said goodbye in this lane, which is not the first; whether the first is to be told.
    pub(crate) fn note_through(&mut self) -> bool {
        !core::mem::replace(&mut self.has_told, true)
    }

    /// All have said goodbye in another lane.
    pub(crate) fn note_other_through(&mut self) {
        self.through += 1;
    }

    /// Whether all have said goodbye in so many other lanes.
    pub(crate) fn are_through(&self, other_lanes: u32) -> bool {
        self.through == other_lanes
    }

    /// Another lane has lost a peer, which may end this lane's connection until `due`.
    pub(crate) fn note_lost(&mut self, peer: Rank, due: Time, reason: String) {
        self.lost.entry(peer).or_insert((due, reason));
    }

    /// A peer that only another lane has lost for long enough, and the reason.
    pub(crate) fn take_due(&mut self, now: Time) -> Option<(Rank, String)> {
        let peer = self.lost.iter().find(|(_, (due, _))| *due <= now).map(|(&peer, _)| peer)?;
        self.lost.remove(&peer).map(|(_, reason)| (peer, reason))
    }

    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        self.lost.values().map(|(due, _)| *due).min()
    }
}

// Checks of control frames: the length of each kind.

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
