"""AdamW and the counters of a training program's checkpoint.

    adam_settings    learning rate, decay rates and weight decay as settings of ours
    read_counters    step, updates and samples

Settings are stored per parameter group, and may differ between groups: those of the most parameters
are taken, and a line names the others. The schedule of the learning rate is a function of the
program, which is not stored: the stored rate, that of the next step, stays constant.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanotrain.config.config import Config
from nanotrain.config.schema import KEYS, typed, value_of
from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.stored import StoredRun
from nanotrain.interop.imported import number_of
from nanotrain.quantities import count_of
from nanotrain.untrusted import finite_number, shown

MOMENTS = ("exp_avg", "exp_avg_sq")
FIELDS = ("lr", "initial_lr", "betas", "eps", "weight_decay")
FLAGS = ("amsgrad", "maximize", "decoupled_weight_decay")
WEIGHTS_ALONE = "import the weights alone, with --no-optim"
STEPS = ("train_state.step", "trainer.step", "step", "global_step", "iteration")
STEP_PARTS = {name.partition(".")[0] for name in STEPS}


@dataclass(frozen=True)
class Settings:
    """Settings of the optimizer by key, and lines for the user."""

    values: Mapping[str, Any]
    notes: list[str]


@dataclass(frozen=True)
class Counters:
    """Counters of a run."""

    step: int
    num_updates: int
    consumed_samples: int
    notes: list[str]


def require_adam(run: StoredRun) -> None:
    """Check by names that the state of the optimizer is Adam's.

    Raises:
        CheckpointError: it is not.
    """
    kinds = set(run.states)
    names = set().union(*run.states.values()) if run.states else set()
    if names and all(name.isdigit() for name in names):
        raise CheckpointError(
            "the state of the optimizer has numbers in place of names",
            why="optimizer.state_dict() does not say which parameter is which",
            fix="save what get_optimizer_state_dict of torch.distributed.checkpoint.state_dict "
            f"returns, or {WEIGHTS_ALONE}",
        )
    if not kinds.issuperset(MOMENTS) or kinds - {*MOMENTS, "step"}:
        others = ", ".join(shown(kind) for kind in sorted(kinds)[:5])
        raise CheckpointError(
            f"the state of the optimizer is {others}",
            why="that of AdamW is read: exp_avg, exp_avg_sq and step",
            fix=WEIGHTS_ALONE,
        )


def adam_settings(run: StoredRun, *, config: Config, given: Collection[str]) -> Settings:
    """The settings of AdamW by key, without the settings that the user gives.

    Args:
        run: the checkpoint.
        config: the configuration so far.
        given: keys that the user sets in it.

    Raises:
        CheckpointError: they are damaged, or of another optimizer.
    """
    groups = run.param_groups((*FIELDS, *FLAGS))
    groups = {name: group for name, group in groups.items() if name in run.states["exp_avg"]}
    if not groups:
        return Settings({}, ["settings of the optimizer: none are stored; set --lr and the others"])
    try:
        settings = settings_of(groups, run, given=given)
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"the settings of the optimizer in {run.folder.folder} cannot be read",
            why=str(error),
            fix=WEIGHTS_ALONE,
        ) from None
    values = {}
    for key, value in settings.values.items():
        mine = value_of(config, key)
        if key not in given:
            values[key] = value
        elif mine != value:
            flag = KEYS[key].flag
            settings.notes.append(
                f"{flag} {typed(mine)} is taken; the checkpoint has {typed(value)}"
            )
    return Settings(values, settings.notes)


def settings_of(
    groups: Mapping[str, Mapping[str, Any]], run: StoredRun, *, given: Collection[str]
) -> Settings:
    """The settings of AdamW from the settings per parameter; ValueError for another optimizer."""
    for name, group in groups.items():
        for flag in ("amsgrad", "maximize"):
            if group.get(flag):
                raise ValueError(f"{shown(name)} has {flag}, which has no form here")
        if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
            raise ValueError(f"{shown(name)} has weight decay in the gradient (Adam, not AdamW)")
    notes: list[str] = []
    lr = most_frequent(groups, "lr", notes=notes)
    beta1, beta2 = most_frequent(groups, "betas", notes=notes)
    values: dict[str, Any] = {
        "optim.adam_beta1": finite_number(beta1, "beta1"),
        "optim.adam_beta2": finite_number(beta2, "beta2"),
        "optim.adam_eps": most_frequent(groups, "eps", notes=notes),
    }
    values |= weight_decay_of(groups, run, notes=notes)
    if any(key.startswith(("optim.lr", "optim.min_lr")) for key in given):
        notes.append(f"the learning rate of the next step was {lr:g}; the given schedule is taken")
    else:
        values |= {"optim.lr": lr, "optim.min_lr": lr, "optim.lr_decay_style": "constant"}
        notes += lr_notes(groups, lr)
    return Settings(values, notes)


def lr_notes(groups: Mapping[str, Mapping[str, Any]], lr: float) -> list[str]:
    """A line on a learning rate that a schedule changed."""
    peak = most_frequent(groups, "initial_lr", notes=[], default=lr)
    if peak == lr:
        return []
    return [
        f"learning rate: {lr:g}, that of the next step, stays constant (it began from {peak:g}); "
        "the schedule is not in the checkpoint: set --lr, --lr-decay-style, --lr-decay-iters and "
        "--lr-warmup-iters"
    ]


def most_frequent(
    groups: Mapping[str, Mapping[str, Any]], field: str, *, notes: list[str], default: Any = None
) -> Any:
    """The value of a setting that most parameters have; a note names the other values.

    Raises:
        LookupError, ValueError: a parameter has none and there is no default, or it is no number.
    """
    values: Counter[Any] = Counter()
    for group in groups.values():
        value = group.get(field, default) if default is not None else group[field]
        values[number_or_pair(value, field)] += 1
    value, _ = values.most_common(1)[0]
    if len(values) > 1:
        others = ", ".join(str(other) for other in values if other != value)
        notes.append(f"{field}: {value} is taken; some parameters have {others}")
    return value


def number_or_pair(value: Any, field: str) -> float | tuple[float, float]:
    """A number, or the two of betas.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        if len(value) != 2:
            raise ValueError(f"{field} has {count_of(len(value), 'value')}, it must have two")
        return finite_number(value[0], field), finite_number(value[1], field)
    return finite_number(value, field)


