//! The scheduler against a naive model: a flat list that is searched for the smallest key.

use super::*;
use crate::api::{Memory, Region};
use crate::plan::Order;
use crate::transmit::{Body, OrderKeys};
use alloc::vec::Vec;
use gradlane_units::{Priority, TensorId};
use gradlane_wire::{FrameFlags, FrameHeader, FrameKind, PayloadForm};
use proptest::prelude::*;

const WORLD: u32 = 5;

fn header(slice: u32) -> FrameHeader {
    FrameHeader {
        kind: FrameKind::Push,
        form: PayloadForm::Raw,
        flags: FrameFlags::NONE,
        step: Step(1),
        generation: 0,
        plan_version: 0,
        tensor: TensorId(slice),
        slice: SliceId(slice),
        priority: Priority(0),
        sender: Rank(0),
        offset: 0,
        length: 0,
        block_bytes: 0,
        hop: 0,
        payload_checksum: 0,
    }
}

fn message(slice: u32, bytes: u64) -> Message {
    let memory = Memory::Gradient(TensorId(slice));
    Message {
        header: header(slice),
        body: Body::Region(Region { memory, offset: 1000, length: bytes }),
    }
}

/// One message to one peer, as the model sees it.
#[derive(Clone, Debug)]
struct StepEntry {
    key: OrderKey,
    peer: Rank,
    slice: u32,
    offset: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Model {
    entries: Vec<StepEntry>,
    in_flight: [u64; WORLD as usize],
    writable: [bool; WORLD as usize],
    frame_bytes: [u32; WORLD as usize],
    credit: u64,
}

impl Model {
    fn frame(&self, entry: &StepEntry) -> u32 {
        let rest = (entry.bytes - entry.offset) as u32;
        let usual = self.frame_bytes[entry.peer.index()];
        // A rest of up to an eighth goes along.
        if rest <= usual + usual / 8 {
            rest
        } else {
            usual
        }
    }

    fn can_go(&self, entry: &StepEntry) -> bool {
        let in_flight = self.in_flight[entry.peer.index()];
        let after = in_flight + frame_cost(self.frame(entry));
        self.writable[entry.peer.index()] && (in_flight == 0 || after <= self.credit)
    }

    /// Each peer's most urgent frame may go if there is room for it; nothing passes it over. The
    /// smallest key among those goes.
    fn most_urgent(&self) -> Option<OrderKey> {
        let heads = (0..WORLD).filter_map(|peer| {
            self.entries.iter().filter(|it| it.peer == Rank(peer)).min_by_key(|it| it.key)
        });
        heads.filter(|entry| self.can_go(entry)).map(|entry| entry.key).min()
    }

    /// The queue towards a peer: messages, bytes, bytes in flight.
    fn depth(&self, peer: Rank) -> PeerQueueStats {
        let of_peer = self.entries.iter().filter(|it| it.peer == peer);
        PeerQueueStats {
            messages: of_peer.clone().count() as u64,
            bytes: of_peer.map(|it| it.bytes - it.offset).sum(),
            in_flight_bytes: self.in_flight[peer.index()],
        }
    }

