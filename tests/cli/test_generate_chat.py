"""`--chat`: prompts are messages, whose text and tokens are those of transformers' template."""

from pathlib import Path

import pytest
import torch
import transformers

from nanotrain.cli.main import main
from tests.inference.tiny_folders import write_folder

TEMPLATE = (
    "{% if start is defined %}{{ start }}{% endif %}{{ bos_token }}{% for m in messages %}"
    "[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}> {% endif %}"
)
WITHOUT_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder("bos", tmp_path_factory.mktemp("chat"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def reply_of_transformers(folder: Path, messages: list[dict[str, str]]) -> str:
    """The greedy reply of 3 tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = encoded["input_ids"]
    with torch.no_grad():
        text = model.generate(ids, max_new_tokens=3, do_sample=False)[0]
    return str(tokenizer.decode(text[ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("system", [None, "x"])
def test_replies_are_those_of_transformers(
    folder: Path, system: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["generate", str(folder), "--chat", "--temperature", "0", "--num-tokens", "3"]
    line += ["--device", "cpu", "--prompt", "a"]
    messages = [{"role": "user", "content": "a"}]
    if system is not None:
        line += ["--system", system]
        messages.insert(0, {"role": "system", "content": system})
    expected = reply_of_transformers(folder, messages)
    capsys.readouterr()
    assert main(line) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_flags_without_a_use_or_a_template_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), "--system", "x"]) == 2
    assert "--system without --chat" in capsys.readouterr().err
    plain = write_folder("qwen", tmp_path / "plain")
    assert main(["generate", str(plain), "--chat", "--device", "cpu"]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert main(["evaluate", str(plain), "--chat", "--data", "corpus"]) == 2
    assert "--chat has no effect on --data" in capsys.readouterr().err


def test_the_lm_eval_model_writes_conversations_as_lm_evals_own(folder: Path) -> None:
    pytest.importorskip("lm_eval")
    from nanotrain.inference.lm_eval import NanotrainLM
    from tests.inference.lm_eval_table import import_hflm

    theirs = import_hflm()(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(folder),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
    )
    ours = NanotrainLM(str(folder))
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "so"},
    ]
    for history, starts_reply in ((turns[:2], True), (turns, False), (turns[1:2], True)):
        assert ours.apply_chat_template(history, starts_reply) == theirs.apply_chat_template(
            history, starts_reply
        )
    (folder / "chat_template.jinja").write_text(WITHOUT_SYSTEM + TEMPLATE)
    theirs.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = NanotrainLM(str(folder))
    assert ours.apply_chat_template(turns[:2]) == theirs.apply_chat_template(turns[:2])
