"""The operators of a layer are those of its module: weights, FLOPs that torch counts, and scans."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.plan.saved_bytes import layer_sizes
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS, MLPS
from nanotrain.spec.kinds.block import block_operators, model_operators
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import (
    Attention,
    Convolution,
    ExpertProduct,
    Gate,
    GatheredAttention,
    Indexer,
    Operator,
    Product,
    Router,
    Scan,
)
from nanotrain.spec.parameters import declare_model, layer
from nanotrain.spec.params import ParamSpec
from nanotrain.spec.shape import ModelShape
from tests.harness import parallel_config, run_ranks
from tests.plan.test_saved_bytes import MODELS, SIZES
from tests.train.saved_tensors import config_of, microbatch


def config(name: str) -> Config:
    return replace(config_of(f"{SIZES} {MODELS[name]}"), parallel=parallel_config())


def shape_of(name: str) -> ModelShape:
    return ModelShape.of(config(name).model)


def is_matrix(spec: ParamSpec) -> bool:
    """Whether a parameter is multiplied: a bias, also one per expert or token, is not."""
    return len(spec.shape) >= 2 and not spec.name.endswith("bias")


def local_name(name: str) -> str:
    """The name of a parameter of a block, relative to its attention or MLP."""
    for prefix in ("second.", "attention.", "mlp.", "attention.", "mamba."):
        name = name.removeprefix(prefix)
    return name


@pytest.mark.parametrize("name", MODELS)
def test_every_declared_matrix_is_a_weight_of_one_operator(name: str) -> None:
    shape = shape_of(name)
    for index in range(shape.num_layers):
        specs = layer(Declaration(shape, "fp32"), index)
        declared = Counter(local_name(spec.name) for spec in specs if is_matrix(spec))
        operators = block_operators(LayerSizes.for_model(shape, seq_length=8), index)
        listed = Counter(
            weight for operator in operators for weight in getattr(operator, "weights", ())
        )
        assert listed == declared


@pytest.mark.parametrize("name", MODELS)
def test_active_weights_are_the_elements_of_the_declared_matrices(name: str) -> None:
    shape = shape_of(name)
    share = 1.0 if shape.moe is None else shape.moe.router_topk / shape.moe.num_choices
    numel = 0.0
    for spec in declare_model(shape):
        is_lookup = spec.unit == "embedding" or spec.name == "layer_inputs.embedding.weight"
        is_uncounted = is_lookup or ".router." in spec.name
        if is_matrix(spec) and not is_uncounted:
            numel += spec.numel * share if spec.is_expert else spec.numel
        if shape.residual_type == "hyper_connections" and spec.name.endswith("connection.weight"):
            numel += spec.numel * (shape.residual_streams - 1)  # of every stream
    if shape.is_tied:
        numel += shape.padded_vocab_size * shape.hidden_size
    operators = model_operators(LayerSizes.for_model(shape, seq_length=8))
    assert sum(operator.active_weights for operator in operators) == pytest.approx(numel, rel=1e-6)


def counted_flops(ctx: ParallelContext, names: list[str]) -> dict[str, dict[str, int]]:
    """Forward FLOPs of the first block of models, as torch counts them by operator."""
    counted = {}
    for name in names:
        case = microbatch(ctx, config(name))
        with FlopCounterMode(display=False) as counter:
            case.stage.layers["0"](case.hidden, case.context)
        flops = counter.get_flop_counts()["Global"]
        counted[name] = {str(operator): number for operator, number in flops.items()}
    return counted


def listed_flops(ctx: ParallelContext, names: list[str]) -> dict[str, list[Operator]]:
    listed = {}
    for name in names:
        plan = microbatch(ctx, config(name)).plan
        listed[name] = [*block_operators(layer_sizes(plan, "cpu"), 0)]
    return listed


def product_flops(operators: list[Operator]) -> int:
    """FLOPs of products with a weight, without those of experts, which torch does not count."""
    flops = 0
    for operator in operators:
        if isinstance(operator, Product) and not isinstance(operator, ExpertProduct):
            flops += operator.flops
        if isinstance(operator, Router):
            flops += 2 * operator.rows * operator.inputs * operator.num_choices
        if isinstance(operator, Gate) and operator.weights:
            flops += 2 * operator.numel
        if isinstance(operator, Convolution):
            flops += 2 * operator.rows * operator.active_weights
    return flops


def pair_flops(operators: list[Operator]) -> int:
    """FLOPs of pairs of a query and a key in a layer that gathers keys, with a loss over all."""
    (attention,) = (operator for operator in operators if isinstance(operator, GatheredAttention))
    (index,) = (operator for operator in operators if isinstance(operator, Indexer))
    queries = index.num_positions
    selected = queries * index.topk * attention.heads * (attention.width + attention.compressed)
    # scores; their sums over heads, and the gradient of weights; the gradients of query and key
    all_pairs = queries * index.length
    of_index = all_pairs * index.heads * (index.head_dim + 1 + 1 + 2 * index.head_dim)
    target = all_pairs * attention.heads * attention.width
    return 2 * (selected + of_index + target)


def test_flops_are_those_that_torch_counts_in_the_module() -> None:
    names = [*MODELS]
    (counted,) = run_ranks(1, counted_flops, names)
    (listed,) = run_ranks(1, listed_flops, names)
    for name in names:
        found = Counter(counted[name])
        of_products = found["aten.mm"] + found["aten.addmm"] + found["aten.convolution"]
        is_gathered = [isinstance(operator, GatheredAttention) for operator in listed[name]]
        if any(is_gathered):  # whose up-projections are batches of one product per head
            in_attention = found["aten.bmm"] - pair_flops(listed[name])
            of_products += in_attention
        # batches of one product per group of heads
        grouped = sum(each.flops for each in listed[name] if each.name == "output_down")
        assert found["aten.bmm"] >= grouped and (name != "window" or found["aten.bmm"] == grouped)
        of_products += grouped
        assert of_products == product_flops(listed[name]), name
        scans = [operator for operator in listed[name] if isinstance(operator, Scan)]
        if scans:
            flops = sum(scan.forward.flops for scan in scans)
            assert found["aten.bmm"] + found["aten.baddbmm"] == pytest.approx(flops, rel=0.01), name
    # scores and values of all pairs, of which the list has the causal half
    (attention,) = (operator for operator in listed["math"] if isinstance(operator, Attention))
    assert counted["math"]["aten.bmm"] == 2 * attention.sequence_flops


def test_every_kind_lists_what_it_keeps_and_reads_its_input_once() -> None:
    for name in MODELS:
        sizes = LayerSizes.for_model(shape_of(name), seq_length=64).at(0)
        for table, kind in zip((MIXERS, MLPS), sizes.shape.kinds(0), strict=True):
            if kind is None:
                continue
            operators = table[kind].operators(sizes)
            kept = [saved for operator in operators for saved in operator.saves]
            layer_input = sizes.layer_input
            if kind == "moe" and sizes.shape.has_separate_norms:
                layer_input = replace(layer_input, dropped_by=())  # no norm is before it
            assert kept.count(layer_input) == 1, (name, kind)


def test_both_dtypes_of_torch_have_the_itemsize_of_the_sizes() -> None:
    for words, dtype in (("", torch.float32), ("--bf16", torch.bfloat16)):
        sizes = LayerSizes.of(
            config_of(f"{SIZES} {words}"),
            shape_of("llama"),
            sizes={"tp": 1, "cp": 1, "ep": 1, "etp": 1},
        )
        assert sizes.itemsize == dtype.itemsize
