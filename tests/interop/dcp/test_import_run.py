"""Runs of torchtitan and of programs with FSDP2 move in: their next five steps here are their own.

Loss, gradient norm, weights and moments are compared within 1e-6 in fp32, on one rank and in two
layouts that the programs did not have.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanotrain.checkpoint import write
from nanotrain.checkpoint.plan import split_box
from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.store import read_manifest
from nanotrain.config.flags import parse
from nanotrain.interop.dcp.import_run import import_dcp
from nanotrain.interop.dcp.tensors import TorchDistFolder
from nanotrain.spec.boxes import Box
from tests.harness import run_ranks
from tests.interop.dcp.opened import save_state, state_of
from tests.interop.dcp.programs import (
    CASES,
    HEADS,
    HIDDEN,
    SAVED,
    STEPS,
    VOCAB_SIZE,
    tokens,
    train_cases,
)
from tests.interop.moved_runs import TOLERANCE, assert_steps, go_on
from tests.laws.command_line import run_command_lines, saved_tensors
from tests.laws.megatron_file import write_tokens

CHUNK_BYTES = 512
# the layouts of two ranks in which a case goes on; all go on with one rank
TWO_RANKS = {
    "titan_llama": "pp",
    "titan_new_llama": "tp",
    "titan_qwen3": "dp",
    "titan_deepseek": "ep",
    "fsdp_tied_llama": "tp",
    "app_qwen3": "pp",
    "deepseek": "tp",
}
# those of `make layouts`
MORE_TWO_RANKS = {
    "titan_llama": "tp",
    "titan_new_llama": "dp",
    "titan_qwen3": "tp",
    "titan_deepseek": "pp",
    "fsdp_tied_llama": "dp",
    "app_qwen3": "dp",
    "deepseek": "ep",
}
Moved = tuple[Path, dict[str, Any]]


def import_case(root: Path, name: str, step: int) -> Path:
    """Import one save of a case."""
    folder = root / name / f"imported-{step}"
    import_dcp(
        root / name / f"step-{step}",
        folder,
        line=parse(CASES[name].flags.split()),
        model_folder=root / name if CASES[name].has_config else None,
    )
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Moved:
    """The folder of all cases, imported, and the programs' losses and norms."""
    root = tmp_path_factory.mktemp("moved")
    names = list(CASES)
    theirs = {}
    for num_ranks in (1, 2):
        own = [name for name in names if CASES[name].num_ranks == num_ranks]
        theirs |= run_ranks(num_ranks, train_cases, root, own, threads=False)[0]
    write_tokens(root / "tokens", tokens().numpy().astype(np.uint16), document_length=2000)
    for name in names:
        import_case(root, name, SAVED)
        import_case(root, name, STEPS)
    return root, theirs


@pytest.fixture(scope="module")
def moved(trained: Moved) -> Moved:
    """All cases trained on, on one rank and on two."""
    root, _ = trained
    run_ranks(1, run_command_lines, *(line(root, name, "one") for name in CASES))
    both = [line(root, name, layout) for name, layout in TWO_RANKS.items()]
    run_ranks(2, run_command_lines, *both)
    return trained


@pytest.fixture(scope="module")
def moved_further(trained: Moved) -> Moved:
    """All cases trained on in the layouts of `make layouts`."""
    root, _ = trained
    both = [line(root, name, layout) for name, layout in MORE_TWO_RANKS.items()]
    run_ranks(2, run_command_lines, *both)
    return trained


def line(root: Path, name: str, layout: str) -> list[str]:
    """The command line with which an imported run goes on."""
    imported = root / name / f"imported-{SAVED}"
    return go_on(imported, root / name / layout, layout=layout, steps=STEPS)


@pytest.mark.parametrize("name", CASES)
def test_the_next_steps_are_its_own(moved: Moved, name: str) -> None:
    for layout in ("one", TWO_RANKS[name]):
        assert_moved(moved, name, layout)


@pytest.mark.more_layouts
@pytest.mark.parametrize("name", CASES)
def test_the_next_steps_are_its_own_in_another_layout(moved_further: Moved, name: str) -> None:
    assert_moved(moved_further, name, MORE_TWO_RANKS[name])


def assert_moved(moved: Moved, name: str, layout: str) -> None:
    """Assert that a run went on as the program did: steps, weights and moments."""
    root, theirs = moved
    assert_steps(root / name / layout, theirs[name], first=SAVED + 1, last=STEPS)
    end = root / name / f"imported-{STEPS}"
    expected = dict(read_global_tensors(end, list(read_manifest(end).tensors)))
    saved = saved_tensors(root / name / layout)
    assert saved.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(saved[key], value, rtol=TOLERANCE, atol=TOLERANCE, msg=key)


def test_no_read_is_much_larger_than_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of queries and keys change places within a head, so a read may have a head more."""
    save_state(tmp_path / "dcp", state_of("titan_llama"))
    read, sizes = TorchDistFolder.read, []

    def counted(folder: TorchDistFolder, key: str, box: Box) -> torch.Tensor:
        values = read(folder, key, box)
        sizes.append(values.nbytes)
        return values

    monkeypatch.setattr(TorchDistFolder, "read", counted)
    monkeypatch.setattr(write, "split_box", partial(split_box, limit=CHUNK_BYTES))
    flags = f"{CASES['titan_llama'].flags} --untie-embeddings-and-output-weights"
    import_dcp(tmp_path / "dcp", tmp_path / "ours", line=parse(flags.split()))
    head_bytes = 4 * HIDDEN * HIDDEN // HEADS
    assert max(sizes) <= CHUNK_BYTES + head_bytes < 4 * VOCAB_SIZE * HIDDEN


def test_weights_in_bf16_are_said(tmp_path: Path) -> None:
    state = {}
    for name, value in state_of("titan_llama").items():
        is_weight = isinstance(value, torch.Tensor) and value.ndim > 0
        state[name] = value.bfloat16() if is_weight and "optimizer" not in name else value
    save_state(tmp_path / "dcp", state)
    line = parse(CASES["titan_llama"].flags.split())
    text = import_dcp(tmp_path / "dcp", tmp_path / "ours", line=line)
    assert "21 tensors in fp32" in text and "(tensors there: 42 in fp32, 21 in bf16)" in text
    name = "model/final_norm.weight"
    ((_, value),) = read_global_tensors(tmp_path / "ours", [name])
    assert torch.equal(value, state["norm.weight"].float())
