//! Collectives that have begun: their strands and rounds, messages that wait for a grant, and messages that
//! came before their call.

use super::call::{Call, Description, Operation};
use super::error::{rank_list, violation, Failure, GroupErrorKind};
use super::frame::FramePurpose;
use super::memory::{self, Arithmetic, Spans};
use super::peers::{Peers, Presence, Sent, AHEAD_MAX};
use super::schedule::{schedule, Round, Strand};
use super::scratch::ScratchPool;
use super::work::{Begun, Work};
use crate::memory::Span;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Rounds of a strand are numbered in the lower bits of a cell.
const ROUND_BITS: u32 = 8;
/// Descriptions of collectives that have ended, which late frames are compared with.
const ENDED_KEPT: u64 = 4_096;

/// A message by the collective's number and the cell; between two ranks in one direction.
pub(super) type Key = (u64, u32);

fn cell(strand: u32, round: usize) -> u32 {
    strand << ROUND_BITS | round as u32
}

/// A place for a message that has not arrived whole.
#[derive(Debug)]
pub(super) struct Landing {
    pub(super) span: Span,
    filled: usize,
    is_granted: bool,
}

/// A message that waits for a grant.
#[derive(Debug)]
struct Held {
    span: Span,
    description: Description,
}

/// By peer.
#[derive(Debug, Default)]
struct Mail {
    landings: BTreeMap<Key, Landing>,
    /// Messages that came before their call.
    early: BTreeMap<Key, Vec<u8>>,
    held: BTreeMap<Key, Held>,
    /// Grants for messages that this rank has not come to, and the bytes that they expect.
    grants: BTreeMap<Key, usize>,
    /// Offers of messages that this rank has not come to, and their bytes.
    offers: BTreeMap<Key, usize>,
    /// Descriptions of collectives that this rank has not begun.
    announced: BTreeMap<u64, Description>,
}

/// A strand that has begun.
#[derive(Debug)]
struct Active {
    round: usize,
    /// Messages of the round that are not through.
    outstanding: usize,
    scratch: Vec<Box<[u8]>>,
    spans: Vec<Span>,
    /// Bytes of its longest message.
    longest: usize,
}

#[derive(Debug)]
struct Running {
    description: Description,
    arithmetic: Arithmetic,
    user: Vec<Span>,
    strands: Vec<Strand>,
    active: BTreeMap<u32, Active>,
    next: usize,
    ended: usize,
    begun: Begun,
}

/// All collectives of a group.
#[derive(Debug)]
pub(super) struct Collectives {
    /// Number of the next one, the same on every rank.
    next: u64,
    running: BTreeMap<u64, Running>,
    /// Descriptions of running and ended ones.
    known: BTreeMap<u64, Description>,
    mail: Vec<Mail>,
    scratch: ScratchPool,
}

type Outcome = Result<(), Failure>;

impl Collectives {
    pub(super) fn new(size: u32) -> Collectives {
        Collectives {
            next: 0,
            running: BTreeMap::new(),
            known: BTreeMap::new(),
            mail: (0..size).map(|_| Mail::default()).collect(),
            scratch: ScratchPool::default(),
        }
    }

    /// Number of collectives that this rank has begun.
    pub(super) fn begun(&self) -> u64 {
        self.next
    }

    /// Returns the oldest collective that runs.
    pub(super) fn oldest(&self) -> Option<(u64, Description)> {
        self.running.iter().next().map(|(number, it)| (*number, it.description))
    }

    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// Begins a collective. `ended` gets the works of those that are over at once.
    pub(super) fn begin(
        &mut self,
        peers: &mut Peers,
        call: &Call,
        begun: Begun,
        ended: &mut Vec<Arc<Work>>,
    ) -> Outcome {
        let number = self.next;
        self.next += 1;
        let description = call.description();
        let arithmetic =
            Arithmetic { element: call.element, reduction: call.reduction, ranks: peers.size() };
        let memory = call.inputs.iter().chain(&call.outputs);
        self.running.insert(
            number,
            Running {
                description,
                arithmetic,
                user: memory.map(|it| memory::user_span(*it)).collect(),
                strands: schedule(call, peers.rank, peers.size(), peers.limits),
                active: BTreeMap::new(),
                next: 0,
                ended: 0,
                begun,
            },
        );
        self.known.insert(number, description);
        if let Some(old) = number.checked_sub(ENDED_KEPT) {
            if !self.running.contains_key(&old) {
                self.known.remove(&old);
            }
        }
        for peer in peers.others() {
            if let Some(theirs) = self.mail[peer as usize].announced.remove(&number) {
                self.compare(peers, peer, number, theirs)?;
            }
        }
        self.advance(peers, number, None, ended)
    }

