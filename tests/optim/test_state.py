"""Parts of a shard, their planned bytes, ranges in fp32, and what a rank adds to the norm and
saves.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanotrain.cli.main import main
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import OptimConfig
from nanotrain.config.load import load_config
from nanotrain.errors import CheckpointError
from nanotrain.inference.checkpoint import export_checkpoint, load_checkpoint, open_model
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.state import (
    BucketState,
    PartState,
    Replica,
    ShardPart,
    split_shard,
    state_bytes,
)
from nanotrain.optim.stored import SCALE_BLOCK, StoredTensor
from nanotrain.parallel.dp.layout import FlatRange, LayoutRules, clip_ranges, plan_layout
from nanotrain.plan.plan import plan_run
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.spec.params import LocalParam, Normal, ParamSpec
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.step import train_step
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import GLOBAL_BATCH, Case, build_here
from tests.parallel.dp.toys import Toy, local_params
from tests.train.small_run import small_run, train

MUON, ADAM = OPTIMIZERS["muon"], OPTIMIZERS["adam"]


def buckets(num_shards: int, bucket_size: int = 200):
    return plan_layout(
        local_params(Toy()), LayoutRules(num_shards=num_shards, bucket_size=bucket_size)
    ).buckets


@given(st.integers(1, 7), st.integers(1, 900), st.sampled_from(["adam", "muon"]))
def test_parts_cover_the_shard_in_order_and_hold_every_range_of_their_kind(
    num_shards, bucket_size, name
):
    rule = OPTIMIZERS[name]
    for bucket in buckets(num_shards, bucket_size):
        for shard in range(num_shards):
            parts = split_shard(bucket.update_ranges(shard), bucket.shard_numel, rule=rule)
            assert parts[0].start == 0 and parts[-1].stop == bucket.shard_numel
            assert all(
                part.stop == following.start
                for part, following in zip(parts, parts[1:], strict=False)
            )
            assert tuple(r for part in parts for r in part.ranges) == bucket.update_ranges(shard)
            for part in parts:
                assert all(
                    part.start <= r.start and r.elements.stop <= part.stop for r in part.ranges
                )
                kinds = {
                    rule.matrix is not None and r.param.spec.needs_whole_matrix for r in part.ranges
                }
                assert kinds <= {part.is_matrix}


def test_a_rule_without_matrices_has_one_part():
    assert [
        len(split_shard(bucket.update_ranges(0), bucket.numel, rule=ADAM)) for bucket in buckets(1)
    ] == [1, 1, 1]
    assert (
        max(
            len(split_shard(bucket.update_ranges(0), bucket.numel, rule=MUON))
            for bucket in buckets(1, 10**6)
        )
        > 2
    )


@given(st.integers(1, 7), st.floats(0, 1), st.sampled_from(["adam", "muon"]))
def test_a_fraction_of_every_shard_is_on_the_host(num_shards, fraction, name):
    rule = OPTIMIZERS[name]
    for bucket in buckets(num_shards):
        ranges = bucket.update_ranges(num_shards - 1)
        parts = split_shard(ranges, bucket.shard_numel, rule=rule, host_fraction=fraction)
        assert sum(part.numel for part in parts if part.on_host) == int(
            fraction * bucket.shard_numel
        )
        assert parts[0].start == 0 and parts[-1].stop == bucket.shard_numel
        assert all(
            part.stop == following.start for part, following in zip(parts, parts[1:], strict=False)
        )
        assert sum(r.numel for part in parts for r in part.ranges) == sum(r.numel for r in ranges)


def test_ranges_are_clipped():
    (bucket, *_) = buckets(1)
    first, second, *_ = bucket.update_ranges(0)
    (clipped,) = clip_ranges([first, second], start=second.start + 3, stop=second.stop - 2)
    assert (clipped.param, clipped.param_start, clipped.numel) == (
        second.param,
        second.param_start + 3,
        second.numel - 5,
    )


def test_bytes_by_rule_and_dtype():
    config, total = OptimConfig(), sum(bucket.numel for bucket in buckets(1))
    parts = [
        part
        for bucket in buckets(1)
        for part in split_shard(bucket.update_ranges(0), bucket.numel, rule=ADAM)
    ]
    fp32, bf16 = Precision(params=torch.float32), Precision(params=torch.bfloat16)
    assert state_bytes(parts, ADAM, config=config, precision=fp32) == 8 * total
    assert state_bytes(parts, ADAM, config=config, precision=bf16) == 12 * total
    small = Precision(
        params=torch.bfloat16,
        main=torch.bfloat16,
        exp_avg=torch.bfloat16,
        exp_avg_sq=torch.bfloat16,
    )
    assert state_bytes(parts, ADAM, config=config, precision=small) == 4 * total
    assert state_bytes(parts, OPTIMIZERS["lion"], config=config, precision=fp32) == 4 * total
    averaged = replace(config, ema_decay=0.9)  # in fp32 beside state of any dtype
    for rule, precision in ((ADAM, fp32), (ADAM, small), (OPTIMIZERS["lion"], bf16)):
        plain = state_bytes(parts, rule, config=config, precision=precision)
        assert state_bytes(parts, rule, config=averaged, precision=precision) == plain + 4 * total
    on_host = [replace(part, on_host=True) for part in parts]
    assert state_bytes(on_host, ADAM, config=averaged, precision=bf16) == 0
    parts = [
        part
        for bucket in buckets(1)
        for part in split_shard(bucket.update_ranges(0), bucket.numel, rule=MUON)
    ]
    matrices = sum(part.numel for part in parts if part.is_matrix)
    assert 0 < matrices < total
    assert state_bytes(parts, MUON, config=config, precision=fp32) == 4 * matrices + 8 * (
        total - matrices
    )


CPU = torch.device("cpu")
NUMEL, FIRST = 3 * SCALE_BLOCK, 100


def build(dtype: torch.dtype) -> PartState:
    """Three params in elements [100, 100 + NUMEL) of a shard, with gaps: decayed, embedding, not
    decayed.
    """
    spec = ParamSpec("a", (5000,), dtype="fp32", init=Normal(1.0), weight_decay=True)
    specs = (spec, replace(spec, is_embedding_or_output=True), replace(spec, weight_decay=False))
    starts = (FIRST + 10, FIRST + 2000, FIRST + 4000)
    ranges = [
        FlatRange(LocalParam.unsharded(s), at, 0, 1500) for s, at in zip(specs, starts, strict=True)
    ]
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    tensors = [StoredTensor.zeros(NUMEL, dtype, device=CPU) for _ in range(2)]
    for tensor in tensors:
        tensor.write(values)
    return PartState(
        ShardPart(FIRST, FIRST + NUMEL, tuple(ranges)),
        main=tensors[0],
        state={"exp_avg": tensors[1]},
        grad=torch.zeros(NUMEL),
        model_params=torch.zeros(NUMEL, dtype=torch.bfloat16),
    )


def test_ranges_cover_the_part_and_begin_after_the_param_before():
    ranges = build(torch.float32).ranges()
    assert [len(r.main_param) for r in ranges] == [1510, 1990, NUMEL - 3500]
    assert [(r.weight_decay, r.is_decoupled) for r in ranges] == [
        (True, False),
        (True, True),
        (False, False),
    ]


def test_fp32_ranges_are_views():
    state = build(torch.float32)
    state.ranges()[1].main_param.fill_(5.0)
    assert (state.main.values[1510:3500] == 5.0).all() and not (
        state.main.values[:1510] == 5.0
    ).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_are_converted_and_stored_again(dtype, monkeypatch):
    monkeypatch.setattr("nanotrain.optim.state.CHUNK_NUMEL", SCALE_BLOCK)
    state, unchanged = build(dtype), build(dtype)
    assert list(state.chunks()) == [(i * SCALE_BLOCK, (i + 1) * SCALE_BLOCK) for i in range(3)]
    before = {name: stored.read().clone() for name, stored in state.stored.items()}
    for start, stop in state.chunks():
        with state.loaded(start, stop) as ranges:
            assert sum(len(r.main_param) for r in ranges) == SCALE_BLOCK
            for r in ranges:
                r.main_param.mul_(2.0)
                r.state["exp_avg"].mul_(-4.0)
    assert torch.equal(state.main.read(), 2 * before["model"])
    assert torch.equal(state.state["exp_avg"].read(), -4 * before["optimizer/exp_avg"])
    state.copy_main_to_model_params()
    assert torch.equal(state.model_params, (2 * before["model"]).bfloat16())
    with pytest.raises(AssertionError, match="changes of copies"):
        unchanged.ranges()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_scaled_in_every_chunk(dtype, monkeypatch):
    monkeypatch.setattr("nanotrain.optim.state.CHUNK_NUMEL", SCALE_BLOCK)
    state = build(dtype)
    spec = replace(state.part.ranges[1].param.spec, name="b", shape=(40, 50))
    # local rows 5 to 34 of 40, of which elements 7 to 1506 are here
    local = LocalParam(spec, Box((5, 0), (35, 50)))
    state.part = replace(
        state.part, ranges=(state.part.ranges[0], FlatRange(local, FIRST + 2000, 7, 1493))
    )
    expected, rows = state.main.read().clone(), 2.0 ** -torch.arange(40)
    expected[2000:3493] *= rows[5:35].repeat_interleave(50)[7:]
    state.scale_rows({"b": rows, "c": rows})
    assert torch.equal(state.model_params, state.main.read().bfloat16())
    torch.testing.assert_close(
        state.main.read(), expected, rtol=0, atol=1e-3 if dtype is torch.float16 else 0
    )


def test_a_part_of_padding_is_one_range_without_weight_decay():
    state = build(torch.float32)
    state.part = ShardPart(FIRST, FIRST + NUMEL, ())
    (only,) = state.ranges()
    assert len(only.main_param) == NUMEL and not only.weight_decay and not only.is_decoupled


LINE = "+config=tiny --vocab-size 2048 --tensor-model-parallel-size 2 --data-parallel-sharding-strategy optim"


ONLY_RANK = Replica(0, 1)


def states_of(rank: int, replica: Replica = ONLY_RANK) -> list[BucketState]:
    """The buckets of a rank, 4 ranks with tp 2; gradients are 1, 2, 3, ..., gaps and padding zero;
    no parts.
    """
    states = []
    for buffer in plan_run(
        load_config([*LINE.split(), "--ddp-bucket-size", "50000"]), 4, rank=rank
    ).buffers:
        for layout in buffer.layout.buckets:
            ranges, grads = (
                layout.update_ranges(buffer.shard.index, outer_index=0),
                torch.zeros(layout.update_numel),
            )
            for part in ranges:
                grads[part.elements] = (
                    torch.arange(part.elements.start, part.elements.stop).float() + 1
                )
            bucket = SimpleNamespace(
                update_ranges=ranges, layout=layout, grads=SimpleNamespace(main=grads)
            )
            states.append(BucketState(bucket, replica, parts=()))
    return states


def test_the_norm_takes_the_gradients_of_replica_0_and_leaves_nothing_else_out() -> None:
    states, num_left_out = states_of(1), 0
    assert len(states) > 1
    for state in states:
        expected = state.grads.clone()
        for part in state.bucket.update_ranges:
            if not part.param.is_first_replica:
                expected[part.elements], num_left_out = 0, num_left_out + 1
        taken = torch.cat([torch.zeros(0), *state.grads_for_norm()])
        assert taken[taken > 0].tolist() == expected[expected > 0].tolist()
    assert num_left_out  # norms are replicated over tp


def test_a_bucket_without_other_replicas_is_one_tensor_of_the_norm() -> None:
    for state in states_of(0):
        [grads] = state.grads_for_norm()
        assert grads.data_ptr() == state.grads.data_ptr() and grads.shape == state.grads.shape


@pytest.mark.parametrize("rank", [0, 1])
def test_of_ranks_that_update_the_same_part_the_first_adds_to_the_norm_and_each_saves_a_part(
    rank: int,
) -> None:
    first, second = states_of(rank, Replica(0, 2)), states_of(rank, Replica(1, 2))
    assert not [grads for state in second for grads in state.grads_for_norm()]
    for first_replica, second_replica in zip(first, second, strict=True):
        boxes = [
            box
            for state in (first_replica, second_replica)
            for box, _ in state.grad_tensors(state.ranges_to_save)
        ]
        num_expected = sum(
            part.numel for part in first_replica.bucket.update_ranges if part.param.is_first_replica
        )
        assert len(boxes) == len(set(boxes)) and sum(box.box.numel for box in boxes) == num_expected


DECAY, STEPS, LR = 0.7, 2, 3e-3
BF16 = {"precision": {"params_dtype": "bf16"}}
LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"strategy": "no_shard"}, {}),
    (2, {"strategy": "optim", "tp": 2}, {"sequence_parallel": True}),
    (2, {"strategy": "optim_grads", "pp": 2}, {}),
    (2, {"strategy": "optim_grads_params"}, {}),
]
Boxes = dict[TensorBox, Tensor]


def case_of(parallel: dict[str, Any], **sections: Any) -> Case:
    optim = {"ema_decay": DECAY, "lr": LR, "adam_eps": 1e-5}
    return Case(STEPS).but(
        optim=optim, parallel=parallel, train={"micro_batch_size": 3}, **sections
    )


def average_and_weights(ctx: ParallelContext, case: Case) -> tuple[Boxes, list[Boxes]]:
    """This rank's part of the average at the end, and of the main params before the first and after
    every step.
    """
    run = build_here(ctx, case)

    def copies(only: str) -> Boxes:
        return {
            box: tensor.clone() for box, tensor in run.optimizer.tensors_to_save(only=only).items()
        }

    history = [copies("model")]
    for _ in range(case.steps):
        batch = run.batch_iterator.next()
        assert batch is not None
        train_step(run, batch)
        history.append(copies("model"))
    return copies("ema"), history


def assemble(parts: list[Boxes]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for boxes in parts:
        for box, tensor in boxes.items():
            name = box.name.partition("/")[2]
            whole.setdefault(name, torch.full(box.shape, float("nan")))[box.box.slices()] = (
                tensor.float()
            )
    return whole


def average_of(history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The average by its definition, in fp64."""
    average = {name: tensor.double() for name, tensor in history[0].items()}
    for weights in history[1:]:
        average = {
            name: DECAY * average[name] + (1 - DECAY) * tensor.double()
            for name, tensor in weights.items()
        }
    return average


