//! Single messages, texts and sets.

use super::cluster::{Accident, Cluster, Conditions, COLLECT, MS};
use crate::api::GoingOn;
use crate::control::blame::Blame;
use crate::membership::links::Links;
use crate::membership::message::{
    shorten, Ballot, Message, Value, LOSS_BYTES_MAX, REASON_BYTES_MAX, ROUNDS_MAX,
};
use crate::membership::{Decision, Membership};
use crate::rank_set::RankSet;
use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::time::Duration;
use gradlane_units::{Rank, Time};
use proptest::prelude::*;

const WORLD: u32 = 4;

fn membership(rank: u32, world: u32, min_ranks: u32) -> Membership {
    let (collect, answer) = (Duration::from_millis(60), Duration::from_millis(100));
    Membership::new(Rank(rank), world, GoingOn { min_ranks, collect, answer })
}

fn set(world: u32, ranks: &[u32]) -> RankSet {
    let mut set = RankSet::empty(world);
    ranks.iter().for_each(|&rank| {
        set.insert(Rank(rank));
    });
    set
}

fn ended(membership: &mut Membership) -> (Blame, String) {
    loop {
        match membership.poll_decision().expect("an end") {
            Decision::Ended { blame, reason } => return (blame, reason),
            Decision::Suspended | Decision::Claim { .. } => {}
            decision @ Decision::Members { .. } => panic!("{decision:?}"),
        }
    }
}

#[test]
fn a_closed_connection_costs_a_few_messages_and_no_wait() {
    let mut cluster = Cluster::new(Conditions::new(4), 1);
    cluster.plan(MS, Accident::Kill(2));
    cluster.run();
    let (members, reason) = &cluster.decided[&1];
    assert_eq!(members, &set(4, &[0, 1, 3]));
    assert_eq!(reason, "rank 2 was lost: connection reset");
    let conditions = &cluster.conditions;
    let six_messages = Duration::from_nanos(7 * conditions.delay_max);
    assert!(cluster.decided_at.since(Time(MS)) < six_messages);
    assert!(six_messages < Duration::from_nanos(COLLECT));
    assert_eq!(cluster.claims, 0);
}

#[test]
fn the_first_of_two_halves_goes_on() {
    let mut ranks = [membership(0, 2, 1), membership(1, 2, 1)];
    let mut claims = Vec::new();
    for (rank, peer) in [(0, 1), (1, 0)] {
        ranks[rank].lose(Rank(peer), "connection reset", Time(5));
        assert_eq!(ranks[rank].poll_decision(), Some(Decision::Suspended));
        let Some(Decision::Claim { generation: 1, value }) = ranks[rank].poll_decision() else {
            panic!("no claim of rank {rank}");
        };
        claims.push(value);
        // The driver ends this wait.
        assert_eq!(ranks[rank].poll_timeout(), None);
    }
    ranks[0].claim_answered(1, Some(&claims[1]), Time(9));
    ranks[1].claim_answered(1, Some(&claims[1]), Time(9));
    let reason = "rank 0 was lost: connection reset".to_string();
    let members = set(2, &[1]);
    let decision = Some(Decision::Members { generation: 1, members, is_through: false, reason });
    assert_eq!(ranks[1].poll_decision(), decision);
    assert!(!ranks[1].is_changing() && ranks[1].poll_timeout().is_none());
    let (blame, reason) = ended(&mut ranks[0]);
    assert_eq!(blame, Blame::Rank(Rank(0)));
    assert!(reason.starts_with("the other ranks go on without rank 0"), "{reason}");
}

#[test]
fn a_store_that_is_silent_or_holds_anything_else_ends_the_session() {
    for (held, says) in [(None, "does not answer"), (Some(&b"rank 7"[..]), "a store of its own")] {
        let mut rank = membership(0, 2, 1);
        rank.lose(Rank(1), "connection reset", Time(5));
        // An answer about something else changes nothing.
        rank.claim_answered(7, None, Time(6));
        assert!(rank.is_changing());
        rank.claim_answered(1, held, Time(7));
        let (_, reason) = ended(&mut rank);
        assert!(reason.contains(says), "{reason}");
    }
}

