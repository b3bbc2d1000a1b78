"""The parts of torch that torch does not promise to keep: no other module names them.

Each is a row of `INTERNALS`: its purpose, releases that it was seen in, and what happens without
it. A row is looked up and tried when this module is imported; parts of packages that torch loads
late are looked up when they are first used. Where a part is not there, or behaves in another way,
`gradlane.init()` and `prepare()` refuse this torch by name (`check_torch`), or it is done without,
as the row says: the log tells that once a process where it matters, and `gradlane doctor` does.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradlane.errors import UsageError
from gradlane.training.log import log

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
elif torch.distributed.is_available():
    from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]
"""Classes of torch.distributed, which exports them in a way that type checkers do not see."""

ALL = "2.4, 2.7, 2.11, 2.15"
"""Releases that are tested; a test compares what was seen in them with what each run found."""
NEW = "2.15"


@dataclass(frozen=True)
class Internal:
    """A part of torch without a promise.

    Attributes:
        name: below `torch`, of a module, a class or what they hold.
        purpose: what gradlane takes it for.
        seen: releases in which it was there and behaved as expected.
        without: what gradlane does without it; None: `gradlane.init()` and `prepare()` refuse.
        is_told: whether the log tells that; not where a program notices nothing of it.
    """

    name: str
    purpose: str
    seen: str
    without: str | None
    is_told: bool = True

    @property
    def loss(self) -> str:
        """What is missing and what follows from it."""
        lost = (
            f"torch {torch.__version__} lacks torch.{self.name}, by which gradlane {self.purpose}"
        )
        if self.without is None:
            return f"{lost}: use torch {NEW}, with which this is tested"
        return f"{lost}; without it, {self.without}"


INTERNALS: dict[str, Internal] = {}
"""All parts in use, by name."""
_lost: dict[str, Internal] = {}
_told: set[str] = set()


def lost() -> list[Internal]:
    """Return the parts that this torch lacks, of those that have been looked up."""
    return [*_lost.values()]


def check_torch() -> None:
    """Tell once which parts of torch are done without.

    Raises:
        UsageError: this torch lacks a part that cannot be done without.
    """
    for one in lost():
        if one.without is None:
            raise UsageError(one.loss)
    for one in lost():
        if one.is_told and one.name not in _told:
            _told.add(one.name)
            log.warning("%s", one.loss)


def look_up_all() -> None:
    """Look up the parts that are otherwise looked up when they are first used."""
    late: list[Callable[[], object]] = [_eval_frame, _symbolic_convert, graph_splitter_class]
    if torch.distributed.is_available():
        late += [_store_of_group, _gloo_options, _divisors]
    for look in late:
        look()


def _find(name: str) -> Any:
    """Return what a dotted name below `torch` stands for, or `_NOTHING`."""
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, _NOTHING)
    return found


class _Nothing:
    """Stands for what is not there."""


_NOTHING = _Nothing()
_REFUSAL = _Nothing()
"""In place of what refuses each call."""


def _take(
    name: str,
    purpose: str,
    *,
    seen: str = ALL,
    without: str | None = None,
    is_told: bool = True,
    instead: Any = None,
    works: Callable[[Any], bool] = lambda found: True,
    found: Any = None,
) -> Any:
    """Look a part up, and try it.

    Args:
        name: as in `Internal`.
        purpose: as there.
        seen: as there.
        without: as there.
        is_told: as there.
        instead: what to return where it is lost and `without` is given; `_REFUSAL`: what refuses.
        works: returns whether it behaves as expected; may raise anything where it does not.
        found: the part, or `_NOTHING`, where it is not to be looked up by its name.

    Returns:
        The part; `instead`; or what refuses each call, by name.
    """
    row = INTERNALS[name] = Internal(name, purpose, seen, without, is_told)
    part = _find(name) if found is None else found
    try:
        if part is not _NOTHING and works(part):
            _lost.pop(name, None)
            return part
    except Exception as error:
        log.debug("torch.%s: %s: %s", name, type(error).__name__, error)
    _lost[name] = row
    return _refusal(row) if without is None or instead is _REFUSAL else instead


def _refusal(row: Internal) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UsageError(row.loss)

    return refuse


def _attribute(
    sample: Any,
    name: str,
    purpose: str,
    *,
    seen: str = ALL,
    without: str | None = None,
    instead: Callable[[Any], Any] = lambda owner: None,
) -> Callable[[Any], Any]:
    """Return what reads an attribute of objects, which a sample is looked at for."""
    attribute = name.rpartition(".")[2]
    found = attrgetter(attribute) if hasattr(sample, attribute) else _NOTHING
    taken: Callable[[Any], Any] = _take(
        name, purpose, seen=seen, without=without, instead=instead, found=found
    )
    return taken


_PARAMETER = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
_MODULE = nn.Identity()


class _Unused(torch.optim.Optimizer):
    """A class whose step torch may patch; one whose `__init__` is called loads the compiler."""

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""


_OPTIMIZER = object.__new__(_Unused)
_OPTIMIZER.__setstate__({"defaults": {}, "param_groups": [], "state": {}})
# Torch 2.11 warns where such a tensor is made of its parts.
_SPARSE = torch.zeros(1, dtype=torch.float32, device="cpu").to_sparse()

# ---- autograd

graph_task_id: Callable[[], int] = _take(
    "_C._current_graph_task_id", "tells backward from forward", works=lambda found: found() == -1
)
"""Return the number of the backward that this thread is in, or -1."""
queue_callback: Callable[[Callable[[], None]], None] = _take(
    "autograd.Variable._execution_engine.queue_callback", "is called as backward ends"
)
"""Have a function called at the end of the backward that runs, before `backward()` returns."""
will_execute: Callable[[Any], bool] = _take(
    "_C._will_engine_execute_node",
    "sees that a backward accumulates a weight's gradient",
    without="layers send whole gradients in place of factors",
    instead=lambda node: False,
)
"""Return whether the backward that runs will execute a node."""
backward_hooks: Callable[[Tensor], Any] = _attribute(
    _PARAMETER,
    "Tensor._backward_hooks",
    "sees that a program looks at a gradient on its way",
    without="layers send whole gradients in place of factors",
    instead=lambda tensor: True,
)
"""Return the hooks of a tensor on its gradient."""
post_accumulate_hooks: Callable[[Tensor], dict[int, Any] | None] = _attribute(
    _PARAMETER, "Tensor._post_accumulate_grad_hooks", "takes gradients after all other hooks"
)
"""Return the hooks of a tensor that are called once its gradient is in `.grad`."""

# ---- tensors

version_of: Callable[[Tensor], int] = _attribute(
    _PARAMETER, "Tensor._version", "sees that a tensor was written"
)
"""Return a number that grows with each write to a tensor; `RuntimeError` for inference tensors."""
VERSION = "_version"
"""The name of what `version_of` returns, for an `attrgetter` of several attributes."""
sparse_values: Callable[[Tensor], Tensor] = _attribute(
    _SPARSE, "Tensor._values", "takes the rows of sparse gradients as they are"
)
sparse_indices: Callable[[Tensor], Tensor] = _attribute(
    _SPARSE, "Tensor._indices", "takes the rows of sparse gradients as they are"
)


def values_of_sparse(tensor: Tensor) -> Tensor:
    """Return the values of a sparse COO tensor, coalesced or not, in its own memory."""
    values: Any = sparse_values(tensor)
    found: Tensor = values()
    return found


def indices_of_sparse(tensor: Tensor) -> Tensor:
    """Return the indices of a sparse COO tensor, coalesced or not."""
    indices: Any = sparse_indices(tensor)
    found: Tensor = indices()
    return found


def _counts_owners(count: Callable[[int], int]) -> bool:
    tensor = torch.zeros(2, dtype=torch.float32, device="cpu")
    storage = tensor.untyped_storage()
    alone = count(storage._cdata)
    view = tensor[1:]
    return count(storage._cdata) == alone + 1 and view.numel() == 1


count_owners: Callable[[int], int] | None = _take(
    "_C._storage_Use_Count",
    "sees that a program or a branch of the graph holds a gradient's memory, too",
    without="each gradient is copied before it is sent, and one that backward has added to gets "
    "its mean before backward returns, as one that is kept from step to step",
    works=_counts_owners,
)
"""Return the number of references to memory, of which `address_of` gives the argument."""
address_of: Callable[[Any], int] = _attribute(
    _PARAMETER.untyped_storage(),
    "UntypedStorage._cdata",
    "sees that a program or a branch of the graph holds a gradient's memory, too",
)
"""Return what `count_owners` takes for a storage."""
DisableTorchFunctionSubclass: Any = _take(
    "_C.DisableTorchFunctionSubclass", "looks at parameters whose update is due without waiting"
)
"""A context in which operations of subclasses of tensors are torch's own."""
disabled_torch_function: Any = _take(
    "_C._disabled_torch_function_impl", "tells classes of parameters with operations of their own"
)
"""`__torch_function__` of classes whose operations are torch's own."""
is_wrapper_subclass: Callable[[Any], bool] = _take(
    "utils._python_dispatch.is_traceable_wrapper_subclass",
    "refuses parameters that are made of other tensors",
    works=lambda found: not found(_PARAMETER),
    found=getattr(
        importlib.import_module("torch.utils._python_dispatch"),
        "is_traceable_wrapper_subclass",
        _NOTHING,
    ),
)
"""Return whether a tensor is made of others, as DTensor is."""


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _copies(copy: Callable[[list[Tensor], list[Tensor]], object]) -> bool:
    target, source = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float32, device="cpu")
    copy([target], [source])
    return bool(target.equal(source))


