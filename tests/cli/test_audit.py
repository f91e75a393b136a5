"""`nanotrain audit`: scripts, flags and checkpoints, as text and as JSON; bad input is one line."""

import json
import shlex
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from nanotrain.cli.main import main
from tests.config.launch_scripts import SCRIPTS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "audit" / "train_llama_8b.sh"
STORED = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": 10,
    "padded_vocab_size": 128,
    "vocab_size": 100,
    "tensor_model_parallel_size": 2,
    "world_size": 4,
    "position_embedding_type": "rope",
    "context_parallel_size": 2,
    "eod_mask_loss": True,
    "lr": 1e-4,
}


def audit(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["audit", *map(str, words)]) == 0
    return capsys.readouterr().out


def checkpoint(folder: Path, stored: object) -> Path:
    step = folder / "iter_0000010"
    step.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    (step / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"args": stored, "iteration": 10}, step / "common.pt")
    return folder


def test_the_page_shows_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.chdir(SCRIPT.parent)
    page = (ROOT / "docs" / "audit.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0]
    assert audit(SCRIPT.name, "--set", "DATA=corpus", capsys=capsys) == shown


def test_json_has_the_same_as_data(capsys):
    values = json.loads(audit(SCRIPT, "--json", capsys=capsys))
    assert values["model"]["parameters"] == pytest.approx(8.03e9, rel=1e-3)
    assert [plan["engine"] for plan in values["plans"]] == ["megatron", "nanotrain"]
    assert [bug["finding"] for bug in values["known_bugs"]] == [8, 9]
    assert values["unset_variables"] == {"$DATA": ["--data-path"], "$OUT": ["--save"]}
    assert len(values["contradictions"]) == 3


def test_a_variable_a_flag_and_a_version_change_the_audit(capsys):
    words = (SCRIPT, "--set", "TP=1", "--context-parallel-size", "1", "--json")
    assert json.loads(audit(*words, capsys=capsys))["known_bugs"] == []
    old = json.loads(audit(SCRIPT, "--megatron-version", "0.12.0", "--json", capsys=capsys))
    assert old["known_bugs"] == [] and old["megatron_version"] == "0.12.0"


def test_flags_of_the_command_line_need_no_script(capsys):
    text = audit(*shlex.split(SCRIPTS["llama3_8b_fp8"][1]), "--world-size", "8", capsys=capsys)
    assert "8.03 B parameters" in text and "DOES NOT FIT" in text and "b200" not in text


def test_another_gpu_changes_the_plan(capsys):
    words = (*shlex.split(SCRIPTS["llama3_8b_fp8"][1]), "--world-size", "8", "--gpu", "b200")
    text = audit(*words, capsys=capsys)
    assert "on b200     Megatron-LM:" in text and "DOES NOT FIT" not in text


def test_a_checkpoint_is_audited_by_its_stored_arguments(tmp_path, capsys):
    # what every run of Megatron-LM stores: defaults, and what follows from other arguments
    derived = {"patch_dim": 16, "encoder_num_layers": 4, "train_samples": 80, "lr_warmup_iters": 0}
    derived |= {"sequence_parallel": True, "decoder_num_layers": None, "softmax_type": "vanilla"}
    folder = checkpoint(tmp_path / "ck", Namespace(**STORED, **derived))
    values = json.loads(audit(folder, "--json", capsys=capsys))
    assert values["world_size"] == 4 and values["plans"][0]["sizes"]["tp"] == 2
    assert [bug["finding"] for bug in values["known_bugs"]] == [9]
    assert values["contradictions"] == [] and values["cannot_run"] == []


class Hostile:
    """An object whose pickle would run a command."""

    def __reduce__(self):
        return eval, ("open('made', 'w')",)


@pytest.mark.parametrize("stored", [Hostile(), {"a": Hostile()}, None, 3, {}])
def test_a_hostile_or_empty_checkpoint_is_one_message(tmp_path, stored, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["audit", str(checkpoint(tmp_path / "ck", stored))]) == 2
    assert capsys.readouterr().err.startswith("error: ") and not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["none.sh"],
        ["empty"],
        ["script.sh", "--gpu", "nope"],
        ["script.sh", "--megatron-version", "9"],
        ["script.sh", "--set", "A"],
        ["script.sh", "x"],
        ["binary"],
        ["open.sh"],
    ],
)
def test_bad_input_is_one_message_with_code_2(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "script.sh").write_text("python p.py --num-layers 4")
    (tmp_path / "open.sh").write_text("python p.py --save 'x")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert main(["audit", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ")
    assert len(captured.err.strip().splitlines()) == 1
