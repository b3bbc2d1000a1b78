//! Processors of a host, where its ranks have more threads than those: a thread that has something to do waits for
//! the first processor that is free, and keeps it until that is done.

use crate::nodes::Topology;
use crate::scenario::Scenario;

/// The processors of all hosts.
#[derive(Debug)]
pub(crate) struct Processors {
    /// Of each host; 0 where no thread ever waits.
    each: usize,
    /// When each has done what it was given, host by host.
    busy_until: Vec<u64>,
}

impl Processors {
    /// Those of a scenario.
    pub(crate) fn new(scenario: &Scenario, topology: Topology) -> Processors {
        let lanes = scenario.lanes as usize;
        let of_rank = lanes + lanes * scenario.work_threads_of_lane();
        let threads = of_rank * topology.per_node as usize;
        let each = Some(scenario.processors as usize).filter(|&it| it < threads).unwrap_or(0);
        Processors { each, busy_until: vec![0; each * topology.nodes() as usize] }
    }

    /// Whether no thread ever waits for one.
    pub(crate) fn are_enough(&self) -> bool {
        self.each == 0
    }

    /// When a processor of a host is free, from `time` on.
    pub(crate) fn free_at(&self, host: u32, time: u64) -> u64 {
        let first = host as usize * self.each;
        let all = self.busy_until[first..first + self.each].iter();
        all.min().map_or(time, |&free_at| free_at.max(time))
    }

    /// A thread has the first processor that is free until `end`.
    pub(crate) fn occupy(&mut self, host: u32, end: u64) {
        let first = host as usize * self.each;
        let all = self.busy_until[first..first + self.each].iter_mut();
        if let Some(free) = all.min() {
            *free = end.max(*free);
        }
    }
}
