//! Which connections between members are lost, as far as a rank knows, and which ranks can go on together.

use super::message::{shorten, Value, LOSS_BYTES_MAX, REASON_BYTES_MAX};
use crate::rank_set::RankSet;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use gradlane_units::Rank;

/// Lost connections between the members of a generation. A link is cut once either end says so.
#[derive(Debug)]
pub(super) struct Links {
    members: RankSet,
    world_size: u32,
    /// By rank: the members that it has lost.
    lost: BTreeMap<Rank, RankSet>,
    /// By lost rank: the lowest rank that has lost it, and why.
    reasons: BTreeMap<Rank, (Rank, String)>,
    /// By member: links of it that were cut in earlier changes, in which the other end left.
    before: BTreeMap<Rank, u32>,
}

impl Links {
    pub(super) fn new(world_size: u32, members: RankSet, before: BTreeMap<Rank, u32>) -> Links {
        Links { members, world_size, lost: BTreeMap::new(), reasons: BTreeMap::new(), before }
    }

    /// By member of the next membership: its links that were cut so far, and whose other end has left. A member
    /// that all have lost was dead, and says nothing of them.
    pub(super) fn cut_before(&self, members: &RankSet) -> BTreeMap<Rank, u32> {
        let mut cut = self.before.clone();
        cut.retain(|&rank, _| members.contains(rank));
        for leaving in self.members.iter().filter(|&rank| !members.contains(rank)) {
            let ends: Vec<Rank> =
                members.iter().filter(|&rank| self.is_cut(rank, leaving)).collect();
            if (ends.len() as u32) < members.len() {
                ends.into_iter().for_each(|rank| *cut.entry(rank).or_default() += 1);
            }
        }
        cut
    }

    /// Notes that `by` has lost a member; false when it was known.
    pub(super) fn cut(&mut self, by: Rank, peer: Rank, reason: &str) -> bool {
        let row = self.lost.entry(by).or_insert_with(|| RankSet::empty(self.world_size));
        let is_new = row.insert(peer);
        if is_new && self.reasons.get(&peer).is_none_or(|&(first, _)| by < first) {
            self.reasons.insert(peer, (by, shorten(reason, LOSS_BYTES_MAX).into()));
        }
        is_new
    }

    fn has_lost(&self, by: Rank, peer: Rank) -> bool {
        self.lost.get(&by).is_some_and(|lost| lost.contains(peer))
    }

    pub(super) fn is_cut(&self, one: Rank, other: Rank) -> bool {
        self.has_lost(one, other) || self.has_lost(other, one)
    }

    /// Members that a rank is connected to, itself included.
    pub(super) fn connected(&self, rank: Rank) -> RankSet {
        let mut connected = self.members.clone();
        self.members.iter().filter(|&peer| self.is_cut(rank, peer)).for_each(|peer| {
            connected.remove(peer);
        });
        connected
    }

    /// Whether all that a rank is connected to have lost the same members as it has.
    pub(super) fn agree(&self, rank: Rank) -> bool {
        let nothing = RankSet::empty(self.world_size);
        let row = |rank| self.lost.get(&rank).unwrap_or(&nothing);
        self.connected(rank).iter().all(|peer| row(peer) == row(rank))
    }

    /// How many ranks of a set each rank of it has lost its connection to.
    fn cuts(&self, among: &RankSet) -> BTreeMap<Rank, u32> {
        let mut cuts: BTreeMap<Rank, u32> = among.iter().map(|rank| (rank, 0)).collect();
        for (&by, lost) in self.lost.iter().filter(|(&by, _)| among.contains(by)) {
            for peer in lost.iter().filter(|&peer| among.contains(peer)) {
                // A link that both ends have lost is counted at its lower end.
                if by < peer || !self.has_lost(peer, by) {
                    [by, peer].iter().for_each(|rank| *cuts.entry(*rank).or_default() += 1);
                }
            }
        }
        cuts
    }

    /// Ranks of a set that are all connected to each other: the rank with most lost connections leaves (of several
    /// the one with most in earlier changes, then the highest), until none is lost. Ranks that are `through` leave
    /// last: they alone may have all results of the last step.
    pub(super) fn clique(&self, among: &RankSet, through: &RankSet) -> RankSet {
        let mut clique = among.clone();
        let mut cuts = self.cuts(among);
        while let Some((&leaving, _)) =
            cuts.iter().filter(|(_, &count)| count > 0).max_by_key(|&(&rank, &count)| {
                let before = self.before.get(&rank).copied().unwrap_or(0);
                (!through.contains(rank), count, before, rank)
            })
        {
            cuts.remove(&leaving);
            clique.remove(leaving);
            for (&rank, count) in &mut cuts {
                *count -= u32::from(self.is_cut(leaving, rank));
            }
        }
        clique
    }