    /// Goes on with a collective: with a strand whose round may be over, and with strands that may begin.
    fn advance(
        &mut self,
        peers: &mut Peers,
        number: u64,
        strand: Option<u32>,
        ended: &mut Vec<Arc<Work>>,
    ) -> Outcome {
        let Some(running) = self.running.get_mut(&number) else {
            return Ok(());
        };
        let mut current = strand;
        loop {
            let strand = match current.take() {
                Some(strand) => strand,
                None if running.next < running.strands.len()
                    && running.under_way() < peers.limits.under_way =>
                {
                    running.start_strand(&mut self.scratch)
                }
                None => break,
            };
            let Some(active) = running.active.get_mut(&strand) else {
                continue;
            };
            let rounds = &running.strands[strand as usize].rounds;
            while active.outstanding == 0 {
                // `round` counts from 1, so that 0 is before the first one.
                if let Some(round) = active.round.checked_sub(1) {
                    let spans = Spans { user: &running.user, scratch: &active.spans };
                    for local in &rounds[round].then {
                        spans.run(local, running.arithmetic);
                    }
                }
                let Some(round) = rounds.get(active.round) else {
                    if let Some(active) = running.active.remove(&strand) {
                        self.scratch.give_back(active.into_scratch());
                    }
                    running.ended += 1;
                    break;
                };
                let key = (number, cell(strand, active.round));
                active.round += 1;
                let spans = Spans { user: &running.user, scratch: &active.spans };
                active.outstanding =
                    begin_round(&mut self.mail, peers, key, running.description, round, spans)?;
            }
        }
        if running.ended == running.strands.len() {
            if let Some(running) = self.running.remove(&number) {
                ended.push(running.begun.work);
            }
        }
        Ok(())
    }

    /// Notes that a message of a round is through: the kernel has it, or it has come.
    pub(super) fn through(
        &mut self,
        peers: &mut Peers,
        number: u64,
        strand: u32,
        ended: &mut Vec<Arc<Work>>,
    ) -> Outcome {
        let active = self.running.get_mut(&number).and_then(|it| it.active.get_mut(&strand));
        let Some(active) = active else {
            return Ok(());
        };
        active.outstanding = active.outstanding.saturating_sub(1);
        if active.outstanding > 0 {
            return Ok(());
        }
        self.advance(peers, number, Some(strand), ended)
    }

    /// Compares a description with this rank's own of the same number, now or when it begins.
    pub(super) fn check(
        &mut self,
        peers: &Peers,
        from: u32,
        number: u64,
        theirs: Description,
    ) -> Outcome {
        if number < self.next {
            return self.compare(peers, from, number, theirs);
        }
        let announced = &mut self.mail[from as usize].announced;
        // What messages say is more than what heartbeats do.
        let says_more = announced.get(&number).is_none_or(|it| theirs.elements > it.elements);
        if says_more && announced.len() < ENDED_KEPT as usize {
            announced.insert(number, theirs);
        }
        Ok(())
    }

    fn compare(&self, peers: &Peers, from: u32, number: u64, theirs: Description) -> Outcome {
        let (theirs, pair) = theirs.without_pair();
        match self.known.get(&number) {
            Some(own) if *own != theirs => Err(Failure {
                kind: GroupErrorKind::Mismatch,
                what: format!(
                    "collective {number} is {own} on rank {} and {theirs} on rank {from}: every rank \
                     of a group calls the same operations in the same order, with the same sizes and \
                     types",
                    peers.rank
                ),
                ranks: vec![from],
            }),
            _ => self.compare_pair(peers, from, number, pair),
        }
    }

