"""Buffers, such as the statistics of batch norm, kept alike on all ranks by one packed tensor.

The pack takes part in every step like a gradient: it is handed over when the step ends, travels
with the highest urgency, and is unpacked before the next forward of a module that owns buffers. The
core knows means alone, so the pack is f64, where the mean can carry anything:

- what the first member alone contributes, which is rank 0 unless it was lost, are 32-bit words plus
  2^44, times the number of ranks of the start: the mean over zeros gives the word back, to the last
  bit and whatever the dtype, and says how many ranks it is over, which may differ from slice to
  slice of a step in which ranks are lost. Where the first member is lost, some of its words may be
  missing: all ranks keep the buffers of the step before then;
- what is averaged is contributed by every rank that has seen data, beside a weight of 1, and
  divided by the mean weight.

DDP looks for buffers in each forward and sends rank 0's. Here they are those of `prepare`, and are
sent at the end of a step. What would differ from DDP is an error: other buffers at `step()`, and
changes between two steps that are not the same on all ranks, which `changes` makes a number of.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradlane.errors import SessionFailedError, UsageError
from gradlane.training.modules.compiled import (
    enters_compiled_code,
    is_tracing,
    only_inlined,
    register_pre_hook_first,
)
from gradlane.training.rendezvous.membership import Membership
from gradlane.training.rendezvous.parameter_check import is_sampled
from gradlane.training.rendezvous.tensor_table import without_repeats
from gradlane.training.torch_internals import buffers_of, foreach_copy, version_of

MODES = ("broadcast", "average", "local")
_ALIGNMENT = 16
_WEIGHT_LANES = 1
"""How many ranks contribute to averages, as a mean that is 1 when all is well."""
_CHANGE_LANES = 2
"""How many ranks have changed buffers between two steps, and the sum of their `changes`."""
_ALIKE = 1e-6
"""Changes that are alike have a mean within this of each."""
_OFFSET = 2.0**44
"""Added to each word: sent ones are not 0, and their size tells the number of ranks, up to 4096."""
_REMEDY = (
    'give prepare(..., buffers="local") to leave buffers alone, or call prepare() again on all '
    "ranks"
)

CHANGED_APART = (
    "All ranks get rank 0's buffers when a step ends, and none in between: change them alike on "
    'all ranks, or give prepare(..., buffers="local"), and restart from the last checkpoint'
)
"""What follows where buffers were not changed alike."""
UNKNOWN = 0
"""Of `BufferPack.changes`: a forward that was not seen may have changed buffers."""
UNCHANGED = 1
_VALUE_BITS = 8
CHANGE_BITS = 20
"""`BufferPack.changes` is below two to this."""


class _Slot:
    """One buffer, by its place in its module."""

    def __init__(self, name: str, module: nn.Module, key: str, buffer: Tensor) -> None:
        self.name = name
        self.module = module
        self.key = key
        self.shape = buffer.shape
        self.dtype = buffer.dtype
        self.nbytes = buffer.numel() * buffer.element_size()
        self._seen: Tensor | None = None
        self._seen_version = 0
        self._packed: Tensor | None = None
        self._packed_version = 0

    def held(self) -> Tensor | None:
        """Return whatever the module has now in the buffer's place, without waiting."""
        mapping = buffers_of(self.module)
        try:
            return dict.get(mapping, self.key)
        except TypeError:  # A scripted module's own mapping is none of Python's.
            return dict(mapping.items()).get(self.key)

    def current(self) -> Tensor:
        """Return the buffer that the module has now; modules may replace theirs."""
        buffer = self.held()
        if buffer is None or buffer.shape != self.shape or buffer.dtype is not self.dtype:
            now = "gone" if buffer is None else f"{tuple(buffer.shape)} {buffer.dtype}"
            raise UsageError(
                f"buffer {self.name!r} was prepared as {tuple(self.shape)} {self.dtype} and is "
                f"{now} now: {_REMEDY}"
            )
        if buffer.is_conj() or buffer.is_neg():
            raise UsageError(
                f"buffer {self.name!r} was replaced by a conjugate or negative view (torch.conj), "
                "whose memory has other values: replace it by its .resolve_conj().resolve_neg()"
            )
        if buffer.is_inference():
            raise UsageError(
                f"buffer {self.name!r} was replaced by a tensor of torch.inference_mode(), outside "
                "of which torch does not write it: replace it by its .clone(), made outside"
            )
        return buffer

    def note_agreed(self) -> None:
        """Note the buffer as the value that all ranks have agreed on."""
        self._seen = self.held()
        self._seen_version = _version_of(self._seen)

    def note_packed(self) -> None:
        """Note the buffer as it is when the values of a step are handed over."""
        self._packed = self.held()
        self._packed_version = _version_of(self._packed)

    def check_unwritten(self) -> None:
        """Check that the common values of a step may be written into the buffer.

        Raises:
            UsageError: it was written since `note_packed`, which would be lost.
        """
        buffer = self.held()
        if buffer is self._packed and _version_of(buffer) != self._packed_version:
            raise UsageError(
                f"buffer {self.name!r} was written through a reference kept from before, while "
                "the values that all ranks share after this step were on their way: write it "
                "through the model, or call session.synchronize() before"
            )

    def is_changed(self) -> bool:
        """Return whether the buffer was written or replaced since `note`."""
        buffer = self.held()
        return buffer is not self._seen or _version_of(buffer) != self._seen_version


