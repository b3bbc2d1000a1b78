//! The synchrony `BackupWorkers` under random interleavings: whoever is slow, and however late its frames are,
//! all ranks agree on who was in, hold the same mean over just these to the last bit, get every slice
//! once, and come to an end. Every failure prints the seed of its run.

use crate::common::model::gradient;
use crate::common::toy::Toy;
use crate::common::{tensors, Cluster};
use gradlane_engine::{
    CodecSizes, Cutoff, Event, Input, Plan, StragglerPolicy, Strategy as Setting, Synchrony, Update,
};
use gradlane_units::{Rank, Rng, Step, TensorId, Time};
use gradlane_wire::FrameKind;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

fn stragglers(cutoff: Cutoff, ahead_steps: u32) -> Synchrony {
    Synchrony::BackupWorkers(StragglerPolicy { cutoff, ahead_steps })
}

fn plan(sizes: &[u64], strategy: &str, slice_elems: u64, world: u32, rule: Synchrony) -> Arc<Plan> {
    plan_of(sizes, strategy, slice_elems, world, rule, None)
}

/// The same, with a codec for every second tensor.
fn plan_of(
    sizes: &[u64],
    strategy: &str,
    slice_elems: u64,
    world: u32,
    rule: Synchrony,
    toy: Option<Toy>,
) -> Arc<Plan> {
    let strategy = Setting::named(strategy, Some(slice_elems), 7).expect("a known strategy");
    let strategy = Setting { synchrony: rule, ..strategy };
    let coded = tensors(sizes).into_iter().enumerate().map(|(index, spec)| {
        let toy = toy.filter(|_| index % 2 == 0);
        (spec, toy.map(|toy| -> Box<dyn CodecSizes> { Box::new(toy) }))
    });
    let plan = Plan::build(coded.collect(), strategy, Update::Worker, world);
    Arc::new(plan.expect("a plan that can be built"))
}

fn has(rank: u32, step: u64, tensor: usize, holes: bool) -> bool {
    !holes || Rng::new(u64::from(rank) * 97 + step * 31 + tensor as u64).below(3) > 0
}

/// One rank's way through its steps.
#[derive(Clone, Copy, Debug)]
struct Walk {
    /// It does something in one of so many of its turns.
    lazy: u32,
    step: u64,
    /// Tensors still to be given in the step.
    left: usize,
    passes: bool,
    finished: bool,
}

/// A call for a lane, and the values of its tensor.
type Call = (Input, Vec<f32>);

struct Run {
    /// The first lanes of all ranks.
    cluster: Cluster,
    /// The other lanes, and what they and the first have not taken, by lane and rank.
    others: Vec<Cluster>,
    inboxes: BTreeMap<(usize, u32), VecDeque<Call>>,
    sizes: Vec<u64>,
    steps: u64,
    holes: bool,
    /// Of every second tensor.
    toy: Option<Toy>,
    /// No rank is left out of each so manyth step.
    barrier_every: u64,
    ahead_steps: u64,
    walks: Vec<Walk>,
    clock: u64,
    /// What each rank held after each step, by tensor; none where nobody had a gradient.
    held: BTreeMap<(u32, u64, usize), Option<Vec<f32>>>,
    passed: BTreeSet<(u32, u64)>,
}

impl Run {
    fn new(plan: &Arc<Plan>, frame: u32, lazy: &[u32], steps: u64, seed: u64) -> Run {
        Run::with_lanes(plan, 1, None, frame, lazy, steps, seed)
    }

    fn with_lanes(
        plan: &Arc<Plan>,
        lanes: u32,
        toy: Option<Toy>,
        frame: u32,
        lazy: &[u32],
        steps: u64,
        seed: u64,
    ) -> Run {
        let cluster = |lane: u32| {
            let (plan, seed) = (&Arc::new(plan.lane(lane, lanes)), seed ^ u64::from(lane));
            let mut cluster = match toy {
                Some(toy) => Cluster::with_toy(plan, toy, frame, 1 << 16, seed),
                None => Cluster::new(plan, frame, 1 << 16, seed),
            };
            cluster.step_zero();
            cluster
        };
        let walk = |&lazy: &u32| Walk { lazy, step: 0, left: 0, passes: false, finished: false };
        Run {
            cluster: cluster(0),
            others: (1..lanes).map(cluster).collect(),
            inboxes: BTreeMap::new(),
            sizes: plan.tensors.iter().map(|it| it.spec.numel).collect(),
            steps,
            holes: false,
            toy,
            barrier_every: u64::MAX,
            ahead_steps: u64::from(
                plan.strategy.synchrony.stragglers().expect("the rule").ahead_steps,
            ),
            walks: lazy.iter().map(walk).collect(),
            clock: 0,
            held: BTreeMap::new(),
            passed: BTreeSet::new(),
        }
    }

