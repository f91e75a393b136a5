"""`nanotrain config --megatron-defaults`: eight lines on a launch script of Megatron-LM."""

import shlex

import pytest
import yaml

from nanotrain.cli.main import main

# GPT-3 of 345 M as Megatron-LM's own example has it, with flags of every kind
GPT = shlex.split(
    """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 16 --lr 1.5e-4 --vocab-size 50257
--train-samples 8000 --tensor-model-parallel-size 2 --use-mcore-models --no-align-grad-reduce
--data-path x --fp16"""
)


def summary(*more: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["config", "--megatron-defaults", *GPT, *more]) == 0
    *lines, end = capsys.readouterr().out.splitlines()
    assert "--cfg job" in end and len(lines) == 8
    return {line[:12].strip(): line[12:] for line in lines}


def test_a_line_is_parameters_layout_batch_tokens_and_what_became_of_flags(capsys):
    rows = summary(capsys=capsys)
    # 24 layers of 12 h^2 + 13 h, embeddings of words and positions, and the last norm
    number = 24 * (12 * 1024**2 + 13 * 1024) + (50257 + 1024) * 1024 + 2 * 1024
    assert rows["parameters"].startswith(f"{number / 1e6:.0f} M, 24 layers, hidden size 1,024")
    assert rows["layout"] == "tp 2, dp number of ranks / 2 no_shard"
    assert rows["batch"] == "global batch 16, micro-batch 4, sequences of 1,024"
    assert rows["tokens"] == "8.19 M in 500 steps"
    assert rows["converted"].startswith("1 flag: --train-samples 8000 (--train-iters")
    assert rows["always"] == "1 flag: --use-mcore-models"
    assert rows["no effect"] == "1 flag: --no-align-grad-reduce"
    for default in ("learned_absolute (nanotrain: rope)", "LayerNorm (nanotrain: RMSNorm)"):
        assert default in rows["defaults"]


def test_a_value_of_the_line_is_no_default(capsys):
    rows = summary("--position-embedding-type", "rope", capsys=capsys)
    assert "position_embedding_type" not in rows["defaults"] and "RMSNorm" in rows["defaults"]


def test_all_settings_are_printed_on_demand(capsys):
    assert main(["config", "--megatron-defaults", *GPT, "--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["normalization"] == "LayerNorm"
