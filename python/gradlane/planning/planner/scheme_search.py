"""Chooses the scheme of each layer by simulation: servers, round a ring, or factors.

Factors are tried for all layers that put fewer bytes through a port with them. Then one layer after
another goes back to where it was, those that save least first, and stays there unless the step
becomes longer: what rebuilding costs, whether the moment at which a gradient is needed matters,
and what latency does, is all in the simulation. Rings are tried for everything (strategy `ring`),
and for what is large with servers for the rest: a small urgent slice takes as many hops as a
large one.

Round a ring of three ranks and more, and from factors, sums have other roundings. Without leave for
that they are simulated all the same, for the reason to say what they would give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradlane.planning.planner.candidates import TIE, Candidate, Simulated
from gradlane.planning.schemes.costs import Layer
from gradlane.planning.schemes.layers import factors_of, layers_of, simulated_schemes
from gradlane.planning.simulation.grid import rebuild_s
from gradlane.planning.simulation.profiles import Profile
from gradlane.training.options.codec_choice import RAW
from gradlane.training.options.options import RING, ring_refusal
from gradlane.training.plans.settings import ClusterFacts, Settings

LARGE_BYTES = 1 << 20
"""From this size on a layer may go round a ring while smaller ones do not."""
SINGLE_LAYERS = 8
"""Layers whose factors are tried one by one; of more those that save least."""
_NO_LONGER = 0.001
"""Share of a step by which factors of one layer must shorten it to be worth their rebuilding."""

OTHER_ORDER = (
    "it adds up in another order, with other roundings; allow that with `gradlane plan "
    "--any-rounding`, or `Strategy(exact_order=False)`"
)


@dataclass(frozen=True)
class Allowed:
    """What may be chosen; empty texts: it may.

    Attributes:
        why_no_ring: why sums may not go round a ring.
        why_no_factors: why gradients may not be made of factors.
    """

    why_no_ring: str = ""
    why_no_factors: str = ""

    @classmethod
    def of(cls, facts: ClusterFacts, any_rounding: bool, codec: str | None) -> Allowed:
        """Return what may be chosen on a cluster.

        Args:
            facts: the cluster.
            any_rounding: whether gradients may be added up in another order.
            codec: one that is asked for, or None.
        """
        ring = factors = "" if any_rounding else OTHER_ORDER
        if facts.workers <= 2:
            # Of two addends there is one order.
            ring = ""
        if facts.servers is not None:
            ring = f"slices are to be on {facts.servers} ranks, and a ring has no servers"
        if facts.serving:
            ring = f"{facts.serving} ranks only serve, which a ring would leave idle"
        if codec not in (None, RAW):
            ring = f"codec {codec} is asked for, which rounds otherwise on a ring than on servers"
        return cls(ring, factors)

    def why_not(self, label: str) -> str:
        """Return why schemes with this label may not be chosen."""
        return (self.why_no_ring if RING in label else "") or self.why_no_factors


@dataclass(frozen=True)
class SchemeSearch:
    """What the search came to.

    Attributes:
        best: the settings, with the layers whose scheme is not the strategy's.
        label: of the schemes together, such as `ps` or `ring+sfb`.
        base_label: of those without a choice.
        step_s: predicted step time.
        base_step_s: without a choice.
        tried: labels of what was allowed and simulated, with step times.
        skipped: labels for which there was no time.
        declined: labels of what is faster and not allowed, with step times and why not, the fastest
            first.
        reasons: by layer, where there is something to say.
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
    simulated: Simulated, profile: Profile, facts: ClusterFacts, kept: Candidate, allowed: Allowed
) -> SchemeSearch:
    """Choose the scheme of each layer, the settings being given.

    Args:
        simulated: where candidates are simulated; `kept` has been.
        profile: what a step computes.
        facts: the cluster.
        kept: the settings, all layers by the strategy's scheme.
        allowed: what may be chosen.
    """
    return _Search(simulated, profile, facts, kept, allowed).run()


