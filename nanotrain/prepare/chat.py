"""Conversations as token ids with a loss mask: 1 on the tokens that the assistant writes.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    {"messages": [...], "tools": [{"type": "function", "function": {"name": "add", ...}}]}

    text    <|im_start|> user 2 + 2?<|im_end|> <|im_start|> assistant 4 <|im_end|>
    mask    0            0    0 0 0 0          0            0         1 1

The text is that of transformers' `apply_chat_template`. A chat template is a program of whoever
made the tokenizer, so it runs in a process of its own (`chat_process`).

What the assistant writes is marked by `{% generation %}` in the template, as transformers defines
it. In other templates it is what each assistant message adds to the messages before it and the
prompt for a reply. Where a template shortens earlier turns (of models that think, for example) it
is the text from that prompt to the end of the content and of the turn.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from nanotrain.data.encoding_budget import within_budget
from nanotrain.data.pretrained import first_line, load_pretrained
from nanotrain.errors import DataError
from nanotrain.prepare.chat_process import BUDGET_S, ChatProcess, Message, Rendered, refusal_of
from nanotrain.untrusted import list_of, object_of, parse_json, text_of

ASSISTANT = "assistant"
_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "  # transformers' own, since templates see it
_REPLY = "REPLY_WHOSE_END_IS_READ"


@dataclass(frozen=True)
class Conversation:
    """Messages, and the tools that the assistant may call; None where a row has none."""

    messages: list[Message]
    tools: list[Any] | None = None

    @classmethod
    def parse(cls, text: str, *, has_reply: bool = True) -> "Conversation":
        """The conversation of a document: a list of messages, or an object as `as_text` writes it.

        Args:
            text: JSON.
            has_reply: whether it has to have a message of the assistant, to learn from.

        Raises:
            DataError: no messages with role and content, or none of the assistant.
        """
        try:
            value = parse_json(text)
            is_object = isinstance(value, dict) and "messages" in value
            row = value if is_object else {"messages": value}
            messages = []
            for entry in list_of(_decode_json(row["messages"]), "messages"):
                messages.append(_parse_message(object_of(entry, "a message")))
            if not messages:
                raise ValueError("it has no messages")
            if has_reply and not any(message["role"] == ASSISTANT for message in messages):
                raise ValueError("it has no message of the assistant, whose tokens are the targets")
            return cls(messages, _parse_tools(row.get("tools")))
        except ValueError as error:
            fix = (
                'write {"messages": [{"role": "user", "content": "..."}, '
                '{"role": "assistant", "content": "..."}]}'
            )
            raise DataError("a conversation cannot be used", why=str(error), fix=fix) from None


@dataclass(frozen=True)
class TurnEnd:
    """The end of a reply as a template writes it: a token that ends a text, or a text that does."""

    token: int | None = None
    text: str = ""  # of the token, or of the end where no token is added to the vocabulary for it


class ChatTemplate:
    """The chat template of a tokenizer, in a process of its own from the first conversation on.

    A tokenizer with several templates has its own for conversations with tools, as in transformers.

    Args:
        tokenizer: folder or name that transformers' AutoTokenizer takes.
        template: the template to use instead of the tokenizer's.
        budget_s: seconds for one conversation.

    Attributes:
        source: text of the template, and of that for tools where it is another one.

    Raises:
        DataError: it has no chat template, or no offsets of tokens.
    """

    def __init__(
        self, tokenizer: str, *, template: str | None = None, budget_s: float = BUDGET_S
    ) -> None:
        if tokenizer == "bytes":
            raise _no_template(tokenizer, why="bytes are no tokenizer of a chat model")
        self._tokenizer = load_pretrained(tokenizer)
        if not self._tokenizer.is_fast:
            why = "its tokens have no offsets in the text: it has no tokenizer.json"
            raise _no_template(tokenizer, why=why)
        self._budget_s = budget_s
        if template is not None:
            self._tokenizer.chat_template = template
        plain = self._read_template(tokenizer, tools=None)
        template_of_tools = self._read_template(tokenizer, tools=[])
        self.source = plain
        self._plain = self._program(plain)
        self._with_tools = self._plain
        if template_of_tools != plain:
            self.source += template_of_tools
            self._with_tools = self._program(template_of_tools)

    def _read_template(self, name: str, *, tools: list[Any] | None) -> str:
        """The template of conversations with or without tools."""
        try:
            template = text_of(self._tokenizer.get_chat_template(tools=tools), "chat_template")
        except (ValueError, TypeError) as error:
            raise _no_template(name, why=first_line(error)) from None
        if not template:
            raise _no_template(name, why="its chat_template is empty")
        return template

    def _program(self, template: str) -> "_Program":
        """A template with its process, which has not begun yet."""
        variables = self._tokenizer.special_tokens_map
        process = ChatProcess(template, variables, budget_s=self._budget_s)
        return _Program(process, marks_turns="generation %}" in template)

    def encode(self, conversation: str) -> tuple[list[int], np.ndarray]:
        """The token ids of a conversation, and their mask [tokens] uint8.

        Args:
            conversation: the messages, and perhaps tools, as JSON.

        Raises:
            DataError: no messages with role and content, or a template that refuses them, changes
                earlier turns, or needs more than its budget.
        """
        parsed = Conversation.parse(conversation)
        program = self._plain if parsed.tools is None else self._with_tools
        text, spans = program.process.render(parsed.messages, tools=parsed.tools)
        encoded = self._tokenize(text)
        ids = list(encoded["input_ids"])
        mask = np.zeros(len(ids), dtype=np.uint8)
        if program.marks_turns:
            for begin, end in spans:
                first = encoded.char_to_token(begin)
                if first is None:
                    break
                last = encoded.char_to_token(end - 1) or len(ids) - 1
                mask[first : last + 1] = 1
            return ids, mask
        starts = np.array([start for start, _ in encoded["offset_mapping"]])
        replies = _find_replies(
            parsed, text, process=program.process, read_closing=lambda: self._closing
        )
        for begin, end in replies:
            mask[(begin <= starts) & (starts < end)] = 1
        return ids, mask

    @cached_property
    def _closing(self) -> str:
        """The text that ends a reply."""
        return self.turn_end().text

    def turn_end(self) -> TurnEnd:
        """The end of a reply: the first added token of the text that the template writes after it.

        Raises:
            DataError: the template refuses a message and its reply, or writes another text for it.
        """
        question = {"role": "user", "content": "a"}
        reply = {"role": ASSISTANT, "content": _REPLY}
        text = self._plain.process.render([question, reply]).text
        _, mark, after = text.rpartition(_REPLY)
        if not mark:
            raise _changes_replies()
        added = self._tokenizer.added_tokens_decoder
        for token in self._tokenize(after)["input_ids"]:
            if token in added:
                return TurnEnd(token, str(added[token]))
            if self._tokenizer.decode([token]).strip():
                break
        return TurnEnd(text=after.strip())

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        continues: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The text of messages up to a reply of the assistant.

        Args:
            messages: role and content of each.
            continues: whether the last message is the beginning of the reply.
            tools: JSON schemas of functions that the assistant may call.

        Raises:
            DataError: the template refuses the messages or exceeds its budget, or a reply that is
                to be continued has calls of tools, which a template writes after the text.
        """
        process = self._plain.process if tools is None else self._with_tools.process
        if not continues:
            return process.render(messages, tools=tools, add_generation_prompt=True).text
        if messages[-1].get("tool_calls"):
            raise _calls_tools()
        content = messages[-1]["content"] or ""
        opened = [*messages[:-1], messages[-1] | {"content": content + _OPEN_END}]
        text = process.render(opened, tools=tools).text
        tag = _OPEN_END.strip()
        if content.strip() not in text or tag not in text:
            raise refusal_of("the chat template leaves out a part of the last message")
        begin = text.rindex(tag)
        # a template that strips messages has removed the blank of the tag, and blanks before it
        is_stripped = not text.startswith(_OPEN_END, begin)
        return text[:begin].rstrip() if is_stripped else text[:begin]

    def _tokenize(self, text: str) -> Any:
        """The tokens of a text, with their offsets."""
        return within_budget(
            lambda: self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True),
            num_characters=len(text),
        )


