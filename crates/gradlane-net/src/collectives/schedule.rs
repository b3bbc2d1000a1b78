//! What each rank sends, receives and computes in a collective: a list of strands, each a list of rounds.
//!
//! A schedule is data, made from this rank, the number of ranks and sizes alone, so it is tested without
//! sockets. A round sends and receives messages between different memory, and is over when all of them are
//! through; then it computes, and the next one begins. Strands are independent of each other: while one
//! computes, others are on the way. Between two ranks there is at most one message in each direction in
//! a round, so strand and round name it.
//!
//! Every rank talks to every other one directly. Contributions meet at the rank that keeps the result of
//! their range, which reduces them in the order of the ranks: `((x0 + x1) + x2) + …`, whatever the size. So
//! the same tensors give the same bits in every call, on every rank, also cut or joined otherwise.

use super::call::{Call, Operation};
use super::element::Element;
use super::limits::Limits;

/// Ranks up to which a root sends a short value itself, in place of a tree.
const STAR_RANKS: u32 = 4;

/// Memory that a schedule names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// The call's inputs, then its outputs.
    User(usize),
    /// Memory of the strand.
    Scratch(usize),
}

/// A range of memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) memory: Memory,
    pub(super) start: usize,
    pub(super) length: usize,
}

/// What a rank does after the messages of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Local {
    /// Copies bytes.
    Copy { from: Place, into: Place },
    /// Reduces the inputs in their order. The result may take the place of one of them.
    Reduce { inputs: Vec<Place>, into: Place },
}

/// Messages at the same time, and what follows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) sends: Vec<(u32, Place)>,
    pub(super) receives: Vec<(u32, Place)>,
    pub(super) then: Vec<Local>,
}

/// Rounds one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Strand {
    /// Sizes of its scratch memory, in bytes.
    pub(super) scratch: Vec<usize>,
    pub(super) rounds: Vec<Round>,
}

impl Strand {
    /// Bytes of its longest message.
    pub(super) fn longest(&self) -> usize {
        let messages = self.rounds.iter().flat_map(|it| it.sends.iter().chain(&it.receives));
        messages.map(|(_, place)| place.length).max().unwrap_or(0)
    }
}

/// Makes the strands of one rank's part in a collective.
pub(super) fn schedule(call: &Call, rank: u32, size: u32, limits: Limits) -> Vec<Strand> {
    let inputs = call.inputs.len();
    let planner = Planner { rank, size, root: call.root, element: call.element, limits };
    let input = |index: usize| Place {
        memory: Memory::User(index),
        start: 0,
        length: call.inputs[index].bytes(),
    };
    let output = |index: usize| Place {
        memory: Memory::User(inputs + index),
        start: 0,
        length: call.outputs[index].bytes(),
    };
    let all_inputs = || (0..inputs).map(input).collect::<Vec<Place>>();
    let all_outputs = || (0..call.outputs.len()).map(output).collect::<Vec<Place>>();
    match call.operation {
        Operation::AllReduce => planner.all_reduce(output(0)),
        Operation::ReduceScatter => planner.reduce_scatter(&all_inputs(), output(0)),
        Operation::AllGather => planner.all_gather(input(0), &all_outputs()),
        Operation::Broadcast => planner.broadcast(output(0)),
        Operation::Reduce => planner.reduce(output(0)),
        Operation::Gather => planner.gather(input(0), &all_outputs()),
        Operation::Scatter => planner.scatter(&all_inputs(), output(0)),
        Operation::AllToAll => planner.all_to_all(&all_inputs(), &all_outputs()),
        Operation::Barrier => planner.barrier(),
        Operation::MonitoredBarrier => planner.monitored_barrier(),
        Operation::Send | Operation::Receive => Vec::new(),
    }
}

impl Place {
    /// Returns a range of this place.
    fn part(self, start: usize, length: usize) -> Place {
        Place { start: self.start + start, length, ..self }
    }
}

