"""Law L1 from outside: a Hugging Face Llama trained with torch's AdamW has the same losses.

The reference is the model of transformers and the optimizer of torch, with the same weights and token file and without
nanotrain. At a learning rate of 1e-2 on random tokens rounding grows tenfold every other step: after ten steps the
reference in fp32 differs from itself in fp64 by 4e-5, and by how much depends on the processor. There our fp32 run may
be at most twice as far from fp64 as the reference's own fp32 run.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nanotrain.train.main import main
from tests.laws.megatron_file import write_tokens

STEPS, BATCH, SEQ_LENGTH, VOCAB_SIZE, CLIP = 10, 8, 64, 1000, 0.5


def reference_losses(folder: Path, tokens: np.ndarray, *, dtype: torch.dtype, lr: float) -> list[float]:
    """Losses of ten steps over the token stream in order."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        starts = [(step * BATCH + i) * SEQ_LENGTH for i in range(BATCH)]
        rows = torch.tensor(np.stack([tokens[s : s + SEQ_LENGTH + 1].astype(np.int64) for s in starts]))
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("lr", [2e-3, 1e-2])
@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_llama_has_the_same_losses(tmp_path: Path, tied: bool, lr: float) -> None:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=tied)).save_pretrained(tmp_path / "llama")
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 6000).astype(np.uint16)
    write_tokens(tmp_path / "tokens", tokens)
    line = f"""+config=tiny --pretrained-checkpoint {tmp_path / "llama"} --data-path {tmp_path / "tokens"}
        --split 1,0,0 data.shuffle=false --seq-length {SEQ_LENGTH} --micro-batch-size 2 --global-batch-size {BATCH}
        --train-iters {STEPS} --lr {lr} --lr-decay-style constant --lr-warmup-iters 0 --weight-decay 0.1
        --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad {CLIP} --eval-interval 0 --save-interval 3 --seed 1
        precision.params_dtype=fp32 --data-parallel-sharding-strategy optim_grads train.run_dir={tmp_path / "out"}
        --num-workers 0"""

    assert main(line.split()) == 0

    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    fp32, fp64 = (
        reference_losses(tmp_path / "llama", tokens, dtype=dtype, lr=lr) for dtype in (torch.float32, torch.float64)
    )
    bounds = [max(1e-5 * exact, 2 * abs(rounded - exact)) for rounded, exact in zip(fp32, fp64, strict=True)]
    assert all(abs(loss - exact) <= bound for loss, exact, bound in zip(losses, fp64, bounds, strict=True)), (
        losses,
        fp64,
    )
    assert max(bounds) < 2e-3  # the reference itself must not have diverged
