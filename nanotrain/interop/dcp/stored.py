"""The tensors of a training program's checkpoint by what they are.

    find_step_folder   the folder of a step that a path names
    StoredRun          weights, states of the optimizer, and the other values, by name

A program saves a dict of its parts, and torch joins the keys with dots: `model.` or `app.model.` in
front of a weight, or nothing (torchtitan); `optimizer.state.NAME.exp_avg` and
`optimizer.param_groups.NAME.lr`, or `optimizer.param_groups.0.lr` with the names of group 0 in
`optimizer.param_groups.0.params`.
"""

import re
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.names import embedding_names
from nanotrain.interop.dcp.pickles import unreadable_file
from nanotrain.interop.dcp.tensors import METADATA, TorchDistFolder
from nanotrain.interop.hf.tensor_mapping import Shape
from nanotrain.spec.boxes import Box
from nanotrain.untrusted import list_of, plain_text, shown, text_of

FOLDERS = ("", "checkpoint", "checkpoints")  # of the steps, in the folder of a run
STEP = re.compile(r"step-([0-9]{1,18})")
# modules around others, which are no part of a name
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
# kinds of state of torch's optimizers
KINDS = {"acc_delta", "exp_avg", "exp_avg_diff", "exp_avg_sq", "exp_inf", "max_exp_avg_sq"}
KINDS |= {"momentum_buffer", "mu_product", "prev", "row_var", "square_avg", "step", "sum"}
# prefix of the optimizer, the parameter, and the kind
STATE = re.compile(rf"((?:[^.]+\.)*?)state\.(.+)\.({'|'.join(sorted(KINDS))})")
# first parts of keys beside weights that have nothing in front
OTHERS = {"dataloader", "epoch", "global_step", "iteration", "lr_scheduler", "lr_schedulers"}
OTHERS |= {"optim", "optimizer", "optimizers", "rng", "rng_state", "scheduler", "step"}
OTHERS |= {"train_state", "trainer"}
FIX = "name a folder with a .metadata file, as torch.distributed.checkpoint writes it"


def find_step_folder(path: Path) -> Path:
    """The folder of a step that a path names: itself, or the newest of a run.

    Raises:
        CheckpointError: there is none.
    """
    if (path / METADATA).is_file():
        return path
    if not path.is_dir():
        why = "it is a file" if path.is_file() else "there is no such folder"
        raise CheckpointError(f"{path} is no checkpoint", why=why, fix=FIX)
    for name in FOLDERS:
        steps = {}
        for folder in (path / name).glob("step-*"):
            step = STEP.fullmatch(folder.name)
            if step is not None and (folder / METADATA).is_file():
                steps[int(step[1])] = folder
        if steps:
            return steps[max(steps)]
    raise CheckpointError(
        f"{path} is no checkpoint of torch.distributed.checkpoint",
        why=f"it has neither {METADATA} nor folders step-N with one",
        fix=FIX,
    )


