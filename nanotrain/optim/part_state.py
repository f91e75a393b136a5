"""`PartState`: main params, state tensors and gradients of one part of a shard, read and written as fp32 ranges.

    part          [----------------------------]
    param ranges  [== weight decay ==|=========]   consecutive params with the same hyperparameters, merged

If everything is stored in fp32, the ranges are views, made once. Otherwise one chunk at a time is converted to fp32,
updated and stored again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from nanotrain.optim.parts import ShardPart, clip_ranges
from nanotrain.optim.rule import ParamRange
from nanotrain.optim.stored import SCALE_BLOCK, StoredTensor
from nanotrain.parallel.dp.layout import ShardRange

CHUNK_NUMEL = 1024 * SCALE_BLOCK  # elements that are converted to fp32 at once: 8 MiB per tensor


@dataclass(frozen=True)
class HostBuffers:
    """What a part with state in host memory is copied from and to."""

    device_grad: Tensor  # [numel] reduced gradients on the device
    params: Tensor  # [numel] model params in their dtype, on the host


class PartState:
    """Optimizer state of one part.

    Args:
        part: its elements and params.
        main: [numel] main params.
        state: [numel] state tensors by name.
        grad: [numel] reduced gradients, fp32 or `--main-grads-dtype`.
        model_params: [numel] model params; the values of `main` where they have its dtype.
        host: buffers of a part whose tensors, except `model_params`, are in host memory; None on the device.
    """

    def __init__(
        self,
        part: ShardPart,
        *,
        main: StoredTensor,
        state: Mapping[str, StoredTensor],
        grad: Tensor,
        model_params: Tensor,
        host: HostBuffers | None = None,
    ) -> None:
        self.host = host
        self.part, self.main, self.state, self.grad, self.model_params = part, main, state, grad, model_params
        self.ema: StoredTensor | None = None  # [numel] fp32 moving average of `main`, of runs with `--ema-decay`
        self.grad_factor: Tensor | None = None  # of gradients that are not fp32, from unscaling and clipping
        self.is_fp32 = grad.dtype is torch.float32 and all(stored.is_fp32 for stored in (main, *state.values()))

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """Main params, state tensors and average by their prefix in checkpoints."""
        average = {} if self.ema is None else {"ema": self.ema}
        return {"model": self.main} | {f"optimizer/{name}": tensor for name, tensor in self.state.items()} | average

    def ranges(self) -> list[ParamRange]:
        """The ranges of a part that is stored in fp32, as views."""
        assert self.is_fp32, "changes of copies would be lost"
        with self.loaded(0, self.part.numel) as ranges:
            return ranges

    def copy_main_to_model_params(self) -> None:
        """Round the main params to the model params, where they are stored apart."""
        if self.main.values is not self.model_params:
            self.main_in_chunks_to(self.model_params)

    def main_in_chunks_to(self, params: Tensor) -> None:
        """Round the main params to a tensor of the dtype of the model params."""
        for start, stop in self.chunks():
            params[start:stop].copy_(self.main.read(start, stop))

    def scale_rows(self, factors: Mapping[str, Tensor]) -> bool:
        """Multiply main params by factors per row of the global parameter; returns whether this part has any of them.

        Args:
            factors: by parameter name, [rows].
        """
        first, found = self.part.start, False
        for start, stop in self.chunks():
            ranges = clip_ranges(self.part.ranges, start=first + start, stop=first + stop)
            chosen = [part for part in ranges if part.name in factors]
            if chosen:
                main, found = self.main.read(start, stop), True
                for part in chosen:
                    elements = main[part.shard_start - first - start :][: part.numel]
                    elements.mul_(_element_factors(part, factors[part.name]).to(main.device))
                self.main.write(main, start)
        return found

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Start and stop of the chunks of this part."""
        for start in range(0, self.part.numel, CHUNK_NUMEL):
            yield start, min(start + CHUNK_NUMEL, self.part.numel)

    @contextmanager
    def loaded(self, start: int, stop: int) -> Iterator[list[ParamRange]]:
        """The fp32 ranges of elements [start, stop) of the part; their changes are stored at the end of the block."""
        main = self.main.read(start, stop)
        state = {name: stored.read(start, stop) for name, stored in self.state.items()}
        grad = self.grad[start:stop]
        if grad.dtype is not torch.float32:
            grad = grad.float()
            grad = grad if self.grad_factor is None else grad.mul_(self.grad_factor)
        ranges = []
        for example, first, last in self._segments(start, stop):
            elements = slice(first - start, last - start)
            ranges.append(
                ParamRange(
                    main[elements],
                    grad[elements],
                    {name: values[elements] for name, values in state.items()},
                    weight_decay=example is not None and example.param.spec.weight_decay,
                    is_decoupled=example is not None and example.param.spec.is_embedding_or_output,
                )
            )
        yield ranges
        self.main.write(main, start)
        for name, values in state.items():
            self.state[name].write(values, start)

    def _segments(self, start: int, stop: int) -> Iterator[tuple[ShardRange | None, int, int]]:
        """Split [start, stop) of the part by hyperparameters: a param range of each segment, its start and its stop."""

        def key(param_range: ShardRange) -> tuple[bool, bool]:
            spec = param_range.param.spec
            return spec.weight_decay, spec.is_embedding_or_output

        offset = self.part.start
        inside = clip_ranges(self.part.ranges, start=offset + start, stop=offset + stop)
        groups = [list(group) for _, group in groupby(inside, key=key)]
        if not groups:
            yield None, start, stop
            return
        for group in groups:
            end = stop if group is groups[-1] else group[-1].elements.stop - offset
            yield group[0], start, end
            start = end


def _element_factors(part: ShardRange, of_rows: Tensor) -> Tensor:
    """[numel of the range] from the factors of the rows of the global parameter."""
    box = part.param.box
    width = box.numel // box.shape[0]  # of a local row
    first, last = part.param_start // width, -(-(part.param_start + part.numel) // width)
    rows = of_rows[box.start[0] + first : box.start[0] + last]
    return rows.repeat_interleave(width)[part.param_start - first * width :][: part.numel]
