"""Combine options into a new model, count its parameters and FLOPs, and train it.

    python examples/new_model.py

Uses only nanotrain.model, without data, configuration files or other ranks: grouped-query attention
with QK norm, rotary position embeddings, LayerNorm and a gated MLP. It learns to copy: the second
half of each sequence repeats the first, which only attention can predict.
"""

import torch

from nanotrain.config.model import ModelConfig
from nanotrain.data.batch import Batch
from nanotrain.inference.generate import Sampling, generate
from nanotrain.model.context import BatchContext
from nanotrain.model.parameters import initialize
from nanotrain.model.transformer import build_stage
from nanotrain.spec.counts import flops_per_token, num_parameters
from nanotrain.spec.shape import ModelShape

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    max_position_embeddings=64,
    vocab_size=30,
    position_embedding_type="rope",
    normalization="LayerNorm",
    activation="swiglu",
    qk_layernorm=True,
    init_method_std=0.1,
)
HALF = 8
STEPS = 101


def repeating_batch(size: int) -> Batch:
    """Sequences whose second half repeats the random first half; only the second half counts in the
    loss.
    """
    half = torch.randint(MODEL.vocab_size or 0, (size, HALF))
    tokens = torch.cat([half, half], dim=1)
    mask = torch.zeros(size, 2 * HALF - 1)
    mask[:, HALF - 1 :] = 1.0
    return Batch(tokens[:, :-1], tokens[:, 1:], mask)


def main() -> None:
    """Build, count, train and generate."""
    torch.manual_seed(0)
    stage = build_stage(MODEL).to_empty(device="cpu")
    initialize(stage, stage.params, seed=0)
    shape = ModelShape.of(MODEL)
    print(
        f"{num_parameters(shape):,} parameters, {flops_per_token(shape, 2 * HALF):,} FLOPs per token"
    )
    print(
        f"vocabulary of {MODEL.vocab_size} padded to {shape.padded_vocab_size}; padded logits are masked"
    )

    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
    for step in range(STEPS):
        batch = repeating_batch(32)
        loss = stage(None, BatchContext(batch)) / batch.num_target_tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:3}  loss {loss.item():.3f}")

    half = repeating_batch(1).tokens[0, :HALF].tolist()
    repeated = generate(stage, half, num_tokens=HALF, sampling=Sampling(temperature=0))
    print("prompt  ", half)
    print("repeated", repeated)


if __name__ == "__main__":
    main()
