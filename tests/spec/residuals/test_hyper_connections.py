"""Several residual streams: what a layer declares, computes and keeps, and what stages send."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain.config.load import load
from nanotrain.config.model import ModelConfig
from nanotrain.plan.plan import plan_run
from nanotrain.plan.saved_bytes import SavedBytes, saved_bytes
from nanotrain.plan.traffic import sent_bytes
from nanotrain.spec.counts import flops_per_token, num_parameters
from nanotrain.spec.kinds.block import block_operators
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.shape import ModelShape
from tests.model.building import LLAMA, build, randomize

N, H, TOKENS = 3, 256, 8
LINE = "--mock-data --vocab-size 300 --num-layers 2 --seq-length 16"


class OperatorCounter(TorchDispatchMode):
    """Counts operators but for views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        self.count += not any(each.alias_info is not None for each in returns)
        return out


def shape_of(kind: str) -> ModelShape:
    return ModelShape.of(
        ModelConfig(num_layers=1, vocab_size=10, residual_type=kind, residual_streams=N)
    )


@pytest.mark.parametrize(("kind", "inputs"), [("mhc", N * H), ("hyper_connections", H)])
def test_parameters_and_flops_of_the_weights_of_streams(kind: str, inputs: int) -> None:
    plain = ModelShape.of(ModelConfig(num_layers=1, vocab_size=10))
    shape = shape_of(kind)
    outputs = {"mhc": N * (N + 2), "hyper_connections": N + 2}[kind]
    others = {"mhc": N * (N + 2) + 3, "hyper_connections": N * (N + 2) + 2 + H}[kind]
    end = {"mhc": N * N * H + N + 1, "hyper_connections": 0}[kind]
    added = num_parameters(shape) - num_parameters(plain)
    assert added == 2 * (outputs * inputs + others) + end
    assert flops_per_token(shape, TOKENS) > flops_per_token(plain, TOKENS)


def test_a_sublayer_keeps_its_streams_its_output_and_their_weights() -> None:
    plain = ModelShape.of(ModelConfig(num_layers=1, vocab_size=10))
    kept = []
    for shape in (plain, shape_of("mhc")):
        sizes = LayerSizes.for_model(shape, seq_length=TOKENS)
        kept.append(saved_bytes(block_operators(sizes, 0)))
    weights = N * 4 + (N + N * N) * 2
    assert kept[1] - kept[0] == 2 * TOKENS * ((N + 1) * H * 2 + weights)


@pytest.mark.parametrize("kind", ["mhc", "hyper_connections", "attention"])
def test_launches_are_the_operators_that_torch_runs(kind: str) -> None:
    fields = {"residual_type": kind, "residual_streams": N, "mhc_sinkhorn_iterations": 3}
    stage = randomize(build(replace(LLAMA, num_layers=1, **fields)))
    connection = stage.layers["0"].mlp_connection  # of attention the first reads one stream
    streams = torch.randn(2, 5, N, 32, requires_grad=True)
    with OperatorCounter() as forward:
        weights = connection.weigh(streams)
    total = sum(weight.sum() for weight in weights if weight.requires_grad)
    with OperatorCounter() as backward:
        torch.autograd.grad(total, [streams, *connection.parameters()])
    sizes = LayerSizes.for_model(ModelShape.of(stage.model_config), seq_length=TOKENS)
    operators = block_operators(sizes, 0)
    weigh = next(each for each in operators if each.name == "stream_weights")
    assert weigh.launches == forward.count
    assert weigh.backward_launches == forward.count + backward.count


def test_stages_send_and_recomputed_layers_keep_all_streams() -> None:
    counts = []
    for words in ("", f"--residual-type mhc --residual-streams {N}"):
        line = f"{LINE} {words} --pipeline-model-parallel-size 2 --recompute-granularity full"
        plan = plan_run(load(line.split()).config, 2, rank=0)
        stage = SavedBytes(plan, "cpu").stage(plan.stages[0].spec)
        counts.append((plan.hidden_shape[-1], sent_bytes(plan)["pp", "p2p"], stage.kept))
    for one, several in zip(*counts, strict=True):
        assert several == N * one
