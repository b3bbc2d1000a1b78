"""Which features exclude or need which others: one table, from which all refusals are made.

A feature is an option, a way to prepare a model, or a call. `refusal` looks for the first row that
the features in force break; the page `docs/compatibility.md` has all rows, and a test walks all
pairs. `python -m gradlane.training.options.compatibility` writes the page to stdout.

Needs no torch and no core: options are checked where they are given.
"""

# ruff: noqa: E501
from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias


class When(enum.Enum):
    """The moment at which a feature is asked for."""

    INIT = "init"
    PREPARE = "prepare"
    CALL = "call"


class Feature(enum.Enum):
    """What a program can ask for: how it is written, how to do without it, and when it is asked."""

    RING = ('strategy="ring"', 'use strategy="p3"')
    PULLS = ('strategy="kvstore"` or `"deferred-pull"', 'use strategy="p3", "slicing" or "wfbp"')
    ASGD = ('strategy="asgd"', 'use strategy="p3"')
    FACTORS = ('scheme="sfb"` or `"adam"', "leave the scheme out")
    ONE_OWNER = ('scheme="adam"', 'use scheme="sfb"')
    SERVER = ('update="server"', 'use update="worker"')
    LOCAL = ("update=gradlane.Local(...)", 'use update="worker"')
    STRAGGLERS = ('stragglers="drop"` or `"backup=1"', 'use stragglers="wait"')
    GOING_ON = ("going_on=True", "open the session without it")
    JOINS = ("join=True", "leave join out")
    SERVERS = ("servers=", "leave servers out")
    SERVING = ("workers=", "leave workers out, so that all ranks train")
    CHECK_EVERY = ("check_every=", "leave check_every out, and a sample is compared")
    CODEC = ("codec=", "leave the codec out")
    DGC = ('codec="dgc"', "use topk, which also sends the largest values")
    RESIDUAL = (
        'codec="topk"',
        "give a codec without error feedback, such as 'qsgd:bits=8', or none",
    )
    RESIDUAL_ON_RING = ('codec="topk"` with `strategy="ring"', "use strategy='p3'")
    DECAY = ('codec="topk:decay=..."', "leave decay out")
    ADDS_UP = ('codec="dgc"` with momentum or clip', "leave momentum and clip out of the codec")
    CLIPPING_CODEC = ('codec="dgc:clip=..."', "leave the clip out")
    INTEGER_RING = ('codec="qsgd:ring=integer"', "use strategy='p3'")
    PATTERNS = ("codec={...}", "give one codec for all")
    NODES = ('local="leader"` or `"shared"', 'use local="off"')
    SHARED = ('local="shared"', 'use local="leader"')
    COLLECTIVE = ('local_sums="collective"', 'use where="host"')
    NO_NODES = ('local="off"', 'use local="leader", "shared" or "auto"')
    RANKS_PER_NODE = ("several ranks on each node", "leave ranks-per-node out")
    PLANNED_NODES = (
        "a plan or a simulation of nodes of several ranks",
        "leave ranks-per-node out",
    )
    ONE_NODE = ('local="leader"` on a single node', 'use local="off"')
    PS_SCHEME = ('scheme="ps"', "leave the scheme out")
    CHECKPOINTS = ("checkpoints=", "leave checkpoints out")
    TRACE = ("trace=", "leave trace out, and see session.metrics()")

    ROWS = ("rows of sparse gradients", "", When.PREPARE)
    PLAN = ("prepare(plan=...)", "leave plan out", When.PREPARE)
    PLAN_RULE = ('prepare(plan="auto")` or `"poseidon"', "leave plan out", When.PREPARE)
    PLAN_RING = ("a plan with scheme ring", "use one with scheme 'ps' alone", When.PREPARE)
    PLAN_FACTORS = ("a plan with factors", "use one without factors", When.PREPARE)
    DEFER = ("prepare(defer=...)", "leave defer out", When.PREPARE)
    DEFER_TRUE = ("prepare(defer=True)", "leave defer out", When.PREPARE)
    BUFFERS = ('prepare(buffers="average")', 'give buffers="local"', When.PREPARE)
    CLOSURE = (
        "an optimizer that calls its closure itself (LBFGS)",
        "use another optimizer",
        When.PREPARE,
    )
    SEVERAL = ("prepare() of several optimizers", "prepare one optimizer", When.PREPARE)
    UNSERVED = (
        "an optimizer other than torch's SGD, Adam and AdamW",
        "use one of these",
        When.PREPARE,
    )
    AMSGRAD = ("an optimizer with amsgrad=True", "leave amsgrad out", When.PREPARE)
    OWN_MOMENTUM = (
        "an optimizer with momentum",
        "use torch.optim.SGD with momentum=0",
        When.PREPARE,
    )
    MOMENTUM_CODEC = ('codec="dgc"` with momentum', "use momentum=0 in the codec", When.PREPARE)
    STEP_HOOKS = ("an optimizer with step hooks", "leave the hooks out", When.PREPARE)
    SCALER = ("GradScaler", "train without it", When.PREPARE)
    FACTOR_LAYER = ("a layer that travels as factors", "use a scheme without factors", When.PREPARE)
    TIED = ("trained parameters that share memory", "prepare copies", When.PREPARE)
    ON_DEVICE = ("trained parameters on an accelerator", "keep them on the CPU", When.PREPARE)
    WIDE = ("trained parameters of 64 bits", "train in float32 or bfloat16", When.PREPARE)
    NARROW = (
        "trained parameters of 16 bits",
        "keep parameters in float32, and compute in 16 bits by torch.autocast",
        When.PREPARE,
    )
    HALF = ("trained parameters of float16", "train in float32 or bfloat16", When.PREPARE)
    STRIDED = (
        "trained parameters that are not dense in memory",
        "prepare contiguous copies",
        When.PREPARE,
    )
    FSDP = (
        "prepare() of a model that fully_shard has sharded",
        "prepare the bare model",
        When.PREPARE,
    )
    FSDP_EXACT = (
        "prepare() of a model that fully_shard has sharded, without update=gradlane.Local(...)",
        "open the session with update=gradlane.Local(...)",
        When.PREPARE,
    )
    SECOND = (
        "prepare() of a second model",
        "prepare one module that holds both, such as nn.ModuleDict",
        When.PREPARE,
    )
    AGAIN = (
        "prepare() again",
        "close the session, and prepare the model in a new one",
        When.PREPARE,
    )

    ACCELERATOR = ("an accelerator of several processes", "leave it out", When.PREPARE)
    LIGHTNING = ("GradlaneStrategy", "leave it out", When.PREPARE)
    MANUAL = ("a module with automatic_optimization=False", "leave it at True", When.PREPARE)
    WRAPPER_SHARDS = (
        "FSDP, DeepSpeed or Megatron of an accelerator or a trainer",
        "leave these options out",
        When.PREPARE,
    )
    ATTACHED = ("attach() of an accelerator or a trainer", "leave it out", When.PREPARE)

    ARRAYS = ("session.arrays.push()", "open a session without it for arrays", When.CALL)
    REGISTER = ("session.arrays.register()", "open a session without it for arrays", When.CALL)
    WEIGHT = ("session.weight()", "leave it out", When.CALL)
    CLIP = ("session.clip_grad_norm_()", "leave it out", When.CALL)
    JOIN = ("session.join()", "leave it out", When.CALL)
    NO_SYNC = ("session.no_sync()", "leave it out", When.CALL)
    QUERY = ("session.planning.query()", "leave it out", When.CALL)
    BEST_SCHEME = ("session.planning.best_scheme()", "leave it out", When.CALL)
    KEEP_PACE = ("session.keep_pace()", "leave it out", When.CALL)
    RESTORE = ("session.restore()", "leave it out", When.CALL)
    END_BY_HAND = (
        "set_manual_backward_finalization(True)",
        "leave it out",
        When.PREPARE,
    )
    GRADIENT_HOOK = (
        "register_post_accumulate_grad_hook() of a parameter",
        "step the optimizer after backward()",
        When.PREPARE,
    )
    GATHER_INTEGERS = ("session.gather_integers()", "use session.exchange()", When.CALL)

    def __init__(self, label: str, without: str, when: When = When.INIT) -> None:
        self.label = label
        self.without = without
        self.when = when


