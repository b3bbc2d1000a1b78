"""Plans: settings with their reasons and predictions, and the plan file.

A plan file is one JSON object, `{"format": "gradlane-plan", "version": 1, ...}`. A training uses
only `settings` and `tensors`, which make the digest; the rest is for readers. Every field that is
used is checked when a file is read, and an error names file, field and position.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradlane.errors import RefusedError
from gradlane.formats.atomic_io import atomic_write_text
from gradlane.formats.untrusted import EscapedError
from gradlane.training.options.codec_choice import check_codecs, codec_rules
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.stragglers import WAIT
from gradlane.training.options.strategy import RING, SCHEMES, ring_refusal
from gradlane.training.plans.settings import ClusterFacts, Settings

FORMAT = "gradlane-plan"
VERSION = 1
_TENSORS_MOST = 1_000_000


class PlanError(EscapedError, ValueError):
    """An invalid plan; the text names file, field and position."""


@dataclass(frozen=True)
class PlannedTensor:
    """The scheme, codec and slices of one tensor.

    Attributes:
        name: as in `named_parameters()`.
        numel: number of elements.
        scheme: of its aggregation.
        codec: of its gradient; `raw`: none.
        slices: number of its slices.
        reason: for the scheme, and for the codec if one was given.
    """

    name: str
    numel: int
    scheme: str
    codec: str
    slices: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """Settings of a training, with the reasons for them.

    Attributes:
        model: name of the model, for readers.
        facts: of the cluster.
        source: of the cluster's figures: `"given"` or `"probed"`.
        settings: for the session.
        tensors: every trained tensor; empty for a plan that fits any model.
        prediction: predicted figures, units in their names.
        choices: for each setting `setting`, `value`, `base`, `codec` (of the steps), `step_s`,
            `base_step_s`, `runner_up`, `runner_up_step_s`, `tried`, `skipped`, `reason`.
        summary: predicted effect, in words.
    """

    model: str
    facts: ClusterFacts
    source: str
    settings: Settings
    tensors: tuple[PlannedTensor, ...] = ()
    prediction: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[Mapping[str, Any], ...] = ()
    summary: str = ""

    def __repr__(self) -> str:
        return (
            f"<Plan {self.digest} for {self.model!r} on {self.facts.where}: "
            f"strategy={self.settings.strategy!r}, {len(self.tensors)} tensors>"
        )

    @property
    def schemes(self) -> dict[str, str]:
        """Scheme of each tensor, by name; empty for a plan that fits any model."""
        return {tensor.name: tensor.scheme for tensor in self.tensors}

    @property
    def digest(self) -> str:
        """SHA-256 of settings and tensors, in 16 hexadecimal digits."""
        rows = [(one.name, one.numel, one.scheme, one.codec, one.slices) for one in self.tensors]
        content = json.dumps([self.settings.to_json(), rows], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Return the contents of a plan file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "digest": self.digest,
            "model": self.model,
            "cluster": {**self.facts.to_json(), "source": self.source},
            "settings": self.settings.to_json(),
            "prediction": dict(self.prediction),
            "summary": self.summary,
            "choices": [dict(choice) for choice in self.choices],
            "tensors": [asdict(tensor) for tensor in self.tensors],
        }

    def save(self, path: Path | str) -> None:
        """Write a plan file, which `prepare(plan=path)` takes.

        Raises:
            OSError: it cannot be written.
        """
        atomic_write_text(Path(path), json.dumps(self.to_json(), indent=1))

    def check_fits(self, sizes: Mapping[str, int], where: str) -> None:
        """Check that the plan fits a model.

        Args:
            sizes: the trained parameters' numbers of elements, by name.
            where: the plan's name in messages.

        Raises:
            ValueError: it is for another model; the message names the first tensor that differs.
        """
        if not self.tensors:
            return
        planned = {tensor.name: tensor.numel for tensor in self.tensors}
        for name, numel in planned.items():
            if sizes.get(name) != numel:
                has = f"{sizes[name]} there" if name in sizes else "no such trained parameter there"
                raise RefusedError(
                    f"{where} is for another model ({self.model}): it has {name!r} with {numel} "
                    f"elements, and there is {has}; make a plan from a profile of this model"
                )
        extra = next((name for name in sizes if name not in planned), None)
        if extra is not None:
            raise RefusedError(
                f"{where} is for another model ({self.model}): it has no tensor {extra!r}; make a "
                "plan from a profile of this model"
            )


def read_plan(path: Path | str) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: the file cannot be read or is no plan; the text names field and position.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise PlanError(f"cannot read plan {path}: {reason}") from error
    return parse_plan(text, f"plan {path}")


def parse_plan(text: str, where: str) -> Plan:
    """Parse the text of a plan file.

    Args:
        text: the JSON.
        where: name of the plan in messages.

    Raises:
        PlanError: it is no plan; the text names field and position.
    """
    try:
        source = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where} is not JSON: {error}") from error
    fields = _Fields(source, where)
    if fields.text("format") != FORMAT:
        raise fields.error("format", f"is {source['format']!r}, expected {FORMAT!r}")
    version = fields.integer("version", least=1)
    if version != VERSION:
        raise fields.error("version", f"is {version}; this gradlane reads version {VERSION}")
    cluster, settings = fields.inside("cluster"), fields.inside("settings")
    rows = fields.rows("tensors", _TENSORS_MOST)
    plan = Plan(
        model=fields.text("model"),
        facts=cluster.checked(
            lambda: ClusterFacts(
                workers=cluster.integer("workers", least=1),
                rate_bps=cluster.number("rate_bps"),
                latency_s=cluster.number("latency_s"),
                update=cluster.text("update"),
                servers=cluster.optional_integer("servers")
                if "servers" in cluster.source
                else None,
                ranks_per_node=cluster.integer("ranks_per_node", least=1)
                if "ranks_per_node" in cluster.source
                else 1,
                stragglers=cluster.text("stragglers") if "stragglers" in cluster.source else WAIT,
                serving=cluster.integer("serving", least=0) if "serving" in cluster.source else 0,
                clips=cluster.flag("clips") if "clips" in cluster.source else False,
                lanes=cluster.integer("lanes", least=1) if "lanes" in cluster.source else None,
            )
        ),
        source=cluster.text("source"),
        settings=settings.checked(
            lambda: Settings(
                strategy=settings.text("strategy"),
                slice_elems=settings.optional_integer("slice_elems"),
                frame_bytes=settings.integer("frame_bytes", least=1),
                send_buffer_bytes=settings.integer("send_buffer_bytes", least=0),
                codec=settings.text("codec") if "codec" in settings.source else None,
                local=settings.text("local") if "local" in settings.source else None,
            )
        ),
        tensors=tuple(_tensor(row) for row in rows),
        prediction=fields.inside("prediction").source,
        choices=tuple(row.source for row in fields.rows("choices", 1000)),
        summary=fields.text("summary", may_be_empty=True),
    )
    names = [tensor.name for tensor in plan.tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise fields.error("tensors", f"{twice!r} occurs twice")
    for row, tensor in zip(rows, plan.tensors, strict=True):
        why = ring_refusal(plan.settings.strategy, plan.facts.update)
        if tensor.scheme == RING and why:
            raise row.error("scheme", f"is 'ring': {why}")
    if "digest" in source and source["digest"] != plan.digest:
        raise fields.error(
            "digest",
            f"is {source['digest']!r}, but settings and tensors make {plan.digest!r}: the file was "
            "changed by hand; remove the field if that was meant",
        )
    return plan


def _tensor(row: _Fields) -> PlannedTensor:
    tensor = PlannedTensor(
        name=row.text("name"),
        numel=row.integer("numel", least=0),
        scheme=row.text("scheme"),
        codec=row.text("codec"),
        slices=row.integer("slices", least=0),
        reason=row.text("reason", may_be_empty=True),
    )
    if tensor.scheme not in SCHEMES:
        raise row.error("scheme", f"unknown {tensor.scheme!r}; known are {', '.join(SCHEMES)}")
    if tensor.codec != RAW:
        try:
            check_codecs(codec_rules(tensor.codec))
        except ValueError as error:
            raise row.error("codec", f"unknown {tensor.codec!r}: {error}") from error
    return tensor


class _Fields:
    """The fields of one object in a plan file."""

    def __init__(self, source: Any, where: str, place: str = "") -> None:
        self._where = where
        self._place = place
        if not isinstance(source, dict):
            raise self.error("", f"expected an object, got {source!r:.60}")
        self.source: dict[str, Any] = source

    def error(self, name: str, what: str) -> PlanError:
        place = f"{self._place}{name}".rstrip(".")
        return PlanError(f"{self._where}: {place + ': ' if place else ''}{what}")

    def checked(self, make: Any) -> Any:
        """Call a constructor that checks its values, and add the position to its error."""
        try:
            return make()
        except PlanError:
            raise
        except ValueError as error:
            raise self.error("", str(error)) from error

    def _get(self, name: str) -> Any:
        if name not in self.source:
            raise self.error(name, "missing")
        return self.source[name]

    def inside(self, name: str) -> _Fields:
        return _Fields(self._get(name), self._where, f"{self._place}{name}.")

    def rows(self, name: str, most: int) -> list[_Fields]:
        values = self._get(name)
        if not isinstance(values, list) or len(values) > most:
            raise self.error(name, f"expected a list of at most {most} entries")
        return [
            _Fields(value, self._where, f"{self._place}{name}[{index}].")
            for index, value in enumerate(values)
        ]

    def text(self, name: str, *, may_be_empty: bool = False) -> str:
        value = self._get(name)
        if not isinstance(value, str) or not (value or may_be_empty):
            raise self.error(name, f"expected a text, got {value!r:.60}")
        if not value.isprintable():
            raise self.error(name, f"has characters that cannot be printed: {value!r:.60}")
        return value

    def integer(self, name: str, *, least: int) -> int:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**62:
            raise self.error(name, f"expected an integer of {least} or more, got {value!r:.60}")
        return value

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}, expected true or false")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self._get(name) is None else self.integer(name, least=1)

    def number(self, name: str) -> float:
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"expected a number, got {value!r:.60}")
        if not math.isfinite(value):
            raise self.error(name, f"must be finite, got {value!r}")
        return float(value)