    /// Lets every rank run its steps and finish. What takes so many turns is a deadlock.
    fn go(&mut self) {
        let mut turns = 0;
        while self.walks.iter().any(|it| !it.finished) {
            self.turn();
            turns += 1;
            assert!(turns < 400_000, "nothing moves: {:?}", self.walks);
        }
        self.rest();
    }

    /// Runs all lanes until nothing moves.
    fn rest(&mut self) {
        self.run_lanes(usize::MAX);
    }

    /// Runs the network of the first lanes until nothing moves; what lanes tell each other arrives in all.
    fn run_lanes(&mut self, count: usize) {
        loop {
            self.lanes().take(count).for_each(Cluster::run);
            if !self.pass_news() {
                return;
            }
            while let Some(&key) = self.inboxes.keys().next() {
                self.take_call(key);
            }
        }
    }

    fn lanes(&mut self) -> impl Iterator<Item = &mut Cluster> {
        std::iter::once(&mut self.cluster).chain(&mut self.others)
    }

    /// Gives what lanes tell each other to those that it is for; whether there is something to take.
    fn pass_news(&mut self) -> bool {
        let mut told = Vec::new();
        for cluster in self.lanes() {
            for (rank, node) in (0..).zip(&mut cluster.nodes) {
                told.extend(std::mem::take(&mut node.news).into_iter().map(|event| (rank, event)));
            }
        }
        for (rank, event) in told {
            match event {
                Event::TellLead(news) => {
                    let inbox = self.inboxes.entry((0, rank)).or_default();
                    inbox.push_back((Input::Told(news), Vec::new()));
                }
                Event::TellLanes(news) => self.tell_others(rank, &Input::Told(news), &[]),
                event => unreachable!("{event:?} is for no lane"),
            }
        }
        !self.inboxes.is_empty()
    }

    fn tell_others(&mut self, rank: u32, input: &Input, values: &[f32]) {
        for (index, cluster) in self.others.iter().enumerate() {
            let of = match input {
                Input::GradientReady(tensor, _) | Input::TensorAbsent(tensor, _) => Some(*tensor),
                _ => None,
            };
            let plan = cluster.nodes[0].engine.plan();
            if of.is_none_or(|tensor| plan.has_slices_of(tensor)) {
                let inbox = self.inboxes.entry((index + 1, rank)).or_default();
                inbox.push_back((input.clone(), values.to_vec()));
            }
        }
    }

    /// A lane takes a call, or news.
    fn take_call(&mut self, key: (usize, u32)) {
        let inbox = self.inboxes.get_mut(&key).expect("a call");
        let (input, values) = inbox.pop_front().expect("a call");
        if inbox.is_empty() {
            self.inboxes.remove(&key);
        }
        let cluster = self.lanes().nth(key.0).expect("a lane");
        let node = &mut cluster.nodes[key.1 as usize];
        if let Input::GradientReady(tensor, _) | Input::TensorAbsent(tensor, _) = &input {
            node.tensors[tensor.index()] = values;
        }
        node.engine.handle(input).expect("a call that fits");
        node.take_events();
        self.pass_news();
    }

