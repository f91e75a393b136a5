"""`nanotrain COMMAND ...`: one function per command, which reads its words and hands them to a room.

    train | prepare | parity | topology | generate | config
    checkpoint inspect | checkpoint verify | checkpoint export-hf

Rooms are imported where a command needs them, so that `--help` answers before torch could be loaded.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from nanotrain.config.load import answer, load, to_yaml
from nanotrain.config.schema import check_choice
from nanotrain.errors import EXIT_CODE, ConfigError, NanotrainError, report


class Words(argparse.ArgumentParser):
    """A parser without abbreviations whose mistakes are our errors."""

    def __init__(self, command: str, purpose: Callable[..., int], *, epilog: str | None = None) -> None:
        super().__init__(prog=f"nanotrain {command}", description=purpose.__doc__, epilog=epilog, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise ConfigError(f"{self.prog}: {message}", fix=f"{self.prog} --help lists what it takes")


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(text)
    return int(text)


def above_zero(text: str) -> float:
    """A finite number above zero."""
    if not 0 < float(text) < float("inf"):
        raise ValueError(text)
    return float(text)


def train(argv: Sequence[str]) -> int:
    """Train, as `python -m nanotrain.train` does; many ranks are started by torchrun."""
    if (text := answer(argv)) is not None:
        print(text)
        return 0
    from nanotrain.train.__main__ import main as train_main

    return train_main(argv)


def prepare(argv: Sequence[str]) -> int:
    """Turn text into token files (.bin/.idx) for --data-path."""
    from nanotrain.prepare.command import add_arguments, run

    words = Words("prepare", prepare)
    add_arguments(words)
    run(words.parse_args(argv))
    return 0


def parity(argv: Sequence[str]) -> int:
    """Check that a layout trains as one rank does: a shrunk model, on CPU processes of this machine."""
    words = Words("parity", parity, epilog="any configuration flag may follow, as --tensor-model-parallel-size 2")
    words.add_argument("--world-size", type=count, metavar="N", required=True, help="ranks: processes to start")
    words.add_argument("--steps", type=count, default=3, metavar="K", help="optimizer steps (default: 3)")
    tolerance_help = "relative difference that is equal, gradients ten times that (default: 1e-5)"
    words.add_argument("--tolerance", type=above_zero, default=1e-5, metavar="T", help=tolerance_help)
    words.add_argument("--json", action="store_true", help="the findings as JSON")
    asked, rest = words.parse_known_args(argv)
    loaded = load(rest)
    from nanotrain.parity.check import check_parity

    found = check_parity(loaded, asked.world_size, num_steps=asked.steps, tolerance=asked.tolerance)
    print(found.to_json() if asked.json else found.text())
    return 0 if found.holds else EXIT_CODE


def topology(argv: Sequence[str]) -> int:
    """Print the groups of a number of ranks, or draw a pipeline schedule; takes the flags of the parallel section."""
    words = Words("topology", topology, epilog="any configuration flag may follow, as --tensor-model-parallel-size 2")
    words.add_argument("--world-size", type=count, metavar="N", help="number of ranks: print their groups")
    words.add_argument("--schedule", metavar="NAME", help="draw this pipeline schedule")
    words.add_argument("--json", action="store_true", help="groups as an object of name -> list of rank lists")
    words.add_argument("--num-microbatches", type=count, metavar="M", help="of the schedule (default: 2 per rank)")
    words.add_argument("--png", type=Path, metavar="FILE", help="draw the schedule into a picture as well")
    asked, rest = words.parse_known_args(argv)
    if asked.world_size is None and asked.schedule is None:
        words.error("give --world-size N, --schedule NAME or both")
    if asked.json and (asked.schedule is not None or asked.world_size is None):
        words.error("--json prints groups: it needs --world-size and leaves no room for --schedule")
    if asked.schedule is None and (asked.num_microbatches is not None or asked.png is not None):
        words.error("--num-microbatches and --png belong to --schedule")
    if asked.world_size is not None:
        from nanotrain.topology.picture import run_topology

        print(run_topology(load(rest, to_train=False).config.parallel, asked.world_size, as_json=asked.json))
    if asked.schedule is not None:
        return draw(asked.schedule, rest, num_microbatches=asked.num_microbatches, png=asked.png)
    return 0


def draw(schedule: str, argv: Sequence[str], *, num_microbatches: int | None, png: Path | None) -> int:
    """Draw a pipeline schedule for the pipeline ranks and stages that the flags say."""
    from nanotrain.parallel.pp.actions import PipelineShape
    from nanotrain.parallel.pp.draw import draw_schedule
    from nanotrain.parallel.pp.schedules import SCHEDULES

    check_choice("pipeline_schedule", schedule, known=SCHEDULES)
    parallel = load(["--pipeline-schedule", schedule, *argv], to_train=False).config.parallel
    num_ranks = parallel.pipeline_model_parallel_size
    stages_per_rank = parallel.num_virtual_stages_per_pipeline_rank
    shape = PipelineShape(num_ranks, stages_per_rank, num_microbatches or 2 * num_ranks)
    print(draw_schedule(schedule, shape, png=png))
    return 0


def checkpoint(argv: Sequence[str]) -> int:
    """Look at a checkpoint (inspect, verify) or write it as a Hugging Face folder (export-hf)."""
    if not argv or argv[0] not in CHECKPOINT_COMMANDS:
        return choose("nanotrain checkpoint", argv, commands=CHECKPOINT_COMMANDS)
    return CHECKPOINT_COMMANDS[argv[0]](argv[1:])


def inspect(argv: Sequence[str]) -> int:
    """Print the step, sizes and tensors of a checkpoint."""
    words = Words("checkpoint inspect", inspect)
    words.add_argument("path", type=Path, help="a step folder, or a run folder for its newest")
    asked = words.parse_args(argv)
    from nanotrain.checkpoint.report import describe

    print(describe(asked.path))
    return 0


def verify(argv: Sequence[str]) -> int:
    """Compare every byte of a checkpoint with its checksums; exit code 2 where one differs."""
    words = Words("checkpoint verify", verify)
    words.add_argument("path", type=Path, help="a step folder, or a run folder for its newest")
    asked = words.parse_args(argv)
    from nanotrain.checkpoint.report import verify as verify_checkpoint

    outcome = verify_checkpoint(asked.path)
    print(outcome.text())
    return 0 if outcome.is_sound else EXIT_CODE


def export_hf(argv: Sequence[str]) -> int:
    """Write the weights of a checkpoint as a Hugging Face folder."""
    words = Words("checkpoint export-hf", export_hf)
    words.add_argument("path", type=Path, help="a step folder, or a run folder for its newest")
    words.add_argument("folder", type=Path, help="the Hugging Face folder to write")
    words.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the weights (default: fp32)"
    )
    words.add_argument("--family", help="a model_type, as llama or mixtral; unset: the first that can hold the model")
    words.add_argument("--tokenizer", type=Path, help="a tokenizer.json or a folder, copied beside the weights")
    asked = words.parse_args(argv)
    from nanotrain.inference.checkpoint import export_checkpoint

    print(export_checkpoint(**vars(asked)))
    return 0


def generate(argv: Sequence[str]) -> int:
    """Continue a text with the model of a checkpoint."""
    words = Words("generate", generate)
    words.add_argument("path", type=Path, help="a step folder, or a run folder for its newest")
    words.add_argument("--prompt", default="", help="the text to continue (default: none)")
    words.add_argument("--num-tokens", type=count, default=120, metavar="N", help="at most so many (default: 120)")
    words.add_argument("--temperature", type=above_zero, default=0.8, help="lower is tamer (default: 0.8)")
    words.add_argument("--top-k", type=count, metavar="K", help="choose among the K likeliest tokens; 1: no chance")
    words.add_argument("--seed", type=int, default=0, help="the same seed writes the same text (default: 0)")
    words.add_argument("--tokenizer", help="Hugging Face name or folder, tokenizer.json; unset: the run's")
    asked = words.parse_args(argv)
    from nanotrain.inference.checkpoint import continue_text
    from nanotrain.inference.generate import Sampling

    sampling = Sampling(temperature=asked.temperature, top_k=asked.top_k, seed=asked.seed)
    text = continue_text(
        asked.path, asked.prompt, num_tokens=asked.num_tokens, sampling=sampling, tokenizer=asked.tokenizer
    )
    print(text)
    return 0


def config(argv: Sequence[str]) -> int:
    """Print the resolved configuration; with --explain, where each value came from."""
    print(answer(argv) or to_yaml(load(argv, to_train=False).config).rstrip())
    return 0


Command = Callable[[Sequence[str]], int]
COMMANDS: dict[str, Command] = {
    "train": train,
    "prepare": prepare,
    "parity": parity,
    "topology": topology,
    "checkpoint": checkpoint,
    "generate": generate,
    "config": config,
}
CHECKPOINT_COMMANDS: dict[str, Command] = {"inspect": inspect, "verify": verify, "export-hf": export_hf}


def choose(program: str, argv: Sequence[str], *, commands: dict[str, Command]) -> int:
    """Where no command is named: the list of them, or an error."""
    lines = [f"  {name:<10}  {(command.__doc__ or '').splitlines()[0]}" for name, command in commands.items()]
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: {program} COMMAND ...\n\n" + "\n".join(lines) + f"\n\n{program} COMMAND --help says more")
        return 0
    what = f"unknown command {argv[0]!r}" if argv else "no command"
    raise ConfigError(what, why=f"{program} takes {', '.join(commands)}", fix=f"{program} --help says what they do")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, or 2 for a mistake with a cure, which is printed on standard error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] not in COMMANDS:
            return choose("nanotrain", words, commands=COMMANDS)
        return COMMANDS[words[0]](words[1:])
    except BrokenPipeError:  # the reader has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except NanotrainError as error:
        return report(error, quiet=os.environ.get("RANK", "0") != "0")


if __name__ == "__main__":
    sys.exit(main())
