"""Pickles with the bytes of each tensor: torch's own way takes 0.2 ms a tensor, ten times as long."""

import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch


def pickled(result: Any) -> bytes:
    """The bytes of a rank's result."""

    def take_apart(tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        content = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (content, tensor.dtype, tuple(tensor.shape))

    pickler = pickle.Pickler(stream := io.BytesIO(), pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: take_apart}  # type: ignore[attr-defined]
    pickler.dump(result)
    return stream.getvalue()


def _tensor(content: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    return (
        torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
        if content
        else torch.empty(shape, dtype=dtype)
    )