    /// Members that a rank can hear of by way of others, itself included.
    fn reachable(&self, rank: Rank) -> RankSet {
        let mut rest: Vec<Rank> = self.members.iter().filter(|&it| it != rank).collect();
        let mut reachable = RankSet::empty(self.world_size);
        reachable.insert(rank);
        let mut found = Vec::from([rank]);
        while let Some(rank) = found.pop() {
            rest.retain(|&peer| {
                let is_cut = self.is_cut(rank, peer);
                if !is_cut {
                    reachable.insert(peer);
                    found.push(peer);
                }
                is_cut
            });
        }
        reachable
    }

    /// The members that can lead the way to an agreement, first those that will be members again. They are
    /// connected to a majority; if none is, to half of the members; empty where there is none of these.
    /// Those that `rank` cannot hear of are not looked at.
    pub(super) fn proposers(&self, rank: Rank) -> Vec<Rank> {
        let reachable = self.reachable(rank);
        let cuts = self.cuts(&reachable);
        let connected = |rank: Rank| reachable.len() - cuts.get(&rank).copied().unwrap_or(0);
        let best = reachable.iter().map(connected).max().unwrap_or(0);
        let count = self.members.len();
        let needed = if 2 * best > count { count + 1 } else { count };
        let clique = self.clique(&reachable, &RankSet::empty(self.world_size));
        let (first, last): (Vec<Rank>, Vec<Rank>) = reachable
            .iter()
            .filter(|&rank| 2 * connected(rank) >= needed)
            .partition(|&rank| clique.contains(rank));
        first.into_iter().chain(last).collect()
    }

    /// The value to propose when these ranks have answered a rank, some of them after their goodbye: those that
    /// can go on together.
    pub(super) fn propose(&self, by: Rank, answered: &RankSet, through: &RankSet) -> Value {
        let members = self.clique(answered, through);
        let mut lost = None;
        let mut reasons = Vec::new();
        for leaving in self.members.iter().filter(|&rank| !members.contains(rank)) {
            let is_dead = !answered.contains(leaving)
                && members.iter().all(|rank| self.has_lost(rank, leaving));
            if is_dead {
                lost = lost.or(Some(leaving));
                let reason = self.reasons.get(&leaving).map_or("", |(_, reason)| reason);
                reasons.push(format!("{leaving} was lost: {reason}"));
            } else if !answered.iter().any(|rank| self.is_cut(rank, leaving)) {
                lost = lost.or(Some(leaving));
                reasons.push(format!("{leaving} did not answer {by}"));
            } else {
                reasons.push(self.explain_link(leaving, answered));
            }
        }
        let reason = shorten(&reasons.join("; "), REASON_BYTES_MAX).to_string();
        Value { members, lost, is_through: !through.is_empty(), reason }
    }

    /// "The link between rank 1 and rank 3 is cut (no bytes for 10 s): rank 3 leaves".
    fn explain_link(&self, leaving: Rank, answered: &RankSet) -> String {
        let peers: Vec<Rank> = answered.iter().filter(|&peer| self.is_cut(leaving, peer)).collect();
        let own = self.reasons.get(&leaving).map(|(_, reason)| reason);
        let of_peer = |peer| match self.reasons.get(peer) {
            Some((by, reason)) if *by == leaving => Some(reason),
            _ => None,
        };
        let why = own.or_else(|| peers.iter().find_map(of_peer));
        let why = why.map_or(String::new(), |reason| format!(" ({reason})"));
        match peers[..] {
            [peer] => {
                let (low, high) = (peer.min(leaving), peer.max(leaving));
                format!("the link between {low} and {high} is cut{why}: {leaving} leaves")
            }
            _ => {
                let names: Vec<String> = peers.iter().map(Rank::to_string).collect();
                let names = names.join(", ");
                format!("the links between {leaving} and {names} are cut{why}: {leaving} leaves")
            }
        }
    }

    /// "rank 2 (connection reset), rank 3 (no bytes for 10 s)": what a rank has lost.
    pub(super) fn lost_by(&self, rank: Rank) -> String {
        let lost = self.lost.get(&rank).into_iter().flat_map(RankSet::iter);
        let named = lost.map(|peer| match self.reasons.get(&peer) {
            Some((_, reason)) => format!("{peer} ({reason})"),
            None => peer.to_string(),
        });
        let names = named.collect::<Vec<String>>().join(", ");
        shorten(&names, REASON_BYTES_MAX).into()
    }
}