#[test]
fn too_few_ranks_end_without_the_store() {
    let mut rank = membership(0, 2, 2);
    rank.lose(Rank(1), "connection reset", Time(5));
    assert_eq!(rank.poll_decision(), Some(Decision::Suspended));
    let (blame, reason) = ended(&mut rank);
    assert_eq!(blame, Blame::Rank(Rank(1)));
    let few = "1 of 2 ranks are left, fewer than min_ranks = 2";
    assert_eq!(reason, alloc::format!("rank 1 was lost: connection reset; {few}"));
}

#[test]
fn a_minority_ends_and_names_what_it_lost() {
    let mut rank = membership(2, 3, 1);
    rank.lose(Rank(0), "no bytes for 10 s", Time(5));
    assert!(rank.is_changing());
    rank.lose(Rank(1), "connection reset", Time(6));
    let (_, reason) = ended(&mut rank);
    assert_eq!(
        reason,
        "no majority of the 3 ranks of membership 0 is left: rank 2 lost rank 0 (no bytes for 10 s), rank 1 \
         (connection reset)"
    );
    assert_eq!(rank.poll_timeout(), None);
}

#[test]
fn messages_of_other_generations_are_late_or_wrong() {
    let mut rank = membership(0, WORLD, 1);
    let early = Message::Prepare(Ballot { round: 1, rank: Rank(1) }).to_bytes(1, WORLD);
    assert!(rank.take(Rank(1), &early, Time(1)).is_err());
    assert!(!rank.is_changing());
    let members = set(WORLD, &[0, 1, 2]);
    let value =
        Value { members, lost: Some(Rank(3)), is_through: false, reason: "gone".to_string() };
    let decided = Message::Decided(value).to_bytes(0, WORLD);
    assert_eq!(rank.take(Rank(1), &decided, Time(2)), Ok(()));
    assert_eq!(rank.generation(), 1);
    // It is passed on once; what still comes about the last generation, or from a rank that left, is late.
    let (to, forwarded) = rank.poll_message().expect("the decision");
    assert_eq!((to, forwarded), (set(WORLD, &[2, 3]), decided.clone()));
    assert_eq!(rank.take(Rank(2), &decided, Time(3)), Ok(()));
    let lost = Message::Lost { peer: Rank(0), reason: "reset".to_string() }.to_bytes(1, WORLD);
    assert_eq!(rank.take(Rank(3), &lost, Time(3)), Ok(()));
    assert!(rank.poll_message().is_none() && !rank.is_changing());
}

#[test]
fn messages_that_no_rank_sends_are_refused() {
    let (own, of_one) = (Ballot { round: 1, rank: Rank(0) }, Ballot { round: 1, rank: Rank(1) });
    let nobody =
        Value { members: set(WORLD, &[]), lost: None, is_through: false, reason: String::new() };
    let refused = [
        Message::Lost { peer: Rank(1), reason: String::new() },
        Message::Prepare(own),
        Message::Propose { ballot: of_one, by_register: false, value: nobody.clone() },
        Message::Accepted(own),
        Message::Promise { ballot: own, by_register: false, is_through: false, accepted: None },
        Message::Refused { ballot: own, promised: of_one },
        Message::Decided(nobody),
        Message::Prepare(Ballot { round: ROUNDS_MAX + 1, rank: Rank(1) }),
    ];
    for message in refused {
        let mut rank = membership(0, WORLD, 1);
        let taken = rank.take(Rank(1), &message.to_bytes(0, WORLD), Time(1));
        assert!(taken.is_err() && !rank.is_changing(), "{message:?}");
    }
}

#[test]
fn texts_end_between_characters() {
    assert_eq!(shorten("grün", 3), "gr");
    assert_eq!(shorten("grün", 4), "grü");
    assert_eq!(shorten("grün", 9), "grün");
    let mut rank = membership(0, 3, 1);
    rank.lose(Rank(1), &"ü".repeat(LOSS_BYTES_MAX), Time(1));
    let (_, payload) = rank.poll_message().expect("a loss");
    let mut other = membership(2, 3, 1);
    assert_eq!(other.take(Rank(0), &payload, Time(2)), Ok(()));
}

