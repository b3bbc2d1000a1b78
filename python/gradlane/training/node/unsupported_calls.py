"""Channel calls that concern single ranks, and are refused where nodes take part as one.

The options already refuse what would lead to these calls; a direct caller of the channel gets a
clear error.
"""

from __future__ import annotations

from typing import NoReturn


class UnsupportedCalls:
    """Channel calls that a node's ranks cannot make."""

    def step_pass(self, step: int) -> None:
        """Refuse: stragglers are single ranks."""
        _refuse("leaving out late ranks")

    def step_barrier(self, step: int) -> None:
        """Refuse: stragglers are single ranks."""
        _refuse("leaving out late ranks")

    def wait_decided(self, step: int) -> None:
        """Refuse: stragglers are single ranks."""
        _refuse("leaving out late ranks")

    def participation(self, step: int) -> tuple[bool | None, bool, int]:
        """Refuse: stragglers are single ranks."""
        _refuse("leaving out late ranks")

    def root_result_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Refuse: a root is a single rank."""
        _refuse("sending blocks to one rank")

    def next_root_requests(self, *, wait: bool = True) -> list[tuple[int, int]]:
        """Refuse: a root is a single rank."""
        _refuse("sending blocks to one rank")

    def set_parameter(self, tensor: int, pointer: int, nbytes: int) -> None:
        """Refuse: updates run on the workers."""
        _refuse("updating on servers")

    def set_optimizer(self, step: int, rows_json: str) -> None:
        """Refuse: updates run on the workers."""
        _refuse("updating on servers")

    def write_state(self, name: str, part: int, clear: bool) -> None:
        """Refuse: updates run on the workers."""
        _refuse("updating on servers")

    def write_parameters(self, tensors: list[int]) -> None:
        """Refuse: updates run on the workers."""
        _refuse("updating on servers")

    def clear_state(self) -> None:
        """Refuse: updates run on the workers."""
        _refuse("updating on servers")


def _refuse(what: str) -> NoReturn:
    raise ValueError(f'{what} does not go with sums on nodes: use local="off"')
