"""Law L1 from outside: ten steps of AdamW on imported weights, beside transformers and torch's
AdamW in fp64.

The models are those of `CONFIGS` in tests/interop/hf/reference.py by name, so a family is one row
of `ROWS` here; its package of transformers is in `IN_FP64` there. One world of each size trains all
of them, in several layouts.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanotrain.config.schema import with_values
from nanotrain.interop.hf.families import model_from_hf
from tests.attention.fp64_transformers import modeling_in_fp64
from tests.harness import run_ranks
from tests.interop.hf.configs import CONFIGS, IN_FP64
from tests.interop.hf.reference import reference
from tests.laws.worlds import VOCAB_SIZE, Case, UnevenDataset, train_layouts

ROWS = ("deepseek_v32", "glm_moe_dsa", "kimi_linear", "nemotron_h", "qwen3_5-tied")
STEPS, BATCH, WITHIN = 10, 4, 5e-7  # the last relative
LAYOUTS: dict[int, list[dict[str, Any]]] = {  # by number of ranks
    1: [{}],
    2: [
        {
            "tensor_model_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim_grads",
            "sequence_parallel": True,
        },
        {"context_parallel_size": 2, "data_parallel_sharding_strategy": "optim"},
    ],
}
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random weights of every model, as transformers saves them."""
    root = tmp_path_factory.mktemp("beside-transformers")
    for name in ROWS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(
                CONFIGS, name, (CONFIGS[name][0], CONFIGS[name][1] | {"vocab_size": VOCAB_SIZE})
            )
            reference(name).save_pretrained(root / name)
    return {name: root / name for name in ROWS}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[float]]:
    """The losses by transformers and torch, all in fp64."""
    return {name: losses_of_transformers(folder, IN_FP64[name]) for name, folder in folders.items()}


def losses_of_transformers(folder: Path, package: str) -> list[float]:
    """Losses of ten steps; norms, biases and decays have no weight decay."""
    with pytest.MonkeyPatch.context() as patch:
        modeling = modeling_in_fp64(package, patch)
        [name] = [each for each in modeling.__all__ if each.endswith("ForCausalLM")]
        model = getattr(modeling, name).from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )
        decays = {True: [], False: []}
        for key, parameter in model.named_parameters():
            decays[parameter.ndim >= 2 and not key.endswith("A_log")].append(parameter)
        groups = [
            {"params": params, "weight_decay": decay * 0.1} for decay, params in decays.items()
        ]
        optimizer, source, losses = (
            torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8),
            UnevenDataset(),
            [],
        )
        for step in range(STEPS):
            samples = [source[step * BATCH + row] for row in range(BATCH)]
            tokens, labels, mask = (
                torch.from_numpy(np.stack([getattr(sample, field) for sample in samples]))
                for field in ("tokens", "labels", "loss_mask")
            )
            log_probs = model(tokens).logits.log_softmax(-1)
            loss = -(log_probs.gather(-1, labels[..., None])[..., 0] * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("num_ranks", LAYOUTS)
def test_ten_steps_of_adamw_have_the_losses_of_transformers(
    num_ranks: int, folders: dict[str, Path], expected: dict[str, list[float]]
) -> None:
    runs = [(name, parallel) for name in folders for parallel in LAYOUTS[num_ranks]]
    cases = [case_of(folders[name], parallel) for name, parallel in runs]
    for outcomes in run_ranks(num_ranks, train_layouts, cases, shares=True):
        for run, outcome in zip(runs, outcomes, strict=True):
            assert outcome.losses == pytest.approx(expected[run[0]], rel=WITHIN), run
            assert abs(outcome.losses[-1] - outcome.losses[0]) > 1e-3, (
                "the weights must have changed"
            )


def case_of(folder: Path, parallel: dict[str, Any]) -> Case:
    """Ten steps on the weights of a folder; transformers leaves expert biases as they are."""
    model = model_from_hf(folder)
    if model.moe is not None:
        model = with_values(model, {"moe.router_bias_update_rate": 0.0})
    if model.dsa is not None:  # whose indexer transformers does not train
        model = with_values(model, {"dsa.loss_coeff": 0.0})
        parallel = parallel | {"cp_comm_type": "allgather"}
    optim = ADAMW | {"lr_decay_style": "constant", "clip_grad": 0.0}
    case = Case(STEPS).but(
        model=asdict(model), checkpoint={"pretrained_checkpoint": str(folder)}, parallel=parallel
    )
    return case.but(optim=optim, train={"micro_batch_size": BATCH, "global_batch_size": BATCH})
