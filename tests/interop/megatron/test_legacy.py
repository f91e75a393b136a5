"""Files of ranks of Megatron-LM: every tensor and its state is found, and a broken one is an error.

That all layouts have the state of `torch_dist` is held by `test_import_run.py`.
"""

import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.store import read_manifest
from nanotrain.cli.main import main
from nanotrain.errors import CheckpointError
from nanotrain.interop.megatron import legacy
from nanotrain.interop.megatron.export_run import export_megatron
from nanotrain.interop.megatron.folder import read_common_state
from nanotrain.interop.megatron.import_run import import_megatron
from nanotrain.interop.megatron.legacy import (
    LegacyFolder,
    Sizes,
    all_ranks,
    count_experts,
    expert_key,
    shard_pieces,
)
from nanotrain.spec.boxes import Box
from tests.interop.dcp.test_pickles import Call
from tests.interop.megatron.cases import CASES, arguments_of
from tests.interop.megatron.legacy_files import FILE, RANK, write_legacy
from tests.interop.megatron.models import LLAMA, write_checkpoint

ARGUMENTS = vars(arguments_of(CASES["tp2"], samples=24)) | {"vocab_size": 40, "qk_layernorm": True}
ARGUMENTS |= {"tensor_model_parallel_size": 1}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("legacy")
    write_checkpoint(root / "run", LLAMA)
    export_megatron(root / "run", root / "megatron")
    step = root / "megatron" / "iter_0000003"
    return write_legacy(step, root / "legacy", arguments=ARGUMENTS)


def test_weights_and_moments_are_found(sound: Path, tmp_path: Path) -> None:
    lines = import_megatron(sound, tmp_path / "ours")
    assert "main parameters and moments after 7 updates, step 3, 24 samples" in lines
    manifest = read_manifest(tmp_path / "ours")
    values = dict(read_global_tensors(tmp_path / "ours", list(manifest.tensors)))
    weights = [name for name in values if name.startswith("model/")]
    assert len(values) == 3 * len(weights)
    for name in weights:
        own = name.removeprefix("model/")
        assert torch.equal(values[f"optimizer/exp_avg/{own}"], values[name] * 10)
        assert torch.equal(values[f"optimizer/exp_avg_sq/{own}"], values[name] * 100)


