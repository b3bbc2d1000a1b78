//! Keeps one connection to its part of the port.
//!
//! The kernel paces by spreading packets over time, also while the I/O thread is busy elsewhere. It needs
//! a timer for every packet of 64 kB. Where a frame lasts about as long as a turn of the thread, the
//! thread comes by anyway and hands out each frame when it is due: without timers, and a frame that is
//! not due yet can still be overtaken by a more urgent one (decision 48).
//!
//! A frame is due by the generic cell rate algorithm (ITU-T I.371), a token bucket without a timer: up
//! to half a frame early, since the thread serves all its connections in one turn, and a late thread
//! makes up for one frame's time at most.

use gradlane_units::{Bytes, Rate, Time};
use std::time::Duration;

/// Changes up to this share, 1/32, are not worth a system call.
const CHANGE_SHIFT: u32 = 5;

/// The rate of a connection on its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PacedRate {
    pub(super) bytes_per_s: u64,
    /// Time of a usual frame at that rate, where the I/O thread paces the connection; `None`: the kernel
    /// does.
    pub(super) frame_time: Option<Duration>,
}

/// A connection and its part of the port.
#[derive(Debug, Default)]
pub(crate) struct Pacer {
    /// Whether it had more than the kernel took, at any moment since the last sample.
    backlogged: bool,
    /// Bytes that the kernel took since the last sample.
    sent_bytes: u64,
    /// `None`: unlimited.
    rate: Option<PacedRate>,
    /// Due time of the next frame, where the thread paces.
    due: Time,
}

impl Pacer {
    /// Notes bytes that the kernel took.
    pub(crate) fn sent(&mut self, now: Time, bytes: usize) {
        self.sent_bytes += bytes as u64;
        if let Some(PacedRate { bytes_per_s, frame_time: Some(frame_time) }) = self.rate {
            let transmit_time = Rate::of_bytes(bytes_per_s).time_for(Bytes(bytes as u64));
            self.due = self.due.max(now - frame_time) + transmit_time;
        }
    }

    /// Notes that the connection has more than the kernel takes, or more than is due.
    pub(crate) fn note_backlog(&mut self) {
        self.backlogged = true;
    }

    /// Whether the next frame may be given to the kernel.
    pub(crate) fn may_send(&self, now: Time) -> bool {
        self.frame_time().is_none_or(|frame_time| self.due.since(now) <= frame_time / 2)
    }

    /// Time until the thread has to serve the connection, where it paces it: at least half a frame's
    /// time, since a frame that the kernel does not take now waits for acknowledgements, which come with
    /// others.
    pub(crate) fn until_due(&self, now: Time) -> Option<Duration> {
        self.frame_time().map(|frame_time| self.due.since(now).max(frame_time / 2))
    }

    /// Whether the thread paces the connection.
    pub(crate) fn by_thread(&self) -> bool {
        self.frame_time().is_some()
    }

    /// Returns whether the connection was backlogged and the bytes that it sent, and begins a new sample
    /// of a connection that is `full` now or not.
    pub(super) fn take_sample(&mut self, full: bool) -> (bool, u64) {
        let backlogged = std::mem::replace(&mut self.backlogged, full);
        (backlogged, std::mem::take(&mut self.sent_bytes))
    }

    /// Sets the rate, where it differs from the one in force by more than noise. Returns the kernel's new
    /// rate, if that changes; `Some(None)` ends its pacing.
    pub(super) fn set_rate(&mut self, now: Time, rate: Option<PacedRate>) -> Option<Option<u64>> {
        let by_thread = rate.is_some_and(|rate| rate.frame_time.is_some());
        let same = match (self.rate, rate) {
            (
                Some(PacedRate { bytes_per_s: old, .. }),
                Some(PacedRate { bytes_per_s: new, .. }),
            ) => old.abs_diff(new) <= old >> CHANGE_SHIFT,
            (old, new) => old == new,
        };
        if same && by_thread == self.by_thread() {
            return None;
        }
        if !self.by_thread() {
            self.due = now;
        }
        let before = self.kernel_bytes_per_s();
        self.rate = rate;
        let after = self.kernel_bytes_per_s();
        (before != after).then_some(after)
    }

    /// The rate in force; `None`: unlimited.
    pub(super) fn rate_bytes_per_s(&self) -> Option<u64> {
        self.rate.map(|rate| rate.bytes_per_s)
    }

    fn kernel_bytes_per_s(&self) -> Option<u64> {
        self.rate_bytes_per_s().filter(|_| !self.by_thread())
    }

