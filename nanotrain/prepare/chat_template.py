"""Render a chat template: the program of a process that `chat` starts.

A chat template is a program of somebody else. This one imports jinja2 alone, neither transformers
nor torch, so it starts in 0.1 s. Lines of JSON come in and go out, the settings first:

    in      {"template": "...", "variables": {"bos_token": "<s>"}, "budget_s": 20}
            {"messages": [{"role": "user", "content": "2 + 2?"}], "tools": null,
             "add_generation_prompt": true}
    out     {"text": "<s>user: 2 + 2?", "spans": []}
            {"error": "roles must alternate"}

Text and spans are those of transformers' `apply_chat_template`: the same sandbox of jinja2, with
the same filters and functions. `spans` are the characters inside `{% generation %}`.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 2 << 30  # for a template and its texts
MAX_CHARACTERS = 1 << 26  # of a conversation; the parent reads and tokenizes them


class Blocks:
    """The text of a conversation so far, and the assistant's part of it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.spans: list[tuple[int, int]] = []


class Generation(Extension):
    """`{% generation %}`: records the characters that the assistant writes."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.blocks = Blocks()

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call of `record`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("record"), [], [], body).set_lineno(line)

    def record(self, caller: Callable[[], str]) -> str:
        """The text of a block, after its span is recorded."""
        text = caller()
        start = sum(map(len, self.blocks.texts))
        self.blocks.spans.append((start, start + len(text)))
        return text


class TemplateDict:
    """`dict` in a template, where the class itself would give access to other classes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """`dict.fromkeys`."""
        return dict.fromkeys(*args)


class TemplateNamespace(jinja2.utils.Namespace):
    """`namespace` in a template, without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:  # `namespace(self=...)` is possible
        entries = dict(*args[1:], **values)
        for name in entries:
            _require_public(name)
        jinja2.utils.Namespace.__init__(args[0], entries)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no {name}")


def raise_exception(message: str) -> None:
    """Refuse a conversation."""
    raise jinja2.exceptions.TemplateError(message)


def strftime_now(form: str) -> str:
    """The time, in the form of strftime."""
    return datetime.now().strftime(form)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    *,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON; jinja2's own filter writes `<` and `&` for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class Renderer:
    """A chat template, compiled for the first conversation."""

    def __init__(self, template: str, variables: Mapping[str, Any]) -> None:
        self._source = template
        self._variables = variables
        self._template: jinja2.Template | None = None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
        }
        self._environment = environment

    def reply(self, request: Mapping[str, Any]) -> str:
        """The reply to a request, as JSON; never raises."""
        try:
            return json.dumps(self._render(request))
        except MemoryError:
            return json.dumps({"error": f"it needs more than {MEMORY_BYTES:,} bytes"})
        except Exception as error:  # a template may divide by zero, recurse, or call anything
            lines = str(error).strip().splitlines()
            return json.dumps({"error": lines[0] if lines else type(error).__name__})

    def _render(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The text of a conversation, and the spans that the assistant writes."""
        if self._template is None:
            self._template = self._environment.from_string(self._source)
        generation: Any = self._environment.extensions[Generation.identifier]
        blocks = generation.blocks = Blocks()
        values = {"tools": None, "documents": None, **self._variables, **request}
        num_characters = 0
        for text in self._template.generate(values):
            blocks.texts.append(text)
            num_characters += len(text)
            if num_characters > MAX_CHARACTERS:
                raise ValueError(f"it makes a text of more than {MAX_CHARACTERS:,} characters")
        return {"text": "".join(blocks.texts), "spans": blocks.spans}


def limit_memory(nbytes: int) -> None:
    """Let this process use `nbytes` more of its address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Render the conversations of standard input.

    The kernel ends the process by SIGALRM where one of them takes more than its budget, also after
    the parent is gone.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library may print
    settings = json.loads(sys.stdin.buffer.readline())
    renderer = Renderer(settings["template"], settings["variables"])
    limit_memory(MEMORY_BYTES)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, settings["budget_s"])
        replies.write(renderer.reply(json.loads(line)) + "\n")
        replies.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
