"""The state of the optimizer in a checkpoint of Megatron-LM.

    find_state      where main parameters and moments are; None without them
    KeyedState      state with a tensor per weight
    read_counters   updates, loss scale and position of the schedules

Main parameters and moments have the keys of the weights behind optimizer.state.NAME., for the
optimizers without sharding and for the distributed one with --dist-ckpt-optim-fully-reshardable; in
earlier versions the shards of the distributed one are flattened, `flattened.py`.
Otherwise the distributed optimizer stores its buckets, `buckets.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nanotrain.interop.dcp.tensors import TensorFolder
from nanotrain.interop.imported import StateError, number_of, plain_number
from nanotrain.interop.megatron.buckets import MAIN, BucketState, has_buckets
from nanotrain.interop.megatron.flattened import is_flattened, read_flattened
from nanotrain.interop.megatron.folder import CommonState
from nanotrain.interop.megatron.placement import Placement
from nanotrain.spec.boxes import Box
from nanotrain.untrusted import LARGEST, finite_number, plain_text, whole_number

# beginnings of the keys of main parameters, by the optimizer that writes them: with fp32 model
# parameters, no one does
MAIN_KEYS = ("optimizer.state.fp32_param.", "optimizer.state.param.")
MOMENTS = {"exp_avg": "optimizer.state.exp_avg.", "exp_avg_sq": "optimizer.state.exp_avg_sq."}
CHAINED = 16  # optimizers in a chain: of dense weights and of experts, per model chunk


@dataclass(frozen=True)
class KeyedState:
    """State in tensors whose keys are a prefix and the key of the weight."""

    folder: TensorFolder
    # the prefix by kind of state, then by the key of the weight; main parameters that are the
    # weights themselves have none
    beginnings: Mapping[str, Mapping[str, str]]

    def read(self, key: str, box: Box, *, kind: str) -> Tensor:
        """One box of the state of a weight.

        Args:
            key: key of the weight.
            box: the box.
            kind: param, exp_avg or exp_avg_sq.
        """
        state_key = self.beginnings[kind].get(key, "") + key
        weight = self.folder.tensors[key].shape
        if self.folder.tensors[state_key].shape != weight:
            return read_flattened(self.folder, state_key, box=box, weight=weight)
        return self.folder.read(state_key, box)


State = KeyedState | BucketState


@dataclass
class Counters:
    """Counters and settings of the optimizer."""

    num_updates: int = 0
    loss_scale: dict[str, Any] | None = None  # as `LossScale.state_dict`; None: no loss scale
    # state of the schedules; empty: none
    scheduler: Mapping[str, Any] = field(default_factory=dict)


def find_state(
    folder: TensorFolder, placement: Placement, *, arguments: Mapping[str, Any]
) -> State | None:
    """Where the state of all weights is; None for a checkpoint without one.

    Raises:
        StateError: it has the state of some weights only, or in a form that is not read.
    """
    if has_buckets(folder):
        return BucketState(folder, placement, arguments=arguments)
    beginnings: dict[str, dict[str, str]] = {kind: {} for kind in (MAIN, *MOMENTS)}
    missing = []
    for key in placement.stored_keys:
        main = _find_beginning(folder, key, beginnings=MAIN_KEYS)
        if main is not None:
            require_shape_of(folder, key, other=main + key)
            beginnings[MAIN][key] = main
        for kind, beginning in MOMENTS.items():
            found = _find_beginning(folder, key, beginnings=[beginning])
            if found is not None:
                require_shape_of(folder, key, other=found + key)
                beginnings[kind][key] = found
            elif not key.endswith("expert_bias"):
                missing.append(f"{beginning}{key}")
    if not beginnings["exp_avg"]:
        refuse_other_forms(folder)
        return None
    if missing:
        raise StateError(
            f"{folder.folder} has the state of the optimizer for some weights only",
            why=f"{missing[0]} is missing",
        )
    return KeyedState(folder, beginnings)


def require_shape_of(folder: TensorFolder, key: str, *, other: str) -> None:
    """Check that a state has the shape of its weight, or of the flattened shards of the weight.

    Args:
        folder: the checkpoint.
        key: key of the weight.
        other: key of the state.

    Raises:
        StateError: it has another shape.
    """
    expected = folder.tensors[key].shape
    found = folder.tensors[other].shape
    if found != expected and not is_flattened(found, expected):
        raise StateError(
            f"{plain_text(other)} in {folder.folder} has the shape {found}",
            why=f"its weight has {expected}",
        )


def refuse_other_forms(folder: TensorFolder) -> None:
    """Check that a checkpoint has no state in a form that is not read.

    Raises:
        StateError: it has.
    """
    for key in [*folder.tensors, *folder.objects]:
        if "optimizer.distributed." in key:
            raise StateError(
                f"the state of the optimizer in {folder.folder} cannot be read",
                why=f"{plain_text(key)} is of an earlier form",
                fix="save it with --dist-ckpt-optim-fully-reshardable",
            )


def _find_beginning(folder: TensorFolder, key: str, *, beginnings: Sequence[str]) -> str | None:
    """The beginning with which a key of the checkpoint ends in another key."""
    for beginning in beginnings:
        if beginning + key in folder.tensors:
            return beginning
        for number in range(CHAINED):
            chained = f"chained_{number}.{beginning}"
            if chained + key in folder.tensors:
                return chained
    return None


def read_counters(folder: TensorFolder, common: CommonState) -> Counters:
    """Counters and settings of the optimizer.

    Raises:
        StateError: they are missing or damaged.
    """
    states = optimizer_states(common.state.get("optimizer"))
    for key in folder.objects:
        if "optimizer.distributed." in key and ".optimizer/" in key:
            states += optimizer_states(folder.read_object(key))
    try:
        steps = {step for state in states for step in steps_of(state)}
        scheduler = common.state.get("opt_param_scheduler") or {}
        if not isinstance(scheduler, dict):
            raise ValueError("opt_param_scheduler is no dictionary")
        if "num_steps" in scheduler:
            whole_number(scheduler["num_steps"], "num_steps of opt_param_scheduler")
        if len(steps) > 1:
            raise ValueError(f"parameters have different numbers of updates: {sorted(steps)}")
        # a constant scale has an empty state
        scale = next((state["grad_scaler"] for state in states if state.get("grad_scaler")), None)
        return Counters(
            num_updates=steps.pop() if steps else common.step,
            loss_scale=None if scale is None else loss_scale_of(scale),
            scheduler=scheduler,
        )
    except (ValueError, LookupError, TypeError) as error:
        raise StateError(
            f"the counters of the optimizer in {folder.folder} cannot be read",
            why=str(error),
        ) from None


def optimizer_states(content: Any) -> list[dict[str, Any]]:
    """The optimizers in a state: it is one, or has several by their numbers or in a list."""
    if isinstance(content, list):
        return [state for item in content for state in optimizer_states(item)]
    if not isinstance(content, dict):
        return []
    numbered = [content[key] for key in content if isinstance(key, int)]
    if numbered:
        return optimizer_states(numbered)
    return [content]


def steps_of(state: Mapping[str, Any]) -> set[int]:
    """The numbers of updates that an optimizer names.

    Where they are counted per parameter, those of the groups are from an earlier load.
    """
    inner = state.get("optimizer", state)
    steps = set()
    if isinstance(inner, dict):
        shared = inner.get("state")
        if isinstance(shared, dict) and "common_step" in shared:
            return {number_of(shared["common_step"], "common_step")}
        for group in inner.get("param_groups", []):
            if isinstance(group, dict) and group.get("step") is not None:
                steps.add(number_of(group["step"], "step"))
    return steps


def loss_scale_of(scaler: Any) -> dict[str, Any]:
    """The state of nanotrain's loss scale from the state of Megatron-LM's gradient scaler."""
    if not isinstance(scaler, dict):
        raise ValueError("grad_scaler is no dictionary")
    # every overflow lowers it, below zero too, until the scale grows
    hysteresis = number_of(scaler.get("hysteresis_tracker", 1), "hysteresis_tracker", low=-LARGEST)
    return {
        "scale": finite_number(plain_number(scaler["scale"], "scale"), "scale", low=1e-30),
        "is_dynamic": "growth_tracker" in scaler,
        "clean_steps": number_of(scaler.get("growth_tracker", 0), "growth_tracker"),
        "overflows_left": hysteresis,
    }
