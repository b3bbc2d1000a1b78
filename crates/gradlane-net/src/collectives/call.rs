//! A call of one rank: the operation, its memory, and what the ranks have to agree on.

use super::element::{Element, Reduction};
use crate::memory::UserMemory;
use std::fmt;

/// What a call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// Every rank gets the reduction of all ranks' values. One output, which is the input too.
    AllReduce = 1,
    /// Rank `r` gets the reduction of all ranks' `r`-th input. One output.
    ReduceScatter = 2,
    /// Every rank gets all ranks' inputs. One input, an output a rank.
    AllGather = 3,
    /// Every rank gets the root's value. One output, which on the root is the input.
    Broadcast = 4,
    /// The root gets the reduction of all ranks' values. One output, unchanged on the others.
    Reduce = 5,
    /// The root gets all ranks' inputs. One input; on the root an output a rank.
    Gather = 6,
    /// Rank `r` gets the root's `r`-th input. One output; on the root an input a rank.
    Scatter = 7,
    /// Rank `r` gets every rank's `r`-th input. An input and an output a rank, of any sizes.
    AllToAll = 8,
    /// No rank goes on before all have come.
    Barrier = 9,
    /// As `Barrier`, by way of rank 0, which names the ranks that have not come.
    MonitoredBarrier = 10,
    /// A message to one rank: `root`. One input.
    Send = 11,
    /// A message from one rank (`root`), or from any. One output.
    Receive = 12,
}

const MESSAGES: [Operation; 2] = [Operation::Send, Operation::Receive];

impl Operation {
    /// Those that all ranks of a group call.
    pub(super) const COLLECTIVES: [Operation; 10] = [
        Operation::AllReduce,
        Operation::ReduceScatter,
        Operation::AllGather,
        Operation::Broadcast,
        Operation::Reduce,
        Operation::Gather,
        Operation::Scatter,
        Operation::AllToAll,
        Operation::Barrier,
        Operation::MonitoredBarrier,
    ];

    fn all() -> impl Iterator<Item = Operation> {
        Operation::COLLECTIVES.into_iter().chain(MESSAGES)
    }

    /// The name in messages and calls.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllGather => "all_gather",
            Operation::Broadcast => "broadcast",
            Operation::Reduce => "reduce",
            Operation::Gather => "gather",
            Operation::Scatter => "scatter",
            Operation::AllToAll => "all_to_all",
            Operation::Barrier => "barrier",
            Operation::MonitoredBarrier => "monitored_barrier",
            Operation::Send => "send",
            Operation::Receive => "recv",
        }
    }

    /// Returns the operation with a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Operation> {
        Operation::all().find(|it| it.name() == name)
    }

    fn from_code(code: u32) -> Option<Operation> {
        Operation::all().find(|it| *it as u32 == code)
    }

    /// Whether contributions are reduced.
    #[must_use]
    pub const fn reduces(self) -> bool {
        matches!(self, Operation::AllReduce | Operation::ReduceScatter | Operation::Reduce)
    }

    /// Whether one rank has another part than all others.
    const fn has_root(self) -> bool {
        use Operation::{Broadcast, Gather, Reduce, Scatter};
        matches!(self, Broadcast | Reduce | Gather | Scatter)
    }
}

/// One rank's call of a collective.
#[derive(Clone, Debug)]
pub struct Call {
    /// What it does.
    pub operation: Operation,
    /// Type of all elements.
    pub element: Element,
    /// How contributions are reduced, where they are.
    pub reduction: Reduction,
    /// The root, where there is one.
    pub root: u32,
    /// Memory to read.
    pub inputs: Vec<UserMemory>,
    /// Memory to write.
    pub outputs: Vec<UserMemory>,
}

