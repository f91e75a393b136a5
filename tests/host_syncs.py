"""Count the places where the host would wait for a GPU, on a CPU: law L10.

    with HostSyncs() as syncs:
        train_step(run, batch)
    assert syncs.places == []

Counted are operators whose result the host needs (`item`, `bool`, `nonzero`, boolean indexing,
`repeat_interleave` without its size), copies to Python or numpy, and tensors made from Python
numbers, which are copied from memory that is not pinned. Backward passes run in the same thread on
a CPU, so they are counted too.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1] / "nanotrain"
SYNCING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
}
READING: set[Any] = {Tensor.tolist, Tensor.numpy, Tensor.cpu, torch.tensor, torch.as_tensor}


class HostSyncs:
    """The places that synchronize, as "file:line function" of the innermost frame of the package."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def __enter__(self) -> "HostSyncs":
        self._modes = [_Operators(self.add), _Functions(self.add)]
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def add(self) -> None:
        frame = sys._getframe(2)
        while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(ROOT):
            frame = frame.f_back
        if frame is not None:
            path = Path(frame.f_code.co_filename).relative_to(ROOT)
            self.places.append(f"{path}:{frame.f_lineno} {frame.f_code.co_name}")


class _Operators(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, add: Callable[[], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_mask = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) and any(
            each is not None and each.dtype is torch.bool for each in args[1]
        )
        unsized = (
            func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        )
        if func in SYNCING or by_mask or unsized:
            self._add()
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    def __init__(self, add: Callable[[], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with suppress(TypeError):  # not every function is hashable
            if func in READING:
                self._add()
        return func(*args, **(kwargs or {}))
