"""One process renders the conversations of a template, within a budget of time and memory."""

import subprocess
import time

import pytest

from nanotrain.errors import DataError
from nanotrain.prepare.chat_process import ChatProcess

ECHO = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\u00e9\n"}]


@pytest.mark.parametrize(
    ("template", "budget_s", "why"),
    [
        (LOOPS, 0.2, "it took more than 0.2 s for one conversation"),
        ("{{ 'x' * 10 ** 10 }}", 20, "it needs more than 2,147,483,648 bytes"),
        ("{{ '\\ud800' }}", 20, "which is no valid text"),
        ("{{ raise_exception('no') }}", 20, "the chat template refuses it: no"),
    ],
)
def test_a_template_has_a_budget_of_time_and_memory(
    template: str, budget_s: float, why: str
) -> None:
    with pytest.raises(DataError, match=why):
        ChatProcess(template, {}, budget_s=budget_s).render(TALK)


def test_one_process_renders_all_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **more: started.append(args) or popen(*args, **more)
    )
    chat = ChatProcess(ECHO, {"bos_token": "<s>"}, budget_s=20)
    assert started == []  # a check of the template alone needs none
    for _ in range(3):
        assert chat.render(TALK).text == "<s>user: a\nassistant: \u00e9\n\n"
    assert len(started) == 1


def test_the_time_between_conversations_is_not_counted() -> None:
    chat = ChatProcess(ECHO, {}, budget_s=1.0)
    chat.render(TALK)
    time.sleep(1.2)
    chat.render(TALK)


def test_a_process_that_ends_is_an_error() -> None:
    chat = ChatProcess(ECHO, {}, budget_s=20)
    chat.render(TALK)
    assert chat._process is not None
    chat._process.kill()
    for _ in range(2):
        with pytest.raises(DataError, match="its process ended"):
            chat.render(TALK)
