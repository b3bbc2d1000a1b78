"""Reading profile files: every field is checked, and an error names file, field and place."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from gradlane.formats.profile import (
    DTYPE_BYTES,
    FORMAT,
    VERSION,
    BatchTime,
    Profile,
    ProfileError,
    ProfileModule,
    ProfileTensor,
)

ENTRIES_MAX = 1_000_000
"""Most tensors, modules or calls of a module; as in the compiled core."""


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ProfileError: the file cannot be read, or holds something else.
    """
    try:
        source = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read profile {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"profile {path} is not JSON: {error}") from error
    if not isinstance(source, dict):
        raise ProfileError(f"profile {path}: expected an object, got {shown(source)}")
    return source


def read_own(path: Path) -> Profile:
    """Read a profile file of gradlane's own format.

    Raises:
        ProfileError: the file cannot be read or is no such profile.
    """
    return profile_from(read_object(path), FieldReader(str(path)))


def shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class FieldReader:
    """Reads fields of one object, and names file, field and place where one is wrong."""

    def __init__(self, file: str, place: str = "") -> None:
        """Read the object at `place` (empty, or a path that ends with a dot) of a file."""
        self._file = file
        self._place = place

    def inside(self, place: str) -> FieldReader:
        """Return a reader of an object within this one."""
        return FieldReader(self._file, f"{self._place}{place}.")

    def error(self, field: str, what: str) -> ProfileError:
        """Return an error that names file and field; an empty field is the object itself."""
        where = f"{self._place}{field}".rstrip(".")
        return ProfileError(f"profile {self._file}: {where + ': ' if where else ''}{what}")

    def _get(self, source: Mapping[str, Any], field: str) -> Any:
        if field not in source:
            raise self.error(field, "missing")
        return source[field]

    def seconds(self, source: Mapping[str, Any], field: str) -> float:
        """A time that is finite and not negative."""
        return self._check_seconds(self._get(source, field), field)

    def _check_seconds(self, value: Any, field: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(field, f"expected seconds, got {shown(value)}")
        seconds = float(value) if abs(value) < 1e9 else math.inf
        if not math.isfinite(seconds):
            raise self.error(field, f"must be a finite number of seconds, got {value!r}")
        if seconds < 0.0:
            raise self.error(field, f"must not be negative, got {value!r}")
        return seconds

    def integer(self, source: Mapping[str, Any], field: str, least: int = 1) -> int:
        """A number of things, at least `least`."""
        value = self._get(source, field)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            kind = "a positive integer" if least == 1 else f"an integer from {least}"
            raise self.error(field, f"expected {kind}, got {shown(value)}")
        return value

    def text(self, source: Mapping[str, Any], field: str) -> str:
        """A text that is not empty."""
        value = self._get(source, field)
        if not isinstance(value, str) or not value:
            raise self.error(field, f"expected a text, got {shown(value)}")
        if not value.isprintable():
            raise self.error(field, f"has characters that cannot be printed: {shown(value)}")
        return value

    def entries(self, source: Mapping[str, Any], field: str) -> list[Any]:
        """A list that is neither empty nor absurdly long."""
        value = self._get(source, field)
        if not isinstance(value, list) or not value:
            raise self.error(field, f"expected a list with entries, got {shown(value)}")
        if len(value) > ENTRIES_MAX:
            raise self.error(
                field, f"has {len(value)} entries; at most {ENTRIES_MAX} are supported"
            )
        return value

    def named_entries(
        self, source: Mapping[str, Any], field: str, *, may_be_empty: bool = False
    ) -> Iterator[tuple[FieldReader, str, Mapping[str, Any]]]:
        """Go through a list of objects with a `name` each, no name twice.

        Args:
            source: the object that has the list.
            field: the list's name.
            may_be_empty: whether a name may be the empty text.

        Yields:
            A reader for the entry's place, its name, and the entry.
        """
        seen: set[str] = set()
        for index, entry in enumerate(self.entries(source, field)):
            place = self.inside(f"{field}[{index}]")
            if not isinstance(entry, dict):
                raise place.error("", f"expected an object, got {shown(entry)}")
            name = "" if may_be_empty and entry.get("name") == "" else place.text(entry, "name")
            if name in seen:
                raise place.error("name", f"{name!r} occurs twice")
            seen.add(name)
            yield place, name, entry

    def shape(self, source: Mapping[str, Any], field: str) -> tuple[int, ...]:
        """Dimensions."""
        value = self._get(source, field)
        sizes_are_sane = isinstance(value, list) and all(
            isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**48
            for size in value
        )
        if not sizes_are_sane or prod(value) >= 2**48:
            raise self.error(field, f"expected a list of sizes, got {shown(value)}")
        return tuple(value)

    def calls(self, source: Mapping[str, Any], field: str) -> tuple[tuple[float, float], ...]:
        """Pairs of a start and an end."""
        calls = []
        for index, pair in enumerate(self.entries(source, field)):
            place = f"{field}[{index}]"
            if not isinstance(pair, list) or len(pair) != 2:
                raise self.error(place, f"expected start and end, got {shown(pair)}")
            start_s, end_s = (self._check_seconds(value, place) for value in pair)
            if start_s > end_s:
                raise self.error(place, f"ends at {end_s}, before its start at {start_s}")
            calls.append((start_s, end_s))
        return tuple(calls)


def profile_from(source: Mapping[str, Any], reader: FieldReader) -> Profile:
    """Read a profile of gradlane's own format from the object of a file.

    Raises:
        ProfileError: it is none.
    """
    if "format" not in source:
        raise reader.error("format", f'missing: a profile has "format": "{FORMAT}"')
    if source["format"] != FORMAT:
        raise reader.error("format", f'expected "{FORMAT}", got {shown(source["format"])}')
    version = reader.integer(source, "version")
    if version != VERSION:
        raise reader.error("version", f"is {version}; this gradlane reads version {VERSION}")
    forward_s = reader.seconds(source, "forward_s")
    compute_s = reader.seconds(source, "compute_s")
    if compute_s <= 0.0 or forward_s > compute_s:
        raise reader.error("forward_s", f"{forward_s} is not within compute_s, {compute_s}")
    return Profile(
        model=reader.text(source, "model"),
        batch_size=reader.integer(source, "batch_size"),
        forward_s=forward_s,
        compute_s=compute_s,
        tensors=tuple(
            _tensor(place, name, entry, forward_s, compute_s)
            for place, name, entry in reader.named_entries(source, "tensors")
        ),
        device=reader.text(source, "device") if "device" in source else None,
        batch=_batch(source["batch"], reader.inside("batch")) if "batch" in source else None,
        flops=reader.integer(source, "flops", 0) if "flops" in source else None,
        modules=tuple(_modules(source, reader)) if "modules" in source else (),
    )


def _tensor(
    place: FieldReader, name: str, entry: Mapping[str, Any], forward_s: float, compute_s: float
) -> ProfileTensor:
    dtype = place.text(entry, "dtype")
    if dtype not in DTYPE_BYTES:
        raise place.error("dtype", f"unknown {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    shape = place.shape(entry, "shape")
    need_s = place.seconds(entry, "need_s")
    if need_s > forward_s:
        raise place.error("need_s", f"{need_s} is after the end of forward, {forward_s}")
    ready_s = place.seconds(entry, "ready_s")
    if not forward_s <= ready_s <= compute_s:
        raise place.error(
            "ready_s", f"{ready_s} is not within backward, {forward_s} to {compute_s}"
        )
    return ProfileTensor(
        name,
        shape,
        dtype,
        need_s,
        ready_s,
        place.text(entry, "layer") if "layer" in entry else None,
        place.integer(entry, "gradients", 0) if "gradients" in entry else None,
        place.integer(entry, "rows", 0) if "rows" in entry else None,
    )


def _modules(source: Mapping[str, Any], reader: FieldReader) -> Iterator[ProfileModule]:
    for place, name, entry in reader.named_entries(source, "modules", may_be_empty=True):
        yield ProfileModule(
            name,
            place.text(entry, "layer"),
            place.calls(entry, "forwards_s"),
            place.integer(entry, "flops", 0) if "flops" in entry else None,
        )


def _batch(source: Any, reader: FieldReader) -> BatchTime:
    if not isinstance(source, dict):
        raise reader.error("", f"expected an object, got {shown(source)}")
    lower_s = reader.seconds(source, "lower_quartile_s")
    median_s = reader.seconds(source, "median_s")
    upper_s = reader.seconds(source, "upper_quartile_s")
    if not lower_s <= median_s <= upper_s:
        raise reader.error("median_s", f"{median_s} is not between its quartiles")
    return BatchTime(reader.integer(source, "steps"), median_s, lower_s, upper_s)
