"""Start values that know nothing of the topology: each is a function of (seed, name, global shape) and its place.

A matrix is generated in blocks of whole rows, each block from a generator of its own, so a rank that holds some rows
makes only the blocks they lie in and gets the same bits as one that holds them all.
"""

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from nanotrain.model.stage import Stage
from nanotrain.topology.boxes import Box
from nanotrain.topology.params import LocalParam, ParamKind, ParamSpec

# Elements of one block. Part of what a seed means: another number gives other weights.
BLOCK_ELEMENTS = 2**20


def initialize(stage: Stage, params: Iterable[LocalParam], *, seed: int) -> None:
    """Give every parameter of a stage its start value, in place.

    Args:
        stage: its parameters have storage (they may be views of a flat buffer).
        params: what the stage holds of them; a subset initializes that subset.
        seed: the run's.
    """
    model_config = stage.model
    std = model_config.init_method_std
    deviations = {
        ParamKind.embedding: std,
        ParamKind.matrix: std,
        ParamKind.output_matrix: std / math.sqrt(2 * model_config.num_layers),
    }
    parameters = dict(stage.named_parameters())
    for local in params:
        spec, target = local.spec, parameters[local.spec.name].data
        if spec.kind in deviations:
            fill_normal(target, spec, box=local.box, seed=seed, std=deviations[spec.kind])
        else:
            target.fill_(1.0 if spec.kind is ParamKind.norm else 0.0)


def fill_normal(target: Tensor, spec: ParamSpec, *, box: Box, seed: int, std: float) -> None:
    """Write the normal start values of a box of a parameter.

    Args:
        target: tensor of the box's shape, any dtype or device; filled in place.
        spec: the whole parameter.
        box: the part of it that `target` holds.
        seed: the run's.
        std: standard deviation.
    """
    num_rows, row_shape = spec.shape[0], spec.shape[1:]
    block_rows = max(1, BLOCK_ELEMENTS // max(1, math.prod(row_shape)))
    first, last = box.start[0], box.stop[0]
    for start in range(first - first % block_rows, last, block_rows):
        stop = min(start + block_rows, num_rows)
        generator = torch.Generator().manual_seed(_block_seed(seed, spec, start_row=start))
        block = torch.empty((stop - start, *row_shape)).normal_(0.0, std, generator=generator)
        low, high = max(start, first), min(stop, last)
        columns = tuple(slice(a, b) for a, b in zip(box.start[1:], box.stop[1:], strict=True))
        target[low - first : high - first].copy_(block[(slice(low - start, high - start), *columns)])


def _block_seed(seed: int, spec: ParamSpec, *, start_row: int) -> int:
    identity = f"{seed}/{spec.name}/{'x'.join(map(str, spec.shape))}/{start_row}"
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little") >> 1
