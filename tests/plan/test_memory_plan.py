"""The memory of a run before it starts: exact where it is exact, and one error with settings that
fit.
"""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from nanotrain.config.load import load
from nanotrain.config.schema import with_values
from nanotrain.errors import ConfigError
from nanotrain.plan import fitting
from nanotrain.plan.fitting import require_memory
from nanotrain.plan.memory_plan import plan_memory, worst_memory
from nanotrain.plan.plan import plan_run
from nanotrain.quantities import describe_bytes
from nanotrain.train.main import main
from tests.model.building import build
from tests.plan.test_fitting import GB, SMALL, advice, config_of, search_to_the_end  # noqa: F401
from tests.train.conftest import logging_as_before  # noqa: F401 a fixture

pytestmark = pytest.mark.usefixtures("logging_as_before")


def test_parameters_gradients_and_optimizer_are_those_of_the_plan():
    config = config_of(
        f"{SMALL} --data-parallel-sharding-strategy optim --tensor-model-parallel-size 2"
    )
    planned, resident = (
        plan_memory(config, 8, pp_rank=0, device="cuda"),
        plan_run(config, 8, rank=0).resident_bytes,
    )
    assert (planned.params, planned.grads, planned.optimizer) == (
        resident.params,
        resident.grads,
        resident.optimizer,
    )


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        ("", 1),
        ("--context-parallel-size 2", 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2", 4),
        ("--tensor-model-parallel-size 2", 1),
    ],
)
def test_a_pipeline_needs_hidden_states_for_two_sends_and_two_receives_at_once(layout, share):
    words = f"{SMALL} --micro-batch-size 3 --bf16 {layout} --global-batch-size 48"
    one_stage, two_stages = (
        plan_memory(
            config_of(f"{words} --pipeline-model-parallel-size {pp}"), 8, pp_rank=0, device="cpu"
        )
        for pp in (1, 2)
    )
    resident = [
        plan_run(
            config_of(f"{words} --pipeline-model-parallel-size {pp}"), 8, rank=0
        ).resident_bytes
        for pp in (1, 2)
    ]
    buffers = [each.grad_buckets + each.units for each in resident]
    assert one_stage.communication == buffers[0]
    assert two_stages.communication - buffers[1] == (2 + 2) * (3 * 64 * 64 * 2) // share


SIGMOID = "--moe-router-score-function sigmoid --moe-aux-loss-coeff 0"
QUANTILES = "--moe-router-load-balancing-type quantile_balancing --moe-router-qb-num-bins 50"


@pytest.mark.parametrize(
    "flags",
    ["", f"{SIGMOID} --moe-router-enable-expert-bias", f"{SIGMOID} {QUANTILES}"],
    ids=["statistics", "biases", "quantiles"],
)
@pytest.mark.parametrize("hashed", [0, 3])
def test_buffers_of_routers_are_in_the_plan(flags, hashed):
    layers = f"--moe-hash-layers [1]*{hashed}+[0]*{8 - hashed}" if hashed else ""
    config = config_of(f"{SMALL} --num-experts 4 {flags} {layers}")
    buffers = dict(build(config.model).named_buffers())
    held = sum(buffer.nbytes for name, buffer in buffers.items() if ".router." in name)
    planned = plan_memory(config, 1, pp_rank=0, device="cpu").params
    assert planned == plan_run(config, 1, rank=0).resident_bytes.params + held


def test_an_asynchronous_save_has_a_copy_of_main_parameters_and_state_in_host_memory():
    words = f"{SMALL} --run-dir r --save-interval 10"
    saved = config_of(f"{words} --async-save")
    for device, copies in (("cpu", 1), ("cuda", 0)):
        before, after = (
            plan_memory(config, 2, pp_rank=0, device=device) for config in (config_of(words), saved)
        )
        assert after.working - before.working == copies * (before.params + before.optimizer)


