"""The page `docs/options.md`, made from the fields of `Options` and of its objects.

`python -m gradlane.training.options.reference` writes it to stdout.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from gradlane.training.options.codec_options import CODECS, CodecOptions
from gradlane.training.options.option_fields import OptionGroup, option_rules
from gradlane.training.options.option_groups import ENVIRONMENT_GROUPS
from gradlane.training.options.options import GROUPS, Options

_HEAD = """# Options

`gradlane.init` takes these keywords. An object holds the options that belong together:

```python
session = gradlane.init(
    strategy=gradlane.Strategy("p3", slice_elems=20_000),
    codec=gradlane.codecs.Qsgd(bits=8),
    network=gradlane.Network(interface="eth1", lanes=2),
    checkpoints=gradlane.Checkpoints("/shared/run1", every=500),
)
```

{first}
## How to give them

A text stands for the first option of `Strategy`, `LocalSums` and `Stragglers`: `strategy="ring"`;
`True` and `False` for the first of `GoingOn`. A codec is an object of `gradlane.codecs`, or a text
with the same options: `codec="qsgd:bits=8"`.
A value out of its range is refused by name. *All ranks* marks options that must be the same on
every rank; a session in which they differ is refused on all of them.

Options of `Rendezvous`, `Network`, `Checkpoints` and `Monitoring` that the program does not give
are read from their variables: an empty one says no to `pacing` and `summary`, is refused for
`secret` and `secret_file`, and says nothing to the others. gradlane warns of a variable that begins
with `GRADLANE_` and is unknown.

`python -m gradlane.training.options.reference` writes this page.
"""
_FIRST = {
    "you try it out": "nothing: results are DDP's, to rounding "
    "([how to check](first-evening.md#4-the-same-learning))",
    "results look wrong": "`session.prepare(model, optimizer, defer=False)`",
    "a machine has several networks, or a firewall": "`network=gradlane.Network("
    'interface="ens5f0", ports=(20000, 20100))`',
    "others share the network": '`network=gradlane.Network(secret_file="job.key")` '
    "([security](security.md))",
    "a rank may be busy for over half an hour, as with an evaluation": "`network=gradlane.Network("
    "progress_timeout_s=7200)` ([runs of weeks](long-runs.md))",
    "a restart is to lose little": '`checkpoints=gradlane.Checkpoints("/shared/run1", every=500)` '
    "([checkpoints](checkpoints.md))",
    "machines come and go": "`going_on=True` ([going on](going-on.md))",
    "the network is the limit, and results must keep their bits": "`session.prepare(model, "
    'optimizer, plan="auto")` ([planning](planning.md))',
    "… and they need not": '`codec="qsgd:bits=8"` ([low precision](low-precision.md)), then '
    "`update=gradlane.Local(steps=32)` ([local updates](local-updates.md))",
}
"""Options that a user needs first, by where they are needed."""
FURTHER_VARIABLES = {
    "GRADLANE_SIMD": "Instruction set of the kernels; the best of the machine if absent.",
}
"""Meanings of the environment variables that give no option."""


def options_page() -> str:
    """Return the page."""
    rows = "".join(f"| {where} | {given} |\n" for where, given in _FIRST.items())
    first = f"## Which options first\n\n| where | give |\n| --- | --- |\n{rows}"
    parts = [_HEAD.replace("{first}", first), "\n## `gradlane.init`\n\n", _table(Options)]
    for kind in GROUPS.values():
        words = (kind.__doc__ or "").strip()
        parts.append(f"\n## `gradlane.{kind.__name__}`\n\n{words}\n\n{_table(kind)}")
    for codec in CODECS.values():
        title = f"\n## `gradlane.codecs.{codec.__name__}`: `{codec.name}`\n\n"
        parts.append(f"{title}{inspect.getdoc(codec)}\n\n{_table(codec)}")
    parts.append("\n## Further variables\n\n| variable | meaning |\n| --- | --- |\n")
    parts += [f"| `{name}` | {meaning} |\n" for name, meaning in FURTHER_VARIABLES.items()]
    return "".join(parts)


def _table(options: type[Any]) -> str:
    """Return the options of a dataclass as a table."""
    has_variables = options in ENVIRONMENT_GROUPS
    is_codec = issubclass(options, CodecOptions)
    rows = []
    for name, rules in option_rules(options).items():
        row = {
            "option": f"`{name}`",
            "default": _default(getattr(options, name)),
            "allowed": rules.allowed or "-",
        }
        if not is_codec:
            row["all ranks"] = "yes" if rules.agreed else "-"
        if has_variables:
            row["variable"] = f"`{rules.variable}`" if rules.in_environment else "-"
        rows.append({**row, "meaning": rules.doc})
    lines = [[*rows[0]], ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _default(value: Any) -> str:
    """Return a default, or that of the first option of an object, which a text can give."""
    if isinstance(value, OptionGroup):
        value = getattr(value, next(iter(option_rules(value))))
    return "-" if value is None else f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(options_page())
