"""The plan of a relayout without ranks: the boxes that runs hold, and what goes where."""

from pathlib import Path

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.plan.plan import plan_run
from nanotrain.plan.relayout import plan_relayout, state_boxes
from nanotrain.train.build import build_run
from nanotrain.train.inputs import open_inputs
from tests.harness import run_ranks

MODEL = """+config=tiny --mock-data --vocab-size 100 --num-layers 2 --hidden-size 32 --optimizer adam
    --num-attention-heads 4 --num-query-groups 2 --global-batch-size 8 --micro-batch-size 1
    --num-workers 0"""
LAYOUTS = [
    "--tensor-model-parallel-size 2 --bf16",
    "--pipeline-model-parallel-size 2 --ema-decay 0.9",
    "--data-parallel-sharding-strategy optim_grads_params --freeze embedding.*",
    "--num-experts 4 --expert-model-parallel-size 2 --data-parallel-sharding-strategy optim",
]


def words(folder: Path, layout: str) -> list[str]:
    return [*MODEL.split(), *layout.split(), f"train.run_dir={folder}"]


def compare(ctx: ParallelContext, folder: Path) -> None:
    """The planned boxes and bytes are those of the state of a run that was built."""
    for layout in LAYOUTS:
        config, inputs = open_inputs(load(words(folder, layout)))
        plan = plan_run(config, ctx.topology.world_size, rank=ctx.rank)
        run = build_run(plan, inputs, context=ParallelContext.attach(plan.topology))
        tensors = run.optimizer.state_tensors()
        run.batches.close()
        held = {(box.name.rpartition("/")[2], box.box) for box in tensors}
        planned = {(box.name, box.box): size for box, size in state_boxes(plan)}
        assert planned.keys() == held, layout
        nbytes = sum(size * box.numel for (_, box), size in planned.items())
        assert nbytes == sum(tensor.nbytes for tensor in tensors.values()), layout


def test_planned_boxes_are_those_that_runs_hold(tmp_path: Path) -> None:
    run_ranks(2, compare, tmp_path)


def test_a_plan_of_many_ranks_sends_what_each_lacks(tmp_path: Path) -> None:
    before = load(words(tmp_path, "--data-parallel-sharding-strategy no_shard")).config
    after = load(words(tmp_path, "--tensor-model-parallel-size 2")).config
    copies = plan_relayout(before, before, ranks=(8, 8))
    assert copies.transfers.sent == () and copies.num_rounds == 0
    # every rank holds everything: another layout is copied inside the ranks
    assert plan_relayout(before, after, ranks=(8, 8)).transfers.sent_bytes == 0
    sharded = load(words(tmp_path, "--data-parallel-sharding-strategy optim_grads")).config
    gathered = plan_relayout(sharded, before, ranks=(8, 8))
    state = sum(gathered.state_bytes)
    assert sum(gathered.received_by) == sum(gathered.sent_by) == 7 * state
    assert gathered.most_between_nodes(8) == 0 < gathered.most_between_nodes(4)
    assert gathered.num_rounds >= 1
