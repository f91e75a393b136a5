"""After the data-parallel reduction: gradients that other axes still owe each other.

    tp      parameters used on sequence shards or on some heads only (norms under sequence parallel, query and key
            norms, routers, keys and values shared by several ranks): every rank saw a part of the activations
    embed   the tied embedding, used by the first stage as embedding and by the last as head

Source: Megatron-LM, `finalize_model_grads.py`. There the sums run before the reduce-scatter, over whole gradients; here
they run after it, over shards, which moves 1/d of the bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.dp.data_parallel import DataParallel

AXES = ("tp", "embed")


def finalize_grads(layers: Sequence[DataParallel], context: ParallelContext) -> None:
    """Sum what is left to sum, in place in the reduced gradient shards.

    Args:
        layers: the data-parallel layers of this rank.
        context: the groups; a rank between the first and the last stage has no `embed` group.
    """
    for axis in AXES:
        group = context.groups.get(axis)
        if group is None or group.size == 1:
            continue
        pieces = [piece for layer in layers for piece in layer.grad_pieces(axis)]
        if pieces:
            _sum_as_one(pieces, group)


def _sum_as_one(pieces: Sequence[Tensor], group: Group) -> None:
    """One collective for all pieces: they are many and small."""
    flat = torch.cat(list(pieces))
    all_reduce(flat, group)
    torch._foreach_copy_(list(pieces), list(flat.split([piece.numel() for piece in pieces])))
