"""`ShardedModule`: data parallelism and the sharded optimizer for any torch module.

    optim = OptimConfig(lr=1e-3)
    sharded = ShardedModule(model, context, parallel=config, unit_classes=(Block,), optim=optim)
    for batch in batches:
        sharded.backward(loss_of(model, batch))   # per microbatch, the last with is_last=True
        sharded.step()
    sharded.save(folder, step=100)

Sharding strategies, optimizer instances (HSDP), overlap and update rules are as in the trainer.
With `optim_grads_params` each module of `unit_classes` is one FSDP unit (Megatron-FSDP:
`fsdp_unit_modules`): gathered before its forward and its backward, freed right after. Every other
module with parameters of its own, such as an embedding, is a unit too. There is no model
parallelism: all ranks have the same parameters, except for their sharding.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import OptimConfig, PrecisionConfig
from nanotrain.config.parallel import ParallelConfig
from nanotrain.errors import ConfigError
from nanotrain.optim.distributed import DistributedOptimizer, Update
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import plan_layout
from nanotrain.parallel.dp.options import (
    STRATEGIES,
    DataParallelOptions,
    ReduceGroups,
    layout_rules,
)
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.loss_scale import LossScale
from nanotrain.quantities import count_of
from nanotrain.spec.params import Constant, LocalParam, ParamSpec

UnitClasses = tuple[type[nn.Module], ...]


class Unit(NamedTuple):
    """An FSDP unit."""

    name: str
    module: nn.Module


class ShardedModule:
    """A module whose gradients, optimizer state and parameters are sharded over ranks.

    The module stays usable as it is: `module(...)` runs forward, and its parameters are views of
    flat buffers. Values, names and tied parameters are kept. It must be on the device of the
    context, with real values, equal on all ranks. All of its parameters are trained.

    Args:
        module: any module; its parameters move into flat buffers, and every reference to them stays
            valid.
        context: process groups of a topology with data parallelism only.
        parallel: strategy, optimizer instances, buckets, overlap and form of the reductions; sizes
            of other axes do not apply.
        unit_classes: classes of the modules that run one after another, as transformer blocks.
        optim: update rule and hyperparameters; weight decay applies to parameters of two or more
            dims.
        precision: dtypes; parameters are converted to `params_dtype`.

    Raises:
        ConfigError: model parallelism, a context of another strategy, no module of a unit class,
            parameters that no unit can hold, that are frozen or that have sparse gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        context: ParallelContext,
        *,
        parallel: ParallelConfig,
        unit_classes: UnitClasses,
        optim: OptimConfig | None = None,
        precision: PrecisionConfig | None = None,
    ) -> None:
        optim = optim or OptimConfig()
        precision = precision or PrecisionConfig()
        _check_axes(context)
        _check_shard_groups(context, parallel.data_parallel_sharding_strategy)
        _check_parameters(module, optim)
        self.module = module
        self._context = context
        self._optim = optim
        values = {name: param.detach() for name, param in module.named_parameters()}
        self.data_parallel = _build_data_parallel(
            module, context, parallel=parallel, unit_classes=unit_classes, precision=precision
        )
        self.data_parallel.fill_params(lambda params: self._fill_params(params, values))
        self.optimizer = DistributedOptimizer(
            [self.data_parallel],
            optim,
            precision=Precision.of(precision),
            loss_scale=LossScale(precision, context.device),
            groups=context.groups,
        )
        # the loss is divided by the ranks here, unless the collectives divide the gradients
        self._num_averaged = context.topology.world_size
        if parallel.ddp_average_in_collective:
            self._num_averaged = 1
        self._had_last = False  # whether the last microbatch of the step has run
        self.data_parallel.begin_step()

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        """Add the gradients of a microbatch, and reduce them.

        Args:
            loss: scalar, the mean over this microbatch of this rank. The gradient of a step is the
                mean over all ranks of the sum of these; divide by the number of microbatches for a
                mean.
            is_last: whether this is the last microbatch of the step.

        Raises:
            RuntimeError: the last microbatch of the step has run.
        """
        if self._had_last:
            raise RuntimeError(
                "backward after the last microbatch: pass is_last=False for the others, then step()"
            )
        self._had_last = is_last
        self.data_parallel.backward_begins(is_last=is_last)
        scale = self.optimizer.loss_scale.scale / self._num_averaged
        torch.autograd.backward(loss * scale)
        self.data_parallel.backward_ended()

    def step(self, lr: float | None = None) -> Update:
        """Update the parameters.

        Args:
            lr: learning rate; None for the one of the optimizer configuration.

        Returns:
            The gradient norm over all ranks before clipping, and whether the step was skipped, as
            tensors on the device: reading them waits for it.

        Raises:
            RuntimeError: no microbatch of this step was the last one.
        """
        if not self._had_last:
            raise RuntimeError(
                "step before the last microbatch: call backward(loss, is_last=True) for it"
            )
        self.data_parallel.finish_grad_reduce()
        update = self.optimizer.step(self._optim.lr if lr is None else lr)
        self.optimizer.average.update(update.skipped)
        self.data_parallel.start_param_gather()
        # now: without resharding, units count the backwards that follow a forward
        self.data_parallel.begin_step()
        self._had_last = False
        return update

    def save(self, folder: Path, *, step: int) -> Path:
        """Write `folder`/step-N, one file per rank. All ranks call this.

        Any number of ranks and any strategy can load it. Buffers of the module, such as running
        statistics, are not part of it.
        """
        self.data_parallel.wait_for_params()
        checkpointer = Checkpointer(folder, group=self._context.control)
        return checkpointer.save(
            step,
            self.optimizer.tensors_to_save(),
            objects={"optimizer": self.optimizer.state_dict()},
            config={},
            topology={},
        )

    def load(self, checkpoint: Path) -> int:
        """Read a step folder written by `save`; returns its step. All ranks call this."""
        self.data_parallel.wait_for_params()
        checkpointer = Checkpointer(checkpoint.parent, group=self._context.control)
        manifest = checkpointer.restore(checkpoint, self.optimizer.state_tensors())
        self.optimizer.load_state_dict(manifest.objects["optimizer"])
        self.data_parallel.start_param_gather()
        return manifest.step

    def _fill_params(self, params: Sequence[LocalParam], values: dict[str, Tensor]) -> None:
        for local in params:
            self.module.get_parameter(local.spec.name).data.copy_(values[local.spec.name])