foreach_copy: Callable[[Sequence[Tensor], Sequence[Tensor]], object] = _take(
    "_foreach_copy_",
    "copies many tensors at once",
    without="they are copied one by one",
    instead=_copy_each,
    works=_copies,
)
"""Copy tensors into others, in place."""


def _unscale_each(gradients: Sequence[Tensor], found: Tensor, factor: Tensor) -> None:
    for gradient in gradients:
        gradient.mul_(factor)


def _unscales(unscale: Callable[[list[Tensor], Tensor, Tensor], object]) -> bool:
    tensor = torch.tensor([3.0, 3.0], dtype=torch.float32, device="cpu")
    found, factor = torch.tensor([0.0, 0.5], dtype=torch.float32, device="cpu")
    unscale([tensor], found, factor)
    return bool((tensor == 1.5).all())


foreach_unscale: Callable[[Sequence[Tensor], Tensor, Tensor], object] = _take(
    "_amp_foreach_non_finite_check_and_unscale_",
    "scales many gradients at once, as GradScaler does",
    without="they are scaled one by one",
    instead=_unscale_each,
    works=_unscales,
)
"""Multiply tensors by a factor, in place."""

many_at_once_types: list[type[Tensor]] = _take(
    "optim.optimizer._foreach_supported_types",
    "steps many parameters at once, as the program would",
    without="an accelerator's are stepped one by one",
    instead=[],
    works=lambda found: isinstance(found, list) and nn.Parameter in found,
    found=getattr(
        importlib.import_module("torch.optim.optimizer"), "_foreach_supported_types", _NOTHING
    ),
)
"""Classes of parameters that torch's optimizers step many at once on accelerators; changed here."""

