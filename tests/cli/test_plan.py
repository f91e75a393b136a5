"""The command line of `nanotrain plan`: one screen, JSON, a picture, a search; and what it refuses."""

import json
import re
from pathlib import Path
from textwrap import indent

import pytest
from transformers import MixtralConfig

from nanotrain.cli.main import main
from nanotrain.config.load import load, to_yaml

PAGE = Path(__file__).parents[2] / "docs/planner.md"
RUN = ["+config=llama1b", "--mock-data", "--world-size", "8"]


def test_one_screen_a_picture_and_json(capsys, tmp_path):
    picture = tmp_path / "step.png"
    assert main(["plan", *RUN, "--train-tokens", "1e11", "--png", str(picture)]) == 0
    text = capsys.readouterr().out
    assert indent(text, "    ") in PAGE.read_text(), "the page shows what the command prints"
    for part in (
        "8 GPUs h100, engine nanotrain",
        "memory",
        "tokens/s per GPU",
        "GPU-hours",
        "bound by",
        "next change",
    ):
        assert part in text
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main(["plan", *RUN, "--json", "--engine", "megatron"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["engine"] == "megatron" and values["fits"] and values["step_s"]["total"] > 0


def test_a_search_prints_the_command_line_of_the_fastest(capsys):
    assert main(["plan", *RUN[:-1], "2", "--search", "--global-batch-size", "32"]) == 0
    *_, command = capsys.readouterr().out.strip().splitlines()
    arguments = "--nproc-per-node 2 +config=llama1b --mock-data --global-batch-size 32"
    assert command.startswith(f"nanotrain train {arguments}")


def test_a_search_marks_ties_and_prints_the_commands_of_several_machines(capsys):
    world = [*RUN[:-1], "16", "--search", "--global-batch-size", "256"]
    assert main(["plan", *world, "--pipeline-model-parallel-size", "1"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert "=: within 5% of the fastest, the simplest first" in lines[2]
    ties = [line for line in lines if line.startswith("=")]
    times = [float(line.split()[1]) for line in ties]
    assert len(ties) > 1 and max(times) <= 1.05 * min(times)
    assert not any(kind in ties[0] for kind in ("tp ", "cp ", "pp ", "instances"))
    for begin in (
        "nanotrain train --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id JOB "
        "--rdzv-endpoint HOST:29500 +config=llama1b",
        "torchrun --nnodes 2 --nproc-per-node 8 ",
        "sbatch --nodes 2 --gpus-per-node 8 scripts/launch_slurm +config=llama1b",
    ):
        assert any(line.startswith(begin) for line in lines), begin


def test_a_layout_that_does_not_fit_says_so_first_and_what_fits(capsys):
    large = ["+config=llama70b", "--vocab-size", "32000", "--world-size", "16"]
    assert main(["plan", *large]) == 2
    first, *lines = capsys.readouterr().out.strip().splitlines()
    assert re.fullmatch(
        r"DOES NOT FIT: a rank needs .* GB, its GPU has 84.94 GB, .* too little", first
    )
    assert not any(line.startswith(("throughput", "step", "bound by")) for line in lines)
    flags = lines[-1].removeprefix("fits        with ").partition(":")[0]
    assert main(["plan", *large, *flags.split()]) == 0
    capsys.readouterr()
    assert main(["plan", *large, "--json"]) == 2
    assert not json.loads(capsys.readouterr().out)["fits"]


def test_a_line_says_why_stages_wait(capsys):
    def bubble(*flags: str) -> str:
        assert main(["plan", *RUN, "--pipeline-model-parallel-size", "2", *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        return next(line for line in lines if line.startswith("  bubble"))

    uneven = bubble("--decoder-first-pipeline-num-layers", "2")
    assert "since pipeline rank 1 has more work than rank 0, which ends last" in uneven
    assert float(re.search(r"(\d+)% of it", uneven)[1]) > 90
    assert bubble("--decoder-last-pipeline-num-layers", "2").endswith(
        "the pipeline fills and drains"
    )


@pytest.mark.parametrize("flag", ["--nnodes", "--gpus", "--nproc-per-node"])
def test_numbers_of_a_launcher_are_answered_with_the_world_size(flag, capsys):
    assert main(["plan", "+config=llama1b", "--mock-data", flag, "2"]) == 2
    assert f"unknown {flag} (write --world-size N" in capsys.readouterr().err


def test_the_model_of_a_hugging_face_folder_is_planned(capsys, tmp_path):
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "vocab_size": 512,
    }
    layers = {
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "intermediate_size": 96,
    }
    MixtralConfig(**sizes, **layers).save_pretrained(tmp_path)
    layout = ["--world-size", "4", "--expert-model-parallel-size", "2", "--seq-length", "64"]
    assert main(["plan", *layout, "--json", "--pretrained-checkpoint", str(tmp_path)]) == 0
    planned = json.loads(capsys.readouterr().out)["memory_bytes"]
    experts = "--num-experts 4 --num-layers 2 --ffn-hidden-size 96 --group-query-attention --num-query-groups 2"
    shape = [
        word for key, value in sizes.items() for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    alike = [
        "--untie-embeddings-and-output-weights",
        "--moe-router-topk",
        "2",
        *experts.split(),
        *shape,
    ]
    assert main(["plan", *layout, "--json", *alike]) == 0
    assert json.loads(capsys.readouterr().out)["memory_bytes"] == planned
    assert main(["dry-run", *layout, "--pretrained-checkpoint", str(tmp_path)]) == 0
    assert "ep 2" in (text := capsys.readouterr().out) and "no fault" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*RUN, "--gpu", "h1000"], "unknown GPU h1000"),
        ([*RUN, "--engine", "megatorn"], "megatron"),
        ([*RUN, "--tensor-model-parallel-size", "3"], "tp=3"),
        ([*RUN, "--expert-model-parallel-size", "2"], "expert"),
        (RUN[:2], "--world-size --rows is required"),
        (["--rows", "a.tsv", "--output", "b.tsv", "+config=tiny"], "leave out +config=tiny"),
        ([*RUN, "--data-parallel-size", "5"], "--data-parallel-size is 5"),
        ([*RUN, "--kernel-packages", "none", "fla"], "--kernel-packages none beside fla"),
    ],
)
def test_what_cannot_be_planned_is_one_message(flags, message, capsys):
    assert main(["plan", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "flags", "message"),
    [
        ("a100", "--bf16 --fp8-format e4m3", "set --fp8-format none"),
        ("h100", "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "10.0 or newer"),
        ("b200", "--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "set --fp8-recipe tensorwise"),
        (
            "h100",
            "--bf16 --fp4-format e2m1",
            "--fp4-format e2m1 on a GPU of compute capability 9.0",
        ),
        ("h100", "--log-straggler", "--log-straggler on a GPU"),
        ("cpu", "--cpu-offloading --cpu-offloading-num-layers 1", "--cpu-offloading"),
        ("cpu", "--num-experts 4 --expert-model-parallel-size 2 --moe-enable-deepep", "on CPUs"),
    ],
)
def test_what_a_run_on_the_gpu_refuses_is_not_planned(gpu, flags, message, capsys):
    line = [*RUN, "--gpu", gpu, *flags.split()]
    assert main(["plan", *line]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("error:") == 1
    assert main(["plan", "--search", "--global-batch-size", "16", *line]) == 2
    assert message in capsys.readouterr().err


def test_the_cure_of_a_recipe_in_fp8_on_an_older_gpu_works(capsys):
    line = ["plan", "+config=deepseek_v3", "--mock-data", "--world-size", "2048", "--gpu", "a100"]
    assert main(line) == 2
    assert capsys.readouterr().err.endswith("; set --fp8-format none\n")
    main([*line, "--fp8-format", "none"])
    assert "2,048 GPUs a100-80gb" in capsys.readouterr().out


def test_calibrated_on_a_run_the_plan_of_that_run_is_its_step(capsys, tmp_path):
    loaded = load([*RUN[:2], "--global-batch-size=64"])
    (tmp_path / "config.yaml").write_text(to_yaml(loaded.config))
    (tmp_path / "starts.jsonl").write_text('{"step": 0, "world_size": 8}\n')
    rows = [
        f'{{"step": {step}, "step_time_s": {2.5 if step > 3 else 60}}}\n' for step in range(1, 9)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    flags = ["--json", "--global-batch-size", "64"]
    assert main(["plan", *RUN, *flags, "--calibrate", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"]["total"] == pytest.approx(2.5, rel=0.03)
    assert main(["plan", *RUN, *flags, "--calibrate", str(tmp_path / "none")]) == 2
    assert "no measured steps" in capsys.readouterr().err
