//! Messages between two ranks: sends, receives with tags, receives from any rank.
//!
//! The sender numbers its messages to each peer. Among messages with one tag, the first that comes meets the
//! first receive that takes it, as in MPI. A message that is too long to be sent without asking is offered,
//! and sent when a receive has met the offer.

use super::call::{Description, Operation};
use super::element::{Element, Reduction};
use super::error::{violation, Failure, GroupErrorKind};
use super::frame::FramePurpose;
use super::memory;
use super::peers::{Peers, Presence, Sent, AHEAD_MAX};
use super::running::gone;
use super::work::{Begun, Work};
use crate::memory::Span;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// What a call sends or receives.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) tag: u32,
    pub(super) span: Span,
}

/// A receive that no message has met.
#[derive(Debug)]
struct Wanted {
    /// `None`: from any rank.
    from: Option<u32>,
    message: Message,
    begun: Begun,
}

/// A message that no receive has met: its bytes, or an offer.
#[derive(Debug)]
struct Arrival {
    from: u32,
    number: u64,
    tag: u32,
    total: usize,
    bytes: Option<Vec<u8>>,
}

/// A receive that a message has met, until the message is there.
#[derive(Debug)]
struct Landing {
    message: Message,
    filled: usize,
    is_granted: bool,
    begun: Begun,
}

/// A send that the kernel does not have yet.
#[derive(Debug)]
struct Sending {
    message: Message,
    is_granted: bool,
    begun: Begun,
}

/// All messages between two ranks.
#[derive(Debug)]
pub(super) struct Points {
    /// By peer: the number of the next message to it.
    next: Vec<u64>,
    /// By peer: the number of the next message from it.
    expected: Vec<u64>,
    /// By peer: offers that no receive has met.
    offers: Vec<usize>,
    wanted: Vec<Wanted>,
    /// In the order in which they came.
    arrivals: Vec<Arrival>,
    landings: BTreeMap<(u32, u64), Landing>,
    sending: BTreeMap<(u32, u64), Sending>,
}

type Outcome = Result<(), Failure>;

/// The description in frames of these messages.
const MESSAGE: Description = Description {
    operation: Operation::Send,
    element: Element::Bytes,
    reduction: Reduction::Sum,
    root: 0,
    elements: 0,
};