fn ballots() -> impl Strategy<Value = Ballot> {
    (0..3_u32, 0..WORLD).prop_map(|(round, rank)| Ballot { round, rank: Rank(rank) })
}

fn values() -> impl Strategy<Value = Value> {
    let sets = proptest::collection::vec(0..WORLD, 0..4);
    (sets, proptest::option::of(0..WORLD), any::<bool>(), ".{0,9}").prop_map(
        |(ranks, lost, is_through, reason)| Value {
            members: set(WORLD, &ranks),
            lost: lost.map(Rank),
            is_through,
            reason,
        },
    )
}

fn messages() -> impl Strategy<Value = Message> {
    let accepted = proptest::option::of((ballots(), values()));
    prop_oneof![
        (0..WORLD, ".{0,9}").prop_map(|(peer, reason)| Message::Lost { peer: Rank(peer), reason }),
        ballots().prop_map(Message::Prepare),
        (ballots(), any::<bool>(), any::<bool>(), accepted).prop_map(
            |(ballot, by_register, is_through, accepted)| Message::Promise {
                ballot,
                by_register,
                is_through,
                accepted
            }
        ),
        (ballots(), any::<bool>(), values()).prop_map(|(ballot, by_register, value)| {
            Message::Propose { ballot, by_register, value }
        }),
        ballots().prop_map(Message::Accepted),
        (ballots(), ballots()).prop_map(|(ballot, promised)| Message::Refused { ballot, promised }),
        values().prop_map(Message::Decided),
    ]
}

proptest! {
    #[test]
    fn a_message_is_what_its_bytes_say(generation in 0..9_u32, message in messages()) {
        let bytes = message.to_bytes(generation, WORLD);
        prop_assert!(bytes.len() <= Membership::message_bytes_max(WORLD));
        prop_assert_eq!(Message::from_bytes(WORLD, &bytes), Ok((generation, message)));
        // Cut short, it is another one or none.
        for end in 0..bytes.len() {
            let short = Message::from_bytes(WORLD, &bytes[..end]);
            prop_assert!(short.is_err() || short != Message::from_bytes(WORLD, &bytes));
        }
    }

    /// Whatever peers send, in any order: errors, no panics, and nothing that waits for ever.
    #[test]
    fn anything_is_taken_or_refused(
        sent in proptest::collection::vec((1..WORLD, 0..2_u32, messages(), any::<u8>()), 0..60),
    ) {
        let mut rank = membership(0, WORLD, 1);
        let mut now = Time(1);
        for (from, generation, message, chance) in sent {
            match chance {
                0..16 => rank.lose(Rank(from), "reset", now),
                16..80 => {
                    now = rank.poll_timeout().unwrap_or(now);
                    rank.handle_time(now);
                    prop_assert!(rank.poll_timeout().is_none_or(|next| next > now));
                }
                80..90 => rank.claim_answered(rank.generation() + 1, None, now),
                90..100 => {
                    let mut bytes = message.to_bytes(generation, WORLD);
                    let at = usize::from(chance) % bytes.len();
                    bytes[at] ^= chance;
                    let _ = rank.take(Rank(from), &bytes, now);
                }
                _ => {
                    let _ = rank.take(Rank(from), &message.to_bytes(generation, WORLD), now);
                }
            }
            prop_assert!(rank.members().contains(Rank(0)));
        }
        for _ in 0..200 {
            now = rank.poll_timeout().unwrap_or(now);
            rank.handle_time(now);
        }
        prop_assert_eq!(rank.poll_timeout(), None);
    }

    #[test]
    fn those_that_go_on_are_all_connected(
        cuts in proptest::collection::vec((0..9_u32, 0..9_u32), 0..30),
        through in proptest::collection::vec(0..9_u32, 0..3),
    ) {
        let mut links = Links::new(9, RankSet::all(9), BTreeMap::new());
        for &(by, peer) in cuts.iter().filter(|(by, peer)| by != peer) {
            links.cut(Rank(by), Rank(peer), "reset");
        }
        let through = set(9, &through);
        let value = links.propose(Rank(0), &RankSet::all(9), &through);
        prop_assert!(!value.members.is_empty());
        // Results that ranks have after their goodbye are on a member.
        prop_assert_eq!(value.is_through, !through.is_empty());
        prop_assert!(through.is_empty() || through.iter().any(|rank| value.members.contains(rank)));
        for one in value.members.iter() {
            prop_assert!(value.members.iter().all(|other| !links.is_cut(one, other)));
        }
        // Nobody leaves without a lost connection, and each that leaves is named.
        for leaving in (0..9).map(Rank).filter(|&rank| !value.members.contains(rank)) {
            prop_assert!(links.connected(leaving).len() < 9);
            let named = alloc::format!("{leaving} leaves");
            prop_assert!(value.reason.contains(&named) || value.reason.len() == REASON_BYTES_MAX);
        }
    }
}

