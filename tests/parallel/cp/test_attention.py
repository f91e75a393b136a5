"""Every core, on any number of ranks, gives the output and the gradients of one rank."""

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.parallel.cp.attention import CORE_ATTENTIONS, build_core_attention
from nanotrain.parallel.cp.sdpa import SDPAttention
from tests.harness import run_ranks
from tests.parallel.cp.sequences import Shape, largest_error

SHAPES = {
    "plain": Shape(),
    "grouped": Shape(heads=8, groups=2),
    "one group": Shape(heads=4, groups=1, batch=1),
    "short": Shape(length=8, batch=3),
    "wide keys": Shape(width=12, value_width=8),
    "wide values": Shape(width=4, value_width=8, groups=2),
}
# A few units of the last place of each dtype: sums over 24 keys, three products deep.
BOUNDS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


def errors_on_this_rank(ctx, comm_type, names, dtype):
    group = ctx.group("cp")
    return {
        (name, with_documents): largest_error(
            comm_type, group, SHAPES[name], dtype=dtype, with_documents=with_documents
        )
        for name in names
        for with_documents in (False, True)
    }


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("comm_type", list(CORE_ATTENTIONS))
def test_output_and_gradients_are_those_of_one_rank(comm_type, size, dtype):
    for errors in run_ranks(size, errors_on_this_rank, comm_type, list(SHAPES), dtype, cp=size):
        assert all(error <= BOUNDS[dtype] for error in errors.values()), errors


@pytest.mark.parametrize("comm_type", list(CORE_ATTENTIONS))
def test_a_group_of_one_gets_the_plain_core(comm_type):
    assert isinstance(build_core_attention(comm_type, Group.single_rank("cp")), SDPAttention)
