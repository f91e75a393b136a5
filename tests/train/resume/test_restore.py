"""A run continues from the newest sound checkpoint, says which one and why, and what changed since
it was written.
"""

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.checkpoint import store
from nanotrain.checkpoint.manifest import DamagedCheckpoint, Manifest
from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.comm.collectives import barrier
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.errors import CheckpointError
from nanotrain.model.router_stats import router_tensors
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.resume.restore import changed_decay, changed_settings, restore
from nanotrain.train.resume.rollback import roll_back
from nanotrain.train.step import train_step
from tests.harness import run_ranks
from tests.train.small_run import small_run, train


def test_a_resumed_run_has_state_and_weights_and_names_changed_settings(tmp_path, logged):
    with small_run(tmp_path, "--train-iters", "2") as run:
        train(run, CheckpointHook())
        saved = {box.name: tensor.clone() for box, tensor in run.optimizer.state_tensors().items()}
    with small_run(tmp_path, "--train-iters", "3", "--lr", "0.5") as resumed:
        assert (resumed.state.step, resumed.state.consumed_samples) == (2, 2)
        loaded = {box.name: tensor for box, tensor in resumed.optimizer.state_tensors().items()}
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    assert any(
        "settings changed since the checkpoint was written: optim.lr" in line for line in logged
    )


def test_moments_of_another_dtype_are_converted_and_named(tmp_path, logged):
    low = (
        "--use-precision-aware-optimizer",
        "--exp-avg-dtype",
        "bf16",
        "--exp-avg-sq-dtype",
        "bf16",
    )
    with small_run(tmp_path, "--train-iters", "2", *low) as run:
        train(run, CheckpointHook())
        saved = {box.name: tensor.float() for box, tensor in run.optimizer.state_tensors().items()}
    with small_run(tmp_path, "--train-iters", "3") as resumed:
        loaded = {box.name: tensor for box, tensor in resumed.optimizer.state_tensors().items()}
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    assert any("precision.exp_avg_dtype bf16 -> fp32" in line for line in logged)


@pytest.mark.parametrize(("flag", "step"), [("--finetune", 0), ("--no-load-optim", 2)])
def test_weights_alone_can_be_loaded(tmp_path, flag, step):
    with small_run(tmp_path / "a", "--train-iters", "2") as run:
        train(run, CheckpointHook())
        saved = {box.name: tensor.clone() for box, tensor in run.optimizer.state_tensors().items()}
    with small_run(
        tmp_path / "b", "--load", str(tmp_path / "a"), flag, "--train-iters", "4"
    ) as started:
        assert (started.state.step, started.state.consumed_samples) == (step, step)
        assert started.optimizer.num_updates == 0
        for box, tensor in started.optimizer.state_tensors().items():
            expected = (
                torch.zeros_like(tensor) if box.name.startswith("optimizer/") else saved[box.name]
            )
            assert torch.equal(tensor, expected), box.name
        train(started)
        assert started.state.step == 4


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
@pytest.mark.parametrize("main_params", ["fp32", "fp16"])
def test_weights_alone_are_those_of_the_first_step_in_low_precision(tmp_path, flag, main_params):
    """The model reads another copy than the optimizer; main params in fp16 are a third, stored with
    scales.
    """
    low = ("--bf16", "--use-precision-aware-optimizer", "--main-params-dtype", main_params)
    with small_run(tmp_path / "a", "--train-iters", "1", *low) as run:
        train(run, CheckpointHook())
        saved = {box.name: tensor.clone() for box, tensor in run.optimizer.state_tensors().items()}
    with small_run(tmp_path / "b", "--load", str(tmp_path / "a"), flag, *low) as started:
        for name, weight in started.stages[0].named_parameters():
            assert torch.equal(weight, saved[f"model/{name}"].bfloat16()), name
        for box, tensor in started.optimizer.state_tensors().items():
            assert box.name.startswith("optimizer/") or torch.equal(tensor, saved[box.name]), (
                box.name
            )


@pytest.mark.parametrize(
    ("optim", "consequence"),
    [
        ({"lr_decay_style": "cosine", "lr_decay_iters": None}, "to which the learning rate decays"),
        ({"lr_decay_style": "cosine", "lr_decay_iters": 9}, None),
        ({"lr_decay_style": "cosine", "lr_decay_samples": 9}, None),
        ({"lr_decay_style": "constant", "lr_decay_iters": None}, None),
        ({"lr_decay_style": "constant", "weight_decay_incr_style": "constant"}, None),
        (
            {"lr_decay_style": "constant", "weight_decay_incr_style": "linear"},
            "over which the weight decay changes",
        ),
        (
            {"lr_decay_style": "cosine", "weight_decay_incr_style": "cosine"},
            "to which the learning rate decays and over which the weight decay changes",
        ),
    ],
)
def test_another_number_of_steps_is_named_with_what_depends_on_it(optim, consequence):
    changed = changed_decay(
        {"optim": optim, "train": {"train_iters": 3}}, {"optim": optim, "train": {"train_iters": 6}}
    )
    assert changed == ([f"train.train_iters 3 -> 6, {consequence}"] if consequence else [])


