"""The tensor table: the tensors of a model that take part, their order and their memory.

Tensor numbers are positions in this table. Trained parameters come first, in the order of
`named_parameters()`, tied ones once. Frozen parameters and buffers follow, which take part in step
0 only, as plain bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradlane.errors import RefusedError
from gradlane.training.options.codec_choice import CodedTensor
from gradlane.training.torch_internals import is_wrapper_subclass

_TRAINED_DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.complex64: "f32",
    torch.complex128: "f64",
}
"""Dtypes in which trained parameters are averaged; complex numbers are pairs."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the table.

    Attributes:
        name: as in `named_parameters()` or `named_buffers()`.
        tensor: the parameter or buffer itself.
        trained: True if it takes part in training steps.
        dtype: the tensor's dtype when the table was made.
        shape: its shape then.
        device: its device then.
        stride: element strides that its gradients have, which cover the storage without gaps.
        nbytes: size of its contents.
    """

    name: str
    tensor: Tensor
    trained: bool
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    stride: tuple[int, ...]
    nbytes: int

    def host_memory(self) -> Tensor:
        """Return new memory of the host with the entry's shape, dtype and strides."""
        with torch.inference_mode(False):
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")

    def device_memory(self) -> Tensor:
        """Return new memory of the entry's device with its shape, dtype and strides."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def row(self) -> dict[str, Any]:
        """Return the JSON-serializable row that ranks compare and that the plan is built from."""
        return {
            "name": self.name,
            "numel": self.tensor.numel() if self.trained else self.nbytes,
            "dtype": str(self.dtype).removeprefix("torch."),
            "role": "parameter" if self.trained else "initial",
            "shape": list(self.shape),
            "stride": list(self.stride),
        }

    def plan_row(self) -> dict[str, Any]:
        """Return the plan's row; a frozen tensor is bytes."""
        if self.trained:
            return {
                "name": self.name,
                "numel": self.tensor.numel() * (2 if self.dtype.is_complex else 1),
                "dtype": _TRAINED_DTYPES[self.dtype],
                "role": "parameter",
            }
        return self.bytes_row()

    def coded(self) -> CodedTensor:
        """Return a trained entry as codecs see it; complex numbers are pairs."""
        axes = sorted(range(len(self.shape)), key=lambda axis: self.stride[axis], reverse=True)
        sizes = tuple(self.shape[axis] for axis in axes)
        pair = (2,) if self.dtype.is_complex else ()
        return CodedTensor(self.name, _TRAINED_DTYPES[self.dtype], sizes + pair)

    def bytes_row(self) -> dict[str, Any]:
        """Return the plan's row as plain bytes, which only step 0 broadcasts."""
        return {"name": self.name, "numel": self.nbytes, "dtype": "u8", "role": "initial"}


def build_table(model: nn.Module) -> list[TensorEntry]:
    """List every tensor of a model that takes part; tensors without elements do not.

    Raises:
        ValueError: a tensor cannot take part, or no parameter is trained; the message names it.
    """
    trained: list[TensorEntry] = []
    initial: list[TensorEntry] = []
    for name, parameter in model.named_parameters():
        _check_storage(name, parameter)
        if parameter.numel() == 0:
            continue
        if parameter.requires_grad:
            if is_expanded(parameter):
                raise RefusedError(
                    f"parameter {name!r} is expanded (stride 0), and no optimizer can update "
                    "elements that share memory: give it memory of its own, with "
                    "nn.Parameter(value.clone())"
                )
            if parameter.dtype not in _TRAINED_DTYPES:
                raise RefusedError(
                    f"parameter {name!r} has dtype {parameter.dtype}, which cannot be averaged; "
                    f"supported are {', '.join(map(str, _TRAINED_DTYPES))}"
                )
            trained.append(_entry(name, parameter, trained=True))
        else:
            initial.append(_entry(name, parameter, trained=False))
    for name, buffer in model.named_buffers():
        _check_storage(name, buffer)
        if buffer.numel() > 0:
            initial.append(_entry(name, buffer, trained=False))
    if not trained:
        raise RefusedError(
            "the model has no trained parameter (requires_grad=True), so that there is nothing to "
            "average: train one, or do without prepare()"
        )
    return trained + initial


def extra_entry(name: str, tensor: Tensor) -> TensorEntry:
    """Return the entry of a tensor outside the model that takes part in every step."""
    return _entry(name, tensor, trained=True)


def state_entry(name: str, tensor: Tensor) -> TensorEntry:
    """Return the entry of a tensor of the optimizer's state, broadcast as plain bytes."""
    return _entry(name, tensor, trained=False)


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill a memory range without gaps or overlaps, in any
    order."""
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(tensor: Tensor, stride: tuple[int, ...]) -> bool:
    """Return whether a tensor has these strides along all axes with two elements or more."""
    own = tensor.stride()
    if own == stride:
        return True
    sizes = tensor.shape
    return len(own) == len(stride) and all(
        mine == theirs or size == 1 for mine, theirs, size in zip(own, stride, sizes, strict=True)
    )


def is_expanded(tensor: Tensor) -> bool:
    """Return whether elements share memory along an axis, as `expand` makes them."""
    return any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def without_repeats(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors without the elements that share the target's memory, for a copy.

    Torch refuses to write into an expanded tensor. Along axes of stride 0 all elements are one.

    Args:
        target: of the copy.
        source: of the same shape.
    """
    for axis, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
    return target, source


def in_layout(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the tensor if it has these strides, else a copy with them."""
    if same_layout(tensor, stride):
        return tensor
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def names_of(entries: Iterable[TensorEntry], limit: int = 3) -> str:
    """Return the first names of some entries, for a message."""
    names = [repr(entry.name) for entry in entries]
    text = ", ".join(names[:limit])
    return f"{text} and {len(names) - limit} more" if len(names) > limit else text


def _entry(name: str, tensor: Tensor, *, trained: bool) -> TensorEntry:
    stride = tensor.stride() if is_dense(tensor) else _row_major(tensor.shape)
    nbytes = tensor.numel() * tensor.element_size()
    return TensorEntry(
        name=name,
        tensor=tensor,
        trained=trained,
        dtype=tensor.dtype,
        shape=tensor.shape,
        device=tensor.device,
        stride=tuple(stride),
        nbytes=nbytes,
    )


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _check_storage(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise RefusedError(
            f"parameter {name!r} has no shape yet: run one forward through the lazy modules "
            "before prepare()"
        )
    if is_wrapper_subclass(tensor):
        raise RefusedError(
            f"tensor {name!r} is a {type(tensor).__name__}, which gradlane cannot send; "
            "plain dense tensors are supported"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        what = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
        raise RefusedError(f"tensor {name!r} {what}; only dense ones can be sent")
    if tensor.is_conj() or tensor.is_neg():
        raise RefusedError(
            f"tensor {name!r} is a conjugate or negative view (torch.conj), whose memory has other "
            "values: replace it by its .resolve_conj().resolve_neg() before prepare()"
        )
    if tensor.is_inference():
        raise RefusedError(
            f"tensor {name!r} was made in torch.inference_mode(), outside of which torch does not "
            "write it: replace it by its .clone(), made outside, before prepare()"
        )
    if tensor.is_quantized or tensor.device.type not in ("cpu", "cuda"):
        what = "quantized" if tensor.is_quantized else f"on device {tensor.device}"
        raise RefusedError(f"tensor {name!r} is {what}; gradlane sends CPU and CUDA tensors")