    fn turn(&mut self) {
        let rank = self.cluster.rng.below(self.cluster.world());
        let walk = self.walks[rank as usize];
        self.cluster.stir(6);
        self.others.iter_mut().for_each(|it| it.stir(6));
        self.pass_news();
        if !self.inboxes.is_empty() {
            let at = self.cluster.rng.below(2 * self.inboxes.len() as u32) as usize;
            let key = self.inboxes.keys().nth(at).copied();
            key.into_iter().for_each(|key| self.take_call(key));
        }
        self.clock += u64::from(self.cluster.rng.below(3));
        // A rank reads its clock when it does something; rank 0 has deadlines.
        for reader in [0, rank] {
            let now = Time(self.clock);
            for cluster in self.lanes() {
                let node = &mut cluster.nodes[reader as usize];
                if !node.dead {
                    node.engine.tell(Input::Time(now));
                    node.take_events();
                }
            }
        }
        self.pass_news();
        let dead = self.cluster.nodes[rank as usize].dead;
        if !walk.finished && !dead && self.cluster.rng.below(walk.lazy) == 0 {
            self.act(rank);
        }
        self.check_bound();
    }

    /// One rank does its next thing, if it can.
    fn act(&mut self, rank: u32) {
        let coin = self.cluster.rng.below(2) == 0;
        self.pass_news();
        // Calls come after what the first lane was told before.
        while self.inboxes.contains_key(&(0, rank)) {
            self.take_call((0, rank));
        }
        let walk = &mut self.walks[rank as usize];
        let node = &mut self.cluster.nodes[rank as usize];
        node.take_events();
        if node.failure.is_some() {
            walk.finished = true;
            return;
        }
        let step = Step(walk.step);
        if walk.left > 0 {
            walk.left -= 1;
            let tensor = walk.left;
            let id = TensorId(tensor as u32);
            let (input, values) = if !walk.passes && has(rank, step.0, tensor, self.holes) {
                let values = gradient(rank, tensor, step.0, self.sizes[tensor]);
                (Input::GradientReady(id, step), values)
            } else {
                (Input::TensorAbsent(id, step), vec![f32::NAN; self.sizes[tensor] as usize])
            };
            if node.engine.plan().has_slices_of(id) {
                node.tensors[tensor].clone_from(&values);
                node.engine.handle(input.clone()).expect("a contribution");
                node.take_events();
            }
            self.pass_news();
            return self.tell_others(rank, &input, &values);
        }
        let is_complete = |it: &Cluster| it.nodes[rank as usize].completed.last() == Some(&step);
        if !is_complete(&self.cluster) || !self.others.iter().all(is_complete) {
            return;
        }
        for tensor in (0..self.sizes.len()).filter(|_| step.0 > 0) {
            let values = self.result(rank, step, tensor);
            self.held.insert((rank, step.0, tensor), values);
        }
        let (node, walk) = (&mut self.cluster.nodes[rank as usize], &mut self.walks[rank as usize]);
        let next = step.next();
        let barrier = next.0.is_multiple_of(self.barrier_every);
        let input = if step.0 == self.steps {
            walk.finished = true;
            Input::Finish
        } else if barrier {
            Input::StepBarrier(next)
        } else if coin && node.engine.handle(Input::StepPass(next)).is_ok() {
            self.passed.insert((rank, next.0));
            *walk = Walk { step: next.0, left: self.sizes.len(), passes: true, ..*walk };
            node.take_events();
            self.pass_news();
            return self.tell_others(rank, &Input::StepPass(next), &[]);
        } else {
            Input::StepBegin(next)
        };
        if !walk.finished {
            *walk = Walk { step: next.0, left: self.sizes.len(), passes: false, ..*walk };
        }
        node.engine.handle(input.clone()).expect("taken");
        node.take_events();
        self.pass_news();
        self.tell_others(rank, &input, &[]);
    }

    /// What a rank got for a tensor, in all lanes; none where nobody had a gradient.
    fn result(&mut self, rank: u32, step: Step, tensor: usize) -> Option<Vec<f32>> {
        let (mut all_absent, mut result) = (true, vec![0.0; self.sizes[tensor] as usize]);
        let event = (TensorId(tensor as u32), step);
        for cluster in self.lanes() {
            let node = &cluster.nodes[rank as usize];
            let plan = node.engine.plan();
            if !plan.has_slices_of(event.0) {
                continue;
            }
            let ready = node.ready.iter().rev().filter(|it| (it.0, it.1) == event);
            let absent: Vec<bool> = ready.map(|it| it.2).collect();
            assert_eq!(absent.len(), 1, "{event:?} is ready once");
            all_absent &= absent[0];
            for slice in plan.slices_of(event.0).map(|id| plan.slice(id)) {
                let range = slice.start as usize..(slice.start + slice.length) as usize;
                result[range.clone()].copy_from_slice(&node.tensors[tensor][range]);
            }
        }
        (!all_absent).then_some(result)
    }