impl Call {
    /// Returns why the call makes no sense on one of `size` ranks.
    pub(super) fn mistake(&self, rank: u32, size: u32) -> Option<String> {
        let name = self.operation.name();
        let ranks = size as usize;
        let is_root = rank == self.root;
        let (inputs, outputs) = match self.operation {
            Operation::AllReduce | Operation::Broadcast | Operation::Reduce => (0, 1),
            Operation::ReduceScatter => (ranks, 1),
            Operation::AllGather => (1, ranks),
            Operation::Gather => (1, if is_root { ranks } else { 0 }),
            Operation::Scatter => (if is_root { ranks } else { 0 }, 1),
            Operation::AllToAll => (ranks, ranks),
            Operation::Barrier | Operation::MonitoredBarrier => (0, 0),
            Operation::Send | Operation::Receive => {
                return Some(format!("{name} is no collective"));
            }
        };
        if (self.inputs.len(), self.outputs.len()) != (inputs, outputs) {
            return Some(format!(
                "{name} has {} inputs and {} outputs on rank {rank} of {size}, and takes {inputs} \
                 and {outputs}",
                self.inputs.len(),
                self.outputs.len()
            ));
        }
        if self.operation.has_root() && self.root >= size {
            return Some(format!("{name} has root {} in a group of {size} ranks", self.root));
        }
        if self.operation.reduces() && !self.reduction.takes(self.element) {
            let (reduction, element) = (self.reduction.name(), self.element.name());
            return Some(format!("{name} takes no {reduction} of {element} elements"));
        }
        let memory = || self.inputs.iter().chain(&self.outputs);
        if memory().any(|it| it.is_null()) {
            return Some(format!("{name} has memory at no address"));
        }
        if let Some(it) = memory().find(|it| it.bytes() % self.element.bytes() != 0) {
            let (bytes, element) = (it.bytes(), self.element.name());
            return Some(format!("{name} has {bytes} bytes of {element} elements"));
        }
        if let Some(it) = memory().find(|it| it.bytes() > u32::MAX as usize) {
            return Some(format!(
                "{name} has a tensor of {} bytes: at most {} are sent in one; split it",
                it.bytes(),
                u32::MAX
            ));
        }
        let same = match self.operation {
            Operation::AllToAll => true,
            Operation::AllReduce | Operation::Broadcast | Operation::Reduce => true,
            _ => {
                let mut sizes = memory().map(|it| it.bytes());
                let first = sizes.next();
                sizes.all(|it| Some(it) == first)
            }
        };
        (!same).then(|| format!("{name} has tensors of different sizes"))
    }

    /// Returns what all ranks have to agree on.
    pub(super) fn description(&self) -> Description {
        let count = match self.operation {
            // The sizes of each pair of ranks are compared by the message.
            Operation::AllToAll => 0,
            _ => self.outputs.iter().chain(&self.inputs).next().map_or(0, |it| it.bytes()),
        };
        Description {
            operation: self.operation,
            element: self.element,
            reduction: if self.operation.reduces() { self.reduction } else { Reduction::Sum },
            root: if self.operation.has_root() { self.root } else { 0 },
            elements: count as u64 / self.element.bytes() as u64,
        }
    }
}

/// What all ranks of a collective have to agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Description {
    pub(super) operation: Operation,
    pub(super) element: Element,
    pub(super) reduction: Reduction,
    pub(super) root: u32,
    /// Elements of one tensor. All ranks have those of an `AllToAll` in common with each other alone: here they
    /// are 0, or one more than the sender of a message has for its receiver.
    pub(super) elements: u64,
}

const ROOT_BITS: u32 = 15;
/// Ranks of a group at most: roots have 15 bits in a frame.
pub(super) const RANKS_MAX: u32 = 1 << ROOT_BITS;

impl Description {
    /// Adds the bytes that the sender has for the receiver.
    pub(super) fn of_pair(self, bytes: usize) -> Description {
        Description { elements: (bytes / self.element.bytes()) as u64 + 1, ..self }
    }

    /// Returns what all ranks have in common, and the bytes that the sender has for the receiver.
    pub(super) fn without_pair(self) -> (Description, Option<usize>) {
        if self.operation != Operation::AllToAll {
            return (self, None);
        }
        let elements = self.elements.checked_sub(1).and_then(|it| usize::try_from(it).ok());
        let bytes = elements.map(|it| it.saturating_mul(self.element.bytes()));
        (Description { elements: 0, ..self }, bytes)
    }

    /// The numbers on the wire.
    pub(super) fn encode(self) -> (u32, u64) {
        let operation = (self.operation as u32) << 27;
        let (element, reduction) = ((self.element as u32) << 22, (self.reduction as u32) << 18);
        (operation | element | reduction | self.root, self.elements)
    }

    /// Reads the numbers on the wire.
    pub(super) fn decode(code: u32, elements: u64) -> Option<Description> {
        Some(Description {
            operation: Operation::from_code(code >> 27)?,
            element: Element::from_code(code >> 22 & 31)?,
            reduction: Reduction::from_code(code >> 18 & 15)?,
            root: code & (RANKS_MAX - 1),
            elements,
        })
    }
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, element) = (self.operation.name(), self.element.name());
        match self.operation {
            Operation::Barrier | Operation::MonitoredBarrier => return f.write_str(name),
            Operation::AllToAll => return write!(f, "{name} of {element}"),
            _ => {}
        }
        write!(f, "{name} of {} {element}", self.elements)?;
        if self.operation.reduces() {
            write!(f, " ({})", self.reduction.name())?;
        }
        if self.operation.has_root() {
            write!(f, " with root {}", self.root)?;
        }
        Ok(())
    }
}