# ---- modes that are in force where an update happens to be triggered

_MODES = "keeps modes of a forward from the update that it waits for"
peek_transforms: Callable[[], Any] = _take(
    "_C._functorch.peek_interpreter_stack", _MODES, works=lambda found: found() is None
)
"""Return the innermost transform of torch.func in force, or None."""
DisableTransforms: Any = _take("_C._DisableFuncTorch", _MODES)
"""A context without transforms of torch.func."""
count_function_modes: Callable[[], int] = _take(
    "_C._len_torch_function_stack", _MODES, works=lambda found: found() >= 0
)
"""Return how many `TorchFunctionMode`s are in force."""
DisableTorchFunction: Any = _take("_C.DisableTorchFunction", _MODES)
"""A context without such modes."""
count_dispatch_modes: Callable[[], int] = _take(
    "_C._len_torch_dispatch_stack", _MODES, works=lambda found: found() >= 0
)
"""Return how many `TorchDispatchMode`s are in force."""
disable_dispatch_modes: Any = _take(
    "utils._python_dispatch._disable_current_modes",
    _MODES,
    found=getattr(
        importlib.import_module("torch.utils._python_dispatch"), "_disable_current_modes", _NOTHING
    ),
)
"""A context without such modes."""
tracing_state: Callable[[], Any] = _take(
    "_C._get_tracing_state", _MODES, works=lambda found: found() is None
)
"""Return the state of `torch.jit.trace`, or None."""
set_tracing_state: Callable[[Any], None] = _take("_C._set_tracing_state", _MODES)
"""Replace it."""