@dataclass(frozen=True)
class _Program:
    """A template in its process, and whether it marks the assistant's text."""

    process: ChatProcess
    marks_turns: bool


def _find_replies(
    conversation: Conversation,
    text: str,
    *,
    process: ChatProcess,
    read_closing: Callable[[], str],
) -> list[tuple[int, int]]:
    """First character, and the one after the last, of every message of the assistant.

    Args:
        conversation: the messages.
        text: what the template writes for them.
        process: the template.
        read_closing: reads the text that ends a reply, where a template shortens earlier turns.
    """
    spans = []
    messages = conversation.messages
    render = partial(process.render, tools=conversation.tools)
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        if number == 0:  # a template renders no empty conversation
            raise refusal_of("its first message is of the assistant, so nothing asks for it")
        before = render(messages[:number], add_generation_prompt=True).text
        through = render(messages[: number + 1]).text
        if not text.startswith(before):
            raise _changes_turns(number)
        end = len(through)
        if not text.startswith(through):
            end = _end_of_content(messages, number, text=text, render=render)
            closing = read_closing()
            end += len(closing) if text.startswith(closing, end) else 0
        spans.append((len(before), end))
    return spans


def _end_of_content(
    messages: Sequence[Message], number: int, *, text: str, render: Callable[..., Rendered]
) -> int:
    """The character after the content of a message, found by a text that is added to it.

    Raises:
        DataError: the template changes the content, or leaves it out.
    """
    message = messages[number]
    longer = message | {"content": (message["content"] or "") + _REPLY}
    marked = render([*messages[:number], longer, *messages[number + 1 :]]).text
    before, mark, after = marked.partition(_REPLY)
    if not mark or before + after != text:
        raise _changes_turns(number)
    return len(before)


