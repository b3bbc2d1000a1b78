"""Have torch.compile split the graph of a module that is compiled as a whole.

The backward of one graph gives all gradients at its end, so that nothing could be sent before.
Torch splits graphs for DDP, at the boundaries of its buckets, while a forward of DDP runs. Here it
does the same while a forward of a prepared module runs that is compiled as a whole.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from gradlane.training.log import log
from gradlane.training.modules.compiled import (
    compile_disabled,
    is_tracing,
    only_inlined,
)
from gradlane.training.torch_internals import (
    active_splitter,
    forget_split,
    frame_callback,
    graph_splitter_class,
    is_export,
    restarts_compilation,
    set_active_splitter,
)

_is_export = only_inlined(is_export)
_PARTS = 8
"""Parts of a module's parameters that are aimed at."""
_LEAST_BYTES = 1 << 20
"""Where torch ends the first part; no other is smaller."""
_MOST_BYTES = 25 << 20
"""DDP's own size of a bucket."""
_STEPS = 3
"""Waits after which the program is told how to have less of them."""


class _PartBytes(int):
    """The size of a part, which tells torch's splitter that no DDP asks for it."""


class GraphSplits:
    """Splits the graphs that are compiled in the forward of one module."""

    def __init__(self, module: nn.Module, trained_bytes: int) -> None:
        """Split nothing yet.

        Args:
            module: that may be compiled as a whole.
            trained_bytes: of the trained parameters in it.
        """
        part = min(max(trained_bytes // _PARTS, _LEAST_BYTES), _MOST_BYTES)
        self.bucket_bytes_cap = _PartBytes(part)
        """Read by torch, in bytes."""
        self._module = module
        self._handle: Any = None
        self._before: Any = None
        self._waits = 0
        self._activate = compile_disabled(self._begin)
        self._deactivate = compile_disabled(self._end)

    def note_wait(self) -> None:
        """Note that the forward waits for updates of all parameters; say once how it need not."""
        self._waits += 1
        if self._waits == _STEPS:
            log.info(
                "%s is compiled as a whole: each forward waits for all updates before it begins; "
                "compile its blocks instead, such as `for block in model.blocks: block.compile()`, "
                "and updates overlap with the forward (said once)",
                type(self._module).__name__,
            )

    @only_inlined
    def begin(self) -> None:
        """Split what the forward that is about to begin compiles; called by a pre-hook."""
        if _is_export(frame_callback()):
            return  # torch.export wants the graph as it is.
        self._activate()

    def _begin(self) -> None:
        if _splitter() is None:
            return
        if self._handle is None:
            # Hooks of a module that is compiled as a whole are no part of its graph.
            self._handle = self._module.register_forward_hook(self._after_forward, always_call=True)
        active = active_splitter()
        if active is not self:
            self._before = None if isinstance(active, GraphSplits) else active
            set_active_splitter(self)

    @only_inlined
    def _after_forward(self, *_: Any) -> None:
        if not is_tracing():
            self._deactivate()

    def _end(self) -> None:
        if active_splitter() is self:
            set_active_splitter(self._before)
            self._before = None

    def remove(self) -> None:
        """Split nothing from now on."""
        if self._handle is not None:
            self._end()
            self._handle.remove()


@functools.cache
def _splitter() -> Any:
    """Return torch's class that splits graphs, made to leave alone what it cannot split, or None.

    Some versions refuse operations of higher order, or shapes that are not fixed.
    """
    splitter = graph_splitter_class()
    if splitter is None:
        return None
    split = splitter.compile_fn

    @functools.wraps(split)
    def split_or_not(self: Any, graph: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(self.bucket_bytes_cap, _PartBytes):
            return split(self, graph, inputs, *arguments, **options)
        try:
            return split(self, graph, inputs, *arguments, **options)
        except Exception as error:
            if restarts_compilation(error):
                raise
            log.info("a graph is compiled unsplit: %s: %s", type(error).__name__, error)
            forget_split()
            return self.backend_compile_fn(graph, inputs, *arguments, **options)

    splitter.compile_fn = split_or_not
    return splitter
