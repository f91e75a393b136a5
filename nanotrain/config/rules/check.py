"""Check a configuration against the rules; every broken rule is in one error.

collect_errors        all rules without a world size; rules/unused.py has settings without effect
check_model           the model section, also once it is read from a Hugging Face folder
check_layout          the model against its parallel layout
check_groups          groups of rules by name
validate_for_world    the rules that need the world size
validate_start        the same, unless the layout is still to be chosen
"""

from nanotrain.config.config import Config
from nanotrain.config.data_stages import read_stages
from nanotrain.config.rules.groups import GROUPS
from nanotrain.config.rules.settings import Settings, Unreadable
from nanotrain.config.schedules import (
    batch_schedule,
    global_batch_size,
    length_schedule,
    num_microbatches,
)
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.quantities import count_of

# Fields that name a row of a table of implementations. The tables import torch, so
# `plan.check_names` checks the names.
OPEN_NAMES = (
    "pipeline_schedule",
    "cp_comm_type",
    "attention_backend",
    "optimizer",
    "muon_scalar_optimizer",
    "lr_decay_style",
    "fp8_recipe",
)
BATCH_FIELDS = (
    "micro_batch_size",
    "global_batch_size",
    "rampup_batch_size",
    "step_batch_size_schedule",
    "seq_length",
)
# per rank and step; a rank plans the order of all of them, 65,536 in a few seconds
MAX_MICROBATCHES = 1 << 16


def collect_errors(
    config: Config,
    *,
    to_train: bool,
    errors: ErrorCollector,
    unreadable: frozenset[str] = frozenset(),
) -> None:
    """Check every rule that needs no world size.

    Args:
        config: the configuration; fields that could not be read have their defaults.
        to_train: also check that the layout fits the model.
        errors: collects the broken rules.
        unreadable: unique names of fields that could not be read; rules on them are left out.
    """
    if config.is_model_known:  # else it is checked once it is complete
        check_rules(config, "model", errors=errors, unreadable=unreadable)
    check_rules(config, "run", errors=errors, unreadable=unreadable)
    if unreadable.isdisjoint(BATCH_FIELDS):
        with errors:
            check_batches(config, 1)
    if unreadable.isdisjoint(("step_seq_length_schedule", "seq_length")):
        with errors:
            length_schedule(config)
    if unreadable.isdisjoint(("data_stages", "train_iters")):
        with errors:
            read_stages(config.data.stages, config.train.train_iters)
    if to_train and config.is_model_known:
        check_rules(config, "layout", errors=errors, unreadable=unreadable)


def check_model(config: Config) -> None:
    """Check the model section; raises all broken rules in one ConfigError."""
    check_groups(config, "model")


def check_layout(config: Config) -> None:
    """Check that layout and recomputation fit the model; raises all broken rules in one error."""
    check_groups(config, "layout")


def check_groups(config: Config, *groups: str) -> None:
    """Check groups of rules (groups.py); raises all broken rules in one ConfigError."""
    errors = ErrorCollector()
    for group in groups:
        check_rules(config, group, errors=errors)
    errors.raise_errors()


def check_rules(
    config: Config,
    group: str,
    *,
    errors: ErrorCollector,
    unreadable: frozenset[str] = frozenset(),
) -> None:
    """Check the rules of a group, except rules on fields that could not be read.

    Args:
        config: the configuration; fields that could not be read have their defaults.
        group: a key of `groups.GROUPS`.
        errors: collects the broken rules.
        unreadable: unique names of fields that could not be read.
    """
    settings = Settings(config, unreadable)
    for rules in GROUPS[group]:
        with errors:  # a rule may find that a pattern of layers is invalid
            try:
                for error in rules(settings):
                    errors.errors.append(error)
            except Unreadable:
                continue


def validate_start(config: Config, world_size: int, *, expected_dp: int | None = None) -> None:
    """Check the rules that need the number of ranks, unless `--auto-layout` is to choose it."""
    if not config.parallel.auto_layout:
        validate_for_world(config, world_size, expected_dp=expected_dp)


def validate_for_world(config: Config, world_size: int, *, expected_dp: int | None = None) -> None:
    """Check the rules that need the number of ranks.

    Args:
        config: a validated configuration.
        world_size: ranks of the run.
        expected_dp: value of `--data-parallel-size`.

    Raises:
        ConfigError: ranks that cannot form the groups, or a global batch that they cannot share.
    """
    dp = config.parallel.data_parallel_size(world_size)
    check_data_parallel_size(dp, expected_dp, world_size=world_size)
    if absent := [rank for rank in config.train.profile_ranks if rank >= world_size]:
        raise ConfigError(
            f"profile_ranks has rank {absent[0]}",
            why=f"the run has {count_of(world_size, 'rank')}, from 0",
            fix="leave it out of --profile-ranks",
        )
    check_batches(config, dp)
    count = num_microbatches(config.train, dp)
    if count > MAX_MICROBATCHES:
        raise ConfigError(
            f"a global batch of {count_of(global_batch_size(config.train, dp), 'sample')} has "
            f"{count_of(count, 'microbatch')} per rank",
            why=f"at most {MAX_MICROBATCHES:,} can be planned",
            fix="raise --micro-batch-size, or lower --global-batch-size",
        )


def check_data_parallel_size(dp: int, expected: int | None, *, world_size: int) -> None:
    """Check the number of data-parallel ranks against `--data-parallel-size`, if it is set.

    Raises:
        ConfigError: they differ.
    """
    if expected is not None and expected != dp:
        raise ConfigError(
            f"--data-parallel-size is {expected}, the run has {dp}",
            why=f"it only checks the size that follows from {count_of(world_size, 'rank')}",
            fix=f"run on {count_of(expected * world_size // dp, 'rank')} or leave it out",
        )


def check_batches(config: Config, dp: int) -> None:
    """Check that every global batch of a run can be split into microbatches.

    Raises:
        ConfigError: a schedule of batch sizes that cannot be read, or a size that does not divide.
    """
    num_microbatches(config.train, dp)
    schedule = batch_schedule(config)
    if schedule is None:
        return
    flag = "--rampup-batch-size"
    if config.train.step_batch_size_schedule:
        flag = "--step-batch-size-schedule"
    micro_batch_size = config.train.micro_batch_size
    smallest = micro_batch_size * dp
    for size in schedule.sizes:
        if size % micro_batch_size != 0 or size < smallest:
            raise ConfigError(
                f"a global batch of {count_of(size, 'sample')} of {flag} cannot be split into "
                "microbatches",
                why=f"micro_batch_size {micro_batch_size} must divide it, and each of dp={dp} "
                "ranks needs a microbatch",
                fix=f"set {flag} to multiples of {micro_batch_size} from {smallest} on",
            )