def _version_of(buffer: Tensor | None) -> int:
    try:
        return -1 if buffer is None else version_of(buffer)
    except RuntimeError:  # Tensors of inference mode have none; they are refused at `step()`.
        return -1


class BufferPack:
    """Packs all buffers of one model into one tensor."""

    def __init__(
        self,
        model: nn.Module,
        mode: str,
        membership: Membership,
        *,
        compares: bool = False,
        may_lack: bool = False,
    ) -> None:
        """Lay the pack out; `start` is called when all ranks have rank 0's buffers.

        Args:
            model: the user's.
            mode: `"broadcast"` or `"average"`.
            membership: the ranks that train; all have the buffers of the first.
            compares: whether the pack tells changes between two steps, as no status does.
            may_lack: whether steps go on without late ranks, and so without the first one's values.
        """
        slots = _slots(model)
        averages = mode == "average"
        self._averaged = [slot for slot in slots if averages and slot.dtype.is_floating_point]
        self._copied = [slot for slot in slots if not averages or not slot.dtype.is_floating_point]
        self._averages = averages
        self._membership = membership
        self._leads = membership.leads
        """Whether this rank was the first when the last pack was made."""
        self._world_size = membership.world_size
        self._slots_of: dict[nn.Module, list[tuple[int, _Slot]]] = {}
        for number, slot in enumerate(self._copied):
            self._slots_of.setdefault(slot.module, []).append((number, slot))
        self._awaits_own = False
        """Whether this rank has sent its values in the step that is under way."""
        self._resends = False
        """Whether the others lack the values that this rank has sent last."""
        self._unexamined: set[nn.Module] = set()
        self._finds_uncounted = False
        """Whether bytes are compared after the last step also where torch has counted no write."""
        self._changed: dict[int, int] = {}
        devices = {slot.current().device for slot in slots}
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        self._compares = compares and self._device.type == "cpu"
        self._may_lack = may_lack
        self._own_changes = UNKNOWN
        """How buffers were changed here before the step that is under way."""
        values = sum(slot.shape.numel() for slot in self._averaged)
        first_value = _WEIGHT_LANES + (_CHANGE_LANES if self._compares else 0)
        with torch.inference_mode(False), torch.no_grad():
            raw, self._views = self._lay_out()
            self._words = raw.view(torch.int32)
            self._sent = self._words.clone()
            count = first_value + values + self._words.numel()
            self.tensor = torch.zeros(count, dtype=torch.float64, device=self._device)
        lanes = self.tensor.detach()
        self._weights = lanes[:_WEIGHT_LANES]
        self._changes = lanes[_WEIGHT_LANES:first_value]
        self._values = lanes[first_value : first_value + values]
        self._first_value, self._first_word = first_value, first_value + values

    @property
    def owners(self) -> set[int]:
        """The modules that own a buffer of the pack, by `id`."""
        return {id(slot.module) for slot in (*self._averaged, *self._copied)}

    @property
    def copied_modules(self) -> list[nn.Module]:
        """The modules that own buffers of which all ranks have rank 0's."""
        return list(self._slots_of)

    @torch.no_grad()
    def start(self) -> None:
        """Note the buffers as the values that all ranks have."""
        if self._views:
            foreach_copy(self._views, [slot.current() for slot in self._copied])
            self._sent.copy_(self._words)
        self._note()

    def _landing(self) -> list[_Slot]:
        """Return the buffers that the common values of a step are written into on this rank."""
        return [*self._averaged, *(() if self._leads else self._copied)]

    @torch.no_grad()
    def pack(self, step: int, *, silent: bool) -> Tensor | None:
        """Return the pack with this rank's part, or None if it has nothing to say.

        Args:
            step: the step that ends, the same on all ranks.
            silent: this rank has seen no data in this step.
        """
        self._leads = self._membership.leads
        self._finds_uncounted = not self._may_lack and is_sampled(step)
        for slot in self._landing():
            slot.note_packed()
        if self._leads:
            # No other rank sees later changes before the next step's end.
            self._note()
        tells = self._compares and not silent and self._own_changes > UNCHANGED
        if silent or not (self._leads or self._averages or tells):
            return None
        if self._leads and self._copied:
            foreach_copy(self._views, [slot.current() for slot in self._copied])
            if not self._averages and self._is_unchanged() and not tells:
                return None
            self._awaits_own = True
            words = self.tensor.detach()[self._first_word :]
            words.copy_(self._words).add_(_OFFSET).mul_(self._world_size)
        else:
            self.tensor.detach()[self._first_word :].zero_()
        self._weights[0] = 1.0
        if self._compares:
            self._changes[0], self._changes[1] = tells, self._own_changes if tells else 0.0
        if self._averaged:
            flat = [
                slot.current().reshape(-1).to(device=self._device, dtype=torch.float64)
                for slot in self._averaged
            ]
            torch.cat(flat, out=self._values)
        return self.tensor

    @torch.no_grad()
    def land(self, mean: Tensor | None) -> None:
        """Write the values that all ranks agreed on into the buffers.

        Args:
            mean: the pack as it came back; None: no rank had anything to say.

        Raises:
            UsageError: a buffer was changed since `pack` in a way that goes with no common values.
            SessionFailedError: buffers were changed before the step, and not alike on all ranks.
        """
        if self._compares and mean is not None:
            self._compare(*mean[_WEIGHT_LANES : self._first_value].tolist())
        # Before any is written: views count their writes together.
        for slot in self._landing():
            slot.check_unwritten()
        if self._awaits_own and self._device.type == "cpu":
            # Steps may go on without this rank: then the others still lack its values.
            self._resends = mean is None or not bool((mean[self._first_word :] != 0).all())
        self._awaits_own = False
        if mean is not None:
            words = mean[self._first_word :]
            # On an accelerator nothing waits for the answer.
            is_whole = (words != 0).all()
            ranks = torch.round(self._world_size * _OFFSET / words)
            decoded = torch.round(words * ranks / self._world_size).sub_(_OFFSET)
            self._words.copy_(torch.where(is_whole, decoded, self._words.to(torch.float64)))
        if mean is not None and self._averages:
            self._land_average(mean[self._first_value : self._first_word] / mean[0])
        if not self._leads and self._copied:
            self._sent.copy_(self._words)
            pairs = [
                without_repeats(slot.current(), view)
                for slot, view in zip(self._copied, self._views, strict=True)
            ]
            foreach_copy([target for target, _ in pairs], [source for _, source in pairs])
            self._note()

    def _land_average(self, values: Tensor) -> None:
        parts = torch.split(values, [slot.shape.numel() for slot in self._averaged])
        for slot, part in zip(self._averaged, parts, strict=True):
            target, source = without_repeats(slot.current(), part.view(slot.shape))
            target.copy_(source)

    # ---- changes between two steps

    def begin_step(self, *, shadow: bool) -> None:
        """Note how buffers were changed since the last step; called after this one's forward.

        Args:
            shadow: this rank has no data in this step.
        """
        if self._compares:
            self._own_changes = UNKNOWN if shadow else self.changes()

    def _compare(self, count: float, total: float) -> None:
        """Compare this rank's changes with the mean over all ranks.

        Args:
            count: how many ranks have changed buffers, over the number of ranks.
            total: the sum of their `changes`, over the same number.

        Raises:
            SessionFailedError: a rank has changed them otherwise.
        """
        own, mean = self._own_changes, total / count if count else UNCHANGED
        if own == UNKNOWN or not count or abs(mean - own) <= _ALIKE:
            return
        told = "none" if own == UNCHANGED else repr(self.first_changed(own))
        others = "others, or to other values"
        if own == UNCHANGED:
            others = repr(self.first_changed(round(mean)))
        raise SessionFailedError(
            "buffers were changed between two steps, and not alike on all ranks: this rank changed "
            f"{told}, another one {others}. {CHANGED_APART}",
            None,
        )

    def examine(self, module: nn.Module) -> None:
        """Note buffers that changed since the last step, before a training forward changes them.

        Args:
            module: whose forward is about to begin; its own buffers are looked at.
        """
        if module in self._unexamined:
            self._unexamined.discard(module)
            for number, slot in self._slots_of[module]:
                if self._has_new_bytes(number, slot):
                    # Values that differ rightly, as do changes of them, tell nothing.
                    self._changed[number] = 0 if self._may_lack else _checksum(slot.held())

    def changes(self) -> int:
        """Return a number of how buffers were changed since the last step: the same if alike.

        Called when a step begins, after its forward. `UNKNOWN` says nothing: a module's forward
        that no hook saw, as in compiled code, may have changed them.
        """
        for module in self._unexamined:
            if any(self._has_new_bytes(*numbered) for numbered in self._slots_of[module]):
                return UNKNOWN
        if not self._changed:
            return UNCHANGED
        first = min(self._changed) + 1
        bits = CHANGE_BITS - _VALUE_BITS
        checksum = zlib.crc32(repr(sorted(self._changed.items())).encode())
        return (min(first, (1 << bits) - 1) << _VALUE_BITS) | (checksum & ((1 << _VALUE_BITS) - 1))

    def _has_new_bytes(self, number: int, slot: _Slot) -> bool:
        """Return whether a buffer was written since the last step with other bytes than it had.

        Writes that torch does not count, by `.data` or NumPy, are found after some steps alone.

        On an accelerator every write counts: comparing would wait for the device. So it does where
        ranks may lack the first one's values: the same write gives new bytes on one rank alone.
        """
        is_counted = slot.is_changed()
        if not is_counted and not self._finds_uncounted:
            return False
        if self._may_lack:
            return True
        buffer = slot.held()
        if buffer is None or buffer.device.type != "cpu" or self._device.type != "cpu":
            return is_counted
        return _checksum(buffer) != _checksum(self._views[number])

    def first_changed(self, changes: int) -> str:
        """Return the name of the first buffer that a number of `changes` speaks of."""
        return self._copied[min((changes >> _VALUE_BITS) - 1, len(self._copied) - 1)].name

    def _note(self) -> None:
        self._changed.clear()
        self._unexamined.update(self._slots_of)
        for slot in self._copied:
            slot.note_agreed()

    def _is_unchanged(self) -> bool:
        """Return whether the first rank has nothing new; an accelerator is not waited for."""
        if self._device.type != "cpu":
            return False
        if torch.equal(self._words, self._sent) and not self._resends:
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


