"""A run of megatron-core moves in: its next five steps here are its own (pip install megatron-core).

Loss, gradient norm, main parameters and moments are compared within 1e-6 in fp32, on one rank and
in layouts that megatron-core did not have.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.store import read_manifest
from nanotrain.interop.megatron.import_run import import_megatron
from tests.harness import run_ranks
from tests.interop.megatron.cases import CASES, SAVED, STEPS, tokens
from tests.interop.megatron.training import train_cases
from tests.interop.moved_runs import TOLERANCE, assert_steps, go_on
from tests.laws.command_line import run_command_lines, saved_tensors, steps_of
from tests.laws.megatron_file import write_tokens

if find_spec("megatron") is None:  # only the ranks import it
    pytest.skip("needs megatron-core", allow_module_level=True)

# the layouts of two ranks in which a case goes on; all go on with one rank
TWO_RANKS = {
    "tp2": "pp",
    "pp2": "tp",
    "vpp2": "pp",
    "gpt2": "pp",
    "fully_reshardable": "pp",
    "dp_reshardable": "dp",
    "dp_reshardable_pp2": "tp",
    "moe_buckets": "ep",
    "moe": "ep",
    "gated": "dp",
    "mla": "pp",
    "mla_tp2": "tp",
    "deepseek": "pp",
    "te_moe": "tp",
    "bf16_buckets": "tp",
    "hybrid": "tp",
    "hybrid_buckets": "dp",
}
# those of `make layouts`
MORE_TWO_RANKS = {
    "tp2": "dp",
    "pp2": "dp",
    "vpp2": "tp",
    "gpt2": "dp",
    "fully_reshardable": "tp",
    "dp_reshardable": "tp",
    "dp_reshardable_pp2": "dp",
    "moe_buckets": "tp",
    "moe": "tp",
    "gated": "tp",
    "mla": "dp",
    "mla_tp2": "dp",
    "deepseek": "tp",
    "te_moe": "ep",
    "hybrid": "ep",
    "hybrid_buckets": "pp",
}
EXACT = [name for name, case in CASES.items() if not case.is_bf16]
Moved = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Moved:
    """The folder of all cases, imported, and megatron-core's losses and norms."""
    root = tmp_path_factory.mktemp("moved")
    names = list(CASES)
    rows = run_ranks(2, train_cases, root, names, threads=False)
    write_tokens(root / "tokens", tokens().numpy().astype(np.uint16), document_length=2000)
    for name in names:
        import_megatron(root / name, root / name / "imported")
        import_megatron(root / f"{name}-end", root / f"{name}-end" / "imported")
    theirs = {}
    for name in names:
        last = rows[1][name]  # the last pipeline stage has the loss
        theirs[name] = last if last[0][0] is not None else rows[0][name]
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
    imported = root / name / "imported"
    # with sharded parameters the folder of Megatron-LM itself is loaded
    source = root / name if layout == "dp" else imported
    return go_on(imported, root / name / layout, layout=layout, steps=STEPS, load=source)


@pytest.mark.parametrize("name", EXACT)
def test_the_next_steps_are_its_own(moved: Moved, name: str) -> None:
    for layout in ("one", TWO_RANKS[name]):
        assert_moved(moved, name, layout)


@pytest.mark.more_layouts
@pytest.mark.parametrize("name", MORE_TWO_RANKS)
def test_the_next_steps_are_its_own_in_another_layout(moved_further: Moved, name: str) -> None:
    assert_moved(moved_further, name, MORE_TWO_RANKS[name])


def assert_moved(moved: Moved, name: str, layout: str) -> None:
    """Assert that a run went on as megatron-core did: steps, main parameters and moments."""
    root, theirs = moved
    assert_steps(root / name / layout, theirs[name], first=SAVED + 1, last=STEPS)
    end = root / f"{name}-end" / "imported"
    expected = dict(read_global_tensors(end, list(read_manifest(end).tensors)))
    saved = saved_tensors(root / name / layout)
    assert saved.keys() == expected.keys()
    for key, value in expected.items():
        # it adds the same to all scores of a query: its gradient is rounding, which Adam scales up
        if key.endswith("attention.key.bias"):
            continue
        torch.testing.assert_close(saved[key], value, rtol=TOLERANCE, atol=TOLERANCE, msg=key)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.has_legacy_files])
def test_files_of_ranks_have_the_same_state(trained: Moved, name: str) -> None:
    """--ckpt-format torch: a file per model-parallel rank, of the same step, is the same to the
    bit.
    """
    root, _ = trained
    import_megatron(root / f"{name}-legacy", root / f"{name}-legacy" / "imported")
    folders = [root / name / "imported", root / f"{name}-legacy" / "imported"]
    manifests = [read_manifest(folder) for folder in folders]
    assert manifests[0].objects == manifests[1].objects
    assert manifests[0].config == manifests[1].config
    expected, found = (
        dict(read_global_tensors(folder, list(manifest.tensors)))
        for folder, manifest in zip(folders, manifests, strict=True)
    )
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", [name for name in CASES if name not in EXACT])
def test_bf16_weights_have_their_main_parameters(moved: Moved, name: str) -> None:
    root, theirs = moved
    imported = root / name / "imported"
    for key, value in read_global_tensors(imported, list(read_manifest(imported).tensors)):
        if key.startswith("model/") and key.endswith("query.weight"):
            assert not torch.equal(value, value.bfloat16().float()), key
    layouts = ["one"]
    if name in TWO_RANKS:
        layouts.append(TWO_RANKS[name])
    for layout in layouts:
        for step in steps_of(root / name / layout):
            loss, norm = theirs[name][step["step"] - 1]
            assert step["loss"] == pytest.approx(loss, rel=2e-3)
            assert step["grad_norm"] == pytest.approx(norm, rel=2e-2)