    /// No step is decided too far ahead of any rank.
    fn check_bound(&self) {
        let first = self.walks.iter().map(|it| it.step).min().expect("ranks");
        let newest = self.cluster.nodes[0].decided.last().map_or(0, |(step, _)| step.0);
        assert!(newest <= first + self.ahead_steps, "{newest} is decided, a rank is in {first}");
    }

    fn check(&self, least: usize) {
        let world = self.cluster.world();
        let decided = &self.cluster.nodes[0].decided;
        let steps: Vec<u64> = decided.iter().map(|(step, _)| step.0).collect();
        assert_eq!(steps, (1..=self.steps).collect::<Vec<_>>(), "each step is decided once");
        let others = self.others.iter().flat_map(|it| &it.nodes);
        for node in self.cluster.nodes.iter().chain(others) {
            assert_eq!(&node.decided, decided, "{}", node.engine.rank());
            assert!(node.closed, "{}: {:?}", node.engine.rank(), node.failure);
            assert_eq!(node.engine.buffers_in_use(), 0, "buffers leaked");
        }
        for (step, set) in decided {
            let least =
                if step.0.is_multiple_of(self.barrier_every) { world as usize } else { least };
            assert!(set.len() >= least, "{step} has {set:?}");
            let passed = set.iter().find(|rank| self.passed.contains(&(rank.0, step.0)));
            assert_eq!(passed, None, "who passes is not in");
            for (tensor, &numel) in self.sizes.iter().enumerate().filter(|(_, &it)| it > 0) {
                let giving: Vec<u32> = set.iter().map(|rank| rank.0).collect();
                let coded = self.toy.is_some() && tensor % 2 == 0;
                let sent = |value: f32| if coded { Toy::keep(value) } else { value };
                let present = |&&rank: &&u32| has(rank, step.0, tensor, self.holes);
                let expected = (giving.iter().filter(present).count() > 0).then(|| {
                    let mut sum = vec![-0.0_f32; numel as usize];
                    for &rank in &giving {
                        let part = match has(rank, step.0, tensor, self.holes) {
                            true => gradient(rank, tensor, step.0, numel),
                            false => vec![0.0; numel as usize],
                        };
                        sum.iter_mut().zip(part).for_each(|(total, value)| *total += sent(value));
                    }
                    let mean = |total: &f32| sent(total / giving.len() as f32).to_bits();
                    sum.iter().map(mean).collect::<Vec<_>>()
                });
                for rank in 0..world {
                    let held = self.held[&(rank, step.0, tensor)].as_ref();
                    let held = held.map(|it| it.iter().map(|it| it.to_bits()).collect());
                    assert_eq!(held, expected, "rank {rank}, {step}, tensor {tensor}, {set:?}");
                }
            }
        }
    }
}

fn any_close() -> impl Strategy<Value = Cutoff> {
    let backup = (1..3_u32).prop_map(|ranks| Cutoff::Backup { ranks });
    let deadline = (101..300_u32).prop_map(|percent| Cutoff::Deadline { percent });
    prop_oneof![backup, deadline, Just(Cutoff::Adaptive)]
}

