"""Writing text: `generate` continues a prompt token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.model.stage import Stage


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: choose among so many likeliest tokens; None among all.
        seed: the same seed gives the same text.
        stop: token that ends the text (and stands at its end); None to go on to the length asked for.
    """

    temperature: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop: int | None = None


@torch.no_grad()
def generate(stage: Stage, prompt: Sequence[int], *, num_tokens: int, sampling: Sampling | None = None) -> list[int]:
    """Continue a prompt.

    Args:
        stage: the whole model.
        prompt: token ids, at least one.
        num_tokens: how many to write at most.
        sampling: how to choose; plain sampling by default.

    Returns:
        The new token ids. Each is chosen from the last `max_position_embeddings` tokens before it.
    """
    sampling = sampling or Sampling()
    generator = torch.Generator().manual_seed(sampling.seed)
    device = next(stage.parameters()).device
    tokens, written = list(prompt), 0
    while written < num_tokens:
        window = torch.tensor([tokens[-stage.model.max_position_embeddings :]], device=device)
        logits = stage.logits(window, last_only=True)[0, 0].float().cpu()
        tokens.append(_choose(logits, sampling, generator=generator))
        written += 1
        if tokens[-1] == sampling.stop:
            break
    return tokens[len(prompt) :]


def _choose(logits: Tensor, sampling: Sampling, *, generator: torch.Generator) -> int:
    """One token from [V] fp32 logits on the CPU."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        kept = logits.topk(sampling.top_k)
        logits = torch.full_like(logits, float("-inf")).scatter(0, kept.indices, kept.values)
    probabilities = (logits / sampling.temperature).softmax(dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
