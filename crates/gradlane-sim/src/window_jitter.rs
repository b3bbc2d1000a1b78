//! Jitter of send windows: each connection holds more or less than the mean for a while, then another
//! amount, so that flows that meet at a port get unequal shares of it and drift apart.

use crate::connections::Connection;
use crate::costs::{LANES_SPREAD, SHARE_LASTS_BYTES};
use crate::draws::fraction;
use crate::scenario::{Network, SPREAD_MAX};
use gradlane_units::Rng;

#[derive(Debug)]
pub(crate) struct WindowJitter {
    spread: f64,
    rng: Rng,
}

impl WindowJitter {
    /// Of all connections, over so many lanes.
    pub(crate) fn new(network: &Network, lanes: u32) -> WindowJitter {
        let times = if lanes > 1 { LANES_SPREAD } else { 1.0 };
        let spread = (times * network.share_spread).min(SPREAD_MAX);
        WindowJitter { spread, rng: Rng::new(network.share_seed) }
    }

    /// Draws a connection's first window, which lasts for a part of the usual time.
    pub(crate) fn begin(&mut self, connection: &mut Connection, middle_bytes: f64) {
        self.draw(connection, middle_bytes);
        let part = fraction(&mut self.rng);
        connection.window_lasts_bytes = (part * f64::from(SHARE_LASTS_BYTES)) as u32;
    }

    /// Bytes pass a connection: draws another window when the current one is over.
    pub(crate) fn pass(&mut self, connection: &mut Connection, middle_bytes: f64, bytes: u32) {
        match connection.window_lasts_bytes.checked_sub(bytes) {
            Some(rest) => connection.window_lasts_bytes = rest,
            None => self.draw(connection, middle_bytes),
        }
    }

    fn draw(&mut self, connection: &mut Connection, middle_bytes: f64) {
        let off = self.spread * (2.0 * fraction(&mut self.rng) - 1.0);
        connection.window_bytes = (middle_bytes * (1.0 + off)).max(1.0) as u32;
        connection.window_lasts_bytes = SHARE_LASTS_BYTES;
    }
}
