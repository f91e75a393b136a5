"""Hostile and broken folders of torch.distributed.checkpoint: one message, exit code 2, nothing executed or written."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.cli.main import main
from tests.interop.dcp.opened import save_state, state_of
from tests.interop.dcp.programs import HEADS_FLAG
from tests.interop.dcp.test_pickles import Call

DATA = "__0_0.distcp"
WQ = "layers.0.attention.wq.weight"
STATE = f"optimizer.state.{WQ}"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "step-2"
    save_state(folder, state_of("titan_llama"))
    return folder


Change = Callable[[Path], None]


def content(name: str, data: bytes) -> Change:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return write


def cut(name: str, share: float) -> Change:
    def write(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return write


def replaced(name: str, old: bytes, new: bytes) -> Change:
    def write(folder: Path) -> None:
        data = (folder / name).read_bytes()
        assert old in data
        (folder / name).write_bytes(data.replace(old, new))

    return write


def call(function: Any) -> Change:
    def write(folder: Path) -> None:
        hostile = Call(function, f"touch {folder.parent / 'made'}")
        (folder / ".metadata").write_bytes(pickle.dumps(hostile))

    return write


def saved(**changes: Any) -> Change:
    """The same checkpoint with other values; None: without one."""

    def write(folder: Path) -> None:
        changed = state_of("titan_llama") | {
            name.replace("__", "."): value for name, value in changes.items()
        }
        shutil.rmtree(folder)
        content = {name: value for name, value in changed.items() if value is not None}
        save_state(folder, content)

    return write


def keyed(key: str, value: Any) -> Change:
    return saved(**{key.replace(".", "__"): value})


def hostile_object(folder: Path) -> None:
    """An object of the optimizer that runs a command where it is unpickled."""
    hostile = Call(os.system, f"touch {folder.parent / 'made'}")
    keyed("train_state.step", hostile)(folder)


def change_index(change: Callable[[Any], None]) -> Change:
    def write(folder: Path) -> None:
        index = pickle.loads((folder / ".metadata").read_bytes())  # it is ours
        change(index)
        (folder / ".metadata").write_bytes(pickle.dumps(index))

    return write


def other_dtype(index: Any) -> None:
    index.state_dict_metadata[WQ].properties.dtype = torch.bfloat16


def missing_chunk(index: Any) -> None:
    index.state_dict_metadata[WQ].chunks.pop()


# what is broken, and part of the message
BROKEN: dict[str, tuple[Change, str]] = {
    "no index": (lambda folder: (folder / ".metadata").unlink(), "has neither .metadata"),
    "no shard": (lambda folder: (folder / DATA).unlink(), f"{DATA} cannot be read"),
    "index of half the bytes": (cut(".metadata", 0.5), "cannot be read"),
    "empty index": (cut(".metadata", 0), "cannot be read"),
    "shard of half the bytes": (cut(DATA, 0.5), "its index needs"),
    "empty shard": (cut(DATA, 0), "cannot be read"),
    "zeros in the shard": (lambda f: (f / DATA).write_bytes(bytes((f / DATA).stat().st_size)), ""),
    "another pickle": (content(".metadata", pickle.dumps([1])), "cannot be read"),
    "os.system in the index": (call(os.system), "would call"),
    "eval in the index": (call(eval), "would call"),
    "a folder elsewhere": (replaced(".metadata", DATA.encode(), b"../../../etc"), "file name"),
    "another data type in the index": (change_index(other_dtype), "is torch.float32"),
    "a chunk is missing": (change_index(missing_chunk), "do not cover"),
    "a name twice": (
        keyed("layers.0._orig_mod.attention.wq.weight", torch.ones(16, 16)),
        "with and without a wrapper",
    ),
    "code in a counter": (hostile_object, "it would call"),
    "no word embedding": (saved(tok_embeddings__weight=None), "has 0 models"),
    "unknown tensors": (
        saved(layers__0__adapter__weight=torch.ones(2)),
        "unknown: layers.0.adapter",
    ),
    "a tensor is missing": (keyed(WQ, None), "missing"),
    "another shape": (keyed("layers.1.attention.wq.weight", torch.ones(8, 16)), "mis-shaped"),
    "integers": (keyed(WQ, torch.ones(16, 16, dtype=torch.int8)), "is torch.int8"),
    "moments of some weights": (keyed(f"{STATE}.exp_avg", None), "not that of the model"),
    "moments in another shape": (keyed(f"{STATE}.exp_avg_sq", torch.ones(8, 16)), "mis-shaped"),
    "another optimizer": (keyed(f"{STATE}.momentum_buffer", torch.ones(16, 16)), "AdamW is read"),
    "different updates": (
        keyed(f"{STATE}.step", torch.tensor(9.0)),
        "different numbers of updates",
    ),
    "half an update": (keyed(f"{STATE}.step", torch.tensor(0.5)), "must be a whole number"),
    "a step of no number": (keyed("train_state.step", "x"), "step is 'x'"),
    "amsgrad": (keyed(f"optimizer.param_groups.{WQ}.amsgrad", True), "has amsgrad"),
    "decay in the gradient": (
        keyed(f"optimizer.param_groups.{WQ}.decoupled_weight_decay", False),
        "Adam, not AdamW",
    ),
    "three betas": (keyed(f"optimizer.param_groups.{WQ}.betas", (0.9, 0.9, 0.9)), "must have two"),
    "a rate that is no number": (
        keyed(f"optimizer.param_groups.{WQ}.lr", float("nan")),
        "lr is nan",
    ),
    "terminal codes in a name": (saved(**{"layers__0__\x1b[2J": torch.ones(2)}), "unknown"),
    "a layer of a huge number": (saved(layers__999999999__x=torch.ones(2)), "1,000,000,000 layers"),
    "two models": (saved(ema__model__tok_embeddings__weight=torch.ones(2, 2)), "has 2 models"),
}


def import_folder(folder: Path, output: Path, *more: str) -> int:
    words = ["checkpoint", "import-dcp", str(folder), str(output), *HEADS_FLAG.split(), *more]
    return main(words)


def test_a_sound_folder_is_imported(sound: Path, tmp_path: Path) -> None:
    assert import_folder(sound, tmp_path / "ours") == 0
    assert import_folder(sound.parent, tmp_path / "newest") == 0
    assert main(["checkpoint", "diff", str(tmp_path / "ours"), str(tmp_path / "newest")]) == 0


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_message(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    change, message = BROKEN[name]
    folder = shutil.copytree(sound, tmp_path / "run" / "step-2")
    change(folder)
    assert import_folder(folder, tmp_path / "ours") == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and "Traceback" not in error and "\x1b" not in error
    assert message in " ".join(error.split())
    assert not (tmp_path / "ours").exists() and not (folder.parent / "made").exists()
