"""Law L1 from outside: Hugging Face's Llama and Mixtral trained with torch's AdamW have the same
losses.

The references are the models of transformers and the optimizer of torch, with the same weights and
token file and without nanotrain; learning rates and weight decay of every step, and the balance
loss, are written out. On random tokens rounding grows tenfold every other step at a learning rate
of 1e-2, so the bound is the reference itself: our fp32 run may be at most twice as far from fp64 as
the reference's own fp32 run.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from nanotrain.train.main import main
from tests.laws.megatron_file import write_tokens

STEPS, BATCH, SEQ_LENGTH, VOCAB_SIZE, CLIP = 10, 8, 64, 1000, 0.5
# steps; at the first step and at the end of the run, so high that losses show it
WARMUP, WEIGHT_DECAY = 3, (1.0, 5.0)
BALANCE, TOPK = 0.1, 2  # coefficient of Mixtral's balance loss, experts per token
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE}


@dataclass(frozen=True)
class Row:
    """A model and its learning rates; the balance loss is that of a microbatch."""

    name: str
    lr: float
    decoupled_lr: float  # of embedding and output layer
    tied: bool = False
    micro_batch_size: int = 2

    def save(self, folder: Path) -> None:
        """Save random weights."""
        torch.manual_seed(0)
        if self.name == "mixtral":
            experts = {"num_local_experts": 4, "num_experts_per_tok": TOPK}
            MixtralForCausalLM(
                MixtralConfig(num_hidden_layers=1, **SHAPE, **experts)
            ).save_pretrained(folder)
            return
        shape = SHAPE | {"num_hidden_layers": 2, "tie_word_embeddings": self.tied}
        if self.name == "qwen3":
            Qwen3ForCausalLM(Qwen3Config(head_dim=16, **shape)).save_pretrained(folder)
        else:
            LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)

    @property
    def flags(self) -> str:
        """Ours; transformers multiplies the balance loss by the experts per token."""
        balance = f"--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff {BALANCE * TOPK}"
        for_model = {"mixtral": balance, "qwen3": "--apply-wd-to-qk-layernorm"}
        return f"--micro-batch-size {self.micro_batch_size} {for_model.get(self.name, '')}"

    def decays(self, name: str, param: torch.nn.Parameter) -> bool:
        """Whether weight decay applies to a parameter of transformers' model."""
        return param.ndim >= 2 or "q_norm" in name or "k_norm" in name


ROWS = [
    Row("llama", 2e-3, 1e-3, tied=True),
    Row("qwen3", 1e-2, 5e-3),  # with weight decay of the norms of queries and keys
    Row("mixtral", 2e-3, 1e-3, micro_batch_size=BATCH),
]


def rate_of(step: int, *, peak: float, lowest: float) -> float:
    """The learning rate of a step, from 0: a linear warmup, then a cosine to the end of the run."""
    if step <= WARMUP:
        return peak * step / WARMUP
    return (
        lowest + (peak - lowest) * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2
    )


def reference_losses(
    folder: Path, tokens: np.ndarray, row: Row, *, dtype: torch.dtype
) -> list[float]:
    """Losses of ten steps over the token stream in order."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager"
    )
    named, ends = dict(model.named_parameters()), ("model.embed_tokens.weight", "lm_head.weight")
    groups = [
        {
            "params": [p for name, p in named.items() if row.decays(name, p) and name not in ends],
            "peak": row.lr,
            "decays": True,
        },
        {
            "params": [named[name] for name in ends if name in named],
            "peak": row.decoupled_lr,
            "decays": True,
        },
        {
            "params": [p for name, p in named.items() if not row.decays(name, p)],
            "peak": row.lr,
            "decays": False,
        },
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        starts = [(step * BATCH + i) * SEQ_LENGTH for i in range(BATCH)]
        rows = torch.tensor(
            np.stack([tokens[s : s + SEQ_LENGTH + 1].astype(np.int64) for s in starts])
        )
        outputs = model(
            rows[:, :-1], **({"output_router_logits": True} if row.name == "mixtral" else {})
        )
        loss = torch.nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), rows[:, 1:].flatten()
        )
        optimizer.zero_grad()
        (loss + BALANCE * outputs.aux_loss if row.name == "mixtral" else loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        first, last = WEIGHT_DECAY
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step, peak=group["peak"], lowest=row.lr / 10)
            group["weight_decay"] = (
                first + (last - first) * step / STEPS if group["decays"] else 0.0
            )
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_hugging_face_model_has_the_same_losses(tmp_path: Path, row: Row) -> None:
    row.save(tmp_path / "theirs")
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 6000).astype(np.uint16)
    write_tokens(tmp_path / "tokens", tokens)
    first, last = WEIGHT_DECAY
    line = f"""+config=tiny --pretrained-checkpoint {tmp_path / "theirs"} --data-path {tmp_path / "tokens"}
        --split 1,0,0 data.shuffle=false --seq-length {SEQ_LENGTH} --global-batch-size {BATCH} {row.flags}
        --train-iters {STEPS} --lr {row.lr} --min-lr {row.lr / 10} --decoupled-lr {row.decoupled_lr}
        --lr-decay-style cosine --lr-warmup-iters {WARMUP}
        --weight-decay-incr-style linear --start-weight-decay {first} --end-weight-decay {last}
        --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad {CLIP} --eval-interval 0 --save-interval 3 --seed 1
        precision.params_dtype=fp32 --data-parallel-sharding-strategy optim_grads train.run_dir={tmp_path / "out"}
        --num-workers 0"""

    assert main(line.split()) == 0

    steps = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [step["loss"] for step in steps]
    rates = [rate_of(step, peak=row.lr, lowest=row.lr / 10) for step in range(STEPS)]
    assert [step["lr"] for step in steps] == pytest.approx(rates, rel=1e-9)
    fp32, fp64 = (
        reference_losses(tmp_path / "theirs", tokens, row, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    bounds = [
        max(1e-5 * exact, 2 * abs(rounded - exact))
        for rounded, exact in zip(fp32, fp64, strict=True)
    ]
    assert all(
        abs(loss - exact) <= bound for loss, exact, bound in zip(losses, fp64, bounds, strict=True)
    ), (
        losses,
        fp64,
    )
    assert max(bounds) < 2e-3  # the reference itself must not have diverged
