"""The coordinator and its information book: the facts of model and cluster, and plans from them.

After Poseidon (Zhang et al., USENIX ATC 2017, section 4.1): `query` reads the book, and
`best_scheme` chooses the aggregation scheme of a layer. `plan` simulates everything else. The same
book gives the same answers on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from gradlane.planning.planner.candidates import Candidate, CandidateSimulator
from gradlane.planning.planner.information_book import InformationBook, SchemeChoice
from gradlane.planning.planner.reasons import poseidon_summary, reason_of, summary_of
from gradlane.planning.planner.search import Choice, SearchResult, search
from gradlane.planning.schemes.costs import Layer
from gradlane.planning.schemes.layers import (
    Schemes,
    factors_of,
    layers_of,
    operations_per_s,
    simulated_schemes,
)
from gradlane.planning.schemes.step_time import HybridStep, NodeCluster, hybrid_step
from gradlane.planning.simulation.bound import Bound, bound_step_s
from gradlane.planning.simulation.codec_costs import codecs_in, wire_bytes
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.ddp import ddp_step_s
from gradlane.planning.simulation.grid import GOODPUT_SHARE, rebuild_s, traffic
from gradlane.planning.simulation.profiles import Profile, timings_in
from gradlane.training.node.rules import OFF
from gradlane.training.options.codec_choice import CodecChoice, codec_rules, rules_text
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.strategy import PLAN_RULES, RING, ring_ranks
from gradlane.training.plans.plan import Plan, PlannedTensor
from gradlane.training.plans.settings import ClusterFacts, Settings, local_of_session


class Coordinator:
    """Plans for one model on one cluster."""

    def __init__(
        self,
        profile: Profile,
        facts: ClusterFacts,
        *,
        base: Settings | None = None,
        source: str = "given",
        rule: str = "auto",
        costs: MachineCosts | None = None,
        any_rounding: bool = False,
    ) -> None:
        """Fill the information book.

        Args:
            profile: of a training step.
            facts: the cluster.
            base: the settings without a plan; None: gradlane's own.
            source: of the cluster's figures, `"given"` or `"probed"`.
            rule: for choosing schemes: `"auto"`, among those that the engine runs, or `"poseidon"`,
                the paper's algorithm 1.
            costs: constants of the cluster's machines; None: the simulator's own.
            any_rounding: whether rule `auto` may choose schemes that do not add up in rank order.

        Raises:
            ValueError: there is no such rule.
        """
        if rule not in PLAN_RULES:
            raise ValueError(f"unknown rule {rule!r} of a plan; known are {', '.join(PLAN_RULES)}")
        self._profile = profile
        self._facts = facts
        self._base = base or Settings()
        self._source = source
        self._rule = rule
        self._costs = costs
        self._any_rounding = any_rounding
        entries = {
            "model": profile.model,
            "batch_size": profile.batch_size,
            "forward_s": profile.forward_s,
            "compute_s": profile.compute_s,
            "gradient_bytes": profile.size_bytes,
            "workers": facts.workers,
            "servers": facts.owners,
            "rate_bps": facts.rate_bps,
            "latency_s": facts.latency_s,
            "update": facts.update,
        }
        adds_up = local_of_session(self._base, facts) not in (None, OFF)
        self._summing_nodes = facts.nodes if adds_up else 0
        self._book = InformationBook(
            entries,
            layers_of(profile),
            self._summing_nodes or facts.owners,
            serving=facts.serving > 0,
            summing_nodes=self._summing_nodes,
        )
        self._layers = self._book.layers

    def __repr__(self) -> str:
        return f"<Coordinator of {self._profile!r} on {self._facts.where}, rule {self._rule!r}>"

    def query(self, *names: str) -> Any:
        """Read entries of the information book.

        Args:
            names: of entries: `model`, `batch_size`, `forward_s`, `compute_s`, `gradient_bytes`,
                `workers`, `servers`, `rate_bps`, `latency_s`, `update`, `layers`, or the name of a
                layer, which gives its `Layer`. An entry goes before a layer of the same name.

        Returns:
            The value of one name, or a tuple of those of several.

        Raises:
            ValueError: no name is given, or one is unknown.
        """
        return self._book.query(*names)

    def best_scheme(self, layer: str | int) -> SchemeChoice:
        """Choose the scheme that moves the fewest numbers for a layer, by this coordinator's rule;
        see `InformationBook.best_scheme`.

        Args:
            layer: its name, or its index in `query("layers")`.

        Raises:
            ValueError: there is no such layer.
        """
        return self._scheme_of(self._book.layer(layer))

    def bound(
        self, codec: str | None = None, schemes: Schemes = (), *, adds_up_on_nodes: bool = False
    ) -> Bound:
        """Return the step time that no strategy can beat with the bytes of a codec.

        Args:
            codec: as in `Settings`.
            schemes: layers whose scheme is not the strategy's.
            adds_up_on_nodes: whether ranks of a node add up before anything goes to the network.
        """
        profile, workers = self._profile, self._facts.workers
        speed = None if self._costs is None else self._costs.operations_per_s
        by_tensor = simulated_schemes(profile, schemes, workers, speed)
        encoded = wire_bytes(profile, self._codecs_in(codec))
        travelling, kinds = traffic(
            profile, encoded, by_tensor, "hierarchical" if adds_up_on_nodes else "ps"
        )
        return bound_step_s(
            timings_in(profile),
            workers=workers,
            goodput_bps=self._facts.rate_bps * GOODPUT_SHARE,
            compute_s=profile.compute_s + rebuild_s(by_tensor),
            wire_bytes=travelling,
            schemes=kinds,
            servers=self._facts.servers,
            serving=self._facts.serving,
            local_ranks=self._facts.ranks_per_node,
            clips=self._facts.clips,
        )

    def plan(
        self, *, budget_s: float = 60.0, on_simulated: Callable[[], None] = lambda: None
    ) -> Plan:
        """Simulate candidates and choose; under the rule `poseidon` only schemes are chosen.

        Args:
            budget_s: approximate time for the simulations, in seconds.
            on_simulated: called after each simulation.

        Raises:
            ValueError: the simulator refuses the profile or the cluster.
        """
        if self._rule == "poseidon":
            return self._poseidon_plan(budget_s, on_simulated)
        if self._facts.workers == 1:
            found: SearchResult | None = SearchResult(
                self._base, self._profile.compute_s, self._profile.compute_s, ()
            )
        else:
            found = search(
                self._profile,
                self._facts,
                self._base,
                budget_s=budget_s,
                costs=self._costs,
                any_rounding=self._any_rounding,
                on_simulated=on_simulated,
            )
        settings = found.settings if found else self._base
        schemes = found.schemes if found else ()
        bound = self.bound(settings.codec, schemes, adds_up_on_nodes=settings.adds_up_on_nodes)
        return Plan(
            model=self._profile.model,
            facts=self._facts,
            source=self._source,
            settings=settings,
            tensors=self._planned_tensors(settings, self._chosen_schemes(settings, found)),
            prediction=_prediction(found, bound, self._profile, self._facts),
            choices=tuple(_choice_row(choice) for choice in found.choices) if found else (),
            summary=summary_of(found, self._facts, bound)
            if found
            else f"The settings stay as they are: a simulation takes more than {budget_s:g} s.",
        )

    def _poseidon_plan(self, budget_s: float, on_simulated: Callable[[], None]) -> Plan:
        """Make a plan with the paper's schemes and the unchanged settings."""
        layers = {layer.name: self._scheme_of(layer) for layer in self._layers}
        simulator = CandidateSimulator(
            self._profile, self._facts, budget_s, self._costs, on_simulated
        )
        without = Candidate(self._base)
        factored = tuple((name, one.scheme) for name, one in layers.items() if one.scheme != "ps")
        with_factors = Candidate(self._base, factored)
        simulator.run([without, with_factors])
        steps_s = {
            "step_s": simulator.step_s(with_factors),
            "base_step_s": simulator.step_s(without),
        }
        schemes = {name: choice.scheme for name, choice in layers.items()}
        servers = dict.fromkeys(schemes, "ps")
        hybrid, plain = self._hybrid_step(schemes), self._hybrid_step(servers)
        return Plan(
            model=self._profile.model,
            facts=self._facts,
            source=self._source,
            settings=self._base,
            tensors=self._planned_tensors(self._base, layers),
            prediction={
                "compute_s": self._profile.compute_s,
                **{name: step_s for name, step_s in steps_s.items() if step_s is not None},
                "bytes_step_s": hybrid.step_s,
                "bytes_step_ps_s": plain.step_s,
                "rebuild_s": hybrid.rebuild_s,
                "node_bytes": max(hybrid.node_bytes),
                "node_bytes_ps": max(plain.node_bytes),
            },
            choices=(),
            summary=poseidon_summary(schemes, hybrid, plain, self._facts, steps_s),
        )

    def _hybrid_step(self, schemes: Mapping[str, str]) -> HybridStep:
        profile, facts = self._profile, self._facts
        # Ranks that share a port without adding up have a part of it each.
        count = self._summing_nodes or facts.workers
        times = facts.workers // count
        return hybrid_step(
            [replace(one, rows=one.rows and one.rows * times) for one in self._layers],
            schemes,
            NodeCluster(
                count,
                facts.rate_bps * GOODPUT_SHARE * times / facts.ranks_per_node,
                operations_per_s(profile),
                facts.serving,
            ),
            batch_rows=profile.batch_size * times,
            compute_s=profile.compute_s,
        )

    def _scheme_of(self, layer: Layer) -> SchemeChoice:
        return self._book.best_scheme(layer, batch_size=self._profile.batch_size, rule=self._rule)

    def _codecs_in(self, codec: str | None) -> list[CodecChoice]:
        # With a codec no plan changes between servers and a ring.
        ranks = ring_ranks(self._base.strategy, self._facts.workers)
        return codecs_in(self._profile, codec_rules(codec), ranks)

    def _chosen_schemes(
        self, settings: Settings, found: SearchResult | None
    ) -> dict[str, SchemeChoice]:
        """Return the search's scheme of each layer, with its reason."""
        layer_schemes = dict(found.schemes) if found else {}
        reasons = found.scheme_reasons if found else {}
        chosen = {}
        for layer in self._layers:
            choice = self._scheme_of(layer)
            scheme = layer_schemes.get(layer.name, RING if settings.strategy == RING else "ps")
            reason = reasons.get(layer.name, choice.reason)
            if scheme == RING and layer.name not in reasons:
                reason = "ring: as the strategy says"
            chosen[layer.name] = SchemeChoice(scheme, choice.costs, reason)
        return chosen

    def _planned_tensors(
        self, settings: Settings, layers: Mapping[str, SchemeChoice]
    ) -> tuple[PlannedTensor, ...]:
        """Return every tensor with its layer's scheme and the engine's number of slices."""
        codecs = self._codecs_in(settings.codec)
        slices = _slices_of(self._profile, self._facts, settings, codecs)
        offered = codec_rules(self._base.codec)
        is_declined = offered != RAW and codec_rules(settings.codec) == RAW
        declined = f"{rules_text(offered)} is declined, see codec" if is_declined else ""
        schemes = {}
        own = RING if settings.strategy == RING else "ps"
        for layer in self._layers:
            choice = layers[layer.name]
            schemes.update(dict.fromkeys(layer.parameters, choice))
            factors = factors_of(layer, self._profile) if choice.scheme == "sfb" else None
            for name in layer.parameters:
                if factors is not None and name != factors.tensor:
                    reason = f"{own}: only the layer's matrix has factors"
                    schemes[name] = replace(choice, scheme=own, reason=reason)
        return tuple(
            PlannedTensor(
                name=tensor.name,
                numel=tensor.numel,
                scheme=schemes[tensor.name].scheme,
                codec=codec.codec,
                # The batch decides the size of factors, so only whole gradients have known slices.
                slices=count if schemes[tensor.name].scheme in ("ps", RING) else min(count, 1),
                reason=schemes[tensor.name].reason
                if settings.codec is None
                else f"{schemes[tensor.name].reason}; codec: {declined or codec.reason}",
            )
            for tensor, count, codec in zip(self._profile.tensors, slices, codecs, strict=True)
        )


