"""Autoregressive sampling of one prompt or several.

    Generation     the state of a batch of prompts; each step samples one token per prompt
    generate       one prompt to its end
    stream_texts   texts in, pieces of texts out

New tokens add a piece to a text. It is held back while it may still change: an incomplete
character, or the beginning of a stop string, which is not part of the text.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce_scalars
from nanotrain.comm.group import Group
from nanotrain.config.model import ModelConfig
from nanotrain.data.prompts import encode_prompt, prompt_start
from nanotrain.data.tokenizer import Tokenizer
from nanotrain.errors import DataError
from nanotrain.inference.cache import KVCache
from nanotrain.inference.sampling import Sampling as Sampling
from nanotrain.model.transformer import Stage
from nanotrain.quantities import count_of


class NextLogits(Protocol):
    """A model whose ranks do not hold all layers or all tokens (train/generate.py)."""

    model_config: ModelConfig

    def next_logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """The logits of the token after each of B texts, [B, V] fp32 on the CPU."""


class Generation:
    """Prompts and the tokens sampled so far.

    A token is sampled given the last `max_position_embeddings` tokens before it. With the cache
    each step reads one token per prompt, until a text has that length. Without it each step reads
    the whole window. Models whose experts have a capacity use no cache, because the capacity
    depends on the number of tokens that are read together.

    Args:
        stage: a model in one stage, or this rank's shards of it; or a model of another layout,
            of which nothing is cached.
        prompts: token ids of every prompt, at least one each; the same on every rank.
        num_tokens: the maximum number of steps, which bounds the memory of the cache.
        sampling: how tokens are sampled.
        use_cache: whether keys and values are kept.
        ranks: the ranks that hold the shards; each of them makes every step.
    """

    def __init__(
        self,
        stage: Stage | NextLogits,
        prompts: Sequence[Sequence[int]],
        *,
        num_tokens: int,
        sampling: Sampling | None = None,
        use_cache: bool = True,
        ranks: Group | None = None,
    ) -> None:
        self.stage = stage
        self.sampling = sampling or Sampling()
        self.texts = [list(prompt) for prompt in prompts]
        self.running = set(range(len(prompts)))  # prompts that are not at their end
        self._ranks = ranks or Group.single_rank("world")
        self._generators = []  # one per prompt
        for row in range(len(prompts)):
            generator = torch.Generator()
            generator.manual_seed(self.sampling.seed + row)
            self._generators.append(generator)
        self._positions = stage.model_config.max_position_embeddings
        longest = max(map(len, prompts))
        self._cache: KVCache | None = None
        moe = stage.model_config.moe
        drops_tokens = moe is not None and moe.expert_capacity_factor is not None
        is_cached = use_cache and not drops_tokens and longest <= self._positions
        if isinstance(stage, Stage) and is_cached:
            capacity = min(longest + num_tokens, self._positions)
            lengths = [len(prompt) for prompt in prompts]
            self._cache = KVCache(stage, lengths, capacity=capacity)
        self._num_unread = longest  # tokens that the cache has not read

    def step(self) -> dict[int, int]:
        """Sample one token for every running prompt; returns them by the index of the prompt."""
        logits = self._logits()
        rows = sorted(self.running)
        tokens = []
        for row in rows:
            generator = self._generators[row]
            penalized = self._penalize(logits[row], row)
            tokens.append(sample_token(penalized, self.sampling, generator=generator))
        sampled = dict(zip(rows, self._broadcast(tokens), strict=True))
        for row, token in sampled.items():
            self.texts[row].append(token)
            if token in self.sampling.ends:
                self.running.discard(row)
        return sampled

    def _penalize(self, logits: Tensor, row: int) -> Tensor:
        """[V] fp32, with the repetition penalty on the tokens of a text and its prompt."""
        penalty = self.sampling.repetition_penalty
        if penalty is None:
            return logits
        used = torch.tensor(sorted(set(self.texts[row])))
        before = logits[used]
        after = torch.where(before < 0, before * penalty, before / penalty)
        return logits.scatter(0, used, after)

    def _broadcast(self, tokens: Sequence[int]) -> list[int]:
        """The tokens of the first rank, on every rank.

        Replicated layers may round differently on each rank.
        """
        local_tokens = tokens if self._ranks.is_first else [0] * len(tokens)
        return [int(token) for token in all_reduce_scalars(local_tokens, self._ranks)]

    def _logits(self) -> dict[int, Tensor]:
        """[V] fp32 on the CPU for each running prompt."""
        rows = sorted(self.running)
        if not isinstance(self.stage, Stage):
            windows = [self.texts[row][-self._positions :] for row in rows]
            return dict(zip(rows, self.stage.next_logits(windows), strict=True))
        device = next(self.stage.parameters()).device
        if self._cache is not None and max(map(len, self.texts)) <= self._positions:
            return self._read_cached(self._cache, device)
        self._cache = None
        row_logits = {}
        for row in rows:
            window = torch.tensor([self.texts[row][-self._positions :]], device=device)
            with torch.no_grad():
                logits = self.stage.logits(window, last_only=True)
            row_logits[row] = logits[0, 0].float().cpu()
        return row_logits

    def _read_cached(self, cache: KVCache, device: torch.device) -> dict[int, Tensor]:
        """[V] fp32 on the CPU for every prompt, from the tokens that the cache has not read."""
        num_unread = self._num_unread
        rows = [[0] * (num_unread - len(text)) + text[-num_unread:] for text in self.texts]
        tokens = torch.tensor(rows, device=device)
        with cache:
            logits = cache.logits(tokens).float().cpu()
        self._num_unread = 1
        for row in set(range(len(rows))) - self.running:
            # rows of a batch grow together; tokens after the end are not returned
            self.texts[row].append(0)
        return dict(enumerate(logits))


def generate(
    stage: Stage,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    sampling: Sampling | None = None,
    use_cache: bool = True,
) -> list[int]:
    """Generate up to `num_tokens` tokens after a prompt of at least one token; returns them."""
    generation = Generation(
        stage, [prompt], num_tokens=num_tokens, sampling=sampling, use_cache=use_cache
    )
    new: list[int] = []
    while generation.running and len(new) < num_tokens:
        new.append(generation.step()[0])
    return new


def sample_token(logits: Tensor, sampling: Sampling, *, generator: torch.Generator) -> int:
    """Sample a token from [V] fp32 logits on the CPU."""
    if sampling.is_greedy:
        return int(logits.argmax())
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        top = logits.topk(sampling.top_k)
        others = torch.full_like(logits, float("-inf"))
        logits = others.scatter(0, top.indices, top.values)
    probabilities = ((logits - logits.max()) / sampling.temperature).softmax(dim=0)
    if sampling.top_p is not None:
        ordered, tokens = probabilities.sort(descending=True)
        # the token that passes the bound is kept
        before = ordered.cumsum(0) - ordered
        is_kept = before < sampling.top_p
        others = torch.zeros_like(probabilities)
        probabilities = others.scatter(0, tokens[is_kept], ordered[is_kept])
    return int(torch.multinomial(probabilities, 1, generator=generator))


class TextStream:
    """The text of one prompt as it grows.

    Args:
        tokenizer: tokenizer that decodes the new tokens.
        stops: strings that end the text.
        ends: tokens that end the text, besides the end of a document; they have no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, ends: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = {tokenizer.eod, *ends}
        self._stops = [stop for stop in stops if stop]
        self._tokens: list[int] = []
        self._shown = 0  # characters returned so far
        self.is_ended = False  # whether a stop string was found

    def add(self, token: int) -> str:
        """Add a token; returns the next piece of the text."""
        if token not in self._ends:
            self._tokens.append(token)
        text = self._text()
        return self._show(text if self.is_ended else text[: self._num_certain(text)])

    def finish(self) -> str:
        """The rest of the text."""
        return self._show(self._text())

    def _text(self) -> str:
        """The text so far, up to the first stop text; sets `is_ended` where there is one."""
        text = self._tokenizer.decode(self._tokens)
        ends = [text.find(stop) for stop in self._stops if stop in text]
        self.is_ended = bool(ends)
        return text[: min(ends)] if ends else text

    def _num_certain(self, text: str) -> int:
        """Characters of the text that cannot change any more."""
        text = text.rstrip("\ufffd")  # an incomplete character may go on with a stop string
        certain = len(text)
        for stop in self._stops:
            for size in range(len(stop) - 1, 0, -1):
                if text.endswith(stop[:size]):
                    certain = min(certain, len(text) - size)
                    break
        return certain

    def _show(self, text: str) -> str:
        """The characters that were not returned before."""
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return piece


