"""Settings that would do nothing, as data: nothing is skipped in silence.

A field that another one makes idle is an error, unless the words of the command line put a setting of a YAML file out
of play (`+config=tiny --data-parallel-sharding-strategy no_shard`, where tiny overlaps the parameter gather). Then the
field goes back to its default, and `nanotrain config --explain` says why.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from nanotrain.config.config import Config, DType, LRDecayStyle, PositionEmbedding, ShardingStrategy
from nanotrain.config.schema import ENTRIES, KEYS, Entry, plain
from nanotrain.errors import ConfigError


@dataclass(frozen=True)
class Idle:
    """Fields that do nothing while `holds`, and the fields that make it so."""

    names: tuple[str, ...]
    causes: tuple[str, ...]
    holds: Callable[[Config], bool]
    why: str


@dataclass(frozen=True)
class Settled:
    """A configuration without idle settings, and the origin of each value that was put back to its default."""

    config: Config
    origins: dict[str, str]


RULES: tuple[Idle, ...] = (
    Idle(
        ("lr_wsd_decay_iters", "lr_wsd_decay_style"),
        ("lr_decay_style",),
        lambda c: c.optim.lr_decay_style is not LRDecayStyle.WSD,
        "it belongs to lr_decay_style WSD",
    ),
    Idle(
        ("min_lr", "lr_decay_iters"),
        ("lr_decay_style",),
        lambda c: c.optim.lr_decay_style is LRDecayStyle.constant,
        "lr_decay_style constant never decays",
    ),
    Idle(("lr_warmup_init",), ("lr_warmup_iters",), lambda c: c.optim.lr_warmup_iters == 0, "there is no warmup"),
    Idle(
        ("overlap_param_gather",),
        ("data_parallel_sharding_strategy",),
        lambda c: c.parallel.data_parallel_sharding_strategy is ShardingStrategy.no_shard,
        "data_parallel_sharding_strategy no_shard gathers no parameters",
    ),
    Idle(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        ("params_dtype",),
        lambda c: c.precision.params_dtype is not DType.fp16,
        "only params_dtype fp16 scales the loss",
    ),
    Idle(
        (
            *("data_path", "tokenizer_model", "quickstart_vocab_size", "generate_tokens"),
            *("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
        ),
        ("mock_data",),
        lambda c: c.data.mock_data,
        "mock_data has no text and no documents",
    ),
    Idle(
        ("rotary_base", "use_rope_scaling"),
        ("position_embedding_type",),
        lambda c: c.model.position_embedding_type is not PositionEmbedding.rope,
        "it belongs to position_embedding_type rope",
    ),
    Idle(
        ("rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_positions"),
        ("use_rope_scaling",),
        lambda c: not c.model.use_rope_scaling,
        "it belongs to use_rope_scaling",
    ),
    Idle(
        ("reset_position_ids",),
        ("position_embedding_type",),
        lambda c: c.model.position_embedding_type is PositionEmbedding.none,
        "position_embedding_type none has no positions",
    ),
    Idle(
        ("add_qkv_bias",),
        ("add_bias_linear",),
        lambda c: c.model.add_bias_linear,
        "add_bias_linear gives every projection a bias already",
    ),
    Idle(("save_interval", "keep_last"), ("save",), lambda c: not c.checkpoint.save, "nothing is saved"),
    Idle(("eval_iters",), ("eval_interval",), lambda c: c.train.eval_interval == 0, "eval_interval 0 never validates"),
    Idle(("profile_step_start", "profile_step_end"), ("profile",), lambda c: not c.train.profile, "profile is off"),
    Idle(("wandb_project",), ("wandb",), lambda c: not c.train.wandb, "wandb is off"),
)


def settle_idle(config: Config, *, explicit: frozenset[str]) -> Settled:
    """Put settings of YAML files that the command line overruled back to their defaults.

    Args:
        config: the composed configuration.
        explicit: keys set on the command line.

    Raises:
        ConfigError: a setting without effect that nothing on the command line overruled.
    """
    origins: dict[str, str] = {}
    for rule in RULES:
        if not rule.holds(config):
            continue
        overruled = any(ENTRIES[cause].key in explicit for cause in rule.causes)
        for entry in (ENTRIES[name] for name in rule.names):
            value = value_of(config, entry)
            if value == entry.default:
                continue
            if entry.key in explicit or not overruled:
                raise without_effect(entry, rule, value=value)
            section = replace(getattr(config, entry.section), **{entry.name: entry.default})
            config = replace(config, **{entry.section: section})
            origins[entry.key] = f"default, not the YAML's {plain(value)}: {rule.why}"
    return Settled(config, origins)


def check_idle(config: Config) -> None:
    """Every setting that is not a default has an effect."""
    settle_idle(config, explicit=frozenset(KEYS))


def value_of(config: Config, entry: Entry) -> object:
    """The value of a field."""
    return getattr(getattr(config, entry.section), entry.name)


def without_effect(entry: Entry, rule: Idle, *, value: object) -> ConfigError:
    """The error for a setting that would do nothing."""
    causes = " or ".join(ENTRIES[cause].flag for cause in rule.causes)
    return ConfigError(
        f"{entry.key} = {plain(value)} has no effect", why=rule.why, fix=f"leave {entry.flag} out or change {causes}"
    )
