"""Law L9: every use of a buffer is after the work that produces it and before the work that reuses
it.

Each row trains two steps of one rank of a world, in this process, with every operation in flight
until it is waited for. The planted bugs show that the recorder finds a missing wait, an early reuse
and a freed buffer.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.comm import collectives
from nanotrain.comm.recorder import Race
from nanotrain.comm.work import Work
from nanotrain.kernels.linear import CAN_TRACE
from nanotrain.memory import block_transforms
from nanotrain.memory import offload as activation_offload
from nanotrain.model.context import BatchContext
from nanotrain.optim import offload as optimizer_offload
from nanotrain.parallel.dp import layout
from nanotrain.parallel.dp.bucket import Bucket
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.stores import ParamStore, TransientGrads
from nanotrain.parallel.pp import executor
from nanotrain.parallel.pp.executor import run_forward
from nanotrain.topology.topology import Topology
from nanotrain.train.run import Run
from nanotrain.train.step import train_step
from tests.happens_before import RecordedCopies, RecordedTransfer, Recorder, recorded_world
from tests.harness import SHORT_NAMES, parallel_config
from tests.laws.worlds import Case, build_here

EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 22,
    "moe_aux_loss_coeff": 1e-2,
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SP = {"sequence_parallel": True}
PIECES = SP | {"tp_comm_overlap": True}
VPP = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
ZB, GATHER, HEADS = (
    {"pipeline_schedule": "zb-h1"},
    {"cp_comm_type": "allgather"},
    {"cp_comm_type": "a2a"},
)
OUTER, BLOCKS = (
    {"outer_dp_sharding_strategy": "optim"},
    {"fsdp_double_buffer": True, "fsdp_prefetch_depth": 2},
)
NODES, TURNS = {"moe_hierarchical_dispatch": 1}, {"overlap_moe_expert_parallel_comm": True}
BF16 = {"params_dtype": "bf16"}
FROZEN = {"optim": {"freeze": ["embedding.*", "layers.0.*", "*.down.weight"]}}


needs_effects = pytest.mark.skipif(not CAN_TRACE, reason="graphs write none with torch 2.10")


@dataclass(frozen=True)
class Row:
    """One rank of a layout, and what it does between two steps."""

    ranks: int
    strategy: str
    sizes: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of the parallel section
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    rank: int = 0
    backend: str = "nccl"
    between: Callable[[Run, Path], None] | None = None

    def __str__(self) -> str:
        parts = [f"rank {self.rank} of {self.ranks}", self.strategy, *map(str, self.sizes.items())]
        parts += [*self.options, *(str(fields) for fields in self.sections.values()), self.backend]
        return " ".join([*parts, self.between.__name__ if self.between else ""])

    @property
    def case(self) -> Case:
        """Two steps of two microbatches."""
        parallel = {
            SHORT_NAMES[name]: value
            for name, value in (self.sizes | {"strategy": self.strategy}).items()
        }
        inside = [self.sizes.get(axis, 1) for axis in ("tp", "pp", "cp")]
        num_samples = 2 * self.ranks // (inside[0] * inside[1] * inside[2])
        layers = (
            4
            if self.options.get("num_virtual_stages_per_pipeline_rank") or "vpp" in self.sizes
            else 2
        )
        case = Case(2).but(
            train={"micro_batch_size": 1, "global_batch_size": num_samples},
            parallel={"ddp_bucket_size": 5000} | parallel | self.options,
            model={"num_layers": layers},
        )
        return case.but(**self.sections)

    def world(self) -> AbstractContextManager[tuple[Any, Recorder]]:
        """This rank of the layout's world."""
        topology = Topology.of(parallel_config(**self.sizes, strategy=self.strategy), self.ranks)
        return recorded_world(topology, self.rank, backend=self.backend)


def evaluates(run: Run, folder: Path) -> None:
    batch = run.batch_iterator.next()
    assert batch is not None
    microbatches = [
        BatchContext.of(part, cp=run.context.group("cp")) for part in batch.microbatches
    ]
    run_forward(
        run.plan.valid_schedule, run.runnable, microbatches=microbatches, pipeline=run.pipeline
    )


