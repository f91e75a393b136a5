"""docs/midtraining.md: the twin from text to a model that replies, with a tenth of its steps."""

import io
import json
import re
import runpy
import shlex
import sys
from contextlib import chdir
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanotrain.cli.main import main
from tests.test_docs import ROOT, code_lines

PAGE = ROOT / "docs" / "midtraining.md"
# settings that count steps, and a checkpoint of the page
STEPS = re.compile(r"(--train-iters|--lr-wsd-decay-iters|--save-interval) (\d+)|step-0*(\d+)")


@cache
def twin_commands() -> tuple[str, ...]:
    """The commands of the twin, in their order."""
    lines = list(code_lines(PAGE))
    commands = [line for line in lines if line.startswith(("python ", "nanotrain "))]
    is_last = [line.startswith("nanotrain checkpoint export-hf") for line in commands]
    return tuple(commands[: is_last.index(True) + 1])


def in_short(command: str) -> str:
    """A command with a tenth of its steps."""

    def shorten(found: re.Match[str]) -> str:
        if found[3]:
            return f"step-{int(found[3]) // 10:08d}"
        return f"{found[1]} {int(found[2]) // 10}"

    return STEPS.sub(shorten, command)


def run_command(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    program, *arguments = shlex.split(command)
    if program == "nanotrain":
        return main(arguments)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


def test_the_twin_replies_and_its_export_does_in_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("README.md", "docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    outputs = {}
    with chdir(tmp_path):
        for command in twin_commands():
            assert run_command(in_short(command), monkeypatch) == 0, capsys.readouterr().err
            captured = capsys.readouterr()
            outputs[command] = captured.out + captured.err
        # a conversation that is typed
        monkeypatch.setattr(sys, "stdin", io.StringIO("What is --lr?\n"))
        chat = ["--chat", "--temperature", "0", "--num-tokens", "8", "--device", "cpu"]
        assert main(["generate", "runs/merged", *chat]) == 0
        reply = capsys.readouterr().out
    text = " ".join(" ".join(outputs.values()).split())
    assert "a reply ends with <|im_end|>" in text and "% of data/settings are targets" in text
    assert "model.rotary_base 10000.0 -> 40000.0" in text
    assert text.count("settings: accuracy") == 2
    # the export replies as the merged model does, with its template and its ends
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert model.config.rope_parameters["rope_theta"] == 40000
    ends = json.loads((tmp_path / "exported/generation_config.json").read_text())["eos_token_id"]
    assert ends == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is --lr?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    written = model.generate(**encoded, max_new_tokens=8, do_sample=False)[0]
    new_tokens = written[encoded["input_ids"].shape[1] :]
    assert tokenizer.decode(new_tokens, skip_special_tokens=True) == reply.removesuffix("\n")
