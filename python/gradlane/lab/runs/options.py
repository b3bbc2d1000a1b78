"""The options of a lab run, checked before anything is built."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradlane.lab.cluster.limits import NODES_MAX, check_port_rate
from gradlane.lab.runs.strategy import LabStrategy, parse_strategies
from gradlane.lab.workloads import NAMES, REPLAY_NAMES, SIMULATED_NAMES, WorkloadSpec
from gradlane.planning.simulation.lists import parse_rates
from gradlane.planning.simulation.straggler import StragglerSpec, parse_straggler
from gradlane.training.options.cluster_shape import ClusterShape
from gradlane.training.options.codec_choice import check_codecs, codec_rules, unused_codec_option
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.compatibility import Feature
from gradlane.training.options.option_fields import (
    check_options,
    on_command_line,
    option,
    option_rules,
    read_float,
    read_int,
)
from gradlane.training.options.options import Options
from gradlane.training.options.strategy import RING, Strategy


@dataclass(frozen=True, kw_only=True)
class LabOptions(ClusterShape):
    """The options of a lab run. All rates and times are nominal."""

    workload: str = option(
        doc="resnet50, vgg19, gpt2_small, digits-cnn, ...; a wrong name lists all."
    )
    strategies: Sequence[LabStrategy] = option(
        doc="Comma-separated: none, ddp-gloo[:BUCKET_MB], ddp-gloo+CODEC, ddp-gloo+fp16, "
        "ddp-gloo+bfloat16, ddp-gloo+powersgd, ddp-gather[:BUCKET_MB], p3, slicing, wfbp, kvstore, "
        "deferred-pull, ring, asgd, poseidon, sfb, adam, auto[:any-rounding], "
        "hierarchical[-shared][:collective]; p3/sealed: with sealed connections; p3/lanes=2: over "
        "two connections of a pair.",
        name="strategy",
        read=parse_strategies,
        text="none,ddp-gloo:25,p3",
    )
    workers: int = option(4, "Ranks that train.", least=2, most=NODES_MAX)
    rates_bps: Sequence[int] = option(
        doc="Nominal rate of every port; several comma-separated.",
        name="rate",
        read=parse_rates,
        text="4gbit",
    )
    dilation: float = option(
        10.0, "Run this many times slower than nominal.", least=0.01, most=10_000
    )
    repeat: int = option(1, "Run all strategies this often.", least=1, most=10_000)
    steps: int = option(8, "Measured steps of a run.", least=1, most=10_000_000)
    warmup: int = option(2, "Steps before them.", least=0, most=10_000_000)
    """Rank 0 has its first values at once and the others after they were sent to each, so ranks
    come together in the third step only."""
    slice_elems: int | None = option(
        None,
        option_rules(Strategy)["slice_elems"].doc,
        least=1,
        most=2**31,
        read=read_int,
    )
    codec: str = option(
        RAW,
        "How gradients of gradlane's strategies travel, such as qsgd:bits=8, or by pattern: "
        "'*.bias=raw;*=qsgd:bits=4'.",
    )
    seed: int = option(0, "Of model, batches and gradients.", least=0, most=2**31 - 1)
    profile_path: Path | None = option(
        None, "A profile file in place of the workload's own times.", name="profile", read=Path
    )
    batch_time_s: float | None = option(
        None, "Nominal compute time of a batch.", above=0, read=read_float
    )
    paced: bool = True
    """Whether real workloads are stretched to fixed times."""
    trace_path: Path | None = option(
        None,
        "Write the timeline of a single run of gradlane's, for Perfetto; in nominal time.",
        name="trace",
        read=Path,
    )
    further_warmup: Mapping[str, int] = field(default_factory=dict)
    """More steps before the measured ones, by the strategy's text."""
    serving: int = option(0, least=0, most=NODES_MAX)
    straggler: StragglerSpec | None = option(
        None,
        "Stop a rank in bursts, such as rank=3,share=0.1,burst=500ms.",
        read=parse_straggler,
    )
    clip_norm: float | None = option(
        None,
        "Clip to this norm: gradlane's by the session, others by torch.",
        name="clip",
        above=0,
        read=read_float,
    )
    """Where the accelerator is replayed the norm binds nothing, so that gradients can be verified;
    others clip in no time, as they would there, and gradlane adds up squares on the host, as it
    does with any accelerator."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ValueError: an option is out of its range; the message names it.
        """
        if self.workload in SIMULATED_NAMES:
            raise ValueError(
                f"{self.workload} is too large to be replayed on one machine; ask `gradlane whatif "
                f"{self.workload}`, or give its shapes on a smaller scale with --profile"
            )
        if self.workload not in NAMES:
            raise ValueError(
                f"there is no workload {self.workload!r}; there are: {', '.join(NAMES)}"
            )
        if not self.strategies:
            raise ValueError("name at least one strategy")
        if not self.rates_bps or min(self.rates_bps) <= 0:
            raise ValueError("name at least one rate, above 0")
        check_options(self, on_command_line)
        self.check_shape()
        if self.straggler is not None and not 0 <= self.straggler.rank < self.workers:
            raise ValueError(
                f"the straggler is rank {self.straggler.rank}, but there are {self.workers} workers"
            )
        self._check_nodes()
        self._check_serving()
        for rate_bps in self.rates_bps:
            check_port_rate(round(rate_bps / self.dilation))
        for strategy in self.strategies:
            if strategy.rounds is not None and self.steps % strategy.rounds.steps:
                each = strategy.rounds.steps
                raise ValueError(
                    f"--steps {self.steps} with {strategy.text}: a round has {each} steps, whose "
                    f"mean is the step time; give --steps {each * -(-self.steps // each)}"
                )
        factored = next((one.text for one in self.strategies if one.sends_factors), None)
        if self.workload not in REPLAY_NAMES and factored is not None:
            raise ValueError(
                f"strategy {factored} is for replayed models, and {self.workload} computes: its "
                "layers have forwards of their own, from which no factors can be taken"
            )
        check_codecs(codec_rules(self.codec))
        self._check_sessions()
        traced = [strategy for strategy in self.strategies if strategy.family == "gradlane"]
        runs = len(traced) * len(self.rates_bps) * self.repeat
        if self.trace_path is not None and runs != 1:
            raise ValueError(
                f"a timeline shows one run of gradlane's and these are {runs}: name one of its "
                "strategies and one rate, and repeat once, such as --strategy none,p3 --rate 4gbit"
            )
        if self.clip_norm is not None:
            self._check_going_with(Feature.CLIP, "--clip")
        if self.profile_path is not None and not self.profile_path.is_file():
            raise ValueError(
                f"there is no profile file {self.profile_path}; `gradlane profile --json "
                "profile.json train.py` makes one"
            )

    def _check_sessions(self) -> None:
        """Check that sessions take their options, and that there are some to take them."""
        ours = [one for one in self.strategies if one.family == "gradlane"]
        of_sessions = {
            "slice-elems": self.slice_elems is not None,
            "codec": codec_rules(self.codec) != RAW,
            "servers": self.servers is not None or self.serving > 0,
        }
        unused = [option for option, is_given in of_sessions.items() if is_given]
        if unused and not ours:
            raise ValueError(
                f"--{unused[0]} has no effect without one of gradlane's strategies: leave it out, "
                "or add p3 (DDP's gradients are encoded by ddp-gloo+CODEC)"
            )
        has_ring = any(one.setting == RING or one.any_rounding for one in ours)
        reason = unused_codec_option(codec_rules(self.codec), has_ring=has_ring)
        if reason:
            raise ValueError(reason)
        for one in ours:
            Options.of(
                **one.session_keywords(self.slice_elems), codec=self.codec, servers=self.servers
            )

    def _check_nodes(self) -> None:
        each = self.ranks_per_node
        if why := self.needs_no_network:
            raise ValueError(why)
        alone = next((one.text for one in self.strategies if one.local.mode != "off"), None)
        if alone is not None and each == 1:
            raise ValueError(
                f"strategy {alone} adds up on nodes, and each has one rank: give --ranks-per-node 2"
            )

    def _check_serving(self) -> None:
        if not self.serving:
            return
        if self.ranks > NODES_MAX:
            raise ValueError(
                f"{self.workers} workers and {self.serving} ranks that only serve are more than "
                f"{NODES_MAX} nodes"
            )
        self._check_going_with(Feature.SERVING, "ranks that only serve")

    def _check_going_with(self, feature: Feature, words: str) -> None:
        for one in self.strategies:
            why = one.refusal_of(feature, words)
            if why:
                raise ValueError(f"strategy {one.text}: {why}")

    @property
    def workload_spec(self) -> WorkloadSpec:
        """The workload as ranks build it, with an absolute path."""
        path = None if self.profile_path is None else os.path.abspath(self.profile_path)
        return WorkloadSpec(
            self.workload, self.seed, self.dilation, path, self.batch_time_s, self.paced
        )

    @property
    def nodes(self) -> int:
        """Nodes of the emulated cluster, each with one port."""
        return self.machines

    @property
    def steps_in_total(self) -> int:
        """Steps of all runs together, warm-up and verification included."""
        steps = [self.warmup_of(strategy) + self.steps for strategy in self.strategies]
        return len(self.rates_bps) * self.repeat * sum(steps)

    def codec_of(self, strategy: LabStrategy) -> str:
        """Return the codec of a strategy: DDP and no communication have none."""
        return self.codec if strategy.family == "gradlane" else RAW

    def warmup_of(self, strategy: LabStrategy) -> int:
        """Return the steps before the measured ones: those in which a plan is found come first.

        Of local updates they are whole rounds.
        """
        steps = strategy.learning_steps + self.warmup + self.further_warmup.get(strategy.text, 0)
        each = 1 if strategy.rounds is None else strategy.rounds.steps
        return each * -(-steps // each)
