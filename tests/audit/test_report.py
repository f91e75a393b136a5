"""The text of an audit of published scripts says nothing that is not so."""

import re
import shlex

import pytest

from nanotrain.audit.known_bugs import newest_version
from nanotrain.audit.meaning import meaning_of_flags
from nanotrain.audit.report import audit, audit_text, audit_values
from nanotrain.audit.sources import source_of_words
from nanotrain.planner.hardware import gpu_of
from tests.config.launch_scripts import SCRIPTS

# published scripts of each kind: dense, experts, MLA, sinks, fp8, FSDP, interleaved, MTP
CHOSEN = (
    "gpt3_175b",
    "llama3_8b_fp8",
    "llama3_8b_fsdp_fp8",
    "deepseek_v3_fsdp",
    "mixtral_8x7b",
    "gpt_oss_20b",
    "qwen3_30b_a3b",
    "nemotron_15b",
    "gpt3_full_recompute",
    "llama2_70b",
    "mimo_7b_mtp",
    "moonlight_16b_a3b",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_published_script_has_a_plan_and_no_line_of_nonsense(name):
    ranks, arguments = SCRIPTS[name]
    source = source_of_words(shlex.split(arguments))
    meaning = meaning_of_flags(source.arguments)
    result = audit(source, meaning, gpu=gpu_of("h100"), version=newest_version(), ranks=ranks)
    text = audit_text(result)
    model, layout, *costs = text.splitlines()[1:5]
    assert re.match(r"model +[\d.]+ [MBT] parameters, ", model)
    assert layout.endswith(f"on {ranks:,} GPUs")
    assert [cost.split(":")[0].split()[-1] for cost in costs] == ["Megatron-LM", "nanotrain"]
    for word in (
        "None",
        "nan",
        "inf",
        "Traceback",
        "object at",
        "unset_",
        "{",
        "--megatron-defaults",
    ):
        assert word not in text.split(), word
    assert "cannot run" not in text and meaning.unknown == []
    assert len(audit_values(result)["plans"]) == 2


def test_sections_without_lines_are_left_out():
    line = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128"
    )
    line += " --max-position-embeddings 32 --micro-batch-size 1 --train-iters 1"
    source = source_of_words(line.split())
    meaning = meaning_of_flags(source.arguments)
    result = audit(source, meaning, gpu=gpu_of("h100"), version=newest_version(), ranks=1)
    lines = audit_text(result).splitlines()
    assert lines[5] == "" and lines[6].startswith("known bugs of Megatron-LM 0.20.0")
    assert lines[-1].endswith("in this configuration: 0")