def _slices_of(
    profile: Profile, facts: ClusterFacts, settings: Settings, codecs: Sequence[CodecChoice]
) -> list[int]:
    """Return the engine's number of slices of each tensor; 0 for a tensor without elements."""
    from gradlane import _core

    filled = [tensor for tensor in profile.tensors if tensor.numel > 0]
    if not filled:
        return [0] * len(profile.tensors)
    encoded = {choice.tensor: choice.codec for choice in codecs if choice.codec != RAW}
    rows = [
        {
            "name": one.name,
            "numel": one.numel,
            "dtype": one.dtype,
            "role": "parameter",
            "codec": encoded.get(one.name),
            "sizes": list(one.shape),
        }
        for one in filled
    ]
    engine_plan = json.loads(
        _core.plan_json(
            json.dumps(rows),
            settings.strategy,
            settings.slice_elems,
            0,
            facts.update,
            # Where nodes add up, they are the ranks.
            (facts.nodes if settings.adds_up_on_nodes else facts.workers) + facts.serving,
            servers=facts.servers,
            workers=facts.workers if facts.serving else None,
        )
    )
    counts = {
        row["name"]: row["slices"]["end"] - row["slices"]["start"] for row in engine_plan["tensors"]
    }
    return [counts.get(tensor.name, 0) for tensor in profile.tensors]


