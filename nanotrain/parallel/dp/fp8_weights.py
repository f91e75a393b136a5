"""Weights that are gathered, and read by products, in fp8 (`--fp8-param-gather`).

    update [update_numel]   params_dtype   what this rank's optimizer writes
        amax of every weight or block, and the largest over the ranks that share it
        fp8 values with the scales of the whole weight
    params.sent             fp8            the same elements of the bucket; all-gathers send these
    Fp8Layer.stored         fp8            the weight as the products read it

Every element is rounded as if the whole weight were quantized from params_dtype, so results equal
those of a run without the flag, to the bit. The parameter of the module has no storage: it reads as
NaN.

    E experts, 1 in a dense layer   R rows   C columns   (r, c) elements of a block with one scale
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.collectives import all_gather_into, all_reduce
from nanotrain.comm.group import Group
from nanotrain.kernels.fp8.layer import Fp8Layer, StoredWeight
from nanotrain.kernels.fp8.quantize import block_amax, quantize
from nanotrain.parallel.dp.bucket import ParamBucket
from nanotrain.parallel.dp.options import ReduceGroups
from nanotrain.precision.fp8 import Block
from nanotrain.quantities import ceil_div


def scales_shape(shape: Sequence[int], block: Block) -> tuple[int, int, int]:
    """[E, R / r, C / c], the scales of a weight [R, C] or [E, R, C].

    >>> scales_shape((300, 128), (128, 128)), scales_shape((4, 300, 128), (None, None))
    ((1, 3, 1), (4, 1, 1))
    """
    experts, rows, columns = _as_stacked(shape)
    block_rows = block[0] or rows
    block_columns = block[1] or columns
    return experts, ceil_div(rows, block_rows), ceil_div(columns, block_columns)


@dataclass(frozen=True)
class _Weight:
    """One weight and its scales."""

    layer: Fp8Layer
    bucket: ParamBucket
    name: str
    shape: tuple[int, int, int]  # [E, R, C] on this rank
    view: Tensor  # [E, R, C] of the bucket's own memory

    @property
    def block(self) -> Block:
        return self.layer.options.recipe.weight_block

    @property
    def scales_shape(self) -> tuple[int, int, int]:
        return scales_shape(self.shape, self.block)

    @property
    def stored(self) -> StoredWeight:
        """The fp8 weight that products read; scales are NaN before the first `quantize`."""
        if self.layer.stored is None:
            scales = torch.full(self.scales_shape, torch.nan, device=self.view.device)
            self.layer.stored = StoredWeight(self.view, scales, scales[:, 0, 0], self.block)
        return self.layer.stored

    def store(self) -> None:
        """Point `stored` to the memory that the bucket is gathered into."""
        separate = self.bucket.params.separate
        values = self.view
        if separate is not None:
            values = self.bucket.view(self.name, separate).view(self.shape)
        self.layer.stored = replace(self.stored, values=values)

    def parts(self) -> Iterator["WeightPart"]:
        """The elements that this rank updates, per expert."""
        _, rows, columns = self.shape
        size = rows * columns
        for part in self.bucket.update_ranges:
            if part.name != self.name:
                continue
            first_expert = part.param_start // size
            last_expert = (part.param_start + part.numel - 1) // size
            for expert in range(first_expert, last_expert + 1):
                # first element of the expert, which may lie on another rank
                origin = part.start - part.param_start + expert * size
                first = max(part.start, origin)
                last = min(part.stop, origin + size)
                yield WeightPart(expert, first - origin, columns, slice(first, last), self.block)


@dataclass(frozen=True)
class WeightPart:
    """Consecutive elements of one matrix [R, C]."""

    expert: int
    first: int  # element of the matrix
    columns: int  # C
    elements: slice  # position in the range of the bucket that this rank updates
    block: Block

    def amax(self, update: Tensor, largest: Tensor) -> None:
        """Raise `largest` [E, R / r, C / c] to the amaxes of these elements."""
        blocks = self._blocks(largest)
        torch.maximum(blocks, block_amax(self._matrix(update), self.block), out=blocks)

    def quantize(self, update: Tensor, target: Tensor, *, inverse: Tensor) -> None:
        """Write these elements in fp8, with the inverse scales [E, R / r, C / c]."""
        quantized = quantize(
            self._matrix(update), self._blocks(inverse), block=self.block, dtype=target.dtype
        )
        target[self.elements].copy_(quantized.values.flatten()[self._before :][: self._numel])

    @property
    def _numel(self) -> int:
        return self.elements.stop - self.elements.start

    @property
    def _before(self) -> int:
        """Elements from the first row of a block of rows to the first element."""
        return 0 if self.block[0] is None else self.first % (self.block[0] * self.columns)

    def _matrix(self, update: Tensor) -> Tensor:
        """The elements as rows of C, padded with zeros to whole blocks of rows.

        They are one row if the weight has one scale.
        """
        values = update[self.elements]
        if self.block[0] is None:
            return values[None]
        after = -(self._before + self._numel) % self.columns
        return F.pad(values, (self._before, after)).view(-1, self.columns)

    def _blocks(self, per_block: Tensor) -> Tensor:
        """[E, R / r, C / c] -> a view of the entries for the blocks of `_matrix`."""
        blocks = per_block[self.expert]
        rows = self.block[0]
        if rows is None:
            return blocks
        size = rows * self.columns
        return blocks[self.first // size : ceil_div(self.first + self._numel, size)]


class Fp8Weights:
    """The fp8 weights of one wrapper.

    Args:
        module: owner of the layers.
        buckets: buckets of weights only, with fp8 parameter stores.
        groups: groups inside the instance and across instances.
        amax_groups: further ranks that share a scale: of tensor parallelism, where a tensor has one
            scale.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[ParamBucket],
        *,
        groups: ReduceGroups,
        amax_groups: Sequence[Group],
    ) -> None:
        self._buckets = buckets
        self._groups = groups
        self._amax_groups = (groups.shard, groups.outer, *amax_groups)
        self._weights: list[_Weight] = []
        for bucket in buckets:
            bucket.params.allocate()
            for entry in bucket.layout.params:
                layer = _layer_of(module, entry.name)
                shape = _as_stacked(entry.param.box.shape)
                view = bucket.view(entry.name, bucket.params.full).view(shape)
                self._weights.append(_Weight(layer, bucket, entry.name, shape, view))
            bucket.params.free()
            self.store(bucket)

    @property
    def values(self) -> dict[str, Tensor]:
        """The weights [E, R, C] in fp8 by parameter name; complete while they are gathered."""
        return {weight.name: weight.stored.values for weight in self._weights}

    def store(self, bucket: ParamBucket) -> None:
        """Point the weights of a bucket to the memory that it is gathered into."""
        for weight in self._weights:
            if weight.bucket is bucket:
                weight.store()

    @torch.no_grad()
    def quantize(self) -> None:
        """Quantize this rank's part with the scales of whole weights.

        One all-reduce per group sums up the amaxes of all weights.
        """
        numels = [prod(weight.scales_shape) for weight in self._weights]
        all_amaxes = torch.zeros(sum(numels), device=self._buckets[0].params.update.device)
        amaxes = []
        for weight, flat in zip(self._weights, all_amaxes.split(numels), strict=True):
            amax = flat.view(weight.scales_shape)
            for part in weight.parts():
                part.amax(weight.bucket.params.update, amax)
            amaxes.append(amax)
        for group in self._amax_groups:
            all_reduce(all_amaxes, group, op="max")
        for weight, amax in zip(self._weights, amaxes, strict=True):
            inverse = weight.layer.weight_scales(amax)
            params = weight.bucket.params
            for part in weight.parts():
                part.quantize(params.update, params.sent, inverse=inverse)
            weight.layer.stored = replace(
                weight.stored, inverse_scales=inverse, amax=amax.amax((1, 2))
            )

    def gather_updates(self, bucket: ParamBucket) -> Tensor:
        """[numel] the weights of a bucket in params_dtype, collected from all ranks in new memory.

        Called while all units are gathered.
        """
        self.store(bucket)
        update = bucket.params.update
        shard = update.new_empty(bucket.layout.shard_numel)
        full = update.new_empty(bucket.layout.numel)
        all_gather_into(shard, update, group=self._groups.outer)
        all_gather_into(full, shard, group=self._groups.shard)
        return full


def placeholder(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of NaN in the memory of one element."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(*shape)


def _layer_of(module: nn.Module, name: str) -> Fp8Layer:
    """The fp8 layer that a weight belongs to, by the weight's name."""
    owner, _, leaf = name.rpartition(".")
    layer = getattr(module.get_submodule(owner), "fp8", None)
    assert leaf == "weight" and isinstance(layer, Fp8Layer), (
        f"{name} has no fp8 products, which alone can read it"
    )
    return layer


def _as_stacked(shape: Sequence[int]) -> tuple[int, int, int]:
    *experts, rows, columns = shape
    return prod(experts), rows, columns