def saves(run: Run, folder: Path) -> None:
    # no other rank reports its shard, so a second save would wait for the first one
    if run.state.step == 1:
        run.checkpointer.start_save(
            1, run.optimizer.tensors_to_save(), objects={}, config={}, topology={}
        )


def trains(row: Row, folder: Path) -> Recorder:
    """Train one rank of a row."""
    with row.world() as (context, recorder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_offload, "HostTransfer", lambda device: RecordedTransfer(recorder))
        patch.setattr(optimizer_offload, "HostTransfer", lambda device: RecordedCopies(recorder))
        run = build_here(context, row.case, folder=folder)
        try:
            for _ in range(2):
                batch = run.batch_iterator.next()
                assert batch is not None
                train_step(run, batch)
                if row.between is not None:
                    row.between(run, folder)
            for dp in run.data_parallel:
                dp.wait_for_params()
            recorder.finish()
        finally:
            run.checkpointer.give_up(0.0)
            run.batches.close()
    return recorder


MOE, FULL = {"model": EXPERTS}, {"memory": {"recompute_granularity": "full"}}
ROWS = [
    Row(2, "no_shard", options=OVERLAP),
    Row(2, "optim", options=OVERLAP, rank=1),
    Row(2, "optim", options=OVERLAP, sections={"precision": BF16}, backend="gloo"),
    Row(3, "optim_grads", options=OVERLAP, sections={"precision": BF16}),
    Row(2, "optim_grads", options=OVERLAP, backend="gloo"),
    Row(4, "optim", {"instances": 2}, OVERLAP),
    Row(4, "optim_grads", {"instances": 2}, OVERLAP | OUTER, rank=3),
    Row(2, "optim_grads_params", options=OVERLAP),
    Row(4, "optim_grads_params", {"instances": 2}, OVERLAP | OUTER),
    Row(2, "optim_grads_params", options=OVERLAP | BLOCKS, sections=FULL),
    Row(4, "optim", {"tp": 2}, OVERLAP | SP),
    Row(4, "optim", {"tp": 2}, OVERLAP | SP, sections={"train": {"micro_batch_size": 2}}),
    Row(4, "optim_grads_params", {"tp": 2}, OVERLAP | SP, rank=1, backend="gloo"),
    Row(4, "optim", {"pp": 2}, OVERLAP),
    Row(4, "optim_grads", {"pp": 2}, OVERLAP | ZB, rank=3),
    Row(
        4,
        "optim",
        {"pp": 2},
        OVERLAP | VPP,
        sections={"memory": {"recompute_granularity": "selective"}},
    ),
    Row(2, "no_shard", {"cp": 2}),
    Row(4, "optim_grads", {"cp": 2}, OVERLAP | GATHER),
    Row(4, "optim", {"cp": 2}, OVERLAP | HEADS, rank=1),
    Row(
        4,
        "optim",
        {"ep": 2},
        OVERLAP | TURNS,
        sections={"model": EXPERTS | {"moe_shared_expert_intermediate_size": 22}},
    ),
    Row(4, "optim_grads", {"tp": 2, "etp": 2, "ep": 2}, OVERLAP | NODES, sections=MOE, rank=2),
    Row(8, "optim_grads", {"tp": 2, "pp": 2, "cp": 2}, SP | ZB, rank=5),
    Row(4, "optim", {"tp": 4}, PIECES),
    Row(8, "optim", {"tp": 2, "pp": 2}, PIECES | ZB, rank=5, backend="gloo"),
    Row(
        2,
        "optim",
        options=OVERLAP,
        sections={"memory": {"cpu_offloading": True, "cpu_offloading_num_layers": 1}},
    ),
    Row(2, "optim", options=OVERLAP, sections={"optim": {"optimizer_cpu_offload": True}}),
    Row(2, "optim", options=OVERLAP, sections={"optim": {"optimizer": "muon"}}),
    Row(2, "optim_grads_params", options=OVERLAP, sections=FROZEN),
    Row(4, "optim", {"pp": 2}, OVERLAP | ZB, sections=FROZEN, rank=3),
    Row(2, "optim", options=OVERLAP, between=evaluates),
    Row(
        4,
        "optim_grads_params",
        {"pp": 2, "vpp": 2, "schedule": "dualpipev"},
        OVERLAP,
        between=evaluates,
    ),
    Row(2, "optim", options=OVERLAP, between=saves),
    Row(2, "optim_grads_params", options=OVERLAP, between=saves),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_no_buffer_is_used_while_it_is_in_flight(row: Row, tmp_path: Path) -> None:
    recorder = trains(row, tmp_path)
    assert recorder.num_started > 10 and recorder.num_operators > 10, (
        "hardly anything was in flight"
    )


@needs_effects
def test_weight_gradients_that_graphs_write_are_written_before_their_reduction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(
        block_transforms.torch, "compile", partial(torch.compile, backend="aot_eager")
    )
    # as in a model of billions every unit has a bucket, which borrows its memory
    monkeypatch.setattr(layout, "MIN_DEFAULT_BUCKET_SIZE", 1)
    monkeypatch.setattr(layout, "DEFAULT_BUCKET_SIZE_PER_SHARD", 1)
    model = {"num_layers": 4, "untie_embeddings_and_output_weights": True}
    sections = {"train": {"torch_compile": True}, "model": model}
    row = Row(2, "optim_grads", options=OVERLAP | {"ddp_bucket_size": None}, sections=sections)
    start, writes = DataParallel._start_write, []

    def written(self: DataParallel, name: str, **options: bool) -> Any:
        writes.append(name)
        return start(self, name, **options)

    monkeypatch.setattr(DataParallel, "_start_write", written)
    recorder = trains(row, tmp_path)
    assert sum("layers.0." in name for name in writes) == 2 * 2 * 7, (
        "steps x microbatches x linear layers"
    )
    hidden_by = [products for op, products in recorder.hidden_by if op == "reduce_scatter"]
    assert len(hidden_by) == 2 * 2 * 6, "steps x microbatches x units"
    for of_step in (hidden_by[:12], hidden_by[12:]):
        # when those of the first layer and the embedding start, no product is left in the step
        assert all(of_step[:-2]) and not any(of_step[-2:]), of_step

    def reduced_before(self: DataParallel, name: str, **options: bool) -> Any:  # a planted bug
        target = start(self, name, **options)
        if "layers.0." in name:
            self._bucket_of[name].start_reduce(is_last=True)
        return target

    monkeypatch.setattr(DataParallel, "_start_write", reduced_before)
    with pytest.raises(Race, match="kernels/linear.py.* an output in flight: reduce_scatter"):
        trains(row, tmp_path / "planted")


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=needs_effects)])
def test_products_hide_every_transfer_of_the_backward_of_layers_over_tp(
    compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(
        block_transforms.torch, "compile", partial(torch.compile, backend="aot_eager")
    )
    row = Row(2, "no_shard", {"tp": 2}, SP, sections={"train": {"torch_compile": compiles}})
    hidden = [op for op, products in trains(row, tmp_path).hidden_by if products]
    # leave: gathers the gradient; enter: gathers the input again, reduce-scatters its gradient;
    # attention and MLP
    of_block = ["all_gather", "all_gather", "reduce_scatter"] * 2
    assert hidden == of_block * (2 * 2 * 2), "steps x microbatches x layers"


def test_products_hide_every_transfer_in_pieces_of_forward_and_backward(tmp_path: Path) -> None:
    num_layers = 2 * 2 * 2  # steps x microbatches x layers
    exposed = {}
    for name, options in (("whole", SP), ("pieces", PIECES)):
        hidden_by = trains(Row(2, "no_shard", {"tp": 2}, options), tmp_path / name).hidden_by
        exposed[name] = [op for op, products in hidden_by if not products]
        # of attention and MLP: enter, leave, and the gradient of leave
        in_pieces = 0 if name == "whole" else 2 * 3 * num_layers
        assert [op for op, products in hidden_by if products].count("all_to_all") == in_pieces
    # what is left is of embedding, head and loss
    assert len(exposed["whole"]) - len(exposed["pieces"]) == 2 * 2 * num_layers
    assert "all_to_all" not in exposed["pieces"]


@pytest.mark.parametrize("options", [SP, PIECES], ids=["whole", "pieces"])
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=needs_effects)])
def test_all_tp_ranks_start_the_same_collectives_in_the_same_order(
    compiles: bool, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(
        block_transforms.torch, "compile", partial(torch.compile, backend="aot_eager")
    )
    orders = []
    for rank in range(2):
        sections = {"train": {"torch_compile": compiles}, "model": {"num_layers": 1}}
        row = Row(2, "optim", {"tp": 2}, options, sections=sections, rank=rank)
        orders.append(trains(row, tmp_path / str(rank)).order)
    assert orders[0] == orders[1] and len(orders[0]) > 40


def test_the_rows_have_every_axis_strategy_and_backend() -> None:
    assert len(ROWS) >= 20
    sizes = {name for row in ROWS for name in row.sizes}
    assert sizes == {"tp", "pp", "cp", "ep", "etp", "instances", "schedule", "vpp"}
    assert {row.strategy for row in ROWS} == {
        "no_shard",
        "optim",
        "optim_grads",
        "optim_grads_params",
    }


def _no_wait_for_params(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParamStore, "wait", lambda self: None)


def _no_wait_for_grads(patch: pytest.MonkeyPatch) -> None:
    def finish_inside(self: Bucket) -> None:
        work, self._inside = self._inside, None
        if work is not None:
            self.grads.finish_inside(is_first=self._is_first)
            self._is_first = False
            self._written.clear()

    patch.setattr(Bucket, "finish_inside", finish_inside)


def _no_wait_for_messages(patch: pytest.MonkeyPatch) -> None:
    start = executor.start_send_recv

    def started(sends: Any, receives: Any, *, group: Any) -> Any:
        batch = start(sends, receives, group=group)
        patch.setattr(executor, "kept", [*getattr(executor, "kept", []), batch], raising=False)
        return type(batch)(
            batch.sent, tuple(Work.completed(message.tensor) for message in receives)
        )

    patch.setattr(executor, "start_send_recv", started)


def _borrowed_grads_taken_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransientGrads, "overlaps", lambda self, other: False)


