//! Why a rank cannot go on.

use super::message::Value;
use super::{Decision, Membership};
use crate::control::blame::Blame;
use alloc::format;
use alloc::string::{String, ToString};

impl Membership {
    pub(super) fn end(&mut self, blame: Blame, reason: String) {
        self.leave();
        self.decisions.push_back(Decision::Ended { blame, reason });
    }

    pub(super) fn describe_lost(&self) -> String {
        let lost = self.change.as_ref().map(|change| change.links.lost_by(self.rank));
        lost.filter(|lost| !lost.is_empty()).unwrap_or_else(|| "none of its own".to_string())
    }

    fn blame_lost(&self) -> Blame {
        let mut lost = self.lost.keys();
        lost.next()
            .filter(|_| lost.next().is_none())
            .map_or(Blame::Nobody, |&rank| Blame::Rank(rank))
    }

    pub(super) fn end_with_few(&mut self, value: &Value) {
        let blame = value.lost.map_or(Blame::Link, Blame::Rank);
        let reason = format!(
            "{}; {} of {} ranks are left, fewer than min_ranks = {}",
            value.reason,
            value.members.len(),
            self.members.len(),
            self.options.min_ranks
        );
        self.end(blame, reason);
    }

    pub(super) fn end_without_majority(&mut self) {
        let reason = format!(
            "no majority of the {} ranks of membership {} is left: {} lost {}",
            self.members.len(),
            self.generation,
            self.rank,
            self.describe_lost()
        );
        self.end(self.blame_lost(), reason);
    }

    pub(super) fn end_undecided(&mut self) {
        let reason = format!(
            "the {} ranks of membership {} did not agree on the next one in time: {} lost {}",
            self.members.len(),
            self.generation,
            self.rank,
            self.describe_lost()
        );
        self.end(self.blame_lost(), reason);
    }
}
