//! Commands of the ranks that train to dedicated servers, one a step: how to update, or which state to send
//! or to take. All ranks give the same one.
//!
//! Bytes: a tag; for updates then the rules, each with the run of tensors that share it. All numbers are
//! little endian.

use super::server_optimizer::{StateKind, StateRead, UpdateRule};
use gradlane_codec::{AdamOptions, SgdOptions};
use gradlane_engine::Plan;
use gradlane_units::TensorId;

/// How a dedicated server handles a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ServerCommand {
    /// Contributions are gradients: update by these rules.
    Update(Vec<(TensorId, UpdateRule)>),
    /// Send state in place of parameters.
    ReadState(StateRead),
    /// Contributions are state: take it; parameters stay.
    WriteState(StateWrite),
    /// Contributions, of rank 0 alone, are these tensors' parameters: take them.
    WriteParameters(Vec<TensorId>),
}

/// State that a step's contributions are, in the parts of [`StateRead`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateWrite {
    /// Kind and half.
    pub state: StateRead,
    /// Whether all optimizer state is forgotten before.
    pub clear: bool,
}

const UPDATE: u8 = 0;
const READ_STATE: u8 = 1;
const WRITE_STATE: u8 = 2;
const WRITE_PARAMETERS: u8 = 3;
const SGD: u8 = 0;
const ADAM: u8 = 1;
const KINDS: [StateKind; 3] = [StateKind::MomentumBuffer, StateKind::ExpAvg, StateKind::ExpAvgSq];

impl ServerCommand {
    /// Returns the bytes that travel.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            ServerCommand::Update(rows) => {
                bytes.push(UPDATE);
                let follows = |one: &(TensorId, UpdateRule), next: &(TensorId, UpdateRule)| {
                    one.1 == next.1 && one.0 .0.checked_add(1) == Some(next.0 .0)
                };
                // Groups may be in another order on each rank.
                let mut rows = rows.clone();
                rows.sort_by_key(|row| row.0);
                for run in rows.chunk_by(follows) {
                    bytes.extend(run[0].0 .0.to_le_bytes());
                    bytes.extend((run.len() as u32).to_le_bytes());
                    encode_rule(&run[0].1, &mut bytes);
                }
            }
            ServerCommand::ReadState(read) => bytes.extend(encode_read(READ_STATE, *read)),
            ServerCommand::WriteState(StateWrite { state, clear }) => {
                bytes.extend(encode_read(WRITE_STATE, *state));
                bytes.push(u8::from(*clear));
            }
            ServerCommand::WriteParameters(tensors) => {
                bytes.push(WRITE_PARAMETERS);
                bytes.extend(tensors.iter().flat_map(|tensor| tensor.0.to_le_bytes()));
            }
        }
        bytes
    }

    /// Reads what another rank has sent; `None` where the bytes are no command for the plan.
    pub(crate) fn decode(bytes: &[u8], plan: &Plan) -> Option<ServerCommand> {
        let known = |tensor: u32| ((tensor as usize) < plan.tensors.len()).then_some(tensor);
        let mut reader = Reader(bytes);
        let command = match reader.byte()? {
            UPDATE => {
                let mut rows = Vec::new();
                while !reader.0.is_empty() {
                    let (first, count) = (reader.u32()?, reader.u32()?);
                    let rule = decode_rule(&mut reader)?;
                    known(first.checked_add(count)?.checked_sub(1)?)?;
                    // A plan's tensors at most, as often as there are runs: a few bytes ask for no more.
                    rows.extend((first..first + count).map(|tensor| (TensorId(tensor), rule)));
                    if rows.len() > plan.tensors.len() {
                        return None;
                    }
                }
                ServerCommand::Update(rows)
            }
            READ_STATE => ServerCommand::ReadState(decode_read(&mut reader)?),
            WRITE_STATE => {
                let (state, clear) = (decode_read(&mut reader)?, reader.flag()?);
                ServerCommand::WriteState(StateWrite { state, clear })
            }
            WRITE_PARAMETERS => {
                let mut tensors = Vec::new();
                while !reader.0.is_empty() {
                    tensors.push(TensorId(known(reader.u32()?)?));
                }
                ServerCommand::WriteParameters(tensors)
            }
            _ => return None,
        };
        reader.0.is_empty().then_some(command)
    }

    /// Returns the first difference to another command in words: this one's side, and the other's.
    pub(crate) fn difference(&self, other: &ServerCommand, plan: &Plan) -> [String; 2] {
        if let (ServerCommand::WriteParameters(ours), ServerCommand::WriteParameters(theirs)) =
            (self, other)
        {
            let only = |mine: &[TensorId], others: &[TensorId]| {
                let one = mine.iter().find(|it| !others.contains(it));
                one.map(|it| format!(", {:?} among them", plan.tensor(*it).spec.name))
                    .unwrap_or_default()
            };
            return [self.describe() + &only(ours, theirs), other.describe() + &only(theirs, ours)];
        }
        let (ServerCommand::Update(ours), ServerCommand::Update(theirs)) = (self, other) else {
            return [self.describe(), other.describe()];
        };
        let Some((one, two)) = ours.iter().zip(theirs).find(|(one, two)| one != two) else {
            return [ours, theirs].map(|rows| format!("settings of {} tensors", rows.len()));
        };
        let settings = |(tensor, rule): &(TensorId, UpdateRule), other: &UpdateRule| {
            let name = &plan.tensor(*tensor).spec.name;
            let (mine, others) = (rule.settings(), other.settings());
            let differs = mine.iter().filter(|setting| !others.contains(setting));
            let texts: Vec<String> = differs.map(|(key, value)| format!("{key}={value}")).collect();
            format!("{} of {name:?}", texts.join(", "))
        };
        [settings(one, &two.1), settings(two, &one.1)]
    }

    fn describe(&self) -> String {
        match self {
            ServerCommand::Update(_) => "a step of training".into(),
            ServerCommand::ReadState(read) => {
                format!("optimizer state to save ({})", read.kind.name())
            }
            ServerCommand::WriteState(write) => {
                format!("loaded optimizer state ({})", write.state.kind.name())
            }
            ServerCommand::WriteParameters(tensors) => {
                format!("{} parameters that its program has changed", tensors.len())
            }
        }
    }
}