Features: TypeAlias = Mapping[Feature, str]
"""Features in force, each in the words by which a program has asked for it."""


class Kind(enum.Enum):
    """Why a feature excludes another one."""

    CANNOT = "contradicts"
    """Both together have no meaning."""
    NOT_BUILT = "not built"
    """They could go together."""


CANNOT, NOT_BUILT = Kind


@dataclass(frozen=True)
class PairRow:
    """Two features of which one excludes or needs the other.

    Attributes:
        feature: the one that an error names first.
        other: what it excludes, or needs.
        kind: why.
        reason: in words that follow the names of both.
        remedy: what to do; if empty, to do without `other`.
        needs: `feature` needs `other`.
    """

    feature: Feature
    other: Feature
    kind: Kind
    reason: str
    remedy: str = ""
    needs: bool = False

    @property
    def instead(self) -> str:
        """What to do."""
        return self.remedy or self.other.without


@dataclass(frozen=True)
class Conflict:
    """A row that features in force break."""

    row: PairRow
    features: Features

    @property
    def text(self) -> str:
        """The refusal: both features, why, and what to do."""
        return self.told()

    def told(self, remedy: str = "") -> str:
        """Return the refusal, with another remedy than the row's if one is given."""
        row = self.row
        one = self.features[row.feature]
        other = f"without {row.other.label}" if row.needs else f"with {self.features[row.other]}"
        return f"{one} {other}: {row.reason}; {remedy or row.instead}"

    @property
    def why(self) -> str:
        """The other feature, and why it excludes the first."""
        return f"{self.features[self.row.other]}: {self.row.reason}"


