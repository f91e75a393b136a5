"""Law L1 from Hugging Face MoE weights: the first loss is that of transformers, all losses are
those of one rank.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nanotrain.interop.hf.families import model_from_hf
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import GLOBAL_BATCH, VOCAB_SIZE, Case, UnevenDataset, train_here

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, Any] = {
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SHAPE, intermediate_size=48, num_local_experts=4)
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SHAPE,
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        )
    ),
}
LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"ep": 2, "strategy": "optim"}, {}),
    (2, {"ep": 1, "strategy": "optim_grads_params"}, {}),
    (4, {"tp": 2, "etp": 2, "ep": 2, "strategy": "optim_grads"}, {"sequence_parallel": True}),
    (4, {"pp": 2, "cp": 2, "etp": 1, "ep": 2, "strategy": "no_shard"}, {}),
]


def first_loss(model: torch.nn.Module) -> float:
    """The loss of the first global batch, by transformers."""
    samples = [UnevenDataset()[number] for number in range(GLOBAL_BATCH)]
    tokens, labels, mask = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))
        for name in ("tokens", "labels", "loss_mask")
    )
    with torch.no_grad():
        log_probs = model(tokens).logits.log_softmax(-1)
    return (-(log_probs.gather(-1, labels[..., None])[..., 0] * mask).sum() / mask.sum()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_pretrained_experts_train_alike_in_every_layout(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = FAMILIES[family]().float()
    reference.save_pretrained(tmp_path)
    case = Case(2).but(
        model=asdict(model_from_hf(tmp_path)),
        checkpoint={"pretrained_checkpoint": str(tmp_path)},
        optim={"lr": 1e-3},
    )
    single = run_ranks(
        1, train_here, case.but(train={"micro_batch_size": GLOBAL_BATCH}), shares=True
    )[0]
    assert single.losses[0] == pytest.approx(first_loss(reference), rel=1e-5)
    for ranks, sizes, options in LAYOUTS:
        parallel = {SHORT_NAMES[name]: size for name, size in sizes.items()} | options
        spread = case.but(train={"micro_batch_size": 2}, parallel=parallel)
        for outcome in run_ranks(ranks, train_here, spread, **sizes, shares=True):
            assert outcome.losses == pytest.approx(single.losses, rel=1e-5), f"{family} {sizes}"