impl UpdateRule {
    /// Returns all settings by torch's names, for people.
    fn settings(&self) -> Vec<(&'static str, String)> {
        let number = |value: f64| format!("{value}");
        match *self {
            UpdateRule::Sgd(it) => vec![
                ("optimizer", "SGD".into()),
                ("lr", number(it.lr)),
                ("momentum", number(it.momentum)),
                ("dampening", number(it.dampening)),
                ("weight_decay", number(it.weight_decay)),
                ("nesterov", it.nesterov.to_string()),
                ("maximize", it.maximize.to_string()),
            ],
            UpdateRule::Adam { options: it, steps } => vec![
                ("optimizer", "Adam".into()),
                ("lr", number(it.lr)),
                ("betas[0]", number(it.beta1)),
                ("betas[1]", number(it.beta2)),
                ("eps", number(it.eps)),
                ("weight_decay", number(it.weight_decay)),
                ("decoupled_weight_decay", it.decoupled_weight_decay.to_string()),
                ("maximize", it.maximize.to_string()),
                ("step", steps.to_string()),
            ],
        }
    }
}

fn encode_read(tag: u8, StateRead { kind, part }: StateRead) -> [u8; 3] {
    let kind = KINDS.iter().position(|one| *one == kind).unwrap_or(KINDS.len());
    [tag, kind as u8, part]
}

fn decode_read(reader: &mut Reader) -> Option<StateRead> {
    let kind = *KINDS.get(usize::from(reader.byte()?))?;
    Some(StateRead { kind, part: u8::from(reader.flag()?) })
}

fn encode_rule(rule: &UpdateRule, bytes: &mut Vec<u8>) {
    let mut numbers = |tag: u8, flags: [bool; 2], numbers: &[f64]| {
        bytes.extend([tag, u8::from(flags[0]), u8::from(flags[1])]);
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    };
    match *rule {
        UpdateRule::Sgd(it) => numbers(
            SGD,
            [it.nesterov, it.maximize],
            &[it.lr, it.momentum, it.dampening, it.weight_decay],
        ),
        UpdateRule::Adam { options: it, steps } => {
            numbers(
                ADAM,
                [it.decoupled_weight_decay, it.maximize],
                &[it.lr, it.beta1, it.beta2, it.eps, it.weight_decay],
            );
            bytes.extend(steps.to_le_bytes());
        }
    }
}