def conflict(given: Features, among: Features = MappingProxyType({})) -> Conflict | None:
    """Return the first row that features break, or None.

    Args:
        given: the features that are asked for now; rows without any of them are not looked at.
        among: those that are in force already.
    """
    every = {**among, **given}
    for feature in given:
        for row in _ROWS_OF[feature]:
            if row.feature in every and (row.other in every) != row.needs:
                return Conflict(row, every)
    return None


def refusal(given: Features, among: Features = MappingProxyType({}), *, remedy: str = "") -> str:
    """Return why features do not go together, and what to do; empty if they do.

    Args:
        given: as for `conflict`.
        among: as for `conflict`.
        remedy: what to do in this case; if empty, what the row says.
    """
    found = conflict(given, among)
    return "" if found is None else found.told(remedy)


_F = Feature

# fmt: off
# One line a row, whatever its length.
ROWS = (
    PairRow(_F.RING, _F.SERVER, NOT_BUILT, "the servers that own slices keep the optimizer's state, and a ring has none"),
    PairRow(_F.RING, _F.PULLS, CANNOT, "workers pull from servers there, and a ring has none"),
    PairRow(_F.RING, _F.SERVERS, CANNOT, "a ring has no servers"),
    PairRow(_F.RING, _F.DGC, CANNOT, "it sends a rank's own momentum, and a hop of a ring encodes a sum of several ranks"),
    PairRow(_F.RING, _F.DECAY, CANNOT, "what decays is a rank's own residual, and a hop of a ring encodes a sum of several ranks"),
    PairRow(_F.FACTORS, _F.SERVER, NOT_BUILT, "the servers that own slices keep the optimizer's state, and factors are not added up there"),
    PairRow(_F.FACTORS, _F.PULLS, NOT_BUILT, "workers pull from servers there, and factors are not added up there"),
    PairRow(_F.ASGD, _F.SERVER, CANNOT, "each gradient is applied alone, where the parameters are kept for all ranks; otherwise every rank would train a model of its own", 'use update="server"', needs=True),
    PairRow(_F.ASGD, _F.CHECK_EVERY, CANNOT, "the ranks' parameters differ while they train, so there is nothing to compare", "use 0"),
    PairRow(_F.STRAGGLERS, _F.RING, CANNOT, "a ring needs every rank's part", "use p3, slicing or wfbp"),
    PairRow(_F.STRAGGLERS, _F.PULLS, NOT_BUILT, "its workers pull, and one that is late would ask for old results", "use p3, slicing or wfbp"),
    PairRow(_F.STRAGGLERS, _F.ASGD, CANNOT, "asynchronous training waits for nobody", "leave stragglers out"),
    PairRow(_F.STRAGGLERS, _F.FACTORS, NOT_BUILT, "gradients are rebuilt from the factors of all ranks"),
    PairRow(_F.STRAGGLERS, _F.SERVER, NOT_BUILT, "an owner that is late itself does not hold the parameters that it would update"),
    PairRow(_F.STRAGGLERS, _F.PLAN_RING, CANNOT, "a ring needs every rank's part", "use a plan whose tensors all have scheme 'ps', such as one that plan=\"auto\" finds in this session"),
    PairRow(_F.STRAGGLERS, _F.PLAN_FACTORS, NOT_BUILT, "gradients are rebuilt from the factors of all ranks", "use a plan whose tensors all have scheme 'ps', such as one that plan=\"auto\" finds in this session"),
    PairRow(_F.JOINS, _F.GOING_ON, CANNOT, "a rank joins a training that goes on when ranks come and go", "open all sessions with going_on=True", needs=True),
    PairRow(_F.JOINS, _F.LOCAL, NOT_BUILT, "ranks meet in exchanges alone: a call to let a rank in does not travel with them yet, and the outer momentum, residuals and counts of a round move to no new world", "leave join out, and restart all ranks, in a world of any size, from a state that was saved after session.synchronize()"),
    PairRow(_F.GOING_ON, _F.SERVER, NOT_BUILT, "a lost rank takes the optimizer's state of its slices along"),
    PairRow(_F.GOING_ON, _F.PULLS, NOT_BUILT, "only sums that every rank gets from their owners can be finished without a lost rank", "use p3, slicing, wfbp or ring"),
    PairRow(_F.GOING_ON, _F.ASGD, NOT_BUILT, "only sums that every rank gets from their owners can be finished without a lost rank", "use p3, slicing, wfbp or ring"),
    PairRow(_F.GOING_ON, _F.FACTORS, NOT_BUILT, "gradients are rebuilt from the factors of all ranks"),
    PairRow(_F.GOING_ON, _F.DGC, NOT_BUILT, "its clipping is for the number of ranks at the start, and its momentum is untested when ranks are lost"),
    PairRow(_F.GOING_ON, _F.RESIDUAL_ON_RING, CANNOT, "each rank holds back parts of sums, which are not its own contributions"),
    PairRow(_F.GOING_ON, _F.INTEGER_RING, NOT_BUILT, "codes are added up by scales of all ranks, and servers would need another size of slices"),
    PairRow(_F.GOING_ON, _F.STRAGGLERS, NOT_BUILT, "a step could lack ranks that are late and ranks that are lost"),
    PairRow(_F.GOING_ON, _F.SERVERS, NOT_BUILT, "the ranks that are left own all slices"),
    PairRow(_F.GOING_ON, _F.SERVING, NOT_BUILT, "ranks that only serve take no part in agreeing on members"),
    PairRow(_F.GOING_ON, _F.CHECK_EVERY, NOT_BUILT, "ranks would compare through the store, which may be lost with its rank"),
    PairRow(_F.GOING_ON, _F.SHARED, NOT_BUILT, 'each rank of a node would agree on members by itself; with local="leader" one of them does'),
    PairRow(_F.GOING_ON, _F.PLAN_RULE, NOT_BUILT, "all ranks reconnect to switch plans, which fails when one is lost", "find a plan before (`gradlane plan`), and give it as plan="),
    PairRow(_F.GOING_ON, _F.PLAN_FACTORS, NOT_BUILT, "it needs every rank's part", "use a plan whose tensors have scheme 'ps' or 'ring'"),
    PairRow(_F.GOING_ON, _F.BUFFERS, CANNOT, "in a step in which ranks are lost, averages would be over different numbers of ranks", 'use "broadcast" or "local"'),
    PairRow(_F.SECOND, _F.GOING_ON, NOT_BUILT, "each would agree on members by itself", "prepare one module that holds both, such as nn.ModuleDict"),
    PairRow(_F.SECOND, _F.LOCAL, NOT_BUILT, "two models would exchange at steps of their own", "prepare one module that holds both, such as nn.ModuleDict"),
    PairRow(_F.SECOND, _F.CHECKPOINTS, NOT_BUILT, "its files hold one model", "prepare one module that holds both, such as nn.ModuleDict, or save the models yourself"),
    PairRow(_F.ACCELERATOR, _F.GOING_ON, NOT_BUILT, "random states, losses and counts go through torch.distributed, which ends with a lost rank", "have each process be the only one of its accelerator (docs/going-on.md)"),
    PairRow(_F.LIGHTNING, _F.GOING_ON, NOT_BUILT, "Lightning's barriers and metrics go through torch.distributed, which ends with a lost rank", "give the trainer one device and no strategy, and prepare in a callback (docs/going-on.md)"),
    PairRow(_F.LIGHTNING, _F.SEVERAL, NOT_BUILT, "it prepares the module with its one optimizer", "write the loop yourself and prepare each model with its optimizer"),
    PairRow(_F.PS_SCHEME, _F.RING, CANNOT, "a ring has no servers", 'use strategy="p3"'),
    PairRow(_F.SERVING, _F.RANKS_PER_NODE, NOT_BUILT, "each of them is on a node of its own"),
    PairRow(_F.SERVERS, _F.PLANNED_NODES, NOT_BUILT, "servers are single ranks there", "leave --servers or --ranks-per-node out"),
    PairRow(_F.SERVING, _F.PLANNED_NODES, NOT_BUILT, "servers are single ranks there", "leave --servers or --ranks-per-node out"),
    PairRow(_F.GOING_ON, _F.ONE_NODE, CANNOT, "its ranks are lost as one, so none would go on"),
    PairRow(_F.MOMENTUM_CODEC, _F.ONE_NODE, CANNOT, "it takes the optimizer's momentum over, and the ranks of a single node add up without encoding anything"),
    PairRow(_F.OWN_MOMENTUM, _F.MOMENTUM_CODEC, CANNOT, "the codec applies the momentum of SGD itself", "use torch.optim.SGD(..., momentum=0) without a scheduler that cycles momentum, or momentum=0 in the codec"),
    PairRow(_F.LIGHTNING, _F.MANUAL, NOT_BUILT, "it takes the steps of automatic optimization", "write the loop yourself and prepare each model with its optimizer"),
    PairRow(_F.ATTACHED, _F.WRAPPER_SHARDS, NOT_BUILT, "gradlane keeps whole parameters on every rank"),
    PairRow(_F.STRIDED, _F.SERVER, NOT_BUILT, "the servers write parameters in place", 'prepare contiguous copies, or use update="worker"'),
    PairRow(_F.END_BY_HAND, _F.FSDP, NOT_BUILT, "gradients leave inside backward(), and its end makes them means", "leave it out"),
    PairRow(_F.GRADIENT_HOOK, _F.FSDP, CANNOT, "it reads the gradient in backward(), before it is the mean over nodes", "step the optimizer after backward()"),
    PairRow(_F.CLOSURE, _F.SERVER, CANNOT, "it looks at all gradients to choose its next step, and the servers step with them as they come"),
    PairRow(_F.CLOSURE, _F.STRAGGLERS, NOT_BUILT, "each evaluation needs the loss of every rank"),
    PairRow(_F.CLOSURE, _F.GOING_ON, NOT_BUILT, "a rank may be lost or join between two evaluations of one step"),
    PairRow(_F.CLOSURE, _F.FSDP, CANNOT, "it multiplies the gradients of all parameters, and each rank has a shard of them"),
    PairRow(_F.CLOSURE, _F.PLAN_RULE, NOT_BUILT, "a step that is recorded would have more exchanges than one"),
    PairRow(_F.CLOSURE, _F.DEFER_TRUE, CANNOT, "each evaluation waits for all gradients of the one before"),
    PairRow(_F.CLOSURE, _F.SEVERAL, CANNOT, "the others have no part in what its closure evaluates", "prepare it alone, for all parameters"),
    PairRow(_F.SEVERAL, _F.SERVER, NOT_BUILT, "the servers run one optimizer for all parameters"),
    PairRow(_F.UNSERVED, _F.SERVER, NOT_BUILT, "the servers run torch.optim.SGD, Adam and AdamW"),
    PairRow(_F.AMSGRAD, _F.SERVER, NOT_BUILT, "the servers have no kernel for it"),
    PairRow(_F.STEP_HOOKS, _F.SERVER, CANNOT, "nobody would call them, since no step is on this rank"),
    PairRow(_F.TIED, _F.SERVER, NOT_BUILT, "each parameter is updated by itself there"),
    PairRow(_F.ON_DEVICE, _F.SERVER, NOT_BUILT, "the servers write parameters in place, in the host's memory"),
    PairRow(_F.WIDE, _F.SERVER, NOT_BUILT, "the servers have kernels for f32, f16 and bf16"),
    PairRow(_F.NARROW, _F.LOCAL, CANNOT, "what a few steps change is rounded away there", "keep parameters in float32, and compute in 16 bits by torch.autocast"),
    PairRow(_F.SCALER, _F.ADDS_UP, CANNOT, "it adds up gradients of several steps, whose scales differ", "train without the scaler, in bfloat16 for example"),
    PairRow(_F.FACTOR_LAYER, _F.CLIPPING_CODEC, NOT_BUILT, "it clips by the norm of all gradients, and does not see this layer's", "leave the clip out, or send that gradient whole"),
    PairRow(_F.JOIN, _F.CLOSURE, NOT_BUILT, "a rank without data cannot tell how many evaluations a step of the others has"),
    PairRow(_F.QUERY, _F.CLOSURE, NOT_BUILT, "a step that is recorded would have more exchanges than one"),
    PairRow(_F.BEST_SCHEME, _F.CLOSURE, NOT_BUILT, "a step that is recorded would have more exchanges than one"),
    PairRow(_F.PLAN, _F.JOINS, CANNOT, "a rank that joins uses its session's settings", "leave plan out, or restart all ranks with the plan"),
    PairRow(_F.PLAN, _F.LOCAL, NOT_BUILT, "plans know whole models, whose gradients are sent in each step", "leave plan out"),
    PairRow(_F.PLAN, _F.ASGD, CANNOT, "plans choose among settings that give the same results, and asynchronous training gives others", "leave plan out"),
    PairRow(_F.WEIGHT, _F.GOING_ON, NOT_BUILT, "when a rank is lost, slices of a mean may be over samples of different ranks"),
    PairRow(_F.WEIGHT, _F.FSDP, NOT_BUILT, "torch averages in the node over ranks", "scale each loss by its share of samples"),
    PairRow(_F.WEIGHT, _F.SERVER, NOT_BUILT, "the mean is made there before all ranks' samples are known"),
    PairRow(_F.WEIGHT, _F.STRAGGLERS, NOT_BUILT, "the mean is made before all ranks' samples are known"),
    PairRow(_F.WEIGHT, _F.HALF, CANNOT, "gradients times samples would overflow", "train in float32 or bfloat16"),
    PairRow(_F.WEIGHT, _F.FACTOR_LAYER, NOT_BUILT, "factors are not weighted", "use a scheme without factors"),
    PairRow(_F.CLIP, _F.ADDS_UP, CANNOT, "it has added up gradients of several steps, and their means are no gradients of one", "leave the call out and give the codec a clip, which clips each rank's gradient before"),
    PairRow(_F.KEEP_PACE, _F.SECOND, NOT_BUILT, "a batch is one step of one model", "prepare one module that holds all"),
    PairRow(_F.RESTORE, _F.CHECKPOINTS, CANNOT, "it reads what a session with these has written", "give gradlane.init(checkpoints=...)", needs=True),
    PairRow(_F.JOIN, _F.GOING_ON, NOT_BUILT, "the rank whose values all others get at its end may be lost"),
    PairRow(_F.JOIN, _F.LOCAL, NOT_BUILT, "a rank that has run out of data would have to exchange without steps of its own", "give every rank the same number of batches, such as by DataLoader(drop_last=True)"),
    PairRow(_F.JOIN, _F.FSDP, CANNOT, "torch's collectives in the node need every rank in each step", "give all ranks as many batches"),
    PairRow(_F.JOIN, _F.ASGD, CANNOT, "ranks may run different numbers of steps there without it", "leave it out"),
    PairRow(_F.JOIN, _F.SERVER, NOT_BUILT, "a rank without data could not keep its parameters up to date"),
    PairRow(_F.JOIN, _F.STRAGGLERS, CANNOT, "steps would go on without a rank that has run out of data"),
    PairRow(_F.REGISTER, _F.GOING_ON, NOT_BUILT, "arrays do not learn which ranks are left"),
    PairRow(_F.REGISTER, _F.LOCAL, CANNOT, "arrays are averaged in each step", "open a session without it for arrays"),
    PairRow(_F.GATHER_INTEGERS, _F.GOING_ON, CANNOT, "it gathers through losses of ranks", "use session.exchange()", needs=True),
    PairRow(_F.SERVING, _F.SERVERS, CANNOT, "servers= gives slices to ranks that train, and the ranks that only serve own all"),
    PairRow(_F.SERVING, _F.RING, CANNOT, "a ring has no servers"),
    PairRow(_F.SERVING, _F.ASGD, NOT_BUILT, "its ranks are in different steps, and a server that trains nothing cannot tell whose learning rate is in force", "use servers= among the ranks that train"),
    PairRow(_F.SERVING, _F.STRAGGLERS, NOT_BUILT, "dedicated servers do not learn which ranks a step leaves out", "use stragglers='wait', or servers= among the ranks that train"),
    PairRow(_F.PLAN_RULE, _F.SERVING, NOT_BUILT, "a session finds plans for ranks that all train", "give a plan of `gradlane plan --servers separate=1` as plan="),
    PairRow(_F.LOCAL, _F.ASGD, CANNOT, "it applies each gradient at once, and no gradient is sent here"),
    PairRow(_F.LOCAL, _F.FACTORS, CANNOT, "a difference of several steps is no product of one batch's factors"),
    PairRow(_F.LOCAL, _F.DGC, CANNOT, "it applies the optimizer's momentum itself, and the optimizer runs between two exchanges here"),
    PairRow(_F.LOCAL, _F.COLLECTIVE, NOT_BUILT, "a node's collectives take all gradients of each step, and differences are exchanged in turns"),
    PairRow(_F.LOCAL, _F.STRAGGLERS, NOT_BUILT, "what a late rank has learned in many steps would be left out"),
    PairRow(_F.LOCAL, _F.SERVING, NOT_BUILT, "no rank serves only, since the outer optimizer runs on every rank", "leave it out, or give servers="),
    PairRow(_F.LOCAL, _F.CHECK_EVERY, CANNOT, "the ranks' parameters differ between two exchanges", "leave it out, and a sample of the common values is compared"),
    PairRow(_F.LOCAL, _F.CHECKPOINTS, NOT_BUILT, "its files hold one model for all ranks, and each rank has its own here", "leave it out, and save the model, the optimizer and session.state_dict() on every rank, or on one after session.synchronize()"),
    PairRow(_F.LOCAL, _F.TRACE, NOT_BUILT, "timelines are drawn from backward passes that send gradients"),
    PairRow(_F.DEFER, _F.LOCAL, CANNOT, "no update waits for a mean", "leave defer out"),
    PairRow(_F.BUFFERS, _F.LOCAL, NOT_BUILT, "buffers stay each rank's own", 'give buffers="local", and average them where all ranks meet'),
    PairRow(_F.BUFFERS, _F.ASGD, CANNOT, "the ranks are in different steps, and there is no mean of their buffers", 'give buffers="local", and exchange them where all ranks meet'),
    PairRow(_F.FSDP, _F.GOING_ON, NOT_BUILT, "the ranks of a node hold a part of the model each, and none can go on without the others", "open the session without it and restart from a checkpoint"),
    PairRow(_F.FSDP, _F.STRAGGLERS, NOT_BUILT, "each shard would leave out other ranks"),
    PairRow(_F.FSDP, _F.ON_DEVICE, NOT_BUILT, "sharded models are averaged on the CPU so far", "use native HSDP there (a mesh of two dimensions, without session.prepare)"),
    PairRow(_F.FSDP, _F.SERVER, CANNOT, "FSDP gathers the parameters that ranks update"),
    PairRow(_F.FSDP, _F.FACTORS, CANNOT, "what FSDP hands over are gradients, no factors"),
    PairRow(_F.FSDP, _F.PULLS, NOT_BUILT, "workers pull from servers there, one step later", "use p3, slicing, wfbp or ring"),
    PairRow(_F.FSDP, _F.SERVERS, NOT_BUILT, "the ranks that hold a shard own its slices"),
    PairRow(_F.FSDP, _F.SERVING, NOT_BUILT, "the ranks that hold a shard own its slices"),
    PairRow(_F.FSDP, _F.NODES, CANNOT, "the ranks of a node hold different shards, so there is nothing that they could add up", "leave local out"),
    PairRow(_F.FSDP, _F.CHECKPOINTS, NOT_BUILT, "its files hold whole models", "use torch.distributed.checkpoint with get_state_dict(model, optimizer), as with FSDP alone"),
    PairRow(_F.FSDP_EXACT, _F.PATTERNS, NOT_BUILT, "the gradients of a unit travel as one"),
    PairRow(_F.FSDP_EXACT, _F.RESIDUAL, NOT_BUILT, "it keeps what it has lost, and checkpoints of torch have no place for that"),
    PairRow(_F.FSDP, _F.DEFER_TRUE, CANNOT, "gradients are the means when backward() returns, and step() is torch's own"),
    PairRow(_F.FSDP, _F.BUFFERS, NOT_BUILT, "FSDP leaves buffers to each rank", 'give buffers="local", and average them where the program needs it'),
    PairRow(_F.FSDP, _F.PLAN, NOT_BUILT, "plans know whole models, whose gradients are sent in each step"),
    PairRow(_F.AGAIN, _F.LOCAL, NOT_BUILT, "the common values and the momentum of the parameters before would be lost", "close the session, and prepare the model in a new one"),
    PairRow(_F.CLIP, _F.LOCAL, CANNOT, "gradients are this rank's own, and are there when backward() returns", "call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"),
    PairRow(_F.CLIP, _F.FSDP, CANNOT, "gradients are the means when backward() returns", "call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"),
    PairRow(_F.CLIP, _F.SERVER, NOT_BUILT, "the means stay on the servers, so nothing can be clipped here"),
    PairRow(_F.QUERY, _F.LOCAL, NOT_BUILT, "plans know whole models, whose gradients are sent in each step", "leave it out"),
    PairRow(_F.QUERY, _F.FSDP, NOT_BUILT, "plans know whole models, whose gradients are sent in each step", "leave it out"),
    PairRow(_F.BEST_SCHEME, _F.LOCAL, NOT_BUILT, "plans know whole models, whose gradients are sent in each step", "leave it out"),
    PairRow(_F.BEST_SCHEME, _F.FSDP, NOT_BUILT, "plans know whole models, whose gradients are sent in each step", "leave it out"),
    PairRow(_F.NODES, _F.SERVER, NOT_BUILT, "owners need the gradient of each rank, not sums of nodes", 'use local="off"'),
    PairRow(_F.NODES, _F.STRAGGLERS, CANNOT, "a node's ranks wait for each other before anything leaves, so a late one makes all of them late, and a step without it would lose them all", 'use local="off"'),
    PairRow(_F.NODES, _F.SERVERS, NOT_BUILT, "nodes own slices, not single ranks", 'use local="off"'),
    PairRow(_F.NODES, _F.SERVING, NOT_BUILT, "a node's ranks add up as ranks that train", 'use local="off"'),
    PairRow(_F.NODES, _F.ONE_OWNER, NOT_BUILT, "a single rank makes the mean of a layer, and nodes take part as one"),
    PairRow(_F.NODES, _F.PULLS, NOT_BUILT, "each rank pulls from servers by itself there", 'use local="off"'),
    PairRow(_F.SHARED, _F.CODEC, NOT_BUILT, "a rank carries a share of each large tensor, and a codec needs a tensor's shape", 'use local="leader"'),
    PairRow(_F.COLLECTIVE, _F.NO_NODES, CANNOT, "the ranks of a node add nothing up"),
    PairRow(_F.ROWS, _F.GOING_ON, NOT_BUILT, "means are made again after a loss, which needs dense gradients"),
    PairRow(_F.ROWS, _F.STRAGGLERS, NOT_BUILT, "a dense mean is made of the ranks in time"),
    PairRow(_F.ROWS, _F.LOCAL, CANNOT, "differences of several steps touch more rows than a batch"),
    PairRow(_F.ROWS, _F.SERVER, NOT_BUILT, "the servers that own slices keep the optimizer's state, and rows are not added up there"),
    PairRow(_F.ROWS, _F.PULLS, NOT_BUILT, "workers pull from servers there, and rows are not added up there"),
    PairRow(_F.NO_SYNC, _F.FSDP, NOT_BUILT, "torch sends a unit's gradients as it gets them", "call model.set_requires_gradient_sync(False) before all backward calls but the last, and True before that"),
    PairRow(_F.ARRAYS, _F.SERVER, CANNOT, "arrays are averaged, and updated by the program itself", "open a session without it for arrays"),
    PairRow(_F.ARRAYS, _F.RESIDUAL, NOT_BUILT, "it keeps what it has lost, and session.state_dict() has residuals of prepared models only"),
    PairRow(_F.ARRAYS, _F.CHECKPOINTS, NOT_BUILT, "arrays are averaged, and updated by the program itself", "open a session without it for arrays"),
    PairRow(_F.ARRAYS, _F.CHECK_EVERY, NOT_BUILT, "arrays are averaged, and updated by the program itself", "open a session without it for arrays"),
    PairRow(_F.ARRAYS, _F.STRAGGLERS, NOT_BUILT, "arrays are averaged, and updated by the program itself", "open a session without it for arrays"),
)
# fmt: on
"""All rows. Of several that are broken the first one is told."""

