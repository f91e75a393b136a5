"""Rules that span several fields, each a function that raises with the numbers and the cure.

`validate` holds what needs no world, `validate_for_world` what needs the number of ranks, and `require_trainable` what
only training needs: a layout that fits the model, and nothing that can be planned but not yet trained. The bounds of a
single field stand with the field, the rules of the model in model_rules.py, those of its layout in layout_rules.py.
"""

from nanotrain.config.config import Config, DType, LRDecayStyle
from nanotrain.config.derive import data_parallel_size, num_microbatches
from nanotrain.config.idle import check_idle
from nanotrain.config.layout_rules import check_layout
from nanotrain.config.model_rules import check_model
from nanotrain.config.option import flag_of
from nanotrain.errors import ConfigError


def validate(config: Config) -> None:
    """Check every rule that needs no world.

    Raises:
        ConfigError: the first rule that is broken.
    """
    if config.checkpoint.pretrained_checkpoint is None:
        check_model(config)  # otherwise the model section is still to be read from config.json
    for rule in (check_lr, check_wsd, check_batch, check_split, check_start, check_profile, check_loss_scale):
        rule(config)
    check_idle(config)


def check_lr(config: Config) -> None:
    """The learning rate begins and ends at or below its peak."""
    optim = config.optim
    for name, value in (("min_lr", optim.min_lr), ("lr_warmup_init", optim.lr_warmup_init)):
        if value > optim.lr:
            raise ConfigError(
                f"{name} {value:g} is above lr {optim.lr:g}",
                why="lr is the peak",
                fix=f"set --{name.replace('_', '-')} or --lr",
            )
    if optim.lr_decay_iters is not None and optim.lr_decay_iters < optim.lr_warmup_iters:
        raise ConfigError(
            f"lr_decay_iters {optim.lr_decay_iters} is below lr_warmup_iters {optim.lr_warmup_iters}",
            why="the decay ends before the warmup",
            fix="raise --lr-decay-iters or lower --lr-warmup-iters",
        )


def check_wsd(config: Config) -> None:
    """WSD knows how long its decay is, and the run is at least as long."""
    optim, total = config.optim, config.optim.lr_decay_iters or config.train.train_iters
    if optim.lr_decay_style is not LRDecayStyle.WSD:
        return
    if optim.lr_wsd_decay_iters is None:
        raise ConfigError(
            "lr_decay_style WSD has no length for its final decay",
            why="lr_wsd_decay_iters is unset",
            fix=f"set --lr-wsd-decay-iters, for example {max(1, total // 10)}",
        )
    if optim.lr_wsd_decay_iters > total:
        raise ConfigError(
            f"lr_wsd_decay_iters {optim.lr_wsd_decay_iters} is longer than the whole curve of {total} steps",
            why="the decay is its last part",
            fix=f"set --lr-wsd-decay-iters {max(1, total // 10)}",
        )


def check_batch(config: Config) -> None:
    """A global batch holds whole microbatches."""
    num_microbatches(config.train, 1)


def check_split(config: Config) -> None:
    """The split is up to three proportions, and the first, training, is not zero."""
    try:
        parts = [float(part) for part in config.data.split.split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or parts[0] == 0 or not all(part < float("inf") for part in parts):
        raise ConfigError(
            f"split is {config.data.split!r}",
            why="it takes proportions of training, validation and test, and training needs some",
            fix="set --split 969,30,1",
        )


def check_start(config: Config) -> None:
    """A run starts from one place."""
    if config.checkpoint.load is not None and config.checkpoint.pretrained_checkpoint is not None:
        raise ConfigError(
            f"load {config.checkpoint.load} and pretrained_checkpoint {config.checkpoint.pretrained_checkpoint}",
            why="a run starts either from a checkpoint or from Hugging Face weights",
            fix="leave out --load or --pretrained-checkpoint",
        )


def check_profile(config: Config) -> None:
    """The profiled steps are among the steps."""
    train = config.train
    if train.profile and not train.profile_step_start <= train.profile_step_end <= train.train_iters:
        raise ConfigError(
            f"steps {train.profile_step_start} to {train.profile_step_end} of {train.train_iters} cannot be profiled",
            why="profile_step_start <= profile_step_end <= train_iters must hold",
            fix="set --profile-step-start and --profile-step-end",
        )


def check_loss_scale(config: Config) -> None:
    """The loss scale begins at or above its floor."""
    precision = config.precision
    if precision.params_dtype is DType.fp16 and precision.min_loss_scale > precision.initial_loss_scale:
        raise ConfigError(
            f"min_loss_scale {precision.min_loss_scale:g} is above initial_loss_scale {precision.initial_loss_scale:g}",
            why="the scale never falls below the minimum",
            fix="lower --min-loss-scale",
        )


def validate_for_world(config: Config, world_size: int, *, expected_dp: int | None = None) -> None:
    """Check the rules that need the number of ranks.

    Args:
        config: a validated configuration.
        world_size: ranks of the run.
        expected_dp: what `--data-parallel-size` said.

    Raises:
        ConfigError: ranks that cannot be arranged, or a global batch that they cannot share.
    """
    dp = data_parallel_size(config.parallel, world_size)
    if expected_dp is not None and expected_dp != dp:
        raise ConfigError(
            f"--data-parallel-size is {expected_dp}, the run has {dp}",
            why=f"it follows from {world_size} ranks and only checks",
            fix=f"run on {expected_dp * world_size // dp} ranks or leave it out",
        )
    num_microbatches(config.train, dp)


def require_trainable(config: Config) -> None:
    """Check that the layout fits the model; refuse what `nanotrain topology` plans but this version does not train."""
    if config.checkpoint.pretrained_checkpoint is None:
        check_layout(config)
    instances = config.parallel.num_distributed_optimizer_instances
    if instances > 1:
        raise ConfigError(
            f"num_distributed_optimizer_instances is {instances}",
            why="this version plans and counts it, but does not train it",
            fix=f"leave {flag_of('num_distributed_optimizer_instances')} out",
        )