fn decode_rule(reader: &mut Reader) -> Option<UpdateRule> {
    let (tag, first, maximize) = (reader.byte()?, reader.flag()?, reader.flag()?);
    let rule = match tag {
        SGD => UpdateRule::Sgd(SgdOptions {
            lr: reader.f64()?,
            momentum: reader.f64()?,
            dampening: reader.f64()?,
            weight_decay: reader.f64()?,
            nesterov: first,
            maximize,
        }),
        ADAM => UpdateRule::Adam {
            options: AdamOptions {
                lr: reader.f64()?,
                beta1: reader.f64()?,
                beta2: reader.f64()?,
                eps: reader.f64()?,
                weight_decay: reader.f64()?,
                decoupled_weight_decay: first,
                maximize,
            },
            steps: u64::from_le_bytes(reader.take()?),
        },
        _ => return None,
    };
    rule.validate().ok().map(|()| rule)
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take().map(|[byte]| byte)
    }

    fn flag(&mut self) -> Option<bool> {
        self.byte().filter(|&byte| byte < 2).map(|byte| byte == 1)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn f64(&mut self) -> Option<f64> {
        self.take().map(f64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradlane_engine::{Roles, Strategy, TensorKind, TensorSpec, Update};
    use gradlane_units::Dtype;
    use proptest::prelude::{
        any, prop_assert, prop_assert_eq, prop_assert_ne, prop_oneof, proptest, Just,
    };
    use proptest::strategy::Strategy as _;

    fn plan(tensors: u32) -> Plan {
        let spec = |index: u32| TensorSpec {
            name: format!("layer{index}"),
            numel: 10,
            dtype: Dtype::F32,
            kind: TensorKind::Parameter,
        };
        let strategy = Strategy::named("p3", None, 0).expect("a strategy");
        let tensors = (0..tensors).map(spec).collect();
        Plan::build_for(tensors, strategy, Update::Server, Roles::dedicated(2, 1)).expect("a plan")
    }

    fn rule() -> impl proptest::strategy::Strategy<Value = UpdateRule> {
        let number = || prop_oneof![Just(0.1_f64), Just(f64::MIN_POSITIVE), 0.0..1.0_f64];
        let sgd = (number(), number(), number(), number(), any::<bool>()).prop_map(
            |(lr, momentum, dampening, weight_decay, maximize)| {
                let nesterov = false;
                UpdateRule::Sgd(SgdOptions {
                    lr,
                    momentum,
                    dampening,
                    weight_decay,
                    nesterov,
                    maximize,
                })
            },
        );
        let adam = (number(), number(), number(), any::<bool>(), 0..3_u64).prop_map(
            |(lr, beta1, eps, decoupled_weight_decay, steps)| UpdateRule::Adam {
                options: AdamOptions {
                    beta1,
                    eps,
                    decoupled_weight_decay,
                    ..AdamOptions::with_lr(lr)
                },
                steps,
            },
        );
        prop_oneof![sgd, adam]
    }

    #[test]
    fn parameters_that_one_program_alone_has_changed_are_named() {
        let command = |ids: &[u32]| {
            ServerCommand::WriteParameters(ids.iter().map(|id| TensorId(*id)).collect())
        };
        let changed = "parameters that its program has changed";
        assert_eq!(
            command(&[0, 1]).difference(&command(&[1, 2]), &plan(3)),
            ["layer0", "layer2"].map(|it| format!("2 {changed}, {it:?} among them"))
        );
        assert_eq!(
            command(&[0]).difference(&command(&[0, 2]), &plan(3)),
            [format!("1 {changed}"), format!("2 {changed}, \"layer2\" among them")]
        );
    }

    proptest! {
        #[test]
        fn commands_arrive_as_they_were_sent(
            rules in proptest::collection::vec((rule(), 1..4_usize), 0..6),
            part in 0..2_u8,
            clear in any::<bool>(),
            kind in 0..3_usize,
            cut in any::<proptest::sample::Index>(),
        ) {
            let runs = rules.iter().flat_map(|&(rule, count)| std::iter::repeat_n(rule, count));
            let rows: Vec<_> = (0..).map(TensorId).zip(runs).collect();
            let plan = plan(rows.len().max(3) as u32);
            let state = StateRead { kind: KINDS[kind], part };
            let shuffled = rows.iter().rev().copied().collect();
            prop_assert_eq!(
                ServerCommand::Update(shuffled).encode(),
                ServerCommand::Update(rows.clone()).encode()
            );
            for command in [
                ServerCommand::Update(rows),
                ServerCommand::ReadState(state),
                ServerCommand::WriteState(StateWrite { state, clear }),
                ServerCommand::WriteParameters(vec![TensorId(2), TensorId(0)]),
            ] {
                let bytes = command.encode();
                // What the engine takes at most.
                prop_assert!(bytes.len() <= 64 * (1 + plan.tensors.len()));
                prop_assert_eq!(ServerCommand::decode(&bytes, &plan), Some(command.clone()));
                let longer = [&bytes[..], &[0]].concat();
                prop_assert_ne!(ServerCommand::decode(&longer, &plan), Some(command.clone()));
                let shorter = &bytes[..cut.index(bytes.len())];
                prop_assert_ne!(ServerCommand::decode(shorter, &plan), Some(command));
            }
        }

        #[test]
        fn any_bytes_are_a_command_of_the_plan_or_none(
            bytes in proptest::collection::vec(prop_oneof![0..4_u8, any::<u8>()], 0..120),
        ) {
            let plan = plan(3);
            match ServerCommand::decode(&bytes, &plan) {
                Some(ServerCommand::Update(rows)) => {
                    prop_assert!(rows.len() <= 3);
                    prop_assert!(rows.iter().all(|(it, rule)| it.0 < 3 && rule.validate().is_ok()));
                }
                Some(ServerCommand::WriteParameters(tensors)) => {
                    prop_assert!(tensors.iter().all(|it| it.0 < 3));
                }
                _ => {}
            }
        }
    }
}