class _Search:
    def __init__(
        self,
        simulated: Simulated,
        profile: Profile,
        facts: ClusterFacts,
        kept: Candidate,
        allowed: Allowed,
    ) -> None:
        self._simulated = simulated
        self._profile = profile
        self._facts = facts
        self._kept = kept
        self._allowed = allowed
        self._layers = layers_of(profile)
        self._own = RING if kept.settings.strategy == RING else "ps"
        kept_s = simulated.step_s(kept)
        assert kept_s is not None
        self._kept_s = kept_s
        self._tried: dict[str, float] = {self._own: kept_s}
        self._skipped: list[str] = []
        self._reasons: dict[str, str] = {}

    def run(self) -> SchemeSearch:
        best = self._kept
        declined: list[tuple[str, float, str]] = []
        # What needs servers for its pulls or its updates has no other scheme.
        if not ring_refusal(self._kept.settings.strategy, self._facts.update):
            for candidate in self._rings():
                if (better := self._better(best, candidate)) is not best:
                    best = better
                    self._reasons |= {
                        layer.name: self._by_size(best, layer) for layer in self._layers
                    }
            best = self._with_factors(best)
            if self._own == RING and not self._allowed.why_no_ring:
                best = self._on_servers(best)
            declined = self._declined(best)
        step_s = self._simulated.step_s(best)
        assert step_s is not None
        return SchemeSearch(
            best,
            self._label(best),
            self._own,
            step_s,
            self._kept_s,
            tuple(self._tried.items()),
            tuple(self._skipped),
            tuple(declined),
            self._reasons,
        )

    def _label(self, candidate: Candidate) -> str:
        own = RING if candidate.settings.strategy == RING else "ps"
        others = {scheme for _, scheme in candidate.schemes}
        left = len(candidate.schemes) < len(self._layers)
        return "+".join(sorted(others | ({own} if left else set())))

    def _step_s(self, candidate: Candidate) -> float | None:
        self._simulated.run([candidate])
        return self._simulated.step_s(candidate)

    def _note(self, candidate: Candidate) -> float | None:
        step_s, label = self._step_s(candidate), self._label(candidate)
        if step_s is None:
            self._skipped.append(label)
        else:
            self._tried[label] = min(step_s, self._tried.get(label, step_s))
        return step_s

    def _better(self, best: Candidate, candidate: Candidate) -> Candidate:
        """The candidate, where it is faster by more than the simulator can be wrong."""
        step_s, best_s = self._note(candidate), self._simulated.step_s(best)
        assert best_s is not None
        return candidate if step_s is not None and step_s < best_s * (1.0 - TIE) else best

    def _rings(self) -> list[Candidate]:
        """Mixtures of rings and servers; a ring alone is a strategy."""
        if self._allowed.why_no_ring:
            return []
        large = {layer.name for layer in self._layers if layer.size_bytes >= LARGE_BYTES}
        if not 0 < len(large) < len(self._layers):
            return []
        if self._own == RING:
            return [self._all_by("ps", lambda layer: layer.name not in large)]
        return [self._all_by(RING, lambda layer: layer.name in large)]

    def _by_size(self, mixed: Candidate, layer: Layer) -> str:
        scheme, size_mb = self._scheme_in(mixed, layer), layer.size_bytes / 1e6
        why = "no flows meet at a port" if scheme == RING else "fewer hops than round a ring"
        return f"{scheme}: {size_mb:.2f} MB; {why}"

    def _all_by(self, scheme: str, chosen: Callable[[Layer], bool]) -> Candidate:
        names = tuple((layer.name, scheme) for layer in self._layers if chosen(layer))
        return self._kept._replace(schemes=names)

    def _saving(self) -> list[Layer]:
        """Layers whose factors put fewer bytes through a port, those that save most first."""
        return sorted(
            (layer for layer in self._layers if self._saved_bytes(layer) > 0.0),
            key=lambda layer: (-self._saved_bytes(layer), layer.index),
        )

    def _saved_bytes(self, layer: Layer) -> float:
        """Bytes each way through a port that factors save a step."""
        factors, workers = factors_of(layer, self._profile), self._facts.workers
        if factors is None:
            return 0.0
        whole = 2.0 * (workers - 1) / workers * self._whole_bytes(factors.tensor)
        return whole - (workers - 1) * factors.block_bytes

    def _whole_bytes(self, tensor: str) -> int:
        return next(one.size_bytes for one in self._profile.tensors if one.name == tensor)

    def _factored(self, base: Candidate, layers: Sequence[Layer]) -> Candidate:
        names = {layer.name for layer in layers}
        others = tuple(pair for pair in base.schemes if pair[0] not in names)
        return base._replace(schemes=(*others, *((layer.name, "sfb") for layer in layers)))

    def _with_factors(self, base: Candidate) -> Candidate:
        saving = self._saving()
        if not saving or self._allowed.why_no_factors:
            return base
        best_s = self._note(self._factored(base, saving))
        if best_s is None:
            return base
        chosen = list(saving)
        for layer in reversed(saving[-SINGLE_LAYERS:]):
            without = [one for one in chosen if one is not layer]
            without_s = self._step_s(self._factored(base, without))
            if without_s is None:
                continue
            if without_s <= best_s * (1.0 + _NO_LONGER):
                self._reasons[layer.name] = self._not_worth(
                    self._scheme_in(base, layer), layer, best_s, without_s
                )
                chosen, best_s = without, without_s
            else:
                self._reasons[layer.name] = self._worth(layer, best_s, without_s)
        base_s = self._simulated.step_s(base)
        assert base_s is not None
        if not chosen or best_s >= base_s * (1.0 - TIE):
            self._reasons |= {
                layer.name: f"{self._scheme_in(base, layer)}: factors of all layers that have few "
                f"would give {_ms(best_s)} a step instead of {_ms(base_s)}, and below "
                f"{TIE * 100:g} % the simulator cannot tell; {self._sizes(layer)}"
                for layer in saving
            }
            return base
        for layer in chosen:
            self._reasons.setdefault(layer.name, f"sfb: {self._sizes(layer)}, as of other layers")
        best = self._factored(base, chosen)
        self._tried[self._label(best)] = best_s
        return best

    def _on_servers(self, best: Candidate) -> Candidate:
        """Factors with servers for the rest, where that is faster than with a ring."""
        servers = self._kept._replace(settings=_with_strategy(self._kept.settings, "p3"))
        if self._step_s(servers) is None:
            return best
        said = dict(self._reasons)
        other = self._with_factors(servers)
        step_s, best_s = self._simulated.step_s(other), self._simulated.step_s(best)
        assert step_s is not None and best_s is not None
        if other is not servers and step_s < best_s * (1.0 - TIE):
            return other
        self._reasons = said
        return best

    def _scheme_in(self, candidate: Candidate, layer: Layer) -> str:
        own = RING if candidate.settings.strategy == RING else "ps"
        return dict(candidate.schemes).get(layer.name, own)

    def _worth(self, layer: Layer, with_s: float, without_s: float) -> str:
        return (
            f"sfb: {self._sizes(layer)}; a step takes {_ms(with_s)} with them and "
            f"{_ms(without_s)} without"
        )

    def _not_worth(self, own: str, layer: Layer, with_s: float, without_s: float) -> str:
        return (
            f"{own}: factors do not shorten the step ({_ms(with_s)} with them, "
            f"{_ms(without_s)} without); {self._sizes(layer)}"
        )

    def _sizes(self, layer: Layer) -> str:
        """What factors of a layer are, in bytes and in time."""
        factors, workers = factors_of(layer, self._profile), self._facts.workers
        assert factors is not None
        whole = 2.0 * (workers - 1) / workers * self._whole_bytes(factors.tensor)
        sent = (workers - 1) * factors.block_bytes
        rebuilt_s = rebuild_s(
            simulated_schemes(self._profile, [(layer.name, "sfb")], workers, self._simulated.speed)
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
        """What is not allowed and faster than what is chosen, the fastest first."""
        others = []
        bases = [self._kept]
        ring = self._kept._replace(settings=_with_strategy(self._kept.settings, RING))
        if self._allowed.why_no_ring and self._own != RING:
            others.append(ring)
            bases.append(ring)
        saving = self._saving()
        if self._allowed.why_no_factors and saving:
            others += [self._factored(base, saving) for base in bases]
        self._simulated.run(others)
        best_s = self._simulated.step_s(best)
        assert best_s is not None
        timed = [(self._label(one), self._simulated.step_s(one)) for one in others]
        faster = [
            (label, step_s, self._allowed.why_not(label))
            for label, step_s in timed
            if step_s is not None and step_s < best_s * (1.0 - TIE)
        ]
        return sorted(faster, key=lambda one: one[1])


def _with_strategy(settings: Settings, strategy: str) -> Settings:
    return replace(settings, strategy=strategy, slice_elems=None)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
