"""Law L7 for `--torch-compile`: compiled blocks train as eager ones do, and a dense block is one
graph.

The backends trace graphs and run them as they are: no code is generated, which takes minutes on a
CPU.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.schema import with_values
from nanotrain.kernels import linear
from nanotrain.kernels.linear import GradView, grad_view_in_graph
from nanotrain.memory import block_transforms
from nanotrain.model.context import BatchContext
from nanotrain.topology.topology import Topology
from tests.harness import SHORT_NAMES, parallel_config, run_ranks
from tests.laws.worlds import SEQ_LENGTH, Case, Outcome, config_of, train_here
from tests.model.building import MODELS, build, random_batch
from tests.plan.test_saved_bytes import LLAMA, SELECTIVE, SIZES
from tests.train import saved_tensors

SHORTCUT = {
    "moe_shortcut": True,
    "moe_shared_expert_intermediate_size": 32,
    "moe_num_zero_experts": 2,
}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
SMALL = Case(2).but(model={"num_layers": 1}, train={"global_batch_size": 4, "micro_batch_size": 2})
# Of two ranks, with the backend. Every graph of a block with many breaks is traced: there the
# backend only runs what was traced, in half the time of differentiating it too.
ROWS: dict[str, tuple[Case, str]] = {
    "tp": (
        SMALL.but(
            parallel={
                SHORT_NAMES["strategy"]: "optim",
                SHORT_NAMES["tp"]: 2,
                "sequence_parallel": True,
            }
        ),
        "eager",
    ),
    "tp in pieces": (
        SMALL.but(
            parallel={
                SHORT_NAMES["strategy"]: "optim",
                SHORT_NAMES["tp"]: 2,
                "sequence_parallel": True,
                "tp_comm_overlap": True,
            }
        ),
        "aot_eager",
    ),
    "ring with experts, lengths that vary": (
        SMALL.but(
            parallel={SHORT_NAMES["strategy"]: "optim_grads_params", SHORT_NAMES["cp"]: 2},
            model=EXPERTS,
            train={
                "global_batch_size": 2,
                "step_seq_length_schedule": [
                    f"0:{SEQ_LENGTH // 2}",
                    f"{2 * SEQ_LENGTH}:{SEQ_LENGTH}",
                ],
            },
        ),
        "eager",
    ),
}


def train_compiled(
    ctx: ParallelContext, case: Case, backend_name: str
) -> tuple[Outcome, Outcome, int, int]:
    """The eager and the compiled outcome, the number of graphs, and of weight gradients that graphs
    wrote.
    """
    from torch._dynamo import lookup_backend

    graphs: list[Any] = []
    views: list[GradView | None] = []

    def find(weight: Tensor) -> GradView | None:
        views.append(grad_view_in_graph(weight))
        return views[-1]

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend(backend_name)(graph, inputs)

    eager = train_here(ctx, case)
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_transforms.torch, "compile", partial(torch.compile, backend=backend))
        patch.setattr(linear, "grad_view_in_graph", find)
        compiled = train_here(ctx, case.but(train={"torch_compile": True}))
    return eager, compiled, len(graphs), len(views)


def train_rows(
    ctx: ParallelContext, rows: list[tuple[Case, str]]
) -> list[tuple[Outcome, Outcome, int, int]]:
    """`train_compiled` of several layouts in one process: the imports of the compiler take longer
    than most rows.
    """
    topologies = [
        Topology.of(config_of(case).parallel, ctx.topology.world_size) for case, _ in rows
    ]
    return [
        train_compiled(ParallelContext.attach(topology), case, backend)
        for topology, (case, backend) in zip(topologies, rows, strict=True)
    ]


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, list[tuple[Outcome, Outcome, int, int]]]:
    """What each rank of each row says."""
    by_rank = run_ranks(2, train_rows, list(ROWS.values()), threads=False)
    return {name: [rank[number] for rank in by_rank] for number, name in enumerate(ROWS)}


def test_compiled_blocks_train_as_eager_ones_do() -> None:
    case = SMALL.but(parallel={SHORT_NAMES["strategy"]: "no_shard"})
    assert_alike(
        [train_compiled(one_rank(), case, "aot_eager")], num_products=7, num_microbatches=2
    )


@pytest.mark.parametrize(
    ("row", "num_products", "num_microbatches"),
    [("tp", 7, 2), ("tp in pieces", 7, 2), ("ring with experts, lengths that vary", 4, 1)],
)
def test_compiled_blocks_of_two_ranks_train_as_eager_ones_do(
    on_two_ranks, row: str, num_products: int, num_microbatches: int
) -> None:
    assert_alike(on_two_ranks[row], num_products=num_products, num_microbatches=num_microbatches)


def assert_alike(
    outcomes: list[tuple[Outcome, Outcome, int, int]], *, num_products: int, num_microbatches: int
) -> None:
    """Assert equal outcomes, and how many weight gradients graphs wrote.

    Args:
        outcomes: of `train_compiled`, by rank.
        num_products: linear layers in graphs: query, key, value, output, and gate, up, down of a
            dense MLP. Experts are outside of graphs, with torch 2.10 all layers are.
        num_microbatches: per rank and step.
    """
    for eager, compiled, num_graphs, num_writes in outcomes:
        assert num_graphs > 0
        assert num_writes == 2 * num_microbatches * num_products * linear.CAN_TRACE
        assert compiled.losses == pytest.approx(eager.losses, rel=1e-5)
        assert compiled.grad_norms == pytest.approx(eager.grad_norms, rel=1e-4)
        for box, weight in eager.weights.items():
            # Adam's first steps are as large as lr where a gradient is only rounding
            assert torch.allclose(compiled.weights[box], weight, atol=1e-3, rtol=1e-3), box.name


def one_rank() -> ParallelContext:
    return ParallelContext.attach(Topology.of(parallel_config(strategy="no_shard"), 1))


def test_dense_blocks_beside_mixtures_are_recomputed_by_the_graphs_that_computed_them() -> None:
    case = Case(1).but(
        model={"num_layers": 2, "moe_layer_freq": "[0]*1+[1]*1"} | EXPERTS,
        memory={"recompute_granularity": "full"},
        train={"global_batch_size": 2, "micro_batch_size": 2},
    )
    eager, compiled, num_graphs, _ = train_compiled(one_rank(), case, "eager")
    assert num_graphs > 1 and compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    assert compiled.grad_norms == pytest.approx(eager.grad_norms, rel=1e-4)


def test_a_block_with_a_shortcut_is_computed_between_graphs() -> None:
    eager, compiled, num_graphs, num_writes = train_compiled(
        one_rank(), SMALL.but(model=EXPERTS | SHORTCUT), "aot_eager"
    )
    assert num_graphs > 1 and compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    assert compiled.grad_norms == pytest.approx(eager.grad_norms, rel=1e-4)
    # query, key, value and output twice, and gate, up, down of the shared expert and of the second
    # MLP
    assert num_writes == 2 * 2 * 14 * linear.CAN_TRACE


def test_linear_attention_is_computed_between_graphs() -> None:
    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    model = {"linear_attention_type": "gated_delta_net"} | sizes
    eager, compiled, num_graphs, num_writes = train_compiled(
        one_rank(), SMALL.but(model=model), "eager"
    )
    assert num_graphs > 1 and compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    assert compiled.grad_norms == pytest.approx(eager.grad_norms, rel=1e-4)
    # query, key, value, gate, step, beta, output, and gate, up, down of the MLP
    assert num_writes == 2 * 2 * 10 * linear.CAN_TRACE


def kept_by(ctx: ParallelContext, settings: str, *, backend: str = "") -> tuple[int, list[Tensor]]:
    """Live bytes after the forward of a block with settings, and its output and gradients."""
    compile_graph = partial(torch.compile, backend=backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_transforms.torch, "compile", compile_graph)
        config = saved_tensors.config_of(f"{SIZES} {LLAMA} --qk-layernorm {settings}")
        compiled = with_values(config, {"train.torch_compile": bool(backend)})
        case = saved_tensors.microbatch(ctx, compiled)
    torch._dynamo.reset()
    (run,) = case.stage.layer_functions
    run(case.hidden, case.context)  # traces
    with saved_tensors.LiveStorages() as live:
        out = run(case.hidden, case.context)
    num_bytes = live.num_bytes
    inputs = [case.hidden, *case.stage.layers.parameters()]
    return num_bytes, [out, *torch.autograd.grad(out.square().sum(), inputs)]


def test_a_graph_recomputes_pointwise_operators_as_eager_blocks_do() -> None:
    """The partitioner of the graph decides what is kept; no code is generated."""
    partitioned = "aot_eager_decomp_partition"
    plain_bytes, plain = kept_by(one_rank(), "", backend=partitioned)
    graph_bytes, values = kept_by(one_rank(), f"{SELECTIVE} pointwise", backend=partitioned)
    eager_bytes, _ = kept_by(one_rank(), f"{SELECTIVE} pointwise")
    assert graph_bytes == eager_bytes
    # per token: two norms and their scales, six rotated heads and their scales, the activation
    numel = 2 * (64 + 1) + 6 * (16 + 1) + 192
    assert plain_bytes - graph_bytes == 2 * 128 * 4 * numel
    assert all(map(torch.equal, plain, values))


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gpt2"])
def test_a_dense_block_is_one_graph(name: str) -> None:
    stage, batch = build(MODELS[name]), BatchContext(random_batch(length=16))
    arguments = []
    block = next(iter(stage.layers.values()))
    block.register_forward_pre_hook(lambda _, args: arguments.append(args))
    stage(None, batch)
    torch._dynamo.reset()
    explained = torch._dynamo.explain(block.forward)(*arguments[0])
    assert (explained.graph_count, explained.graph_break_count) == (1, 0), explained.break_reasons