_COMPILER: Any = torch.compiler
_take(
    "compiler._is_compiling_flag",
    "has updates rounded alike on all ranks, whatever is compiled meanwhile",
    works=lambda found: found is False or found is True,
)


def compiling_flag() -> Any:
    """Return torch's flag, one for all threads, that code is being compiled."""
    return _COMPILER._is_compiling_flag


def set_compiling_flag(flag: Any) -> None:
    """Replace it; the compilation that set it takes it down."""
    _COMPILER._is_compiling_flag = flag


# ---- torch.compile, which is loaded with the first optimizer


def _nothing(*_: Any) -> None:
    return None


_COMPILED = "tells compiled code from other"


def _swaps(swap: Callable[[Any], Any]) -> bool:
    before = swap(None)
    return swap(before) is None


swap_frame_callback: Callable[[Any], Any] = _take(
    "_C._dynamo.eval_frame.set_eval_frame",
    _COMPILED,
    without="prepared models cannot be compiled",
    instead=_nothing,
    works=_swaps,
)
"""Replace what is called with each frame that may be compiled, of this thread; returns it."""


def _swapped_frame_callback() -> Any:
    found = swap_frame_callback(None)
    swap_frame_callback(found)
    return found


def _keeps_references(get: Callable[[], Any]) -> bool:
    """Whether a look at the callback takes no reference to it away.

    Torch 2.7 does so: what is looked at is freed in the end, None before Python 3.12 included, and
    the process dies.
    """
    callback = partial(_nothing)
    # No function of Python's is called while it is in force.
    before = swap_frame_callback(callback)
    count = getrefcount(callback)
    get()
    lost = count - getrefcount(callback)
    for _ in range(lost):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))
    swap_frame_callback(before)
    return not lost


frame_callback: Callable[[], Any] = _take(
    "_C._dynamo.eval_frame.get_eval_frame_callback",
    _COMPILED,
    seen="2.11, 2.15",
    without="the compiler is taken away and put back for each look",
    is_told=False,
    instead=_swapped_frame_callback,
    works=_keeps_references,
)
"""Return what is called with each frame that may be compiled; None or False: nothing is."""


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def load_compiler() -> None:
    """Load torch's compiler, as the first step of any optimizer does."""
    importlib.import_module("torch._dynamo")


@cache
def _eval_frame() -> Callable[[Any], None]:
    taken: Callable[[Any], None] = _take(
        "_dynamo.eval_frame.skip_code",
        "keeps the compiler from hooks that it does not inline",
        without="they may be compiled by themselves, which takes time",
        instead=_nothing,
        found=getattr(_module("torch._dynamo.eval_frame"), "skip_code", _NOTHING),
    )
    return taken


