"""A trained model on one rank or on a layout, for `evaluate` and `generate`.

arguments -> settings of the layout -> the model's configuration in that layout -> ranks -> result,
printed once
"""

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanotrain.cli.addresses import read_path
from nanotrain.cli.checks import refuse_inside_torchrun
from nanotrain.cli.launch import require_no_misspelled, take_options
from nanotrain.cli.parser import CommandParser
from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.scheduler import require_one_task
from nanotrain.system import importing_torch

# flags of other programs for the folder of a model, which is an argument without a flag here
MODEL_FLAGS = dict.fromkeys(
    (
        "--run-dir",
        "--load",
        "--checkpoint",
        "--checkpoint-path",
        "--ckpt",
        "--ckpt-path",
        "--model",
        "--path",
    ),
    "the folder without a flag",
)


def add_model(parser: CommandParser) -> None:
    """Add the arguments that choose a trained model."""
    parser.add_argument(
        "path", type=read_path, help="run folder, step folder, or Hugging Face folder"
    )
    parser.add_argument(
        "--ema", action="store_true", help="use the moving average of the weights (--ema-decay)"
    )


@dataclass(frozen=True)
class ModelCommand:
    """A parsed command line of a command on a trained model."""

    name: str
    argv: Sequence[str]  # arguments without torchrun's options
    options: Sequence[str]  # torchrun's options
    args: Namespace  # arguments of the command; `path` and `ema` choose the model
    loaded: Loaded  # settings of the layout

    @classmethod
    def parse(cls, name: str, parser: CommandParser, *, argv: Sequence[str]) -> "ModelCommand":
        """Parse the arguments of a command and the settings of the layout between them."""
        options, argv = take_options(argv)
        args, rest = parser.parse_known_args(argv)
        require_no_misspelled(rest)
        line = parse(rest, listed_by=f"nanotrain {name} --help")
        return cls(name, argv, options, args, loaded=load_line(line, to_train=False))

    def run(
        self, on_rank: Callable[[Namespace, Loaded], int], *, check: Callable[..., Config]
    ) -> int:
        """Run in this process, or with torchrun's options on one process per rank.

        Args:
            on_rank: the command on one rank.
            check: the configuration of a model in a layout, given that of its run, the settings and
                `world_size=`.

        Returns:
            The exit code.
        """
        if not self.options:
            require_one_task(os.environ)
            return on_rank(self.args, self.loaded)
        refuse_inside_torchrun(self.name, options=self.options, environment=os.environ)
        with importing_torch():
            from nanotrain.inference.checkpoint import open_model
            from nanotrain.launch.start_ranks import start_ranks

        trained = open_model(self.args.path, ema=self.args.ema).config
        return start_ranks(
            ["nanotrain", self.name, *self.argv],
            options=self.options,
            environment=os.environ,
            check=lambda world_size: check(trained, self.loaded, world_size=world_size),
        )
