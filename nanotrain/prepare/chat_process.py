"""`ChatProcess`: a chat template in a process of its own.

A chat template is a program of whoever made the tokenizer: it may loop, recurse and fill the
memory. `chat_template` is the program of the process, which ends after BUDGET_S seconds for one
conversation.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nanotrain.errors import DataError
from nanotrain.prepare import chat_template
from nanotrain.untrusted import text_of

BUDGET_S = 20.0  # for one conversation
# names of what a model thinks before it replies; templates read the first or the second
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
Message = dict[str, Any]


class Rendered(NamedTuple):
    """The text of a conversation, and the characters inside `{% generation %}`."""

    text: str
    spans: list[tuple[int, int]]


class ChatProcess:
    """A process that is started for the first conversation, and ends with this object.

    Args:
        template: the chat template.
        variables: what it refers to beside messages, such as bos_token.
        budget_s: seconds for one conversation.
    """

    def __init__(self, template: str, variables: Mapping[str, Any], *, budget_s: float) -> None:
        self._settings = {"template": template, "variables": variables, "budget_s": budget_s}
        self._budget_s = budget_s
        self._process: subprocess.Popen[bytes] | None = None

    def __del__(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """The text of messages.

        Args:
            messages: role and content of each.
            tools: JSON schemas of functions that the assistant may call.
            add_generation_prompt: whether the text asks for a reply.

        Raises:
            DataError: the template refuses them, or needs more than its budget.
        """
        seen = [_as_templates_see(message) for message in messages]
        request = {"messages": seen, "tools": tools, "add_generation_prompt": add_generation_prompt}
        reply = self._ask(request)
        if "error" in reply:
            raise refusal_of(f"the chat template refuses it: {reply['error']}")
        try:
            return Rendered(text_of(reply["text"], "its text"), reply["spans"])
        except ValueError as error:
            raise refusal_of(str(error)) from None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request."""
        if self._process is None:
            self._process = self._start()
        try:
            _send(self._process, request)
            assert self._process.stdout is not None, "a pipe"
            reply: dict[str, Any] = json.loads(self._process.stdout.readline())
        except (OSError, ValueError):  # it has ended
            why = "its process ended"
            if self._process.wait() == -signal.SIGALRM:
                why = f"it took more than {self._budget_s:g} s for one conversation"
            raise DataError(
                "the chat template cannot be used",
                why=why,
                fix="correct the template; it is a program, which may loop or fill the memory",
            ) from None
        return reply

    def _start(self) -> "subprocess.Popen[bytes]":
        """A process with the template, in a session of its own: Ctrl-C is for the parent."""
        process = subprocess.Popen(
            [sys.executable, "-P", chat_template.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        _send(process, self._settings)
        return process


def _send(process: "subprocess.Popen[bytes]", value: dict[str, Any]) -> None:
    """Write a value as one line of JSON to the input of a process."""
    assert process.stdin is not None, "a pipe"
    process.stdin.write(json.dumps(value, default=str).encode() + b"\n")
    process.stdin.flush()


def _as_templates_see(message: Message) -> Message:
    """A message as transformers hands it to a template.

    >>> _as_templates_see({"role": "user", "content": "a", "tool_calls": None})
    {'role': 'user', 'content': 'a'}
    """
    kept = {name: value for name, value in message.items() if value is not None}
    thoughts = [kept[name] for name in _THOUGHTS if name in kept]
    if not thoughts:
        return kept
    return {"thinking": thoughts[0], **kept, "reasoning_content": thoughts[0]}


def refusal_of(why: str) -> DataError:
    """The error for a conversation that cannot be used."""
    return DataError("a conversation cannot be used", why=why, fix="correct or remove it")