def test_memory_of_two_neighbouring_buckets_is_planned_and_what_graphs_return_of_blocks_in_several():
    words = f"{SMALL} --data-parallel-sharding-strategy optim_grads"
    for flag, num_buckets in (("", 1), ("--ddp-bucket-size 40000", 3)):
        config = config_of(f"{words} {flag}")
        (buffer,) = plan_run(config, 2, rank=0).buffers
        sizes = [bucket.numel for bucket in buffer.layout.buckets]
        units = [unit for bucket in buffer.layout.buckets for unit in bucket.units]
        assert max(map(units.count, units)) == num_buckets
        eager, compiled = (
            plan_memory(
                with_values(config, {"train.torch_compile": value}), 2, pp_rank=0, device="cuda"
            )
            for value in (False, True)
        )
        assert eager.communication == 4 * max(map(sum, pairwise([0, *sizes])))
        block = sum(
            each.param.box.numel
            for b in buffer.layout.buckets
            for each in b.params
            if each.param.spec.unit == "layers.0"
        )
        assert compiled.communication - eager.communication == 4 * block * (num_buckets > 1)


def test_the_largest_buckets_of_llama3_8b_are_not_both_open_and_its_blocks_are_one_bucket_each():
    words = "+config=llama3_8b --pipeline-model-parallel-size 1 --data-parallel-sharding-strategy"
    ends, block, norm = 128_256 * 4096, 218_112_000, 4096
    for strategy, gathered in (
        ("optim_grads", 0),
        ("optim_grads_params", 2 * (ends + norm + block)),
    ):
        planned = plan_memory(config_of(f"{words} {strategy}"), 8, pp_rank=0, device="cuda")
        # 10.51 and 12.61 GB with several buckets per block, of which five are open, each in memory
        # of the largest
        opened = ends + norm * (strategy == "optim_grads_params") + block
        assert planned.communication == pytest.approx(4 * opened + gathered, rel=1e-3), strategy


@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [
        ("1f1b", (4, 3, 2, 1)),
        ("gpipe", (8, 8, 8, 8)),
        ("interleaved --num-virtual-stages-per-pipeline-rank 2", (11, 9, 7, 5)),
    ],
)
def test_as_many_forwards_are_in_flight_as_the_schedule_says(schedule, in_flight):
    words = f"{SMALL} --pipeline-model-parallel-size 4 --global-batch-size 8 --pipeline-schedule {schedule}"
    plans = [
        plan_memory(config_of(words), 4, pp_rank=pp_rank, device="cpu") for pp_rank in range(4)
    ]
    assert tuple(plan.in_flight for plan in plans) == in_flight
    assert worst_memory(config_of(words), 4, device="cpu") == max(
        plans, key=lambda plan: plan.total
    )


@pytest.mark.parametrize(
    "flags", ["--rampup-batch-size 8 8 100", "--step-batch-size-schedule '0:8 1M:32'"]
)
def test_a_schedule_of_the_batch_size_needs_the_memory_of_its_last_size(flags):
    words = f"{SMALL} --pipeline-model-parallel-size 2 --global-batch-size 32"
    scheduled = load(shlex.split(f"{words} {flags}"), to_train=False).config
    for world_size in (2, 4):
        expected = worst_memory(config_of(words), world_size, device="cpu")
        assert worst_memory(scheduled, world_size, device="cpu") == expected, world_size


def test_the_page_shows_what_is_printed():
    page = " ".join((Path(__file__).parents[2] / "docs" / "memory.md").read_text().split())
    table = worst_memory(config_of("+config=tiny --vocab-size 2048"), 2, device="cpu").table(
        9_390_000_000
    )
    assert " ".join(table.split()) in page
    with pytest.raises(ConfigError) as caught:
        require_memory(
            config_of("+config=llama7b --mock-data"), 1, device="cpu", available=23_050_000_000
        )
    assert f"error: {caught.value}" in page


