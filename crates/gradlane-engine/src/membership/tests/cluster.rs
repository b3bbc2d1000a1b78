//! Ranks, their connections and the register, in virtual time. Every message takes a random time; those of one
//! connection arrive in order. A connection that is lost at one end is closed at the other one, unless
//! the path is cut, and never comes back.

use super::Fault;
use crate::api::GoingOn;
use crate::membership::{Decision, Membership};
use crate::rank_set::RankSet;
use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use alloc::{format, vec};
use core::time::Duration;
use gradlane_units::{Rank, Rng, Time};

pub(super) const MS: u64 = 1_000_000;
/// Nanoseconds without a byte after which a rank gives its connection up.
pub(super) const SILENCE: u64 = 500 * MS;
pub(super) const COLLECT: u64 = 60 * MS;
pub(super) const ANSWER: u64 = 100 * MS;

/// What becomes of messages under way when a rank dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InFlight {
    Arrive,
    AreLost,
    /// Those after a random time are lost, on each connection another one.
    Some,
}

#[derive(Clone, Debug)]
pub(super) struct Conditions {
    pub(super) world: u32,
    pub(super) min_ranks: u32,
    pub(super) fault: Fault,
    /// Longest time that a message takes.
    pub(super) delay_max: u64,
    /// Largest difference between the times at which ranks notice a silence.
    pub(super) jitter: u64,
    pub(super) in_flight: InFlight,
    pub(super) has_store: bool,
    /// Longest time that the store takes for a question or an answer.
    pub(super) store_delay_max: u64,
}

impl Conditions {
    pub(super) fn new(world: u32) -> Conditions {
        Conditions {
            world,
            min_ranks: 1,
            fault: Fault::None,
            delay_max: 5 * MS,
            jitter: 20 * MS,
            in_flight: InFlight::Some,
            has_store: true,
            store_delay_max: 10 * MS,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Accident {
    /// The process ends: connections are closed.
    Kill(u32),
    /// The host is gone: connections are silent.
    Crash(u32),
    /// A rank does nothing for so long.
    Pause(u32, u64),
    /// A connection is reset, and both ends see it.
    Reset(u32, u32),
    /// Nothing arrives from one rank at another one.
    Cut(u32, u32),
    /// What one rank sends to another one arrives after so long, at the earliest.
    Stall(u32, u32, u64),
}

#[derive(Clone, Debug)]
enum Packet {
    Message(Vec<u8>),
    Close(String),
}

#[derive(Clone, Debug)]
enum Event {
    Packet { from: u32, to: u32, packet: Packet },
    Silence { rank: u32, peer: u32 },
    Timer(u32),
    Resume(u32),
    Claim { rank: u32, generation: u32, value: Vec<u8> },
    Answer { rank: u32, generation: u32, value: Option<Vec<u8>> },
    Accident(Accident),
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) membership: Membership,
    pub(super) is_dead: bool,
    pub(super) ended: Option<String>,
    paused: bool,
    /// What has happened to it while it was paused.
    backlog: Vec<Event>,
    /// By peer: whether this end of the connection is open.
    pub(super) is_open: Vec<bool>,
    timer: Option<Time>,
}

impl Node {
    pub(super) fn goes_on(&self) -> bool {
        !self.is_dead && self.ended.is_none()
    }
}

#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) conditions: Conditions,
    pub(super) now: Time,
    /// Events and messages sent so far.
    pub(super) ticks: u32,
    /// Ranks to kill, by tick.
    pub(super) kills: BTreeMap<u32, u32>,
    pub(super) nodes: Vec<Node>,
    /// By generation: the decision, as its first rank took it.
    pub(super) decided: BTreeMap<u32, (RankSet, String)>,
    /// When a rank has last learned of a decision.
    pub(super) decided_at: Time,
    pub(super) last_accident: Time,
    queue: BTreeMap<(Time, u64), Event>,
    events: u64,
    rng: Rng,
    /// By sender and receiver: when the last packet arrives; when a stall ends; whether the path is cut.
    last_arrival: BTreeMap<(u32, u32), Time>,
    stalled: BTreeMap<(u32, u32), Time>,
    cut: BTreeMap<(u32, u32), Time>,
    register: BTreeMap<u32, Vec<u8>>,
    pub(super) claims: u32,
}

impl Cluster {
    pub(super) fn new(conditions: Conditions, seed: u64) -> Cluster {
        let options = GoingOn {
            min_ranks: conditions.min_ranks,
            collect: Duration::from_nanos(COLLECT),
            answer: Duration::from_nanos(ANSWER),
        };
        let node = |rank| {
            let mut membership = Membership::new(Rank(rank), conditions.world, options.clone());
            membership.fault = conditions.fault;
            Node {
                membership,
                is_dead: false,
                ended: None,
                paused: false,
                backlog: Vec::new(),
                is_open: vec![true; conditions.world as usize],
                timer: None,
            }
        };
        Cluster {
            nodes: (0..conditions.world).map(node).collect(),
            conditions,
            now: Time::ZERO,
            ticks: 0,
            kills: BTreeMap::new(),
            decided: BTreeMap::new(),
            decided_at: Time::ZERO,
            last_accident: Time::ZERO,
            queue: BTreeMap::new(),
            events: 0,
            rng: Rng::new(seed),
            last_arrival: BTreeMap::new(),
            stalled: BTreeMap::new(),
            cut: BTreeMap::new(),
            register: BTreeMap::new(),
            claims: 0,
        }
    }

