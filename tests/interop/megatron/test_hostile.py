"""Hostile and broken folders of Megatron-LM: one message, exit code 2, nothing executed or written."""

import json
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.cli.main import main
from nanotrain.interop.megatron.export_run import export_megatron
from tests.interop.dcp.test_pickles import Call
from tests.interop.megatron.cases import CASES, arguments_of
from tests.interop.megatron.models import LLAMA, write_checkpoint

ARGUMENTS = vars(arguments_of(CASES["tp2"], samples=24)) | {"vocab_size": 40, "qk_layernorm": True}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    write_checkpoint(folder / "run", LLAMA)
    export_megatron(folder / "run", folder / "megatron")
    write_common(folder / "megatron" / "iter_0000003", args=Namespace(**ARGUMENTS))
    return folder / "megatron"


def write_common(step: Path, **changes: Any) -> None:
    common = torch.load(step / "common.pt", weights_only=False)  # it is ours
    torch.save(common | changes, step / "common.pt")


def arguments(**changes: Any) -> Callable[[Path], None]:
    return lambda step: write_common(step, args=Namespace(**ARGUMENTS | changes))


def content(name: str, data: bytes) -> Callable[[Path], None]:
    def write(step: Path) -> None:
        (step / name).write_bytes(data)

    return write


def cut(name: str, share: float) -> Callable[[Path], None]:
    def write(step: Path) -> None:
        data = (step / name).read_bytes()
        (step / name).write_bytes(data[: int(len(data) * share)])

    return write


def replaced(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def write(step: Path) -> None:
        data = (step / name).read_bytes()
        assert old in data
        (step / name).write_bytes(data.replace(old, new))

    return write


def call(name: str, function: Any) -> Callable[[Path], None]:
    def write(step: Path) -> None:
        hostile = Call(function, f"touch {step.parent / 'made'}")
        if name == "common.pt":
            write_common(step, args=hostile)
        else:
            (step / name).write_bytes(pickle.dumps(hostile))

    return write


def without(name: str) -> Callable[[Path], None]:
    return lambda step: (step / name).unlink()


def deep_list(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def endless_list() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def unnamed_argument(step: Path) -> None:
    names = Namespace(**ARGUMENTS)
    vars(names)[3] = 3  # type: ignore[index]
    write_common(step, args=names)


def unnamed_tensor(step: Path) -> None:
    change_index(step, lambda tensors: tensors.update({3: next(iter(tensors.values()))}))


def embedding_without_dims(step: Path) -> None:
    def change(tensors: dict[Any, Any]) -> None:
        entry = tensors["embedding.word_embeddings.weight"]
        entry.size = torch.Size([])
        entry.chunks = []

    change_index(step, change)


def change_index(step: Path, change: Callable[[dict[Any, Any]], None]) -> None:
    index = pickle.loads((step / ".metadata").read_bytes())  # it is ours
    change(index.state_dict_metadata)
    (step / ".metadata").write_bytes(pickle.dumps(index))


FUNCTIONS = [os.system, eval, exec, os.popen, shutil.rmtree, print, __import__, open]
DATA = "__0_0.distcp"
BROKEN: list[Callable[[Path], None]] = [
    *(call("common.pt", function) for function in FUNCTIONS),
    *(call(".metadata", function) for function in FUNCTIONS),
    *(without(name) for name in ("common.pt", ".metadata", DATA, "metadata.json")),
    *(cut(name, 0.5) for name in ("common.pt", ".metadata", DATA, "metadata.json")),
    *(cut(name, 0.0) for name in ("common.pt", ".metadata", DATA, "metadata.json")),
    content(".metadata", pickle.dumps([1])),
    content("metadata.json", b"[" * 100_000),
    content("metadata.json", json.dumps({"sharded_backend": "zarr"}).encode()),
    content("metadata.json", json.dumps({"sharded_backend": "\x1b[2J"}).encode()),
    replaced(".metadata", b"__0_0.distcp", b"/etc/passwd\0"),
    replaced(".metadata", b"__0_0.distcp", b"../../../etc"),
    replaced(".metadata", b"embedding.word_embeddings", b"embedding.WORD_embeddings"),
    replaced(".metadata", b"decoder.final_layernorm", b"decoder.FINAL_layernorm"),
    arguments(num_layers=3),
    arguments(num_layers=-1),
    arguments(num_layers=10**9),
    arguments(hidden_size=10**12),
    arguments(hidden_size="wide"),
    arguments(num_attention_heads=0),
    arguments(ffn_hidden_size=33),
    arguments(swiglu=False),
    arguments(spec=["os", "system"]),
    arguments(position_embedding_type="learned_absolute"),
    arguments(position_embedding_type="\x1b[31m"),
    arguments(rotary_interleaved=True),
    arguments(num_experts=4),
    arguments(norm_epsilon=float("nan")),
    arguments(moe_layer_freq=[1] * 100_000, num_experts=2),
    arguments(window_size=[], hidden_dropout="${oc.env:HOME}"),
    arguments(normalization="${oc.env:HOME}"),
    arguments(hidden_size=torch.tensor([32, 32])),
    arguments(window_size=deep_list(200)),
    unnamed_argument,
    unnamed_tensor,
    embedding_without_dims,
    lambda step: write_common(step, optimizer=endless_list()),
    lambda step: write_common(step, args=None),
    lambda step: write_common(step, iteration=-3),
    lambda step: (step.parent / "latest_checkpointed_iteration.txt").write_text("../.."),
    lambda step: (step.parent / "latest_checkpointed_iteration.txt").unlink(),
]


def test_a_sound_folder_is_imported(sound: Path, tmp_path: Path) -> None:
    assert main(["checkpoint", "import-megatron", str(sound), str(tmp_path / "ours")]) == 0
    assert main(["checkpoint", "diff", str(sound.parent / "run"), str(tmp_path / "ours")]) in (0, 2)


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_broken_folder_is_one_message(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    folder = shutil.copytree(sound, tmp_path / "megatron")
    BROKEN[number](folder / "iter_0000003")
    assert main(["checkpoint", "import-megatron", str(folder), str(tmp_path / "ours")]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and "Traceback" not in error and "\x1b" not in error
    assert not (tmp_path / "ours").exists() and not (folder / "made").exists()