struct Planner {
    rank: u32,
    size: u32,
    root: u32,
    element: Element,
    limits: Limits,
}

const NOTHING: Place = Place { memory: Memory::User(0), start: 0, length: 0 };

impl Planner {
    fn others(&self) -> impl Iterator<Item = u32> + use<'_> {
        // Beginning with the next rank, so that not all ranks call on the first one at first.
        (1..self.size).map(|distance| (self.rank + distance) % self.size)
    }

    /// Cuts a range into the blocks of all ranks, at whole elements.
    fn blocks(&self, whole: Place) -> Vec<Place> {
        let (unit, ranks) = (self.element.bytes(), self.size as usize);
        let elements = whole.length / unit;
        let cut = |index: usize| elements * index / ranks * unit;
        (0..ranks).map(|index| whole.part(cut(index), cut(index + 1) - cut(index))).collect()
    }

    /// Bytes of the pieces of a message.
    fn piece(&self, length: usize) -> usize {
        let Limits { piece, pieces, piece_least, .. } = self.limits;
        (length / pieces).clamp(piece_least.min(piece), piece)
    }

    /// Cuts a range into pieces of at most `most` bytes, at whole elements; one piece where it is empty.
    fn pieces(&self, length: usize, most: usize) -> Vec<(usize, usize)> {
        let unit = self.element.bytes();
        let most = (most / unit).max(1) * unit;
        let starts = (0..length.max(1)).step_by(most);
        starts.map(|start| (start, most.min(length - start))).collect()
    }

    /// Cuts a range so that the blocks of each part are pieces.
    fn pieces_of_blocks(&self, length: usize) -> Vec<(usize, usize)> {
        let ranks = self.size as usize;
        self.pieces(length, self.piece(length / ranks) * ranks)
    }

    /// Scratch memory for the contributions of the other ranks, of `length` bytes each, and the places of
    /// all contributions in rank order with `own` in between.
    fn contributions(&self, own: Place, length: usize) -> (Vec<usize>, Vec<Place>) {
        let mut scratch = Vec::new();
        let places = (0..self.size).map(|rank| {
            if rank == self.rank {
                return own;
            }
            scratch.push(length);
            Place { memory: Memory::Scratch(scratch.len() - 1), start: 0, length }
        });
        let places = places.collect();
        (scratch, places)
    }

    fn all_reduce(&self, whole: Place) -> Vec<Strand> {
        if whole.length * (self.size as usize - 1) <= self.limits.exchange {
            let (scratch, places) = self.contributions(whole, whole.length);
            return vec![Strand {
                scratch,
                rounds: vec![Round {
                    sends: self.others().map(|peer| (peer, whole)).collect(),
                    receives: self.others().map(|peer| (peer, places[peer as usize])).collect(),
                    then: vec![Local::Reduce { inputs: places, into: whole }],
                }],
            }];
        }
        let strand = |(start, length)| {
            let blocks = self.blocks(whole.part(start, length));
            let own = blocks[self.rank as usize];
            let mut strand = self.reduce_blocks(&blocks, own);
            strand.rounds.push(self.exchange_blocks(&blocks));
            strand
        };
        self.pieces_of_blocks(whole.length).into_iter().map(strand).collect()
    }

    /// Every rank reduces its block of all ranks' values.
    fn reduce_blocks(&self, blocks: &[Place], into: Place) -> Strand {
        let own = blocks[self.rank as usize];
        let (scratch, places) = self.contributions(own, own.length);
        let round = Round {
            sends: self.others().map(|peer| (peer, blocks[peer as usize])).collect(),
            receives: self.others().map(|peer| (peer, places[peer as usize])).collect(),
            then: vec![Local::Reduce { inputs: places, into }],
        };
        Strand { scratch, rounds: vec![round] }
    }

    /// Every rank sends its block to all others.
    fn exchange_blocks(&self, blocks: &[Place]) -> Round {
        let own = blocks[self.rank as usize];
        Round {
            sends: self.others().map(|peer| (peer, own)).collect(),
            receives: self.others().map(|peer| (peer, blocks[peer as usize])).collect(),
            then: Vec::new(),
        }
    }

    fn reduce_scatter(&self, inputs: &[Place], output: Place) -> Vec<Strand> {
        let most = if output.length * (self.size as usize - 1) <= self.limits.exchange {
            output.length
        } else {
            self.piece(output.length)
        };
        let strand = |(start, length)| {
            let blocks: Vec<Place> = inputs.iter().map(|it| it.part(start, length)).collect();
            self.reduce_blocks(&blocks, output.part(start, length))
        };
        self.pieces(output.length, most).into_iter().map(strand).collect()
    }

    fn one_round(round: Round) -> Vec<Strand> {
        vec![Strand { scratch: Vec::new(), rounds: vec![round] }]
    }

    fn all_gather(&self, input: Place, outputs: &[Place]) -> Vec<Strand> {
        let inputs = vec![input; outputs.len()];
        self.all_to_all(&inputs, outputs)
    }

    fn broadcast(&self, whole: Place) -> Vec<Strand> {
        if whole.length <= self.limits.whole_broadcast || self.size == 2 {
            let is_star = self.size <= STAR_RANKS;
            return Planner::one_way(if is_star { self.star(whole) } else { self.tree(whole) });
        }
        let strand = |(start, length)| {
            let blocks = self.blocks(whole.part(start, length));
            let mut first = Round::default();
            if self.rank == self.root {
                first.sends = self.others().map(|peer| (peer, blocks[peer as usize])).collect();
            } else {
                first.receives = vec![(self.root, blocks[self.rank as usize])];
            }
            // The root has all blocks, and only gives its own.
            let mut second = self.exchange_blocks(&blocks);
            second.sends.retain(|(peer, _)| *peer != self.root);
            if self.rank == self.root {
                second.receives.clear();
            }
            Strand { scratch: Vec::new(), rounds: vec![first, second] }
        };
        self.pieces_of_blocks(whole.length).into_iter().map(strand).collect()
    }

    fn one_way(rounds: Vec<Round>) -> Vec<Strand> {
        vec![Strand { scratch: Vec::new(), rounds }]
    }

    /// The root sends to all others.
    fn star(&self, whole: Place) -> Vec<Round> {
        let mut round = Round::default();
        if self.rank == self.root {
            round.sends = self.others().map(|peer| (peer, whole)).collect();
        } else {
            round.receives = vec![(self.root, whole)];
        }
        vec![round]
    }

    /// A binomial tree: in round `k` the 2^k ranks that have the value send it 2^k ranks further.
    fn tree(&self, whole: Place) -> Vec<Round> {
        let place = (self.rank + self.size - self.root) % self.size;
        let mut rounds = Vec::new();
        let mut have = 1;
        while have < self.size {
            let mut round = Round::default();
            if place < have && place + have < self.size {
                round.sends = vec![((self.rank + have) % self.size, whole)];
            } else if (have..2 * have).contains(&place) {
                round.receives = vec![((self.rank + self.size - have) % self.size, whole)];
            }
            rounds.push(round);
            have *= 2;
        }
        rounds
    }

    fn reduce(&self, whole: Place) -> Vec<Strand> {
        if whole.length * (self.size as usize - 1) <= self.limits.exchange {
            let mut strand = Strand::default();
            let mut round = Round::default();
            if self.rank == self.root {
                let (scratch, places) = self.contributions(whole, whole.length);
                strand.scratch = scratch;
                round.receives = self.others().map(|it| (it, places[it as usize])).collect();
                round.then = vec![Local::Reduce { inputs: places, into: whole }];
            } else {
                round.sends = vec![(self.root, whole)];
            }
            strand.rounds = vec![round];
            return vec![strand];
        }
        let strand = |(start, length)| {
            let blocks = self.blocks(whole.part(start, length));
            let own = blocks[self.rank as usize];
            let mut second = Round::default();
            if self.rank == self.root {
                let mut strand = self.reduce_blocks(&blocks, own);
                second.receives = self.others().map(|it| (it, blocks[it as usize])).collect();
                strand.rounds.push(second);
                return strand;
            }
            // The values of ranks other than the root stay as they are.
            let memory = Memory::Scratch(self.size as usize - 1);
            let sum = Place { memory, start: 0, length: own.length };
            let mut strand = self.reduce_blocks(&blocks, sum);
            strand.scratch.push(own.length);
            second.sends = vec![(self.root, sum)];
            strand.rounds.push(second);
            strand
        };
        self.pieces_of_blocks(whole.length).into_iter().map(strand).collect()
    }

    fn gather(&self, input: Place, outputs: &[Place]) -> Vec<Strand> {
        let mut round = Round::default();
        if self.rank == self.root {
            round.receives = self.others().map(|it| (it, outputs[it as usize])).collect();
            round.then = vec![Local::Copy { from: input, into: outputs[self.rank as usize] }];
        } else {
            round.sends = vec![(self.root, input)];
        }
        Planner::one_round(round)
    }

    fn scatter(&self, inputs: &[Place], output: Place) -> Vec<Strand> {
        let mut round = Round::default();
        if self.rank == self.root {
            round.sends = self.others().map(|it| (it, inputs[it as usize])).collect();
            round.then = vec![Local::Copy { from: inputs[self.rank as usize], into: output }];
        } else {
            round.receives = vec![(self.root, output)];
        }
        Planner::one_round(round)
    }

    /// In each strand a piece to and from every rank that has one.
    fn all_to_all(&self, inputs: &[Place], outputs: &[Place]) -> Vec<Strand> {
        let mut rounds = vec![Round::default()];
        for peer in self.others() {
            let (sent, received) = (inputs[peer as usize], outputs[peer as usize]);
            let (sent, received) = (self.cut(sent), self.cut(received));
            rounds.resize_with(rounds.len().max(sent.len()).max(received.len()), Round::default);
            for (round, piece) in rounds.iter_mut().zip(sent) {
                round.sends.push((peer, piece));
            }
            for (round, piece) in rounds.iter_mut().zip(received) {
                round.receives.push((peer, piece));
            }
        }
        let own = self.rank as usize;
        rounds[0].then = vec![Local::Copy { from: inputs[own], into: outputs[own] }];
        let strand = |round| Strand { scratch: Vec::new(), rounds: vec![round] };
        rounds.into_iter().map(strand).collect()
    }

    /// Cuts a message, as the rank at its other end does.
    fn cut(&self, message: Place) -> Vec<Place> {
        let pieces = self.pieces(message.length, self.piece(message.length));
        pieces.into_iter().map(|(start, length)| message.part(start, length)).collect()
    }

    /// After round `k` a rank has heard, directly or not, of the 2^(k + 1) - 1 ranks before it.
    fn barrier(&self) -> Vec<Strand> {
        let distances = std::iter::successors(Some(1), |it| Some(it * 2));
        let rounds = distances.take_while(|it| *it < self.size).map(|distance| Round {
            sends: vec![((self.rank + distance) % self.size, NOTHING)],
            receives: vec![((self.rank + self.size - distance) % self.size, NOTHING)],
            then: Vec::new(),
        });
        Planner::one_way(rounds.collect())
    }

    /// All ranks report to rank 0, which then releases them.
    fn monitored_barrier(&self) -> Vec<Strand> {
        let (mut reports, mut release) = (Round::default(), Round::default());
        if self.rank == 0 {
            reports.receives = self.others().map(|peer| (peer, NOTHING)).collect();
            release.sends = self.others().map(|peer| (peer, NOTHING)).collect();
        } else {
            reports.sends = vec![(0, NOTHING)];
            release.receives = vec![(0, NOTHING)];
        }
        Planner::one_way(vec![reports, release])
    }
}
