"""Conversations as token ids with a loss mask: 1 on the tokens that the assistant writes.

The program of the process that `chat` starts: a chat template is a program of somebody else.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

    text    <|im_start|> user 2 + 2?<|im_end|> <|im_start|> assistant 4 <|im_end|>
    mask    0            0    0 0 0 0          0            0         1 1

transformers' `apply_chat_template` gives the text. What the assistant writes is marked by
`{% generation %}` in the template, as transformers defines it. In other templates it is what each
assistant message adds to the messages before it and the prompt for a reply, which needs a template
that never changes an earlier turn.
"""

import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain.data.pretrained import first_line
from nanotrain.errors import DataError, NanotrainError
from nanotrain.untrusted import list_of, object_of, parse_json, text_of

ASSISTANT = "assistant"
MEMORY_BYTES = 2 << 30  # for a template and its texts
Message = dict[str, Any]


class ChatEncoder:
    """The chat template of a tokenizer.

    Args:
        tokenizer: folder or name that transformers' AutoTokenizer takes.

    Raises:
        DataError: it has no chat template, or no offsets of tokens.
    """

    def __init__(self, tokenizer: str) -> None:
        from transformers import AutoTokenizer  # 1 s

        what = f"{tokenizer} has no chat template"
        fix = "name the tokenizer of a chat model, or add chat_template.jinja to its folder"
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                tokenizer, trust_remote_code=False, local_files_only=Path(tokenizer).is_dir()
            )
            template = self._tokenizer.chat_template
            is_fast = self._tokenizer.is_fast
        except (OSError, ValueError) as error:
            raise DataError(what, why=str(error).splitlines()[0], fix=fix) from None
        if not template or not is_fast:
            why = "it has no chat_template.jinja, and tokenizer_config.json names no chat_template"
            raise DataError(what, why=why, fix=fix)
        self._marks_turns = "generation %}" in str(template)

    def encode(self, conversation: str) -> tuple[list[int], np.ndarray]:
        """The token ids of a conversation, and their mask [tokens] uint8.

        Args:
            conversation: the messages as JSON.

        Raises:
            DataError: no messages with role and content, or a template that refuses them or changes
                earlier turns.
        """
        messages = _parse_messages(conversation)
        if self._marks_turns:
            encoded = self._render(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=np.uint8)
        text = self._render(messages, tokenize=False)
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoding["input_ids"])
        mask = np.zeros(len(ids), dtype=np.uint8)
        starts = np.array([start for start, _ in encoding["offset_mapping"]])
        for begin, end in self._find_replies(messages, text):
            mask[(begin <= starts) & (starts < end)] = 1
        return ids, mask

    def prompt(self, messages: Sequence[Message], *, continues: bool) -> str:
        """The text of messages up to a reply; see `chat.ChatTemplate.prompt`."""
        options = {"add_generation_prompt": not continues, "continue_final_message": continues}
        return str(self._render(messages, tokenize=False, **options))

    def _find_replies(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        """First character, and the one after the last, of every message of the assistant."""
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[:number], tokenize=False, add_generation_prompt=True)
            through = self._render(messages[: number + 1], tokenize=False)
            if not (text.startswith(through) and through.startswith(before)):
                raise DataError(
                    "the chat template changes earlier turns",
                    why=(
                        f"message {number + 1} is another text once others follow it, "
                        "so its tokens are unknown"
                    ),
                    fix=(
                        "add {% generation %} and {% endgeneration %} "
                        "around the assistant's text in the template"
                    ),
                )
            spans.append((len(before), len(through)))
        return spans

    def _render(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(list(messages), **options)
        except MemoryError:
            why = f"the chat template needs more than {MEMORY_BYTES:,} bytes"
            fix = "correct the chat template"
            raise DataError("a conversation cannot be used", why=why, fix=fix) from None
        except Exception as error:  # a template may divide by zero, recurse, or call anything
            why = f"the chat template refuses it: {first_line(error)}"
            raise DataError(
                "a conversation cannot be used", why=why, fix="correct or remove it"
            ) from None


def _parse_messages(conversation: str) -> list[Message]:
    """The messages of a conversation, with role and content."""
    try:
        messages = []
        for value in list_of(parse_json(conversation), "messages"):
            message = object_of(value, "a message")
            role = text_of(message.get("role"), "role")
            content = text_of(message.get("content"), "content")
            messages.append(message | {"role": role, "content": content})
        if not any(message["role"] == ASSISTANT for message in messages):
            raise ValueError("it has no message of the assistant, whose tokens are the targets")
    except ValueError as error:
        fix = (
            'write {"messages": [{"role": "user", "content": "..."}, '
            '{"role": "assistant", "content": "..."}]}'
        )
        raise DataError("a conversation cannot be used", why=str(error), fix=fix) from None
    return messages


def main() -> None:
    """Encode conversations, one per line of standard input, after the name of the tokenizer.

    A line is the messages, or {"prompt": [...], "continues": false} for the text of a prompt.
    A reply is {"ids": [...], "mask": [...]}, {"text": "..."}, or {"error": [what, why, fix]}. After
    the tokenizer is loaded the process may use MEMORY_BYTES more.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library may print
    encoder: ChatEncoder | None = None
    for line in sys.stdin.buffer:
        reply: dict[str, Any] = {}
        try:
            if encoder is None:
                encoder = ChatEncoder(json.loads(line))
                limit_memory(MEMORY_BYTES)
            elif line.startswith(b'{"prompt"'):
                request = json.loads(line)
                text = encoder.prompt(request["prompt"], continues=request["continues"])
                reply = {"text": text}
            else:
                ids, mask = encoder.encode(line.decode())
                reply = {"ids": ids, "mask": mask.tolist()}
        except NanotrainError as error:
            reply = {"error": [error.what, error.why, error.fix]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def limit_memory(nbytes: int) -> None:
    """Let this process use `nbytes` more of its address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
