"""The memory of parameters that the core updates in place (`update="server"`).

Owners that train read the parameters in this memory. Dedicated servers have their own copy, and are
handed what the program has changed here, such as by loading a checkpoint, before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gradlane.errors import UsageError
from gradlane.training.core import RankChannel
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.tensor_table import TensorEntry
from gradlane.training.torch_internals import DisableTorchFunctionSubclass, version_of

_SAMPLE_ELEMS = 64
"""About so many values of each parameter show whether the program has written uncounted."""


class ServedParameters:
    """Tells the core where the trained parameters of a model are."""

    def __init__(
        self,
        channel: RankChannel,
        trained: Sequence[TensorEntry],
        rank_info: RankInfo,
        beside: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """Begin without any memory known.

        Args:
            channel: the channel that updates them.
            trained: table entries of the trained parameters, by tensor number.
            rank_info: this rank.
            beside: what takes part in training steps beside them, by tensor number.
        """
        self._beside = beside
        self._channel = channel
        self._trained = trained
        self._rank = rank_info.rank
        self.has_dedicated_servers = rank_info.serving > 0
        """Whether ranks that train nothing update the parameters."""
        self._versions: list[int] = []
        self._samples: list[Tensor] = []
        self._lent: list[Tensor] = []
        self._pointers: list[int] = []
        self._written: list[Tensor] = []

    def register(self) -> None:
        """Tell the core where the parameters are, between steps.

        Raises:
            UsageError: one was converted since `prepare`.
        """
        pointers = [entry.tensor.data_ptr() for entry in self._trained]
        if self.has_dedicated_servers and not self._samples:
            self._note_versions()
            self._samples = [self._sample(index) for index in range(len(self._trained))]
        if pointers == self._pointers:
            return
        self.check_unconverted()
        for index, entry in enumerate(self._trained):
            self._channel.set_parameter(index, pointers[index], entry.nbytes)
        self._pointers = pointers
        # The core may write into memory that the program swaps in mid-step: it must not be freed.
        self._written = [entry.tensor.detach() for entry in self._trained]

    @property
    def converted(self) -> TensorEntry | None:
        """The first parameter whose memory is not what it was when it was prepared; None: none."""
        for entry in self._trained:
            tensor = entry.tensor
            if (tensor.dtype, tensor.shape, tensor.stride(), tensor.device) != (
                entry.dtype,
                entry.shape,
                entry.stride,
                entry.device,
            ):
                return entry
        return None

    def check_unconverted(self) -> None:
        """Check that the core can read and write the parameters.

        Raises:
            UsageError: one was converted since `prepare`.
        """
        entry = self.converted
        if entry is not None:
            raise UsageError(
                f"parameter {entry.name!r} was converted after prepare(): convert the model before "
                "prepare()"
            )

    def hand_over_changes(self, spend_step: Callable[[Callable[[int], None]], None]) -> None:
        """Register the parameters, and give dedicated servers those that the program has changed.

        Collective where it has, which all ranks have to do alike; rank 0's values go to all.

        Args:
            spend_step: runs a function with the number of a channel's step that is no training.

        Raises:
            UsageError: a parameter was converted since `prepare`, or written in a way that torch
                does not count.
            GradlaneError: the session has failed.
        """
        if not self.has_dedicated_servers:
            self.register()
            return
        before = zip(self._trained, self._pointers, self._versions, strict=True)
        with DisableTorchFunctionSubclass():
            changed = [
                index
                for index, (entry, pointer, version) in enumerate(before)
                if (entry.tensor.data_ptr(), version_of(entry.tensor)) != (pointer, version)
            ]
        self._check_counted(changed)
        self.register()
        if changed:
            self._note_versions()
            # The results land in the parameters.
            values = {index: self._trained[index].tensor.detach().clone() for index in changed}

            def run(step: int) -> None:
                self._channel.step_begin(step)
                self._channel.write_parameters(changed)
                self.give(step, values)

            spend_step(run)
            # Torch has counted the program's own change. Another count in the middle of a backward,
            # which this may be, would have autograd refuse the tensors that forward saved.
            for index in changed:
                self.note_values(index)

    def note_written(self, index: int) -> None:
        """Have torch count that the core has written a parameter, as caches and autograd go by."""
        increment_version(self._trained[index].tensor)
        if self._versions:
            self._versions[index] += 1

    def note_values(self, index: int) -> None:
        """Note that the values of a parameter are those that servers have."""
        if self.has_dedicated_servers:
            self._samples[index] = self._sample(index)

    def _sample(self, index: int) -> Tensor:
        """Return some values of a parameter, as bytes."""
        with DisableTorchFunctionSubclass():
            values = self._trained[index].tensor.detach()
            flat = values.as_strided((values.numel(),), (1,))
            return flat[:: max(1, flat.numel() // _SAMPLE_ELEMS)].clone().view(torch.uint8)

    def _check_counted(self, changed: Sequence[int]) -> None:
        """Check that no other parameter has changed: the next update would overwrite it.

        Raises:
            UsageError: one has, as its sample shows.
        """
        for index, sample in enumerate(self._samples):
            if index not in changed and not torch.equal(self._sample(index), sample):
                raise UsageError(
                    f"parameter {self._trained[index].name!r} was changed in a way that torch does "
                    "not count, such as .data.mul_(...) or numpy: ranks that only serve have "
                    "parameters of their own and would not get it; change it in place under "
                    "torch.no_grad()"
                )

    def give(self, step: int, values: Mapping[int, Tensor]) -> None:
        """Contribute rank 0's values to a step that has just begun, and wait for its end.

        Args:
            step: its number in the channel.
            values: of each tensor that has some, with the bytes and the layout of its parameter;
                of the same tensors on every rank.
        """
        # If this breaks off, the core may still read there.
        self._lent = list(values.values())
        for index, entry in enumerate(self._trained):
            if index in values and self._rank == 0:
                pointer = values[index].data_ptr()
                self._channel.gradient_ready(index, step, pointer, entry.nbytes)
            else:
                self._channel.tensor_absent(index, step, entry.tensor.data_ptr(), entry.nbytes)
        self.leave_out_others(step)
        self._channel.step_end(step)
        self._channel.wait_step(step)
        self._channel.take_ready(step)
        self._lent = []

    def leave_out_others(self, step: int) -> None:
        """Contribute nothing but parameters to a step that is none of training."""
        for index, tensor in self._beside.items():
            # No rank has any: nothing is written there.
            self._channel.tensor_absent(index, step, tensor.data_ptr(), tensor.nbytes)

    def _note_versions(self) -> None:
        with DisableTorchFunctionSubclass():
            self._versions = [version_of(entry.tensor) for entry in self._trained]

    def check_unmoved(self) -> None:
        """Check that the core would write into the parameters.

        Raises:
            UsageError: it would write into memory that is no parameter's any more.
        """
        for entry, pointer in zip(self._trained, self._pointers, strict=True):
            if entry.tensor.data_ptr() != pointer:
                raise UsageError(
                    f"the memory of parameter {entry.name!r} was replaced (.data = ..., .to(...)) "
                    'between backward() and optimizer.step(): with update="server" the update has '
                    "already begun there; do it after optimizer.step()"
                )

    def pull(self, step: int) -> None:
        """Take the servers' parameters as they are, in a step of its own.

        Args:
            step: its number in the channel.
        """
        self._channel.step_begin(step)
        self.give(step, {})
        for index in range(len(self._trained)):
            self.note_written(index)