    pub(super) fn plan(&mut self, at: u64, accident: Accident) {
        self.push(Time(at), Event::Accident(accident));
    }

    pub(super) fn random(&mut self, bound: u64) -> u64 {
        self.rng.next_u64() % bound.max(1)
    }

    fn push(&mut self, at: Time, event: Event) {
        self.events += 1;
        self.queue.insert((at.max(self.now), self.events), event);
    }

    /// Runs until nothing happens any more.
    pub(super) fn run(&mut self) {
        while let Some(((at, _), event)) = self.queue.pop_first() {
            self.now = at;
            self.tick();
            assert!(self.ticks < 1_000_000, "no end in sight at {at:?}: {event:?}");
            self.take(event);
        }
    }

    fn tick(&mut self) {
        self.ticks += 1;
        if let Some(rank) = self.kills.remove(&self.ticks) {
            self.cause(Accident::Kill(rank));
        }
    }

    fn take(&mut self, event: Event) {
        let rank = match &event {
            Event::Packet { to, .. } => *to,
            Event::Silence { rank, .. } | Event::Answer { rank, .. } | Event::Timer(rank) => *rank,
            Event::Accident(accident) => return self.cause(*accident),
            Event::Resume(rank) => return self.resume(*rank),
            Event::Claim { .. } => return self.write_register(event),
        };
        let node = &mut self.nodes[rank as usize];
        if node.is_dead || node.ended.is_some() {
            return;
        }
        if node.paused {
            node.backlog.push(event);
            return;
        }
        let now = self.now;
        match event {
            Event::Packet { from, packet: Packet::Message(payload), to } => {
                if !node.is_open[from as usize] || self.is_lost(from, to) {
                    return;
                }
                let node = &mut self.nodes[rank as usize];
                let taken = node.membership.take(Rank(from), &payload, now);
                assert_eq!(taken, Ok(()), "rank {rank} refuses a message of rank {from}");
            }
            Event::Packet { from, packet: Packet::Close(reason), to } => {
                if !node.is_open[from as usize] || self.is_lost(from, to) {
                    return;
                }
                self.lose(rank, from, &reason);
            }
            Event::Silence { peer, .. } => {
                let peer_node = &self.nodes[peer as usize];
                let is_silent = peer_node.is_dead
                    || peer_node.paused
                    || self.cut.contains_key(&(peer, rank))
                    || self.stalled.get(&(peer, rank)).is_some_and(|&until| until > now);
                if !self.nodes[rank as usize].is_open[peer as usize] || !is_silent {
                    return;
                }
                self.lose(rank, peer, "no bytes for 500 ms");
            }
            Event::Timer(_) => {
                // A timer may have been set anew; that of a paused rank is overdue.
                if node.timer.is_none_or(|due| due > now) {
                    return;
                }
                node.timer = None;
                node.membership.handle_time(now);
                let next = node.membership.poll_timeout();
                assert!(next.is_none_or(|next| next > now), "rank {rank} has nothing to do");
            }
            Event::Answer { generation, value, .. } => {
                node.membership.claim_answered(generation, value.as_deref(), now);
            }
            _ => {}
        }
        self.follow(rank);
    }

    /// Whether what arrives now was lost on its way.
    fn is_lost(&self, from: u32, to: u32) -> bool {
        self.cut.get(&(from, to)).is_some_and(|&since| self.now >= since)
    }

    fn lose(&mut self, rank: u32, peer: u32, reason: &str) {
        self.close(rank, peer, "closed by the peer");
        let now = self.now;
        self.nodes[rank as usize].membership.lose(Rank(peer), reason, now);
    }