    /// Compares the bytes that a rank has for this one with those that this one expects.
    fn compare_pair(&self, peers: &Peers, from: u32, number: u64, pair: Option<usize>) -> Outcome {
        let running = self.running.get(&number);
        let Some((theirs, running)) = pair.zip(running) else {
            return Ok(());
        };
        let own = running.user[(peers.size() + from) as usize].length();
        if own == theirs {
            return Ok(());
        }
        Err(self.size_mismatch(from, number, theirs, own))
    }

    /// Returns the place of a message whose frame has come: its range, or nothing where it is early.
    pub(super) fn place(
        &self,
        peers: &mut Peers,
        from: u32,
        key: Key,
        total: usize,
        start: usize,
        length: usize,
    ) -> Result<Option<Span>, Failure> {
        let is_short = start == 0 && length == total && length <= peers.limits.eager;
        let mail = &self.mail[from as usize];
        let Some(landing) = mail.landings.get(&key) else {
            self.check_is_ahead(from, key)?;
            if !is_short || mail.early.contains_key(&key) {
                return Err(violation(from, &format!("{length} bytes that no call has granted")));
            }
            peers.note_unasked(from, length)?;
            return Ok(None);
        };
        if landing.span.length() != total {
            let own = landing.span.length();
            return Err(self.size_mismatch(from, key.0, total, own));
        }
        if landing.filled != start || start + length > total {
            let end = start + length;
            return Err(violation(from, &format!("bytes {start} to {end} out of order")));
        }
        if !landing.is_granted {
            if !is_short {
                return Err(violation(from, &format!("{length} bytes that no call has granted")));
            }
            peers.note_unasked(from, length)?;
        }
        Ok(Some(memory::part(landing.span, start, length)))
    }

    /// Fails for a message of a collective that has ended here: it has had all of its messages.
    fn check_is_ahead(&self, from: u32, key: Key) -> Outcome {
        if key.0 >= self.next || self.running.contains_key(&key.0) {
            return Ok(());
        }
        let what = self.described(key.0);
        Err(violation(from, &format!("a message of {what}, which has ended on this rank")))
    }

    fn size_mismatch(&self, from: u32, number: u64, theirs: usize, own: usize) -> Failure {
        size_mismatch(from, &self.described(number), theirs, own)
    }

    /// Takes a frame that is in its place, or the bytes of an early message.
    pub(super) fn take(
        &mut self,
        peers: &mut Peers,
        from: u32,
        key: Key,
        length: usize,
        early: Option<&[u8]>,
        ended: &mut Vec<Arc<Work>>,
    ) -> Outcome {
        let mail = &mut self.mail[from as usize];
        let Some(landing) = mail.landings.get_mut(&key) else {
            mail.early.insert(key, early.unwrap_or_default().to_vec());
            return Ok(());
        };
        // The call may have begun while the bytes of an early message came.
        if let Some(bytes) = early {
            let own = landing.span.length();
            if own != length {
                return Err(self.size_mismatch(from, key.0, length, own));
            }
            if own > 0 {
                memory::write(landing.span).copy_from_slice(bytes);
            }
        }
        landing.filled += length;
        if landing.filled < landing.span.length() {
            return Ok(());
        }
        if !landing.is_granted {
            peers.note_taken(from, length);
        }
        mail.landings.remove(&key);
        self.through(peers, key.0, key.1 >> ROUND_BITS, ended)
    }

    /// Sends a message that a peer has granted, or keeps the grant.
    pub(super) fn granted(
        &mut self,
        peers: &mut Peers,
        from: u32,
        key: Key,
        total: usize,
    ) -> Outcome {
        let mail = &mut self.mail[from as usize];
        let Some(held) = mail.held.remove(&key) else {
            self.check_is_ahead(from, key)?;
            return keep_ahead(&mut self.mail[from as usize].grants, from, key, total);
        };
        if held.span.length() != total {
            return Err(self.size_mismatch(from, key.0, total, held.span.length()));
        }
        send_granted(peers, from, key, held.description, held.span);
        Ok(())
    }

