"""What all parts of the kernel, and the calls above it, work on."""

from __future__ import annotations

from dataclasses import dataclass

from gradlane.training.model.kernel.gradient_exchange import GradientExchange
from gradlane.training.model.kernel.phases import Phases
from gradlane.training.model.lazy_parameters import Exemption, LazyParameters
from gradlane.training.model.stages.stage_list import StageList
from gradlane.training.model.update_set import UpdateSet
from gradlane.training.modules.stale_flags import StaleFlags


@dataclass(frozen=True)
class KernelParts:
    """The parts that stand below the others.

    Attributes:
        phases: where the step is.
        exchange: submits gradients and takes back their means.
        updates: runs the optimizers: whole, or later and in parts.
        stages: what steps do beside.
        exempt: threads in it read parameters without waiting.
        lazy: the classes of its trained parameters.
        stale_flags: have compiled code wait before it uses any parameter again.
    """

    phases: Phases
    exchange: GradientExchange
    updates: UpdateSet
    stages: StageList
    exempt: Exemption
    lazy: LazyParameters
    stale_flags: StaleFlags