    /// One end closes a connection.
    fn close(&mut self, rank: u32, peer: u32, reason: &str) {
        let is_open = &mut self.nodes[rank as usize].is_open[peer as usize];
        if core::mem::replace(is_open, false) {
            self.transmit(rank, peer, Packet::Close(reason.to_string()));
        }
    }

    fn transmit(&mut self, from: u32, to: u32, packet: Packet) {
        let delay = 1 + self.random(self.conditions.delay_max);
        let stall = self.stalled.get(&(from, to)).copied().unwrap_or(Time::ZERO);
        let last = self.last_arrival.get(&(from, to)).copied().unwrap_or(Time::ZERO);
        let at = (self.now + Duration::from_nanos(delay)).max(last).max(stall);
        self.last_arrival.insert((from, to), at);
        self.push(at, Event::Packet { from, to, packet });
    }

    fn cause(&mut self, accident: Accident) {
        self.last_accident = self.now;
        let world = self.conditions.world;
        match accident {
            Accident::Kill(rank) | Accident::Crash(rank) => {
                if core::mem::replace(&mut self.nodes[rank as usize].is_dead, true) {
                    return;
                }
                for peer in (0..world).filter(|&peer| peer != rank) {
                    self.lose_in_flight(rank, peer);
                    if matches!(accident, Accident::Kill(_)) {
                        self.close_dead(rank, peer);
                    }
                    // A host that is down is noticed in the end.
                    self.await_silence(peer, rank);
                }
            }
            Accident::Pause(rank, span) => {
                let node = &mut self.nodes[rank as usize];
                if node.paused || !node.goes_on() {
                    return;
                }
                node.paused = true;
                let until = self.now + Duration::from_nanos(span);
                self.last_accident = until;
                self.push(until, Event::Resume(rank));
                (0..world).filter(|&peer| peer != rank).for_each(|peer| {
                    self.await_silence(peer, rank);
                });
            }
            Accident::Reset(one, other) => {
                for (from, to) in [(one, other), (other, one)] {
                    if self.nodes[from as usize].goes_on() {
                        let packet = Packet::Close("connection reset".to_string());
                        self.push(self.now, Event::Packet { from, to, packet });
                    }
                }
            }
            Accident::Cut(from, to) => {
                self.cut.entry((from, to)).or_insert(self.now);
                self.await_silence(to, from);
            }
            Accident::Stall(from, to, span) => {
                let until = self.now + Duration::from_nanos(span);
                self.last_accident = until;
                self.stalled.insert((from, to), until);
                self.await_silence(to, from);
            }
        }
    }

    /// What a dead rank has sent is lost, or some of it.
    fn lose_in_flight(&mut self, from: u32, to: u32) {
        let last = self.last_arrival.get(&(from, to)).copied().unwrap_or(self.now);
        let since = match self.conditions.in_flight {
            InFlight::Arrive => return,
            InFlight::AreLost => self.now,
            InFlight::Some => {
                let span = last.since(self.now).as_nanos() as u64;
                self.now + Duration::from_nanos(self.random(2 * span + 1))
            }
        };
        let is_later = |(at, _): &(Time, u64), event: &Event| match event {
            Event::Packet { from: by, to: at_rank, .. } => {
                *by == from && *at_rank == to && *at >= since
            }
            _ => false,
        };
        self.queue.retain(|key, event| !is_later(key, event));
    }

    fn close_dead(&mut self, from: u32, to: u32) {
        if core::mem::replace(&mut self.nodes[from as usize].is_open[to as usize], false) {
            self.transmit(from, to, Packet::Close("connection reset".to_string()));
        }
    }

    fn await_silence(&mut self, rank: u32, peer: u32) {
        let jitter = self.random(self.conditions.jitter);
        let at = self.now + Duration::from_nanos(SILENCE + jitter);
        self.push(at, Event::Silence { rank, peer });
    }

    fn resume(&mut self, rank: u32) {
        let node = &mut self.nodes[rank as usize];
        node.paused = false;
        let backlog = core::mem::take(&mut node.backlog);
        for event in backlog {
            self.tick();
            self.take(event);
        }
        self.follow(rank);
    }

    fn write_register(&mut self, event: Event) {
        let Event::Claim { rank, generation, value } = event else {
            return;
        };
        let answer = self.conditions.has_store.then(|| {
            let held = self.register.entry(generation).or_insert(value);
            held.clone()
        });
        let at = self.now + Duration::from_nanos(1 + self.random(self.conditions.store_delay_max));
        self.push(at, Event::Answer { rank, generation, value: answer });
    }