    /// Grants a message that a peer has offered, if there is a place for it and it is not granted already.
    pub(super) fn offered(
        &mut self,
        peers: &mut Peers,
        from: u32,
        key: Key,
        total: usize,
    ) -> Outcome {
        let mail = &mut self.mail[from as usize];
        let Some(landing) = mail.landings.get_mut(&key) else {
            self.check_is_ahead(from, key)?;
            return keep_ahead(&mut self.mail[from as usize].offers, from, key, total);
        };
        let own = landing.span.length();
        if own != total {
            return Err(self.size_mismatch(from, key.0, total, own));
        }
        if !std::mem::replace(&mut landing.is_granted, true) {
            if let Some(running) = self.running.get(&key.0) {
                grant(peers, from, key, running.description, own);
            }
        }
        Ok(())
    }

    /// Returns the failure of the collectives that cannot end without a rank that has left.
    pub(super) fn left(&self, peer: u32) -> Outcome {
        let mail = &self.mail[peer as usize];
        let waiting = mail.landings.keys().chain(mail.held.keys()).next();
        match waiting {
            None => Ok(()),
            Some((number, _)) => Err(self.gone(peer, *number)),
        }
    }

    fn gone(&self, peer: u32, number: u64) -> Failure {
        gone(peer, &self.described(number))
    }

    /// Returns a collective in words.
    fn described(&self, number: u64) -> String {
        let call = self.known.get(&number).map_or_else(String::new, ToString::to_string);
        format!("collective {number} ({call})")
    }

    /// Returns the first collective that runs, in words, for failures that have another cause.
    pub(super) fn waiting(&self) -> Option<String> {
        self.running.keys().next().map(|number| self.described(*number))
    }

    /// When the next collective runs out of time.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.running.values().filter_map(|it| it.begun.deadline).min()
    }

    /// Fails when a collective is out of time; names the ranks that have not begun it.
    pub(super) fn check_deadlines(&self, peers: &Peers, now: Instant) -> Outcome {
        let Some((number, late)) = self.running.iter().find(|(_, it)| it.begun.is_late(now)) else {
            return Ok(());
        };
        let missing: Vec<u32> =
            peers.others().filter(|it| peers.get(*it).begun <= *number).collect();
        let seconds = late.begun.seconds(now);
        let reason = if missing.is_empty() {
            let mail = self.mail.iter().enumerate();
            let waits = mail.filter(|(_, it)| {
                it.landings.keys().chain(it.held.keys()).any(|key| key.0 == *number)
            });
            let ranks: Vec<u32> = waits.map(|(rank, _)| rank as u32).collect();
            format!("all ranks have begun it, and messages with {} are missing", rank_list(&ranks))
        } else {
            format!("{} did not begin it", rank_list(&missing))
        };
        Err(Failure {
            kind: GroupErrorKind::TimedOut,
            what: format!(
                "{} reached its timeout after {seconds:.1} s: {reason}",
                self.described(*number)
            ),
            ranks: missing,
        })
    }

    /// Forgets all collectives and returns their works. No span is in use afterwards.
    pub(super) fn clear(&mut self) -> Vec<Arc<Work>> {
        self.mail.iter_mut().for_each(|it| *it = Mail::default());
        std::mem::take(&mut self.running).into_values().map(|it| it.begun.work).collect()
    }
}

impl Running {
    /// Bytes of the longest messages of the strands under way.
    fn under_way(&self) -> usize {
        self.active.values().map(|it| it.longest).sum()
    }

    /// Begins the next strand and returns its number.
    fn start_strand(&mut self, pool: &mut ScratchPool) -> u32 {
        let strand = self.next;
        self.next += 1;
        let Strand { scratch: sizes, .. } = &self.strands[strand];
        let longest = self.strands[strand].longest();
        let mut scratch: Vec<Box<[u8]>> = sizes.iter().map(|size| pool.take(*size)).collect();
        let spans = scratch.iter_mut().map(|it| memory::scratch_span(it)).collect();
        self.active
            .insert(strand as u32, Active { round: 0, outstanding: 0, scratch, spans, longest });
        strand as u32
    }
}

impl Active {
    /// Returns the memory; no address of it is left.
    fn into_scratch(self) -> Vec<Box<[u8]>> {
        self.scratch
    }
}

