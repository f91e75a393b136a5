"""`prepare --chat-template`: the template, special tokens and ends of a tokenizer."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from nanotrain.cli.main import main
from nanotrain.data.corpus_info import read_info
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.tokenizer import FastTokenizer, load_tokenizer
from nanotrain.errors import DataError
from nanotrain.prepare.chat import ChatTemplate, TurnEnd, as_text
from nanotrain.prepare.given_template import CHATML, read_template, with_end, with_template
from tests.prepare.test_chat import (
    FORGETS,
    PLAIN,
    TALKS,
    TOOLS,
    TURN,
    messages,
    save_tokenizer,
)

TEXT_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}###\n{% endfor %}"


def prepare(output: Path, source: Path, *arguments: str) -> int:
    line = ["--input", str(source), "--output", str(output), "--workers", "1", *arguments]
    return main(["prepare", *line])


def write_talks(folder: Path) -> Path:
    rows = folder / "talks.jsonl"
    rows.write_text("".join(json.dumps({"messages": messages(talk)}) + "\n" for talk in TALKS))
    return rows


def test_a_bpe_is_trained_with_the_tokens_of_a_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a BPE that was trained on text with a template
    (tmp_path / "text.txt").write_text("some text of a corpus, " * 30)
    arguments = ("--tokenizer", "bpe:300", "--chat-template", "chatml")
    assert prepare(tmp_path / "text", tmp_path / "text.txt", *arguments) == 0
    found = "special tokens of --chat-template of the form <|name|>: <|im_start|> <|im_end|>"
    assert found in capsys.readouterr().out
    folder = str(tmp_path / "text.tokenizer")
    theirs = AutoTokenizer.from_pretrained(folder)
    # when conversations are prepared with it
    talks = write_talks(tmp_path)
    chat = ("--format", "chat", "--tokenizer", folder)
    assert prepare(tmp_path / "talks", talks, *chat) == 0
    out = capsys.readouterr().out
    # then tokens and targets are those of transformers, and the end of a reply ends texts
    corpus = IndexedTokens(tmp_path / "talks")
    num_targets = 0
    for number, talk in enumerate(TALKS):
        expected = theirs.apply_chat_template(
            messages(talk), return_dict=True, return_assistant_tokens_mask=True
        )
        start, stop = corpus.document_start(number), corpus.document_start(number + 1)
        assert corpus.read(start, stop).tolist()[:-1] == expected["input_ids"]
        assert corpus.read_mask(start, stop).tolist()[:-1] == expected["assistant_masks"]
        num_targets += int(corpus.read_mask(start, stop).sum())
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    assert "a reply ends with <|im_end|>" in out and f"{num_targets} of its tokens (" in out
    assert read_info(tmp_path / "talks").targets == num_targets
    ends = json.loads((tmp_path / "talks.tokenizer/generation_config.json").read_text())
    assert ends == {"eos_token_id": [end, theirs.eos_token_id]}


def test_a_tokenizer_without_tokenizer_json_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    (tmp_path / "bytes" / "chat_template.jinja").write_text(CHATML)
    chat = ("--format", "chat", "--tokenizer", str(tmp_path / "bytes"))
    assert prepare(tmp_path / "talks", write_talks(tmp_path), *chat) == 2
    assert "it has no tokenizer.json" in capsys.readouterr().err


def test_another_template_is_another_corpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer whose template changed since is no reason to call the corpus prepared."""
    folder = save_tokenizer(
        tmp_path / "tokenizer", "{% for m in messages %}" + TURN + "{% endfor %}"
    )
    talks = write_talks(tmp_path)
    chat = ("--format", "chat", "--tokenizer", folder)
    assert prepare(tmp_path / "talks", talks, *chat) == 0
    assert prepare(tmp_path / "talks", talks, *chat) == 0
    assert "is already prepared" in capsys.readouterr().out
    save_tokenizer(tmp_path / "tokenizer", TEXT_END)
    assert prepare(tmp_path / "talks", talks, *chat) == 2
    assert "prepared from other inputs or with other options" in capsys.readouterr().err
    given = tmp_path / "own.jinja"
    given.write_text(CHATML)
    assert (
        prepare(tmp_path / "talks", talks, *chat, "--chat-template", str(given), "--overwrite") == 0
    )
    assert (tmp_path / "talks.tokenizer/chat_template.jinja").read_text() == CHATML


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, TurnEnd(257, "<|im_end|>")),
        (TEXT_END, TurnEnd(text="###")),
        ("{% for m in messages %}{{ m.content }}\n\n{% endfor %}", TurnEnd()),
        (FORGETS, TurnEnd(257, "<|im_end|>")),
    ],
)
def test_the_end_of_a_reply_is_read_from_the_template(
    tmp_path: Path, template: str, end: TurnEnd
) -> None:
    folder = save_tokenizer(tmp_path, None)
    assert ChatTemplate(folder, template=template).turn_end() == end


