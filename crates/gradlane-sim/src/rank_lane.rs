//! The lanes of ranks. Each has an engine for its share of the slices, the thread that drives it, work threads, and
//! a connection to each peer, as in `gradlane-net`.
//!
//! A lane's thread does one thing after another: what it hears while it is busy waits in its inbox.

use gradlane_engine::{Engine, JobId, JobResult, LaneNews, Transmit};
use gradlane_units::{Step, TensorId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::ops::{Index, IndexMut};

/// A task of a lane's thread.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IoTask {
    /// The header of a frame is here.
    Header(u32),
    /// All of a frame is here; `true` when its header was not heard before.
    Frame(u32, bool),
    /// The connection to this rank takes bytes again.
    Writable(u32),
    /// A work thread has finished a job.
    JobDone(JobId),
    /// The application has begun a step.
    Begin(Step),
    /// The application hands over a gradient.
    Gradient(TensorId, Step),
    /// The application waits for a tensor.
    Needed(TensorId, Step),
    /// The application has made a tensor's gradient of all ranks' blocks.
    Answer(TensorId, Step),
    /// The application has ended a step.
    End(Step),
    /// The application passes a step.
    Pass(Step),
    /// Another lane of the rank has told something: the oldest of `RankLane::told`.
    Told,
    /// A moment has come that the engine wanted to hear of.
    Clock,
}

/// A frame that the kernel has taken in part.
#[derive(Debug)]
pub(crate) struct Partial {
    pub(crate) number: u32,
    pub(crate) bytes: u32,
    /// Bytes that it has not taken.
    pub(crate) rest: u32,
    pub(crate) transmit: Transmit,
}

/// A lane of a rank.
#[derive(Debug)]
pub(crate) struct RankLane {
    pub(crate) engine: Engine,
    pub(crate) io: IoThread,
    /// Whether it sends to more than one rank.
    pub(crate) has_several_peers: bool,
    /// Frames that the kernel has not taken whole, by rank.
    pub(crate) partial: BTreeMap<u32, Partial>,
    /// Frames behind them that the engine has chosen, by rank.
    pub(crate) unsent: BTreeMap<u32, VecDeque<Transmit>>,
    /// When each work thread has done all that it was given.
    pub(crate) work_until: Vec<u64>,
    /// Jobs with their ends, the first to end first.
    pub(crate) jobs: BinaryHeap<Reverse<(u64, JobId)>>,
    /// What comes of those that encode to other lengths than the plan's.
    pub(crate) results: BTreeMap<JobId, JobResult>,
    /// What other lanes of the rank tell, and from when on, the first first.
    pub(crate) news: VecDeque<(u64, LaneNews)>,
    /// What they have told and the thread has not heard.
    pub(crate) told: VecDeque<LaneNews>,
    /// When it looks at its clock next.
    pub(crate) clock_at: u64,
}

/// The thread that drives an engine: one event touches one line of the cache.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct IoThread {
    pub(crate) inbox: VecDeque<IoTask>,
    /// When it has done its last task.
    pub(crate) busy_until: u64,
    /// Whether it will look into its inbox then.
    pub(crate) will_listen: bool,
}

impl RankLane {
    /// A lane with so many work threads.
    pub(crate) fn new(engine: Engine, work_threads: usize) -> RankLane {
        RankLane {
            has_several_peers: engine.plan().peers_sent_to(engine.rank()) > 1,
            engine,
            io: IoThread::default(),
            partial: BTreeMap::new(),
            unsent: BTreeMap::new(),
            work_until: vec![0; work_threads],
            jobs: BinaryHeap::new(),
            results: BTreeMap::new(),
            news: VecDeque::new(),
            told: VecDeque::new(),
            clock_at: 0,
        }
    }
}

/// Which lane of which rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaneId {
    pub(crate) rank: u32,
    pub(crate) lane: u32,
}

/// The lanes of all ranks, as many of each.
#[derive(Debug)]
pub(crate) struct RankLanes {
    each: u32,
    all: Vec<RankLane>,
}

impl RankLanes {
    /// Those of all ranks, one rank's after another's, `each` of every rank.
    pub(crate) fn new(each: u32, all: Vec<RankLane>) -> RankLanes {
        RankLanes { each, all }
    }

    /// The number of lanes of each rank.
    pub(crate) fn each(&self) -> u32 {
        self.each
    }

    /// A lane's number among those of all ranks.
    pub(crate) fn number(&self, id: LaneId) -> u32 {
        id.rank * self.each + id.lane
    }

    /// The lane with a number.
    pub(crate) fn id(&self, number: u32) -> LaneId {
        LaneId { rank: number / self.each, lane: number % self.each }
    }

    /// The lanes of a rank.
    pub(crate) fn of(&mut self, rank: u32) -> &mut [RankLane] {
        let first = (rank * self.each) as usize;
        &mut self.all[first..first + self.each as usize]
    }
}

impl Index<LaneId> for RankLanes {
    type Output = RankLane;

    fn index(&self, id: LaneId) -> &RankLane {
        &self.all[self.number(id) as usize]
    }
}

impl IndexMut<LaneId> for RankLanes {
    fn index_mut(&mut self, id: LaneId) -> &mut RankLane {
        let number = self.number(id);
        &mut self.all[number as usize]
    }
}