/// No codec, one whose encodings are equally long, or one whose are not.
fn any_toy() -> impl Strategy<Value = Option<Toy>> {
    let toy = |varies| Toy { granule_elems: 1, varies, integer: false };
    proptest::option::of(any::<bool>().prop_map(toy))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn all_ranks_hold_the_mean_over_the_same_contributors(
        sizes in proptest::collection::vec(prop_oneof![Just(0_u64), 1..40_u64, Just(300)], 1..5),
        name in proptest::sample::select(&["p3", "slicing", "wfbp"][..]),
        slice_elems in 20..200_u64,
        frame in prop_oneof![Just(64_u32), Just(1 << 16)],
        lazy in proptest::collection::vec(prop_oneof![Just(1_u32), 1..4_u32, 20..60_u32], 3..6),
        close in any_close(),
        ahead_steps in 1..4_u32,
        steps in 1..9_u64,
        holes in any::<bool>(),
        toy in any_toy(),
        barrier_every in 2..9_u64,
        lanes in prop_oneof![Just(1_u32), 2..5_u32],
        seed in any::<u64>(),
    ) {
        let world = lazy.len() as u32;
        let plan = plan_of(&sizes, name, slice_elems, world, stragglers(close, ahead_steps), toy);
        let mut run = Run::with_lanes(&plan, lanes, toy, frame, &lazy, steps, seed);
        run.holes = holes;
        run.barrier_every = barrier_every;
        run.go();
        run.check(match close {
            Cutoff::Backup { ranks } => (world - ranks) as usize,
            Cutoff::Deadline { .. } => 1,
            Cutoff::Adaptive => world.div_ceil(2) as usize,
        });
    }

    #[test]
    fn a_lost_rank_is_named_by_all_others(
        lazy in proptest::collection::vec(prop_oneof![Just(1_u32), 20..60_u32], 3..5),
        close in any_close(),
        turns in 0..300_u32,
        seed in any::<u64>(),
    ) {
        let world = lazy.len() as u32;
        let plan = plan(&[90, 7, 300], "p3", 50, world, stragglers(close, 2));
        let mut run = Run::new(&plan, 64, &lazy, 1000, seed);
        (0..turns).for_each(|_| run.turn());
        let lost = run.cluster.rng.below(world);
        run.cluster.kill(lost);
        run.cluster.run_to_failure();
        for node in run.cluster.nodes.iter().filter(|node| !node.dead) {
            let failure = node.failure.as_ref().expect("a failure");
            prop_assert_eq!(failure.peer, Some(Rank(lost)), "{}", failure);
        }
    }
}

/// Gives all tensors of a rank in the step it is in.
fn give(run: &mut Run, rank: u32) {
    while run.walks[rank as usize].left > 0 {
        run.act(rank);
    }
}

/// A rank enters its next step.
fn enter(run: &mut Run, rank: u32) {
    run.act(rank);
    assert!(run.walks[rank as usize].left > 0, "rank {rank} has not begun another step");
}

/// The next rank that acts passes no step.
fn toss_against_passing(run: &mut Run) {
    run.cluster.rng = (0..).map(Rng::new).find(|rng| rng.clone().below(2) == 1).expect("a coin");
}

#[test]
fn nothing_is_released_before_the_set_is_known_and_all_of_it_is_here() {
    let plan = plan(&[60, 60], "p3", 20, 3, stragglers(Cutoff::Backup { ranks: 1 }, 2));
    let mut run = Run::new(&plan, 64, &[1, 1, 1], 1, 4);
    (0..3).for_each(|rank| enter(&mut run, rank));
    run.cluster.nodes.iter_mut().for_each(|node| node.log.clear());
    // All of rank 0, and the last layer of the others: no rank but 0 is complete.
    give(&mut run, 0);
    run.act(1);
    run.act(2);
    run.cluster.run();
    let broadcast = |run: &Run| {
        run.cluster.nodes.iter().flat_map(|it| &it.log).any(|it| it.kind == FrameKind::Broadcast)
    };
    assert!(!broadcast(&run), "the last layer is here from all ranks, and nobody knows who is in");
    assert!(run.cluster.nodes.iter().all(|node| node.decided.is_empty()));
    give(&mut run, 2);
    run.cluster.run();
    assert!(broadcast(&run));
    for node in &run.cluster.nodes {
        assert_eq!(node.decided, [(Step(1), vec![Rank(0), Rank(2)])]);
    }
    // The results wait for the late rank, whose memory of the first layer is not there yet.
    assert!(run.cluster.nodes[0].completed.contains(&Step(1)));
    assert!(!run.cluster.nodes[1].completed.contains(&Step(1)));
    run.cluster.nodes[1].log.clear();
    give(&mut run, 1);
    run.cluster.run();
    assert_eq!(run.cluster.nodes[1].left_out, [(Step(1), true)]);
    let pushes = run.cluster.nodes[1].log.iter().filter(|it| it.kind == FrameKind::Push).count();
    assert_eq!(pushes, 0, "what comes too late is not sent");
    (0..3).for_each(|rank| run.act(rank));
    run.cluster.run();
    run.check(2);
}

