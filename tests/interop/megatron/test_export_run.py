"""A run of ours goes on in megatron-core: its next five steps there are ours (pip install
megatron-core).

Loss, gradient norm, main parameters and moments are compared within 1e-6 in fp32. What
megatron-core saves then is imported again, which compares names, shapes and counters too.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.store import find_checkpoint, read_manifest
from nanotrain.config.load import to_yaml
from nanotrain.errors import CheckpointError
from nanotrain.interop.megatron.arguments import config_of_arguments
from nanotrain.interop.megatron.export_run import export_megatron
from nanotrain.interop.megatron.export_state import StateOptions
from nanotrain.interop.megatron.import_run import import_megatron
from tests.harness import run_ranks
from tests.interop.megatron.cases import (
    CASES,
    ROWS,
    SAVED,
    STEPS,
    Case,
    arguments_of,
    tokens,
)
from tests.interop.megatron.models import GATED, HYBRID, LLAMA
from tests.interop.megatron.training import continue_cases
from tests.laws.command_line import run_command_lines, saved_tensors, steps_of
from tests.laws.megatron_file import write_tokens

if find_spec("megatron") is None:  # only the ranks import it
    pytest.skip("needs megatron-core", allow_module_level=True)

TOLERANCE = 1e-6
MODELS = {"llama": CASES["tp2"], "gpt2": CASES["gpt2"], "moe": CASES["moe"]}
MODELS |= {"bf16": CASES["bf16"], "mla": CASES["mla"], "mtp": CASES["deepseek"]}
MODELS |= {"mamba": CASES["hybrid_buckets"], "mamba_moe": CASES["hybrid"]}
ONE = {"tp": 1, "pp": 1, "ep": 1}
FORM = "fully_reshardable"
# how megatron-core goes on, by the model: two ranks
LAYOUTS: dict[str, dict[str, Case]] = {
    "llama": {
        "tp2": replace(MODELS["llama"], **ONE | {"tp": 2}),
        "pp2": replace(MODELS["llama"], **ONE | {"pp": 2}),
        "dp2-distributed": replace(MODELS["llama"], **ONE, form=FORM),
        "tp2-distributed": replace(MODELS["llama"], **ONE | {"tp": 2}, form=FORM),
    },
    "gpt2": {
        "tp2": replace(MODELS["gpt2"], **ONE | {"tp": 2}),
        "pp2-distributed": replace(MODELS["gpt2"], **ONE | {"pp": 2}, form=FORM),
    },
    "moe": {
        "ep2-distributed": replace(MODELS["moe"], **ONE | {"ep": 2}, form=FORM),
        "dp2": replace(MODELS["moe"], **ONE),
    },
    "mla": {"tp2": replace(MODELS["mla"], **ONE | {"tp": 2})},
    "mtp": {
        "pp2": replace(MODELS["mtp"], **ONE | {"pp": 2}, form=None),
        "ep2-distributed": replace(MODELS["mtp"], **ONE | {"ep": 2}, form=FORM),
    },
    "mamba": {"tp2-distributed": replace(MODELS["mamba"], **ONE | {"tp": 2}, form=FORM)},
    "mamba_moe": {"pp2": replace(MODELS["mamba_moe"], **ONE | {"pp": 2})},
    "bf16": {
        "tp2": replace(MODELS["bf16"], **ONE | {"tp": 2}),
        "dp2-distributed": replace(MODELS["bf16"], **ONE, form=FORM),
    },
}
# megatron-core 0.16.1 reads this form right, but where it has several buckets (a tied embedding is one
# on pipeline stages) it leaves out their padding when it saves, so the state of the last one is shifted
SHIFTED = ("gpt2", "pp2-distributed")
# models of other kinds, which go out and come in again
OTHERS = {"hybrid": HYBRID, "gated": GATED, "fp16": LLAMA}
# overflows of the first steps skip updates, and the loss scale counts them
FP16 = ["--params-dtype", "fp16", "--initial-loss-scale", str(2**22)]
PAIRS = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of our runs, and megatron-core's losses and norms after it has loaded them."""
    root = tmp_path_factory.mktemp("moved")
    write_tokens(root / "tokens", tokens().numpy().astype(np.uint16), document_length=2000)
    run_ranks(1, run_command_lines, *(line(root, name) for name in [*MODELS, *OTHERS]))
    folders, cases = {}, {}
    for model, layout in PAIRS:
        case = LAYOUTS[model][layout]
        name = f"{model}-{layout}"
        folders[name], cases[name] = root / name, case
        export_megatron(
            root / model / "checkpoints" / f"step-{SAVED:08d}",
            folders[name],
            options=StateOptions(case.ep, has_torch_adam=True),
        )
    rows = run_ranks(2, continue_cases, folders, cases, threads=False)
    theirs = {}
    for name in cases:
        last = rows[1][name]  # the last pipeline stage has the loss
        theirs[name] = last if last[0][0] is not None else rows[0][name]
    return root, theirs


