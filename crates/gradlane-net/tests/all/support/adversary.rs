//! Somebody on the path of a connection, who changes one direction of it once.

use gradlane_units::Rng;

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
    /// Adds bytes: of the other direction, or of another connection.
    Inject(Vec<u8>),
    /// Ends the stream.
    Truncate,
}

impl Change {
    /// Draws a change. `foreign` are bytes of elsewhere that can be injected, `sizes` the numbers of
    /// bytes that are moved.
    pub fn draw(rng: &mut Rng, foreign: &[&[u8]], sizes: &[usize]) -> Change {
        let size = sizes[rng.below(sizes.len() as u32) as usize].max(1);
        match rng.below(8) {
            0..3 => Change::Flip(rng.below(8) as u8),
            3 => Change::Drop(size),
            4 => Change::Replay(size),
            5 => Change::Swap(size),
            6 => {
                let bytes = foreign[rng.below(foreign.len() as u32) as usize];
                let start = rng.below(bytes.len().saturating_sub(size) as u32 + 1) as usize;
                Change::Inject(bytes[start..].iter().copied().take(size).collect())
            }
            _ => Change::Truncate,
        }
    }
}

/// One direction of a connection, with one change at a position.
#[derive(Debug)]
pub struct Adversary {
    at: usize,
    change: Change,
    /// Bytes that have come so far.
    seen: Vec<u8>,
    /// Bytes of `seen` that are dealt with.
    passed: usize,
    /// Whether the change was made.
    pub made: bool,
    /// Whether the stream has ended by it.
    pub ended: bool,
}

impl Adversary {
    pub fn new(at: usize, change: Change) -> Adversary {
        Adversary { at, change, seen: Vec::new(), passed: 0, made: false, ended: false }
    }

    /// Returns what goes on of the bytes that come in.
    pub fn pass(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.seen.extend_from_slice(bytes);
        if self.ended {
            return Vec::new();
        }
        let mut out = Vec::new();
        if !self.made {
            let until = self.at.min(self.seen.len());
            out.extend_from_slice(&self.seen[self.passed..until]);
            self.passed = until;
            // The bytes that the change is about, after its position.
            let about = match self.change {
                Change::Flip(_) => 1,
                Change::Drop(count) => count,
                Change::Swap(count) => 2 * count,
                Change::Replay(_) | Change::Inject(_) | Change::Truncate => 0,
            };
            if self.seen.len() < self.at + about.max(1) {
                return out;
            }
            self.made = true;
            let about = &self.seen[self.at..self.at + about];
            self.passed += about.len();
            match &self.change {
                Change::Flip(bit) => out.push(about[0] ^ (1 << bit)),
                Change::Drop(_) => {}
                Change::Swap(count) => {
                    out.extend_from_slice(&about[*count..]);
                    out.extend_from_slice(&about[..*count]);
                }
                Change::Replay(count) => {
                    out.extend_from_slice(&self.seen[self.at.saturating_sub(*count)..self.at]);
                    self.made = self.at > 0;
                }
                Change::Inject(foreign) => out.extend_from_slice(foreign),
                Change::Truncate => {
                    self.ended = true;
                    return out;
                }
            }
        }
        out.extend_from_slice(&self.seen[self.passed..]);
        self.passed = self.seen.len();
        out
    }
}

/// Returns the number of cases: `GRADLANE_ADVERSARY_CASES`, or as many as CI has time for.
pub fn cases(by_default: u64) -> u64 {
    let asked = std::env::var("GRADLANE_ADVERSARY_CASES").ok();
    asked.map_or(by_default, |it| it.parse().expect("a number of cases"))
}
