"""Conversations become the tokens of transformers' chat template, and only the assistant's are
targets.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanotrain.cli.main import main
from nanotrain.config.config import DataConfig
from nanotrain.data.build import build_data
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.tokenizer import load_tokenizer
from nanotrain.errors import DataError
from nanotrain.prepare.chat import ChatTemplate, Conversation, as_text
from nanotrain.prepare.chunks import plan_chunks
from nanotrain.prepare.readers import DocumentReader, lines_on_columns
from nanotrain.prepare.rows import pick_messages

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}"
    + TURN
    + "{% endif %}{% endfor %}"
    + PROMPT
)
# as of models that think: what they thought in earlier turns is left out
FORGETS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else '' }}<|im_end|>\n{% endfor %}"
FORGETS += PROMPT
# of models that think: only the last reply has a thought, an empty one where there is none
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>{{ m.reasoning_content or '' }}</think>\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    + PROMPT
)
REFUSES = "{{ raise_exception('roles must alternate') }}"
TALKS = [
    [
        ("system", "be kind"),
        ("user", "2 + 2?"),
        ("assistant", "it is 4"),
        ("user", "sure?"),
        ("assistant", "yes é日"),
    ],
    [("user", "hello"), ("assistant", "hi")],
]


def save_tokenizer(folder: Path, template: str | None) -> str:
    vocabulary = {
        character: number
        for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def messages(talk: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in talk]


@pytest.mark.parametrize(("template", "end"), [(PLAIN, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
def test_only_what_the_assistant_writes_is_a_target(
    tmp_path: Path, template: str, end: str
) -> None:
    folder = save_tokenizer(tmp_path, template)
    chat, tokenizer = ChatTemplate(folder), AutoTokenizer.from_pretrained(folder)
    for talk in TALKS:
        ids, mask = chat.encode(json.dumps(messages(talk)))
        assert (
            ids
            == tokenizer.apply_chat_template(messages(talk), tokenize=True, return_dict=True)[
                "input_ids"
            ]
        )
        assert mask.shape == (len(ids),) and mask.dtype == np.uint8
        if template is MARKED:
            theirs = tokenizer.apply_chat_template(
                messages(talk), return_dict=True, return_assistant_tokens_mask=True
            )
            assert mask.tolist() == theirs["assistant_masks"]
        targets = tokenizer.decode(np.array(ids)[mask == 1].tolist())
        assert targets == "".join(content + end for role, content in talk if role == "assistant")


def test_replies_of_a_template_that_shortens_earlier_turns(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, THINKS)
    chat, tokenizer = ChatTemplate(folder), AutoTokenizer.from_pretrained(folder)
    talk = messages(TALKS[0])
    talk[4]["reasoning_content"] = "it is"
    ids, mask = chat.encode(json.dumps(talk))
    assert ids == tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"]
    targets = tokenizer.decode(np.array(ids)[mask == 1].tolist())
    assert targets == "it is 4<|im_end|><think>it is</think>\nyes é日<|im_end|>\n"


def test_prepared_conversations_train_on_replies_beside_plain_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given conversations and a plain corpus, prepared with one tokenizer
    folder = save_tokenizer(tmp_path / "tokenizer", PLAIN)
    rows = tmp_path / "talks.jsonl"
    rows.write_text("".join(json.dumps({"messages": messages(talk)}) + "\n" for talk in TALKS * 5))
    (tmp_path / "plain.txt").write_text("plain text " * 20)
    common = ["--tokenizer", folder, "--workers", "1"]
    talks, plain = tmp_path / "talks", tmp_path / "plain"
    assert (
        main(["prepare", "--input", str(rows), "--output", str(talks), "--format", "chat", *common])
        == 0
    )
    assert main(["prepare", "--input", f"{plain}.txt", "--output", str(plain), *common]) == 0
    # then the mask has a byte per token, also in the parts of another division, and documents end
    # with the eod
    corpus, chat = IndexedTokens(talks), ChatTemplate(folder)
    assert corpus.num_documents == 10
    for document in range(2):
        start, stop = corpus.document_start(document), corpus.document_start(document + 1)
        ids, mask = chat.encode(json.dumps(messages(TALKS[document])))
        assert corpus.read(start, stop).tolist()[:-1] == ids
        # the model learns to end its reply
        assert corpus.read_mask(start, stop).tolist() == [*mask, 1]
    # and samples of a blend have the mask of their labels
    data = DataConfig(
        train_data_path=[str(talks), str(plain)], seq_length=16, shuffle=False, eod_mask_loss=False
    )
    blend = build_data(data, vocab_size=300, seed=0, required=("train",)).train
    assert blend is not None
    for index in range(blend.samples_per_epoch):
        source, number = blend.locate(index)
        first = next(blend.datasets[source].parts(number)).start
        expected = blend.datasets[source].corpus.read_mask(first + 1, first + 17)
        assert blend[index].loss_mask.tolist() == expected.tolist()
        assert source == 0 or all(expected)
    # and a mask of another corpus is refused
    (tmp_path / "talks.mask").write_bytes(b"\1")
    with pytest.raises(DataError, match=r"talks.mask does not match: it has 1 bytes"):
        IndexedTokens(talks)
    # and a text replaces it
    assert (
        main(["prepare", "--input", f"{plain}.txt", "--output", str(talks), "--overwrite", *common])
        == 0
    )
    assert not (tmp_path / "talks.mask").exists()


@pytest.mark.parametrize(
    ("template", "talk", "message"),
    [
        (None, messages(TALKS[1]), "has no chat template"),
        (FORGETS, messages(TALKS[0]), "the chat template changes earlier turns"),
        (REFUSES, messages(TALKS[1]), "the chat template refuses it: roles must alternate"),
        (PLAIN, [{"role": "user", "content": "alone"}], "no message of the assistant"),
        (PLAIN, [{"role": "user"}], "content is None, it must be text"),
        (PLAIN, {"role": "user"}, "messages is an object, it must be a list"),
    ],
)
def test_what_cannot_be_used_is_one_message(
    tmp_path: Path, template: str | None, talk: object, message: str
) -> None:
    folder = save_tokenizer(tmp_path, template)
    with pytest.raises(DataError, match=message):
        ChatTemplate(folder).encode(json.dumps(talk))


def test_rows_hold_messages_or_their_json(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    talk = messages(TALKS[1])
    rows.write_text(
        "".join(json.dumps({"messages": each}) + "\n" for each in (talk, json.dumps(talk), None))
    )
    (chunk,) = plan_chunks([str(rows)], subset=None, split="train")
    reader = DocumentReader("messages", is_chat=True)
    assert [json.loads(text) for text in reader.read(chunk)] == [talk, talk]
    for row, message in (
        ({"messages": {"role": "user"}}, "holds no text"),
        ({"text": "a"}, "no column messages"),
    ):
        rows.write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError, match=message):
            list(reader.read(chunk))


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"b": 1, "a": "é<&>"}}}]
CALLS = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"b": 2}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "it is 4"},
]
CALLED = "{{ m.content or '' }}{{ m.tool_calls | tojson if m.tool_calls else '' }}"
LISTED = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("tools", [TOOLS, [], None])
def test_tools_are_handed_to_the_template_as_transformers_does(
    template: str, tools: list[dict[str, object]] | None, tmp_path: Path
) -> None:
    folder = save_tokenizer(tmp_path, LISTED + template.replace("{{ m.content }}", CALLED))
    row = {"messages": CALLS, "tools": tools}
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CALLS, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = ChatTemplate(folder).encode(pick_messages(row, "messages", source="f"))
    assert ids == theirs["input_ids"]
    assert mask.any() and (template is PLAIN or mask.tolist() == theirs["assistant_masks"])


def test_a_tokenizer_with_several_templates_has_one_for_tools(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": PLAIN, "tool_use": "T" + LISTED + MARKED}
    tokenizer.save_pretrained(folder)
    chat = ChatTemplate(folder)
    talk = messages(TALKS[0])
    for tools in (None, [], TOOLS):
        theirs = tokenizer.apply_chat_template(talk, tools=tools)["input_ids"]
        assert chat.encode(as_text(talk, tools))[0] == theirs
    # and so has the copy beside a corpus and in a run
    loaded = load_tokenizer(folder)
    loaded.save(tmp_path / "copy")
    copy = ChatTemplate(str(tmp_path / "copy"))
    assert copy.source == chat.source
    assert copy.encode(as_text(talk, TOOLS))[0] == chat.encode(as_text(talk, TOOLS))[0]


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_tools_are_a_column_beside_messages(suffix: str, is_text: bool, tmp_path: Path) -> None:
    row = {"messages": messages(TALKS[1]), "tools": TOOLS, "id": 1}
    if is_text:
        row |= {name: json.dumps(row[name]) for name in ("messages", "tools")}
    rows = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), rows)
    else:
        rows.write_text(json.dumps(row))
    chunks = plan_chunks([str(rows)], subset=None, split="train")
    (line,) = lines_on_columns(chunks, "messages", is_chat=True)
    assert "documents are read from messages, tools; not read: id" in line
    (document,) = DocumentReader("messages", is_chat=True).read(chunks[0])
    assert Conversation.parse(document) == Conversation(messages(TALKS[1]), TOOLS)


@pytest.mark.parametrize(
    ("tools", "message"),
    [("add", "it is no JSON|not JSON|Expecting value"), ({"a": 1}, "tools is"), ([1], "a tool is")],
)
def test_tools_that_are_no_list_of_schemas_are_refused(tools: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Conversation.parse(as_text(messages(TALKS[1]), tools))
    assert Conversation.parse(as_text(messages(TALKS[1]), "")).tools is None


def test_a_tokenizer_that_is_trained_has_no_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "prepare",
        "--input",
        "rows.jsonl",
        "--output",
        str(tmp_path / "out"),
        "--format",
        "chat",
    ]
    for name, message in (
        ("bytes", "the chat template of a tokenizer turns conversations into text"),
        ("bpe:300", "prepare the text of pretraining with --chat-template chatml"),
    ):
        assert main([*line, "--tokenizer", name]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("strips", ["", " | trim"])
def test_prompts_are_those_of_transformers(strips: str, tmp_path: Path) -> None:
    template = PLAIN.replace("m.content", f"(m.reasoning_content or '') + m.content{strips}")
    folder = save_tokenizer(tmp_path, template)
    chat, tokenizer = ChatTemplate(folder), AutoTokenizer.from_pretrained(folder)
    begun = [*messages(TALKS[0])[:2], {"role": "assistant", "content": "so ", "thinking": "hm"}]
    absent = [{"role": "user", "content": "a", "reasoning": None}]
    for talk, continues in ((begun, True), (begun[:2], False), (absent, False)):
        assert chat.prompt(talk, continues=continues) == tokenizer.apply_chat_template(
            talk,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )


def test_a_beginning_of_a_reply_calls_no_tools(tmp_path: Path) -> None:
    """A template writes the calls after the content, where the model is to go on."""
    template = PLAIN.replace("{{ m.content }}", CALLED)
    chat = ChatTemplate(save_tokenizer(tmp_path, template))
    for content in (None, "so"):
        begun = [CALLS[0], CALLS[1] | {"content": content}]
        with pytest.raises(DataError, match="its last message has tool_calls"):
            chat.prompt(begun, continues=True)
    assert "None" not in chat.prompt(CALLS[:3])


def test_a_reply_that_nobody_asked_for_is_refused_where_turns_are_not_marked(
    tmp_path: Path,
) -> None:
    talk = json.dumps(messages([("assistant", "hi"), ("user", "a")]))
    with pytest.raises(DataError, match="its first message is of the assistant"):
        ChatTemplate(save_tokenizer(tmp_path / "plain", PLAIN)).encode(talk)
    _, mask = ChatTemplate(save_tokenizer(tmp_path / "marked", MARKED)).encode(talk)
    assert mask.sum() == 3  # h, i, <|im_end|>


def test_bytes_have_no_template_and_are_no_name_on_the_hub() -> None:
    with pytest.raises(DataError, match="bytes has no chat template: bytes are no tokenizer"):
        ChatTemplate("bytes")
