"""The tokens of prompts and of task rows, as transformers and lm-eval encode them.

    text                      tokens
    "the cat"                 those of `tokenizer("the cat")` in transformers: with <s> before them
                              or </s> after them where the tokenizer adds it
    "<s>the cat"              without added tokens: <s> is there already (lm-eval's rule)
    ""                        <s>, else the end-of-document token, else a line break
    context, continuation     encoded as one text and divided

A model that was trained here from its first step has read documents without <s>, each after the
end of another one. `prompt_tokenizer` makes prompts of them: nothing is added.
"""

from copy import copy

from nanotrain.data.tokenizer import ByteTokenizer, Tokenizer, document_start
from nanotrain.log import get_logger

log = get_logger(__name__)


def encode_prompt(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text that begins a sequence; [] is possible for an empty text."""
    start = tokenizer.start_text
    has_start = start is not None and text.startswith(start)
    if has_start or not tokenizer.adds_special:
        return tokenizer.encode(text)
    return tokenizer.encode_added(text)


def prompt_start(tokenizer: Tokenizer) -> list[int]:
    """The tokens of an empty prompt.

    Raises:
        DataError: the tokenizer has no token to begin with.
    """
    if tokenizer.bos is not None and tokenizer.adds_special:
        return [tokenizer.bos]
    return document_start(tokenizer)


def encode_pair(
    context: str, continuation: str, *, tokenizer: Tokenizer
) -> tuple[list[int], list[int]]:
    """The tokens of a context and of its continuation, as in lm-eval 0.4.13.

    They are encoded as one text. Blanks at the end of the context belong to the continuation.
    Where tokens reach over the border, the continuation has at least the last one: without any it
    would be the most likely.
    """
    if not context:
        start = prompt_start(tokenizer)
        scored = tokenizer.encode(continuation)
        if scored[:1] == start and len(scored) > 1:  # the start is written in the continuation
            return start, scored[1:]
        return start, scored
    both = encode_prompt(context + continuation, tokenizer)
    before = encode_prompt(context.rstrip(), tokenizer)
    if len(before) >= len(both):
        before = both[:-1]
    return before or prompt_start(tokenizer), both[len(before) :]


def prompt_tokenizer(tokenizer: Tokenizer, *, is_pretrained: bool) -> Tokenizer:
    """The tokenizer of a model's prompts; it adds special tokens only if training had them.

    Args:
        tokenizer: tokenizer of the model.
        is_pretrained: whether the model is a Hugging Face folder or its training began with one.
    """
    if is_pretrained or isinstance(tokenizer, ByteTokenizer):
        return tokenizer
    if tokenizer.bos in (None, tokenizer.eod) and not tokenizer.encode_added(""):
        return tokenizer
    log.info(
        "prompts and tasks begin as documents do, without the special tokens of the tokenizer: "
        "the training began without a pretrained checkpoint and has not read them"
    )
    return without_added(tokenizer)


def without_added(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer, adding nothing to prompts: chat templates write their special tokens out."""
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer
    plain = copy(tokenizer)
    plain.adds_special = False
    return plain
