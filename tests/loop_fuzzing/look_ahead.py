"""Optimizers that step another one, as look-aheads do, in the ways that people write them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import torch

OUTERS = ("torch", "timm", "bare")
"""Whether torch's `__init__` is called; else whether its hooks are made by hand."""
_HOOKS = [
    f"_optimizer_{call}_{when}_hooks"
    for call in ("step", "state_dict", "load_state_dict")
    for when in ("pre", "post")
]


def look_ahead(base: torch.optim.Optimizer, how: str) -> torch.optim.Optimizer:
    """Return a look-ahead over an optimizer, of a class that torch has not seen before.

    Args:
        base: steps first; its groups and state are the look-ahead's.
        how: one of `OUTERS`.
    """

    class Lookahead(torch.optim.Optimizer):
        def __init__(self) -> None:
            if how == "torch":
                super().__init__(
                    [one for group in base.param_groups for one in group["params"]], {}
                )
            elif how == "timm":
                for name in _HOOKS:
                    setattr(self, name, OrderedDict())
            self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
            self.state: Any = defaultdict(dict)
            self.steps = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = self.base.step(closure)
            self.steps += 1
            for group in self.param_groups:
                for fast in group["params"]:
                    if fast.grad is None:
                        continue
                    state = self.state[fast]
                    if "slow" not in state:
                        state["slow"] = fast.detach().clone()
                    if self.steps % 2 == 0:
                        state["slow"].add_(fast.detach() - state["slow"], alpha=0.5)
                        fast.copy_(state["slow"])
            return loss

        def zero_grad(self, set_to_none: bool = True) -> None:
            if how == "bare":
                self.base.zero_grad(set_to_none)
            else:
                super().zero_grad(set_to_none)

        def state_dict(self) -> dict[str, Any]:
            return self.base.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.base.load_state_dict(state_dict)

    return Lookahead()
