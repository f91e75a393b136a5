"""Every line of a command block in the pages is run, planned, or checked by name; a line of no kind
is an error.

ran      here, as it stands, in a folder with small runs of the names that the pages use
planned  training: its configuration, and the plan of the last rank of the ranks that it names
parsed   its arguments and configuration (tests/test_docs.py); what it does is run by the tests named in PARSED
named    other programs: the target, script or module is there
followed the twin of docs/midtraining.md, whose commands build on each other: run in their order by
         tests/test_midtraining.py
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest

from nanotrain.cli.launch import split_arguments
from nanotrain.cli.main import COMMANDS, main
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.config.rules.check import validate_for_world
from nanotrain.plan.plan import plan_run
from tests.test_docs import PAGES, ROOT, code_lines
from tests.test_midtraining import twin_commands

RAN = re.compile(
    r"nanotrain (?!.*--nproc-per-node|.*s3://)(--version|config|completion|compare|runs|generate|checkpoint"
    r"|report|evaluate .*--data|prepare .*--tokenizer bytes|topology --world-size)\b.*"
)
PLANNED = re.compile(r"(\$ )?(nanotrain train|torchrun .*-m nanotrain\.train) .*")
PARSED = {  # the beginning of a command: what runs it
    "nanotrain audit": "tests/cli/test_audit.py",
    "nanotrain card": "tests/cli/test_card.py",
    "nanotrain checkpoint": "tests/laws/test_object_storage.py",  # of addresses
    "$ nanotrain checkpoint import-dcp": "tests/interop/dcp",
    "nanotrain data": "tests/cli/test_data.py",
    "nanotrain doctor": "tests/cli/test_doctor.py",
    "nanotrain dry-run": "tests/dry_run",
    "nanotrain prove": "tests/prove",
    "nanotrain plan": "tests/cli/test_plan.py",
    # with --tasks: the package is an extra
    "nanotrain evaluate": "tests/inference/test_lm_eval.py",
    "nanotrain family add": "tests/cli/test_family.py",
    "nanotrain generate --nproc-per-node": "tests/cli/test_launch.py",
    "nanotrain parity": "tests/parity",
    "nanotrain prepare": "tests/prepare",  # with a tokenizer that is trained
    "nanotrain relayout": "tests/cli/test_relayout.py",
    "nanotrain sweep": "tests/cli/test_sweep.py",
    "nanotrain timeline": "tests/report/test_timeline.py",
    "nanotrain topology --schedule": "tests/parallel/pp/test_draw.py",
    "nanotrain watch": "tests/report/test_page.py",
    "python -m nanotrain.inference.lm_eval": "tests/inference/test_lm_eval.py",
    "torchrun": "tests/test_examples.py",
}
NAMED = re.compile(r"(make|python|sh|sbatch|scripts/\w+|mkdir|printf)\b")
# other lines of code blocks are output and pictures; one with an option or a known program is a
# command
COMMAND = re.compile(
    r"(\$ )?(nanotrain|torchrun|make|python|pip|git|sbatch|scripts/|mkdir|printf|tensorboard) ?\S.*"
)
OPTIONED = re.compile(
    r"(?!without |taken again |in no tensor, )[a-z][\w./-]* ([^|>]* )?--[a-z][\w-]*( .*|=.*)?"
)
SMALL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 16 --seq-length 32 --train-iters 1"
SMALL += " --global-batch-size 2 --eval-interval 0 --generate-tokens 0 --no-report"


def shown_commands() -> list[str]:
    """The lines of all pages that are commands, without repetitions; `...` stands for what a reader
    fills in.
    """
    lines = {line for page in PAGES if "results" not in page.parts for line in code_lines(page)}
    return sorted(line for line in lines if COMMAND.fullmatch(line) or OPTIONED.fullmatch(line))


def kind_of(line: str) -> str:
    """One of the kinds above, or nothing."""
    if line in twin_commands():
        return "followed"
    if "..." in line:
        return "named" if line.split()[0] in {"nanotrain", "torchrun"} else ""
    if PLANNED.fullmatch(line):
        return "planned"
    if RAN.fullmatch(line):
        return "ran"
    if any(line.startswith(beginning) for beginning in PARSED):
        return "parsed"
    return "named" if NAMED.match(line) else ""


def of_kind(kind: str) -> list[str]:
    return [line for line in shown_commands() if kind_of(line) == kind]


def test_every_command_is_of_a_kind() -> None:
    commands = shown_commands()
    assert len(commands) > 50
    assert not [line for line in commands if not kind_of(line)]
    assert kind_of("nanotrain frobnicate runs/tiny") == "" and COMMAND.fullmatch(
        "nanotrain frobnicate runs/tiny"
    )
    assert kind_of("other-tool --option x") == "" and OPTIONED.fullmatch("other-tool --option x")
    assert not [test for test in PARSED.values() if not (ROOT / test).exists()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the runs, texts and exports that the pages name; the working directory of what
    is run.
    """
    root = tmp_path_factory.mktemp("pages")
    with chdir(root):
        (root / "docs").symlink_to(ROOT / "docs")
        (root / "text.txt").write_text("".join(f"text {i} of many, {i * i}\n" for i in range(200)))
        assert (
            main(["prepare", "--input", "text.txt", "--output", "corpus", "--tokenizer", "bpe:300"])
            == 0
        )
        line = ["+config=tiny", "--data-path", "corpus", *SMALL.split(), "--run-dir", "runs/tiny"]
        assert main(["train", *line]) == 0
        for name in (
            "tp2_pp2",
            "slower",
            "docs",
            "char",
            "tiny-sweep/lr=1e-3",
            "tiny-sweep/lr=3e-3",
        ):
            shutil.copytree("runs/tiny", f"runs/{name}")
        assert main(["checkpoint", "export-hf", "runs/tiny", "hf_folder"]) == 0
        made = {path.name for path in root.iterdir()}
        for line in (line for line in of_kind("named") if line.startswith(("mkdir", "printf"))):
            subprocess.run(line, shell=True, check=True)
        yield root
        ignored = {
            line.strip("/")
            for line in (ROOT / ".gitignore").read_text().splitlines()
            if line.startswith("/")
        }
        assert {path.name for path in root.iterdir()} - made <= ignored, "left in the checkout"