def test_the_end_of_a_reply_that_the_template_changes_is_unknown(tmp_path: Path) -> None:
    """The text before the reply is no end of it."""
    folder = save_tokenizer(tmp_path, PLAIN.replace("m.content", "m.content | lower"))
    chat = ChatTemplate(folder)
    with pytest.raises(DataError, match="the chat template changes the text of a reply"):
        chat.turn_end()
    _, mask = chat.encode(json.dumps(messages(TALKS[1])))  # needs no end of it
    assert mask.sum() == len("hi") + 2


def test_a_given_template_is_that_of_tools_too(tmp_path: Path) -> None:
    # given a tokenizer with a template of its own for tools, and a copy of it beside a corpus
    folder = save_tokenizer(tmp_path / "origin", None)
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = {"default": PLAIN, "tool_use": "TOOLS" + PLAIN}
    theirs.save_pretrained(folder)
    loaded, copy = load_tokenizer(folder), tmp_path / "copy"
    loaded.save(copy)
    assert (copy / "additional_chat_templates/tool_use.jinja").is_file()
    # when the corpus is prepared again with another template
    with_template(loaded, CHATML).save(copy)
    # then conversations with tools are written by it, too
    chat, given = ChatTemplate(str(copy)), ChatTemplate(folder, template=CHATML)
    assert chat.source == given.source == CHATML
    talk = as_text(messages(TALKS[0]), TOOLS)
    assert chat.encode(talk)[0] == given.encode(talk)[0]


def test_ends_are_added_to_those_of_the_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, CHATML))
    assert isinstance(tokenizer, FastTokenizer)
    tokenizer.files["generation_config.json"] = b'{"top_k": 3, "eos_token_id": 258}'
    with_end(with_end(tokenizer, 257), 257)
    settings = json.loads(tokenizer.files["generation_config.json"])
    assert settings == {"top_k": 3, "eos_token_id": [257, 258]}
    tokenizer.files["generation_config.json"] = b"[]"
    with pytest.raises(DataError, match="generation_config.json of the tokenizer cannot be read"):
        with_end(tokenizer, 257)


def test_what_is_no_template_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(DataError, match=r"empty cannot be read: it is empty; .* one of chatml"):
        read_template(str(tmp_path / "empty"))
    (tmp_path / "a.txt").write_text("text")
    bytes_line = ("--tokenizer", "bytes", "--chat-template", "chatml")
    assert prepare(tmp_path / "a", tmp_path / "a.txt", *bytes_line) == 2
    assert "--chat-template with --tokenizer bytes" in capsys.readouterr().err
    trained = ("--tokenizer", "bpe:300", "--format", "chat")
    assert prepare(tmp_path / "a", tmp_path / "a.txt", *trained) == 2
    assert "with --chat-template chatml, then the conversations" in capsys.readouterr().err
    small = ("--tokenizer", "bpe:258", "--chat-template", "chatml")
    assert prepare(tmp_path / "a", tmp_path / "a.txt", *small) == 2
    assert "<|im_end|> are 259 tokens" in capsys.readouterr().err