def line(root: Path, name: str) -> list[str]:
    """The command line of a run of ours on one rank."""
    arguments = vars(arguments_of(MODELS.get(name, MODELS["llama"]), samples=0))
    config = config_of_arguments(arguments, num_rows=ROWS).config
    if name in OTHERS:
        config = replace(config, model=OTHERS[name])
    file = root / f"{name}.yaml"
    file.write_text(to_yaml(config))
    words = [f"+config={file}", "--run-dir", str(root / name), "--train-iters", str(STEPS)]
    words += ["--data-path", str(root / "tokens"), "--split", "1,0,0", "--no-shuffle"]
    words += ["--eval-interval", "0", "--no-report", "--log-interval", "1"]
    words += ["--save-interval", str(SAVED), "--lr-decay-samples", "160"]
    words += ["--lr-warmup-samples", "16", "--lr-warmup-iters", "0"]
    return words + FP16 if name == "fp16" else words


@pytest.mark.parametrize(("model", "layout"), PAIRS)
def test_the_next_steps_are_ours(moved, model: str, layout: str) -> None:
    root, theirs = moved
    is_bf16 = MODELS[model].is_bf16
    steps = steps_of(root / model)[SAVED:]
    assert len(steps) == STEPS - SAVED
    for step, (loss, norm) in zip(steps, theirs[f"{model}-{layout}"], strict=True):
        assert loss == pytest.approx(step["loss"], rel=2e-3 if is_bf16 else TOLERANCE)
        assert norm == pytest.approx(step["grad_norm"], rel=2e-2 if is_bf16 else 3 * TOLERANCE)


@pytest.mark.parametrize(
    ("model", "layout"),
    [pair for pair in PAIRS if not MODELS[pair[0]].is_bf16 and pair != SHIFTED],
)
def test_the_last_state_is_ours(moved, tmp_path: Path, model: str, layout: str) -> None:
    root, _ = moved
    import_megatron(root / f"{model}-{layout}-end", tmp_path / "imported")
    imported = read_manifest(tmp_path / "imported")
    expected = saved_tensors(root / model)
    assert imported.tensors.keys() == expected.keys()
    for key, value in read_global_tensors(tmp_path / "imported", list(expected)):
        # it adds the same to all scores of a query: its gradient is rounding, which Adam scales up
        if not key.endswith("attention.key.bias"):
            torch.testing.assert_close(
                value, expected[key], rtol=TOLERANCE, atol=TOLERANCE, msg=key
            )


def test_state_that_megatron_core_shifts_is_refused(moved, tmp_path: Path) -> None:
    root, _ = moved
    saved = root / f"{'-'.join(SHIFTED)}-end"
    with pytest.raises(CheckpointError, match=r"embedding.word.weight\[0:1,0:16\] differs"):
        import_megatron(saved, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()
    import_megatron(saved, tmp_path / "imported", optim=False)


@pytest.mark.parametrize("model", [*MODELS, *OTHERS])
def test_out_and_in_again_is_the_identity(moved, tmp_path: Path, model: str) -> None:
    """Of every tensor, counter and setting, in the last checkpoint of a run."""
    root, _ = moved
    ours = find_checkpoint(root / model)
    dtype = model if model in ("bf16", "fp16") else "fp32"
    text = export_megatron(ours, tmp_path / "megatron", dtype=dtype)
    before = read_manifest(ours)
    updates = before.objects["optimizer"]["num_updates"]
    assert (updates < STEPS) == (model == "fp16")
    assert text.splitlines()[1:] == [
        f"optimizer: main parameters and moments after {updates} updates, 56 samples consumed"
    ]
    import_megatron(tmp_path / "megatron", tmp_path / "again")
    after = read_manifest(tmp_path / "again")
    assert after.step == before.step
    assert after.objects == {name: before.objects[name] for name in after.objects}
    assert after.tensors.keys() == before.tensors.keys()
    expected = dict(read_global_tensors(ours, list(before.tensors)))
    for key, value in read_global_tensors(tmp_path / "again", list(after.tensors)):
        assert torch.equal(value, expected[key]), key
    for section in ("model", "optim"):
        assert after.config[section] == before.config[section]
