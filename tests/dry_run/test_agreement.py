"""The replay of few microbatches in the order of a schedule with many, and its messages."""

from collections import Counter

import pytest

from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.config.schema import with_values
from nanotrain.dry_run.agreement import disagreements, full_calls
from nanotrain.dry_run.rank import run_rank
from nanotrain.dry_run.rank_classes import RankClasses
from nanotrain.parallel.pp.transfers import RankPlan, plan_rank
from nanotrain.plan.memory_plan import train_schedule
from nanotrain.plan.plan import plan_run
from nanotrain.topology.topology import Topology
from tests.fake_world import HAS_META_COLLECTIVES


def config_of(flags: str) -> Config:
    return load(f"+config=tiny --mock-data --micro-batch-size 1 {flags}".split()).config


@pytest.mark.skipif(
    not HAS_META_COLLECTIVES, reason="torch 2.10 has no meta kernels of its products"
)
@pytest.mark.parametrize(
    "schedule", ["1f1b", "zb-h1", "interleaved --num-virtual-stages-per-pipeline-rank 2"]
)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_a_replayed_step_is_the_step_with_all_microbatches(schedule: str, strategy: str) -> None:
    flags = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --overlap-grad-reduce --bf16"
    flags += f" --num-layers {4 if 'virtual' in schedule else 2}"
    flags += f" --pipeline-schedule {schedule} --data-parallel-sharding-strategy {strategy}"
    many = with_values(config_of(f"{flags} --global-batch-size 16"), {"train.torch_compile": False})
    few = with_values(many, {"train.global_batch_size": 8})

    def replayed(config: Config) -> list[tuple[object, ...]]:
        record, full = run_rank(plan_run(config, 8, rank=3), shapes={}), full_plan(many)
        return [(call.ranks, call.op, call.size, call.peer) for call in full_calls(record, full)]

    def full_plan(config: Config) -> RankPlan:
        return plan_rank(train_schedule(config, 8), 0)

    whole, short = replayed(many), replayed(few)
    for ranks in {call[0] for call in whole}:
        assert [c for c in short if c[0] == ranks] == [c for c in whole if c[0] == ranks]
    assert Counter(short) == Counter(whole)


@pytest.mark.skipif(
    not HAS_META_COLLECTIVES, reason="torch 2.10 has no meta kernels of its products"
)
def test_messages_of_a_replayed_pipeline_are_compared() -> None:
    """Every microbatch has its messages, and a size that one side does not expect is found."""
    flags = "--pipeline-model-parallel-size 2 --num-layers 2 --bf16"
    config = with_values(
        config_of(f"{flags} --global-batch-size 16"), {"train.torch_compile": False}
    )
    few = with_values(config, {"train.global_batch_size": 6})
    schedule = train_schedule(config, 4)
    records = {}
    calls = {}
    for pp_rank, rank in enumerate((0, 2)):
        records[rank] = run_rank(plan_run(few, 4, rank=rank), shapes={})
        calls[rank] = [*full_calls(records[rank], plan_rank(schedule, pp_rank))]
        for op in ("send", "receive"):
            assert sum(call.op == op for call in calls[rank]) == 8, f"{op} of every microbatch"
    classes = RankClasses(config, Topology.of(config.parallel, 4))
    assert not [*disagreements(records, calls, classes=classes)]

    smaller = [call._replace(size="1 bfloat16") if call.op == "send" else call for call in calls[0]]
    faults = [*disagreements(records, {**calls, 0: smaller}, classes=classes)]
    assert faults and all("group pp (ranks 0 to 2), call 1: " in fault for fault in faults)
    assert any("rank 0 starts send of 1 bfloat16" in fault for fault in faults)

    one_less = [call for call in calls[2] if call.op != "receive"]
    faults = [*disagreements(records, {**calls, 2: one_less}, classes=classes)]
    assert any("but rank 2 starts none" in fault for fault in faults)