    /// Books a frame that the scheduler gave out; `None` when it was not to be given out.
    fn take(&mut self, transmit: &Transmit) -> Option<OrderKey> {
        let position = self.entries.iter().position(|entry| {
            entry.peer == transmit.peer
                && entry.slice == transmit.header.slice.0
                && entry.offset == transmit.header.offset
                && self.frame(entry) == transmit.header.length
                && self.can_go(entry)
        })?;
        let entry = &mut self.entries[position];
        let key = entry.key;
        entry.offset += u64::from(transmit.header.length);
        let ends = entry.offset == entry.bytes;
        assert_eq!(transmit.header.flags.contains(FrameFlags::LAST), ends);
        self.in_flight[transmit.peer.index()] += frame_cost(transmit.header.length);
        if ends {
            self.entries.remove(position);
        }
        Some(key)
    }
}

#[derive(Clone, Debug)]
enum Action {
    Push { peer: u32, priority: i32, bytes: u64 },
    Broadcast { priority: i32, bytes: u64 },
    Writable { peer: u32, writable: bool },
    FrameBytes { peer: u32, frame_bytes: u32 },
    Poll,
    Sent,
}

fn action() -> impl Strategy<Value = Action> {
    let bytes = || prop_oneof![Just(0_u64), 1..300_u64];
    prop_oneof![
        (1..WORLD, -5..5, bytes()).prop_map(|(peer, priority, bytes)| Action::Push {
            peer,
            priority,
            bytes
        }),
        (-5..5, bytes()).prop_map(|(priority, bytes)| Action::Broadcast { priority, bytes }),
        (1..WORLD, any::<bool>()).prop_map(|(peer, writable)| Action::Writable { peer, writable }),
        (1..WORLD, prop_oneof![Just(16_u32), Just(64), Just(192)])
            .prop_map(|(peer, frame_bytes)| Action::FrameBytes { peer, frame_bytes }),
        Just(Action::Poll),
        Just(Action::Poll),
        Just(Action::Sent),
    ]
}

fn check(actions: &[Action], order: Order, credit: u64) -> Result<(), TestCaseError> {
    let frame_bytes = 64;
    let mut scheduler = Scheduler::new(Rank(0), WORLD, frame_bytes, credit);
    let mut keys = OrderKeys::new(order);
    let mut model = Model {
        entries: Vec::new(),
        in_flight: [0; WORLD as usize],
        writable: [false; WORLD as usize],
        frame_bytes: [frame_bytes; WORLD as usize],
        credit,
    };
    let mut unsent: Vec<Transmit> = Vec::new();
    for (slice, action) in (0_u32..).zip(actions) {
        let key_for = |keys: &mut OrderKeys, priority: i32| {
            keys.slice(Step(1), Priority(priority), TensorId(slice), SliceId(slice))
        };
        match *action {
            Action::Push { peer, priority, bytes } => {
                let key = key_for(&mut keys, priority);
                scheduler.push(Rank(peer), key, message(slice, bytes));
                model.entries.push(StepEntry { key, peer: Rank(peer), slice, offset: 0, bytes });
            }
            Action::Broadcast { priority, bytes } => {
                let key = key_for(&mut keys, priority);
                let all = RankSet::all_but(WORLD, Rank(0));
                for peer in all.iter() {
                    model.entries.push(StepEntry { key, peer, slice, offset: 0, bytes });
                }
                scheduler.push_shared(all, key, message(slice, bytes));
            }
            Action::Writable { peer, writable } => {
                scheduler.set_writable(Rank(peer), writable);
                model.writable[peer as usize] = writable;
            }
            Action::FrameBytes { peer, frame_bytes } => {
                scheduler.set_frame_bytes(Rank(peer), frame_bytes);
                model.frame_bytes[peer as usize] = frame_bytes;
            }
            Action::Poll => {
                let expected = model.most_urgent();
                let transmit = scheduler.poll();
                let key = transmit.as_ref().and_then(|it| model.take(it));
                prop_assert_eq!(key, expected, "given out: {:?}", transmit);
                unsent.extend(transmit);
            }
            Action::Sent if unsent.is_empty() => {}
            Action::Sent => {
                let transmit = unsent.remove(slice as usize % unsent.len());
                model.in_flight[transmit.peer.index()] -= frame_cost(transmit.header.length);
                scheduler.sent(transmit.peer, transmit.header.length);
                scheduler.read(transmit.peer);
            }
        }
        let depths: Vec<PeerQueueStats> = (0..WORLD).map(|peer| model.depth(Rank(peer))).collect();
        prop_assert_eq!(scheduler.queue_stats(), depths);
    }
    // With every peer writable and every frame acknowledged at once, everything leaves.
    for peer in 1..WORLD {
        scheduler.set_writable(Rank(peer), true);
        model.writable[peer as usize] = true;
    }
    for transmit in unsent {
        model.in_flight[transmit.peer.index()] -= frame_cost(transmit.header.length);
        scheduler.sent(transmit.peer, transmit.header.length);
        scheduler.read(transmit.peer);
    }
    while let Some(transmit) = scheduler.poll() {
        let expected = model.most_urgent();
        prop_assert_eq!(model.take(&transmit), expected);
        model.in_flight[transmit.peer.index()] -= frame_cost(transmit.header.length);
        scheduler.sent(transmit.peer, transmit.header.length);
        scheduler.read(transmit.peer);
    }
    prop_assert!(model.entries.is_empty(), "left behind: {:?}", model.entries);
    prop_assert!(scheduler.is_idle());
    Ok(())
}

proptest! {
    #[test]
    fn gives_out_what_the_naive_model_gives_out(
        actions in proptest::collection::vec(action(), 0..120),
        by_priority in any::<bool>(),
        credit in prop_oneof![Just(0_u64), Just(128), Just(400)],
    ) {
        let order = if by_priority { Order::Priority } else { Order::Arrival };
        check(&actions, order, credit)?;
    }

    #[test]
    fn keys_are_a_strict_order_older_steps_first(
        a in (0..3_u64, -2..2_i32, 0..3_u32), b in (0..3_u64, -2..2_i32, 0..3_u32),
    ) {
        let mut keys = OrderKeys::new(Order::Priority);
        let mut key = |(step, priority, slice): (u64, i32, u32)| {
            keys.slice(Step(step), Priority(priority), TensorId(slice), SliceId(slice))
        };
        let (first, second) = (key(a), key(b));
        prop_assert_ne!(first, second);
        let rank = |it: (u64, i32, u32)| (it.0, -it.1, it.2);
        // A tie goes to the one that came first.
        prop_assert_eq!(first < second, rank(a) <= rank(b));
        prop_assert!(keys.control() < first.min(second));
    }
}

#[test]
fn a_frame_between_two_slices_is_all_that_an_urgent_one_waits_for() {
    let mut scheduler = Scheduler::new(Rank(0), 2, 64, 0);
    let mut keys = OrderKeys::new(Order::Priority);
    scheduler.set_writable(Rank(1), true);
    let bulk = keys.slice(Step(1), Priority(-9), TensorId(9), SliceId(9));
    scheduler.push(Rank(1), bulk, message(9, 6400));
    let first = scheduler.poll().expect("a frame");
    let urgent = keys.slice(Step(1), Priority(0), TensorId(0), SliceId(0));
    scheduler.push(Rank(1), urgent, message(0, 10));
    scheduler.sent(first.peer, first.header.length);
    scheduler.read(first.peer);
    assert_eq!(scheduler.poll().map(|it| it.header.slice), Some(SliceId(0)));
}