#[test]
fn the_rank_with_most_lost_connections_leaves_and_of_several_the_highest() {
    type Case<'a> = (&'a [(u32, u32)], &'a [u32], &'a [u32], &'a str);
    let cases: [Case; 6] = [
        (&[(1, 3)], &[], &[0, 1, 2], "the link between rank 1 and rank 3 is cut (reset): rank 3 leaves"),
        (&[(3, 1), (1, 3)], &[], &[0, 1, 2], "the link between rank 1 and rank 3 is cut (reset): rank 3 leaves"),
        (
            &[(1, 3), (1, 2)],
            &[],
            &[0, 2, 3],
            "the links between rank 1 and rank 2, rank 3 are cut (reset): rank 1 leaves",
        ),
        // Those that have said goodbye have the last results, and leave last.
        (&[(1, 3)], &[3], &[0, 2, 3], "the link between rank 1 and rank 3 is cut (reset): rank 1 leaves"),
        (
            &[(1, 3), (1, 2)],
            &[1],
            &[0, 1],
            "the link between rank 1 and rank 2 is cut (reset): rank 2 leaves; the link between rank 1 and rank 3 \
             is cut (reset): rank 3 leaves",
        ),
        (
            &[(0, 1), (2, 3)],
            &[],
            &[0, 2],
            "the link between rank 0 and rank 1 is cut (reset): rank 1 leaves; the link between rank 2 and rank 3 \
             is cut (reset): rank 3 leaves",
        ),
    ];
    for (cuts, through, members, reason) in cases {
        let mut links = Links::new(WORLD, RankSet::all(WORLD), BTreeMap::new());
        cuts.iter().for_each(|&(by, peer)| {
            links.cut(Rank(by), Rank(peer), "reset");
        });
        let value = links.propose(Rank(0), &RankSet::all(WORLD), &set(WORLD, through));
        assert_eq!((value.members, &value.reason[..]), (set(WORLD, members), reason));
    }
}

#[test]
fn a_rank_whose_links_are_cut_one_by_one_evicts_one_other_at_most() {
    let mut cut_before = BTreeMap::new();
    let mut members = set(6, &[0, 1, 2, 3, 4, 5]);
    let mut left = Vec::new();
    // Links of rank 0 alone are cut, each before the next one is used.
    for peer in [3, 1, 2] {
        let mut links = Links::new(6, members.clone(), cut_before);
        links.cut(Rank(peer), Rank(0), "rank 0 sent a corrupted payload");
        let next = links.clique(&members, &RankSet::empty(6));
        left.extend(members.iter().filter(|&rank| !next.contains(rank)));
        cut_before = links.cut_before(&next);
        members = next;
        if !members.contains(Rank(0)) {
            break;
        }
    }
    assert_eq!(left, [Rank(3), Rank(0)]);
}

#[test]
fn a_dead_rank_says_nothing_of_the_links_of_others() {
    let members = set(WORLD, &[0, 1, 2, 3]);
    let mut links = Links::new(WORLD, members, BTreeMap::new());
    [0, 1, 2].iter().for_each(|&rank| {
        links.cut(Rank(rank), Rank(3), "closed");
    });
    assert!(links.cut_before(&set(WORLD, &[0, 1, 2])).is_empty());
}
