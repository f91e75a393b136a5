"""Conversations as token ids with a loss mask, within a budget of time and memory.

A chat template is a program of whoever made the tokenizer: it may loop, recurse and fill the
memory. It runs in a process of its own (`chat_template`), which is killed after BUDGET_S seconds
for one conversation.
"""

import json
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanotrain.errors import DataError

Message = dict[str, Any]

LOAD_S = 120.0  # for the process to load the tokenizer
BUDGET_S = 20.0  # for one conversation
BLOCK_BYTES = 1 << 20
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from nanotrain.prepare.chat_template import main; main()"
)


class ChatTemplate:
    """The chat template of a tokenizer, in a process of its own.

    Args:
        tokenizer: folder or name that transformers' AutoTokenizer takes.
        budget_s: seconds for one conversation.

    Raises:
        DataError: it has no chat template, or no offsets of tokens.
    """

    def __init__(self, tokenizer: str, *, budget_s: float = BUDGET_S) -> None:
        self._budget_s = budget_s
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._ask(json.dumps(tokenizer), timeout_s=LOAD_S)

    def __del__(self) -> None:
        process = self.__dict__.get("_process")
        if process is not None:
            process.kill()
            process.communicate()

    def encode(self, conversation: str) -> tuple[list[int], np.ndarray]:
        """The token ids of a conversation, and their mask [tokens] uint8.

        Args:
            conversation: the messages as JSON.

        Raises:
            DataError: no messages with role and content, or a template that refuses them, changes
                earlier turns, or needs more than its budget.
        """
        line = conversation.replace("\n", " ")  # between values of JSON
        reply = self._ask(line, timeout_s=self._budget_s)
        return reply["ids"], np.array(reply["mask"], dtype=np.uint8)

    def prompt(self, messages: Sequence[Message], *, continues: bool = False) -> str:
        """The text of messages up to a reply of the assistant.

        Args:
            messages: role and content of each.
            continues: whether the last message is the beginning of the reply.

        Raises:
            DataError: the template refuses them, or needs more than its budget.
        """
        line = json.dumps({"prompt": list(messages), "continues": continues})
        return str(self._ask(line, timeout_s=self._budget_s)["text"])

    def _ask(self, line: str, *, timeout_s: float) -> Any:
        """The reply to a line.

        Raises:
            DataError: the reply is an error, or there is none in time.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None, "pipes"
        try:
            process.stdin.write(line.encode(errors="replace") + b"\n")
            process.stdin.flush()
            reply = json.loads(self._read_line(timeout_s))
        except (OSError, ValueError, EOFError) as error:
            process.kill()
            why = "its process ended"
            if isinstance(error, TimeoutError):
                why = f"it took more than {timeout_s:g} s for one conversation"
            raise DataError(
                "the chat template cannot be used",
                why=why,
                fix="correct the template; it is a program, which may loop or fill the memory",
            ) from None
        if "error" in reply:
            what, why, fix = reply["error"]
            raise DataError(what, why=why, fix=fix)
        return reply

    def _read_line(self, timeout_s: float) -> bytes:
        """A line of the process; TimeoutError if it does not come."""
        stream: Any = self._process.stdout
        deadline = time.monotonic() + timeout_s
        line = bytearray()
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            block = stream.read1(BLOCK_BYTES)
            if not block:
                raise EOFError
            line += block
        return bytes(line)


def as_text(messages: Any) -> str:
    """The messages of a row as JSON, the form in which a conversation passes as a document."""
    return json.dumps(messages, ensure_ascii=False)
