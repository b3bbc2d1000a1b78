//! Groups over sockets in memory, in virtual time: drawn calls, drawn reads and writes, processes that die,
//! shrinking and growing groups, against a plain model.
//!
//! `GRADLANE_GROUP_HISTORIES` is the number of histories, `GRADLANE_GROUP_SEED` the first seed.

use super::call::{Call, Operation};
use super::element::{Element, Reduction};
use super::error::GroupError;
use super::limits::Limits;
use super::links::{Link, Links};
use super::memory::lent_memory;
use super::state::GroupState;
use super::work::{Begun, Work};
use crate::io::{FrameReader, FrameWriter};
use crate::sys::lock;
use crate::sys::poller::{Interest, Poller};
use crate::sys::socket::Socket;
use crate::sys::syscall::PathEstimate;
use gradlane_units::Rng;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// So short that a few elements take each way.
const LIMITS: Limits = Limits {
    eager: 48,
    copied: 24,
    frame: 48,
    credit: 700,
    piece: 32,
    pieces: 3,
    piece_least: 12,
    under_way: 70,
    exchange: 64,
    whole_broadcast: 40,
};
const SILENCE: Duration = Duration::from_secs(60);
const TIMEOUT: Duration = Duration::from_secs(30);
/// What memory holds that no call may have written to.
const UNTOUCHED: i32 = -77;

#[derive(Debug)]
struct Draws(Rng);

impl Draws {
    fn new(seed: u64) -> Draws {
        Draws(Rng::new(seed))
    }

    fn below(&mut self, end: usize) -> usize {
        (self.0.next_u64() % end as u64) as usize
    }
}

#[derive(Debug, Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    has_ended: bool,
}

/// One end of a connection. What a read or a write takes is drawn.
#[derive(Debug)]
struct DrawnSocket {
    incoming: Arc<Mutex<Pipe>>,
    outgoing: Arc<Mutex<Pipe>>,
    draws: Arc<Mutex<Draws>>,
}

impl DrawnSocket {
    fn drawn(&self, most: usize) -> usize {
        let mut draws = lock(&self.draws);
        match draws.below(4) {
            0 => most,
            1 => most.min(64),
            _ => draws.below(most + 1),
        }
    }
}

