"""The record of one rank."""

import pytest

from nanotrain.comm.recorder import Call
from nanotrain.config.load import load
from nanotrain.config.schema import with_values
from nanotrain.dry_run.rank import RankRecord, run_rank
from nanotrain.plan.plan import plan_run
from nanotrain.plan.traffic import sent_bytes
from tests.fake_world import HAS_META_COLLECTIVES

pytestmark = pytest.mark.skipif(
    not HAS_META_COLLECTIVES, reason="torch 2.10 has no meta kernels of its products"
)


def record_of(flags: str, world_size: int, rank: int) -> RankRecord:
    config = load(f"+config=tiny --mock-data --bf16 --global-batch-size 24 {flags}".split()).config
    return run_rank(
        plan_run(with_values(config, {"train.torch_compile": False}), world_size, rank=rank),
        shapes={},
    )


def test_what_a_rank_sends_and_saves_is_planned() -> None:
    record = record_of("--pipeline-model-parallel-size 2", 4, 1)
    plan = record.plan
    assert record.pp_index == 0 and dict(record.sent) == sent_bytes(plan)
    numel = sum(buffer.layout.numel for buffer in plan.buffers) // 2
    assert 0.99 * 12 * numel < sum(record.saved.values()) <= 12 * numel, (
        "main params and two moments in fp32, without padding"
    )
    assert record.resident < record.peak


def test_a_call_is_described_with_its_action_and_place() -> None:
    record = record_of("--pipeline-model-parallel-size 2", 4, 3)
    sends = [call for call in record.step if call.op == "send"]
    assert len(sends) == record.plan.num_microbatches
    assert record.describe(sends[0]).startswith(
        "starts send of 32,768 bfloat16 in B1.0 at parallel/pp/executor.py:"
    )
    vote: Call = record.step[0]
    assert record.describe(vote).startswith(
        "starts all_reduce of 4 float64 sum in batch at train/batches.py:"
    )
    assert record.describe(None) == "starts none"


def test_activations_and_optimizer_state_in_host_memory_are_not_counted() -> None:
    resident = record_of("", 2, 0)
    offloaded = record_of("--cpu-offloading --cpu-offloading-num-layers 2", 2, 0)
    assert offloaded.peak < resident.peak and offloaded.resident == resident.resident
    assert record_of("--optimizer-cpu-offload", 2, 0).resident < 0.7 * resident.resident
