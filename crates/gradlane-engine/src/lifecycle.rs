//! The end of a session: orderly (finish, goodbye, closed), by a lost or misbehaving peer, by an abort,
//! or because nothing moves. Whatever the reason, it is said once, with what was outstanding, and
//! told to the other ranks, so that everyone names the same culprit.

use crate::engine::Engine;
use crate::error::{Failure, Outstanding, UsageError};
use crate::io::Event;
use crate::rank_set::RankSet;
use crate::receive::Validated;
use crate::scheduler::{Body, Message};
use crate::scheme::Scheme;
use crate::server::OwnedSlice;
use crate::strategy::Synchrony;
use crate::worker::Phase;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::time::Duration;
use gradlane_units::{Rank, SliceId, Step, TensorId, Time};
use gradlane_wire::{escaped, FrameKind};

/// Says in an abort frame that no rank in particular is to blame.
const NOBODY: u32 = u32::MAX;
/// Says in an abort frame that the link between two ranks is to blame, which the reason names.
const A_LINK: u32 = u32::MAX - 1;
/// Longest reason that is sent to the others.
const REASON_BYTES_MAX: usize = 2048;

#[derive(Debug)]
pub(crate) struct Lifecycle {
    now: Time,
    progress_at: Time,
    /// Why the session is over, once it is.
    ended: Option<String>,
    finishing: bool,
    goodbye_said: bool,
    closed: bool,
    /// Peers that have left in good order, and the last step they completed.
    departed: BTreeMap<Rank, Step>,
    lost: RankSet,
}

