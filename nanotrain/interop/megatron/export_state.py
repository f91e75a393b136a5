"""The state of the optimizer in an exported checkpoint: `optimizer_state.py`, back.

    StateOptions       for which optimizer of Megatron-LM it is written
    require_state      the error for state that Megatron-LM cannot take
    plan_state         the chunks of main parameters and moments, by those of the weights
    aliases            further keys of main parameters, which name the same bytes
    run_state          the entries of common.pt: optimizer, schedules, arguments, counters

Every optimizer of Megatron-LM finds what it reads in one checkpoint: without sharding with fp32
weights (moments alone), with 16-bit weights (optimizer.state.fp32_param), and the distributed one
in its form fully_reshardable (optimizer.state.param), on any tensor-, pipeline- and data-parallel
sizes. Two things are known at export only, `StateOptions`.

Source of the form: Megatron-LM, `optimizer.py`, `distrib_optimizer.py` (0.16.1).
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.config.config import Config
from nanotrain.config.schedules import batch_schedule, samples_of_steps
from nanotrain.errors import CheckpointError
from nanotrain.interop.megatron.export import MegatronChunk
from nanotrain.interop.megatron.export_arguments import (
    arguments_of_config,
    lost_settings,
)
from nanotrain.interop.megatron.optimizer_state import MAIN_KEYS, MOMENTS
from nanotrain.optim.lr import LRSchedule
from nanotrain.quantities import count_of
from nanotrain.untrusted import whole_number

FORM = "fully_reshardable"
# what Megatron-LM must know of the state before it asks for it
CONTENT = {"chained_optim_avoid_prefix": True, "distrib_optim_sharding_type": FORM}
WEIGHTS = "model/"
STATE = "optimizer/"


@dataclass(frozen=True)
class StateOptions:
    """Facts about the run of Megatron-LM that loads the state, which its checkpoints depend on."""

    # ranks over which it splits a layer's experts; with several, experts have an optimizer of their
    # own. None: as in the run of nanotrain
    expert_ranks: int | None = None
    # torch.optim.AdamW reads the number of updates per parameter, where transformer-engine's and
    # Apex's FusedAdam take none; the distributed optimizer reads it from the groups
    has_torch_adam: bool = False


class RunCounters(NamedTuple):
    """The counters of a checkpoint."""

    consumed_samples: int
    batch_size: int  # global batch size of step 0
    num_updates: int
    loss_scale: Mapping[str, Any]


def has_state(manifest: Manifest) -> bool:
    """Whether a checkpoint has state of an optimizer, and the counters of a run."""
    has_tensors = any(name.startswith(STATE) for name in manifest.tensors)
    return has_tensors and {"train", "optimizer"} <= manifest.objects.keys()


def left_out(manifest: Manifest, *, has_state: bool) -> list[str]:
    """One line for the tensors that are not written.

    Args:
        manifest: the checkpoint.
        has_state: whether the state of Adam is written.
    """
    written = ["model", "router"]
    if has_state:
        written += [STATE + moment for moment in MOMENTS]
    counts: dict[str, int] = {}
    for name in manifest.tensors:
        kind = name.partition("/")[0]
        if name.startswith(STATE):
            kind = "/".join(name.split("/")[:2])
        if kind not in written:
            counts[kind] = counts.get(kind, 0) + 1
    if not counts:
        return []
    parts = [f"{kind} ({count_of(number, 'tensor')})" for kind, number in counts.items()]
    return [f"left out: {', '.join(parts)}"]


def require_state(config: Config, manifest: Manifest) -> None:
    """Check that Megatron-LM can take the state of the optimizer.

    Raises:
        CheckpointError: everything that it cannot take, in one message.
    """
    optim = config.optim
    reasons = []
    if optim.optimizer != "adam":
        reasons.append(f"the state of {optim.optimizer} (that of adam is written)")
    if optim.decoupled_lr is not None:
        reasons.append("decoupled_lr (its parameter groups are not told apart when it is loaded)")
    if "trained_sets" in manifest.objects["optimizer"]:
        reasons.append("parameters that were frozen (Megatron-LM has one number of updates)")
    missing = missing_state(manifest)
    if missing and not reasons:
        reasons.append(f"weights without state, as {missing[0]}")
    if reasons:
        raise CheckpointError(
            "the state of the optimizer cannot be written for Megatron-LM",
            why="; ".join(reasons),
            fix="export the weights alone, with --no-optim",
        )


def missing_state(manifest: Manifest) -> list[str]:
    """The moments that parameters lack."""
    missing = []
    for name in manifest.tensors:
        if name.startswith(WEIGHTS):
            for moment in MOMENTS:
                state = f"{STATE}{moment}/{name.removeprefix(WEIGHTS)}"
                if state not in manifest.tensors:
                    missing.append(state)
    return missing


def plan_state(chunks: Iterable[MegatronChunk], *, has_main: bool) -> Iterator[MegatronChunk]:
    """The chunks of main parameters and moments.

    Args:
        chunks: the chunks of all weights.
        has_main: whether main parameters have chunks; fp32 weights are their own.
    """
    for chunk in chunks:
        if not is_parameter(chunk):
            continue
        if has_main:
            yield replace(chunk, key=MAIN_KEYS[0] + chunk.key)
        for moment, beginning in MOMENTS.items():
            sources = []
            for source in chunk.sources:
                name = f"{STATE}{moment}/{source.name.removeprefix(WEIGHTS)}"
                sources.append(replace(source, name=name))
            yield replace(chunk, key=beginning + chunk.key, sources=tuple(sources))


def is_parameter(chunk: MegatronChunk) -> bool:
    """Whether the optimizer updates a tensor; expert biases follow the load instead."""
    return chunk.sources[0].name.startswith(WEIGHTS)


def aliases(chunks: Iterable[MegatronChunk], *, has_main: bool) -> dict[str, list[str]]:
    """Further keys of main parameters, by the key whose values they have.

    Args:
        chunks: the chunks of all weights.
        has_main: whether main parameters have chunks.
    """
    names = {}
    for chunk in chunks:
        if not is_parameter(chunk):
            continue
        if has_main:
            names[MAIN_KEYS[0] + chunk.key] = [MAIN_KEYS[1] + chunk.key]
        else:
            names[chunk.key] = [beginning + chunk.key for beginning in MAIN_KEYS]
    return names


def run_state(config: Config, manifest: Manifest, *, options: StateOptions) -> dict[str, Any]:
    """The entries of common.pt about the run: arguments, optimizer and schedules.

    Args:
        config: the configuration of the run.
        manifest: a checkpoint that `require_state` accepts.
        options: facts about the run that loads them.
    """
    counters = read_counters(manifest)
    expert_ranks = options.expert_ranks or config.parallel.expert_model_parallel_size
    schedule = lr_schedule(config, counters)
    arguments = arguments_of_config(config, batch_size=counters.batch_size)
    arguments["consumed_train_samples"] = counters.consumed_samples
    arguments["iteration"] = manifest.step
    arguments["expert_model_parallel_size"] = expert_ranks
    dense = optimizer_entry(schedule, counters, options=options)
    optimizer: dict[Any, Any] = dense
    if config.model.moe is not None and expert_ranks > 1:
        experts = optimizer_entry(schedule, counters, options=options, is_expert=True)
        optimizer = {0: dense, 1: experts}
    return {
        "args": Namespace(**arguments),
        "optimizer": optimizer,
        "opt_param_scheduler": scheduler_state(schedule, counters.consumed_samples),
    }


def notes(config: Config, arguments: Mapping[str, Any]) -> list[str]:
    """Lines on settings with which Megatron-LM computes other results.

    Args:
        config: the configuration of the run.
        arguments: the arguments that are written.
    """
    lines = []
    rows = config.model.padded_vocab_size
    if rows != config.model.vocab_size:
        lines.append(
            f"the embedding has {rows:,} rows for {config.model.vocab_size:,} tokens; the loss of "
            "Megatron-LM is over the logits of the padding too"
        )
    if config.optim.apply_wd_to_all_params:
        lines.append("biases and norms decay here (apply_wd_to_all_params), not in Megatron-LM")
    lost = lost_settings(config, dict(arguments))
    if lost:
        lines.append(f"the import would read other values of {', '.join(lost)}")
    return lines


def read_counters(manifest: Manifest) -> RunCounters:
    """The counters of a checkpoint.

    Raises:
        CheckpointError: they are missing or damaged.
    """
    train = manifest.objects["train"]
    optimizer = manifest.objects["optimizer"]
    try:
        return RunCounters(
            consumed_samples=whole_number(train["consumed_samples"], "consumed_samples"),
            batch_size=whole_number(train["curve_batch_size"], "curve_batch_size", low=1),
            num_updates=whole_number(optimizer["num_updates"], "num_updates"),
            loss_scale=dict(optimizer["loss_scale"]),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            "the counters of the checkpoint cannot be read",
            why=str(error),
            fix="export the weights alone, with --no-optim",
        ) from None


def lr_schedule(config: Config, counters: RunCounters) -> LRSchedule:
    """The schedules of the run."""
    sizes = batch_schedule(config)
    samples = config.train.train_iters * counters.batch_size
    if sizes is not None:
        samples = samples_of_steps(sizes, config.train.train_iters)
    return LRSchedule(config.optim, counters.batch_size, samples)


def optimizer_entry(
    schedule: LRSchedule, counters: RunCounters, *, options: StateOptions, is_expert: bool = False
) -> dict[str, Any]:
    """The entry of one optimizer, which any kind of Megatron-LM's optimizers can read.

    An optimizer of fp32 weights reads its groups in the entry, the others in an inner entry. Both
    have their own groups, since Megatron-LM adds parameters to them.
    """
    state = {}
    if options.has_torch_adam:
        state["common_step"] = torch.tensor(float(counters.num_updates))
    entry: dict[str, Any] = {
        "param_state_sharding_type": FORM,
        "param_groups": param_groups(schedule, counters, is_expert=is_expert),
        "state": dict(state),
        "optimizer": {
            "param_groups": param_groups(schedule, counters, is_expert=is_expert),
            "state": dict(state),
        },
    }
    scale = counters.loss_scale
    if scale["is_dynamic"]:
        entry["grad_scaler"] = {
            "scale": torch.tensor([float(scale["scale"])]),
            "growth_tracker": scale["clean_steps"],
            "hysteresis_tracker": scale["overflows_left"],
        }
    return entry


def param_groups(
    schedule: LRSchedule, counters: RunCounters, *, is_expert: bool
) -> list[dict[str, Any]]:
    """The groups of parameters: with weight decay and, unless they are experts, without."""
    optim = schedule.optim
    consumed = counters.consumed_samples
    groups = []
    for wd_mult in (1.0,) if is_expert else (1.0, 0.0):
        group = {
            "wd_mult": wd_mult,
            "lr_mult": 1.0,
            "is_expert_parallel": is_expert,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": optim.lr,
            "min_lr": optim.min_lr,
            "lr": schedule.lr_at(consumed),
            "weight_decay": schedule.weight_decay_at(consumed) * wd_mult,
            "betas": (optim.adam_beta1, optim.adam_beta2),
            "eps": optim.adam_eps,
            "bias_correction": True,
            "step": counters.num_updates,
        }
        groups.append(group)
    return groups


def scheduler_state(schedule: LRSchedule, consumed_samples: int) -> dict[str, Any]:
    """The state of the schedules, whose steps are samples in Megatron-LM."""
    optim = schedule.optim
    warmup = schedule.warmup_samples
    start_wd = optim.weight_decay
    end_wd = optim.weight_decay
    if optim.weight_decay_incr_style != "constant":
        start_wd = optim.start_weight_decay or 0.0
        end_wd = optim.end_weight_decay or 0.0
    return {
        "max_lr": optim.lr,
        "min_lr": optim.min_lr,
        "lr_warmup_steps": int(warmup) if float(warmup).is_integer() else warmup,
        "num_steps": consumed_samples,
        "lr_decay_style": optim.lr_decay_style,
        "lr_decay_steps": schedule.decay_samples,
        "start_wd": start_wd,
        "end_wd": end_wd,
        "wd_incr_style": optim.weight_decay_incr_style,
        "wd_incr_steps": schedule.train_samples,
    }