def weight_decay_of(
    groups: Mapping[str, Mapping[str, Any]], run: StoredRun, *, notes: list[str]
) -> dict[str, Any]:
    """The settings of weight decay: its value, and whether vectors have it too."""
    matrices: dict[str, Mapping[str, Any]] = {}
    vectors: dict[str, Mapping[str, Any]] = {}
    for name, group in groups.items():
        shape = run.folder.tensors[run.states["exp_avg"][name]].shape
        (matrices if len(shape) > 1 else vectors)[name] = group
    decay = most_frequent(matrices or vectors, "weight_decay", notes=notes)
    vector_decay = decay
    if vectors:
        vector_decay = most_frequent(vectors, "weight_decay", notes=notes)
    if vector_decay not in (0.0, decay):
        notes.append(f"weight decay of vectors: {vector_decay:g} there, {decay:g} here")
    return {"optim.weight_decay": decay, "optim.apply_wd_to_all_params": vector_decay > 0}


def read_counters(run: StoredRun, *, batch_size: int | None, seq_length: int | None) -> Counters:
    """The counters of a run.

    Args:
        run: the checkpoint.
        batch_size: samples of a step, if the user says so.
        seq_length: tokens of a sample, if the user says so.

    Raises:
        CheckpointError: they are damaged.
    """
    try:
        num_updates = updates_of(run)
        step = run.value(*STEPS, *(f"app.{name}" for name in STEPS))
        step = num_updates if step is None else number_of(step, "step")
        samples, notes = samples_of(run, step, batch_size=batch_size, seq_length=seq_length)
    except ValueError as error:
        raise CheckpointError(
            f"the counters in {run.folder.folder} cannot be read",
            why=str(error),
            fix=WEIGHTS_ALONE,
        ) from None
    return Counters(step, num_updates, samples, notes)


def updates_of(run: StoredRun) -> int:
    """The number of updates, which all parameters must have.

    Raises:
        ValueError: they have different ones, or none.
    """
    steps = run.states.get("step", {})
    if not steps:
        raise ValueError("no parameter has a number of updates (step)")
    updates = {number_of(run.read_value(key), "step") for key in steps.values()}
    if len(updates) != 1:
        raise ValueError(f"parameters have different numbers of updates: {sorted(updates)[:5]}")
    return updates.pop()


def samples_of(
    run: StoredRun, step: int, *, batch_size: int | None, seq_length: int | None
) -> tuple[int, list[str]]:
    """The samples that a run has trained on, and a line on where the number comes from."""
    if batch_size is not None:
        return step * batch_size, []
    tokens = run.value("train_state.ntokens_seen")
    if tokens is None or seq_length is None:
        return 0, [
            "consumed samples: not stored, so data begin with the first sample; "
            "--global-batch-size of the run counts them"
        ]
    # every rank counts its own tokens; the checkpoint has the number of one rank
    ranks = number_of(run.value("dataloader.world_size") or 1, "world_size of dataloader")
    samples = number_of(tokens, "ntokens_seen") * ranks // seq_length
    return samples, [
        f"consumed samples: {samples:,}, from {tokens:,} tokens of a rank, "
        f"{count_of(ranks, 'data-parallel rank')} and --seq-length {seq_length}"
    ]