def test_every_strategy_averages_as_one_rank_does():
    whole_batch = case_of({}).but(train={"micro_batch_size": GLOBAL_BATCH})
    (single,) = run_ranks(1, average_and_weights, whole_batch, shares=True)
    expected = average_of([assemble([weights]) for weights in single[1]])
    for number, sizes, options in LAYOUTS:
        parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
        results = run_ranks(number, average_and_weights, case_of(parallel), **sizes, shares=True)
        average = assemble([average for average, _ in results])
        assert average.keys() == expected.keys()
        for name, values in expected.items():
            assert (average[name] - values).abs().max() < 1e-2 * LR, (sizes, name)
            assert average[name].isfinite().all(), "every element is saved by some rank"


def test_the_average_is_of_fp32_weights_where_the_model_has_16_bits():
    parallel = {SHORT_NAMES["strategy"]: "optim_grads"}
    results = run_ranks(
        2, average_and_weights, case_of(parallel, **BF16), strategy="optim_grads", shares=True
    )
    expected = average_of(
        [assemble([history[step] for _, history in results]) for step in range(STEPS + 1)]
    )
    for name, values in assemble([average for average, _ in results]).items():
        assert torch.allclose(values.double(), expected[name], rtol=1e-6, atol=1e-7), name


def test_a_skipped_step_changes_no_average_and_a_load_without_one_begins_at_the_weights(tmp_path):
    folder, flags = tmp_path / "run", ("--train-iters", "2", "--lr", "0.1")
    with small_run(folder, *flags) as run:
        train(run, CheckpointHook())
    with pytest.raises(
        CheckpointError, match="no moving average.*: it was written by a run without --ema-decay"
    ):
        open_model(folder, ema=True)
    assert main(["checkpoint", "average", str(folder), "--output", str(tmp_path / "mean")]) == 0
    with pytest.raises(CheckpointError, match="no moving average.*: it is an average or an import"):
        open_model(tmp_path / "mean", ema=True)
    with small_run(folder, *flags, "--train-iters", "4", "--ema-decay", "0.5") as run:
        weights, average = (
            next(iter(run.optimizer.tensors_to_save(only=kind).values()))
            for kind in ("model", "ema")
        )
        assert torch.equal(weights, average) and weights.data_ptr() != average.data_ptr()
        train(run, CheckpointHook())
        assert not torch.equal(average, weights)
        before = average.clone()
        run.optimizer.average.update(torch.tensor(True))
        assert torch.equal(average, before)
        saved = {
            box.name: tensor.clone()
            for box, tensor in run.optimizer.tensors_to_save(only="ema").items()
        }
    assert all(
        torch.equal(saved[f"ema/{name}"], weight)
        for name, weight in loaded_weights(folder, ema=True).items()
    )
    assert not all(
        torch.equal(saved[f"ema/{name}"], weight) for name, weight in loaded_weights(folder).items()
    )
    export_checkpoint(folder, tmp_path / "hf", ema=True)
    exported = load_checkpoint(tmp_path / "hf", tokenizer="bytes").model.state_dict()
    for name, weight in loaded_weights(folder, ema=True).items():
        rows = 260 if name.startswith("embedding") else len(weight)  # without padding
        assert torch.equal(exported[name][:rows], weight[:rows]), name
    with pytest.raises(CheckpointError, match="one set of weights"):
        open_model(tmp_path / "hf", ema=True)
    # --finetune takes the weights, not their average
    with small_run(
        tmp_path / "tuned", "--load", str(folder), "--finetune", "--ema-decay", "0.5"
    ) as run:
        parts = [run.optimizer.tensors_to_save(only=kind).values() for kind in ("model", "ema")]
        assert all(torch.equal(*pair) for pair in zip(*parts, strict=True))


def loaded_weights(folder: Path, *, ema: bool = False) -> dict[str, Tensor]:
    return dict(load_checkpoint(folder, tokenizer="bytes", ema=ema).model.named_parameters())


def test_evaluate_reads_the_average(tmp_path, capsys):
    from nanotrain.cli.evaluate import evaluate

    with small_run(
        tmp_path / "run", "--train-iters", "2", "--lr", "0.1", "--ema-decay", "0.9"
    ) as run:
        train(run, CheckpointHook())
    text = tmp_path / "text.txt"
    text.write_text("a few words to predict, and a few more")
    losses = []
    for more in ([], ["--ema"]):
        line = [
            str(tmp_path / "run"),
            "--data",
            str(text),
            "--tokenizer",
            "bytes",
            "--json",
            "--device",
            "cpu",
            *more,
        ]
        assert evaluate(line) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] != losses[1]
