//! News of the membership for the application.

use gradlane_units::{Rank, Step};
use std::collections::{BTreeMap, VecDeque};

/// News of the membership, for the application.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields with the name of their type")]
pub enum MembershipEvent {
    /// The register of this generation in the job's store decides, and should get this value
    /// ([`Channel::answer_claim`](crate::Channel::answer_claim)).
    ClaimNeeded { generation: u32, value: Vec<u8> },
    /// Training goes on with these members.
    Changed {
        generation: u32,
        members: Vec<Rank>,
        /// The latest step that a member was in.
        step: Step,
        /// The lost ranks, and the reason.
        reason: String,
    },
}

/// News that the application has not taken, or that not all lanes have yet.
#[derive(Debug)]
pub(crate) struct MembershipNews {
    /// By lane: the newest membership that it goes on with.
    lanes: Vec<u32>,
    /// Memberships that some lanes go on with, by generation. A lane may skip one for the next.
    ahead: BTreeMap<u32, MembershipEvent>,
    known: VecDeque<MembershipEvent>,
}

impl MembershipNews {
    /// Makes the news of a rank with as many lanes, of which there are none.
    pub(crate) fn new(lanes: usize) -> MembershipNews {
        MembershipNews { lanes: vec![0; lanes], ahead: BTreeMap::new(), known: VecDeque::new() }
    }

    /// Notes news that a lane has. Those on a claim are known at once, a membership when all lanes go on with it or
    /// a later one.
    pub(crate) fn note(&mut self, lane: usize, mut event: MembershipEvent) {
        let MembershipEvent::Changed { generation, step, .. } = &mut event else {
            return self.known.push_back(event);
        };
        self.lanes[lane] = *generation;
        if let Some(MembershipEvent::Changed { step: other, .. }) = self.ahead.get(generation) {
            *step = (*step).max(*other);
        }
        self.ahead.insert(*generation, event);
        let common = self.lanes.iter().min().copied().unwrap_or_default();
        let later = self.ahead.split_off(&(common + 1));
        self.known.extend(std::mem::replace(&mut self.ahead, later).into_values());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Takes all that is known since the last call.
    pub(crate) fn take(&mut self) -> Vec<MembershipEvent> {
        self.known.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(generation: u32, step: u64) -> MembershipEvent {
        let (members, reason) = (vec![Rank(0)], String::new());
        MembershipEvent::Changed { generation, members, step: Step(step), reason }
    }

    #[test]
    fn a_membership_is_known_when_all_lanes_have_it_or_a_later_one() {
        let mut news = MembershipNews::new(3);
        news.note(0, changed(1, 4));
        news.note(1, changed(1, 5));
        news.note(0, changed(2, 6));
        assert!(news.is_empty());
        news.note(2, changed(2, 6));
        assert_eq!(news.take(), vec![changed(1, 5)]);
        news.note(1, changed(2, 6));
        assert_eq!(news.take(), vec![changed(2, 6)]);
        let claim = MembershipEvent::ClaimNeeded { generation: 3, value: Vec::new() };
        news.note(0, claim.clone());
        assert_eq!(news.take(), vec![claim]);
    }
}
