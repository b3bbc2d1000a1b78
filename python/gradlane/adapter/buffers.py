"""Buffers, such as the statistics of batch norm, kept alike on all ranks by one packed tensor.

The pack takes part in every step like a gradient: it is handed over when the step ends, travels
with the highest urgency, and is unpacked before the next forward of a module that owns buffers. The
core knows means alone, so the pack is f64, where the mean can carry anything:

- what rank 0 alone contributes are 32-bit words times the number of ranks, whose mean over zeros
  is the word itself, to the last bit, whatever the dtype;
- what is averaged is contributed by every rank that has seen data, beside a weight of 1, and
  divided by the mean weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradlane.errors import UsageError

MODES = ("broadcast", "average", "local")
_ALIGNMENT = 16
_WEIGHT_LANES = 2
"""How many ranks contribute, and whether rank 0 does, each as a mean that is 1 when all is well."""


class _Slot:
    """Where one buffer is: in its module, and in the pack's raw bytes or averaged values."""

    def __init__(self, name: str, module: nn.Module, key: str, buffer: Tensor) -> None:
        self.name = name
        self.module = module
        self.key = key
        self.shape = buffer.shape
        self.dtype = buffer.dtype
        self.nbytes = buffer.numel() * buffer.element_size()

    def current(self) -> Tensor:
        """Return the buffer that the module has now; modules may replace theirs."""
        buffer = dict.__getitem__(self.module._buffers, self.key)
        if buffer is None or buffer.shape != self.shape or buffer.dtype is not self.dtype:
            now = "None" if buffer is None else f"{tuple(buffer.shape)} {buffer.dtype}"
            raise UsageError(
                f"buffer {self.name!r} was prepared as {tuple(self.shape)} {self.dtype} and is "
                f'{now} now: give prepare(..., buffers="local") to leave buffers alone, or call '
                "prepare() again"
            )
        return buffer


class BufferPack:
    """All buffers of one model in one tensor."""

    def __init__(self, model: nn.Module, mode: str, rank: int, world_size: int) -> None:
        """Lay the pack out; `start` is called when all ranks have rank 0's buffers.

        Args:
            model: the user's.
            mode: `"broadcast"` or `"average"`.
            rank: this rank.
            world_size: number of ranks.
        """
        slots = _slots(model)
        averages = mode == "average"
        self._averaged = [slot for slot in slots if averages and slot.dtype.is_floating_point]
        self._copied = [slot for slot in slots if not averages or not slot.dtype.is_floating_point]
        self._averages = averages
        self._rank = rank
        self._world_size = world_size
        devices = {slot.current().device for slot in slots}
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        values = sum(slot.shape.numel() for slot in self._averaged)
        with torch.inference_mode(False), torch.no_grad():
            raw, self._views = self._lay_out()
            self._words = raw.view(torch.int32)
            self._sent = self._words.clone()
            count = _WEIGHT_LANES + values + self._words.numel()
            self.tensor = torch.zeros(count, dtype=torch.float64, device=self._device)
        lanes = self.tensor.detach()
        self._weights = lanes[:_WEIGHT_LANES]
        self._values = lanes[_WEIGHT_LANES : _WEIGHT_LANES + values]
        self._first_word = _WEIGHT_LANES + values

    @property
    def owners(self) -> set[int]:
        """The modules that own a buffer of the pack, by `id`."""
        return {id(slot.module) for slot in (*self._averaged, *self._copied)}

    @torch.no_grad()
    def start(self) -> None:
        """Take the buffers as they are for what all ranks have."""
        if self._views:
            torch._foreach_copy_(self._views, [slot.current() for slot in self._copied])
            self._sent.copy_(self._words)

    @torch.no_grad()
    def pack(self, *, silent: bool) -> Tensor | None:
        """Return the pack with this rank's part, or None if it has nothing to say.

        Args:
            silent: this rank has seen no data in this step.
        """
        if silent or (self._rank != 0 and not self._averages):
            return None
        if self._rank == 0 and self._copied:
            torch._foreach_copy_(self._views, [slot.current() for slot in self._copied])
            if not self._averages and self._is_unchanged():
                return None
            words = self.tensor.detach()[self._first_word :]
            words.copy_(self._words).mul_(self._world_size)
        elif self._averages:
            self.tensor[self._first_word :].zero_()
        self._weights[0] = 1.0
        self._weights[1] = float(self._world_size) if self._rank == 0 else 0.0
        if self._averaged:
            flat = [
                slot.current().reshape(-1).to(device=self._device, dtype=torch.float64)
                for slot in self._averaged
            ]
            torch.cat(flat, out=self._values)
        return self.tensor

    @torch.no_grad()
    def land(self, mean: Tensor | None) -> None:
        """Write what all ranks agreed on into the buffers.

        Args:
            mean: the pack as it came back; None: no rank had anything to say.
        """
        if mean is not None and not self._averages:
            self._words.copy_(mean[self._first_word :])
        elif mean is not None:
            words = mean[self._first_word :].to(torch.int32)
            self._words.copy_(torch.where(mean[1] > 0, words, self._words))
            self._land_average(mean[_WEIGHT_LANES : self._first_word] / mean[0])
        if self._rank != 0 and self._copied:
            torch._foreach_copy_([slot.current() for slot in self._copied], self._views)

    def _land_average(self, values: Tensor) -> None:
        parts = torch.split(values, [slot.shape.numel() for slot in self._averaged])
        for slot, part in zip(self._averaged, parts, strict=True):
            slot.current().copy_(part.view(slot.shape))

    def _is_unchanged(self) -> bool:
        """Whether rank 0 has nothing new; on an accelerator nobody waits to find out."""
        if self._device.type != "cpu":
            return False
        if torch.equal(self._words, self._sent):
            return True
        self._sent.copy_(self._words)
        return False

    def _lay_out(self) -> tuple[Tensor, list[Tensor]]:
        offsets: list[int] = []
        end = 0
        for slot in self._copied:
            offsets.append(end)
            end += -(-slot.nbytes // _ALIGNMENT) * _ALIGNMENT
        raw = torch.zeros(end, dtype=torch.uint8, device=self._device)
        views = [
            raw[offset : offset + slot.nbytes].view(slot.dtype).view(slot.shape)
            for offset, slot in zip(offsets, self._copied, strict=True)
        ]
        return raw, views


def pack_buffers(model: nn.Module, mode: str, rank: int, world_size: int) -> BufferPack | None:
    """Return the pack of a model's buffers, or None where there is nothing to keep alike."""
    if mode == "local" or world_size == 1 or not _slots(model):
        return None
    return BufferPack(model, mode, rank, world_size)


def _slots(model: nn.Module) -> Sequence[_Slot]:
    slots: dict[int, _Slot] = {}
    for prefix, module in model.named_modules():
        for key, buffer in dict.items(module._buffers):
            if buffer is not None and buffer.numel() > 0 and id(buffer) not in slots:
                name = f"{prefix}.{key}" if prefix else key
                slots[id(buffer)] = _Slot(name, module, key, buffer)
    return list(slots.values())