def _changes_turns(number: int) -> DataError:
    """The error for a template that writes other text for a message once others follow it."""
    return DataError(
        "the chat template changes earlier turns",
        why=f"message {number + 1} is another text once others follow it, "
        "so its tokens are unknown",
        fix="add {% generation %} and {% endgeneration %} around the assistant's text in "
        "a copy of the template, and name it with --chat-template",
    )


def _changes_replies() -> DataError:
    """The error for a template that does not write a reply as it is."""
    return DataError(
        "the end of a reply is unknown",
        why="the chat template changes the text of a reply, or leaves it out",
        fix="write the content as it is in the tokenizer's chat_template.jinja, or in a copy "
        "that --chat-template of `nanotrain prepare` names",
    )


def _calls_tools() -> DataError:
    """The error for continuing a reply that has calls of tools."""
    return DataError(
        "a conversation cannot be continued",
        why="its last message has tool_calls, so the assistant has written all of it",
        fix="add the message of the tool after it, or leave tool_calls out",
    )


def _parse_message(message: dict[str, Any]) -> Message:
    """A message with its role and content; one that calls tools may have no content."""
    role = text_of(message.get("role"), "role")
    content = message.get("content")
    if content is not None or not message.get("tool_calls"):
        content = text_of(content, "content")
    return message | {"role": role, "content": content}


def _parse_tools(tools: Any) -> list[Any] | None:
    """The JSON schemas of tools; None for null and for an empty text."""
    if tools is None or tools == "":
        return None
    return [object_of(tool, "a tool") for tool in list_of(_decode_json(tools), "tools")]


def _decode_json(value: Any) -> Any:
    """The value of a column, which may be a text of JSON."""
    return parse_json(value) if isinstance(value, str) else value


def _no_template(tokenizer: str, *, why: str) -> DataError:
    return DataError(
        f"{tokenizer} has no chat template",
        why=why,
        fix="name the tokenizer of a chat model, add chat_template.jinja to its folder, or prepare "
        "conversations with --chat-template",
    )


def as_text(messages: Any, tools: Any = None) -> str:
    """The messages and tools of a row as JSON, the form in which a conversation is a document."""
    conversation = messages if tools is None else {"messages": messages, "tools": tools}
    return json.dumps(conversation, ensure_ascii=False)