_Look = tuple[nn.Module, tuple[Tensor | None, ...], list[torch.Size | None]]
"""A module, its buffers and their shapes."""


def _shapes(buffers: Iterable[Tensor | None]) -> list[torch.Size | None]:
    return [None if buffer is None else buffer.shape for buffer in buffers]


class BufferForm:
    """Checks that a model has the buffers that it was prepared with, on every rank."""

    def __init__(self, model: nn.Module) -> None:
        """Remember the buffers as they are."""
        self._slots = _slots(model)
        self._modules = list(model.named_modules())
        self._seen = self._look()

    def check(self) -> None:
        """Check that every buffer is in its place and form, and that there is no other.

        Raises:
            UsageError: ranks would not be kept alike; the message names the buffer.
        """
        if self._is_as_seen():
            return
        known = {id(slot.current()) for slot in self._slots}
        for prefix, module in self._modules:
            for key, buffer in _items(module):
                if buffer is not None and id(buffer) not in known and buffer.numel() > 0:
                    raise UsageError(
                        f"buffer {_joined(prefix, key)!r} is {tuple(buffer.shape)} {buffer.dtype} "
                        "now, and in prepare() it was not there or had no elements, so that it is "
                        f"not kept alike on all ranks: run a forward before prepare(), or {_REMEDY}"
                    )
        self._seen = self._look()

    def _look(self) -> list[_Look]:
        found = []
        for _, module in self._modules:
            buffers = tuple(buffer for _, buffer in _items(module))
            found.append((module, buffers, _shapes(buffers)))
        return found

    def _is_as_seen(self) -> bool:
        """Return whether all buffers are the same objects as before, of the same shapes."""
        for module, buffers, shapes in self._seen:
            mapping = buffers_of(module)
            if not buffers and not len(mapping):
                continue
            now = dict.values(mapping) if isinstance(mapping, dict) else mapping.values()
            if len(now) != len(buffers) or not all(map(operator.is_, now, buffers)):
                return False
            if buffers and _shapes(buffers) != shapes:
                return False
        return True


