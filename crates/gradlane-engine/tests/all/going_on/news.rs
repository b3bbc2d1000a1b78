//! What lanes of a rank tell each other, one engine at a time.

use crate::common::{frame, plan};
use gradlane_engine::{Engine, EngineOptions, Event, GoingOn, Input, LaneNews, Payload};
use gradlane_units::{Rank, Time};
use gradlane_wire::FrameKind;
use std::sync::Arc;
use std::time::Duration;

const COLLECT: Duration = Duration::from_millis(200);

/// The engine of a lane of rank 0 of three, with two lanes.
fn lane(lane: u32) -> Engine {
    let plan = plan(&[8], "p3", 2, 3).lane(lane, 2);
    let going_on = GoingOn { min_ranks: 1, collect: COLLECT, answer: Duration::from_secs(2) };
    let options = EngineOptions { going_on: Some(going_on), ..EngineOptions::new(Rank(0)) };
    let mut engine = Engine::new(options, Arc::new(plan));
    (1..3).for_each(|peer| engine.tell(Input::Writable(Rank(peer), true)));
    engine
}

fn events(engine: &mut Engine) -> Vec<Event> {
    std::iter::from_fn(|| engine.poll_event()).collect()
}

/// The texts that the others are sent about the membership.
fn messages(engine: &mut Engine) -> String {
    let sent = std::iter::from_fn(|| engine.poll_transmit());
    let text = |payload| match payload {
        Payload::Inline(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        _ => String::new(),
    };
    sent.filter(|it| it.header.kind == FrameKind::Membership).map(|it| text(it.payload)).collect()
}

fn lost(by_own_will: bool) -> Input {
    let reason = "closed in lane 1".to_owned();
    Input::Told(LaneNews::PeerLost { peer: Rank(2), reason, by_own_will })
}

#[test]
fn a_peer_that_only_another_lane_has_lost_is_given_up_after_a_while() {
    let mut lead = lane(0);
    lead.handle(lost(false)).expect("taken");
    assert_eq!(lead.poll_timeout(), Some(Time::ZERO + COLLECT));
    assert!(events(&mut lead).is_empty() && messages(&mut lead).is_empty());
    lead.tell(Input::Time(Time::ZERO + COLLECT));
    let told = events(&mut lead);
    assert!(told.contains(&Event::Disconnect(Rank(2))), "{told:?}");
    assert!(told.contains(&Event::TellLanes(LaneNews::Suspended)), "{told:?}");
    assert!(messages(&mut lead).contains("closed in lane 1"));
}

#[test]
fn the_reason_that_a_peer_gives_itself_counts() {
    let mut lead = lane(0);
    lead.handle(lost(false)).expect("taken");
    lead.tell(Input::PeerLost(Rank(2), "its own reason".to_owned()));
    lead.tell(Input::Time(Time::ZERO + COLLECT));
    assert!(!events(&mut lead).contains(&Event::Disconnect(Rank(2))), "it is gone already");
    let text = messages(&mut lead);
    assert!(text.contains("its own reason") && !text.contains("closed in lane 1"), "{text:?}");
}

#[test]
fn a_peer_that_a_lane_leaves_is_left_in_all_at_once() {
    let mut other = lane(1);
    other.tell(Input::RejectPeer(Rank(2), "it sent nonsense".to_owned()));
    let reason = "it sent nonsense".to_owned();
    let news = LaneNews::PeerLost { peer: Rank(2), reason, by_own_will: true };
    assert_eq!(
        events(&mut other),
        vec![Event::Disconnect(Rank(2)), Event::TellLead(news)],
        "by the first lane all others hear of it"
    );
    let mut lead = lane(0);
    lead.handle(lost(true)).expect("taken");
    assert!(events(&mut lead).contains(&Event::Disconnect(Rank(2))));
}

#[test]
fn ranks_agree_in_their_first_lanes_alone() {
    let mut other = lane(1);
    let header = frame(FrameKind::Membership, Rank(1));
    other.handle(Input::Header(Rank(1), header)).expect("it is short enough");
    let error = other.handle(Input::Control(Rank(1), header, [].to_vec())).expect_err("not there");
    assert!(error.to_string().contains("lane 1"), "{error}");
}