def test_stored_arguments_are_those_of_the_first_rank(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = read_common_state(sound / "iter_0000003").arguments
    assert arguments == LegacyFolder(sound / "iter_0000003").common.arguments
    assert arguments["num_layers"] == LLAMA.num_layers
    assert main(["audit", str(sound)]) == 0
    assert "script" in capsys.readouterr().out


def test_a_folder_of_no_rank_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_first").mkdir()
    (tmp_path / "mp_rank_first" / FILE).touch()
    with pytest.raises(CheckpointError, match="no folder mp_rank_NN"):
        LegacyFolder(tmp_path)


def test_many_experts_are_counted_once(monkeypatch: pytest.MonkeyPatch, sound: Path) -> None:
    """Counting looks at every tensor: for each of 10,000 it would take minutes."""
    calls: list[int] = []

    def count(names: Mapping[str, Any]) -> int:
        calls.append(len(names))
        return count_experts(names)

    monkeypatch.setattr(legacy, "count_experts", count)
    LegacyFolder(sound / "iter_0000003")
    assert len(calls) == 1


def test_shards_are_boxes_of_a_tensor() -> None:
    whole = torch.arange(48.0).reshape(12, 4)
    for dim in (0, 1):
        pieces = list(shard_pieces(whole.chunk(2, dim), dim=dim, num_parts=1))
        for piece in pieces:
            assert torch.equal(whole[piece.box.slices()], piece.values)
    # ranks have their rows of the gate, then those of the other projection
    gate, up = whole[:6], whole[6:]
    shards = [torch.cat([gate[:3], up[:3]]), torch.cat([gate[3:], up[3:]])]
    pieces = list(shard_pieces(shards, dim=0, num_parts=2))
    assert len(pieces) == 4
    for piece in pieces:
        assert torch.equal(whole[piece.box.slices()], piece.values)
    with pytest.raises(ValueError, match="shards have the shapes"):
        list(shard_pieces([whole, whole[:6]], dim=0, num_parts=1))
    with pytest.raises(ValueError, match="is not 2 parts"):
        list(shard_pieces([whole[:5], whole[:5]], dim=0, num_parts=2))


def test_experts_have_their_number_among_all() -> None:
    layer = "decoder.layers.3.mlp.experts."
    names = {f"{layer}local_experts.{number}.linear_fc1.weight": 0 for number in range(4)}
    assert count_experts(names) == 4
    assert count_experts({f"{layer}linear_fc2.weight11": 0}) == 12  # grouped GEMM
    assert expert_key(f"{layer}local_experts.1.linear_fc1.weight", rank=2, num_local=4) == (
        f"{layer}experts.9.linear_fc1.weight",
        True,
    )
    assert expert_key(f"{layer}linear_fc2.bias0", rank=1, num_local=4) == (
        f"{layer}experts.4.linear_fc2.bias",
        True,
    )
    shared = "decoder.layers.3.mlp.shared_experts.linear_fc1.weight"
    assert expert_key(shared, rank=1, num_local=4) == (shared, False)


def test_a_layout_is_that_of_the_arguments() -> None:
    sizes = Sizes.from_arguments(
        {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 3, "swiglu": True}
    )
    assert (sizes.is_gated, sizes.is_tied, len(list(all_ranks(sizes)))) == (True, True, 6)
    with pytest.raises(ValueError, match="experts on 4 tensor-parallel ranks"):
        Sizes.from_arguments({"expert_tensor_parallel_size": 4})


def test_a_box_that_no_file_has_is_an_error(sound: Path) -> None:
    folder = LegacyFolder(sound / "iter_0000003")
    key = "output_layer.weight"
    assert folder.read(key, Box((3, 2), (5, 4))).shape == (2, 2)
    folder._pieces[key] = []
    with pytest.raises(CheckpointError, match="do not cover 'output_layer.weight'"):
        folder.read(key, Box((3, 2), (5, 4)))


def change(function: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def write(step: Path) -> None:
        state = torch.load(step / RANK / FILE, weights_only=False)  # it is ours
        function(state)
        torch.save(state, step / RANK / FILE)

    return write


def arguments(**changes: Any) -> Callable[[Path], None]:
    return change(lambda state: state.update(args=Namespace(**ARGUMENTS | changes)))


def cut(share: float) -> Callable[[Path], None]:
    def write(step: Path) -> None:
        data = (step / RANK / FILE).read_bytes()
        (step / RANK / FILE).write_bytes(data[: int(len(data) * share)])

    return write


def call(function: Any) -> Callable[[Path], None]:
    def write(step: Path) -> None:
        hostile = Call(function, f"touch {step.parent / 'made'}")
        change(lambda state: state.update(rng_state=[hostile]))(step)

    return write


def endless(state: dict[str, Any]) -> None:
    values: list[Any] = []
    values.append(values)
    state["optimizer"] = values


def distributed(step: Path) -> None:
    change(lambda state: state["optimizer"].pop("state"))(step)
    (step / RANK / "distrib_optim.pt").write_bytes(b"")


WEIGHT = "decoder.layers.1.self_attention.linear_proj.weight"
BROKEN: list[Callable[[Path], None]] = [
    *(call(function) for function in (os.system, eval, exec, shutil.rmtree, print, open)),
    *(cut(share) for share in (0.0, 0.5, 0.99)),
    lambda step: (step / RANK / FILE).unlink(),
    lambda step: (step / RANK / FILE).write_bytes(b"\x80\x02." * 10),
    lambda step: (step / RANK).rename(step / "mp_rank_01"),
    lambda step: (step / "mp_rank_01").mkdir(),
    distributed,
    arguments(tensor_model_parallel_size=2),
    arguments(pipeline_model_parallel_size=2),
    arguments(tensor_model_parallel_size=10**9),
    arguments(virtual_pipeline_model_parallel_size=2),
    arguments(expert_tensor_parallel_size=2),
    arguments(num_layers=3),
    arguments(hidden_size="wide"),
    change(lambda state: state.update(args=None)),
    change(lambda state: state.update(iteration=-1)),
    change(lambda state: state.pop("model")),
    change(lambda state: state.update(model=[1])),
    change(lambda state: state.update(model={"language_model": {}})),
    change(lambda state: state["model"].update({3: torch.zeros(3)})),
    change(lambda state: state["model"].pop(WEIGHT)),
    change(lambda state: state["model"].update({WEIGHT: torch.zeros(3, 3)})),
    change(lambda state: state["model"].update({WEIGHT: torch.zeros(16, 16).to_sparse()})),
    change(lambda state: state["model"].update({WEIGHT: torch.zeros(())})),
    change(lambda state: state["model"].update({"mlp.experts.weight1": torch.zeros(16, 16)})),
    change(lambda state: state["optimizer"]["param_groups"][0]["params"].pop()),
    change(lambda state: state["optimizer"]["param_groups"][0].update(params=None)),
    change(lambda state: state["optimizer"]["param_groups"][0].update(step=8)),
    change(lambda state: state["optimizer"]["param_groups"][0].update(step="many")),
    change(lambda state: state["optimizer"]["state"][0].update(exp_avg=torch.zeros(2))),
    change(lambda state: state["optimizer"]["state"][0].update(exp_avg=3)),
    change(lambda state: state["optimizer"]["state"].pop(0)),
    change(lambda state: state.update(optimizer={"optimizer": state["optimizer"]} | MAINS)),
    change(endless),
    lambda step: torch.save([1], step / RANK / FILE),
]
MAINS = {"fp32_from_fp16_params": [[torch.zeros(1)], []]}


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_broken_file_is_one_message(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    folder = shutil.copytree(sound, tmp_path / "megatron")
    BROKEN[number](folder / "iter_0000003")
    assert main(["checkpoint", "import-megatron", str(folder), str(tmp_path / "ours")]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and "Traceback" not in error
    assert not (tmp_path / "ours").exists() and not (folder / "made").exists()