class BufferWatch:
    """Looks, in forward pre-hooks, for buffers that were changed between two steps."""

    def __init__(self, pack: BufferPack, settle: Callable[[], None]) -> None:
        """Register the hooks on all modules that own buffers; `remove` takes them off.

        Args:
            pack: the buffers that are kept alike.
            settle: waits until the buffers are those that all ranks agreed on.
        """
        hook = _Examination(pack, settle)
        # Before hooks that write buffers, such as those of spectral norm.
        self._handles = [register_pre_hook_first(module, hook) for module in pack.copied_modules]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class _Examination:
    """The hook; it sees no forwards of compiled code or of evaluation."""

    def __init__(self, pack: BufferPack, settle: Callable[[], None]) -> None:
        self._pack = pack
        self._settle = settle

    @only_inlined
    def __call__(self, module: nn.Module, arguments: Any) -> None:
        if is_tracing() or enters_compiled_code():
            return
        if module.training or torch.is_grad_enabled():
            self._settle()
            self._pack.examine(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _examine_nothing

    def __reduce__(self) -> Any:
        return _nothing, ()


def _examine_nothing(module: nn.Module, arguments: Any) -> None:
    """Do nothing: the hook in copies of a prepared model."""


def _nothing() -> Callable[..., None]:
    return _examine_nothing


def form_of(model: nn.Module, mode: str, world_size: int) -> BufferForm | None:
    """Return the form of a model's buffers, or None where they are left alone."""
    return None if mode == "local" or world_size == 1 else BufferForm(model)


def pack_buffers(
    model: nn.Module, mode: str, membership: Membership, *, compares: bool, may_lack: bool
) -> BufferPack | None:
    """Return the pack of a model's buffers, or None where there is nothing to keep alike."""
    if mode == "local" or not _slots(model):
        return None
    return BufferPack(model, mode, membership, compares=compares, may_lack=may_lack)


def _slots(model: nn.Module) -> Sequence[_Slot]:
    slots: dict[int, _Slot] = {}
    for prefix, module in model.named_modules():
        for key, buffer in _items(module):
            if buffer is not None and buffer.numel() > 0 and id(buffer) not in slots:
                slots[id(buffer)] = _Slot(_joined(prefix, key), module, key, buffer)
    return list(slots.values())


def _items(module: nn.Module) -> Iterable[tuple[str, Tensor | None]]:
    """List a module's buffers without waiting."""
    mapping = buffers_of(module)
    return dict.items(mapping) if isinstance(mapping, dict) else mapping.items()


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _checksum(buffer: Tensor | None) -> int:
    """Return a checksum of a buffer's bytes, or 0 where a device would have to be waited for."""
    if buffer is None or buffer.device.type != "cpu":
        return 0
    return zlib.crc32(buffer.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