class StoredRun:
    """The parts of a checkpoint.

    Args:
        folder: the tensors.

    Raises:
        CheckpointError: there is no model in it, or there are several.
    """

    def __init__(self, folder: TorchDistFolder) -> None:
        self.folder = folder
        self._keys = self._canonical_keys()
        self.prefix, self.embedding = self._find_model()
        self.weights = self._weight_keys()
        # keys of the states of the optimizer by name of the weight, by kind of state
        self.states: dict[str, dict[str, str]] = {}
        self.optimizer: str | None = None  # prefix of the optimizer's keys
        self._find_states()

    @property
    def weight_shapes(self) -> dict[str, Shape]:
        """The shapes of the weights by name."""
        return self.shapes(self.weights)

    def shapes(self, keys: Mapping[str, str]) -> dict[str, Shape]:
        """The shapes of tensors by name, given their keys by name."""
        return {name: self.folder.tensors[key].shape for name, key in keys.items()}

    def value(self, *names: str) -> Any:
        """The value of the first of some keys that exists; None if none does."""
        found = next((name for name in names if name in self._keys), None)
        return None if found is None else self.read_value(self._keys[found])

    def read_value(self, key: str) -> Any:
        """The object or number behind a key.

        Raises:
            CheckpointError: it is damaged, or a tensor with several values.
        """
        if key in self.folder.objects:
            return self.folder.read_object(key)
        shape = self.folder.tensors[key].shape
        if prod(shape) != 1:
            why = f"{shown(key)} has the shape {shape}, it must be one value"
            raise unreadable_file(str(self.folder.folder / METADATA), why)
        return self.folder.read(key, Box.full(shape)).item()

    def param_groups(self, fields: Collection[str]) -> dict[str, dict[str, Any]]:
        """The settings of the optimizer by name of the weight.

        Args:
            fields: names of the settings to read.

        Raises:
            CheckpointError: they are damaged.
        """
        start = f"{self.optimizer}param_groups."
        owners: dict[str, dict[str, Any]] = {}
        for name in self._keys:
            owner, _, field = name.removeprefix(start).rpartition(".")
            if name.startswith(start) and (field in fields or field == "params"):
                owners.setdefault(owner, {})[field] = self.value(name)
        groups = {}
        try:
            for owner, values in owners.items():
                if "params" not in values:
                    groups[owner] = values
                    continue
                for name in list_of(values.pop("params"), "params of the optimizer"):
                    groups[canonical(text_of(name, "a parameter of the optimizer"))] = values
        except ValueError as error:
            raise unreadable_file(str(self.folder.folder / METADATA), str(error)) from None
        return groups

    def other_parts(self) -> list[str]:
        """The beginnings of the keys that are no part of model or optimizer."""
        weights = set(self.weights.values())
        parts = set()
        for name, key in self._keys.items():
            is_optimizer = self.optimizer is not None and name.startswith(self.optimizer)
            if key not in weights and not is_optimizer:
                parts.add(name.partition(".")[0])
        return sorted(parts)

    def _canonical_keys(self) -> dict[str, str]:
        """All keys, by their names without wrappers."""
        keys: dict[str, str] = {}
        for key in [*self.folder.tensors, *self.folder.objects]:
            name = canonical(key)
            if name in keys:
                why = f"it has {shown(name)} with and without a wrapper"
                raise unreadable_file(str(self.folder.folder / METADATA), why)
            keys[name] = key
        return keys

    def _find_model(self) -> tuple[str, str]:
        """The prefix of the keys of weights, and the name of the word embedding."""
        names = sorted(embedding_names(), key=len, reverse=True)
        found: dict[str, str] = {}
        for key in self._keys:
            if STATE.fullmatch(key):
                continue
            for name in names:
                if key == name or key.endswith(f".{name}"):
                    found[key.removesuffix(name)] = name
                    break
        models = {prefix: name for prefix, name in found.items() if is_model(prefix)} or found
        if len(models) == 1:
            return next(iter(models.items()))
        why = f"no tensor is a word embedding ({', '.join(names[:3])}, ...)"
        if models:
            why = f"it has {', '.join(prefix + name for prefix, name in models.items())}"
        raise CheckpointError(
            f"{self.folder.folder} has {len(models)} models",
            why=plain_text(why),
            fix="save one model, with the names of torchtitan or transformers",
        )

    def _weight_keys(self) -> dict[str, str]:
        """The keys of the weights by name."""
        weights = {}
        for name, key in self._keys.items():
            if not name.startswith(self.prefix) or key not in self.folder.tensors:
                continue
            if not self.prefix and name.partition(".")[0] in OTHERS:
                continue
            weights[name.removeprefix(self.prefix)] = key
        return weights

    def _find_states(self) -> None:
        """Find the states of the optimizer.

        Raises:
            CheckpointError: there are several optimizers.
        """
        beginnings = set()
        for name, key in self._keys.items():
            found = STATE.fullmatch(name)
            if found is None:
                continue
            beginning, parameter, kind = found.groups()
            beginnings.add(beginning)
            self.states.setdefault(kind, {})[parameter] = key
        if len(beginnings) > 1:
            raise CheckpointError(
                f"{self.folder.folder} has {len(beginnings)} optimizers",
                why=plain_text(f"their keys begin with {', '.join(sorted(beginnings)[:3])}"),
                fix="save the state of one optimizer, or import the weights alone, with --no-optim",
            )
        self.optimizer = next(iter(beginnings), None)


def canonical(key: str) -> str:
    """A key without the wrappers of its modules.

    >>> canonical("model.layers.0._orig_mod.attention.wq.weight")
    'model.layers.0.attention.wq.weight'
    """
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def is_model(prefix: str) -> bool:
    """Whether keys with this prefix are weights of the model, not a moving average of them."""
    return not prefix or prefix.split(".")[-2] in ("model", "module")
