"""`nanotrain dry-run`: the step of every kind of rank on the meta device, in this process."""

from collections.abc import Sequence

from nanotrain.cli.launch import check_names
from nanotrain.cli.parser import CommandParser
from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.config.rules.check import validate_for_world
from nanotrain.config.schema import with_values
from nanotrain.errors import ConfigError
from nanotrain.system import importing_torch


def dry_run(argv: Sequence[str]) -> int:
    """Run a training step of any number of GPUs without them: check its communication, its buffers
    and its memory.
    """
    args, rest = CommandParser("dry-run", dry_run).parse_known_args(argv)
    loaded, world_size = load_line(parse(rest)), args.world_size
    config = complete(loaded)
    validate_for_world(config, world_size, expected_dp=loaded.data_parallel_size)
    check_names(config)
    if args.rank is not None and args.rank >= world_size:
        why = f"the run has ranks 0 to {world_size - 1}"
        raise ConfigError(
            f"there is no rank {args.rank}", why=why, fix=f"set --rank {world_size - 1} or lower"
        )
    from nanotrain.dry_run.check import dry_run as run

    result = run(config, world_size, rank=args.rank)
    print(result.text())
    return 1 if result.faults else 0


def complete(loaded: Loaded) -> Config:
    """The configuration with the model that the run begins from, and a vocabulary size: unset, of
    the built-in corpus.

    Raises:
        ConfigError: another corpus without a size, or a model that the layout does not fit.
    """
    with importing_torch():
        from nanotrain.train.inputs import with_known_model

    config = with_known_model(loaded.config, loaded.explicit)
    if config.model.vocab_size is None:
        if not config.data.quickstart:
            why = "the tokenizer of the corpus is not read here"
            raise ConfigError(
                "the vocabulary has no size", why=why, fix="set --vocab-size, such as 50257"
            )
        return with_values(config, {"model.vocab_size": config.data.quickstart_vocab_size})
    return config