    /// Does what an engine does after each call.
    fn follow(&mut self, rank: u32) {
        loop {
            let node = &mut self.nodes[rank as usize];
            if !node.goes_on() {
                return;
            }
            if let Some((to, payload)) = node.membership.poll_message() {
                let longest = Membership::message_bytes_max(self.conditions.world);
                assert!(payload.len() <= longest, "a message of {} bytes", payload.len());
                for peer in to.iter() {
                    self.tick();
                    if self.nodes[rank as usize].is_dead {
                        return;
                    }
                    if self.nodes[rank as usize].is_open[peer.index()] {
                        self.transmit(rank, peer.0, Packet::Message(payload.clone()));
                    }
                }
            } else if let Some(decision) = node.membership.poll_decision() {
                self.take_decision(rank, decision);
            } else {
                break;
            }
        }
        let node = &mut self.nodes[rank as usize];
        let timer = node.membership.poll_timeout();
        if timer != node.timer {
            node.timer = timer;
            if let Some(at) = timer {
                self.push(at, Event::Timer(rank));
            }
        }
    }

    fn take_decision(&mut self, rank: u32, decision: Decision) {
        let world = self.conditions.world;
        match decision {
            Decision::Suspended => {}
            Decision::Claim { generation, value } => {
                self.claims += 1;
                let at = self.now
                    + Duration::from_nanos(1 + self.random(self.conditions.store_delay_max));
                self.push(at, Event::Claim { rank, generation, value });
            }
            Decision::Ended { reason, .. } => {
                for peer in (0..world).filter(|&peer| peer != rank) {
                    self.close(rank, peer, &format!("rank {rank} gave up"));
                }
                assert!(!reason.is_empty());
                self.nodes[rank as usize].ended = Some(reason);
            }
            Decision::Members { generation, members, reason, .. } => {
                self.check_decision(rank, generation, &members, &reason);
                self.decided_at = self.now;
                for peer in (0..world).filter(|&peer| !members.contains(Rank(peer))) {
                    self.close(rank, peer, "closed by the peer");
                }
            }
        }
    }

    /// One membership for each generation, the same on all ranks, in order, and smaller each time.
    fn check_decision(&mut self, rank: u32, generation: u32, members: &RankSet, reason: &str) {
        assert!(members.contains(Rank(rank)), "rank {rank} goes on without itself");
        assert!(!reason.is_empty(), "rank {rank} does not know why");
        assert!(members.len() >= self.conditions.min_ranks, "too few members: {members:?}");
        let all = RankSet::all(self.conditions.world);
        let before = match generation {
            1 => &all,
            _ => &self.decided.get(&(generation - 1)).expect("generations come in order").0,
        };
        assert!(members.iter().all(|member| before.contains(member)), "{members:?} of {before:?}");
        let first = self.decided.entry(generation);
        let (agreed, why) = first.or_insert_with(|| (members.clone(), reason.to_string()));
        assert_eq!(agreed, members, "two memberships of generation {generation}");
        assert_eq!(why, reason, "two reasons for generation {generation}");
    }

    pub(super) fn going_on(&self) -> Vec<u32> {
        let ranks = 0..self.conditions.world;
        ranks.filter(|&rank| self.nodes[rank as usize].goes_on()).collect()
    }

    /// What holds when nothing happens any more, whatever has happened.
    pub(super) fn check_end(&self) {
        let going_on = self.going_on();
        let last = self.decided.keys().next_back().copied().unwrap_or(0);
        for &rank in &going_on {
            let node = &self.nodes[rank as usize];
            let membership = &node.membership;
            assert!(!membership.is_changing(), "rank {rank} still waits");
            assert_eq!(membership.generation(), last, "rank {rank} is behind");
            let members: Vec<u32> = membership.members().iter().map(|it| it.0).collect();
            assert_eq!(members, going_on, "rank {rank} goes on with others");
            for &peer in going_on.iter().filter(|&&peer| peer != rank) {
                assert!(node.is_open[peer as usize], "rank {rank} has lost rank {peer}");
            }
        }
        // Each generation may take its time; accidents and silences come one after the other.
        let generations = u64::from(last) + 1;
        let longest = 2 * SILENCE
            + self.conditions.jitter
            + generations * (COLLECT + 40 * (ANSWER + self.conditions.delay_max));
        let took = self.now.since(self.last_accident);
        assert!(took <= Duration::from_nanos(longest), "{took:?} after the last accident");
    }
}
