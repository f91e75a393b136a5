"""Conversations of `generate --chat`: files, typed messages, and where a reply ends."""

import io
import json
import sys
from pathlib import Path

import pytest

from nanotrain.cli.chat import read_conversations
from nanotrain.cli.main import main
from nanotrain.errors import DataError
from tests.cli.test_generate_chat import reply_of_transformers
from tests.inference.tiny_folders import write_folder

# short, as the model has 32 positions
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
FLAGS = ("--chat", "--temperature", "0", "--num-tokens", "3", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder("bos", tmp_path_factory.mktemp("chat"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def test_replies_to_the_conversations_of_a_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talks = [[user("a"), {"role": "assistant", "content": "cat"}, user("dog")], [user("the")]]
    expected = [reply_of_transformers(folder, talk) for talk in talks]
    rows = tmp_path / "talks.jsonl"
    rows.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks) + "\n\n")
    capsys.readouterr()
    assert main(["generate", str(folder), *FLAGS, "--messages", str(rows)]) == 0
    assert capsys.readouterr().out == "\n\n".join(expected) + "\n"
    one = tmp_path / "talk.json"
    one.write_text(json.dumps(talks[0], indent=1))
    assert main(["generate", str(folder), *FLAGS, "--messages", str(one)]) == 0
    assert capsys.readouterr().out == expected[0] + "\n"


def test_typed_messages_are_one_conversation(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = reply_of_transformers(folder, [user("a")])
    talk = [user("a"), {"role": "assistant", "content": first}, user("the dog")]
    second = reply_of_transformers(folder, talk)
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n\n \nthe dog\n"))
    assert main(["generate", str(folder), *FLAGS]) == 0
    assert capsys.readouterr().out == f"{first}\n{second}\n"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_typed_bytes_that_are_no_text_are_replaced(
    folder: Path,
    errors: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = reply_of_transformers(folder, [user("a \ufffd")])
    capsys.readouterr()
    typed = io.TextIOWrapper(io.BytesIO(b"a \xff\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", typed)
    assert main(["generate", str(folder), *FLAGS]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_a_conversation_longer_than_the_positions_begins_anew(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reply_of_transformers(folder, [user("a")])
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("a cat " * 20 + "\na\n"))
    assert main(["generate", str(folder), *FLAGS]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{expected}\n" and "a new conversation begins" in captured.err


def test_a_reply_ends_where_the_template_ends_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A character of the reply is what another template writes after replies."""
    reply = reply_of_transformers(folder, [user("a")])
    end = reply.strip()[-1]
    closing = f"{{{{ {end!r} if m['role'] == 'assistant' else '' }}}}\n{{% endfor"
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("\n{% endfor", closing))
    try:
        assert reply_of_transformers(folder, [user("a")]) == reply
        capsys.readouterr()
        assert main(["generate", str(folder), *FLAGS, "--prompt", "a"]) == 0
        assert capsys.readouterr().out == reply.partition(end)[0] + "\n" != reply + "\n"
    finally:
        (folder / "chat_template.jinja").write_text(TEMPLATE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--messages", "a.json"), "--messages without --chat"),
        (("--chat", "--messages", "a.json", "--prompt", "a"), "--prompt with --messages"),
        (("--chat", "--messages", "a.json", "--system", "a"), "--system with --messages"),
        (("--chat", "--messages", "missing.json"), "missing.json cannot be read: it does not"),
    ],
)
def test_arguments_that_contradict_are_one_message(
    folder: Path, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_conversation_of_a_line_may_hold_other_ends_of_lines(tmp_path: Path) -> None:
    content = "a\u2028b\u2029c\x85d"  # JSON has them as they are
    row = json.dumps({"messages": [user(content)]}, ensure_ascii=False)
    file = tmp_path / "a.jsonl"
    file.write_bytes(f"{row}\r\n\r\n{row}\n".encode())
    assert [talk.messages for talk in read_conversations(file)] == [[user(content)]] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "it is empty"), ("[]", "it has no messages"), ('{"messages": 3}', "messages is")],
)
def test_what_is_no_conversation_is_one_message(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        read_conversations(file)
