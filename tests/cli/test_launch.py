"""torchrun's options among the training arguments, and what is answered before a rank starts."""

import platform
import time

import numpy as np
import pytest

from nanotrain.cli.launch import OPTIONS, SWITCHES, launch, print_verdict, split_arguments
from nanotrain.cli.main import main
from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS
from nanotrain.config.arguments import SWITCHES as CONFIG_SWITCHES
from nanotrain.config.flags import OWN_FLAGS
from nanotrain.config.megatron import megatron
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.launch import start_ranks
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.runs.verdict import read_verdicts
from nanotrain.train import main as entry


def test_the_options_are_found_anywhere_and_in_both_spellings():
    argv = [
        "+config=tiny",
        "--nproc_per_node",
        "2",
        "--lr=1e-3",
        "--standalone",
        "--max-restarts=3",
        "train.seed=1",
    ]
    options, rest = split_arguments(argv)
    assert options == ["--nproc-per-node=2", "--standalone", "--max-restarts=3"]
    assert rest == ["+config=tiny", "--lr=1e-3", "train.seed=1"]
    with pytest.raises(ConfigError, match="--nnodes has no value"):
        split_arguments(["--nnodes"])


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("--nproc-per-nod", "--nproc-per-node"),
        ("--nproc_per_nod=2", "--nproc-per-node"),
        ("--nnode", "--nnodes"),
        ("--rdzv-endpont=h:1", "--rdzv-endpoint"),
        ("--master-adr", "--master-addr"),
        ("--standalon", "--standalone"),
        ("--num-layer", None),  # near to a flag of the configuration, which answers
        ("--log-interva", None),
        ("--local-batch-size", None),  # of another framework
        ("+config=tiny", None),
    ],
)
def test_a_misspelled_option_is_named(argument, meant):
    argv = ["+config=tiny", argument, "2"]
    if meant is None:
        assert split_arguments(argv) == ([], argv)
    else:
        with pytest.raises(ConfigError, match=f"did you mean {meant}\\?$"):
            split_arguments(argv)


@pytest.mark.parametrize(
    "command", [["evaluate", "run", "--data", "x"], ["generate", "run", "--prompt", "x"]]
)
def test_other_commands_name_a_misspelled_option_too(command, capsys):
    assert main([*command, "--nproc-per-nod", "2"]) == 2
    assert "did you mean --nproc-per-node?" in capsys.readouterr().err


@pytest.mark.parametrize("following", [[], ["+config=tiny"], ["--lr", "1"], ["train.seed=1"]])
def test_an_option_does_not_take_the_next_argument_as_its_value(following):
    with pytest.raises(ConfigError, match="--rdzv-id has no value"):
        split_arguments(["--rdzv-id", *following])
    assert split_arguments(["--rdzv-conf", "timeout=9,is_host=1"])[0] == [
        "--rdzv-conf=timeout=9,is_host=1"
    ]


def test_no_option_is_a_flag_of_the_configuration():
    assert not {*OPTIONS, *SWITCHES} & {
        *FLAGS,
        *NEGATIONS,
        *ALIASES,
        *OWN_FLAGS,
        *CONFIG_SWITCHES,
        *megatron().flags,
    }


def test_every_option_is_one_of_torchruns():
    parser = start_ranks.get_args_parser()
    known = {text for action in parser._actions for text in action.option_strings}
    assert known.issuperset({*OPTIONS, *SWITCHES})


def test_without_an_option_this_process_trains(monkeypatch):
    seen: list[list[str]] = []
    monkeypatch.setattr(entry, "main", lambda argv: seen.append(argv) or 0)
    assert main(["train", "+config=tiny"]) == 0 and seen == [["+config=tiny"]]


