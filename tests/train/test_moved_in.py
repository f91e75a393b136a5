"""`--load` of a folder of Megatron-LM: it is imported into the run folder once, and trained on."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from nanotrain.cli.main import main
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.config.schema import with_values
from nanotrain.errors import CheckpointError
from nanotrain.interop.megatron.export_run import export_megatron
from nanotrain.interop.megatron.import_run import import_megatron
from nanotrain.runs.folder import RunFolder
from nanotrain.train import moved_in
from nanotrain.train.inputs import check_local_files
from nanotrain.train.moved_in import check_megatron_source, find_megatron_source, import_name
from tests.harness import run_ranks
from tests.interop.megatron.cases import CASES, arguments_of
from tests.interop.megatron.legacy_files import FILE, RANK, write_legacy
from tests.interop.megatron.models import LLAMA, write_checkpoint
from tests.laws.command_line import run_command_lines, steps_of
from tests.laws.megatron_file import write_tokens


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Megatron-LM without optimizer state, beside a corpus."""
    root = tmp_path_factory.mktemp("moved_in")
    write_checkpoint(root / "run", LLAMA)
    export_megatron(root / "run", root / "megatron")
    common = root / "megatron" / "iter_0000003" / "common.pt"
    arguments = vars(arguments_of(CASES["tp2"], samples=24))
    named = Namespace(**arguments | {"vocab_size": 40, "qk_layernorm": True})
    torch.save(torch.load(common, weights_only=True) | {"args": named}, common)
    corpus = np.random.default_rng(1).integers(0, 40, 2000).astype(np.uint16)
    write_tokens(root / "tokens", corpus, document_length=2000)
    return root / "megatron"


def line(megatron: Path, run_dir: Path) -> list[str]:
    words = ["--load", str(megatron), "--finetune", "--use-checkpoint-args"]
    words += ["--data-path", str(megatron.parent / "tokens"), "--split", "1,0,0"]
    words += ["--run-dir", str(run_dir), "--train-iters", "2", "--global-batch-size", "4"]
    return [*words, "--eval-interval", "0", "--no-report", "--log-interval", "1"]


def test_all_ranks_start_from_one_import(megatron: Path, tmp_path: Path) -> None:
    two = tmp_path / "two"
    run_ranks(2, run_command_lines, [*line(megatron, two), "--tensor-model-parallel-size", "2"])
    (imported,) = (two / "imported").iterdir()
    assert imported.name.startswith("iter_0000003-")
    written = imported.stat().st_mtime_ns
    losses = [step["loss"] for step in steps_of(two)]
    again = ["--no-auto-resume"]  # fine-tuning goes on from its own checkpoints otherwise
    run_ranks(1, run_command_lines, [*line(megatron, two), *again])
    assert [path.stat().st_mtime_ns for path in (two / "imported").iterdir()] == [written]
    assert len(losses) == 2
    assert [step["loss"] for step in steps_of(two)] == pytest.approx(losses, rel=1e-6)


def test_a_broken_folder_is_one_message(
    megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "latest_checkpointed_iteration.txt").write_text("../..")
    words = line(megatron, tmp_path / "runs")
    words[1] = str(tmp_path / "broken")
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and "takes a step, or release" in error
    assert not (tmp_path / "runs" / "imported").exists()


def test_an_error_names_the_flag_of_the_trainer(megatron: Path, tmp_path: Path) -> None:
    step = megatron / "iter_0000003"
    arguments = vars(arguments_of(CASES["dp_reshardable"], samples=24))
    named = arguments | {"vocab_size": 40, "qk_layernorm": True}
    files = write_legacy(step, tmp_path / "files", arguments=named)
    file = files / "iter_0000003" / RANK / FILE
    torch.save(torch.load(file, weights_only=False) | {"opt_param_scheduler": [3]}, file)
    config = with_values(Config(), {"checkpoint.load": str(files)})
    with pytest.raises(CheckpointError, match="weights alone, with --no-load-optim"):
        check_megatron_source(config, files)
    check_megatron_source(with_values(config, {"checkpoint.load_optim": False}), files)