def skip_code(code: Any) -> None:
    """Have the compiler never compile a function's code by itself."""
    _symbolic_convert()  # Not first in what is compiled.
    _eval_frame()(code)


@cache
def _symbolic_convert() -> Any:
    return _take(
        "_dynamo.symbolic_convert.tls",
        "sees that the compiler reads for shapes, not for values",
        without="such a read waits for updates",
        found=getattr(_module("torch._dynamo.symbolic_convert"), "tls", _NOTHING),
    )


def reads_for_shapes() -> bool:
    """Return whether the compiler is at work in this thread and reads for shapes alone."""
    return getattr(_symbolic_convert(), "current_tx", None) is not None


_SPLITS = "splits the graph of a model that is compiled as a whole"
_UNSPLIT = "each of its forwards waits for all updates before it begins"


@cache
def graph_splitter_class() -> Any:
    """Return torch's class that splits graphs for DDP; None where there is none that can be set."""
    if not torch.distributed.is_available():
        return None
    found = getattr(_module("torch._dynamo.backends.distributed"), "DDPOptimizer", _NOTHING)
    active = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", _NOTHING)
    name = "nn.parallel.DistributedDataParallel._active_ddp_module"
    _take(name, _SPLITS, without=_UNSPLIT, found=_NOTHING if active is _NOTHING else True)
    splitter = _take(
        "_dynamo.backends.distributed.DDPOptimizer", _SPLITS, without=_UNSPLIT, found=found
    )
    return None if active is _NOTHING else splitter


def active_splitter() -> Any:
    """Return the module that graphs are split for now."""
    return nn.parallel.DistributedDataParallel._active_ddp_module


def set_active_splitter(module: Any) -> None:
    """Have graphs split for a module."""
    nn.parallel.DistributedDataParallel._active_ddp_module = module


def forget_split() -> None:
    """Have the compiler forget that the graph in work was to be split, where it notes that."""
    context = getattr(getattr(torch, "_guards", None), "TracingContext", None)
    tracing: Any = None if context is None else context.try_get()
    if getattr(tracing, "ddp_optimizer_ctx", None) is not None:
        tracing.ddp_optimizer_ctx = None  # Counts the parts that there are not.


def restarts_compilation(error: Exception) -> bool:
    """Return whether the compiler raises an error for itself, to begin anew with other settings."""
    restart = getattr(_module("torch._dynamo.exc"), "RestartAnalysis", None)
    return restart is not None and isinstance(error, restart)


def is_export(callback: Any) -> bool:
    """Return whether what is called with frames belongs to `torch.export`."""
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):
        if getattr(getattr(callback, name, None), "_export", False):
            return True
    return False


def compiled_inside(module: Any) -> Any:
    """Return the module that `torch.compile` has wrapped; itself where it is none of these."""
    return getattr(module, "_orig_mod", module)


compiled_call: Callable[[nn.Module], Any] = _attribute(
    _MODULE,
    "nn.Module._compiled_call_impl",
    "sees modules that are compiled in place",
    without="a profile records what is in them as if they were not",
)
"""Return what `module.compile()` made, or None."""

# ---- modules

_READS = "has a module's parameters and buffers wait for their update when they are read"
parameters_of: Callable[[nn.Module], Any] = _attribute(_MODULE, "nn.Module._parameters", _READS)
"""Return a module's own mapping of parameters."""
buffers_of: Callable[[nn.Module], Any] = _attribute(_MODULE, "nn.Module._buffers", _READS)
"""Return a module's own mapping of buffers."""
children_of: Callable[[nn.Module], Any] = _attribute(_MODULE, "nn.Module._modules", _READS)
"""Return a module's own mapping of modules."""
PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""Names of these mappings among a module's attributes."""
forward_pre_hooks: Callable[[nn.Module], MutableMapping[int, Any]] = _attribute(
    _MODULE, "nn.Module._forward_pre_hooks", "runs before all other hooks of a module"
)
"""Return a module's hooks that run before its forward, in their order."""
register_load_hook: Callable[..., Any] = _take(
    "nn.Module._register_load_state_dict_pre_hook", "refuses parameters that are assigned anew"
)
"""Register a hook on a module that runs before `load_state_dict`."""


