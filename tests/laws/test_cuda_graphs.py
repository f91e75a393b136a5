"""Law L7 for CUDA graphs: captured parts change no bit, with a stand-in for CUDA's graphs.

The stand-in (tests/fake_graphs.py) records the operators of a capture and runs them again. It has
no GPU's kernels, streams or allocator.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.memory import block_transforms
from nanotrain.topology.topology import Topology
from nanotrain.train.step import train_step
from tests import fake_graphs
from tests.harness import SHORT_NAMES, run_ranks
from tests.host_syncs import HostSyncs
from tests.laws.test_any_topology import save_step
from tests.laws.test_every_axis import MODELS
from tests.laws.test_layer_kinds import MODELS as KINDS
from tests.laws.worlds import (
    SEQ_LENGTH,
    Case,
    Outcome,
    build_here,
    config_of,
    micro_batch_size,
    outcome_of,
    train_here,
    train_steps,
)

BATCH = 4
GRAPHS = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 2}
SP = {"sequence_parallel": True}
VPP = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
POINTWISE = {"recompute_granularity": "selective", "recompute_modules": ["pointwise"]}
FP8 = {"params_dtype": "bf16", "fp8_format": "hybrid"}
NVFP4 = {"params_dtype": "bf16", "fp8_format": "e2m1", "fp8_recipe": "nvfp4"}
BALANCED = MODELS["biased"] | {
    "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [1e-2, 1e-2],
}


@dataclass(frozen=True)
class Row:
    """What is trained without and with graphs."""

    model: dict[str, Any]
    num_ranks: int = 1
    sizes: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    microbatches: int = 2
    steps: int = 3  # eager, captured, replayed with gradients of the step before in the buffers

    @property
    def case(self) -> Case:
        """The row without graphs."""
        parallel = {SHORT_NAMES[axis]: size for axis, size in self.sizes.items()}
        size = micro_batch_size(self.num_ranks, self.sizes, self.microbatches, global_batch=BATCH)
        case = Case(self.steps).but(
            parallel=parallel,
            model=self.model,
            train={"micro_batch_size": size, "global_batch_size": BATCH},
        )
        return case.but(**self.sections)


ROWS = {
    "bf16, recomputed inside": Row(
        MODELS["untied"],
        sections={"memory": POINTWISE, "precision": {"params_dtype": "bf16"}},
    ),
    "dropout, loss scale, halves of layers, gradients that are returned": Row(
        MODELS["gpt2"] | {"hidden_dropout": 0.1},
        sections={
            "parallel": {"gradient_accumulation_fusion": False},
            "precision": {"params_dtype": "fp16", "initial_loss_scale": 256.0},
            "train": {"cuda_graph_scope": ["attn", "mlp"]},
        },
    ),
    "lengths and batches that grow": Row(
        MODELS["llama"],
        sections={
            "train": {
                "step_seq_length_schedule": ["0:12", f"{3 * BATCH * SEQ_LENGTH}:{SEQ_LENGTH}"],
                "micro_batch_size": 2,
                "rampup_batch_size": [2, 2, 6],
            }
        },
        steps=5,
    ),
    "documents": Row(
        MODELS["llama"],
        sections={"data": {"reset_attention_mask": True}, "train": {"cuda_graph_scope": ["mlp"]}},
    ),
    "recurrent layers": Row(KINDS["half layers, gated delta net"]),
    "experts": Row(BALANCED),
    "frozen layers": Row(
        MODELS["llama"], sections={"optim": {"freeze": ["embedding.*", "layers.0.*"]}}
    ),
    "zero-2": Row(MODELS["gpt2"], 2, {"strategy": "optim_grads"}, {"parallel": OVERLAP}),
    "interleaved": Row(
        MODELS["untied"] | {"num_layers": 4},
        2,
        {"strategy": "optim", "pp": 2},
        {"parallel": VPP | OVERLAP},
        microbatches=4,
    ),
    "experts on two ranks": Row(MODELS["experts"], 2, {"strategy": "optim", "ep": 2}),
    "tensors, tokens and stages": Row(
        MODELS["biased"],
        4,
        {"strategy": "optim", "tp": 2, "pp": 2, "ep": 2, "etp": 1},
        {"parallel": SP},
        microbatches=4,
    ),
    "tensors without tokens": Row(MODELS["capacity"], 2, {"tp": 2}),
    "fp8, delayed scaling": Row(
        MODELS["llama"],
        sections={"precision": FP8 | {"fp8_recipe": "delayed", "fp8_amax_history_len": 2}},
        steps=4,
    ),
    "fp8 per block, experts between": Row(
        BALANCED, sections={"precision": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}}
    ),
    # one layer: the casts of fp8 are ten times as many operators as the rest
    "NVFP4, amaxes of two ranks": Row(
        MODELS["llama"] | {"num_layers": 1}, 2, {"tp": 2}, {"parallel": SP, "precision": NVFP4}
    ),
    "fp8, delayed scaling of two ranks": Row(
        MODELS["llama"] | {"num_layers": 1},
        2,
        {"strategy": "optim", "tp": 2},
        {"parallel": SP, "precision": FP8 | {"fp8_recipe": "delayed"}},
        microbatches=4,
    ),
}


def train_rows(ctx: ParallelContext, names: list[str]) -> list[tuple[Outcome, Outcome, int]]:
    """The outcomes of rows without and with graphs, and how many graphs were replayed."""
    fake_graphs.install()
    results = []
    for name in names:
        case = ROWS[name].case
        topology = Topology.of(config_of(case).parallel, ctx.topology.world_size)
        plain = train_here(ParallelContext.attach(topology), case)
        with fake_graphs.counting() as pools:
            graphed = train_here(ParallelContext.attach(topology), case.but(train=GRAPHS))
        num_replays = sum(graph.replays for pool in pools for graph in pool.graphs)
        results.append((plain, graphed, num_replays))
    return results


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_graphs_change_no_bit(num_ranks: int) -> None:
    names = [name for name, row in ROWS.items() if row.num_ranks == num_ranks]
    for rank in run_ranks(num_ranks, train_rows, names):
        for name, (plain, graphed, num_replays) in zip(names, rank, strict=True):
            assert num_replays > 0, name
            assert_same(plain, graphed, name)


def train_compiled(ctx: ParallelContext, case: Case) -> tuple[Outcome, Outcome]:
    """The outcomes of compiled blocks, which torch runs as they were traced."""
    fake_graphs.install()
    block_transforms.torch.compile = partial(torch.compile, backend="aot_eager")
    return train_here(ctx, case), train_here(ctx, case.but(train=GRAPHS))


def test_graphs_of_compiled_blocks_change_no_bit() -> None:
    case = ROWS["bf16, recomputed inside"].case
    case = case.but(model={"num_layers": 1}, train={"torch_compile": True})
    for plain, graphed in run_ranks(1, train_compiled, case):
        assert_same(plain, graphed, "compiled")


def stopped_and_validated(ctx: ParallelContext, folder: Path) -> tuple[Outcome, Outcome, list[str]]:
    """Steps without graphs; and with graphs, forwards without gradients in between, and a stop.

    Also the places at which the host waits in a step that replays.
    """
    fake_graphs.install()
    case = replace(ROWS["experts"].case, steps=5)
    graphed = case.but(train=GRAPHS)
    run = build_here(ctx, graphed, folder=folder)
    results = []
    for _ in range(3):
        batch = run.batch_iterator.next()
        assert batch is not None
        with HostSyncs() as syncs:
            results.append(train_step(run, batch))
        tokens = torch.arange(2 * SEQ_LENGTH).view(2, -1)
        with torch.no_grad():
            run.stages[0].logits(tokens)
    save_step(ctx, run)
    saved = folder / "checkpoints" / "step-00000003"
    resumed = build_here(ctx, graphed, folder=folder, checkpoint=saved)
    results += train_steps(resumed, 2)
    return train_here(ctx, case), outcome_of(resumed, results), syncs.places


def test_stopped_and_validated_runs_have_the_same_bits(tmp_path: Path) -> None:
    for plain, stopped, waits in run_ranks(1, stopped_and_validated, tmp_path):
        assert_same(plain, stopped, "a stop")
        assert waits == []


def assert_same(plain: Outcome, graphed: Outcome, name: str) -> None:
    """Assert equal bits."""
    assert graphed.losses == plain.losses, name
    assert graphed.grad_norms == plain.grad_norms, name
    assert graphed.moe == plain.moe, name
    for box, weight in plain.weights.items():
        assert torch.equal(graphed.weights[box], weight), (name, box.name)
