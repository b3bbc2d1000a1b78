//! What lies between the machines' ports where they are not all alike: ports of other rates, links that
//! are slower than their ports, and racks whose switches share a line to the others.
//!
//! A link or a rack's line carries pieces one after the other in each direction, in the order in which
//! they come, as a queue in a switch does. A piece begins to leave it when it begins to come.

use crate::paths::{Link, Racks};
use crate::port::Piece;
use crate::scenario::Scenario;
use std::collections::{BTreeMap, VecDeque};

/// A line between ports.
#[derive(Debug, Default)]
pub(crate) struct Line {
    pub(crate) ns_per_byte: f64,
    pub(crate) free_at: u64,
    /// Pieces that wait for it, with when all of each is there.
    pub(crate) queue: VecDeque<(Piece, u64)>,
}

/// Rates of ports, and the lines between them.
#[derive(Debug)]
pub(crate) struct Fabric {
    usual_ns_per_byte: f64,
    /// By port, of those that have another one.
    port_ns_per_byte: BTreeMap<u32, f64>,
    /// Links in both directions, then each rack's line to the others, and from them.
    pub(crate) lines: Vec<Line>,
    links: BTreeMap<(u32, u32), u32>,
    racks: Option<Racks>,
    /// Number of the first rack's first line.
    first_of_racks: u32,
}

impl Fabric {
    pub(crate) fn new(scenario: &Scenario, machines: u32) -> Fabric {
        let (network, paths) = (&scenario.network, &scenario.paths);
        let ns_per_byte = |rate_bps: f64| 8e9 / (rate_bps * network.goodput_share);
        let mut port_ns_per_byte: BTreeMap<u32, f64> =
            paths.ports.iter().map(|it| (it.machine, ns_per_byte(it.rate_bps))).collect();
        if scenario.switch_sums {
            port_ns_per_byte.extend((scenario.workers..machines).map(|port| (port, 0.0)));
        }
        let line = |rate_bps: f64| Line { ns_per_byte: ns_per_byte(rate_bps), ..Line::default() };
        let mut fabric = Fabric {
            usual_ns_per_byte: ns_per_byte(network.rate_bps),
            port_ns_per_byte,
            lines: Vec::new(),
            links: BTreeMap::new(),
            racks: paths.racks,
            first_of_racks: 2 * paths.links.len() as u32,
        };
        for Link { between: (one, other), rate_bps } in paths.links.iter().copied() {
            for way in [(one, other), (other, one)] {
                fabric.links.insert(way, fabric.lines.len() as u32);
                fabric.lines.push(line(rate_bps));
            }
        }
        if let Some(racks) = paths.racks {
            let count = 2 * machines.div_ceil(racks.machines);
            fabric.lines.extend((0..count).map(|_| line(racks.uplink_bps)));
        }
        fabric
    }

    pub(crate) fn ns_per_byte(&self, port: u32) -> f64 {
        if self.port_ns_per_byte.is_empty() {
            return self.usual_ns_per_byte;
        }
        self.port_ns_per_byte.get(&port).copied().unwrap_or(self.usual_ns_per_byte)
    }

    /// The first line between two ports, if there is any.
    pub(crate) fn first_line(&self, out: u32, into: u32) -> Option<u32> {
        self.way(out, into).next()
    }

    /// The line behind another one of the way between two ports.
    pub(crate) fn next_line(&self, line: u32, out: u32, into: u32) -> Option<u32> {
        self.way(out, into).skip_while(|&it| it != line).nth(1)
    }

    /// The lines between two ports: the racks', and the link's own.
    fn way(&self, out: u32, into: u32) -> impl Iterator<Item = u32> {
        let rack = |port: u32| self.racks.map(|it| port / it.machines);
        let (from, to) = (rack(out), rack(into));
        let leaves = from.filter(|_| out != into && from != to);
        let enters = to.filter(|_| leaves.is_some());
        let up = leaves.map(|rack| self.first_of_racks + 2 * rack);
        let down = enters.map(|rack| self.first_of_racks + 2 * rack + 1);
        let link = self.links.get(&(out, into)).copied();
        up.into_iter().chain(link).chain(down)
    }
}
