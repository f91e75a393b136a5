"""The dry run: recipes agree, and a planted mismatch is named with rank, group, call and place."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.cli.main import main
from nanotrain.comm.work import Work
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.dry_run.check import DryRun, dry_run
from nanotrain.optim import distributed
from nanotrain.optim.state import BucketState
from nanotrain.parallel.dp.bucket import Bucket
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.stores import ParamStore
from nanotrain.parallel.pp import executor
from tests.fake_world import HAS_META_COLLECTIVES

pytestmark = pytest.mark.skipif(
    not HAS_META_COLLECTIVES, reason="torch 2.10 has no meta kernels of its products"
)

ROOT = Path(__file__).parents[2]
LARGE = "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 8 --global-batch-size 2048"
TINY = "+config=tiny --mock-data --bf16 --num-layers 2 --global-batch-size 8 --micro-batch-size 1"
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --overlap-param-gather --overlap-grad-reduce"


def config_of(flags: str) -> Config:
    return load(flags.split()).config


def run(flags: str, world_size: int, **options: Any) -> DryRun:
    return dry_run(config_of(flags), world_size, **options)


# recipe -> ranks and flags of a small world, and of its largest where that is another one; of
# layers of linear attention, each of which runs a thousand operators, their pattern of four two or
# three times
FEWER = "--num-layers 2"
SMALLER = f"{FEWER} --global-batch-size 64"
TWICE = "--num-layers 4 --global-batch-size 64"  # as many layers
DEEPSEEK = "--num-layers 5 --moe-layer-freq [0]*3+[1]*2 --pipeline-model-parallel-size 2"
NEMOTRON = "--num-layers 6 --hybrid-layer-pattern ME*MEM --pipeline-model-parallel-size 2 --global-batch-size 64"
KIMI = "--num-layers 8 --moe-layer-freq [0]+[1]*7 --linear-attention-freq 4"
LINEAR = f"{FEWER} --linear-attention-freq 2 --micro-batch-size 1 --global-batch-size 64"
RECIPES: dict[str, tuple[Any, ...]] = {
    "tiny": (12, "--mock-data"),
    "tiny_moe": (
        12,
        "--mock-data --expert-model-parallel-size 4 --moe-latent-size 96",
        12,
        "--mock-data",
    ),
    "gpt2_124m": (4, FEWER, 32, ""),
    "llama1b": (16, f"{FEWER} --tensor-model-parallel-size 2", 128, ""),
    "llama3_8b": (
        16,
        f"{SMALLER} --tensor-model-parallel-size 2 --context-parallel-size 2",
        512,
        "",
    ),
    "llama7b": (4, FEWER, 1024, ""),
    "llama70b": (
        16,
        f"{SMALLER} --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2",
        16_384,
        LARGE,
    ),
    "qwen3_8b": (4, f"{TWICE} --data-parallel-sharding-strategy optim_grads_params", 1024, ""),
    "qwen3_30b_a3b": (16, f"{TWICE} --pipeline-model-parallel-size 4", 1024, ""),
    "mixtral_8x7b": (32, FEWER, 1024, ""),
    "nemotron3_nano_30b_a3b": (16, NEMOTRON, 1024, ""),
    "qwen3_next_80b_a3b": (2, LINEAR, 64, "--num-layers 8"),
    "qwen3_5_27b": (
        2,
        f"{FEWER} --linear-attention-freq 2 --global-batch-size 64",
        1024,
        "--num-layers 8",
    ),
    "qwen3_5_35b_a3b": (2, LINEAR, 64, "--num-layers 12"),
    "kimi_linear_48b_a3b": (2, f"{LINEAR} --moe-layer-freq [0]+[1]", 64, KIMI),
    "deepseek_v32": (
        16,
        f"{DEEPSEEK} --expert-model-parallel-size 8 --global-batch-size 16 --seq-length 1024",
    ),
    "deepseek_v3": (
        16,
        f"{DEEPSEEK} --expert-model-parallel-size 8 --global-batch-size 64",
        2048,
        "",
    ),
}


def test_every_recipe_is_here() -> None:
    names = {path.stem for path in (ROOT / "configs" / "config").glob("*.yaml")}
    others = {name for name in names if re.search("_(64|512)$", name)}  # they differ in layout
    assert names - others - {"sft"} == set(RECIPES), "the model of sft is that of a checkpoint"


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_agree_and_reach_the_planned_memory(recipe: str) -> None:
    world_size, flags, *_ = RECIPES[recipe]
    result = run(f"+config={recipe} {flags}", world_size)
    assert not result.faults
    assert "no fault: all members" in result.text()


@pytest.mark.parametrize(
    "recipe", [recipe for recipe, worlds in RECIPES.items() if len(worlds) > 2]
)
def test_a_rank_of_the_largest_world_of_a_recipe(recipe: str) -> None:
    _, _, world_size, flags = RECIPES[recipe]
    result = run(f"+config={recipe} {flags}", world_size, rank=world_size - 1)
    assert not result.faults and [*result.records] == [world_size - 1]
    assert "no fault: on this rank alone" in result.text()


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-schedule zb-h1 --num-layers 4",
        "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
        "--pipeline-schedule dualpipev --num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
        "--pipeline-schedule gpipe --recompute-granularity full",
        "--data-parallel-sharding-strategy optim_grads --sequence-parallel",
        # the next layer is gathered ahead
        "--data-parallel-sharding-strategy optim_grads_params --num-layers 4",
        "--context-parallel-size 2 --pipeline-model-parallel-size 1",
        "--context-parallel-size 2 --pipeline-model-parallel-size 1 --cp-comm-type a2a",
        "--context-parallel-size 2 --pipeline-model-parallel-size 1 --cp-comm-type allgather",
        "--num-distributed-optimizer-instances 2",
        "--optimizer muon",
        "--optimizer normuon --muon-split-qkv-per-head",
        "--optimizer muon_h",
        "--num-experts 4 --moe-router-load-balancing-type quantile_balancing",
        "--num-experts 4 --moe-num-zero-experts 2 --moe-shortcut --moe-shared-expert-intermediate-size 64",
        "--fp8-format hybrid",
    ],
)
def test_layouts_agree(flags: str) -> None:
    result = run(f"{TINY} {LAYOUT} {flags}", 16)
    assert not result.faults


def _other_order(patch: pytest.MonkeyPatch) -> None:
    start = DataParallel.start_param_gather

    def reversed_on_last(self: DataParallel) -> None:
        buckets = self.buckets
        if self.groups.shard.index == self.groups.shard.size - 1:
            self.buckets = buckets[::-1]
        start(self)
        self.buckets = buckets

    patch.setattr(DataParallel, "start_param_gather", reversed_on_last)


def _no_bucket_on_last_stage(patch: pytest.MonkeyPatch) -> None:
    start = Bucket.start_reduce

    def skipped(self: Bucket, *, is_last: bool) -> None:
        if any(entry.name == "final_norm.weight" for entry in self.layout.params):
            self._inside = Work.completed(self.grads.shard)
        else:
            start(self, is_last=is_last)

    patch.setattr(Bucket, "start_reduce", skipped)


def _other_dtype(patch: pytest.MonkeyPatch) -> None:
    all_reduce = distributed.all_reduce
    patch.setattr(
        distributed,
        "all_reduce",
        lambda x, group: all_reduce(x.float() if group.index else x, group),
    )


def _no_receive(patch: pytest.MonkeyPatch) -> None:
    start = executor.start_send_recv

    def started(sends: Any, receives: Any, *, group: Any) -> Any:
        if not receives or group.index:
            return start(sends, receives, group=group)
        done = tuple(Work.completed(message.tensor) for message in receives)
        return type(start([], [], group=group))(start(sends, [], group=group).sent, done)

    patch.setattr(executor, "start_send_recv", started)


def _no_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ParamStore, "wait", lambda self: None)


def _saved_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BucketState, "ranges_to_save", property(lambda self: self.bucket.update_ranges))


def _more_memory(patch: pytest.MonkeyPatch) -> None:
    build = partial(torch.zeros, 2**24, device="meta")
    init = Bucket.__init__
    patch.setattr(
        Bucket,
        "__init__",
        lambda self, *args, **options: (
            init(self, *args, **options) or setattr(self, "more", build())
        ),
    )


PLANTED = {
    _other_order: r"group dp .*call \d+: rank \d starts all_gather .* at parallel/dp/stores.py:\d+ .*but rank \d ",
    _no_bucket_on_last_stage: r"rank [4-7] sends .* by reduce_scatter over group dp_shard .* none for the bucket of ",
    _other_dtype: r"group world .* rank 0 starts all_reduce of .* float64 sum .*but rank \d starts .* float32",
    _no_receive: r"group pp .* rank 4 starts send of .* at parallel/pp/executor.py:\d+ .* but rank 0 starts none",
    _no_wait: r"rank 0 .* stops: .* reads an output in flight: all_gather started at parallel/dp/stores.py",
    _saved_twice: r"a save does not cover model/.* exactly once",
    _more_memory: r"rank 0 allocates .* bytes before the first step, planned are",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_mismatch_is_named(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    result = run(f"{TINY} {LAYOUT}", 8)
    assert any(re.search(PLANTED[plant], fault) for fault in result.faults), "\n".join(
        result.faults
    )
    assert "error: " in result.text()


def test_the_exit_code_is_one_for_a_fault_and_two_for_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["dry-run", *TINY.split(), "--world-size", "2"]
    assert main(command) == 0
    for wrong, text in {
        "--rank 2": "ranks 0 to 1",
        "--pipeline-model-parallel-size 3": "pp=3",
    }.items():
        assert main([*command, *wrong.split()]) == 2
        assert text in capsys.readouterr().err
    _no_wait(monkeypatch)
    assert main([*command, "--rank", "1"]) == 1
    assert "error: rank 1" in capsys.readouterr().out


def test_fp8_experts_in_blocks_are_followed_on_the_meta_device() -> None:
    flags = "+config=tiny_moe --mock-data --bf16 --fp8-format e4m3 --fp8-recipe blockwise"
    result = run(f"{flags} --expert-model-parallel-size 2 --hidden-size 256 --vocab-size 256", 2)
    assert not result.faults
