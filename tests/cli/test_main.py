"""`nanotrain COMMAND ...`: what each command prints and how a mistake ends."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version

import pytest

from nanotrain.cli.main import CHECKPOINT_COMMANDS, COMMANDS, main
from nanotrain.config.load import load_config, to_yaml
from nanotrain.train import main as train_main


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nanotrain", *argv]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, check=False
    )


def test_help_answers_within_a_second():
    began = os.times()
    done = run("train", "--help")
    ended = os.times()
    assert done.returncode == 0 and "--train-iters N" in done.stdout and done.stderr == ""
    # Processor time of the child: a busy machine does not stretch it.
    assert (
        ended.children_user + ended.children_system - began.children_user - began.children_system
        < 1
    )


def test_a_mistake_is_one_line_and_exit_code_2():
    done = run("train", "+config=tiny", "--train-iter", "5")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == ("error: unknown flag --train-iter; did you mean --train-iters?\n")


@pytest.mark.parametrize(("rank", "output"), [("0", "interrupted\n"), ("1", "")])
def test_an_interrupt_is_one_line_of_the_first_rank(rank, output, monkeypatch, capsys):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr("nanotrain.cli.main.run_command", interrupted)
    assert main(["evaluate", "run"]) == 130
    assert capsys.readouterr().err == output


def test_only_the_first_of_many_ranks_prints_the_error():
    done = run("config", "--train-iter", "5", RANK="1", WORLD_SIZE="2")
    assert done.returncode == 2 and done.stdout == done.stderr == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sing"], "error: unknown command 'sing': nanotrain takes train, prepare"),
        (["trian"], "; did you mean nanotrain train?"),
        (["sing"], "; nanotrain --help describes them"),
        (["checkpoint", "export"], "'export'; write nanotrain checkpoint export-hf or"),
        (
            ["checkpoint", "inspect"],
            "error: nanotrain checkpoint inspect: the following arguments are required: path",
        ),
        (["topology"], "give --world-size N, --schedule NAME or both"),
        (
            ["topology", "--world-size", "x"],
            "argument --world-size: 'x' is no whole number of at least 1",
        ),
        (
            ["topology", "--world-size", "6", "--tensor-model-parallel-size", "4"],
            "6 ranks cannot form tp=4",
        ),
        (
            ["topology", "--schedule", "2f2b"],
            "parallel.pipeline_schedule is '2f2b': the known names are",
        ),
        (["topology", "--schedule", "1f1b", "--json"], "--json prints groups"),
        (
            ["topology", "--schedule", "1f1b", "--num-microbatches", "100000000"],
            "x 100,000,000 microbatches cannot be",
        ),
        (["topology", "--schedule", "gpipe", "--pipeline-schedule", "1f1b"], "are both given"),
        (
            ["topology", "--schedule", "1f1b", "--png", "notes.txt"],
            "argument --png: 'notes.txt' does not end in .png",
        ),
        (["runs", "/nowhere"], "error: there is no folder /nowhere"),
        (
            ["topology", "--world-size", "2", "--png", "a.png"],
            "--num-microbatches and --png belong to --schedule",
        ),
        (
            ["generate", "runs/x", "--temperature", "-1"],
            "argument --temperature: '-1' is no number of at least 0",
        ),
        (["generate", "/nowhere"], "error: /nowhere is not a checkpoint"),
        (["checkpoint", "verify", "/nowhere"], "error: /nowhere is not a checkpoint"),
        (["prepare", "--input", "a"], "--output"),
        (["config", "optim.lr=fast"], "error: optim.lr is 'fast': it takes a number"),
    ],
)
def test_wrong_arguments_end_with_code_2_and_one_message(argv, message, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("error:") == 1 and captured.out == ""


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nanotrain {version('nanotrain')}\n"


def test_the_package_is_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "nanotrain", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("nanotrain ")


@pytest.mark.parametrize("argv", [["--help"], ["-h"], []])
def test_help_names_every_command(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert main(["checkpoint", *argv]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CHECKPOINT_COMMANDS)


def test_config_prints_what_a_run_would_use(capsys):
    assert main(["config", "+config=tiny", "--bf16"]) == 0
    assert capsys.readouterr().out == to_yaml(load_config(["+config=tiny", "--bf16"]))
    assert main(["config", "--explain", "+config=tiny", "--bf16"]) == 0
    assert "command line: --bf16" in capsys.readouterr().out
    assert main(["config", "--pretrained-checkpoint", "folder"]) == 0
    assert "note: model: replaced at the start of a run" in capsys.readouterr().err


def test_config_refuses_patterns_that_match_no_parameter(capsys):
    assert main(["config", "+config=tiny", "--freeze", "embeding.*"]) == 2
    assert "did you mean embedding.*" in capsys.readouterr().err
    assert main(["config", "+config=tiny", "--freeze", "embedding.*"]) == 0


def test_cfg_job_prints_and_does_not_train(capsys):
    assert main(["train", "+config=tiny", "--cfg", "job"]) == 0
    assert capsys.readouterr().out == to_yaml(load_config(["+config=tiny"]))


@pytest.mark.parametrize("argv", [["--version"], ["config", "--explain", "+config=tiny"]])
def test_a_reader_that_has_gone_is_no_mistake(argv):
    """With the buffer of a pipe, which a short output leaves only at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "nanotrain", *argv]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_help_of_config_names_its_own_usage(capsys):
    assert main(["config", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: nanotrain config [--explain] ")


# a line as typed up to the cursor, as bash divides it | completions that must be there | that must
# not
TYPED = [
    (["nanotrain", "tra"], {"train"}, {"compare"}),
    (["nanotrain", "checkpoint", "in"], {"inspect"}, {"train"}),
    (["nanotrain", "train", "--overlap-g"], {"--overlap-grad-reduce"}, {"--lr"}),
    (["nanotrain", "train", "--no-overlap-g"], {"--no-overlap-grad-reduce"}, {"--lr"}),
    (["nanotrain", "train", "+"], {"+config="}, {"tiny"}),
    (["nanotrain", "train", "+config", "=", "ti"], {"tiny", "tiny_moe"}, {"llama7b"}),
    (["nanotrain", "train", "+config", "="], {"tiny", "llama7b"}, {"train"}),
    (["nanotrain", "runs", "--l"], set(), {"--lr"}),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_flags_and_recipes(capsys):
    assert main(["completion", "bash"]) == 0
    lines = [capsys.readouterr().out]
    for words, _, _ in TYPED:
        text = " ".join(words).replace(" = ", "=").replace(" =", "=")
        quoted = " ".join(f"'{word}'" for word in words)
        lines.append(
            f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE='{text}'; COMP_POINT={len(text)}; "
            '_nanotrain; echo "${COMPREPLY[*]}"'
        )
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    for (words, has, has_not), reply in zip(TYPED, done.stdout.splitlines(), strict=True):
        assert has <= set(reply.split()) and not has_not & set(reply.split()), words


def test_zsh_loads_the_functions_of_bash_first(capsys):
    assert main(["completion", "zsh"]) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("autoload")
        and "bashcompinit" in out.splitlines()[0]
        and " ".join(COMMANDS) in out
    )


@pytest.mark.parametrize("more", [[], ["--explain"], ["--cfg", "job"]])
@pytest.mark.parametrize("command", ["config", "train"])
def test_config_refuses_the_layouts_that_a_training_refuses(command, more, capsys, monkeypatch):
    monkeypatch.setattr(train_main, "train", lambda loaded, reporter: None)
    layout = ["+config=llama7b", "--tensor-model-parallel-size", "3", "--mock-data"]
    assert main([command, *layout, *more]) == 2
    refused = capsys.readouterr().err
    assert "cannot be shared by tp=3 ranks" in refused
    assert main(["plan", *layout, "--world-size", "6"]) == 2
    assert capsys.readouterr().err == refused
    layout[2] = "2"
    assert main([command, *layout, *more]) == 0