def _prediction(
    found: SearchResult | None, bound: Bound, profile: Profile, facts: ClusterFacts
) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "compute_s": profile.compute_s,
        "bound_step_s": bound.step_s,
        "bound_binding": bound.binding,
        "ddp_step_s": ddp_step_s(
            profile,
            workers=facts.workers,
            goodput_bps=facts.rate_bps * GOODPUT_SHARE,
            latency_s=facts.latency_s,
        ),
    }
    if found is not None:
        figures |= {
            "step_s": found.step_s,
            "base_step_s": found.base_step_s,
            "scaling_factor": profile.compute_s / found.step_s,
            "samples_per_s": facts.workers * profile.batch_size / found.step_s,
        }
    return figures


def _choice_row(choice: Choice) -> dict[str, Any]:
    runner_up = choice.runner_up
    return {
        "setting": choice.setting,
        "value": choice.value,
        "base": choice.base,
        "codec": choice.codec,
        "step_s": choice.step_s,
        "base_step_s": choice.base_step_s,
        "runner_up": runner_up.value if runner_up else None,
        "runner_up_step_s": runner_up.step_s if runner_up else None,
        "tried": [{"value": one.value, "step_s": one.step_s} for one in choice.tried],
        "skipped": list(choice.skipped),
        "declined": [asdict(one) for one in choice.declined],
        "reason": reason_of(choice),
    }