/// Begins a round and returns the number of its messages that are not through at once.
fn begin_round(
    mail: &mut [Mail],
    peers: &mut Peers,
    key: Key,
    description: Description,
    round: &Round,
    spans: Spans<'_>,
) -> Result<usize, Failure> {
    let mut outstanding = 0;
    let what = || format!("collective {} ({description})", key.0);
    // Places first: what they grant is on its way while this rank's own bytes are.
    for (peer, place) in &round.receives {
        let (peer, span) = (*peer, spans.span(*place));
        let mail = &mut mail[peer as usize];
        if let Some(bytes) = mail.early.remove(&key) {
            if bytes.len() != span.length() {
                return Err(size_mismatch(peer, &what(), bytes.len(), span.length()));
            }
            if !bytes.is_empty() {
                memory::write(span).copy_from_slice(&bytes);
            }
            peers.note_taken(peer, bytes.len());
            continue;
        }
        if peers.get(peer).presence == Presence::Left {
            return Err(gone(peer, &what()));
        }
        let offered = mail.offers.remove(&key);
        if let Some(theirs) = offered.filter(|it| *it != span.length()) {
            return Err(size_mismatch(peer, &what(), theirs, span.length()));
        }
        let is_granted = span.length() > peers.limits.eager || offered.is_some();
        if is_granted {
            grant(peers, peer, key, description, span.length());
        }
        mail.landings.insert(key, Landing { span, filled: 0, is_granted });
        outstanding += 1;
    }
    for (peer, place) in &round.sends {
        let (peer, span) = (*peer, spans.span(*place));
        if peers.get(peer).presence == Presence::Left {
            return Err(gone(peer, &what()));
        }
        let description = match description.operation {
            Operation::AllToAll => description.of_pair(spans.user[peer as usize].length()),
            _ => description,
        };
        let header = |purpose: FramePurpose| {
            purpose.message(peers.rank, description, key.0, key.1, span.length())
        };
        let (data, offer) = (header(FramePurpose::Data), header(FramePurpose::Offer));
        let is_short = span.length() <= peers.limits.eager;
        let needs_no_grant = is_short && peers.take_credit(peer, span.length());
        if needs_no_grant && span.length() <= peers.limits.copied {
            peers.push_copy(peer, data, span);
            continue;
        }
        outstanding += 1;
        if needs_no_grant {
            let sent = Sent::Collective(key.0, key.1 >> ROUND_BITS);
            peers.push_message(peer, data, span, sent);
            continue;
        }
        if let Some(theirs) = mail[peer as usize].grants.remove(&key) {
            if theirs != span.length() {
                return Err(size_mismatch(peer, &what(), theirs, span.length()));
            }
            send_granted(peers, peer, key, description, span);
            continue;
        }
        if is_short {
            peers.push_control(peer, offer);
        }
        mail[peer as usize].held.insert(key, Held { span, description });
    }
    Ok(outstanding)
}

/// Keeps a grant or an offer until this rank's call comes to it.
fn keep_ahead(kept: &mut BTreeMap<Key, usize>, from: u32, key: Key, total: usize) -> Outcome {
    if kept.len() >= AHEAD_MAX || kept.insert(key, total).is_some() {
        let what = format!("a message twice, or more than {AHEAD_MAX} of which no call is known");
        return Err(violation(from, &what));
    }
    Ok(())
}

fn size_mismatch(peer: u32, call: &str, theirs: usize, own: usize) -> Failure {
    Failure {
        kind: GroupErrorKind::Mismatch,
        what: format!(
            "{call}: rank {peer} has {theirs} bytes where {own} are expected; the sizes that two \
             ranks give for each other have to agree"
        ),
        ranks: vec![peer],
    }
}

fn grant(peers: &mut Peers, to: u32, key: Key, description: Description, total: usize) {
    let header = FramePurpose::Grant.message(peers.rank, description, key.0, key.1, total);
    peers.push_control(to, header);
}

fn send_granted(peers: &mut Peers, to: u32, key: Key, description: Description, span: Span) {
    let header = FramePurpose::Data.message(peers.rank, description, key.0, key.1, span.length());
    let sent = Sent::Collective(key.0, key.1 >> ROUND_BITS);
    peers.push_message(to, header, span, sent);
}

/// The failure of an operation that cannot end without a rank that has left.
pub(super) fn gone(peer: u32, what: &str) -> Failure {
    Failure {
        kind: GroupErrorKind::Lost,
        what: format!("{what} needs rank {peer}, which has left the group"),
        ranks: vec![peer],
    }
}