def test_trainings_that_differ_have_run_folders_of_their_own() -> None:
    folders: dict[str, str] = {}
    for line in shown_commands():
        if folder := re.search(r"--run-dir (\S+)", line):
            command = line.partition("  #")[0].strip()
            assert folders.setdefault(folder[1], command) == command


def test_a_training_that_is_shown_reaches_its_learning_rate() -> None:
    """Those of a few steps show something else; the header of such a run states the rate that it
    reaches.
    """
    for line in shown_commands():
        steps, recipe = re.search(r"--train-iters (\d+)", line), re.search(r"\+config=(\w+)", line)
        if steps and recipe and (int(steps[1]) >= 10 or re.search(r"\blr[= ]", line)):
            warmup = load([f"+config={recipe[1]}"], to_train=False).config.optim.lr_warmup_iters
            given = re.search(r"--lr-warmup-iters (\d+)", line)
            assert (int(given[1]) if given else warmup) < int(steps[1]), line


@pytest.mark.parametrize("line", of_kind("ran"))
def test_a_command_that_is_shown_runs(
    line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = shlex.split(line)[1:]
    assert name == "--version" or name in COMMANDS
    with chdir(folder):
        assert main([name, *arguments]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("line", of_kind("planned"))
def test_a_training_that_is_shown_is_planned(line: str, tmp_path: Path) -> None:
    for before in of_kind("named"):
        if before.startswith(("mkdir", "printf")):
            subprocess.run(before, shell=True, check=True, cwd=tmp_path)
    words = shlex.split(line.removeprefix("$ "))
    options, arguments = split_arguments(words[1:])
    sizes = dict(option.split("=") for option in options if "=" in option)
    num_ranks = int(sizes.get("--nproc-per-node", 1)) * int(sizes.get("--nnodes", 1))
    with chdir(tmp_path):
        loaded = load(arguments[2:] if words[0] == "torchrun" else arguments[1:])
    validate_for_world(loaded.config, num_ranks)
    plan_run(with_vocabulary(loaded.config), num_ranks, rank=num_ranks - 1)


def with_vocabulary(config: Config) -> Config:
    """The vocabulary that a run takes from its tokenizer."""
    return replace(config, model=replace(config.model, vocab_size=config.model.vocab_size or 32000))


@pytest.mark.parametrize("line", of_kind("named"))
def test_a_program_that_is_shown_is_there(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        if re.fullmatch(r"(examples|scripts|benchmarks)/[\w/]+(\.py)?", word):
            assert (ROOT / word).exists()
