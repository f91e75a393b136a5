"""`nanotrain COMMAND ...`: one function per command, which calls another package.

    train, config, completion                  here
    report, watch, runs, compare, timeline     runs.py
    checkpoint, data and family COMMAND        checkpoint.py, data.py, family.py
    all others                                 files of their names

Packages are imported inside the commands, so that `--help` does not load torch.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nanotrain.cli.addresses import transfers, with_addresses
from nanotrain.cli.audit import audit
from nanotrain.cli.card import card
from nanotrain.cli.checkpoint import CHECKPOINT_COMMANDS
from nanotrain.cli.checks import check_names
from nanotrain.cli.data import DATA_COMMANDS
from nanotrain.cli.doctor import doctor
from nanotrain.cli.dry_run import dry_run
from nanotrain.cli.evaluate import evaluate
from nanotrain.cli.family import FAMILY_COMMANDS
from nanotrain.cli.generate import generate
from nanotrain.cli.launch import launch, split_arguments
from nanotrain.cli.parity import parity
from nanotrain.cli.parser import Command, CommandParser, run_command
from nanotrain.cli.plan import plan
from nanotrain.cli.prepare import prepare
from nanotrain.cli.prove import prove
from nanotrain.cli.relayout import relayout
from nanotrain.cli.runs import compare, report, runs, timeline, watch
from nanotrain.cli.sweep import sweep
from nanotrain.cli.topology import topology
from nanotrain.cli.verdict import verdict
from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS
from nanotrain.config.flags import parse
from nanotrain.config.help import CONFIG_USAGE
from nanotrain.config.load import load_line, reply, to_yaml
from nanotrain.errors import INTERRUPTED, NanotrainError
from nanotrain.errors import report as print_error
from nanotrain.system import require_folders, run_program

ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit"
UNREAD_MODEL = (
    "model: replaced at the start of a run by the model of the checkpoint that it begins from"
)


def train(argv: Sequence[str]) -> int:
    """Train on one rank, or on N of this machine: --nproc-per-node N and options of torchrun."""
    options, arguments = split_arguments(argv)
    if options:
        return launch(options, arguments, environment=os.environ)
    from nanotrain.train.main import main as train_main

    return train_main(arguments)


def checkpoint(argv: Sequence[str]) -> int:
    """Inspect, verify, compare, average, prune, import or export checkpoints."""
    return run_command("nanotrain checkpoint", argv, commands=CHECKPOINT_COMMANDS)


def data(argv: Sequence[str]) -> int:
    """List the documents of a step, the steps of a document, or the tokens read of each corpus."""
    return run_command("nanotrain data", argv, commands=DATA_COMMANDS)


def family(argv: Sequence[str]) -> int:
    """Add a family of Hugging Face models from a folder."""
    return run_command("nanotrain family", argv, commands=FAMILY_COMMANDS)


def config(argv: Sequence[str]) -> int:
    """Print the resolved configuration; with --explain, the origin of each value.

    With --megatron-defaults, print a summary; --cfg job prints the configuration.
    Layouts that a training would refuse are refused; the number of ranks is not known here.
    """
    line = parse(argv)
    text = reply(line, usage=CONFIG_USAGE)
    if text is not None:
        print(text)
    if line.help_topic is not None:
        return 0
    loaded = load_line(line)
    check_names(loaded.config)
    notes = list(loaded.notes)
    if not loaded.config.is_model_known:
        notes.append(UNREAD_MODEL)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if text is None and line.wants_megatron_defaults:
        from nanotrain.cli.megatron_summary import megatron_summary

        print(megatron_summary(loaded, line))
    elif text is None:
        print(to_yaml(loaded.config).rstrip())
    return 0


def completion(argv: Sequence[str]) -> int:
    """Print the completion script of bash or zsh: source <(nanotrain completion bash)."""
    parser = CommandParser("completion", completion)
    parser.add_argument("shell", choices=["bash", "zsh"], help="the shell that reads the script")
    shell = parser.parse_args(argv).shell
    from nanotrain.config.compose import config_dir, names_in  # Hydra takes 0.2 s

    names = {
        "recipes": names_in("config", [config_dir()]),
        "commands": COMMANDS,
        "checkpoint": CHECKPOINT_COMMANDS,
        "data": DATA_COMMANDS,
        "family": FAMILY_COMMANDS,
        "flags": sorted({*FLAGS, *NEGATIONS, *ALIASES, "--nproc-per-node"}),
    }
    script = Path(__file__).with_name("completion.bash").read_text()
    for name, words in names.items():
        script = script.replace(f"@{name}@", " ".join(words))
    print(f"{ZSH}\n{script}" if shell == "zsh" else script)
    return 0


COMMANDS: dict[str, Command] = {
    "train": train,
    "prepare": prepare,
    "sweep": sweep,
    "plan": plan,
    "doctor": doctor,
    "dry-run": dry_run,
    "parity": parity,
    "prove": prove,
    "card": card,
    "topology": topology,
    "audit": audit,
    "checkpoint": checkpoint,
    "data": data,
    "family": family,
    "relayout": relayout,
    "evaluate": evaluate,
    "generate": generate,
    "report": report,
    "watch": watch,
    "runs": runs,
    "verdict": verdict,
    "compare": compare,
    "timeline": timeline,
    "config": config,
    "completion": completion,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 2 for a user error, which is printed on standard error."""
    if argv is None:  # this process is the command's
        run_program(lambda: main(sys.argv[1:]))
    try:
        if list(argv) == ["--version"]:
            from importlib.metadata import version

            print(f"nanotrain {version('nanotrain')}", flush=True)
            return 0
        require_folders()
        with transfers():
            return run_command("nanotrain", argv, commands=COMMANDS)
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except NanotrainError as error:
        return print_error(error, quiet=os.environ.get("RANK", "0") != "0", edit=with_addresses)
