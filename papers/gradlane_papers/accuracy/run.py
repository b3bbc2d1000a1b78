"""A run of the study: its task, its scheme and their numbers.

Schemes are names of codecs and of rules, as text.

`asgd` is asynchronous training (R5 of the P3 paper's comparison), `local` local updates, with a
codec behind a plus sign where there is one, and `powersgd` DDP's hook; everything else is the text
of a codec, with `p3` for full precision, which is what P3 sends.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradlane.codecs import Codec
from gradlane.training.options.local_updates import NAME as LOCAL
from gradlane.training.options.local_updates import Local, parse_local
from gradlane_papers.accuracy.tasks import Task, task_of

FULL_PRECISION = "p3"
REAL = "real"
POWER_SGD_RANK = 4
"""Columns of a factor where the text does not say."""


@dataclass(frozen=True)
class StudyScheme:
    """One way to make gradients of several workers into updates.

    Attributes:
        text: as it was written, and how results name it.
        codec: canonical text of the codec of pushes and broadcasts.
        is_asynchronous: whether each worker's gradient is applied alone.
        order: of asynchronous workers: `"round"`, one after another, `"random"`, or `"real"`, that
            of processes which run beside each other.
        lr_share: of the task's learning rate, for each gradient that is applied alone.
        local: local updates, or None.
        power_sgd_rank: of PowerSGD's factors; 0: there are none.
    """

    text: str
    codec: str = "f32"
    is_asynchronous: bool = False
    order: str = "round"
    lr_share: float = 1.0
    local: Local | None = None
    power_sgd_rank: int = 0

    def codec_for(self, optimizer: str, steps: int, momentum: float) -> str:
        """Return the codec of a training; `dgc` is told what the task's optimizer leaves to it.

        Where the text does not say otherwise, what `dgc` sends falls over the first quarter of the
        steps, and momentum is only taken from an optimizer that has just that.
        """
        if not self.takes_momentum:
            return self.codec
        given = self.text.replace(" ", "")
        text = given
        if "momentum=" not in given:
            text += f",momentum={momentum if optimizer == 'sgd' else 0.0:g}"
        if "warmup=" not in given:
            text += f",warmup={steps // 4}"
        return Codec(text if ":" in given else text.replace(",", ":", 1)).spec

    @property
    def takes_momentum(self) -> bool:
        """Whether the codec takes momentum itself, so that the optimizer must not."""
        return self.codec.startswith("dgc:")


def parse_scheme(text: str, workers: int) -> StudyScheme:
    """Return the scheme with this text.

    Args:
        text: `p3`, `asgd`, `asgd:order=real,lr=mean`, `local:steps=32,fragments=4`,
            `local:outer=average + qsgd:bits=8`, `powersgd:rank=2`, or a codec.
        workers: whose number divides the learning rate where `lr=mean`.

    Raises:
        ValueError: there is none.
    """
    text = text.strip()
    if text == FULL_PRECISION:
        return StudyScheme(text)
    name, _, options = text.partition(":")
    if name == LOCAL:
        local, _, codec = text.partition("+")
        return StudyScheme(text, Codec(codec.strip() or "f32").spec, local=parse_local(local))
    if name == "powersgd":
        given = options.removeprefix("rank=") if options else str(POWER_SGD_RANK)
        if not given.isdecimal() or not 1 <= int(given) <= 64:
            raise ValueError(f"{text!r}: powersgd has one option, rank=1 to 64")
        return StudyScheme(text, power_sgd_rank=int(given))
    if name != "asgd":
        return StudyScheme(text, Codec(text).spec)
    values = {"order": "round", "lr": "full"}
    allowed = {"order": ("round", "random", REAL), "lr": ("full", "mean")}
    for part in options.split(",") if options else ():
        key, _, value = part.strip().partition("=")
        if key not in allowed or value not in allowed[key]:
            raise ValueError(
                f"{text!r}: {part.strip()!r} is no option of asgd; there are: "
                f"order=round|random|{REAL}, lr=full|mean"
            )
        values[key] = value
    share = 1.0 if values["lr"] == "full" else 1.0 / workers
    return StudyScheme(text, is_asynchronous=True, order=values["order"], lr_share=share)


@dataclass(frozen=True)
class Run:
    """One run: what makes it different from all others.

    Attributes:
        task: a task, as `task_of` takes it.
        scheme: text of a scheme.
        layers: of `exchange.LAYERS`: those whose weights alone are encoded.
        seed: of model, batches and draws.
        workers: how many are emulated.
        steps: how many are taken.
    """

    task: str
    scheme: str
    layers: str
    seed: int
    workers: int
    steps: int

    def parsed(self) -> tuple[Task, StudyScheme]:
        """Return the task and the scheme.

        Raises:
            ValueError: one of them is unknown.
        """
        return task_of(self.task), parse_scheme(self.scheme, self.workers)