def test_changed_settings_are_those_that_change_the_loss():
    saved = {"train": {"seed": 1, "log_interval": 5}, "data": {"seq_length": 16, "num_workers": 2}}
    current = {"train": {"seed": 2, "log_interval": 9}, "data": {"seq_length": 8, "num_workers": 0}}
    assert changed_settings(saved, current) == ["data.seq_length 16 -> 8", "train.seed 1 -> 2"]
    assert changed_settings({}, current) == []


@pytest.mark.parametrize("section", ["model", "optim", "precision", "data"])
def test_every_setting_of_these_sections_is_compared(section):
    assert changed_settings({section: {"x": 1}}, {section: {"x": 2}}) == [f"{section}.x 1 -> 2"]


def test_changed_settings_of_the_model_and_its_sections_are_named():
    saved = {"model": {"norm_epsilon": 1e-5, "moe": {"router_topk": 2, "z_loss": 0.0}}}
    current = {"model": {"norm_epsilon": 1e-6, "moe": {"router_topk": 4, "z_loss": 0.0}}}
    assert changed_settings(saved, current) == [
        "model.moe.router_topk 2 -> 4",
        "model.norm_epsilon 1e-05 -> 1e-06",
    ]


SAVES = ("--train-iters", "3", "--save-interval", "1")


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("saved")
    with small_run(folder, *SAVES) as run:
        train(run, CheckpointHook())
    return folder


