//! Updates on ranks that only serve, over loopback: the bytes of owners that train, with state that goes
//! out and comes in, and parameters that the program changes; commands that differ are named.

use crate::support::{
    self, deadline, each_rank, never, specs, tensor, world, Tensor, TEST_TIMEOUT,
};
use gradlane_engine::{Plan, Roles, Strategy, Update};
use gradlane_net::{
    AdamOptions, Channel, ChannelError, SgdOptions, StateKind, StateRead, StateWrite, UpdateRule,
};
use gradlane_units::{Dtype, Step, TensorId};

const WORKERS: u32 = 2;

fn plan(strategy: &str, roles: Roles) -> String {
    let model = vec![
        tensor("weight", 2_500, Dtype::F32),
        tensor("empty", 0, Dtype::F32),
        tensor("brain", 1_001, Dtype::Bf16),
    ];
    let strategy = Strategy::named(strategy, Some(700), 7).expect("a strategy");
    let plan = Plan::build_for(model, strategy, Update::Server, roles).expect("a plan");
    serde_json::to_string(&plan).expect("JSON")
}

fn sgd(lr: f64) -> UpdateRule {
    UpdateRule::Sgd(SgdOptions {
        lr,
        momentum: 0.9,
        dampening: 0.0,
        weight_decay: 0.01,
        nesterov: true,
        maximize: false,
    })
}

/// A rank that trains, on servers that train or on dedicated ones.
struct Rank {
    channel: Channel,
    dedicated: bool,
    step: u64,
    trained: u64,
    parameters: Vec<Tensor>,
}

impl Rank {
    fn start(channel: Channel) -> Rank {
        let parameters = support::run_step(&channel, 0).expect("step 0");
        let dedicated = channel.plan().dedicated_servers > 0;
        let mut rank = Rank { channel, dedicated, step: 0, trained: 0, parameters };
        rank.register();
        rank
    }

    fn register(&mut self) {
        for (index, parameter) in self.parameters.iter_mut().enumerate() {
            let memory = parameter.memory();
            self.channel.set_parameter(TensorId(index as u32), memory).expect("a parameter");
        }
    }

    /// Runs a step with these gradients, or without where there is none.
    fn step(
        &mut self,
        prepare: impl FnOnce(&Channel) -> Result<(), ChannelError>,
        mut given: Vec<(bool, Tensor)>,
    ) -> Result<(), ChannelError> {
        self.step += 1;
        let step = Step(self.step);
        self.channel.step_begin(step)?;
        prepare(&self.channel)?;
        for (index, (gives, values)) in given.iter_mut().enumerate() {
            let (tensor, memory) = (TensorId(index as u32), values.memory());
            match gives {
                true => self.channel.gradient_ready(tensor, step, memory)?,
                false => self.channel.tensor_absent(tensor, step, memory)?,
            }
        }
        self.channel.step_end(step)?;
        let ended = self.channel.wait_step(step, &mut deadline());
        if ended == Err(ChannelError::Interrupted) {
            // Nothing may touch the tensors when they are dropped.
            self.channel.abort("a test ran out of patience");
        }
        ended
    }

    fn train(&mut self, rule: UpdateRule) -> Result<(), ChannelError> {
        // Steps that hand something over are none of training.
        self.trained += 1;
        let (rank, step) = (self.channel.rank().0, self.trained);
        let specs = specs(&self.channel);
        // One tensor has a gradient on one rank alone.
        let gradient =
            |(index, spec)| (index != 2 || rank == 1, support::gradient(rank, step, index, spec));
        let given = specs.iter().enumerate().map(gradient).collect();
        let rows: Vec<_> = (0..3).rev().map(|tensor| (TensorId(tensor), rule)).collect();
        self.step(|channel| channel.set_optimizer(&rows), given)
    }

    fn room(&self) -> Vec<Tensor> {
        self.parameters.iter().map(|it| Tensor { bytes: vec![0; it.bytes.len()] }).collect()
    }

    /// Reads a part of a state, tensor by tensor, as it travels.
    fn read(&mut self, kind: StateKind, part: u8) -> Vec<Tensor> {
        let own = std::mem::take(&mut self.parameters);
        self.parameters = own.iter().map(|it| Tensor { bytes: vec![0; it.bytes.len()] }).collect();
        self.register();
        let rank = self.channel.rank().0;
        let given = self.room().into_iter().enumerate();
        let given = given.map(|(index, it)| (index as u32 % WORKERS == rank, it)).collect();
        let read = StateRead { kind, part };
        self.step(|channel| channel.read_state(read), given).expect("the state");
        let found = std::mem::replace(&mut self.parameters, own);
        self.register();
        found
    }

