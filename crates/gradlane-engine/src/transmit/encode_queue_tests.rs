//! Contributions that are encoded ahead, and those that are taken back.

use super::*;
use crate::plan::Order;
use crate::transmit::OrderKeys;
use gradlane_units::{Priority, TensorId};

#[test]
fn so_many_are_ahead_and_one_that_is_more_urgent_than_these() {
    let mut keys = OrderKeys::new(Order::Priority);
    let mut queue = EncodeQueue::new(Rank(0), 2);
    let step = Step(1);
    let mut push = |queue: &mut EncodeQueue, owner: u32, priority: i32, slice: u32| {
        let key = keys.slice(step, Priority(priority), TensorId(0), SliceId(slice));
        queue.push(Rank(owner), key, PendingEncode { slice: SliceId(slice), step });
    };
    let take = |queue: &mut EncodeQueue| {
        let (key, waiting) = queue.pop()?;
        let buffer = BufferRef { id: waiting.slice.0, bytes: 1 };
        queue.note_encoded(waiting, key, Rank(1), buffer);
        Some(waiting.slice.0)
    };
    for slice in 0..3 {
        push(&mut queue, 1, 0, slice);
    }
    assert_eq!((take(&mut queue), take(&mut queue), take(&mut queue)), (Some(0), Some(1), None));
    // One more urgent one goes at once; the next waits although it is still more urgent.
    push(&mut queue, 1, 5, 3);
    push(&mut queue, 1, 7, 4);
    assert_eq!((take(&mut queue), take(&mut queue)), (Some(4), None));
    assert!(!queue.is_idle());
    // The most urgent is sent first, and makes room for the next.
    assert_eq!(queue.note_sent(SliceId(4), step).map(|buffer| buffer.id), Some(4));
    assert_eq!((take(&mut queue), take(&mut queue)), (Some(3), None));
    for slice in [3, 0, 1] {
        assert!(queue.note_sent(SliceId(slice), step).is_some());
    }
    assert_eq!((take(&mut queue), take(&mut queue)), (Some(2), None));
    assert!(queue.note_sent(SliceId(2), step).is_some());
    assert!(queue.note_sent(SliceId(2), step).is_none());
    assert!(queue.is_idle());
}

#[test]
fn what_is_taken_back_makes_room_and_is_encoded_no_more() {
    let mut keys = OrderKeys::new(Order::Priority);
    let mut queue = EncodeQueue::new(Rank(0), 1);
    let key_of = |keys: &mut OrderKeys, step: u64, slice: u32| {
        keys.slice(Step(step), Priority(0), TensorId(0), SliceId(slice))
    };
    for (step, slice) in [(1, 0), (1, 1), (2, 0)] {
        let key = key_of(&mut keys, step, slice);
        queue.push(Rank(1), key, PendingEncode { slice: SliceId(slice), step: Step(step) });
    }
    let (key, taken) = queue.pop().expect("the first");
    assert!(queue.pop().is_none(), "one is ahead");
    assert_eq!(queue.withdraw(Step(1)), [SliceId(1)]);
    queue.drop_encoded(key, Rank(1));
    let next = queue.pop().map(|(_, waiting)| waiting.step);
    assert_eq!((taken.slice, next), (SliceId(0), Some(Step(2))));
}

#[test]
fn what_this_rank_owns_itself_is_not_bounded() {
    let mut keys = OrderKeys::new(Order::Priority);
    let mut queue = EncodeQueue::new(Rank(0), 1);
    for slice in 0..5 {
        let key = keys.slice(Step(1), Priority(0), TensorId(0), SliceId(slice));
        queue.push(Rank(0), key, PendingEncode { slice: SliceId(slice), step: Step(1) });
    }
    assert_eq!(core::iter::from_fn(|| queue.pop()).count(), 5);
}