def encode_prompts(
    prompts: Sequence[str], tokenizer: Tokenizer, *, max_tokens: int
) -> list[list[int]]:
    """The tokens of prompts; an empty prompt is the token that begins one.

    Raises:
        DataError: a prompt longer than `max_tokens`, the positions of the model, or one without
            tokens.
    """
    encoded = []
    for prompt in prompts:
        encoded.append(encode_prompt(prompt, tokenizer) or prompt_start(tokenizer))
    for number, ids in enumerate(encoded, 1):
        excess = len(ids) - max_tokens
        if excess > 0:
            positions = count_of(max_tokens, "position")
            raise DataError(
                f"prompt {number} of {len(encoded)} has {count_of(len(ids), 'token')}",
                why=f"the model has {positions} (max_position_embeddings)",
                fix=f"shorten it by at least {count_of(excess, 'token')}",
            )
    return encoded


def stream_texts(
    generation: Generation, tokenizer: Tokenizer, *, num_tokens: int, stops: Sequence[str] = ()
) -> Iterator[tuple[int, str]]:
    """Yield the index of a prompt and the next piece of its text, until every text has ended.

    Args:
        generation: state of the encoded prompts.
        tokenizer: tokenizer of the model.
        num_tokens: tokens per prompt at most.
        stops: strings that end a text.
    """
    streams = {}
    for row in generation.running:
        streams[row] = TextStream(tokenizer, stops, ends=generation.sampling.ends)
    for _ in range(num_tokens):
        if not generation.running:
            break
        for row, token in generation.step().items():
            piece = streams[row].add(token)
            if piece:
                yield row, piece
            if streams[row].is_ended:
                generation.running.discard(row)
    for row, stream in streams.items():
        piece = stream.finish()
        if piece:
            yield row, piece


def print_texts(prompts: Sequence[str], pieces: Iterator[tuple[int, str]]) -> None:
    """Print one text as it grows, or several at their end with a blank line between them."""
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
        for _, piece in pieces:
            print(piece, end="", flush=True)
        print()
        return
    texts = list(prompts)
    for row, piece in pieces:
        texts[row] += piece
    print("\n\n".join(texts))
