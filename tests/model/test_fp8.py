"""fp8 options of a stage, and amaxes over the ranks that share a tensor."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nanotrain.comm.group import Group
from nanotrain.config.config import AmaxAlgo, Fp8Config, Fp8Format
from nanotrain.kernels.fp8.layer import ExpertRange, Fp8Layer
from nanotrain.model.fp8 import (
    DenseAmax,
    ExpertAmax,
    expert_fp8_options,
    fp8_options,
    layers_in_bf16,
)
from nanotrain.train.parts.fp8_amaxes import fp8_layers, update_amax_histories
from tests.harness import ranks

SEQUENCE, ETP = Group.single_rank("tp_cp"), Group.single_rank("etp")
DELAYED = Fp8Config(format=Fp8Format.hybrid, amax_history_len=4)


def test_options_are_those_of_the_configuration() -> None:
    assert fp8_options(None, sequence=SEQUENCE) is None
    options = fp8_options(replace(DELAYED, margin=1, amax_compute_algo=AmaxAlgo.max), sequence=SEQUENCE)
    assert options is not None
    assert (options.margin, options.history_length, options.uses_largest) == (1, 4, True)
    assert options.dtypes.backward is torch.float8_e5m2
    assert options.reduce_amax is None  # of one rank
    experts = ExpertRange(0, 2, 2)
    assert expert_fp8_options(options, experts, etp=ETP, sequence=SEQUENCE).reduce_amax is None


@pytest.mark.parametrize(("start", "end", "expected"), [(1, 1, {0, 5}), (0, 2, {4, 5}), (2, 0, {0, 1})])
def test_first_and_last_layers(start: int, end: int, expected: set[int]) -> None:
    config = replace(DELAYED, num_layers_at_start_in_bf16=start, num_layers_at_end_in_bf16=end)
    assert layers_in_bf16(config, 6) == frozenset()
    assert layers_in_bf16(replace(config, first_last_layers_bf16=True), 6) == expected


@ranks(4, tp=2, cp=2)
def test_dense_amaxes_are_the_largest_of_the_ranks_of_a_sequence(ctx):
    amax = torch.tensor([[float(ctx.rank)], [-float(ctx.rank)]])
    assert DenseAmax(ctx.group("tp_cp"))(amax).tolist() == [[3.0], [0.0]]


@ranks(4, tp=2, cp=2, ep=2, etp=2)
def test_amaxes_of_experts_are_the_largest_of_their_shards_and_sequences(ctx):
    experts = ExpertRange(2 * ctx.group("ep").index, 2, 4)
    reduce = ExpertAmax(ctx.group("etp"), ctx.group("tp_cp"), experts)
    found = reduce(torch.tensor([[ctx.rank + 0.5, 10.0 + experts.first]]))
    members = max(rank for rank in ctx.group("etp").ranks)
    assert found.tolist() == [[members + 0.5, 10.0 + experts.first]]


@ranks(4, cp=2, ep=1)
def test_amaxes_of_replicated_experts_are_the_largest_of_a_sequence(ctx):
    reduce = ExpertAmax(ctx.group("etp"), ctx.group("tp_cp"), ExpertRange(0, 2, 2))
    found = reduce(torch.tensor([[float(ctx.rank), 1.0]]))
    assert found.tolist() == [[float(max(ctx.group("tp_cp").ranks)), 1.0]]


@ranks(4, tp=2)
def test_a_step_appends_the_largest_amaxes_of_all_ranks(ctx):
    options = fp8_options(DELAYED, sequence=ctx.group("tp_cp"))
    assert options is not None
    stage = nn.ModuleDict({"dense": Fp8Layer(options), "experts": Fp8Layer(options, ExpertRange(0, 3, 3))})
    for layer in fp8_layers(stage).values():
        layer.step_amax += 1 + ctx.rank
    stage["experts"].step_amax[1, 2] += 7 * (ctx.rank == 2)
    update_amax_histories(stage, (ctx.group("tp"), ctx.group("dp_cp")))
    expected = torch.full((3, 3), 4.0)
    expected[1, 2] = 10.0
    assert torch.equal(stage["experts"].history[..., 0], expected)
    assert torch.equal(stage["dense"].history[..., 0], torch.full((3, 1), 4.0))
    assert not stage["dense"].history[..., 1:].any() and not stage["dense"].step_amax.any()