    /// Goes back to parameters and states: `(kind, lower parts, upper parts)`.
    fn go_back(&mut self, parameters: &[Vec<u8>], states: &[(StateKind, [Vec<Tensor>; 2])]) {
        for (own, bytes) in self.parameters.iter_mut().zip(parameters) {
            own.bytes.clone_from(bytes);
        }
        let first = self.channel.rank().0 == 0;
        let given = |tensors: &[Tensor]| -> Vec<(bool, Tensor)> {
            tensors.iter().map(|it| (first, Tensor { bytes: it.bytes.clone() })).collect()
        };
        if self.dedicated {
            let tensors: Vec<_> = (0..3).map(TensorId).collect();
            let values = given(&self.parameters);
            // Ranks other than 0 get its values.
            if !first {
                self.parameters.iter_mut().for_each(|it| it.bytes.fill(3));
            }
            self.step(|channel| channel.write_parameters(&tensors), values).expect("parameters");
            let mut clear = true;
            for (kind, parts) in states {
                for (part, values) in parts.iter().enumerate() {
                    let state = StateRead { kind: *kind, part: part as u8 };
                    let write = StateWrite { state, clear: std::mem::take(&mut clear) };
                    let mut values = given(values);
                    // Whole values are in the first part.
                    values[0].0 &= part == 0;
                    self.step(|channel| channel.write_state(write), values).expect("state");
                }
            }
            return;
        }
        self.channel.clear_state().expect("no state");
        for (kind, [lower, upper]) in states {
            for index in [0, 2] {
                let halves = |it: &Tensor| -> Vec<u16> {
                    let (halves, _) = it.bytes.as_chunks();
                    halves.iter().map(|half| u16::from_ne_bytes(*half)).collect()
                };
                let (low, high) = (halves(&lower[index]), halves(&upper[index]));
                let values: Vec<f32> = match index {
                    0 => {
                        let (words, _) = lower[0].bytes.as_chunks();
                        words.iter().map(|word| f32::from_ne_bytes(*word)).collect()
                    }
                    _ => {
                        let word =
                            |(low, high): (&u16, &u16)| u32::from(*low) | u32::from(*high) << 16;
                        low.iter().zip(&high).map(word).map(f32::from_bits).collect()
                    }
                };
                let tensor = TensorId(index as u32);
                self.channel.load_state(tensor, *kind, &values).expect("state");
            }
        }
    }

    fn snapshot(&self) -> Vec<Vec<u8>> {
        self.parameters.iter().map(|it| it.bytes.clone()).collect()
    }
}

/// Trains, goes back and trains on; the parameters after each step.
fn train(
    channel: Channel,
    rule: impl Fn(u64) -> UpdateRule,
    kinds: &[StateKind],
) -> Vec<Vec<Vec<u8>>> {
    let mut rank = Rank::start(channel);
    let mut all = Vec::new();
    let mut kept = Vec::new();
    for number in 0..6_u64 {
        // After the fourth step those of the third come again.
        let taken = if number < 4 { number } else { number - 2 };
        rank.train(rule(taken)).expect("a step");
        all.push(rank.snapshot());
        if number == 1 {
            kept = kinds.iter().map(|&it| (it, [0, 1].map(|part| rank.read(it, part)))).collect();
        }
        if number == 3 {
            rank.go_back(&all[1], &kept);
            all.push(rank.snapshot());
        }
    }
    rank.channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    all
}

#[test]
fn dedicated_servers_update_as_owners_that_train_do() {
    let adam = |taken| UpdateRule::Adam {
        options: AdamOptions {
            weight_decay: 0.1,
            decoupled_weight_decay: true,
            ..AdamOptions::with_lr(0.01 / (taken + 1) as f64)
        },
        steps: taken,
    };
    let momentum = |taken: u64| sgd(0.1 / (taken + 1) as f64);
    let means = [StateKind::ExpAvg, StateKind::ExpAvgSq];
    type Rule = fn(u64) -> UpdateRule;
    let rules: [(Rule, &[StateKind]); 2] =
        [(adam, &means), (momentum, &[StateKind::MomentumBuffer])];
    for (rule, kinds) in rules.map(|(rule, kinds)| (rule, kinds.to_vec())) {
        let run = |strategy: &str, roles: Roles| {
            let kinds = kinds.clone();
            let found =
                each_rank(world(roles.world_size(), &plan(strategy, roles)), move |channel| {
                    if channel.rank().0 < WORKERS {
                        return train(channel, rule, &kinds);
                    }
                    channel.finish(TEST_TIMEOUT, &mut deadline()).expect("an orderly end");
                    Vec::new()
                });
            assert!(found[0] == found[1], "{strategy}");
            found[0].clone()
        };
        let expected = run("p3", Roles::first(WORKERS, 2));
        assert!(expected[1] == expected[4], "it went back");
        assert!(expected[2] != expected[5], "gradients are others");
        for (strategy, servers) in [("p3", 2), ("kvstore", 1), ("deferred-pull", 3)] {
            let found = run(strategy, Roles::dedicated(WORKERS, servers));
            assert!(found == expected, "{strategy}");
        }
    }
}

#[test]
fn settings_that_differ_are_named_on_all_ranks() {
    let channels = world(3, &plan("p3", Roles::dedicated(2, 1)));
    let errors = each_rank(channels, |channel| {
        let number = channel.rank().0;
        if number == 2 {
            return channel.finish(TEST_TIMEOUT, &mut deadline()).expect_err("no orderly end");
        }
        let mut rank = Rank::start(channel);
        (1..=2)
            .find_map(|step| rank.train(sgd(0.1 * f64::from(step * number).max(1.0))).err())
            .expect("an error")
    });
    for error in errors {
        let text = error.to_string();
        let named = ["rank 0", "rank 1", "lr=0.1", "lr=0.2", "\"weight\"", "step 2"];
        assert!(named.iter().all(|name| text.contains(name)), "{text}");
    }
}

#[test]
fn state_is_written_to_dedicated_servers_alone() {
    let plan = plan("p3", Roles::first(1, 1));
    each_rank(world(1, &plan), |channel| {
        let state = StateRead { kind: StateKind::ExpAvg, part: 0 };
        let refused = [
            channel.write_state(StateWrite { state, clear: false }),
            channel.write_parameters(&[TensorId(0)]),
        ];
        for error in refused {
            let text = error.expect_err("refused").to_string();
            assert!(text.contains("without dedicated servers"), "{text}");
        }
        channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
    });
}