def test_the_own_checkpoints_of_a_run_come_first(megatron: Path, tmp_path: Path) -> None:
    """A launch script of Megatron-LM saves where it loads: its folder is the run folder."""
    config = with_values(Config(), {"train.run_dir": str(megatron)})
    folder = RunFolder.of(config)
    assert find_megatron_source(config, folder) == megatron
    off = with_values(config, {"checkpoint.auto_resume": False})
    assert find_megatron_source(off, folder) is None
    named = with_values(config, {"checkpoint.load": str(megatron.parent / "run")})
    assert find_megatron_source(named, folder) is None  # a run of ours
    address = with_values(config, {"checkpoint.load": "s3://bucket/megatron"})
    assert find_megatron_source(address, folder) is None
    own = RunFolder.of(with_values(config, {"train.run_dir": str(megatron.parent / "run")}))
    assert find_megatron_source(config, own) is None


def test_another_step_or_other_weights_are_imported_anew(megatron: Path, tmp_path: Path) -> None:
    step = megatron / "iter_0000003"
    name = import_name(step, optim=True)
    assert name == import_name(step, optim=True) != import_name(step, optim=False)
    (step / ".importing").touch()  # the run folder may be the same one
    assert import_name(step, optim=True) == name
    (step / ".importing").unlink()
    (step / "metadata.json").touch()
    assert import_name(step, optim=True) != name
    rank = tmp_path / RANK
    rank.mkdir()
    (rank / FILE).write_bytes(b"old")
    before = import_name(tmp_path, optim=True)
    (rank / FILE).write_bytes(b"a new save of the same step")  # the folder stays as it is
    assert import_name(tmp_path, optim=True) != before


def weights_of(megatron: Path, run_dir: Path) -> tuple[Config, RunFolder]:
    values = {"checkpoint.load": str(megatron), "checkpoint.load_optim": False}
    config = with_values(Config(), values | {"train.run_dir": str(run_dir)})
    return config, RunFolder.of(config)


def test_every_start_says_what_was_imported(
    megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank alone logs, and often waits for another one that imports."""
    texts: list[str] = []
    monkeypatch.setattr(moved_in.log, "info", lambda text, *words: texts.append(text % words))
    config, folder = weights_of(megatron, tmp_path / "run")
    started = moved_in.with_imported_start(config, folder)
    first = list(texts)
    texts.clear()
    assert moved_in.with_imported_start(config, folder) == started
    assert not started.checkpoint.allow_data_changes  # what comes later is checked as always
    assert "is imported first" in first[0] and "was imported before" in texts[0]
    assert first[1:] == texts[1:] and any("optimizer: none" in text for text in texts)


def test_another_machine_that_is_first_is_no_error(
    megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File locks of some shared file systems hold on one machine only."""
    imported = import_megatron

    def import_behind_another(step: Path, target: Path, *, optim: bool) -> str:
        imported(step, target, optim=optim)
        return imported(step, target, optim=optim)

    monkeypatch.setattr(moved_in, "import_megatron", import_behind_another)
    config, folder = weights_of(megatron, tmp_path / "run")
    started = moved_in.with_imported_start(config, folder)
    assert started.checkpoint.load is not None and Path(started.checkpoint.load).is_dir()
    (megatron / "iter_0000003" / "metadata.json").touch()
    monkeypatch.setattr(moved_in, "import_megatron", fail)
    with pytest.raises(CheckpointError, match="a chunk is damaged"):
        moved_in.with_imported_start(config, folder)
    assert len(list((tmp_path / "run" / "imported").iterdir())) == 1


def fail(*_: object, **__: object) -> str:
    raise CheckpointError("a chunk is damaged", why="", fix="")


def test_a_fine_tuning_may_go_on_from_the_folder_that_it_saves_in(megatron: Path) -> None:
    """Its weights are those of Megatron-LM until it has checkpoints of its own."""
    words = ["--sft", "--use-checkpoint-args", "--save", str(megatron), "--load", str(megatron)]
    words += ["--data-path", str(megatron.parent / "tokens"), "--split", "1,0,0"]
    check_local_files(load([*words, "--train-iters", "2", "--no-load-optim"]))
