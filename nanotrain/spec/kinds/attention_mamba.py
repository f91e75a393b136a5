"""Attention and Mamba-2 side by side (Falcon-H1), the pure half of model/attention_mamba.py."""

from collections.abc import Collection

from nanotrain.spec.declaration import Declaration, RankSizes, Specs, nest
from nanotrain.spec.kinds.attention import attention, attention_bytes, pair_flops
from nanotrain.spec.kinds.mamba import declare as mamba
from nanotrain.spec.kinds.mamba import saved_bytes as mamba_bytes
from nanotrain.spec.kinds.mamba import sequence_flops as scan_flops
from nanotrain.spec.shape import ModelShape


def declare(declare: Declaration) -> Specs:
    """The parameters of both."""
    return nest("attention", attention(declare)) + nest("mamba", mamba(declare))


def saved_bytes(rank: RankSizes, layer: int, *, modules: Collection[str]) -> int:
    """What both keep."""
    return attention_bytes(rank, layer, modules=modules) + mamba_bytes(rank, layer, modules=modules)


def sequence_flops(shape: ModelShape, layer: int, *, seq_length: int) -> int:
    """Those of pairs and of the recurrence."""
    of_pairs = pair_flops(shape, layer, seq_length=seq_length)
    return of_pairs + scan_flops(shape, layer, seq_length=seq_length)
