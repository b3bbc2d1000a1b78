//! Why a call of a group failed.

/// The kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupErrorKind {
    /// The call makes no sense on this rank; nothing was sent, and the group goes on.
    Argument,
    /// Not all ranks came in time.
    TimedOut,
    /// A rank is gone, or has left the group in good order.
    Lost,
    /// Ranks do not call the same operation.
    Mismatch,
    /// Bytes of a peer that are not of the protocol, or a broken invariant.
    Protocol,
    /// The group was closed on this rank.
    Closed,
    /// The caller's interrupt function asked to stop waiting; the call goes on.
    Interrupted,
}

/// The failure of a call. All kinds but `Argument` and `Interrupted`, and a wait's own time-out, end the group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct GroupError {
    /// The kind.
    pub kind: GroupErrorKind,
    /// What happened, on which rank, in which operation, and what to do.
    pub message: String,
    /// The other ranks at fault, as far as this rank knows.
    pub ranks: Vec<u32>,
}

impl GroupError {
    pub(super) fn new(kind: GroupErrorKind, message: String, ranks: Vec<u32>) -> GroupError {
        GroupError { kind, message, ranks }
    }
}

/// Returns ranks in words.
pub(super) fn rank_list(ranks: &[u32]) -> String {
    let names: Vec<String> = ranks.iter().take(16).map(ToString::to_string).collect();
    let more = if ranks.len() > names.len() { ", …" } else { "" };
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}{more}", names.join(", "))
}

/// Why a group ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) kind: GroupErrorKind,
    pub(super) what: String,
    pub(super) ranks: Vec<u32>,
}

/// The failure of a peer that breaks the protocol.
pub(super) fn violation(from: u32, what: &str) -> Failure {
    Failure {
        kind: GroupErrorKind::Protocol,
        what: format!("rank {from} sent {what}"),
        ranks: vec![from],
    }
}
