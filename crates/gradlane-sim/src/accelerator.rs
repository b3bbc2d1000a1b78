//! One rank's accelerator: goes through the script of a step, again and again, and waits where a
//! parameter is not there yet. A wait moves everything after it.

use crate::profile::{Act, Script};
use gradlane_units::TensorId;

/// An accelerator's next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing before this time.
    Until(u64),
    /// It waits for a tensor that is not there.
    Waits(TensorId),
    /// It has waited for a tensor for this many nanoseconds, and makes its gradient until this time.
    Rebuilds(TensorId, u64, u64),
    /// It has done this act, after waiting for this many nanoseconds.
    Did(Act, u64),
    /// All steps are over.
    Finished,
}

#[derive(Debug)]
pub(crate) struct Accelerator {
    /// Step, from 1.
    pub(crate) step: u64,
    /// Steps in all; afterwards one forward waits for the last one's parameters.
    pub(crate) steps: u64,
    /// Next act.
    position: usize,
    /// When the step would have begun without its waits.
    origin: u64,
    /// This rank's slowness in this step: acts happen at `origin + offset * slowness`.
    pub(crate) slowness: f64,
    /// Step of which each tensor holds the result, and since when.
    results: Vec<(u64, u64)>,
    /// Waits in all, a tensor, in nanoseconds.
    pub(crate) waited: Vec<u64>,
    /// Step whose gradient of each tensor was made of what arrived.
    rebuilt: Vec<u64>,
    /// The tensor that it waits for.
    pub(crate) blocked: Option<TensorId>,
    /// Ends of forwards.
    pub(crate) forward_ends: Vec<u64>,
    pub(crate) finished: bool,
}

impl Accelerator {
    pub(crate) fn new(tensors: usize, steps: u64) -> Accelerator {
        Accelerator {
            step: 1,
            steps,
            position: 0,
            origin: 0,
            slowness: 1.0,
            results: vec![(0, 0); tensors],
            waited: vec![0; tensors],
            rebuilt: vec![0; tensors],
            blocked: None,
            forward_ends: Vec::with_capacity(steps as usize + 1),
            finished: false,
        }
    }

    /// A tensor holds the result of a step from `time` on. Whether the accelerator waits for it.
    pub(crate) fn result(&mut self, tensor: TensorId, step: u64, time: u64) -> bool {
        self.results[tensor.index()] = (step, time);
        self.blocked == Some(tensor)
    }

    /// Does the next act, if it is time.
    pub(crate) fn turn(&mut self, script: &Script, now: u64) -> Turn {
        let Some(&(offset, act)) = script.acts.get(self.position) else {
            return Turn::Finished;
        };
        let due = self.origin + scaled(offset, self.slowness);
        if due > now {
            return Turn::Until(due);
        }
        if let Act::Need(tensor) = act {
            let (step, since) = self.results[tensor.index()];
            if step + 1 < self.step {
                self.blocked = Some(tensor);
                return Turn::Waits(tensor);
            }
            if since > now {
                self.blocked = Some(tensor);
                return Turn::Until(since);
            }
            self.blocked = None;
            let waited = now - due;
            self.waited[tensor.index()] += waited;
            let rebuild = scaled(script.rebuild_ns[tensor.index()], self.slowness);
            if rebuild > 0 && self.rebuilt[tensor.index()] < step {
                self.rebuilt[tensor.index()] = step;
                self.origin += waited + rebuild;
                return Turn::Rebuilds(tensor, waited, now + rebuild);
            }
        }
        let waited = now - due;
        self.origin += waited;
        self.position += 1;
        if act == Act::ForwardEnd {
            self.forward_ends.push(now);
            if self.step > self.steps {
                self.position = script.acts.len();
                self.finished = true;
                return Turn::Finished;
            }
        }
        Turn::Did(act, waited)
    }

    /// Goes through the next step without computing anything: it takes no part in it.
    pub(crate) fn pass(&mut self, now: u64) {
        self.step += 1;
        self.forward_ends.push(now);
    }

    /// Does nothing for so long: what computes now takes as much longer.
    pub(crate) fn stand_still(&mut self, ns: u64) {
        self.origin += ns;
    }

    /// Begins the next step at `time`.
    pub(crate) fn next_step(&mut self, time: u64, slowness: f64) {
        self.step += 1;
        self.position = 0;
        self.origin = time;
        self.slowness = slowness;
    }
}

fn scaled(offset: u64, slowness: f64) -> u64 {
    if slowness == 1.0 {
        offset
    } else {
        (offset as f64 * slowness).round() as u64
    }
}
