"""Continue texts: prompts are encoded, sampled together, and decoded piece by piece.

A piece is what the new tokens add to the text. It is held back while it may still change: a character of which only
some bytes are there, or the beginning of a stop string, which is not part of the text.
"""

from collections.abc import Iterator, Sequence

from nanotrain.data.tokenizer import Tokenizer
from nanotrain.errors import DataError
from nanotrain.inference.generate import Generation
from nanotrain.quantities import count_of


class TextStream:
    """The text of one prompt as it grows.

    Args:
        tokenizer: decodes the new tokens.
        stops: strings that end the text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        self._tokens: list[int] = []
        self._shown = 0  # characters returned so far
        self.is_ended = False  # whether a stop string was found

    def add(self, token: int) -> str:
        """Add a token; what can be shown of the text beyond what was."""
        if token != self._tokenizer.eod:
            self._tokens.append(token)
        text = self._text()
        return self._show(text if self.is_ended else text[: self._num_certain(text)])

    def finish(self) -> str:
        """The rest of the text."""
        return self._show(self._text())

    def _text(self) -> str:
        text = self._tokenizer.decode(self._tokens)
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.is_ended = bool(found)
        return text[: min(found)] if found else text

    def _num_certain(self, text: str) -> int:
        certain = len(text.rstrip("\ufffd"))
        for stop in self._stops:
            longest = next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)
            certain = min(certain, len(text) - longest)
        return certain

    def _show(self, text: str) -> str:
        piece, self._shown = text[self._shown :], max(self._shown, len(text))
        return piece


def document_start(tokenizer: Tokenizer) -> list[int]:
    """The tokens before the first one of a document: the end of the previous document, or a line break.

    Raises:
        DataError: the tokenizer has neither.
    """
    start = [tokenizer.eod] if tokenizer.eod is not None else tokenizer.encode("\n")
    if not start:
        raise DataError(
            "an empty prompt has no tokens",
            why="the tokenizer has no end-of-document token and none for a line break",
            fix="give a prompt with text, or name an eos_token of the vocabulary in tokenizer_config.json",
        )
    return start


def encode_prompts(prompts: Sequence[str], tokenizer: Tokenizer, *, max_tokens: int) -> list[list[int]]:
    """The tokens of prompts; an empty prompt is the start of a document.

    Raises:
        DataError: a prompt longer than `max_tokens`, the positions of the model, or one without tokens.
    """
    encoded = [tokenizer.encode(prompt) or document_start(tokenizer) for prompt in prompts]
    for number, ids in enumerate(encoded, 1):
        if len(ids) > max_tokens:
            raise DataError(
                f"prompt {number} of {len(encoded)} has {count_of(len(ids), 'token')}",
                why=f"the model has {count_of(max_tokens, 'position')} (max_position_embeddings)",
                fix=f"shorten it by at least {count_of(len(ids) - max_tokens, 'token')}",
            )
    return encoded


def stream_texts(
    generation: Generation, tokenizer: Tokenizer, *, num_tokens: int, stops: Sequence[str] = ()
) -> Iterator[tuple[int, str]]:
    """Yield the index of a prompt and the next piece of its text, until every text has ended.

    Args:
        generation: of the encoded prompts.
        tokenizer: of the model.
        num_tokens: tokens per prompt at most.
        stops: strings that end a text.
    """
    streams = {row: TextStream(tokenizer, stops) for row in generation.running}
    for _ in range(num_tokens):
        if not generation.running:
            break
        for row, token in generation.step().items():
            if piece := streams[row].add(token):
                yield row, piece
            if streams[row].is_ended:
                generation.running.discard(row)
    for row, stream in streams.items():
        if piece := stream.finish():
            yield row, piece


def print_texts(prompts: Sequence[str], pieces: Iterator[tuple[int, str]]) -> None:
    """Print one text as it grows; several one after the other at their end, with a blank line between them."""
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