_attribute(
    _MODULE.state_dict(),
    "nn.Module.state_dict._metadata",
    "keeps the versions of modules with their state",
    without="checkpoints lack them",
)


def versions_of_state(state: Any) -> Any:
    """Return the versions of modules that go with a `state_dict()`, or None."""
    return getattr(state, "_metadata", None)


def set_versions_of_state(state: Any, versions: Any) -> None:
    """Give a state dictionary the versions of modules."""
    state._metadata = versions


# ---- optimizers

_HOOKS = "sees hooks on steps, which must not see steps in parts"
step_pre_hooks: Callable[[Any], Any] = _attribute(
    _OPTIMIZER, "optim.Optimizer._optimizer_step_pre_hooks", _HOOKS
)
"""Return an optimizer's hooks before its step."""
step_post_hooks: Callable[[Any], Any] = _attribute(
    _OPTIMIZER, "optim.Optimizer._optimizer_step_post_hooks", _HOOKS
)
"""Return an optimizer's hooks after its step."""
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Names of these among an optimizer's attributes."""
_optim: Any = importlib.import_module("torch.optim.optimizer")
for _name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
    _take(f"optim.optimizer.{_name}", _HOOKS, found=getattr(_optim, _name, _NOTHING))


def all_step_hooks(optimizer: Any) -> Iterable[Callable[..., Any]]:
    """Return the hooks on an optimizer's steps, and those on all optimizers'."""
    return (
        *step_pre_hooks(optimizer).values(),
        *step_post_hooks(optimizer).values(),
        *_optim._global_optimizer_pre_hooks.values(),
        *_optim._global_optimizer_post_hooks.values(),
    )


def is_initialized(optimizer: Any) -> bool:
    """Return whether an optimizer's `__init__` was called: it is not a wrapper of another one."""
    return hasattr(optimizer, STEP_HOOKS[0])


def has_state_hooks(optimizer: Any) -> bool:
    """Return whether hooks can be registered on an optimizer's `state_dict()`."""
    return hasattr(optimizer, "_optimizer_state_dict_pre_hooks")


_attribute(
    _OPTIMIZER,
    "optim.Optimizer._optimizer_state_dict_pre_hooks",
    "has an optimizer's state wait for its update when it is saved",
)
_attribute(
    _OPTIMIZER,
    "optim.Optimizer._patch_step_function",
    "has the class of an optimizer call step hooks",
    without="an optimizer whose `__init__` was not called calls no step hooks",
)


def patch_step(optimizer: Any) -> None:
    """Have an optimizer's class call step hooks: late where `__init__` was not called."""
    if hasattr(optimizer, "_patch_step_function"):
        optimizer._patch_step_function()


def is_wrapped_by_scheduler(step: Any) -> bool:
    """Return whether a learning rate scheduler has wrapped a `step`."""
    return bool(getattr(step, "_wrapped_by_lr_sched", False))