def _inputs_not_kept(patch: pytest.MonkeyPatch) -> None:
    class Unkept(Work[Any]):
        def __init__(self, finish: Callable[[], Any], *, keep: Any = (), **options: Any) -> None:
            super().__init__(finish, **options)

    patch.setattr(collectives, "Work", Unkept)


PLANTED = [
    (
        _no_wait_for_params,
        Row(2, "optim", options=OVERLAP),
        "reads an output in flight: all_gather",
    ),
    (_no_wait_for_params, Row(2, "optim_grads_params", options=OVERLAP), "in flight: all_gather"),
    (_no_wait_for_grads, Row(2, "optim", options=OVERLAP), "in flight: reduce_scatter"),
    (
        _no_wait_for_grads,
        Row(2, "optim_grads", options=OVERLAP),
        "reads an output in flight: reduce_scatter",
    ),
    (
        _no_wait_for_messages,
        Row(2, "optim", {"pp": 2}, rank=1),
        "reads an output in flight: receive",
    ),
    (
        _borrowed_grads_taken_early,
        Row(2, "optim_grads", options=OVERLAP),
        "in flight: reduce_scatter",
    ),
    (
        _inputs_not_kept,  # with two samples the input is a copy, which nothing else keeps
        Row(2, "optim", {"tp": 2}, SP, sections={"train": {"micro_batch_size": 2}}),
        "storage was freed or resized in flight: reduce_scatter",
    ),
]


@pytest.mark.parametrize(
    ("plant", "row", "message"), PLANTED, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    row: Row,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(Race, match=message):
        trains(row, tmp_path)