impl Points {
    pub(super) fn new(size: u32) -> Points {
        Points {
            next: vec![0; size as usize],
            expected: vec![0; size as usize],
            offers: vec![0; size as usize],
            wanted: Vec::new(),
            arrivals: Vec::new(),
            landings: BTreeMap::new(),
            sending: BTreeMap::new(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.wanted.is_empty() && self.landings.is_empty() && self.sending.is_empty()
    }

    /// Begins a send.
    pub(super) fn send(
        &mut self,
        peers: &mut Peers,
        to: u32,
        message: Message,
        begun: Begun,
        ended: &mut Vec<Arc<Work>>,
    ) -> Outcome {
        let Message { tag, span } = message;
        if peers.get(to).presence == Presence::Left {
            return Err(gone(to, &format!("send with tag {tag}")));
        }
        let number = self.next[to as usize];
        self.next[to as usize] += 1;
        let header = |purpose: FramePurpose| {
            purpose.message(peers.rank, MESSAGE, number, tag, span.length())
        };
        let (data, offer) = (header(FramePurpose::Data), header(FramePurpose::Offer));
        if span.length() <= peers.limits.eager && peers.take_credit(to, span.length()) {
            peers.push_copy(to, data, span);
            ended.push(begun.work);
            return Ok(());
        }
        peers.push_control(to, offer);
        self.sending.insert((to, number), Sending { message, is_granted: false, begun });
        Ok(())
    }

    /// Begins a receive.
    pub(super) fn receive(
        &mut self,
        peers: &mut Peers,
        from: Option<u32>,
        message: Message,
        begun: Begun,
        ended: &mut Vec<(Arc<Work>, u32)>,
    ) -> Outcome {
        let Message { tag, span } = message;
        let fits = |it: &Arrival| it.tag == tag && from.is_none_or(|from| from == it.from);
        let Some(index) = self.arrivals.iter().position(fits) else {
            let mut sources = peers.others().filter(|it| from.is_none_or(|from| from == *it));
            if sources.all(|it| peers.get(it).presence == Presence::Left) {
                let rank = from.unwrap_or_default();
                return Err(gone(rank, &format!("recv with tag {tag}")));
            }
            self.wanted.push(Wanted { from, message, begun });
            return Ok(());
        };
        let arrival = self.arrivals.remove(index);
        check_size(peers, arrival.from, tag, arrival.total, span.length())?;
        let Some(bytes) = arrival.bytes else {
            self.offers[arrival.from as usize] -= 1;
            let landing = Landing { message, filled: 0, is_granted: true, begun };
            self.landings.insert((arrival.from, arrival.number), landing);
            grant(peers, arrival.from, arrival.number, tag, arrival.total);
            return Ok(());
        };
        if !bytes.is_empty() {
            memory::write(span).copy_from_slice(&bytes);
        }
        peers.note_taken(arrival.from, bytes.len());
        ended.push((begun.work, arrival.from));
        Ok(())
    }

    /// Takes out the receive that a message of `total` bytes meets first; one of another size stays, and fails with
    /// the group.
    fn meet(
        &mut self,
        peers: &Peers,
        from: u32,
        tag: u32,
        total: usize,
    ) -> Result<Option<Wanted>, Failure> {
        let fits =
            |it: &Wanted| it.message.tag == tag && it.from.is_none_or(|wanted| wanted == from);
        let Some(index) = self.wanted.iter().position(fits) else {
            return Ok(None);
        };
        check_size(peers, from, tag, total, self.wanted[index].message.span.length())?;
        Ok(Some(self.wanted.remove(index)))
    }

    /// Notes that a peer begins a message: it counts them, one after the other.
    fn count(&mut self, from: u32, number: u64) -> Outcome {
        let expected = &mut self.expected[from as usize];
        if *expected != number {
            let what = format!("message {number} where message {expected} follows");
            return Err(violation(from, &what));
        }
        *expected += 1;
        Ok(())
    }

    /// Takes an offer.
    pub(super) fn offered(
        &mut self,
        peers: &mut Peers,
        from: u32,
        number: u64,
        tag: u32,
        total: usize,
    ) -> Outcome {
        self.count(from, number)?;
        let Some(wanted) = self.meet(peers, from, tag, total)? else {
            self.offers[from as usize] += 1;
            if self.offers[from as usize] > AHEAD_MAX {
                let what = format!("more than {AHEAD_MAX} messages that no call receives");
                return Err(violation(from, &what));
            }
            self.arrivals.push(Arrival { from, number, tag, total, bytes: None });
            return Ok(());
        };
        self.landings.insert((from, number), wanted.landing(true));
        grant(peers, from, number, tag, total);
        Ok(())
    }

    /// Sends a message that its receiver has granted.
    pub(super) fn granted(&mut self, peers: &mut Peers, from: u32, number: u64) -> Outcome {
        let sending = self.sending.get_mut(&(from, number)).filter(|it| !it.is_granted);
        let Some(sending) = sending else {
            return Err(Failure {
                kind: GroupErrorKind::Protocol,
                what: format!("rank {from} grants message {number}, which was not offered"),
                ranks: vec![from],
            });
        };
        sending.is_granted = true;
        let Message { tag, span } = sending.message;
        let header = FramePurpose::Data.message(peers.rank, MESSAGE, number, tag, span.length());
        peers.push_message(from, header, span, Sent::Point(number));
        Ok(())
    }

    /// Notes that the kernel has a message.
    pub(super) fn sent(&mut self, to: u32, number: u64, ended: &mut Vec<Arc<Work>>) {
        if let Some(sending) = self.sending.remove(&(to, number)) {
            ended.push(sending.begun.work);
        }
    }

    /// Returns the place of a frame's payload: its range, or nothing where no receive has met the message.
    pub(super) fn place(
        &mut self,
        peers: &mut Peers,
        from: u32,
        (number, tag): (u64, u32),
        total: usize,
        start: usize,
        length: usize,
    ) -> Result<Option<Span>, Failure> {
        if let Some(it) = self.landings.get(&(from, number)) {
            let fits = it.filled == start && start + length <= total;
            if !fits || total != it.message.span.length() || tag != it.message.tag {
                let what = format!("bytes {start} to {} of another message", start + length);
                return Err(violation(from, &what));
            }
            return Ok(Some(memory::part(it.message.span, start, length)));
        }
        if start != 0 || length != total || length > peers.limits.eager {
            let what = format!("{length} bytes of a message that was not granted");
            return Err(violation(from, &what));
        }
        self.count(from, number)?;
        peers.note_unasked(from, length)?;
        let Some(wanted) = self.meet(peers, from, tag, total)? else {
            return Ok(None);
        };
        let span = wanted.message.span;
        self.landings.insert((from, number), wanted.landing(false));
        Ok(Some(span))
    }

    /// Takes a frame that is in its place, or the bytes of a message that no receive has met.
    pub(super) fn take(
        &mut self,
        peers: &mut Peers,
        from: u32,
        (number, tag): (u64, u32),
        length: usize,
        early: Option<&[u8]>,
        ended: &mut Vec<(Arc<Work>, u32)>,
    ) -> Outcome {
        let Some(landing) = self.landings.get_mut(&(from, number)) else {
            let bytes = early.unwrap_or_default();
            // A receive may have begun while they came.
            if let Some(wanted) = self.meet(peers, from, tag, length)? {
                if !bytes.is_empty() {
                    memory::write(wanted.message.span).copy_from_slice(bytes);
                }
                peers.note_taken(from, length);
                ended.push((wanted.begun.work, from));
                return Ok(());
            }
            let bytes = Some(bytes.to_vec());
            self.arrivals.push(Arrival { from, number, tag, total: length, bytes });
            return Ok(());
        };
        landing.filled += length;
        if landing.filled < landing.message.span.length() {
            return Ok(());
        }
        if let Some(landing) = self.landings.remove(&(from, number)) {
            if !landing.is_granted {
                peers.note_taken(from, length);
            }
            ended.push((landing.begun.work, from));
        }
        Ok(())
    }

    /// Returns the failure of the messages that cannot come or go without a rank that has left.
    pub(super) fn left(&self, peers: &Peers, peer: u32) -> Outcome {
        let landing = self.landings.iter().find(|(key, _)| key.0 == peer);
        let sending = self.sending.iter().find(|(key, _)| key.0 == peer);
        let is_stranded = |from: u32| peers.get(from).presence == Presence::Left;
        let stranded = |it: &&Wanted| match it.from {
            Some(from) => is_stranded(from),
            None => peers.others().all(is_stranded),
        };
        let wanted = self.wanted.iter().find(stranded);
        match (landing, sending, wanted) {
            (Some((_, it)), _, _) => Err(gone(peer, &format!("recv with tag {}", it.message.tag))),
            (_, Some((_, it)), _) => Err(gone(peer, &format!("send with tag {}", it.message.tag))),
            (_, _, Some(it)) => Err(gone(peer, &format!("recv with tag {}", it.message.tag))),
            _ => Ok(()),
        }
    }

    /// Returns the first message that is waited for, in words.
    pub(super) fn waiting(&self) -> Option<String> {
        let wanted = self.wanted.first().map(|it| source(it.from, it.message.tag));
        let landing =
            || self.landings.iter().next().map(|(key, it)| source(Some(key.0), it.message.tag));
        let sending = || {
            let first = self.sending.iter().next();
            first.map(|(key, it)| format!("send to rank {} with tag {}", key.0, it.message.tag))
        };
        wanted.or_else(landing).or_else(sending)
    }

    /// When the next message runs out of time.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let wanted = self.wanted.iter().filter_map(|it| it.begun.deadline);
        let landings = self.landings.values().filter_map(|it| it.begun.deadline);
        let sending = self.sending.values().filter_map(|it| it.begun.deadline);
        wanted.chain(landings).chain(sending).min()
    }

    /// Fails when a message is out of time.
    pub(super) fn check_deadlines(&self, now: Instant) -> Outcome {
        let late = |what: String, begun: &Begun, rank: Option<u32>, reason: &str| {
            let seconds = begun.seconds(now);
            Err(Failure {
                kind: GroupErrorKind::TimedOut,
                what: format!("{what} reached its timeout after {seconds:.1} s: {reason}"),
                ranks: rank.into_iter().collect(),
            })
        };
        if let Some(it) = self.wanted.iter().find(|it| it.begun.is_late(now)) {
            return late(
                source(it.from, it.message.tag),
                &it.begun,
                it.from,
                "no message with it came",
            );
        }
        if let Some((key, it)) = self.landings.iter().find(|(_, it)| it.begun.is_late(now)) {
            let reason = format!("{} of {} bytes came", it.filled, it.message.span.length());
            return late(source(Some(key.0), it.message.tag), &it.begun, Some(key.0), &reason);
        }
        if let Some((key, it)) = self.sending.iter().find(|(_, it)| it.begun.is_late(now)) {
            let reason = if it.is_granted {
                "not all bytes were taken"
            } else {
                "the rank did not begin to receive it"
            };
            let what = format!("send to rank {} with tag {}", key.0, it.message.tag);
            return late(what, &it.begun, Some(key.0), reason);
        }
        Ok(())
    }

    /// Forgets all messages and returns their works. No span is in use afterwards.
    pub(super) fn clear(&mut self) -> Vec<Arc<Work>> {
        self.arrivals.clear();
        let wanted = std::mem::take(&mut self.wanted).into_iter().map(|it| it.begun.work);
        let landings = std::mem::take(&mut self.landings).into_values().map(|it| it.begun.work);
        let sending = std::mem::take(&mut self.sending).into_values().map(|it| it.begun.work);
        wanted.chain(landings).chain(sending).collect()
    }
}

impl Wanted {
    fn landing(self, is_granted: bool) -> Landing {
        let Wanted { message, begun, .. } = self;
        Landing { message, filled: 0, is_granted, begun }
    }
}

fn source(from: Option<u32>, tag: u32) -> String {
    match from {
        Some(from) => format!("recv from rank {from} with tag {tag}"),
        None => format!("recv from any rank with tag {tag}"),
    }
}

fn check_size(peers: &Peers, from: u32, tag: u32, theirs: usize, own: usize) -> Outcome {
    if theirs == own {
        return Ok(());
    }
    Err(Failure {
        kind: GroupErrorKind::Mismatch,
        what: format!(
            "rank {from} sends {theirs} bytes with tag {tag}, and rank {} receives {own}: both ranks \
             give a tensor of the same size",
            peers.rank
        ),
        ranks: vec![from],
    })
}

fn grant(peers: &mut Peers, to: u32, number: u64, tag: u32, total: usize) {
    peers.push_control(to, FramePurpose::Grant.message(peers.rank, MESSAGE, number, tag, total));
}
