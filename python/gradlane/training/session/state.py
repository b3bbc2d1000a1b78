"""What a session keeps for training beside model and optimizer: out, in, and from checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradlane.errors import UsageError

if TYPE_CHECKING:
    from gradlane.training.checkpoints.manager import Checkpoints
    from gradlane.training.model.prepared import PreparedModel

_STATE_VERSION = 1


class SessionState:
    """The part of `Session` that state goes through."""

    _prepared: list[PreparedModel]
    _checkpoints: Checkpoints | None

    def _check_open(self) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what the session itself keeps for training; a collective call between steps.

        That is what codecs with error feedback have lost so far (see `docs/low-precision.md`), and
        late gradients that are carried on (`late="carry"`): no rank is left out of this call.
        Without either there is nothing in it, and nothing is sent. A checkpoint holds it
        beside the model's and the optimizer's. Every rank gets one of its own; that of any one
        rank is enough to go on with a world of any size.

        Raises:
            UsageError: a model is in the middle of a step.
            GradlaneError: the session has failed or is closed.
        """
        self._check_open()
        for prepared in self._prepared:
            prepared.check_between_steps()
        return {
            "version": _STATE_VERSION,
            "models": [prepared.residuals.state_dict() for prepared in self._prepared],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned; a collective call between steps.

        Where every rank loads what it saved itself in a world of the same size, training goes on
        as it would have. Otherwise all ranks share out what was kept.

        Args:
            state: what `state_dict` returned; models are matched in the order of `prepare`.

        Raises:
            ValueError: it is no such state, or of other models.
            UsageError: a model is in the middle of a step.
            GradlaneError: the session has failed or is closed.
        """
        self._check_open()
        for prepared in self._prepared:
            prepared.check_between_steps()
        version, models = state.get("version"), state.get("models")
        if version != _STATE_VERSION or not isinstance(models, list):
            raise ValueError(
                f"this is no state of a session (version {version!r}, expected {_STATE_VERSION}): "
                "load what session.state_dict() returned"
            )
        if len(models) != len(self._prepared):
            raise ValueError(
                f"the state is of {len(models)} models, and {len(self._prepared)} are prepared: "
                "call prepare() for all of them first"
            )
        for prepared, one in zip(self._prepared, models, strict=True):
            prepared.residuals.load_state_dict(one)

    def restore(self) -> int:
        """Go on from the last complete checkpoint; a collective call after `prepare()`.

        Parameters, buffers, the optimizer's state and settings, and what codecs have kept are those
        of that step afterwards, in a world of any size. See `docs/checkpoints.md`.

        Returns:
            The number of training steps that were taken before it; 0 if there is no checkpoint.

        Raises:
            UsageError: the session takes no checkpoints, or it is too early or too late for this.
            CheckpointError: the checkpoint is damaged, of another version, or another model's.
        """
        self._check_open()
        if self._checkpoints is None:
            raise UsageError("restore() reads gradlane.init(checkpoint=...), which is not given")
        return self._checkpoints.restore()