#[test]
fn a_rank_is_behind_in_the_first_steps_where_the_results_of_all_lanes_are_here() {
    for lanes_here in 1..=2 {
        let cut = stragglers(Cutoff::Backup { ranks: 1 }, 2);
        let plan = plan(&[60, 60], "p3", 20, 3, cut);
        let mut run = Run::with_lanes(&plan, 2, None, 64, &[1, 1, 1], 1, 4);
        (0..3).for_each(|rank| enter(&mut run, rank));
        [0, 2].into_iter().for_each(|rank| give(&mut run, rank));
        run.run_lanes(lanes_here);
        assert_eq!(run.cluster.nodes[1].decided, [(Step(1), vec![Rank(0), Rank(2)])]);
        give(&mut run, 1);
        run.run_lanes(lanes_here);
        assert_eq!(run.cluster.nodes[1].left_out, [(Step(1), lanes_here == 2)]);
        run.go();
        run.check(2);
    }
}

#[test]
fn a_rank_that_sleeps_takes_the_results_it_missed_and_is_in_again() {
    let plan = plan(&[60, 60], "p3", 20, 3, stragglers(Cutoff::Backup { ranks: 1 }, 2));
    let mut run = Run::new(&plan, 64, &[1, 1, 1], 6, 9);
    (0..3).for_each(|rank| enter(&mut run, rank));
    for step in 1..=3_u64 {
        for rank in [0, 1] {
            give(&mut run, rank);
        }
        run.cluster.run();
        let newest = run.cluster.nodes[0].decided.last().map(|(step, _)| step.0);
        assert_eq!(newest, Some(step));
        (0..2).for_each(|rank| enter(&mut run, rank));
    }
    (0..2).for_each(|rank| give(&mut run, rank));
    run.cluster.run();
    assert_eq!(run.cluster.nodes[0].decided.len(), 3, "two steps ahead, and no further");
    while run.cluster.nodes[0].decided.len() < 4 || run.walks[2].step < 4 {
        toss_against_passing(&mut run);
        run.act(2);
        run.cluster.run();
    }
    // Together again: the slowest of step 5 is now another one.
    (0..2).for_each(|rank| enter(&mut run, rank));
    give(&mut run, 2);
    run.cluster.run();
    if run.walks[2].step == 4 {
        toss_against_passing(&mut run);
        enter(&mut run, 2);
        give(&mut run, 2);
    }
    give(&mut run, 1);
    run.cluster.run();
    let set = run.cluster.nodes[0].decided.last().cloned();
    assert_eq!(set, Some((Step(5), vec![Rank(1), Rank(2)])));
    run.go();
    run.check(2);
}

#[test]
fn other_rules_are_refused_with_the_reason() {
    let p3 = Setting::named("p3", None, 0).expect("p3");
    let refused = |strategy: &str, cutoff: Cutoff, ahead: u32, update: Update, world: u32| {
        let strategy = Setting::named(strategy, None, 0).expect("a strategy");
        let strategy = Setting { synchrony: stragglers(cutoff, ahead), ..strategy };
        let plan = Plan::build(tensors(&[10]), strategy, update, world);
        plan.expect_err("a refusal").to_string()
    };
    let backup = Cutoff::Backup { ranks: 1 };
    assert!(refused("p3", backup, 1, Update::Server, 3).contains("update=worker"));
    assert!(refused("kvstore", backup, 1, Update::Worker, 3).contains("pulls"));
    assert!(refused("ring", backup, 1, Update::Worker, 3).contains("contributions of all ranks"));
    assert!(refused("p3", Cutoff::Backup { ranks: 3 }, 1, Update::Worker, 3).contains("3 of 3"));
    assert!(refused("p3", backup, 0, Update::Worker, 3).contains("ahead_steps"));
    let deadline = Cutoff::Deadline { percent: 100 };
    assert!(refused("p3", deadline, 1, Update::Worker, 3).contains("over 100%"));
    let fine = Setting { synchrony: stragglers(backup, 1), ..p3 };
    assert!(fine.validate(Update::Worker, 2).is_ok());
}
