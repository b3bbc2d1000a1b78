//! Quality of the draws. Seeds are fixed; the error probability of each test, were they drawn anew, is
//! below 1e-5.

use super::{Draws, BLOCK};
use crate::DrawKey;

const HERE: DrawKey = DrawKey { seed: 12, step: 34, tensor: 5, leg: 6, first_element: 0 };

/// The sixteen bits of an element.
fn bits(draws: Draws, element: usize) -> u32 {
    (draws.uniform(element) * 65536.0) as u32
}

/// How far a chi-squared statistic of equally likely cells is from its mean, in deviations.
fn chi_squared(cells: &[u32]) -> f64 {
    let total: u32 = cells.iter().sum();
    let expected = f64::from(total) / cells.len() as f64;
    let sum: f64 = cells.iter().map(|cell| (f64::from(*cell) - expected).powi(2) / expected).sum();
    let freedom = cells.len() as f64 - 1.0;
    (sum - freedom) / (2.0 * freedom).sqrt()
}

#[test]
fn uniforms_are_odd_multiples_between_zero_and_one() {
    let draws = Draws::of_bucket(&HERE);
    for element in 0..10_000 {
        let uniform = draws.uniform(element);
        assert!(uniform > 0.0 && uniform < 1.0);
        assert_eq!((uniform * 131_072.0) as u32 % 2, 1);
    }
}

#[test]
fn every_byte_is_uniform() {
    let draws = Draws::of_bucket(&HERE);
    let mut cells = [[0; 256]; 2];
    for element in 0..1 << 20 {
        let bits = bits(draws, element);
        cells[0][(bits >> 8) as usize] += 1;
        cells[1][(bits & 255) as usize] += 1;
    }
    for cells in cells {
        assert!(chi_squared(&cells).abs() < 6.0, "{}", chi_squared(&cells));
    }
}

/// Elements that are neighbours in any of the ways that training adds or compares them.
#[test]
fn neighbours_are_independent() {
    let far = |other: DrawKey| move |element: usize| (Draws::of_bucket(&other), element);
    let near = |distance: usize| move |element| (Draws::of_bucket(&HERE), element + distance);
    type Neighbour = Box<dyn Fn(usize) -> (Draws, usize)>;
    let neighbours: Vec<(&str, Neighbour)> = vec![
        ("next", Box::new(near(1))),
        ("same draw", Box::new(near(16))),
        ("next block", Box::new(near(BLOCK))),
        ("next bucket", Box::new(near(512))),
        ("next step", Box::new(far(DrawKey { step: 35, ..HERE }))),
        ("second step", Box::new(far(DrawKey { step: 36, ..HERE }))),
        ("next tensor", Box::new(far(DrawKey { tensor: 6, ..HERE }))),
        ("next rank", Box::new(far(DrawKey { leg: 7, ..HERE }))),
        ("broadcast", Box::new(far(DrawKey { leg: DrawKey::BROADCAST, ..HERE }))),
        ("next seed", Box::new(far(DrawKey { seed: 13, ..HERE }))),
        ("beyond the counter", Box::new(far(DrawKey { first_element: 1 << 33, ..HERE }))),
    ];
    let draws = Draws::of_bucket(&HERE);
    for (name, neighbour) in neighbours {
        let mut high = [0; 1024];
        let mut low = [0; 1024];
        for element in (0..1 << 19).filter(|element| element % BLOCK < 16) {
            let (other, key) = neighbour(element);
            let (one, other) = (bits(draws, element), bits(other, key));
            high[(one >> 11 << 5 | other >> 11) as usize] += 1;
            low[((one & 31) << 5 | other & 31) as usize] += 1;
        }
        for cells in [high, low] {
            assert!(chi_squared(&cells).abs() < 6.0, "{name}: {}", chi_squared(&cells));
        }
    }
}

/// A counter that differs in one bit gives a draw that differs in half of its bits, each as often.
#[test]
fn one_bit_of_the_counter_changes_half_of_the_draw() {
    let rounds = 20_000_usize;
    let draws = Draws::of_bucket(&HERE);
    for flipped in 0..20 {
        let mut changed = [0_u32; 32];
        for round in 0..rounds {
            let counter = round * 53;
            let other = counter ^ 1 << flipped;
            let difference =
                draws.draw(counter / 16, counter % 16) ^ draws.draw(other / 16, other % 16);
            for (bit, changed) in changed.iter_mut().enumerate() {
                *changed += difference >> bit & 1;
            }
        }
        // Six deviations of a fair coin.
        let limit = 6.0 * (rounds as f64).sqrt() / 2.0;
        for changed in changed {
            let off = f64::from(changed) - rounds as f64 / 2.0;
            assert!(off.abs() < limit, "bit {flipped} of the counter: {changed} of {rounds}");
        }
    }
}