impl Socket for DrawnSocket {
    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut room = self.drawn(pieces.iter().map(|it| it.len()).sum());
        if room == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let (mut pipe, all) = (lock(&self.outgoing), room);
        for piece in pieces {
            let piece = &piece[..piece.len().min(room)];
            pipe.bytes.extend(piece);
            room -= piece.len();
        }
        Ok(all)
    }

    fn receive(&self, pieces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let available = lock(&self.incoming).bytes.len();
        let mut left = self.drawn(available.min(pieces.iter().map(|it| it.len()).sum()));
        let mut pipe = lock(&self.incoming);
        if left == 0 {
            let is_over = pipe.has_ended && available == 0;
            return if is_over { Ok(0) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let all = left;
        for piece in pieces {
            let count = piece.len().min(left);
            for (byte, read) in piece.iter_mut().zip(pipe.bytes.drain(..count)) {
                *byte = read;
            }
            left -= count;
        }
        Ok(all)
    }

    fn end_stream(&self) -> io::Result<()> {
        lock(&self.outgoing).has_ended = true;
        Ok(())
    }

    fn watch(&self, _: &Poller, _: u64, _: Interest) -> io::Result<()> {
        Ok(())
    }

    fn unsent_bytes(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn path_estimate(&self) -> io::Result<PathEstimate> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn set_send_buffer(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn set_unsent_low_water(&self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn set_pacing(&self, _: Option<u64>) -> io::Result<()> {
        Ok(())
    }
}

/// A message between two ranks, by its place among all of a history.
#[derive(Clone, Copy, Debug)]
struct Message {
    from: u32,
    to: u32,
    tag: u32,
    elements: usize,
}

/// Tags from here on are received from any rank.
const ANY_TAG: u32 = 3;

#[derive(Clone, Copy, Debug)]
enum Step {
    Collective(usize),
    Send(usize),
    Receive(usize),
}

#[derive(Clone, Copy, Debug)]
struct Collective {
    operation: Operation,
    root: u32,
    elements: usize,
}

/// What all ranks of a generation call.
struct Program {
    size: u32,
    collectives: Vec<Collective>,
    messages: Vec<Message>,
    steps: Vec<VecDeque<Step>>,
}

fn drawn_elements(draws: &mut Draws) -> usize {
    match draws.below(6) {
        0 => draws.below(3),
        5 => draws.below(60),
        _ => draws.below(14),
    }
}

impl Program {
    fn draw(draws: &mut Draws, size: u32) -> Program {
        let collectives: Vec<Collective> = (0..draws.below(10))
            .map(|_| Collective {
                operation: Operation::COLLECTIVES[draws.below(Operation::COLLECTIVES.len())],
                root: draws.below(size as usize) as u32,
                elements: drawn_elements(draws),
            })
            .collect();
        let count = if size == 1 { 0 } else { draws.below(14) };
        let any_elements = [drawn_elements(draws), drawn_elements(draws)];
        let messages: Vec<Message> = (0..count)
            .map(|_| {
                let from = draws.below(size as usize) as u32;
                let to = (from + 1 + draws.below(size as usize - 1) as u32) % size;
                let tag = draws.below(5) as u32;
                let elements = match tag.checked_sub(ANY_TAG) {
                    Some(kind) => any_elements[kind as usize],
                    None => drawn_elements(draws),
                };
                Message { from, to, tag, elements }
            })
            .collect();
        let steps = (0..size).map(|rank| {
            // Sends and collectives in their order; receives of a source and tag in that of the sends.
            let own = |it: &usize| messages[*it].from == rank;
            let sends = (0..messages.len()).filter(own).map(Step::Send);
            let to_own = |it: &usize| messages[*it].to == rank;
            let receives = (0..messages.len()).filter(to_own).map(Step::Receive);
            let mut lists: Vec<VecDeque<Step>> = vec![
                (0..collectives.len()).map(Step::Collective).collect(),
                sends.collect(),
                receives.collect(),
            ];
            let mut steps = VecDeque::new();
            while lists.iter().any(|it| !it.is_empty()) {
                let list = draws.below(lists.len());
                steps.extend(lists[list].pop_front());
            }
            steps
        });
        let steps = steps.collect();
        Program { size, collectives, messages, steps }
    }

    /// Element of an input of a collective.
    fn input(&self, number: usize, rank: u32, index: usize, element: usize) -> i32 {
        let mixed = (number * 31 + rank as usize * 7 + index * 5 + element) as u64;
        (Rng::new(mixed).next_u64() % 1000) as i32
    }

    /// Elements that a rank has for another one in an `AllToAll`.
    fn split(&self, number: usize, from: u32, to: u32) -> usize {
        let most = self.collectives[number].elements + 1;
        Draws::new((number * 100 + from as usize * 10 + to as usize) as u64).below(most)
    }

    fn inputs(&self, number: usize, rank: u32) -> Vec<Vec<i32>> {
        let Collective { operation, root, elements } = self.collectives[number];
        let count = match operation {
            Operation::ReduceScatter | Operation::AllToAll => self.size as usize,
            Operation::AllGather | Operation::Gather => 1,
            Operation::Scatter if rank == root => self.size as usize,
            _ => 0,
        };
        let length = |index: usize| match operation {
            Operation::AllToAll => self.split(number, rank, index as u32),
            _ => elements,
        };
        let input =
            |index| (0..length(index)).map(|it| self.input(number, rank, index, it)).collect();
        (0..count).map(input).collect()
    }

    /// Outputs as they are before the call.
    fn outputs(&self, number: usize, rank: u32) -> Vec<Vec<i32>> {
        let Collective { operation, root, elements } = self.collectives[number];
        let blank = |length| vec![UNTOUCHED; length];
        match operation {
            Operation::AllReduce | Operation::Broadcast | Operation::Reduce => {
                vec![(0..elements).map(|it| self.input(number, rank, 0, it)).collect()]
            }
            Operation::ReduceScatter | Operation::Scatter => vec![blank(elements)],
            Operation::AllGather => vec![blank(elements); self.size as usize],
            Operation::Gather if rank == root => vec![blank(elements); self.size as usize],
            Operation::AllToAll => {
                (0..self.size).map(|from| blank(self.split(number, from, rank))).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Outputs as they are after it.
    fn results(&self, number: usize, rank: u32) -> Vec<Vec<i32>> {
        let Collective { operation, root, elements } = self.collectives[number];
        let of = |rank, index| -> Vec<i32> {
            (0..elements).map(|it| self.input(number, rank, index, it)).collect()
        };
        let sum = |index| -> Vec<i32> {
            let element = |it| (0..self.size).map(|rank| self.input(number, rank, index, it)).sum();
            (0..elements).map(element).collect()
        };
        match operation {
            Operation::AllReduce => vec![sum(0)],
            Operation::Reduce if rank == root => vec![sum(0)],
            Operation::Broadcast => vec![of(root, 0)],
            Operation::ReduceScatter => vec![sum(rank as usize)],
            Operation::Scatter => vec![of(root, rank as usize)],
            Operation::AllGather => (0..self.size).map(|it| of(it, 0)).collect(),
            Operation::Gather if rank == root => (0..self.size).map(|it| of(it, 0)).collect(),
            Operation::AllToAll => (0..self.size)
                .map(|from| {
                    let length = self.split(number, from, rank);
                    (0..length).map(|it| self.input(number, from, rank as usize, it)).collect()
                })
                .collect(),
            _ => self.outputs(number, rank),
        }
    }

    fn payload(&self, message: usize) -> Vec<i32> {
        let elements = self.messages[message].elements;
        (0..elements).map(|it| self.input(1000 + message, 0, 0, it)).collect()
    }
}

/// A call that has begun.
struct Begin {
    step: Step,
    work: Arc<Work>,
    inputs: Vec<Vec<i32>>,
    outputs: Vec<Vec<i32>>,
    /// The outputs at the end of the call: nobody writes to them afterwards.
    at_end: Option<Vec<Vec<i32>>>,
}

/// One rank of a generation.
struct RankOf {
    rank: u32,
    links: Links,
    steps: VecDeque<Step>,
    begun: Vec<Begin>,
    refused: Option<GroupError>,
    is_dead: bool,
}

/// How a generation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// All calls end.
    Whole,
    /// A process dies in between.
    Killed,
    /// A process leaves for the next generation while calls run.
    Left,
    /// A frame of an older generation comes over a connection of this one.
    Stale,
}

struct Generation<'a> {
    program: Program,
    ranks: Vec<RankOf>,
    pipes: BTreeMap<(u32, u32), Arc<Mutex<Pipe>>>,
    draws: Arc<Mutex<Draws>>,
    poller: &'a Poller,
    number: u32,
    now: Instant,
}

impl<'a> Generation<'a> {
    fn open(
        program: Program,
        number: u32,
        draws: &Arc<Mutex<Draws>>,
        poller: &'a Poller,
        now: Instant,
    ) -> Generation<'a> {
        let size = program.size;
        let mut pipes = BTreeMap::new();
        for from in 0..size {
            for to in (0..size).filter(|it| *it != from) {
                pipes.insert((from, to), Arc::<Mutex<Pipe>>::default());
            }
        }
        let link = |own: u32, peer: u32| {
            let (incoming, outgoing) = (pipes.get(&(peer, own))?, pipes.get(&(own, peer))?);
            let (incoming, outgoing) = (Arc::clone(incoming), Arc::clone(outgoing));
            let socket = DrawnSocket { incoming, outgoing, draws: Arc::clone(draws) };
            Some(Link::new(Arc::new(socket), FrameReader::new(None), FrameWriter::new(None)))
        };
        let rank = |rank: u32| {
            let links = (0..size).map(|peer| link(rank, peer)).collect();
            let name = "simulated".to_owned();
            let state = GroupState::new(name, rank, size, number, SILENCE, LIMITS, now);
            RankOf {
                rank,
                links: Links::new(state, links, poller).expect("links"),
                steps: program.steps[rank as usize].clone(),
                begun: Vec::new(),
                refused: None,
                is_dead: false,
            }
        };
        let ranks = (0..size).map(rank).collect();
        let draws = Arc::clone(draws);
        Generation { program, ranks, pipes, draws, poller, number, now }
    }

    fn begin(&mut self, rank: usize) {
        let now = self.now;
        let RankOf { links, steps, begun, refused, .. } = &mut self.ranks[rank];
        let Some(step) = steps.pop_front() else { return };
        let (program, own) = (&self.program, rank as u32);
        let work = Arc::new(Work::default());
        let (mut inputs, mut outputs) = match step {
            Step::Collective(it) => (program.inputs(it, own), program.outputs(it, own)),
            Step::Send(it) => (vec![program.payload(it)], Vec::new()),
            Step::Receive(it) => (Vec::new(), vec![vec![UNTOUCHED; program.messages[it].elements]]),
        };
        let spans = |it: &mut Vec<Vec<i32>>| it.iter_mut().map(|it| lent_memory(it)).collect();
        let (places, results): (Vec<_>, Vec<_>) = (spans(&mut inputs), spans(&mut outputs));
        let call = Begun::new(&work, Some(TIMEOUT), now);
        let state = &mut links.state;
        let outcome = match step {
            Step::Collective(it) => {
                let Collective { operation, root, .. } = program.collectives[it];
                let (element, reduction) = (Element::I32, Reduction::Sum);
                let (inputs, outputs) = (places, results);
                state.begin(&Call { operation, element, reduction, root, inputs, outputs }, call)
            }
            Step::Send(it) => {
                let Message { to, tag, .. } = program.messages[it];
                state.begin_message(Operation::Send, Some(to), tag, places[0], call)
            }
            Step::Receive(it) => {
                let Message { from, tag, .. } = program.messages[it];
                let from = (tag < ANY_TAG).then_some(from);
                state.begin_message(Operation::Receive, from, tag, results[0], call)
            }
        };
        match outcome {
            Ok(()) => begun.push(Begin { step, work, inputs, outputs, at_end: None }),
            Err(error) => *refused = Some(error),
        }
        self.flush(rank);
    }

    fn flush(&mut self, rank: usize) {
        let RankOf { links, begun, .. } = &mut self.ranks[rank];
        links.flush(self.poller);
        for it in begun.iter_mut().filter(|it| it.at_end.is_none() && it.work.is_done()) {
            it.at_end = Some(it.outputs.clone());
            // The application may use its memory again.
            it.inputs.iter_mut().for_each(|it| it.fill(UNTOUCHED));
        }
    }

    fn receive(&mut self, rank: usize, peer: u32) {
        self.ranks[rank].links.receive(peer, self.poller, self.now);
        self.flush(rank);
    }

    fn event(&mut self, at_most: usize) {
        let (rank, what, peer) = {
            let mut draws = lock(&self.draws);
            (draws.below(self.ranks.len()), draws.below(8), draws.below(self.ranks.len()) as u32)
        };
        if self.ranks[rank].is_dead {
            return;
        }
        match what {
            0 | 1 if self.running(rank) < at_most => self.begin(rank),
            2 => self.flush(rank),
            3 => {
                self.now += Duration::from_micros(500);
                self.ranks[rank].links.state.tick(self.now);
                self.flush(rank);
            }
            _ => self.receive(rank, peer),
        }
    }

    fn running(&self, rank: usize) -> usize {
        self.ranks[rank].begun.iter().filter(|it| it.at_end.is_none()).count()
    }

    /// Ends a process: what the kernel has of it still arrives.
    fn kill(&mut self, rank: usize) {
        self.ranks[rank].is_dead = true;
        for ((from, _), pipe) in &self.pipes {
            if *from == rank as u32 {
                lock(pipe).has_ended = true;
            }
        }
    }

    fn leave(&mut self, rank: usize) {
        self.ranks[rank].links.state.close();
        self.flush(rank);
        self.ranks[rank].steps.clear();
    }

    /// Whether nothing is left to do for the ranks that live.
    fn is_over(&self) -> bool {
        let live = self.ranks.iter().filter(|it| !it.is_dead);
        live.clone().all(|it| it.steps.is_empty() || it.refused.is_some())
            && live.clone().all(|it| self.running(it.rank as usize) == 0)
    }

    /// Gives every rank its turns until all is done; the time goes on, and so do time-outs.
    fn drain(&mut self, end: End) {
        let begun = self.now;
        for turn in 0_u32.. {
            for rank in 0..self.ranks.len() {
                if self.ranks[rank].is_dead {
                    continue;
                }
                if self.ranks[rank].refused.is_none() {
                    self.begin(rank);
                }
                for peer in 0..self.ranks.len() as u32 {
                    self.receive(rank, peer);
                }
                self.ranks[rank].links.state.tick(self.now);
                self.flush(rank);
            }
            if self.is_over() {
                return;
            }
            if turn > 400 {
                self.now += Duration::from_secs(1);
            }
            let waited = self.now - begun;
            assert!(end != End::Whole || waited < Duration::from_secs(2), "a call hangs");
            assert!(waited < SILENCE * 2, "a call has no end");
        }
    }

    /// Compares what has ended with the model.
    fn check(&self, end: End) -> usize {
        let mut failed = 0;
        for rank in &self.ranks {
            let mut taken: BTreeMap<(u32, u32), usize> = BTreeMap::new();
            for it in &rank.begun {
                let Some(result) = it.work.result() else {
                    assert!(rank.is_dead, "rank {} waits for {:?}", rank.rank, it.step);
                    continue;
                };
                if rank.is_dead {
                    continue;
                }
                assert_eq!(it.at_end.as_ref(), Some(&it.outputs), "memory was written to late");
                if let Step::Receive(message) = it.step {
                    assert!(end != End::Whole || result.is_ok(), "{:?}: {result:?}", it.step);
                    failed += usize::from(result.is_err());
                    self.check_message(rank.rank, message, result, &it.outputs, &mut taken);
                    continue;
                }
                match (result, it.step) {
                    (Err(error), _) => {
                        assert!(end != End::Whole, "{:?}: {error}", it.step);
                        failed += 1;
                    }
                    (Ok(_), Step::Collective(number)) => {
                        let expected = self.program.results(number, rank.rank);
                        let call = self.program.collectives[number];
                        assert_eq!(it.outputs, expected, "{call:?} {number} on {}", rank.rank);
                    }
                    _ => {}
                }
            }
        }
        failed
    }
}

impl Generation<'_> {
    /// Compares a receive with the next message of its source and tag. `taken` counts the messages before it.
    fn check_message(
        &self,
        rank: u32,
        message: usize,
        result: &Result<u32, GroupError>,
        outputs: &[Vec<i32>],
        taken: &mut BTreeMap<(u32, u32), usize>,
    ) {
        let all = &self.program.messages;
        let Message { from: wanted, tag, .. } = all[message];
        let (is_any, from) = (tag >= ANY_TAG, result.as_ref().map_or(wanted, |it| *it));
        if is_any && result.is_err() {
            // Its message may be any one of those that are left.
            return;
        }
        assert!(is_any || from == wanted, "from {from}, not {wanted}");
        let matches = |it: &usize| (all[*it].from, all[*it].to, all[*it].tag) == (from, rank, tag);
        let sent = (0..all.len()).filter(matches).map(|it| self.program.payload(it));
        let nth = taken.entry((from, tag)).or_default();
        let mut left = sent.enumerate().skip(*nth);
        if result.is_err() {
            *nth += 1;
        } else if self.is_whole() || !is_any {
            let next = left.next().map(|it| it.1);
            assert_eq!(outputs.first(), next.as_ref(), "message from {from} with tag {tag}");
            *nth += 1;
        } else {
            let found = left.find(|it| outputs.first() == Some(&it.1));
            *nth = 1 + found.expect("a message that was sent, and no earlier one").0;
        }
    }

    /// Whether no group has ended.
    fn is_whole(&self) -> bool {
        self.ranks.iter().all(|it| !it.is_dead && it.links.state.failure().is_none())
    }
}

/// Bytes of a frame of another generation.
fn stale_frame(number: u32) -> [u8; gradlane_wire::HEADER_BYTES] {
    let header = super::frame::plain(gradlane_wire::FrameKind::Heartbeat, 1);
    gradlane_wire::FrameHeader { generation: number, ..header }.encode()
}

/// One history: generations of a group, each with the processes that are there. Returns the numbers of
/// calls that succeeded and failed.
fn history(seed: u64, poller: &Poller) -> (usize, usize) {
    let draws = Arc::new(Mutex::new(Draws::new(seed)));
    let mut now = Instant::now();
    let (mut succeeded, mut failed) = (0, 0);
    let mut processes = 1 + lock(&draws).below(4);
    let generations = 1 + lock(&draws).below(4);
    for number in 0..generations as u32 {
        let program = Program::draw(&mut lock(&draws), processes as u32);
        let mut generation = Generation::open(program, number, &draws, poller, now);
        let end = match lock(&draws).below(5) {
            0 => End::Killed,
            1 => End::Left,
            2 if number > 0 && processes > 1 => End::Stale,
            _ => End::Whole,
        };
        let (at_most, events) = {
            let mut draws = lock(&draws);
            (1 + draws.below(12), draws.below(400))
        };
        (0..events).for_each(|_| generation.event(at_most));
        let who = lock(&draws).below(processes);
        match end {
            End::Whole => {}
            End::Killed => generation.kill(who),
            End::Left => generation.leave(who),
            End::Stale => {
                // Between two frames; where the last one has gone out in part there is no such place.
                let pipe = Arc::clone(&generation.pipes[&(1, 0)]);
                if generation.ranks[1].links.is_flushed() {
                    lock(&pipe).bytes.extend(stale_frame(generation.number - 1));
                } else {
                    generation.kill(1);
                }
            }
        }
        generation.drain(end);
        let lost = generation.check(end);
        failed += lost;
        succeeded += generation.ranks.iter().map(|it| it.begun.len()).sum::<usize>() - lost;
        if end == End::Stale && !generation.ranks[1].is_dead {
            (0..400).for_each(|_| generation.receive(0, 1));
            let failure = generation.ranks[0].links.state.failure();
            let text = failure.map_or_else(String::new, ToString::to_string);
            assert!(text.contains("generation") || text.contains("closed"), "{text:?}");
        }
        now = generation.now;
        // Some are gone, and others come.
        let gone = usize::from(end == End::Killed);
        processes = (processes - gone + lock(&draws).below(3)).clamp(1, 5);
    }
    (succeeded, failed)
}

#[test]
fn drawn_histories_give_the_results_of_the_model() {
    let number = |name: &str, usual: u64| {
        std::env::var(name).ok().and_then(|it| it.parse().ok()).unwrap_or(usual)
    };
    let (first, count) =
        (number("GRADLANE_GROUP_SEED", 0), number("GRADLANE_GROUP_HISTORIES", 100));
    let poller = Poller::new().expect("a poller");
    let (mut succeeded, mut failed) = (0, 0);
    for seed in first..first + count {
        let found = std::panic::catch_unwind(|| history(seed, &poller));
        let (more, lost) = found.unwrap_or_else(|panic| {
            eprintln!("history of seed {seed}; again: GRADLANE_GROUP_SEED={seed}");
            std::panic::resume_unwind(panic)
        });
        succeeded += more;
        failed += lost;
    }
    eprintln!("{count} histories: {succeeded} calls succeeded, {failed} failed");
    assert!(succeeded > failed && failed > 0);
}