def test_recomputation_keeps_less_and_is_named_in_table_and_error():
    words = f"{SMALL} --pipeline-model-parallel-size 2 --global-batch-size 8 --micro-batch-size 2"
    kept, full, zero_bubble = (
        plan_memory(config_of(f"{words} {more}"), 2, pp_rank=0, device="cpu")
        for more in (
            "",
            "--recompute-granularity full",
            "--recompute-granularity full --pipeline-schedule zb-h1",
        )
    )
    assert full.activations < kept.activations < zero_bubble.activations * 2.5
    assert full.activations < zero_bubble.activations, "what W needs is complete from I to W"
    assert "in flight, recompute full" in full.table(None) and "recompute" not in kept.table(None)
    config = config_of("+config=gpt2_124m --micro-batch-size 64 --no-torch-compile")
    fix = advice(config, 8, 14 * GB)
    changed = with_values(config, {"memory.recompute_granularity": "full"})
    assert (
        f"--recompute-granularity full ({worst_memory(changed, 8, device='cuda').reserved / 1e9:.2f} GB)"
        in fix
    )


def test_on_a_gpu_the_context_nccl_and_fragments_are_counted_in_the_table_and_what_is_certain_in_the_refusal():
    config = config_of(f"{SMALL} --tensor-model-parallel-size 2 --no-torch-compile")
    on_cpu, on_gpu = (worst_memory(config, 8, device=device) for device in ("cpu", "cuda"))
    assert on_cpu.overhead == 0 and "overhead" not in on_cpu.rows()
    # tp, dp and the world; other groups have the same ranks
    assert on_gpu.runtime == 700 * 2**20 + 3 * 256 * 2**20
    assert on_gpu.overhead == on_gpu.runtime + int(0.03 * on_gpu.total)
    assert f"total{describe_bytes(on_gpu.total + on_gpu.overhead):>21}" in on_gpu.table(GB)
    with pytest.raises(ConfigError, match="overhead 1.5"):
        require_memory(config, 8, device="cuda", available=on_gpu.runtime)


def test_the_table_has_the_total_beside_what_is_available():
    table = plan_memory(config_of(SMALL), 1, pp_rank=0, device="cpu").table(16 * GB)
    assert "1 in flight" in table and table.endswith("MB of 16.00 GB")
    # small numbers in MB and kB
    assert table.startswith("planned memory per rank:\n") and " 0.00 " not in table
    assert "communication" not in table, "one rank sends nothing"
    profiled = f"{SMALL} --profile --data-parallel-sharding-strategy optim_grads"
    table = plan_memory(config_of(profiled), 2, pp_rank=0, device="cpu").table(16 * GB)
    assert "communication" in table and table.endswith("\n  without the records of --profile")


def test_a_large_model_on_a_small_machine_is_one_error_before_anything_is_prepared(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fitting, "SEARCH_S", 600.0)  # on a busy machine too
    monkeypatch.setattr(
        "nanotrain.comm.device.memory_per_rank", lambda device, local_world_size: 22 * GB
    )
    assert main(["+config=llama7b"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("error:") == 1 and "Traceback" not in err
    assert re.search(r"a rank needs 139\.\d+ GB of memory and has 22\.00 GB", err)
    for cure in ("--data-path", "--mock-data", "nanotrain prepare", "it fits with"):
        assert cure in err
    assert not list(Path(tmp_path).iterdir())


def test_only_the_quick_start_recipes_train_without_a_corpus(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["+config=gpt2_124m", "--micro-batch-size", "1"]) == 2
    err = capfd.readouterr().err
    assert "there is no corpus to train on" in err and "nanotrain prepare" in err
    assert (
        load(["+config=tiny"]).config.data.quickstart
        and load(["+config=tiny_moe"]).config.data.quickstart
    )
    assert not load(
        ["+config=tiny", "--mock-data", "--generate-tokens", "0"]
    ).config.data.quickstart
