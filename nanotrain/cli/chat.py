"""Conversations of `nanotrain generate --chat`: of the command line, of a file, or typed.

    --prompt TEXT    a message of a user, after --system
    --messages FILE  .json: {"messages": [...]} or the list; .jsonl: one conversation per line
    neither          lines of standard input, each a message of one conversation; Ctrl-D ends it

A reply ends where the template's does, beside the ends of the model's folder. A last message of the
assistant is the beginning of its reply.
"""

import io
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanotrain.cli.values import without_surrogates
from nanotrain.errors import ConfigError, DataError
from nanotrain.log import get_logger

if TYPE_CHECKING:
    from nanotrain.comm.group import Group
    from nanotrain.inference.checkpoint import LoadedModel
    from nanotrain.prepare.chat import ChatTemplate, Conversation
    from nanotrain.prepare.chat_process import Message

log = get_logger(__name__)

MAX_BYTES = 1 << 28  # of a file of conversations
ROWS = (".jsonl", ".ndjson")
Pieces = Iterator[tuple[int, str]]


def check_chat(args: Namespace) -> None:
    """Check the arguments of conversations.

    Raises:
        ConfigError: --system or --messages without --chat, or beside what they replace.
    """
    for flag, value in (("--system", args.system), ("--messages", args.messages)):
        if value is not None and not args.chat:
            raise ConfigError(
                f"{flag} without --chat",
                why="a text that is continued has no messages",
                fix=f"add --chat, or leave {flag} out",
            )
    if args.messages is None:
        return
    for flag, value in (("--prompt", args.prompt), ("--system", args.system)):
        if value is not None:
            raise ConfigError(
                f"{flag} with --messages",
                why="the file has all messages",
                fix=f"write it into {args.messages}, or leave it out",
            )


def given_conversations(args: Namespace) -> "list[Conversation]":
    """The conversations of the command line; none where messages are typed."""
    from nanotrain.prepare.chat import Conversation

    if args.messages is not None:
        return read_conversations(Path(args.messages))
    conversations = []
    for prompt in args.prompt or []:
        messages = [*system_messages(args.system), {"role": "user", "content": prompt}]
        conversations.append(Conversation(messages))
    return conversations


def system_messages(text: str | None) -> "list[Message]":
    """The message of the system; none without a text."""
    return [] if text is None else [{"role": "system", "content": text}]


def read_conversations(file: Path) -> "list[Conversation]":
    """The conversations of a file, each of which waits for a reply.

    Raises:
        DataError: the file cannot be read, has none, or one that cannot be used.
    """
    from nanotrain.prepare.chat import Conversation
    from nanotrain.untrusted import read_file, unreadable

    try:
        content = read_file(file, most=MAX_BYTES)
        # the lines of bytes: in text U+2028 and others, which JSON may hold, would end one
        lines = content.splitlines() if file.suffix in ROWS else [content]
        rows = [line.decode() for line in lines if line.strip()]
        if not rows:
            raise ValueError("it is empty")
    except (OSError, ValueError) as error:
        raise DataError(
            f"--messages {file} cannot be read",
            why=unreadable(error),
            fix='write {"messages": [{"role": "user", "content": "..."}]}',
        ) from None
    return [Conversation.parse(row, has_reply=False) for row in rows]


def prompt_of(conversation: "Conversation", template: "ChatTemplate") -> str:
    """The text of a conversation up to its reply, or up to the given beginning of it."""
    messages = conversation.messages
    continues = messages[-1]["role"] == "assistant"
    return template.prompt(messages, continues=continues, tools=conversation.tools)


def with_turn_end(model: "LoadedModel", template: "ChatTemplate") -> "LoadedModel":
    """The model with the ends of replies, adding no special tokens to a prompt."""
    from nanotrain.data.prompts import without_added

    end = template.turn_end()
    defaults = model.defaults
    if end.token is not None:
        defaults = replace(defaults, ends=tuple(dict.fromkeys([*defaults.ends, end.token])))
    elif end.text:
        defaults = replace(defaults, stops=(*defaults.stops, end.text))
    return replace(model, tokenizer=without_added(model.tokenizer), defaults=defaults)


def talk(
    template: "ChatTemplate",
    stream: Callable[[Sequence[str]], Pieces],
    *,
    system: str | None,
    control: "Group",
) -> None:
    """Reply to the messages of standard input until it ends.

    A conversation that the model cannot read any further is left, and a new one begins.

    Args:
        template: chat template of the model.
        stream: yields the pieces of the text after a prompt.
        system: message of the system at the beginning.
        control: group of all ranks; the first one reads and prints.
    """
    from nanotrain.comm.collectives import broadcast_object

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as Python reads arguments
    messages = system_messages(system)
    while True:
        text = broadcast_object(read_message() if control.is_first else None, control)
        if text is None:
            return
        messages.append({"role": "user", "content": text})
        try:
            pieces = stream([template.prompt(messages)])
            reply = print_reply(pieces, is_first=control.is_first)
        except DataError as error:
            log.info("%s: a new conversation begins", error)
            messages = system_messages(system)
            continue
        messages.append({"role": "assistant", "content": reply})


def read_message() -> str | None:
    """The next line of standard input with text; None at its end."""
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        if text.strip():
            return without_surrogates(text)


def print_reply(pieces: Pieces, *, is_first: bool) -> str:
    """Print a reply as it grows, on the first rank; returns it."""
    reply = ""
    for _, piece in pieces:
        reply += piece
        if is_first:
            print(piece, end="", flush=True)
    if is_first:
        print(flush=True)
    return reply