    fn frame_time(&self) -> Option<Duration> {
        self.rate.and_then(|rate| rate.frame_time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With its header.
    const FRAME: usize = 65_536;
    /// At 16 MiB/s one lasts for 3.9 ms.
    const SLOW: u64 = 16 << 20;
    const FRAME_TIME_NS: u64 = 3_906_250;

    fn by_kernel(bytes_per_s: u64) -> Option<PacedRate> {
        Some(PacedRate { bytes_per_s, frame_time: None })
    }

    fn by_thread(bytes_per_s: u64) -> Option<PacedRate> {
        let frame_time = Some(Rate::of_bytes(bytes_per_s).time_for(Bytes(FRAME as u64)));
        Some(PacedRate { bytes_per_s, frame_time })
    }

    fn flow(bytes_per_s: u64) -> Pacer {
        let mut flow = Pacer::default();
        flow.set_rate(Time::ZERO, by_thread(bytes_per_s));
        flow
    }

    /// Sends frames whenever they may go, in turns of this length; frames by turn.
    fn frames_in_turns(flow: &mut Pacer, turns_ns: &[u64]) -> Vec<usize> {
        let mut now = Time::ZERO;
        let mut counts = Vec::new();
        for turn_ns in turns_ns {
            now = Time(now.0 + turn_ns);
            let mut count = 0;
            while flow.may_send(now) {
                flow.sent(now, FRAME);
                count += 1;
            }
            counts.push(count);
        }
        counts
    }

    #[test]
    fn the_kernel_is_told_what_it_has_to_pace_and_no_more() {
        const FAST: u64 = 100 << 20;
        let mut flow = Pacer::default();
        assert_eq!(flow.set_rate(Time::ZERO, by_kernel(FAST)), Some(Some(FAST)));
        assert!(!flow.by_thread() && flow.may_send(Time::ZERO));
        assert_eq!(flow.until_due(Time::ZERO), None);
        assert_eq!(flow.set_rate(Time::ZERO, by_thread(FAST)), Some(None), "it lets go of it");
        assert!(flow.by_thread());
        assert_eq!(flow.set_rate(Time::ZERO, by_thread(SLOW)), None, "nothing to tell the kernel");
        assert_eq!(flow.rate_bytes_per_s(), Some(SLOW));
        assert_eq!(flow.set_rate(Time::ZERO, by_thread(SLOW + 1)), None, "noise");
        assert_eq!(flow.rate_bytes_per_s(), Some(SLOW));
        assert_eq!(flow.set_rate(Time::ZERO, by_kernel(SLOW)), Some(Some(SLOW)));
        assert_eq!(flow.set_rate(Time::ZERO, by_kernel(SLOW + 1)), None, "noise");
        assert_eq!(flow.set_rate(Time::ZERO, None), Some(None), "as fast as it goes");
        assert!(!flow.by_thread() && flow.may_send(Time::ZERO));
    }

    #[test]
    fn one_frame_goes_in_each_turn_of_its_length() {
        let counts = frames_in_turns(&mut flow(SLOW), &[FRAME_TIME_NS; 20]);
        assert!(counts[1..].iter().all(|&count| count == 1), "{counts:?}");
    }

    #[test]
    fn as_much_goes_in_a_second_whatever_the_turns_are() {
        for turn_ns in [10_000, 1_000_000, 3_000_000, 5_000_000, 7_800_000] {
            let turns = vec![turn_ns; (1_000_000_000 / turn_ns) as usize];
            let sent: usize = frames_in_turns(&mut flow(SLOW), &turns).iter().sum();
            assert!((254..=259).contains(&sent), "{sent} of 256 in turns of {turn_ns} ns");
        }
    }

    #[test]
    fn a_frame_goes_half_its_time_early_and_no_earlier() {
        let mut flow = flow(SLOW);
        let now = Time(1_000 * FRAME_TIME_NS);
        flow.sent(now, FRAME);
        flow.sent(now, FRAME);
        assert!(!flow.may_send(Time(now.0 + FRAME_TIME_NS / 2 - 1)));
        assert!(flow.may_send(Time(now.0 + FRAME_TIME_NS / 2)));
        assert_eq!(
            flow.until_due(now),
            Some(Duration::from_nanos(FRAME_TIME_NS)),
            "until it is due"
        );
        assert_eq!(
            flow.until_due(Time(now.0 + FRAME_TIME_NS)),
            Some(Duration::from_nanos(FRAME_TIME_NS / 2))
        );
    }

    #[test]
    fn a_late_turn_makes_up_for_one_frame_and_no_more() {
        let mut flow = flow(SLOW);
        let counts = frames_in_turns(
            &mut flow,
            &[FRAME_TIME_NS, 2 * FRAME_TIME_NS, FRAME_TIME_NS, 100 * FRAME_TIME_NS],
        );
        assert_eq!(counts, [2, 2, 1, 2]);
    }

    #[test]
    fn small_frames_go_together_up_to_the_bytes_of_a_usual_one_and_a_half() {
        let mut flow = flow(SLOW);
        let now = Time(1_000 * FRAME_TIME_NS);
        let mut bytes = 0;
        while flow.may_send(now) {
            flow.sent(now, 1_024);
            bytes += 1_024;
        }
        // The bytes saved up in a rest, and half a frame early.
        assert!((98_304..=99_328).contains(&bytes), "{bytes}");
    }
}
