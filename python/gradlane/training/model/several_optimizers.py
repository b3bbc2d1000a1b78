"""Several optimizers of one model, such as Muon for matrices beside AdamW for everything else.

They come as a list, or in one object that holds them. Each keeps its own `step`, settings and
state; what concerns all of them sees one optimizer with all groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradlane.errors import RefusedError
from gradlane.training.model.lazy_state import plain_state


class SeveralOptimizers(Optimizer):
    """Shows the optimizers of a model as one: their groups, settings and state, in their order."""

    # Not `Optimizer.__init__`: that would make groups of its own.
    def __init__(self, members: Sequence[Optimizer], holder: Optimizer | None = None) -> None:
        """Show some optimizers.

        Args:
            members: at least two, none of which holds others.
            holder: the program's own optimizer that steps them, or None.
        """
        self.members = tuple(members)
        self.holder = holder

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """All groups, as they are now."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """All settings that one of them has."""
        return {name: value for member in self.members for name, value in member.defaults.items()}

    @property
    def state(self) -> Any:  # type: ignore[override]
        """All state, without waiting."""
        return _JointState(self.members)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's format, with the parameters numbered through."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for before, saved in zip(self._numbers_before(), self._saved(), strict=True):
            state.update((_moved(key, before), value) for key, value in saved["state"].items())
            groups += [
                {**group, "params": [one + before for one in group["params"]]}
                for group in saved["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`.

        Raises:
            ValueError: it is of other groups.
        """
        groups = list(state_dict["param_groups"])
        if len(groups) != len(self.param_groups):
            raise RefusedError(
                f"the state of {len(groups)} groups was loaded into {name_of(self)} with "
                f"{len(self.param_groups)}"
            )
        for before, member in zip(self._numbers_before(), self.members, strict=True):
            own = [groups.pop(0) for _ in member.param_groups]
            numbers = {one for group in own for one in group["params"]}
            member.load_state_dict(
                {
                    "state": {
                        _moved(key, -before): value
                        for key, value in state_dict["state"].items()
                        if key in numbers
                    },
                    "param_groups": [
                        {**group, "params": [one - before for one in group["params"]]}
                        for group in own
                    ],
                }
            )

    def _saved(self) -> list[dict[str, Any]]:
        return [member.state_dict() for member in self.members]

    def _numbers_before(self) -> list[int]:
        """Return how many parameters the optimizers before each one have."""
        before, count = [], 0
        for member in self.members:
            before.append(count)
            count += sum(list.__len__(group["params"]) for group in member.param_groups)
        return before


class _JointState(MutableMapping[Any, Any]):
    """The state of several optimizers, each parameter's where its optimizer keeps it.

    State of no parameter is under its optimizer's number and its key.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._states = [plain_state(member) for member in members]
        self._number = {
            id(parameter): number
            for number, member in enumerate(members)
            for group in member.param_groups
            for parameter in list.__iter__(group["params"])
        }

    def _place(self, key: Any) -> tuple[MutableMapping[Any, Any], Any]:
        if isinstance(key, Tensor):
            number = self._number.get(id(key))
            if number is None:
                raise KeyError(key)
            return self._states[number], key
        number, own = key
        return self._states[number], own

    def __getitem__(self, key: Any) -> Any:
        state, own = self._place(key)
        return state[own]

    def __setitem__(self, key: Any, value: Any) -> None:
        state, own = self._place(key)
        state[own] = value

    def __delitem__(self, key: Any) -> None:
        state, own = self._place(key)
        del state[own]

    def __contains__(self, key: object) -> bool:
        # Not `self[key]`: a state that is asked for a parameter makes an empty one.
        state, own = self._place(key)
        return own in state

    def get(self, key: Any, default: Any = None) -> Any:
        state, own = self._place(key)
        return state.get(own, default)

    def pop(self, key: Any, *default: Any) -> Any:
        state, own = self._place(key)
        return state.pop(own, *default)

    def __iter__(self) -> Iterator[Any]:
        for number, state in enumerate(self._states):
            for key in state:
                yield key if isinstance(key, Tensor) else (number, key)

    def __len__(self) -> int:
        return sum(map(len, self._states))


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that step a model: the one that was given, or those that it shows."""
    return optimizer.members if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def name_of(optimizer: Optimizer) -> str:
    """Return how messages name an optimizer: by its class, or those of its members."""
    return " and ".join(type(member).__name__ for member in members_of(optimizer))


def as_one(given: Any) -> Any:
    """Return what trains a model as one optimizer.

    Args:
        given: an optimizer, a list, tuple or dictionary of them, or an object that holds several,
            in attributes or in lists there. An optimizer counts as one that holds others where
            these have all of its parameters.

    Returns:
        What was given where it is no such object.
    """
    found = _Found()
    found.add(given)
    members = list(found.members.values())
    if len(members) == 1 and isinstance(given, (list, tuple, Mapping)):
        return members[0]
    if len(members) < 2:
        return given
    return SeveralOptimizers(members, given if isinstance(given, Optimizer) else None)


_NO_OPTIMIZERS = ("state", "param_groups")
"""Attributes of an optimizer that hold none; a prepared one's may not be read at any time."""


class _Found:
    """Collects the optimizers in an object that step by themselves."""

    def __init__(self) -> None:
        self.members: dict[int, Optimizer] = {}
        self._seen: set[int] = set()

    def add(self, given: Any) -> None:
        """Add an optimizer, those that it holds, or those in a container or another object."""
        if id(given) in self._seen or isinstance(given, type):
            return
        self._seen.add(id(given))
        is_container = isinstance(given, (list, tuple, Mapping))
        held = _Found()
        held._seen = self._seen
        attributes = getattr(given, "__dict__", {})
        values = [value for name, value in attributes.items() if name not in _NO_OPTIMIZERS]
        for value in [given] if is_container else values:
            inside = value.values() if isinstance(value, Mapping) else value
            for one in inside if isinstance(value, (list, tuple, Mapping)) else (value,):
                if isinstance(one, Optimizer):
                    held.add(one)
        members = list(held.members.values())
        is_own = isinstance(given, Optimizer)
        if is_own and len(members) > 1:
            is_own = _parameters([given]) != _parameters(members)
        if not is_own:
            self.members.update(held.members)
        elif hasattr(given, "param_groups"):
            self.members[id(given)] = given


def _parameters(optimizers: Sequence[Optimizer]) -> set[int]:
    return {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in list.__iter__(group["params"])
    }


def _moved(key: Any, by: int) -> Any:
    return key + by if isinstance(key, int) else key
