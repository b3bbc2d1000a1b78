"""The one place where the stages of a model are made, and their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from gradlane.training.core import Channel, rank_channel
from gradlane.training.model.consistency_check import ConsistencyCheck, Hyperparameters
from gradlane.training.model.contributors import Contributors
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.model.lazy_parameters import Exemption
from gradlane.training.model.server_updates import ServerUpdates
from gradlane.training.model.stages.clipping import Clipping
from gradlane.training.model.stages.forward_priorities import ForwardPriorities
from gradlane.training.model.stages.full_wait_warning import FullWaitWarning
from gradlane.training.model.stages.late_gradients import LateGradientBuffer
from gradlane.training.model.stages.local_clipping import LocalClipping
from gradlane.training.model.stages.member_changes import MemberChanges
from gradlane.training.model.stages.momentum_takeover import MomentumTakeover
from gradlane.training.model.stages.servers import Servers
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.stages.stage_list import StageList
from gradlane.training.model.stages.unscaling import Unscaling
from gradlane.training.model.stages.weighting import Weighting
from gradlane.training.model.step_layout import StepLayout
from gradlane.training.model.update_set import UpdateSet
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.membership import Membership
from gradlane.training.rendezvous.parameter_check import ParameterCheck


@dataclass(frozen=True)
class ModelStages:
    """The stages of one model: in order, and those that calls of the session go to.

    Attributes:
        in_order: all of them.
        weighting: `session.weight()`.
        unscaling: `GradScaler`.
        clipping: `session.clip_grad_norm_()`.
        consistency: all ranks' statuses.
        full_waits: knows whether the program reads averaged gradients.
        late: keeps late gradients, or None where they are lost.
    """

    in_order: StageList
    weighting: Weighting
    unscaling: Unscaling
    clipping: Clipping
    consistency: ConsistencyCheck
    full_waits: FullWaitWarning
    late: LateGradientBuffer | None


def build_stages(
    options: Options,
    rank_info: RankInfo,
    channel: Channel,
    layout: StepLayout,
    buffers: str,
    optimizer: Optimizer,
    updates: UpdateSet,
    agreement: ParameterCheck,
    membership: Membership,
    failure: FailureLatch,
    exempt: Exemption,
    contributors: Contributors,
    *,
    of_session: Sequence[StepStage] = (),
    server: ServerUpdates | None = None,
    takeover: MomentumTakeover | None = None,
    local_limit: float = 0.0,
    adding_up: str = "",
) -> ModelStages:
    """Make the stages of a model.

    Args:
        options: in force for it.
        rank_info: this rank.
        channel: the model's.
        layout: the tensors that take part.
        buffers: how they are kept: `"broadcast"`, `"average"` or `"local"`.
        optimizer: the user's.
        updates: the model's optimizers.
        agreement: compares parameters across ranks.
        membership: the ranks that train.
        failure: the model's.
        exempt: threads in it read parameters without waiting.
        contributors: of the steps.
        of_session: what the session does before each step; these come first.
        server: updates of `update="server"`, or None where each rank updates.
        takeover: gives momentum to codecs that apply it, or None.
        local_limit: to which a codec has each rank's gradients clipped; 0: to none.
        adding_up: the codec that adds gradients of several steps up with momentum, or empty.
    """
    trained = layout.trained
    dtypes = [entry.dtype for entry in trained]
    weighting = Weighting(trained, layout.captured)
    unscaling = Unscaling(updates, dtypes, len(trained), adding_up)
    clipping = Clipping(adding_up)
    full_waits = FullWaitWarning(updates, clipping)
    consistency = ConsistencyCheck(
        agreement,
        Hyperparameters(optimizer),
        failure,
        exempt,
        membership,
        clipping,
        "several ranks: those that train unlike are found before their gradients mix"
        if layout.status is not None
        else "none travel: one rank, updates on servers, or steps without late ranks",
    )
    late = None
    if options.stragglers.late == "carry" and rank_info.world_size > 1:
        late = LateGradientBuffer(contributors)
    stages: list[StepStage] = [*of_session]
    stages.append(StepStage("local accumulation", "session.no_sync(): gradients add up, unsent"))
    if server is not None:
        ranks = rank_channel(channel, "updating on servers")
        stages.append(Servers(ranks, server, updates, failure, exempt))
    schemes = Counter(one.scheme for one in layout.factored.values())
    for scheme, count in sorted(schemes.items()):
        stages.append(StepStage(f"scheme {scheme}", f"{count} tensors travel as factors or rows"))
    if local_limit:
        stages.append(LocalClipping(local_limit))
    if takeover is not None:
        stages.append(takeover)
    if late is not None:
        stages.append(late)
    if server is None:
        # Means that stay on servers are neither weighted nor clipped: the calls are refused.
        stages += [weighting, unscaling, clipping]
    if layout.groups:
        members = sum(len(group.members) for group in layout.groups)
        told = f"{members} small tensors travel in {len(layout.groups)} groups"
        stages.append(StepStage("joined gradients", told))
    if layout.buffers is not None:
        stages.append(
            StepStage("buffers", f"prepare(buffers={buffers!r}): all ranks have the same")
        )
    if rank_info.rank == 0 and rank_info.ranks > 1:
        stages.append(ForwardPriorities(channel, layout))
    stages += [full_waits, consistency]
    if options.going_on.on:
        stages.append(MemberChanges(membership))
    return ModelStages(
        StageList(stages),
        weighting,
        unscaling,
        clipping,
        consistency,
        full_waits,
        late,
    )