impl Lifecycle {
    /// The life of a rank; one that only serves leaves of itself, when the others have.
    pub(crate) fn new(world_size: u32, is_dedicated_server: bool) -> Lifecycle {
        Lifecycle {
            now: Time::ZERO,
            progress_at: Time::ZERO,
            ended: None,
            finishing: is_dedicated_server,
            goodbye_said: false,
            closed: false,
            departed: BTreeMap::new(),
            lost: RankSet::empty(world_size),
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    pub(crate) fn has_departed(&self, peer: Rank) -> bool {
        self.departed.contains_key(&peer)
    }

    /// The last step of those that have left in good order.
    pub(crate) fn last_departed(&self) -> Step {
        self.departed.values().max().copied().unwrap_or_default()
    }

    pub(crate) fn now(&self) -> Time {
        self.now
    }

    pub(crate) fn progressed(&mut self) {
        self.progress_at = self.now;
    }

    pub(crate) fn deadline(&self, timeout: Duration) -> Time {
        self.progress_at + timeout
    }

    pub(crate) fn check_open(&self) -> Result<(), UsageError> {
        match &self.ended {
            Some(reason) => Err(UsageError::Ended { reason: reason.clone() }),
            None if self.finishing => {
                Err(UsageError::Ended { reason: "it was closed".to_string() })
            }
            None => Ok(()),
        }
    }
}

impl Engine {
    /// It is `now`. Without progress for the progress timeout the session fails, naming the ranks
    /// that are missing.
    pub fn handle_time(&mut self, now: Time) {
        self.lifecycle.now = self.lifecycle.now.max(now);
        let is_due = self.decision_timeout().is_some_and(|due| due <= self.lifecycle.now);
        if is_due && !self.lifecycle.has_ended() {
            self.decide();
        }
        let timeout = self.progress_timeout();
        let late = self.lifecycle.now >= self.lifecycle.deadline(timeout);
        if !late || self.lifecycle.has_ended() {
            return;
        }
        if self.waits_for_others() {
            let outstanding = self.outstanding();
            let ranks: Vec<String> = outstanding.ranks.iter().map(|it| it.to_string()).collect();
            let reason = format!(
                "no progress for {} s: waiting for {}, connected but not taking part (if it evaluates, \
                 saves or loads for longer than that: progress_timeout_s, on all ranks)",
                timeout.as_secs_f64(),
                ranks.join(", ")
            );
            let culprit = outstanding.ranks.first().copied();
            self.fail(culprit, &reason, true);
        } else if self.is_dedicated_server() {
            // The ranks that train are between two steps.
            self.lifecycle.progressed();
        }
    }

    /// The connection to a peer is gone: closed, reset, or silent for too long. After the peer's
    /// goodbye that is in order.
    pub fn handle_peer_lost(&mut self, peer: Rank, reason: &str) {
        self.lifecycle.lost.insert(peer);
        self.scheduler.set_writable(peer, false);
        // Who updates each push alone is needed until everybody has left, this rank included.
        let serves = self.serves_to_the_end() && !self.lifecycle.goodbye_said;
        let departed = self.lifecycle.has_departed(peer) && !serves;
        if departed || self.lifecycle.has_ended() || self.lifecycle.closed {
            return;
        }
        let reason = format!("{peer} was lost: {reason}");
        self.fail(Some(peer), &reason, false);
    }

    /// Nothing was heard of a peer for too long: asks the other ranks whether they hear it. Returns
    /// whether there is anybody to ask.
    pub fn suspect(&mut self, peer: Rank) -> bool {
        let mut others = RankSet::all_but(self.plan.world_size, self.rank());
        others.remove(peer);
        // Those that have said goodbye are still there until everybody has.
        for rank in self.lifecycle.lost.iter() {
            others.remove(rank);
        }
        if others.is_empty() || self.lifecycle.has_ended() || self.lifecycle.closed {
            return false;
        }
        let header = self.control_header(FrameKind::Suspect);
        let body = Body::Inline(peer.0.to_le_bytes().to_vec());
        self.scheduler.push_shared(others, self.keys.control(), Message { header, body });
        true
    }

    pub(crate) fn peer_suspects(&mut self, peer: Rank, payload: &[u8]) -> Validated<()> {
        let suspect = <[u8; 4]>::try_from(payload).map_or(NOBODY, u32::from_le_bytes);
        if suspect >= self.plan.world_size || suspect == peer.0 {
            return Err(format!("a suspicion of rank {suspect}"));
        }
        if suspect != self.rank().0 && !self.lifecycle.has_ended() {
            self.events.push_back(Event::Suspected { by: peer, suspect: Rank(suspect) });
        }
        Ok(())
    }

    /// A peer hears nothing of another one, and this rank hears both: the session fails on all ranks
    /// with the same words.
    pub fn blame_link(&mut self, one: Rank, other: Rank) {
        let (first, second) = (one.min(other), one.max(other));
        let reason = format!(
            "the link between {first} and {second} is cut: one hears nothing of the other, and \
             another rank hears both; check the network between their hosts"
        );
        self.fail_as(A_LINK, None, &reason, false);
    }

    /// Gives up and tells the other ranks why.
    pub fn abort(&mut self, reason: &str) {
        let blamed = None;
        self.fail(blamed, reason, false);
    }

    /// A peer broke the protocol or sent a payload with a wrong checksum: the session fails, naming
    /// it.
    pub fn reject_peer(&mut self, peer: Rank, reason: &str) {
        self.fail(Some(peer), reason, false);
    }

    /// There will be no more steps: what is owed is sent, then goodbye. In the middle of a step
    /// that this rank has not finished contributing to, this is an abort.
    pub(crate) fn finish(&mut self) {
        if self.lifecycle.has_ended() || self.lifecycle.finishing {
            return;
        }
        if self.worker.begun && self.worker.uncontributed > 0 {
            let (rank, step) = (self.rank(), self.worker.step);
            self.abort(&format!("{rank} closed its session in the middle of {step}"));
            return;
        }
        self.lifecycle.finishing = true;
        if self.worker.begun {
            self.pull_deferred();
        }
        self.say_goodbye_when_done();
    }

    /// While finishing: says goodbye once nothing is owed, and reports when everyone has.
    pub(crate) fn say_goodbye_when_done(&mut self) {
        if !self.lifecycle.finishing || self.lifecycle.closed || self.lifecycle.has_ended() {
            return;
        }
        let complete = !self.worker.begun || self.worker.incomplete == 0;
        let idle = self.scheduler.is_idle()
            && self.jobs.is_idle()
            && self.encodes.is_idle()
            && self.server.owed.is_empty();
        // With `Async` a goodbye says that this rank pushes no more; it serves the others until
        // they have said the same.
        if !complete || !self.may_leave() || !(idle || self.serves_to_the_end()) {
            return;
        }
        if !self.lifecycle.goodbye_said {
            self.lifecycle.goodbye_said = true;
            let mut header = self.control_header(FrameKind::Goodbye);
            header.step = self.last_step();
            let others = RankSet::all_but(self.plan.world_size, self.rank());
            let key = self.keys.control();
            self.scheduler.push_shared(others, key, Message { header, body: Body::Empty });
        }
        let peers = self.plan.world_size - 1;
        let all_left = self.lifecycle.departed.len() as u32 == peers;
        if all_left && idle && self.scheduler.is_idle() && self.async_owners.is_idle() {
            self.drop_states();
            self.lifecycle.closed = true;
            self.events.push_back(Event::Closed);
        }
    }

    pub(crate) fn peer_said_goodbye(&mut self, peer: Rank, last_step: Step) {
        self.lifecycle.departed.insert(peer, last_step);
        self.check_departed();
        self.say_goodbye_when_done();
    }

    /// Fails when a rank that has left is needed for the current step.
    pub(crate) fn check_departed(&mut self) {
        let complete = !self.worker.begun || self.worker.incomplete == 0;
        if self.lifecycle.has_ended() || complete || self.serves_to_the_end() {
            return;
        }
        let step = self.worker.step;
        let gone = self.lifecycle.departed.iter().find(|&(_, &last)| last < step);
        if let Some((&peer, &last)) = gone {
            let reason = format!(
                "{peer} left in good order after {last}, but {step} needs it: do all ranks run \
                 the same number of steps?"
            );
            self.fail(Some(peer), &reason, false);
        }
    }

    pub(crate) fn peer_aborted(&mut self, peer: Rank, payload: &[u8]) {
        let (blamed, text) = payload.split_at(payload.len().min(4));
        let blamed = <[u8; 4]>::try_from(blamed).map_or(NOBODY, u32::from_le_bytes);
        // A rank that was given up, and goes on, is told so as well.
        let culprit = if blamed < self.plan.world_size { Rank(blamed) } else { peer };
        let text = String::from_utf8_lossy(text).into_owned();
        if blamed == A_LINK {
            return self.fail_as(A_LINK, None, &text, false);
        }
        let reason = if blamed == NOBODY || culprit == peer {
            format!("{peer} gave up: {text}")
        } else {
            format!("{text} (reported by {peer})")
        };
        self.fail(Some(culprit), &reason, false);
    }

    /// Ends the session once: drops what is queued, tells the other ranks, reports.
    fn fail(&mut self, culprit: Option<Rank>, reason: &str, timed_out: bool) {
        self.fail_as(culprit.map_or(NOBODY, |rank| rank.0), culprit, reason, timed_out);
    }

    /// As `fail`, with the blame as the other ranks are told it.
    fn fail_as(&mut self, blamed: u32, culprit: Option<Rank>, reason: &str, timed_out: bool) {
        if self.lifecycle.has_ended() || self.lifecycle.closed {
            return;
        }
        // Parts of it come from other ranks and their programs, and it is printed on all.
        let reason = &escaped(reason.as_bytes(), REASON_BYTES_MAX);
        let failure = Failure {
            peer: culprit,
            reason: reason.to_string(),
            outstanding: self.outstanding(),
            last_complete: self.last_complete(),
            timed_out,
        };
        self.lifecycle.ended = Some(reason.to_string());
        self.scheduler.clear();
        self.jobs.clear();
        self.encodes.clear();
        let mut others = RankSet::all_but(self.plan.world_size, self.rank());
        // Until this rank has said goodbye, those that have wait for it, and would blame it.
        let is_done = self.lifecycle.goodbye_said && !self.serves_to_the_end();
        let departed = self.lifecycle.departed.keys().copied().filter(|_| is_done);
        for rank in self.lifecycle.lost.iter().chain(departed) {
            others.remove(rank);
        }
        let mut payload = blamed.to_le_bytes().to_vec();
        let mut end = reason.len().min(REASON_BYTES_MAX);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        payload.extend_from_slice(&reason.as_bytes()[..end]);
        let header = self.control_header(FrameKind::Abort);
        let key = self.keys.control();
        self.scheduler.push_shared(others, key, Message { header, body: Body::Inline(payload) });
        self.events.push_back(Event::Failed(failure));
    }

    /// Whether owners are needed after their own last step.
    fn serves_to_the_end(&self) -> bool {
        self.plan.strategy.synchrony == Synchrony::Async
    }

    /// What this rank waits for in the current step.
    #[must_use]
    pub fn outstanding(&self) -> Outstanding {
        if self.is_dedicated_server() {
            return self.uncollected();
        }
        let step = self.worker.step;
        let mut outstanding = Outstanding { step, ..Outstanding::default() };
        if !self.worker.begun {
            return outstanding;
        }
        let mut owners = RankSet::empty(self.plan.world_size);
        let tensors = self.plan.tensors.iter().enumerate();
        for (index, tensor) in tensors {
            let id = TensorId(index as u32);
            if self.worker.tensor(id).pending == 0 || !self.plan.takes_part(id, step) {
                continue;
            }
            outstanding.tensor_count += 1;
            if outstanding.tensors.len() < Outstanding::NAMES_MAX {
                outstanding.tensors.push(tensor.spec.name.clone());
            }
            for slice in self.plan.slices_of(id) {
                let state = self.worker.slice(slice);
                if state.phase != Phase::Done {
                    let bytes = self.plan.bytes_as(slice, self.result_form(slice));
                    outstanding.bytes += bytes.saturating_sub(state.received_bytes);
                    if tensor.scheme == Scheme::Ps {
                        owners.insert(self.plan.slice(slice).owner);
                    }
                }
            }
        }
        owners.remove(self.rank());
        let missing = self.missing_contributors();
        let mut ranks = if missing.is_empty() { owners } else { missing };
        for rank in self.suspects_round().into_iter().chain(self.suspects_blocks()) {
            ranks.insert(rank);
        }
        outstanding.ranks = ranks.iter().collect();
        outstanding
    }

    /// Ranks whose contributions the owned slices still lack in the current step.
    fn missing_contributors(&self) -> RankSet {
        let mut missing = RankSet::empty(self.plan.world_size);
        let step = self.worker.step;
        if self.is_async(step) {
            return missing;
        }
        let set = self.contributors.set(step);
        if self.drops_stragglers(step) && set.is_none() {
            return self.contributors.awaited(self.plan.world_size);
        }
        let counts = |rank: Rank| set.is_none_or(|set| set.contains(rank));
        for (&slice, owned) in &self.server.owned {
            if owned.step != step || owned.reducing || !self.collects(slice, step) {
                continue;
            }
            for rank in self.lacking(owned).filter(|&rank| counts(rank)) {
                missing.insert(rank);
            }
        }
        missing.remove(self.rank());
        missing
    }

    /// Ranks whose contributions an owned slice lacks.
    pub(crate) fn lacking<'a>(&'a self, owned: &'a OwnedSlice) -> impl Iterator<Item = Rank> + 'a {
        let ranks = (0..self.plan.workers()).map(Rank);
        ranks.filter(|&rank| self.contributes(rank, owned.step) && !owned.contributions.has(rank))
    }

    pub(crate) fn collects(&self, slice: SliceId, step: Step) -> bool {
        self.plan.takes_part(self.plan.slice(slice).tensor, step)
    }
}