def _build_data_parallel(
    module: nn.Module,
    context: ParallelContext,
    *,
    parallel: ParallelConfig,
    unit_classes: UnitClasses,
    precision: PrecisionConfig,
) -> DataParallel:
    """Move the parameters of a module into flat buffers."""
    strategy = STRATEGIES[parallel.data_parallel_sharding_strategy]
    units = find_units(module, unit_classes, must_not_nest=strategy.shard_params)
    groups = ReduceGroups(
        context.group("dp_shard"),
        context.group("dp_replicate"),
        shards_across=parallel.outer_dp_sharding_strategy == "optim",
    )
    # tied parameters by their first name
    name_of = {param: name for name, param in module.named_parameters()}
    unit_names = []
    for unit in units:
        names = {name_of[param] for param in unit.module.parameters()}
        unit_names.append((unit.module, names))
    params = _declare_params(module, units, unit_classes=unit_classes, dtype=precision.params_dtype)
    rules = layout_rules(parallel, num_shards=groups.shard.size, num_outer_shards=groups.outer.size)
    options = replace(
        DataParallelOptions.of(parallel, precision),
        is_recomputing=_is_in_backward,
        units=unit_names,
    )
    return DataParallel(
        module,
        plan_layout(params, rules),
        groups=groups,
        options=options,
        precision=Precision.of(precision),
        device=context.device,
    )


def find_units(
    module: nn.Module, unit_classes: UnitClasses, *, must_not_nest: bool = True
) -> list[Unit]:
    """The FSDP units of a module by name, in registration order.

    Modules of the unit classes, and outside of them every module with parameters of its own.

    Args:
        module: module to search, itself included.
        unit_classes: classes of which every module is one unit, whatever is inside.
        must_not_nest: whether to refuse parameters directly in a module that has units below it.

    Raises:
        ConfigError: no module of a unit class, or parameters that no unit can hold.
    """
    units: list[Unit] = []
    blocks: list[Unit] = []  # units of the unit classes
    for name, child in module.named_modules():
        if any(_is_below(name, block.name) for block in blocks):
            continue
        unit = Unit(name, child)
        if isinstance(child, unit_classes):
            blocks.append(unit)
            units.append(unit)
        elif _own_parameters(child):
            units.append(unit)
    if not blocks:
        names = ", ".join(kind.__name__ for kind in unit_classes) or "none"
        what = f"the module has no module of the unit classes ({names})"
        why = "without units all parameters would be gathered at once"
        candidates = ", ".join(_candidate_classes(module))
        fix = f"name the class of its blocks, for example one of {candidates}"
        raise ConfigError(what, why=why, fix=fix)
    if must_not_nest:
        _check_nesting(units)
    return units