def mark_as_wrapped(step: Any, wrapped: Any) -> None:
    """Have a `step` look as one that a scheduler has wrapped, where what it wraps does."""
    if hasattr(wrapped, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True


def note_step(optimizer: Any) -> None:
    """Note that an optimizer has stepped, as learning rate schedulers look for."""
    optimizer._opt_called = True


unscale_code: Any = getattr(
    _take(
        "amp.GradScaler._unscale_grads_",
        "sees that GradScaler reads a list of parameters for their gradients alone",
        without="its reads wait for updates",
    ),
    "__code__",
    None,
)
"""The code of the function by which `GradScaler` unscales gradients, or None."""

# ---- torch.distributed

c10d: Any = getattr(torch._C, "_distributed_c10d", None)
"""The classes of process groups."""


@cache
def _store_of_group() -> Callable[[], Any]:
    module = _module("torch.distributed.distributed_c10d")
    taken: Callable[[], Any] = _take(
        "distributed.distributed_c10d._get_default_store",
        "meets the other ranks in the store of the program's process group",
        found=getattr(module, "_get_default_store", _NOTHING),
    )
    return taken


def default_store() -> Any:
    """Return the store of the program's default process group."""
    return _store_of_group()()


@cache
def _gloo_options() -> Any:
    return _take(
        "distributed.ProcessGroupGloo._Options",
        "makes a group of the ranks of a node",
        found=getattr(getattr(c10d, "ProcessGroupGloo", None), "_Options", _NOTHING),
        works=lambda found: bool(found()._timeout) and isinstance(found()._devices, list),
        without="sums of a node by collectives are refused",
        instead=_REFUSAL,
    )


def gloo_options(hostname: str, timeout: Any) -> Any:
    """Return the options of a Gloo group on one address."""
    options = _gloo_options()()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=hostname)]
    options._timeout = timeout
    return options


def nccl_options(timeout: Any) -> Any:
    """Return the options of an NCCL group."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def abort_group(group: Any) -> None:
    """End a process group, with collectives in flight; Gloo ends once unreferenced, with none."""
    for name in ("abort", "_abort", "_shutdown"):  # By version of torch.
        stop = getattr(group, name, None)
        if stop is not None:
            stop()
            return


def leave_work_list(outputs: Iterable[torch.Tensor]) -> None:
    """Take a work that was waited for from torch's list of works by their tensors.

    Torch has the list while collectives may be inputs of graphs; each of its own works does this.
    """
    if c10d._allow_inflight_collective_as_graph_input():
        for output in outputs:
            torch.ops._c10d_functional.wait_tensor(output)


# ---- FSDP2, whose parts `training/sharded` looks for where a sharded model is prepared

DIVISORS = "_get_gradient_divide_factors"
FSDP_MODULE = ("set_all_reduce_hook", "_get_fsdp_state", "reshard")
"""Methods of a module that `fully_shard` was called with."""
FSDP_GROUPS = "_fsdp_param_groups"
FSDP_GROUP = (
    "_all_reduce_hook",
    "all_reduce_grads",
    "force_sum_reduction_for_comms",
    "fsdp_params",
    "gradient_divide_factor",
    "is_unsharded",
    "mesh_info",
)
"""Attributes of a unit's parameter group."""


def gradient_divisors() -> Any:
    """Return FSDP's function that returns what gradients are divided by, or None."""
    return getattr(_module("torch.distributed.fsdp._fully_shard._fsdp_collectives"), DIVISORS, None)


def _divisors() -> None:
    _take(
        f"distributed.fsdp._fully_shard._fsdp_collectives.{DIVISORS}",
        "knows what FSDP divides gradients by",
        seen="2.7, 2.11, 2.15",
        without="sharded models are refused by name",
        found=gradient_divisors() or _NOTHING,
    )


def fsdp_state(module: Any) -> Any:
    """Return the state of a module that `fully_shard` was called with."""
    return module._get_fsdp_state()


def fsdp_groups(state: Any) -> Any:
    """Return the parameter groups of such a state."""
    return state._fsdp_param_groups


def reduce_hook(group: Any) -> Any:
    """Return the hook that a parameter group calls with its reduced gradients, or None."""
    return group._all_reduce_hook


def reduce_group(group: Any) -> Any:
    """Return the process group that a parameter group reduces in."""
    return group._reduce_scatter_process_group


def reduce_order(group: Any) -> Sequence[int]:
    """Return the numbers of a group's parameters in the flat buffer, once a forward has run."""
    found: Sequence[int] = getattr(group, "_reduce_scatter_param_indices", ())
    return found


def local_shard(tensor: Tensor) -> Tensor:
    """Return the memory of this rank's shard; a plain tensor itself."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found
