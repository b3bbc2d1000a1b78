//! Frames of a peer that sends what it likes, drawn from seeds, and what ranks expect of each other.

use super::call::{Call, Operation};
use super::element::{Element, Reduction};
use super::hostile::hostile_peer;
use super::limits::Limits;
use super::memory::lent_memory;
use super::schedule::{schedule, Memory};
use crate::memory::UserMemory;
use gradlane_units::Rng;
use std::collections::BTreeMap;

#[test]
fn frames_of_a_hostile_peer_are_bounded() {
    let (mut violations, mut taken) = (0, 0);
    for first in 0..400_u64 {
        let mut rng = Rng::new(first);
        // As many events as there may be.
        let mut is_first = true;
        let outcome = hostile_peer(&mut |end| {
            if std::mem::take(&mut is_first) {
                end - 1
            } else {
                rng.next_u64() % end
            }
        });
        violations += u64::from(outcome.is_refused);
        taken += outcome.taken;
    }
    assert!(violations > 100 && taken > 1_000, "{violations} refused, {taken} taken");
}

#[test]
fn what_one_rank_sends_in_a_round_another_one_receives() {
    let operations = [
        Operation::AllReduce,
        Operation::Broadcast,
        Operation::Reduce,
        Operation::AllGather,
        Operation::Barrier,
        Operation::MonitoredBarrier,
    ];
    let limits =
        Limits { piece: 64, piece_least: 16, exchange: 64, whole_broadcast: 64, ..Limits::USUAL };
    for size in 1..=6_u32 {
        for (operation, elements) in operations.iter().flat_map(|it| [(*it, 3), (*it, 301)]) {
            let mut tensor = vec![0; elements];
            let memory = lent_memory(&mut tensor);
            let of = |count: usize| -> Vec<UserMemory> { vec![memory; count] };
            let (inputs, outputs) = match operation {
                Operation::AllGather => (of(1), of(size as usize)),
                Operation::Barrier | Operation::MonitoredBarrier => (of(0), of(0)),
                _ => (of(0), of(1)),
            };
            let (element, reduction, root) = (Element::I32, Reduction::Sum, size / 2);
            let call = Call { operation, element, reduction, root, inputs, outputs };
            // By strand, round, sender and receiver: bytes that are sent, and bytes that are expected.
            let mut messages: BTreeMap<_, [Option<usize>; 2]> = BTreeMap::new();
            for rank in 0..size {
                for (strand, it) in schedule(&call, rank, size, limits).iter().enumerate() {
                    for (number, round) in it.rounds.iter().enumerate() {
                        for (to, place) in &round.sends {
                            let key = (strand, number, rank, *to);
                            let old = messages.entry(key).or_default()[0].replace(place.length);
                            assert!(old.is_none() && *to != rank, "{operation:?} {key:?}");
                        }
                        for (from, place) in &round.receives {
                            let key = (strand, number, *from, rank);
                            let old = messages.entry(key).or_default()[1].replace(place.length);
                            assert!(old.is_none() && *from != rank, "{operation:?} {key:?}");
                            if let Memory::Scratch(index) = place.memory {
                                assert!(place.start + place.length <= it.scratch[index]);
                            }
                        }
                    }
                }
            }
            for (key, [sent, expected]) in &messages {
                assert_eq!(sent, expected, "{operation:?} of {elements} on {size}: {key:?}");
            }
        }
    }
}