@pytest.fixture
def folder(saved_run: Path, tmp_path: Path) -> Path:
    """A copy of its checkpoints."""
    shutil.copytree(saved_run / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step-{number:08d}"


def flip(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)


def spoil_header(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes().replace(b'"data_offsets"', b'"data_offsetz"', 1))


def forge(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Damage that changes the objects of a manifest and signs it again."""

    def damage(path: Path) -> None:
        body = json.loads((path / "manifest.json").read_text())
        del body["sha256"]
        change(body["objects"])
        content = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
        body["sha256"] = hashlib.sha256(content).hexdigest()
        (path / "manifest.json").write_text(json.dumps(body))

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "payload": (flip, "crc32"),
    "header": (spoil_header, "without dtype, shape and two data_offsets"),
    "negative counter": (
        forge(lambda objects: objects["train"].update(step=-4)),
        "objects.train.step is -4",
    ),
    "other step": (
        forge(lambda objects: objects["train"].update(step=2)),
        "objects.train.step is 2",
    ),
    "unknown counter": (
        forge(lambda objects: objects["train"].update(steps=2)),
        "an unknown field 'steps'",
    ),
    "text": (
        forge(lambda objects: objects["optimizer"].update(num_updates="3")),
        "num_updates is '3'",
    ),
    "scale": (
        forge(lambda objects: objects["optimizer"]["loss_scale"].update(scale=0)),
        "loss_scale.scale is 0",
    ),
    "no state": (forge(lambda objects: objects.clear()), "objects.train is None"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_found_while_loading_falls_back_to_the_newest_sound_one(
    folder: Path, logged: list[str], damage: str
) -> None:
    spoil, reason = DAMAGE[damage]
    spoil(step(folder, 3))
    with small_run(folder, *SAVES) as run:
        assert run.state.step == 2
        loaded = {box.name: tensor.clone() for box, tensor in run.optimizer.state_tensors().items()}
        with small_run(folder.with_name("reference"), "--load", str(step(folder, 2))) as reference:
            expected = {
                box.name: tensor for box, tensor in reference.optimizer.state_tensors().items()
            }
            assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    (line,) = [line for line in logged if "cannot be loaded" in line]
    assert line.startswith("step-00000003 cannot be loaded") and line.endswith(
        "resuming from step-00000002"
    )
    assert reason in line


def test_finetune_starts_from_weights_without_a_state(folder: Path) -> None:
    forge(lambda objects: objects.clear())(step(folder, 3))
    with small_run(folder.with_name("other"), "--load", str(step(folder, 3)), "--finetune") as run:
        assert run.state.step == 0 and run.optimizer.state_dict()["num_updates"] == 0
        (saved,) = [
            tensor
            for name, tensor in read_global_tensors(step(folder, 3), ["model/final_norm.weight"])
        ]
        assert torch.equal(run.stages[0].final_norm.weight, saved)


def test_what_is_named_with_load_is_never_replaced(folder: Path) -> None:
    flip(step(folder, 3))
    for load in (step(folder, 3), folder):
        elsewhere = folder.with_name("elsewhere")
        with (
            pytest.raises(DamagedCheckpoint, match="crc32"),
            small_run(elsewhere, "--load", str(load)),
        ):
            pass
    # nor where the run has older ones
    with small_run(folder) as run, pytest.raises(DamagedCheckpoint, match="crc32"):
        restore(step(folder, 3), run.checkpointer, model=run, parts=run.parts, may_fall_back=False)


def test_a_run_without_a_sound_checkpoint_is_one_error_with_the_cure(folder: Path) -> None:
    for number in (1, 2, 3):
        flip(step(folder, number))
    with (
        pytest.raises(DamagedCheckpoint, match="no checkpoint in .*crc32.*--no-auto-resume"),
        small_run(folder),
    ):
        pass
    with small_run(folder, "--no-auto-resume") as run:
        assert run.state.step == 0


@pytest.mark.parametrize(("before", "after"), [(20, 64), (64, 20)])
def test_a_vocabulary_padded_to_another_number_of_rows_loads(
    tmp_path: Path, before: int, after: int
) -> None:
    padding = "--make-vocab-size-divisible-by"
    with small_run(tmp_path, *SAVES, padding, str(before)) as run:
        train(run, CheckpointHook())
        saved = {box.name: tensor.clone() for box, tensor in run.optimizer.state_tensors().items()}
    with small_run(tmp_path, *SAVES, padding, str(after)) as resumed:
        loaded = {box.name: tensor for box, tensor in resumed.optimizer.state_tensors().items()}
        for name, tensor in loaded.items():
            same = (
                min(260, len(tensor)) if "embedding.word" in name or "head" in name else len(tensor)
            )
            assert torch.equal(tensor[:same], saved[name][:same]), name
            assert not tensor[same:].any(), "padding is zero"


def test_another_vocabulary_is_another_model_even_with_as_many_rows(tmp_path: Path) -> None:
    with small_run(tmp_path, *SAVES, "--make-vocab-size-divisible-by", "300") as run:
        train(run, CheckpointHook())
    larger_vocabulary = ("--make-vocab-size-divisible-by", "290", "--vocab-size", "270")
    with (
        pytest.raises(CheckpointError, match="vocab_size 260 there, 270 here"),
        small_run(tmp_path, *larger_vocabulary),
    ):
        pass


def load_twice(ctx: ParallelContext, folder: Path, saved: Path) -> list[str]:
    """Resume and roll back a run with a moving average and fp8 histories, which the checkpoint
    lacks.

    Returns:
        The threads that read a manifest, on the first rank.
    """
    readers: list[str] = []
    read = store.read_manifest

    def count(path: Path) -> Manifest:
        readers.append(threading.current_thread().name)
        return read(path)

    settings = ("--ema-decay", "0.9", "--fp8-format", "e4m3", "--fp8-recipe", "delayed", "--bf16")
    with small_run(folder / str(ctx.rank), *settings, context=ctx) as run:
        if ctx.rank == 0:  # all ranks are threads of this process
            store.read_manifest = count
        barrier(ctx.control)
        checkpoint = step(saved, 2)
        restored = restore(
            checkpoint, run.checkpointer, model=run, parts=run.parts, may_fall_back=False
        )
        roll_back(run, checkpoint)
        assert (restored.step, run.state.step) == (2, 2)
    return readers


def test_only_the_first_rank_reads_the_manifest(saved_run: Path, tmp_path: Path) -> None:
    assert run_ranks(2, load_twice, tmp_path, saved_run)[0] == ["rank 0", "rank 0"]


EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "24", "--moe-router-enable-expert-bias"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-bias-update-rate", "0.25"),
)


@pytest.mark.parametrize("flags", [(), ("--no-load-optim",), ("--finetune",)], ids=str)
def test_every_load_begins_with_the_expert_biases_of_the_checkpoint(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """They are part of the function of the model, as weights are, and no state of a run."""
    folder = tmp_path / "run"
    with small_run(folder, *EXPERTS, *SAVES) as run:
        train(run, CheckpointHook())
        biases = {name: bias.clone() for name, bias in router_tensors(run.stages[0]).items()}
    assert biases and all(len(bias.unique()) > 1 for bias in biases.values())
    elsewhere = [str(tmp_path / "other"), "--load", str(folder), *flags] if flags else [str(folder)]
    with small_run(Path(elsewhere[0]), *EXPERTS, *elsewhere[1:]) as loaded:
        found = router_tensors(loaded.stages[0])
        assert found.keys() == biases.keys()
        for name, bias in biases.items():
            assert torch.equal(found[name], bias), name
        # and goes on from there: each bias moves by the rate or not at all
        train_step(loaded, loaded.batch_iterator.next())
        for name, bias in biases.items():
            moved = (router_tensors(loaded.stages[0])[name] - bias).abs()
            assert moved.max() == 0.25 and set(moved.tolist()) <= {0.0, 0.25}, name
