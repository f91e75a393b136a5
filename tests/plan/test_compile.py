"""Which runs compile their blocks, and where graphs end, as counted on this machine."""

import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.data.batch import Batch
from nanotrain.memory import block_transforms
from nanotrain.model.context import BatchContext
from nanotrain.plan.compile import describe_compile, graph_breaks, with_compile
from nanotrain.topology.topology import Topology
from nanotrain.train import build
from tests.fake_world import fake_context
from tests.harness import parallel_config, run_ranks
from tests.laws.worlds import SEQ_LENGTH, VOCAB_SIZE, Case, build_here
from tests.train.small_run import arguments, small_run, train

GPU_PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
TP = "--tensor-model-parallel-size 2"


def config_of(flags: str = "") -> Config:
    return load(arguments(Path("unused"), *flags.split())).config


@pytest.mark.parametrize(
    ("flags", "on_cpu", "on_gpu"),
    [
        ("", False, True),
        ("--torch-compile", True, True),
        ("--no-torch-compile", False, False),
        (TP, False, True),
        ("--cpu-offloading --cpu-offloading-num-layers 1 --num-layers 2", False, False),
        ("--recompute-granularity selective --recompute-modules layernorm", False, True),
        ("--recompute-granularity selective --recompute-modules pointwise", False, True),
        ("--recompute-granularity selective --recompute-modules core_attn", False, True),
        ("--debug-nan", False, False),
    ],
)
def test_unset_compiles_on_gpus_where_nothing_forbids_it_and_a_set_value_stays(
    flags, on_cpu, on_gpu
) -> None:
    config = config_of(flags)
    assert with_compile(config, "cpu").train.torch_compile is on_cpu
    assert with_compile(config, "cuda").train.torch_compile is on_gpu
    for device, is_on in (("cpu", on_cpu), ("cuda", on_gpu)):
        assert describe_compile(config, device).startswith("every block" if is_on else "off"), (
            device
        )
    assert config.train.torch_compile is (
        "--torch-compile" in flags.split() or None if "no-" not in flags else False
    )


@pytest.mark.parametrize(
    ("flags", "ends_at"),
    [
        ("", []),
        (TP, []),
        (f"{TP} --sequence-parallel", []),
        (f"{TP} --fp8-format hybrid --bf16", ["linear layers in fp8"]),
        (
            "--pipeline-model-parallel-size 2 --num-layers 2 --pipeline-schedule zb-h1",
            ["linear layers"],
        ),
        ("--context-parallel-size 2", ["attention"]),
        ("--window-size 4", ["attention"]),
        ("--num-experts 4 --moe-router-topk 2", ["the routed experts"]),
        ("--recompute-granularity selective", ["recomputed modules"]),
        ("--recompute-granularity selective --recompute-modules pointwise", []),
    ],
)
def test_what_ends_a_graph_is_listed_by_configuration(flags, ends_at) -> None:
    listed = graph_breaks(config_of(flags))
    assert len(listed) == len(ends_at) and all(
        a.startswith(b) for a, b in zip(listed, ends_at, strict=True)
    ), listed
    sentence = describe_compile(config_of(flags), "cuda")
    assert (
        all(where in sentence for where in listed) and ("one graph each" in sentence) is not ends_at
    )


def graphs(flags: dict[str, Any], model: dict[str, int]) -> tuple[int, int]:
    """Graphs of a block's forward and the breaks between them, by torch's tracer."""
    case = Case(1).but(parallel=flags, model={"num_layers": 1} | model)
    topology = Topology.of(
        parallel_config(**flags), world := flags.get("tensor_model_parallel_size", 1)
    )
    with (
        fake_context(topology, 0)
        if world > 1
        else nullcontext(ParallelContext.attach(topology)) as context
    ):
        (stage,) = build_here(context, case).stages.values()
        torch.nn.utils.vector_to_parameters(
            torch.randn(sum(param.numel() for param in stage.parameters())) / 50, stage.parameters()
        )
        tokens = torch.randint(0, VOCAB_SIZE, (2, SEQ_LENGTH))
        inputs = []
        block = next(iter(stage.layers.values()))
        block.register_forward_pre_hook(lambda _, given: inputs.append(given))
        stage(None, BatchContext(Batch(tokens, tokens, torch.ones(2, SEQ_LENGTH), None, None)))
        torch._dynamo.reset()
        explained = torch._dynamo.explain(block.forward)(*inputs[0])
    return explained.graph_count, explained.graph_break_count


@pytest.mark.parametrize(
    ("row", "flags", "model"),
    [
        ("tp 2", {"tensor_model_parallel_size": 2}, {}),
        (
            "tp 2, sequence parallel",
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            {},
        ),
        ("MoE", {}, {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}),
    ],
)
# dense: tests/laws/test_compile.py
def test_the_page_counts_the_graphs_of_a_block(row, flags, model) -> None:
    counted = re.search(rf"^\| {row} \| (\d+) \| (\d+) \|", GPU_PAGE.read_text(), re.M)
    assert counted and graphs(flags, model) == tuple(map(int, counted.groups()))


def test_without_a_compiler_blocks_run_eagerly_and_the_log_says_so(
    tmp_path, monkeypatch, logged
) -> None:
    def compile_nothing(*_: Any, **options: Any) -> Any:
        raise AssertionError("no block is compiled")

    monkeypatch.setattr(
        build, "inductor_fault", lambda device_type: "No working C++ compiler found"
    )
    monkeypatch.setattr(block_transforms.torch, "compile", compile_nothing)
    with small_run(tmp_path, "--torch-compile", "--train-iters", "1") as run:
        train(run)
    (line,) = [line for line in logged if line.startswith("torch.compile")]
    assert (
        "off, blocks run eagerly, as inductor cannot compile: No working C++ compiler found; install gcc"
        in line
    )


def fault_of_rank(ctx: ParallelContext) -> str:
    return build._first_fault("" if ctx.rank < 1 else f"rank {ctx.rank} has no gcc", ctx.control)


def test_a_rank_without_a_compiler_lets_all_run_eagerly() -> None:
    assert run_ranks(3, fault_of_rank) == ["rank 1 has no gcc"] * 3


def test_all_layers_share_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs_made.append(graph)
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(build, "inductor_fault", lambda device_type: "")
    monkeypatch.setattr(block_transforms.torch, "compile", partial(torch.compile, backend=backend))
    # more layers than graphs that torch makes of one function before it runs it eagerly
    num_layers = torch._dynamo.config.recompile_limit + 1
    more = (
        "--torch-compile",
        "--gradient-accumulation-fusion",
        "--train-iters",
        "1",
        "--hidden-dropout",
        "0.1",
    )
    with small_run(tmp_path, "--num-layers", str(num_layers), *more) as run:
        train(run)
    torch._dynamo.reset()
    assert len(graphs_made) == 1