_ROWS_OF = {one: [row for row in ROWS if one in (row.feature, row.other)] for one in Feature}
CALLS = {one.label.removeprefix("session."): one for one in Feature if one.when is When.CALL}
"""Features by the call, as a program writes it."""


_HEAD = """# What goes with what

Options, ways to prepare a model and calls that exclude or need one another. gradlane refuses them
by name, with the reason and the remedy of this table: where the session is opened, where a model is
prepared, or where the call is made. What is in no row goes together. *Contradicts*: both together
have no meaning. *Not built*: they could go together, and do not yet.

`python -m gradlane.training.options.compatibility` writes this page from the table that the
refusals are made from.

| asked for | refused | why | instead | |
| --- | --- | --- | --- | --- |
"""


def _as_code(feature: Feature) -> str:
    """Return a label as code, which a label with an odd number of backticks ends by itself."""
    text = f"`{feature.label}`"
    return text[:-1] if text.count("`") % 2 else text


def page() -> str:
    """Return the page `docs/compatibility.md`."""
    lines = [
        f"| {_as_code(row.feature)} | {'without' if row.needs else 'with'} {_as_code(row.other)} "
        f"| {row.reason} | {row.instead} | {row.kind.value} |\n"
        for row in ROWS
    ]
    built = sum(row.kind is NOT_BUILT for row in ROWS)
    return f"{_HEAD}{''.join(lines)}\n{len(ROWS)} rows; {built} of them are not built.\n"


if __name__ == "__main__":
    sys.stdout.write(page())