def _check_nesting(units: Sequence[Unit]) -> None:
    """Refuse units with parameters of their own and with other units inside."""
    for name, child in units:
        below = [unit.name for unit in units if _is_below(unit.name, name)]
        own_params = _own_parameters(child)
        if below and own_params:
            kind = type(child).__name__
            what = f"{name or kind} has parameters of its own ({', '.join(own_params)})"
            why = f"it is not freed before {below[0]}, which is a unit inside it, runs"
            fix = f"add {kind} to the unit classes, or choose optim_grads"
            raise ConfigError(what, why=why, fix=fix)


def _is_below(name: str, parent: str) -> bool:
    """Whether a module is inside another one; the name of the root is empty."""
    if not parent:
        return name != ""
    return name.startswith(f"{parent}.")


def _own_parameters(module: nn.Module) -> list[str]:
    return [name for name, param in module._parameters.items() if param is not None]


def _declare_params(
    module: nn.Module,
    units: Sequence[Unit],
    *,
    unit_classes: UnitClasses,
    dtype: str,
) -> list[LocalParam]:
    """Every parameter once, under its first name, with its unit.

    Muon updates the matrices of the unit classes.
    """
    unit_of = {}
    blocks = set()
    for name, child in units:
        unit = name or "root"
        if isinstance(child, unit_classes):
            blocks.add(unit)
        for param_name in _names_below(name, child):
            unit_of[param_name] = unit

    params = []
    for name, param in module.named_parameters():
        spec = ParamSpec(
            name,
            tuple(param.shape),
            dtype=dtype,
            init=Constant(0.0),  # replaced by the values of the module
            weight_decay=param.dim() >= 2,
            unit=unit_of[name],
            needs_whole_matrix=param.dim() == 2 and unit_of[name] in blocks,
        )
        params.append(LocalParam.unsharded(spec))
    return params


def _names_below(name: str, child: nn.Module) -> list[str]:
    prefix = f"{name}." if name else ""
    return [prefix + param for param, _ in child.named_parameters(remove_duplicate=False)]


def _candidate_classes(module: nn.Module) -> list[str]:
    """Classes of the items of module lists, usually the transformer blocks."""
    names: set[str] = set()
    for child in module.modules():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            names.update(type(item).__name__ for item in child)
    return sorted(names) or [type(module).__name__]


def _check_axes(context: ParallelContext) -> None:
    """Refuse model parallelism."""
    wrong = []
    for axis in ("tp", "cp", "pp", "ep"):
        size = context.topology.size(axis)
        if size > 1:
            wrong.append(f"{axis} {size}")
    if wrong:
        what = f"a sharded module with {', '.join(wrong)}"
        why = "the parameters of an arbitrary module do not declare how these axes shard them"
        raise ConfigError(what, why=why, fix="use data parallelism only, or the trainer")


def _check_shard_groups(context: ParallelContext, strategy: str) -> None:
    """Refuse a context that was made for another strategy."""
    num_shards = context.group("dp_shard").size
    if num_shards > 1 and not STRATEGIES[strategy].shard_optim:
        what = f"{strategy} in a context whose ranks form shard groups of {num_shards}"
        why = "the context was made for another data_parallel_sharding_strategy"
        fix = "pass one ParallelConfig to Topology.of and to ShardedModule"
        raise ConfigError(what, why=why, fix=fix)


def _check_parameters(module: nn.Module, optim: OptimConfig) -> None:
    """Refuse parameters that flat buffers cannot hold, and options that need parameter roles."""
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    if frozen:
        what = f"{count_of(len(frozen), 'parameter', verb='is')} frozen, the first is {frozen[0]}"
        why = "the optimizer updates the whole flat buffer, so weight decay would change them"
        fix = "train all of them, or keep frozen ones as buffers of the module"
        raise ConfigError(what, why=why, fix=fix)
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) is True:
            what = f"{name or 'the module'} has sparse gradients"
            why = "gradients are added and reduced in flat buffers, which are dense"
            raise ConfigError(what, why=why, fix="build it with sparse=False")
    if optim.decoupled_lr is not None:
        why = "a module does not declare which parameters are its embedding and its output layer"
        raise ConfigError("decoupled_lr has no effect", why=why, fix="leave it out")


def _is_in_backward() -> bool:
    """Whether autograd runs: a forward pass now is a recomputation."""
    return torch._C._current_graph_task_id() != -1