def test_with_one_the_ranks_get_the_other_arguments(monkeypatch):
    seen: list[list[str]] = []
    monkeypatch.setattr(
        start_ranks,
        "start_ranks",
        lambda program, *, options, environment, check, **others: (
            seen.extend([options, program]) or check(2) or 7
        ),
    )
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert main(["train", "--nproc-per-node", "2", "+config=tiny", "--lr", "1e-3"]) == 7
    assert seen == [["--nproc-per-node=2"], ["nanotrain.train", "+config=tiny", "--lr", "1e-3"]]


def test_mistakes_help_and_text_need_no_rank(monkeypatch, capsys):
    monkeypatch.setattr(start_ranks, "start_ranks", None)
    assert main(["train", "--nproc-per-node", "2", "+config=tiny", "--hiden-size", "3"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: unknown flag --hiden-size") and error.count("\n") == 1
    assert main(["train", "--nproc-per-node", "2", "+config=tiny", "--cfg", "job"]) == 0
    assert "vocab_size" in capsys.readouterr().out
    line = ["train", "--nproc-per-node", "3", "+config=tiny", "--cfg", "job"]
    assert main([*line, "--tensor-model-parallel-size", "2"]) == 2
    printed = capsys.readouterr()
    assert "vocab_size" in printed.out and printed.err.startswith("error: ")


def test_ranks_do_not_start_ranks():
    with pytest.raises(ConfigError, match="--nnodes=2 inside torchrun"):
        launch(["--nnodes=2"], [], environment={"TORCHELASTIC_RUN_ID": "x"})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data-path", "nowhere"], "nowhere.idx does not exist"),
        (["--train-data-path", "{corpus}", "--valid-data-path", "nowhere"], "nowhere.idx does not"),
        (["--data-path", "{corpus}", "--split", "1,999"], "leaves no document of .* for training"),
        (["--mock-data", "--vocab-size", "64", "--load", "nowhere"], "nowhere is not a checkpoint"),
        (["--mock-data", "--pretrained-checkpoint", "gpt2"], "gpt2"),
        (
            ["--data-path", "{corpus}", "--tokenizer-model", "{corpus}.idx"],
            "corpus.idx is no tokenizer",
        ),
        (
            ["--data-path", "{corpus}", "--tokenizer-model", "/nowhere/tokenizer"],
            "the tokenizer /nowhere/tokenizer cannot be loaded",
        ),
    ],
)
def test_named_files_are_checked_before_a_rank_starts(flags, message, tmp_path, monkeypatch):
    """What is at an address or on a hub is left to the ranks."""
    monkeypatch.chdir(tmp_path)
    corpus = tmp_path / "corpus"
    with TokenWriter(corpus, np.dtype(np.uint16)) as writer:
        writer.add_documents([[1, 2, 3]] * 20)
        writer.complete()

    def start(*args: object, **options: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(start_ranks, "start_ranks", start)
    flags = [flag.format(corpus=corpus) for flag in flags]
    with pytest.raises(NanotrainError, match=message):
        launch(["--nproc-per-node=2"], ["+config=tiny", *flags], environment={})
    assert {path.suffix for path in tmp_path.iterdir()} == {".bin", ".idx"}


def test_a_failed_attempt_is_judged_by_what_its_ranks_noted(tmp_path, capsys):
    folder = tmp_path / "run"
    print_verdict(folder, {1: -9}, since_s=0.0)
    assert capsys.readouterr().err == "", "without a folder the message of the ranks says all"
    folder.mkdir()
    (folder / "run.lock").touch()
    print_verdict(folder, {1: -9}, since_s=time.time())
    assert capsys.readouterr().err == "verdict: restart: SIGKILL ended a rank\n"
    (verdict,) = read_verdicts(folder)
    assert verdict.hosts == (platform.node(),)
    (folder / "verdicts.jsonl").unlink()
    (folder / "verdicts.jsonl").symlink_to(tmp_path / "other")
    print_verdict(folder, {1: -9}, since_s=time.time())
    assert capsys.readouterr().err.startswith("no verdict: ")
