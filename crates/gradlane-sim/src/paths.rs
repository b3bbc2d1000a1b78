//! Machines whose ports differ, and slower links between them.

use crate::error::SimError;
use serde::{Deserialize, Serialize};

/// Machines whose ports and ways differ from [`crate::Network`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Paths {
    /// Ports that have another rate than the network's.
    pub ports: Vec<PortRate>,
    /// Links that carry less than the ports at their ends.
    pub links: Vec<Link>,
    /// Racks that share a line to the others.
    pub racks: Option<Racks>,
}

/// The port of one machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortRate {
    /// The machine.
    pub machine: u32,
    /// Rate in each direction, bits a second.
    pub rate_bps: f64,
}

/// The way between two machines, each direction for itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// The two machines.
    pub between: (u32, u32),
    /// Rate in each direction, bits a second.
    pub rate_bps: f64,
}

/// Racks of machines, numbered one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Racks {
    /// Machines in each rack; the last may have fewer.
    pub machines: u32,
    /// Rate of a rack's line to the others in each direction, bits a second.
    pub uplink_bps: f64,
}

impl Paths {
    /// Checks every value.
    ///
    /// # Errors
    /// [`SimError::Argument`] naming the field, its value and what is allowed.
    pub(crate) fn validate(&self, machines: u32, representatives: u32) -> Result<(), SimError> {
        let refuse = |text: String| Err(SimError::Argument(format!("paths.{text}")));
        let is_rate = |rate: f64| (1e3..=1e15).contains(&rate);
        for (index, &PortRate { machine, rate_bps }) in self.ports.iter().enumerate() {
            if machine >= machines {
                return refuse(format!("ports names machine {machine} of {machines}"));
            }
            if !is_rate(rate_bps) {
                return refuse(format!("ports.rate_bps is {rate_bps}: use 1e3 to 1e15"));
            }
            if self.ports[..index].iter().any(|it| it.machine == machine) {
                return refuse(format!("ports names machine {machine} twice"));
            }
        }
        for (index, link) in self.links.iter().enumerate() {
            let (one, other) = link.between;
            if one == other || one.max(other) >= machines {
                return refuse(format!("links joins {one} and {other} of {machines} machines"));
            }
            if !is_rate(link.rate_bps) {
                return refuse(format!("links.rate_bps is {}: use 1e3 to 1e15", link.rate_bps));
            }
            let is_same = |it: &Link| it.between == (one, other) || it.between == (other, one);
            if self.links[..index].iter().any(is_same) {
                return refuse(format!("links joins {one} and {other} twice"));
            }
        }
        if let Some(racks) = self.racks {
            if racks.machines == 0 || !is_rate(racks.uplink_bps) {
                let Racks { machines, uplink_bps } = racks;
                return refuse(format!("racks has {machines} machines and {uplink_bps} bit/s"));
            }
        }
        if representatives > 0 && *self != Paths::default() {
            return refuse("representatives stand for equal machines: use 0".into());
        }
        Ok(())
    }
}
