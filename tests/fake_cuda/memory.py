"""Tensors of the CPU over the memory of a fake device, and back."""

import ctypes

import torch
from torch import Tensor


def on_cpu(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same memory."""
    numel = _spanned(tensor)
    if numel == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    count = numel * tensor.element_size()
    memory = (ctypes.c_char * count).from_address(tensor.data_ptr())
    return (
        torch.frombuffer(memory, dtype=torch.uint8)
        .view(tensor.dtype)
        .as_strided(tensor.shape, tensor.stride())
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on the device, with the same strides."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    overwrite(copy, tensor)
    return copy


def overwrite(target: Tensor, source: Tensor) -> None:
    """Copy a CPU tensor to one of the same shape and strides on the device."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), _spanned(source) * source.element_size())


def _spanned(tensor: Tensor) -> int:
    """Elements from the first to the last."""
    extents = (
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return 0 if tensor.numel() == 0 else 1 + sum(extents)
