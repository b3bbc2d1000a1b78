//! CPU time of threads, and refused callers: what is counted before there is a plan, or without one.

use crate::metrics::snapshot::Refusal;
use crate::sys::lock;
use crate::sys::syscall::ThreadClock;
use gradlane_units::Rank;
use std::collections::VecDeque;
use std::sync::Mutex;

/// Refusals that are kept; older ones are only counted.
const REFUSALS_KEPT: usize = 64;
/// Refusals that are all logged; after these, those that double the number.
const REFUSALS_LOGGED: u64 = 16;

/// CPU time of one thread, also after its end.
#[derive(Debug, Default)]
struct ThreadCpu {
    clock: Option<ThreadClock>,
    final_ns: u64,
}

/// The counters.
#[derive(Debug, Default)]
pub(crate) struct HostCounters {
    threads: Mutex<Vec<(&'static str, ThreadCpu)>>,
    /// All refusals, and the last of them.
    pub(super) refusals: Mutex<(u64, VecDeque<Refusal>)>,
}

impl HostCounters {
    /// Counts the calling thread's CPU time under `name` until the returned guard is dropped.
    pub(crate) fn count_this_thread(&self, name: &'static str) -> ThreadCount<'_> {
        let mut threads = lock(&self.threads);
        threads.push((name, ThreadCpu { clock: ThreadClock::of_this_thread(), final_ns: 0 }));
        ThreadCount { counters: self, index: threads.len() - 1 }
    }

    /// Notes a refused caller and logs it, of many callers less and less often.
    pub(crate) fn refuse(&self, rank: Rank, address: &str, reason: &str) {
        let mut refusals = lock(&self.refusals);
        refusals.0 += 1;
        if is_logged(refusals.0) {
            let count = refusals.0;
            log::warn!("{rank} refused a connection from {address}: {reason} (number {count})");
        }
        if refusals.1.len() == REFUSALS_KEPT {
            refusals.1.pop_front();
        }
        refusals.1.push_back(Refusal { address: address.to_owned(), reason: reason.to_owned() });
    }

    /// Returns the CPU time of all threads of a name, in seconds.
    pub(super) fn cpu_s(&self, name: &str) -> f64 {
        let threads = lock(&self.threads);
        let of_name = threads.iter().filter(|(thread, _)| *thread == name);
        let read = |cpu: &ThreadCpu| cpu.clock.and_then(ThreadClock::read_ns);
        of_name.map(|(_, cpu)| read(cpu).unwrap_or(cpu.final_ns)).sum::<u64>() as f64 / 1e9
    }
}

/// Whether the refusal of this number, from 1 on, is logged: a caller every second, such as a port
/// scanner, must not fill the log of a run of weeks.
fn is_logged(number: u64) -> bool {
    number <= REFUSALS_LOGGED || number.is_power_of_two()
}

/// Stores the CPU time of a thread when it ends.
pub(crate) struct ThreadCount<'a> {
    counters: &'a HostCounters,
    index: usize,
}

impl Drop for ThreadCount<'_> {
    fn drop(&mut self) {
        let cpu = &mut lock(&self.counters.threads)[self.index].1;
        cpu.final_ns = cpu.clock.take().and_then(ThreadClock::read_ns).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::is_logged;

    #[test]
    fn a_caller_every_second_for_three_weeks_is_a_page_of_lines() {
        let lines = (1..=1_814_400).filter(|&number| is_logged(number)).count();
        assert_eq!(lines, 16 + 16);
    }
}
