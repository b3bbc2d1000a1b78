//! Random bits for stochastic rounding, drawn by position: nothing is stored, and what an element
//! gets depends on its key and index alone, never on slices, threads or the width of registers.
//!
//! Elements are seen in blocks of 32. One draw of 32 bits serves two elements of a block, those at
//! `lane` and `lane + 16`: its lower half is the first one's, its upper half the second one's. A
//! draw mixes the counter `16 * block + lane` by three rounds of multiplication and shifts, with the
//! constants of `triple32` (Wellons 2018, "Prospecting for hash functions"), and a part of the key
//! goes in before each round. The key follows from the seed, the step, the tensor and the leg by
//! SplitMix64.
//!
//! Sixteen bits make a probability right to 2^-17 of a level, which is what the rounding of f32 leaves
//! of it anyway. The quality of draws is tested in `draw/tests.rs`.

use gradlane_units::Rng;

/// The key of the random draws for some values: where these stand, so that neither draws nor
/// buckets depend on slicing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrawKey {
    /// The job's seed.
    pub seed: u64,
    /// The training step.
    pub step: u64,
    /// The tensor's number.
    pub tensor: u32,
    /// The sender's rank for a push, [`DrawKey::BROADCAST`] for a broadcast: draws differ by leg.
    pub leg: u32,
    /// Index in the tensor's storage of the first value; a multiple of the codec's granule.
    pub first_element: u64,
}

impl DrawKey {
    /// The leg of a broadcast from an owner.
    pub const BROADCAST: u32 = u32::MAX;
}

/// Elements that share a block of draws.
pub(crate) const BLOCK: usize = 32;
/// Draws of a block: each serves two elements.
pub(crate) const DRAWS: usize = 16;

/// The draws of one bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draws {
    pub(crate) key: [u32; 3],
    /// The counter of the bucket's first draw.
    pub(crate) start: u32,
}

impl Draws {
    /// The multipliers of the three rounds.
    pub(crate) const FIRST: u32 = 0xed5a_d4bb;
    pub(crate) const SECOND: u32 = 0xac4c_1b51;
    pub(crate) const THIRD: u32 = 0x3184_8bab;

    /// The draws of the bucket that begins at a key's first element, which is a multiple of [`BLOCK`].
    #[inline]
    pub(crate) fn of_bucket(key: &DrawKey) -> Draws {
        // A counter has 32 bits; what it cannot hold goes into the key.
        let counter = key.first_element / 2;
        let mut rng = Rng::new(key.seed);
        for word in [key.step, u64::from(key.tensor) << 32 | u64::from(key.leg), counter >> 32] {
            rng = Rng::new(rng.next_u64() ^ word);
        }
        let (low, high) = (rng.next_u64(), rng.next_u64());
        Draws { key: [low as u32, (low >> 32) as u32, high as u32], start: counter as u32 }
    }

    /// Draw `lane` of block `block` of the bucket.
    #[inline(always)]
    pub(crate) fn draw(self, block: usize, lane: usize) -> u32 {
        let counter = self.start.wrapping_add((block * DRAWS + lane) as u32);
        let mut bits = counter ^ self.key[0];
        bits = (bits ^ (bits >> 17)).wrapping_mul(Draws::FIRST).wrapping_add(self.key[1]);
        bits = (bits ^ (bits >> 11)).wrapping_mul(Draws::SECOND).wrapping_add(self.key[2]);
        bits = (bits ^ (bits >> 15)).wrapping_mul(Draws::THIRD);
        bits ^ (bits >> 14)
    }

    /// The draw of one element of the bucket, as a number strictly between 0 and 1: an odd multiple
    /// of 2^-17.
    #[inline(always)]
    pub(crate) fn uniform(self, element: usize) -> f32 {
        let draw = self.draw(element / BLOCK, element % DRAWS);
        let half = if element % BLOCK < DRAWS { draw & 0xffff } else { draw >> 16 };
        (half as f32 + 0.5) * (1.0 / 65536.0)
    }
}

#[cfg(test)]
mod tests;
