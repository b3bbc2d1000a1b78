"""The search for each layer's scheme by simulation: servers, a ring, or factors.

Factors are tried for all layers for which they send fewer bytes through a port. Then one layer
after another returns to its previous scheme, starting with those that save least, and stays there
unless the step becomes longer. The simulation includes the cost of rebuilding, the time at which a
gradient is needed, and latency. Rings are tried for everything (strategy `ring`), and for large
layers with servers for the rest: a small urgent slice takes as many hops as a large one.

Sums on a ring of three or more ranks, and sums of factors, round differently. If that is not
allowed they are simulated all the same, so that the reason can name their step time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradlane.planning.planner.candidates import TIE, Candidate, CandidateSimulator
from gradlane.planning.schemes.costs import Layer
from gradlane.planning.schemes.layers import factors_of, layers_of, simulated_schemes
from gradlane.planning.simulation.bound import port_bytes
from gradlane.planning.simulation.grid import rebuild_s
from gradlane.planning.simulation.profiles import Profile
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.strategy import RING, ring_refusal
from gradlane.training.plans.settings import ClusterFacts, Settings

LARGE_BYTES = 1 << 20
"""Least size of a layer that may use a ring while smaller ones do not."""
SINGLE_LAYERS = 8
"""Number of layers whose factors are tried one by one: those that save least."""
_WORTHWHILE_SHARE = 0.001
"""Least share of a step by which factors of one layer must shorten it."""

OTHER_ORDER = (
    "it adds up in another order, with other roundings; allow that with `gradlane plan "
    "--any-rounding`, or `Strategy(exact_order=False)`"
)


@dataclass(frozen=True)
class SchemeRestrictions:
    """The obstacles to rings and factors; empty texts: they are allowed.

    Attributes:
        ring_obstacle: why rings are not allowed.
        factor_obstacle: why factors are not allowed.
    """

    ring_obstacle: str = ""
    factor_obstacle: str = ""

    @classmethod
    def of(cls, facts: ClusterFacts, any_rounding: bool, codec: str | None) -> SchemeRestrictions:
        """Return the restrictions of a cluster.

        Args:
            facts: the cluster.
            any_rounding: whether gradients may be added up in another order.
            codec: the given one, or None.
        """
        ring = factors = "" if any_rounding else OTHER_ORDER
        if facts.workers <= 2:
            # Two addends have a single order.
            ring = ""
        if facts.servers is not None:
            ring = f"slices are to be on {facts.servers} ranks, and a ring has no servers"
        if facts.serving:
            ring = f"{facts.serving} ranks only serve, which a ring would leave idle"
        if codec not in (None, RAW):
            ring = f"codec {codec} is asked for, which rounds otherwise on a ring than on servers"
        return cls(ring, factors)

    def obstacle(self, label: str) -> str:
        """Return why schemes with a label are not allowed."""
        return (self.ring_obstacle if RING in label else "") or self.factor_obstacle


@dataclass(frozen=True)
class SchemeSearchResult:
    """The result of a search for schemes.

    Attributes:
        best: the settings, with the layers whose scheme is not the strategy's.
        label: of the schemes together, such as `ps` or `ring+sfb`.
        base_label: of the schemes before the search.
        step_s: predicted step time.
        base_step_s: before the search.
        tried: labels of the allowed candidates that were simulated, with step times.
        skipped: labels without time to simulate them.
        declined: labels of faster candidates that are not allowed, with step times and obstacles,
            the fastest first.
        reasons: by layer, as far as there are any.
    """

    best: Candidate
    label: str
    base_label: str
    step_s: float
    base_step_s: float
    tried: tuple[tuple[str, float], ...]
    skipped: tuple[str, ...] = ()
    declined: tuple[tuple[str, float, str], ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def choose_schemes(
    simulator: CandidateSimulator,
    profile: Profile,
    facts: ClusterFacts,
    kept: Candidate,
    restrictions: SchemeRestrictions,
) -> SchemeSearchResult:
    """Choose the scheme of each layer for given settings.

    Args:
        simulator: where candidates are simulated; `kept` has been.
        profile: what a step computes.
        facts: the cluster.
        kept: the settings, all layers by the strategy's scheme.
        restrictions: what may be chosen.
    """
    return _Search(simulator, profile, facts, kept, restrictions).run()


class _Search:
    def __init__(
        self,
        simulator: CandidateSimulator,
        profile: Profile,
        facts: ClusterFacts,
        kept: Candidate,
        restrictions: SchemeRestrictions,
    ) -> None:
        self._simulator = simulator
        self._profile = profile
        self._facts = facts
        self._kept = kept
        self._restrictions = restrictions
        self._layers = layers_of(profile)
        self._strategy_scheme = RING if kept.settings.strategy == RING else "ps"
        kept_s = simulator.step_s(kept)
        assert kept_s is not None
        self._kept_s = kept_s
        self._tried: dict[str, float] = {self._strategy_scheme: kept_s}
        self._skipped: list[str] = []
        self._reasons: dict[str, str] = {}

    def run(self) -> SchemeSearchResult:
        best = self._kept
        declined: list[tuple[str, float, str]] = []
        # Strategies that pull, and updates on servers, allow only servers.
        if not ring_refusal(self._kept.settings.strategy, self._facts.update):
            for candidate in self._mixed_candidates():
                if (better := self._better(best, candidate)) is not best:
                    best = better
                    self._reasons |= {
                        layer.name: self._size_reason(best, layer) for layer in self._layers
                    }
            best = self._with_factors(best)
            if self._strategy_scheme == RING and not self._restrictions.ring_obstacle:
                best = self._on_servers(best)
            declined = self._declined(best)
        step_s = self._simulator.step_s(best)
        assert step_s is not None
        return SchemeSearchResult(
            best,
            self._label(best),
            self._strategy_scheme,
            step_s,
            self._kept_s,
            tuple(self._tried.items()),
            tuple(self._skipped),
            tuple(declined),
            self._reasons,
        )

    def _label(self, candidate: Candidate) -> str:
        strategy_scheme = RING if candidate.settings.strategy == RING else "ps"
        others = {scheme for _, scheme in candidate.schemes}
        left = len(candidate.schemes) < len(self._layers)
        return "+".join(sorted(others | ({strategy_scheme} if left else set())))

    def _step_s(self, candidate: Candidate) -> float | None:
        self._simulator.run([candidate])
        return self._simulator.step_s(candidate)

    def _record_step(self, candidate: Candidate) -> float | None:
        step_s, label = self._step_s(candidate), self._label(candidate)
        if step_s is None:
            self._skipped.append(label)
        else:
            self._tried[label] = min(step_s, self._tried.get(label, step_s))
        return step_s

    def _better(self, best: Candidate, candidate: Candidate) -> Candidate:
        """Return the candidate if it is faster by more than the simulator's error, else the best so
        far."""
        step_s, best_s = self._record_step(candidate), self._simulator.step_s(best)
        assert best_s is not None
        return candidate if step_s is not None and step_s < best_s * (1.0 - TIE) else best

    def _mixed_candidates(self) -> list[Candidate]:
        """Return mixtures of rings and servers; a ring alone is a strategy."""
        if self._restrictions.ring_obstacle:
            return []
        large = {layer.name for layer in self._layers if layer.size_bytes >= LARGE_BYTES}
        if not 0 < len(large) < len(self._layers):
            return []
        if self._strategy_scheme == RING:
            return [self._with_scheme("ps", lambda layer: layer.name not in large)]
        return [self._with_scheme(RING, lambda layer: layer.name in large)]

    def _size_reason(self, mixed: Candidate, layer: Layer) -> str:
        scheme, size_mb = self._scheme_in(mixed, layer), layer.size_bytes / 1e6
        why = "no flows meet at a port" if scheme == RING else "fewer hops than round a ring"
        return f"{scheme}: {size_mb:.2f} MB; {why}"

    def _with_scheme(self, scheme: str, chosen: Callable[[Layer], bool]) -> Candidate:
        names = tuple((layer.name, scheme) for layer in self._layers if chosen(layer))
        return self._kept._replace(schemes=names)

    def _layers_that_save(self) -> list[Layer]:
        """Return the layers whose factors send fewer bytes through a port, the largest saving
        first."""
        return sorted(
            (layer for layer in self._layers if self._saved_bytes(layer) > 0.0),
            key=lambda layer: (-self._saved_bytes(layer), layer.index),
        )

    def _saved_bytes(self, layer: Layer) -> float:
        """Return the bytes a step, each way through a port, that factors save."""
        factors, workers = factors_of(layer, self._profile), self._facts.workers
        if factors is None:
            return 0.0
        whole = 2.0 * (workers - 1) / workers * self._whole_bytes(factors.tensor)
        return whole - (workers - 1) * factors.block_bytes

    def _whole_bytes(self, tensor: str) -> int:
        return next(one.size_bytes for one in self._profile.tensors if one.name == tensor)

    def _with_factors_for(self, base: Candidate, layers: Sequence[Layer]) -> Candidate:
        names = {layer.name for layer in layers}
        others = tuple(pair for pair in base.schemes if pair[0] not in names)
        return base._replace(schemes=(*others, *((layer.name, "sfb") for layer in layers)))

    def _with_factors(self, base: Candidate) -> Candidate:
        layers = self._layers_that_save()
        if not layers or self._restrictions.factor_obstacle:
            return base
        best_s = self._record_step(self._with_factors_for(base, layers))
        if best_s is None:
            return base
        chosen = list(layers)
        for layer in reversed(layers[-SINGLE_LAYERS:]):
            without = [one for one in chosen if one is not layer]
            without_s = self._step_s(self._with_factors_for(base, without))
            if without_s is None:
                continue
            if without_s <= best_s * (1.0 + _WORTHWHILE_SHARE):
                self._reasons[layer.name] = self._no_gain_reason(
                    self._scheme_in(base, layer), layer, best_s, without_s
                )
                chosen, best_s = without, without_s
            else:
                self._reasons[layer.name] = self._gain_reason(layer, best_s, without_s)
        base_s = self._simulator.step_s(base)
        assert base_s is not None
        if not chosen or best_s >= base_s * (1.0 - TIE):
            self._reasons |= {
                layer.name: f"{self._scheme_in(base, layer)}: factors of all layers that have few "
                f"would give {_ms(best_s)} a step instead of {_ms(base_s)}, and below "
                f"{TIE * 100:g} % the simulator cannot tell; {self._factor_sizes(layer)}"
                for layer in layers
            }
            return base
        for layer in chosen:
            self._reasons.setdefault(
                layer.name, f"sfb: {self._factor_sizes(layer)}, as of other layers"
            )
        best = self._with_factors_for(base, chosen)
        self._tried[self._label(best)] = best_s
        return best

    def _on_servers(self, best: Candidate) -> Candidate:
        """Return factors with servers for the rest, if that is faster than with a ring."""
        servers = self._kept._replace(settings=_with_strategy(self._kept.settings, "p3"))
        if self._step_s(servers) is None:
            return best
        reasons = dict(self._reasons)
        other = self._with_factors(servers)
        step_s, best_s = self._simulator.step_s(other), self._simulator.step_s(best)
        assert step_s is not None and best_s is not None
        if other is not servers and step_s < best_s * (1.0 - TIE):
            return other
        self._reasons = reasons
        return best

    def _scheme_in(self, candidate: Candidate, layer: Layer) -> str:
        strategy_scheme = RING if candidate.settings.strategy == RING else "ps"
        return dict(candidate.schemes).get(layer.name, strategy_scheme)

    def _gain_reason(self, layer: Layer, with_s: float, without_s: float) -> str:
        return (
            f"sfb: {self._factor_sizes(layer)}; a step takes {_ms(with_s)} with them and "
            f"{_ms(without_s)} without"
        )

    def _no_gain_reason(
        self, strategy_scheme: str, layer: Layer, with_s: float, without_s: float
    ) -> str:
        return (
            f"{strategy_scheme}: factors do not shorten the step ({_ms(with_s)} with them, "
            f"{_ms(without_s)} without); {self._factor_sizes(layer)}"
        )

    def _factor_sizes(self, layer: Layer) -> str:
        """Describe a layer's factors by bytes and rebuilding time."""
        factors, workers = factors_of(layer, self._profile), self._facts.workers
        assert factors is not None
        adds_up, local_ranks = self._kept.settings.adds_up_on_nodes, self._facts.ranks_per_node
        whole = port_bytes(
            self._whole_bytes(factors.tensor),
            workers=workers,
            scheme="hierarchical" if adds_up else "ps",
            local_ranks=local_ranks,
        )
        sent = port_bytes(
            factors.block_bytes,
            workers=workers,
            scheme="collected" if adds_up else "sfb",
            local_ranks=local_ranks,
        )
        rebuilt_s = rebuild_s(
            simulated_schemes(self._profile, [(layer.name, "sfb")], workers, self._simulator.speed)
        )
        cost = (
            f"{_ms(rebuilt_s)} of rebuilding"
            if rebuilt_s > 0.0
            else "rebuilding for nothing, for the profile does not say how fast the accelerator is"
        )
        return (
            f"factors are {sent / 1e6:.2f} MB through a port where the gradient is "
            f"{whole / 1e6:.2f} MB, for {cost}"
        )

    def _declined(self, best: Candidate) -> list[tuple[str, float, str]]:
        """Return the faster candidates that are not allowed, the fastest first."""
        others = []
        bases = [self._kept]
        ring = self._kept._replace(settings=_with_strategy(self._kept.settings, RING))
        if self._restrictions.ring_obstacle and self._strategy_scheme != RING:
            others.append(ring)
            bases.append(ring)
        layers = self._layers_that_save()
        if self._restrictions.factor_obstacle and layers:
            others += [self._with_factors_for(base, layers) for base in bases]
        self._simulator.run(others)
        best_s = self._simulator.step_s(best)
        assert best_s is not None
        timed = [(self._label(one), self._simulator.step_s(one)) for one in others]
        faster = [
            (label, step_s, self._restrictions.obstacle(label))
            for label, step_s in timed
            if step_s is not None and step_s < best_s * (1.0 - TIE)
        ]
        return sorted(faster, key=lambda one: one[1])


def _with_strategy(settings: Settings, strategy: str) -> Settings:
    return replace(settings, strategy=strategy, slice_elems=None)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
