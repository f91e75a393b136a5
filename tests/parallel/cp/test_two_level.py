"""Two levels of context parallelism: which ranks form them, and what the configuration asks for."""

import pytest
import torch

from nanotrain.config.load import load
from nanotrain.config.parallel import all_to_all_ranks
from nanotrain.config.rules.check import validate_for_world
from nanotrain.errors import ConfigError
from nanotrain.parallel.cp import build_core_attention
from nanotrain.parallel.cp.two_level import TWO_LEVEL, TwoLevelAttention
from tests.harness import run_ranks

SIZES = (
    "--mock-data --vocab-size 64 --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --context-parallel-size 4 --cp-comm-type a2a+p2p"
)


def groups_of(ctx, num_inside):
    attention = build_core_attention(TWO_LEVEL, ctx.group("cp"), num_inside=num_inside)
    assert isinstance(attention, TwoLevelAttention)
    return list(attention.ulysses.group.ranks), list(attention.ring.group.ranks)


@pytest.mark.parametrize(
    ("num_inside", "expected"),
    [
        (2, [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]),
        (4, [([0, 1, 2, 3], [rank]) for rank in range(4)]),
        (1, [([rank], [0, 1, 2, 3]) for rank in range(4)]),
    ],
)
def test_ranks_of_an_all_to_all_are_consecutive(num_inside, expected):
    assert run_ranks(4, groups_of, num_inside, cp=4, threads=True) == expected


def attend(ctx, num_inside):
    attention = build_core_attention(TWO_LEVEL, ctx.group("cp"), num_inside=num_inside)
    generator = torch.Generator().manual_seed(ctx.group("cp").index)
    query, key, value = torch.randn(3, 2, 8, 4, 6, generator=generator, dtype=torch.float64)
    mask = attention.plan_mask(None, tokens=query[..., 0, 0])
    return attention(query, key=key, value=value, mask=mask, scores=None)


@pytest.mark.parametrize("num_inside", [1, 4])
def test_one_level_of_one_rank_is_the_other_level(num_inside):
    expected = run_ranks(4, attend, 2, cp=4, threads=True)
    actual = run_ranks(4, attend, num_inside, cp=4, threads=True)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_megatron_s_sizes_are_an_all_to_all_and_a_ring():
    parallel = load(f"{SIZES} --hierarchical-context-parallel-sizes 4 1".split()).config.parallel
    assert parallel.all_to_all_ranks == 4
    assert load(SIZES.split()).config.parallel.all_to_all_ranks == 2
    assert all_to_all_ranks(TWO_LEVEL, 3) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hierarchical-context-parallel-sizes 2 4", "2 4 with cp=4 ranks"),
        ("--hierarchical-context-parallel-sizes 4", "whose product is cp"),
        (
            "--hierarchical-context-parallel-sizes 4 1 --tensor-model-parallel-size 2",
            "4 attention heads cannot be shared by 4 ranks of an all-to-all: .* tp times these = 8 to",
        ),
        (
            "--hierarchical-context-parallel-sizes 2 2 --cp-comm-type p2p",
            "it belongs to cp_comm_type a2a.p2p",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        validate_for_world(load(f"{SIZES} {arguments}".split()).config, 8)
