"""Conversations as token ids with a loss mask: 1 on the tokens that the assistant writes.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

    text by the chat template    <|im_start|> user 2 + 2?<|im_end|> <|im_start|> assistant 4 <|im_end|>
    loss mask                    0            0    0 0 0 0          0            0         1 1

The text is that of transformers' `apply_chat_template`. What the assistant writes is marked by `{%
generation %}` in the template, as transformers defines it. In other templates it is what each
assistant message adds to the messages before it and the prompt for a reply, which needs a template
that never changes an earlier turn.
"""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanotrain.errors import DataError
from nanotrain.untrusted import list_of, object_of, parse_json, text_of

ASSISTANT = "assistant"


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: folder or name that transformers' AutoTokenizer takes.

    Raises:
        DataError: it has no chat template, or no offsets of tokens.
    """

    def __init__(self, tokenizer: str) -> None:
        from transformers import AutoTokenizer  # 1 s

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
            template, is_fast = self._tokenizer.chat_template, self._tokenizer.is_fast
        except (OSError, ValueError) as error:
            template, is_fast, why = None, False, str(error).splitlines()[0]
        else:
            why = "it has no chat_template.jinja, and tokenizer_config.json names no chat_template"
        if not template or not is_fast:
            fix = "name the tokenizer of a chat model, or add chat_template.jinja to its folder"
            raise DataError(f"{tokenizer} has no chat template", why=why, fix=fix)
        self._marks_turns = "generation %}" in str(template)

    def encode(self, conversation: str) -> tuple[list[int], np.ndarray]:
        """The token ids of a conversation, given as the JSON of its messages, and their mask
        [tokens] uint8.

        Raises:
            DataError: no messages with role and content, or a template that refuses them or changes
                earlier turns.
        """
        messages = self._messages(conversation)
        if self._marks_turns:
            encoded = self._render(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=np.uint8)
        text = self._render(messages, tokenize=False)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = np.zeros(len(encoding["input_ids"]), dtype=np.uint8)
        starts = np.array([start for start, _ in encoding["offset_mapping"]])
        for begin, end in self._replies(messages, text):
            mask[(begin <= starts) & (starts < end)] = 1
        return list(encoding["input_ids"]), mask

    def _replies(self, messages: Sequence[dict[str, Any]], text: str) -> list[tuple[int, int]]:
        """Where in the text of a conversation the assistant's messages are."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before = self._render(messages[:number], tokenize=False, add_generation_prompt=True)
                through = self._render(messages[: number + 1], tokenize=False)
                if not (text.startswith(through) and through.startswith(before)):
                    raise DataError(
                        "the chat template changes earlier turns",
                        why=f"message {number + 1} is another text once others follow it, so its tokens are unknown",
                        fix="add {% generation %} and {% endgeneration %} around the assistant's text in the template",
                    )
                spans.append((len(before), len(through)))
        return spans

    def _render(self, messages: Sequence[dict[str, Any]], **options: Any) -> Any:
        from jinja2.exceptions import TemplateError

        try:
            return self._tokenizer.apply_chat_template(list(messages), **options)
        except (TemplateError, TypeError, ValueError) as error:
            why = f"the chat template refuses it: {error}"
            raise DataError(
                "a conversation cannot be used", why=why, fix="correct or remove it"
            ) from None

    def _messages(self, conversation: str) -> list[dict[str, Any]]:
        try:
            messages = []
            for value in list_of(parse_json(conversation), "messages"):
                message = object_of(value, "a message")
                messages.append(
                    message
                    | {name: text_of(message.get(name), name) for name in ("role", "content")}
                )
            if not any(message["role"] == ASSISTANT for message in messages):
                raise ValueError("it has no message of the assistant, whose tokens are the targets")
        except ValueError as error:
            fix = 'write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
            raise DataError("a conversation cannot be used", why=str(error), fix=fix) from None
        return messages


def as_text(messages: Any) -> str:
    """The messages of a row as JSON, the form in which a conversation passes as a document."""
    return json.dumps(messages, ensure_ascii=False)
