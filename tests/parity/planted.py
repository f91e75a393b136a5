"""Bugs of layouts, planted in the process of a rank.

    BUGS          bugs with the layout that has them: rows of tests/mutants, and moderate ones
    RIGHT         layouts that train as one rank does
    small_config  the shrunk configuration of either, in a dtype
    plant         a bug in this process
    record_with_bug   the record of a rank whose code has a bug

The source with the bug is executed beside the module, and every function whose code differs gets
the code with the bug, so that modules that imported the function have it too.
"""

import importlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import yaml

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.parity.check import Record, record_steps
from nanotrain.parity.shrink import shrink

ROOT = Path(__file__).parents[2]
DTYPES = {
    "bf16": "--params-dtype bf16",
    "fp16": "--params-dtype fp16",
    "fp8": "--params-dtype bf16 --fp8-format hybrid --fp8-recipe tensorwise",
}
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
CP = "--context-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"
EP = "--expert-model-parallel-size 2"
DENSE = "+config=tiny"
EXPERTS = "+config=tiny_moe"
_PLANTING = threading.Lock()  # ranks are threads of one process
_PLANTED: set[tuple[str, str]] = set()

# command line and ranks
RIGHT: tuple[tuple[str, int], ...] = (
    (f"{DENSE} {SP}", 2),
    (f"{DENSE} {CP}", 2),
    (f"{DENSE} {PP} --pipeline-schedule zb-h1", 2),
    (f"{DENSE} --data-parallel-sharding-strategy optim_grads_params", 2),
    (f"{DENSE} {TP} {CP} --qk-layernorm --window-size 16 --softmax-type learnable", 4),
    (f"{EXPERTS} {SP} {EP} --expert-tensor-parallel-size 1", 2),
    (f"{EXPERTS} {CP} {EP}", 2),
    (f"{EXPERTS} {PP} {EP}", 4),
)


@dataclass(frozen=True)
class Bug:
    """A bug, and the command line of a layout of two ranks that has it."""

    name: str
    arguments: str
    # unset in a row of tests/mutants, whose name is "package/name"
    file: str = ""
    find: str = ""
    replace: str = ""

    def text(self) -> tuple[str, str, str]:
        """The file, a text in it, and what the bug has in its place."""
        if self.file:
            return self.file, self.find, self.replace
        package, _, row_name = self.name.partition("/")
        rows = yaml.safe_load((ROOT / "tests/mutants" / f"{package}.yaml").read_text())
        (row,) = [row for row in rows if row["name"] == row_name]
        return row["file"], row["find"], row["replace"]


_STEP = "nanotrain/train/step.py"
_SPLIT = "nanotrain/parallel/cp/split.py"
_DIVISOR = "run.loss_scale / max(batch.num_target_tokens, 1)"
_AUX_SCALE = "run.loss_scale / batch.settings.num_sequences"
BUGS = (
    Bug("spec/norms-not-summed", f"{DENSE} {SP}"),
    Bug("spec/head-norm-not-summed", f"{DENSE} {TP} --qk-layernorm"),
    Bug("spec/router-weight-not-summed", f"{EXPERTS} {TP} --expert-tensor-parallel-size 1"),
    Bug("train/tied-embedding-not-summed", f"{DENSE} {PP}"),
    Bug("parallel_tp/input-gradient-not-summed", f"{DENSE} {TP}"),
    Bug("parallel_cp/positions-of-the-first-rank", f"{DENSE} {CP}"),
    Bug("parallel_cp/gradient-not-passed-on", f"{DENSE} {CP}"),
    Bug("train/loss-of-own-targets", f"{DENSE} {CP}"),
    Bug("train/mtp-loss-of-own-targets", f"{DENSE} {CP} --mtp-num-layers 1"),
    Bug("optim/replicas-in-the-norm", f"{DENSE} {TP}"),
    Bug(
        "one token less in the divisor",
        f"{DENSE} {CP}",
        _STEP,
        _DIVISOR,
        f"{_DIVISOR[:-4]} - 1, 1)",
    ),
    Bug(
        "last target of a rank masked",
        f"{DENSE} {CP}",
        _SPLIT,
        "loss_mask=local(full.loss_mask),",
        "loss_mask=local(full.loss_mask).index_fill(1, torch.tensor([-1]), 0),",
    ),
    Bug(
        "positions one late from the border on",
        f"{DENSE} {CP}",
        _SPLIT,
        "position_ids=local(positions)",
        "position_ids=local(positions + (positions >= positions.shape[1] // 2))",
    ),
    Bug(
        "balance loss doubled, coefficient 0.1",
        f"{EXPERTS} {EP} --moe-aux-loss-coeff 0.1",
        _STEP,
        _AUX_SCALE,
        f"2 * {_AUX_SCALE}",
    ),
    Bug(
        "balance loss doubled, coefficient 0.01",
        f"{EXPERTS} {EP} --moe-aux-loss-coeff 0.01",
        _STEP,
        _AUX_SCALE,
        f"2 * {_AUX_SCALE}",
    ),
    Bug(
        "no weight decay",
        f"{DENSE} {TP}",
        "nanotrain/optim/distributed.py",
        "weight_decay=self._config.weight_decay if weight_decay is None else weight_decay",
        "weight_decay=0.0",
    ),
)


def small_config(arguments: str, world: int, *, dtype: str, num_steps: int = 1) -> Config:
    """The shrunk configuration of a command line, in a dtype."""
    loaded = load([*arguments.split(), *DTYPES[dtype].split()])
    return shrink(loaded.config, world, num_steps=num_steps, keeps_precision=True)


def record_with_bug(ctx: ParallelContext, config: Config, bug: Bug) -> Record:
    """The record of a rank whose code has a bug."""
    plant(*bug.text())
    return record_steps(ctx, config)


def plant(file: str, find: str, replace: str) -> None:
    """Replace a text of a module's functions in this process, once for all ranks."""
    with _PLANTING:
        if (file, find) not in _PLANTED:
            _plant(file, find, replace)
        _PLANTED.add((file, find))


def _plant(file: str, find: str, replace: str) -> None:
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    source = (ROOT / file).read_text()
    assert source.count(find) == 1, f"{find!r} is not once in {file}"
    wrong = ModuleType(module.__name__)
    wrong.__file__ = module.__file__
    sys.modules[module.__name__] = wrong  # dataclasses look up their module
    try:
        exec(compile(source.replace(find, replace), file, "exec"), wrong.__dict__)
    finally:
        sys.modules[module.__name__] = module
    right = dict(_functions(module))
    changed = []
    for name, function in _functions(wrong):
        if _instructions(right[name].__code__) != _instructions(function.__code__):
            right[name].__code__ = function.__code__
            changed.append(name)
    assert changed, f"the bug changes no function of {file}"


def _functions(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """Functions and methods that a module defines, by their qualified names."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        candidates = list(vars(value).values()) if isinstance(value, type) else [value]
        for candidate in candidates:
            function = getattr(candidate, "__func__", candidate)  # of a static or class method
            if isinstance(function, property):
                function = function.fget
            if isinstance(function, FunctionType):
                yield function.__qualname__, function


def _instructions(code: CodeType) -> tuple[object, ...]:
    """What a function does, without the lines where it is."""
    constants = []
    for value in code.co_consts:
        constants.append(_instructions(value) if isinstance(value, CodeType) else repr(value))
    return code.co_code, tuple(constants), code.co_names
