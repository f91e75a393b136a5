"""Autoregressive sampling."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.model.transformer import Stage


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled."""

    temperature: float = 1.0  # divides the logits; 0 is greedy
    top_k: int | None = None  # sample among the k most likely tokens; None for all
    seed: int = 0  # seed of the random generator
    stop: int | None = None  # token that ends the text (and is included); None for none


@torch.no_grad()
def generate(stage: Stage, prompt: Sequence[int], *, num_tokens: int, sampling: Sampling | None = None) -> list[int]:
    """Generate up to `num_tokens` tokens that continue a prompt of at least one token; returns the new ones.

    Each is sampled given the last `max_position_embeddings` tokens before it. `stage` is a model in one stage.
    """
    sampling = sampling or Sampling()
    generator = torch.Generator().manual_seed(sampling.seed)
    device = next(stage.parameters()).device
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = torch.tensor([tokens[-stage.model_config.max_position_embeddings :]], device=device)
        logits = stage.logits(window, last_only=True)[0, 0].float().cpu()
        tokens.append(_sample(logits, sampling, generator=generator))
        if tokens[-1] == sampling.stop:
            break
    return tokens[len(prompt) :]


def _sample(logits: Tensor, sampling: Sampling, *, generator: torch.Generator) -> int:
    """Sample a token from [V] fp32 logits on the CPU."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        top = logits.topk(sampling.top_k)
        logits = torch.full_like(logits, float("-inf")).scatter(0, top.indices, top.values)
    probabilities = (logits / sampling.temperature).softmax(dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
