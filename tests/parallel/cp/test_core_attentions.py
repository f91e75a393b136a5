"""Every core attention gives the output and the gradients of SDPA on one rank; the table is open to
new rows.
"""

from itertools import product

import pytest
import torch

from nanotrain.attention import tiles
from nanotrain.attention.sdpa import SDPAttention
from nanotrain.comm.group import Group
from nanotrain.errors import ConfigError
from nanotrain.parallel.cp import CORE_ATTENTIONS, build_core_attention
from nanotrain.parallel.cp.all_gather import AllGatherAttention
from tests.harness import ranks, run_ranks
from tests.parallel.cp.sequences import Shape, largest_error

SHAPES = {
    "default": Shape(),
    "grouped": Shape(heads=8, groups=2),
    "one group": Shape(heads=4, groups=1, batch=1),
    "short": Shape(length=8, batch=3),
    "wide keys": Shape(head_dim=12, value_head_dim=8),
    "wide values": Shape(head_dim=4, value_head_dim=8, groups=2),
}
MASKS = ((False, None), (True, None), (False, 3), (True, 7))  # with segments, window
# A few units of the last place of each dtype: sums over 24 keys, three products deep.
BOUNDS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def errors_on_this_rank(ctx, comm_type, names):
    group = ctx.group("cp")
    tiles.QUERIES_PER_MASK = 4  # of this process alone: tiles with and without masks
    return {
        (name, dtype, *mask): largest_error(
            comm_type, group, SHAPES[name], dtype=dtype, with_segments=mask[0], window=mask[1]
        )
        for name, dtype, mask in product(names, BOUNDS, MASKS)
        # how sums are rounded depends on the dtype and not on shape and mask together
        if dtype is torch.float64 or name == "default" or mask == MASKS[-1]
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("comm_type", list(CORE_ATTENTIONS))
def test_output_and_gradients_are_those_of_one_rank(comm_type, size):
    for errors in run_ranks(
        size, errors_on_this_rank, comm_type, list(SHAPES), cp=size, threads=True
    ):
        too_large = {case: error for case, error in errors.items() if error > BOUNDS[case[1]]}
        assert not too_large


@pytest.mark.parametrize("comm_type", list(CORE_ATTENTIONS))
def test_a_group_of_one_rank_gets_sdpa(comm_type):
    assert isinstance(build_core_attention(comm_type, Group.single_rank("cp")), SDPAttention)


def test_an_unknown_name_is_refused_with_the_closest_one():
    with pytest.raises(
        ConfigError, match="names are allgather, p2p, a2a, a2a.p2p; write --cp-comm-type allgather"
    ):
        build_core_attention("all_gather", Group.single_rank("cp"))


class Outside(AllGatherAttention):
    pass


@ranks(2, cp=2)
def test_a_new_core_attention_is_one_class_and_one_row(ctx):
    CORE_ATTENTIONS["outside"] = Outside
    assert isinstance(build_core_attention("outside", ctx.group("cp")), Outside)
    assert (
        largest_error("outside", ctx.group("cp"), Shape(), dtype=torch.float64, with_segments=True)
        <= 1e-14
    )
