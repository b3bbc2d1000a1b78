//! Somebody on the path of a connection, who changes one direction of it once.

use gradlane_units::Rng;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// Sealed bytes of another connection in one direction: of this job, of another one, or of another generation.
pub type Foreign = Arc<Vec<u8>>;

/// The change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Flips a bit.
    Flip(u8),
    /// Leaves bytes out.
    Drop(usize),
    /// Sends the last bytes once more.
    Replay(usize),
    /// Sends bytes after as many that follow them.
    Swap(usize),
    /// Adds the last bytes of the other direction.
    Reflect(usize),
    /// Adds bytes of another connection.
    Inject(Vec<u8>),
    /// Puts bytes of another connection in the place of as many.
    Substitute(Vec<u8>),
    /// Ends the stream.
    Truncate,
}

impl Change {
    /// Draws a change of about `size` bytes from position `at` on. `foreign` are other connections.
    pub fn draw(rng: &mut Rng, at: usize, size: usize, foreign: &[Foreign]) -> Change {
        let size = size.max(1);
        let elsewhere = |rng: &mut Rng| {
            let bytes = &foreign[rng.below(foreign.len() as u32) as usize];
            let start = match rng.below(2) {
                // As the same frame is there, or any other one.
                0 => at.min(bytes.len() - 1),
                _ => rng.below(bytes.len() as u32) as usize,
            };
            bytes[start..bytes.len().min(start + size)].to_vec()
        };
        match rng.below(10) {
            0..3 => Change::Flip(rng.below(8) as u8),
            3 => Change::Drop(size),
            4 => Change::Replay(size),
            5 => Change::Swap(size),
            6 => Change::Reflect(size),
            7 => Change::Inject(elsewhere(rng)),
            8 => Change::Substitute(elsewhere(rng)),
            _ => Change::Truncate,
        }
    }

    /// Bytes after its position that the change is about.
    fn about(&self) -> usize {
        match self {
            Change::Flip(_) => 1,
            Change::Drop(count) => *count,
            Change::Swap(count) => 2 * count,
            Change::Substitute(foreign) => foreign.len(),
            Change::Replay(_) | Change::Reflect(_) | Change::Inject(_) | Change::Truncate => 0,
        }
    }
}

/// Returns the last `count` bytes.
fn last(bytes: &[u8], count: usize) -> &[u8] {
    &bytes[bytes.len().saturating_sub(count)..]
}

/// One direction of a connection, with one change at a position, or none.
#[derive(Debug, Default)]
pub struct Adversary {
    change: Option<(usize, Change)>,
    /// Bytes that have come so far.
    pub seen: Vec<u8>,
    /// Bytes that have gone on so far.
    gone_on: Vec<u8>,
    /// Bytes of `seen` that are dealt with.
    passed: usize,
    /// Whether other bytes have gone on than have come.
    pub changed: bool,
    /// Whether the stream has ended by it.
    pub ended: bool,
}

impl Adversary {
    pub fn new(at: usize, change: Change) -> Adversary {
        Adversary { change: Some((at, change)), ..Adversary::default() }
    }

    /// Returns what goes on of the bytes that come in; `back` are those of the other direction so far.
    pub fn pass(&mut self, bytes: &[u8], back: &[u8]) -> Vec<u8> {
        self.seen.extend_from_slice(bytes);
        let out = self.change(back);
        self.gone_on.extend_from_slice(&out);
        out
    }

    /// Whether the first `count` bytes that came went on as they were. A byte that is sent once more before one
    /// like it changes only what follows.
    pub fn is_whole(&self, count: usize) -> bool {
        self.seen.len() >= count && self.gone_on.starts_with(&self.seen[..count])
    }

    /// Returns what goes on of the bytes that were not dealt with.
    fn change(&mut self, back: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        if self.ended {
            return out;
        }
        if let Some((at, change)) = &self.change {
            let until = (*at).min(self.seen.len());
            out.extend_from_slice(&self.seen[self.passed..until]);
            self.passed = until;
            let about = change.about();
            if self.seen.len() < at + about.max(1) {
                return out;
            }
            let about = &self.seen[*at..at + about];
            let before = out.len();
            match change {
                Change::Flip(bit) => out.push(about[0] ^ (1 << bit)),
                Change::Drop(_) => {}
                Change::Swap(count) => {
                    out.extend_from_slice(&about[*count..]);
                    out.extend_from_slice(&about[..*count]);
                }
                Change::Replay(count) => out.extend_from_slice(last(&self.seen[..*at], *count)),
                Change::Reflect(count) => out.extend_from_slice(last(back, *count)),
                Change::Inject(foreign) | Change::Substitute(foreign) => {
                    out.extend_from_slice(foreign);
                }
                Change::Truncate => self.ended = true,
            }
            self.passed += about.len();
            self.changed = self.ended || out[before..] != *about;
            self.change = None;
        }
        if !self.ended {
            out.extend_from_slice(&self.seen[self.passed..]);
            self.passed = self.seen.len();
        }
        out
    }
}

/// Returns the number of cases: `GRADLANE_ADVERSARY_CASES`, or as many as CI has time for.
pub fn cases(by_default: u64) -> u64 {
    let asked = std::env::var("GRADLANE_ADVERSARY_CASES").ok();
    asked.map_or(by_default, |it| it.parse().expect("a number of cases"))
}

/// Runs `run` for all numbers below `count`, several at once.
pub fn each_case(count: u64, run: impl Fn(u64) + Sync) {
    let next = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| loop {
                match next.fetch_add(1, Ordering::SeqCst) {
                    case if case < count => run(case),
                    _ => break,
                }
            });
        }
    });
}
