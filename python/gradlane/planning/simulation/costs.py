"""Constants of a machine and its ports, as `gradlane lab calibrate` measured them, in one file.

The simulator's own constants are in `crates/gradlane-sim/src/costs.rs`. A file replaces those that
it names::

    {"format": "gradlane-costs", "version": 1, "measured": {"date": "2026-11-21", ...},
     "constants": {"wake_s": {"value": 6e-05, "how": "..."}},
     "codecs": {"f16": {"encode_byte_s": 1e-10, "decode_byte_s": 1e-10}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradlane.formats.untrusted import EscapedError

FORMAT = "gradlane-costs"
VERSION = 1
HOST_CONSTANTS = (
    "send_frame_s",
    "send_byte_s",
    "receive_frame_s",
    "receive_byte_s",
    "seal_byte_s",
    "open_byte_s",
    "work_s",
    "reduce_byte_s",
    "command_s",
    "wake_s",
    "between_steps_s",
    "local_copy_byte_s",
    "local_sum_byte_s",
    "local_word_s",
)
"""Seconds of a host; see `costs.rs`."""
NETWORK_CONSTANTS = ("goodput_share", "send_buffer_floor_bytes", "share_spread")
"""Constants of ports and connections; see `scenario.rs`."""
ACCELERATOR_CONSTANTS = ("operations_per_s",)
"""Floating-point operations a second for rebuilding gradients from factors. `calibrate` does not
measure it, since the lab's accelerators sleep; add it by hand to override the profile's."""
INTEGER_CONSTANTS = ("send_buffer_floor_bytes",)


class CostsError(EscapedError, ValueError):
    """An invalid costs file; the text names file, constant and position."""


@dataclass(frozen=True)
class MachineCosts:
    """Constants that replace the simulator's own."""

    host: Mapping[str, float] = field(default_factory=dict)
    """Of `HOST_CONSTANTS`, in seconds."""
    network: Mapping[str, float] = field(default_factory=dict)
    """Of `NETWORK_CONSTANTS`."""
    operations_per_s: float | None = None
    """Of the accelerator, for rebuilding gradients; None: that of the profile's own arithmetic."""
    codecs: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Seconds of encoding and of decoding a byte of values, by the codec's text."""

    def apply_to(self, scenario: dict[str, Any]) -> None:
        """Write the constants into a scenario of a cluster."""
        if self.host:
            scenario["costs"] = {**self.host, **scenario.get("costs", {})}
        for name, value in self.network.items():
            scenario["network"][name] = int(value) if name in INTEGER_CONSTANTS else value


def read_costs(path: Path) -> MachineCosts:
    """Read a file that `gradlane lab calibrate --json` wrote.

    Raises:
        CostsError: the file cannot be read or is none; the text names the constant.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CostsError(f"cannot read costs {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CostsError(f"costs {path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CostsError(
            f'costs {path}: format: expected "{FORMAT}"; make one with `gradlane lab calibrate`'
        )
    if content.get("version") != VERSION:
        raise CostsError(
            f"costs {path}: version: is {content.get('version')!r}; this gradlane reads {VERSION}"
        )
    constants = content.get("constants")
    if not isinstance(constants, dict) or not constants:
        raise CostsError(f"costs {path}: constants: expected an object with entries")
    found: dict[str, float] = {}
    for name, entry in constants.items():
        constants_known = HOST_CONSTANTS + NETWORK_CONSTANTS + ACCELERATOR_CONSTANTS
        if name not in constants_known:
            known = ", ".join(constants_known)
            raise CostsError(f"costs {path}: constants.{name}: unknown; known are {known}")
        found[name] = _value(path, name, entry)
    return MachineCosts(
        host={name: value for name, value in found.items() if name in HOST_CONSTANTS},
        network={name: value for name, value in found.items() if name in NETWORK_CONSTANTS},
        operations_per_s=found.get("operations_per_s"),
        codecs=_codecs(path, content.get("codecs", {})),
    )


def _codecs(path: Path, entries: Any) -> dict[str, tuple[float, float]]:
    if not isinstance(entries, dict):
        raise CostsError(f"costs {path}: codecs: expected an object with entries")
    found = {}
    for codec, entry in entries.items():
        values = []
        for name in ("encode_byte_s", "decode_byte_s"):
            value = entry.get(name) if isinstance(entry, dict) else None
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0.0 <= float(value) <= 1.0:  # type: ignore[arg-type]
                raise CostsError(
                    f"costs {path}: codecs.{codec}.{name}: expected seconds from 0 to 1, "
                    f"got {value!r}"
                )
            values.append(float(value))  # type: ignore[arg-type]
        found[codec] = (values[0], values[1])
    return found


def _value(path: Path, name: str, entry: Any) -> float:
    value = entry.get("value") if isinstance(entry, dict) else None
    least, most = {
        "goodput_share": (0.01, 1.0),
        "share_spread": (0.0, 0.9),
        "send_buffer_floor_bytes": (1.0, 1e12),
        "operations_per_s": (1.0, 1e30),
    }.get(name, (0.0, 1.0))
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise CostsError(
            f"costs {path}: constants.{name}.value: expected {least:g} to {most:g}, got {value!r}"
        )
    return float(value)
