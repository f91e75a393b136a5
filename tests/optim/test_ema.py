"""The moving average of weights: that of one rank in every layout and strategy, skipped steps, loads without one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.cli.main import main
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.errors import CheckpointError
from nanotrain.inference.checkpoint import export_checkpoint, load_checkpoint, open_model
from nanotrain.spec.boxes import TensorBox
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.step import train_step
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import GLOBAL_BATCH, Case, build_here
from tests.train.small_run import small_run, train

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
    return Case(STEPS).but(optim=optim, parallel=parallel, train={"micro_batch_size": 3}, **sections)


def average_and_weights(ctx: ParallelContext, case: Case) -> tuple[Boxes, list[Boxes]]:
    """This rank's part of the average at the end, and of the main params before the first and after every step."""
    run = build_here(ctx, case)

    def copies(only: str) -> Boxes:
        return {box: tensor.clone() for box, tensor in run.optimizer.tensors_to_save(only=only).items()}

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
            whole.setdefault(name, torch.full(box.shape, float("nan")))[box.box.slices()] = tensor.float()
    return whole


def average_of(history: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The average by its definition, in fp64."""
    average = {name: tensor.double() for name, tensor in history[0].items()}
    for weights in history[1:]:
        average = {name: DECAY * average[name] + (1 - DECAY) * tensor.double() for name, tensor in weights.items()}
    return average


def test_every_strategy_averages_as_one_rank_does():
    whole_batch = case_of({}).but(train={"micro_batch_size": GLOBAL_BATCH})
    (single,) = run_ranks(1, average_and_weights, whole_batch, threads=True)
    expected = average_of([assemble([weights]) for weights in single[1]])
    for number, sizes, options in LAYOUTS:
        parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
        results = run_ranks(number, average_and_weights, case_of(parallel), threads=True, **sizes)
        average = assemble([average for average, _ in results])
        assert average.keys() == expected.keys()
        for name, values in expected.items():
            assert (average[name] - values).abs().max() < 1e-2 * LR, (sizes, name)
            assert average[name].isfinite().all(), "every element is saved by some rank"


def test_the_average_is_of_fp32_weights_where_the_model_has_16_bits():
    parallel = {SHORT_NAMES["strategy"]: "optim_grads"}
    results = run_ranks(2, average_and_weights, case_of(parallel, **BF16), threads=True, strategy="optim_grads")
    expected = average_of([assemble([history[step] for _, history in results]) for step in range(STEPS + 1)])
    for name, values in assemble([average for average, _ in results]).items():
        assert torch.allclose(values.double(), expected[name], rtol=1e-6, atol=1e-7), name


def test_a_skipped_step_changes_no_average_and_a_load_without_one_begins_at_the_weights(tmp_path):
    folder, flags = tmp_path / "run", ("--train-iters", "2", "--lr", "0.1")
    with small_run(folder, *flags) as run:
        train(run, CheckpointHook())
    with pytest.raises(CheckpointError, match="no moving average.*: it was written by a run without --ema-decay"):
        open_model(folder, ema=True)
    assert main(["checkpoint", "average", str(folder), "--output", str(tmp_path / "mean")]) == 0
    with pytest.raises(CheckpointError, match="no moving average.*: it is an average or an import"):
        open_model(tmp_path / "mean", ema=True)
    with small_run(folder, *flags, "--train-iters", "4", "--ema-decay", "0.5") as run:
        weights, average = (next(iter(run.optimizer.tensors_to_save(only=kind).values())) for kind in ("model", "ema"))
        assert torch.equal(weights, average) and weights.data_ptr() != average.data_ptr()
        train(run, CheckpointHook())
        assert not torch.equal(average, weights)
        before = average.clone()
        run.optimizer.average.update(torch.tensor(True))
        assert torch.equal(average, before)
        saved = {box.name: tensor.clone() for box, tensor in run.optimizer.tensors_to_save(only="ema").items()}
    assert all(torch.equal(saved[f"ema/{name}"], weight) for name, weight in loaded_weights(folder, ema=True).items())
    assert not all(torch.equal(saved[f"ema/{name}"], weight) for name, weight in loaded_weights(folder).items())
    export_checkpoint(folder, tmp_path / "hf", ema=True)
    exported = load_checkpoint(tmp_path / "hf", tokenizer="bytes").model.state_dict()
    for name, weight in loaded_weights(folder, ema=True).items():
        rows = 260 if name.startswith("embedding") else len(weight)  # without padding
        assert torch.equal(exported[name][:rows], weight[:rows]), name
    with pytest.raises(CheckpointError, match="one set of weights"):
        open_model(tmp_path / "hf", ema=True)
    # --finetune takes the weights, not their average
    with small_run(tmp_path / "tuned", "--load", str(folder), "--finetune", "--ema-decay", "0.5") as run:
        parts = [run.optimizer.tensors_to_save(only=kind).values() for kind in ("model", "ema")]
        assert all(torch.equal(*pair) for pair in zip(*parts, strict=True))


def loaded_weights(folder: Path, *, ema: bool = False) -> dict[str, Tensor]:
    return dict(load_checkpoint(folder, tokenizer="bytes", ema=ema).model.named_parameters())


def test_evaluate_reads_the_average(tmp_path, capsys):
    from nanotrain.cli.trained import evaluate

    with small_run(tmp_path / "run", "--train-iters", "2", "--lr", "0.1", "--ema-decay", "0.9") as run:
        train(run, CheckpointHook())
    text = tmp_path / "text.txt"
    text.write_text("a few words to predict, and a few more")
    losses = []
    for more in ([], ["--ema"]):
        line = [str(tmp_path / "run"), "--data", str(text), "--tokenizer", "bytes", "--json", "--device", "cpu", *more]
        assert evaluate(line) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] != losses[1]
