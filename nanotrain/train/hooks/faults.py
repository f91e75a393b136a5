"""Find tensors that are not finite, and parameters whose replicas differ.

DebugNanHook    `--debug-nan`: the first tensor that is not finite among parameters, outputs and
                gradients of every module. Each check synchronizes with the device, so this is only
                for finding a fault.
ReplicasHook    compares the replicas of every parameter bit for bit every few steps. Replicas are
                equal after every step. A difference means a bit flip in a memory, or a fault in
                communication.

    dp_cp, expert_dp    every parameter
    tp, etp             parameters that tensor parallelism does not shard: norms, routers, biases of
                        row-parallel layers
    embed               the tied embedding of the first and the last stage

    before the update    the parameters that the forward and backward passes of the step have read;
                         unless parameters are gathered by unit and freed
    after the step       the parameters written by the update rule or the all-gather of shards
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nanotrain.comm.collectives import all_gather_object, all_reduce
from nanotrain.comm.group import Group
from nanotrain.errors import CorruptState, TrainingFault
from nanotrain.parallel.dp.param_buffer import ParamBuffer, gathered
from nanotrain.quantities import named_ranks
from nanotrain.spec.params import LocalParam
from nanotrain.topology.groups import GroupName
from nanotrain.train.batches import raise_on_all
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.parts.faulty_ranks import ranks_at_fault
from nanotrain.train.parts.part import StepPart
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # elements per partial sum, which takes 16 bytes per element


class Cause(NamedTuple):
    """Order of actions in a step: an earlier cause is smaller."""

    microbatch: int
    is_backward: bool
    depth: int  # stages passed before


@dataclass(frozen=True)
class Finding:
    """A tensor that is not finite."""

    what: str  # "the output of layers.0.mlp"
    rank: int
    coords: str
    action: str  # "F0.3": forward of microbatch 3 through stage 0

    @property
    def microbatch(self) -> str:
        """The microbatch of the action."""
        return self.action.partition(".")[2]

    @property
    def order(self) -> Cause:
        """A sort key by which the first fault of a step comes first."""
        is_backward = not self.action.startswith("F")
        stage = int(self.action[1:].partition(".")[0])
        return Cause(int(self.microbatch), is_backward, -stage if is_backward else stage)


class DebugNanHook(Hook):
    """Ends the run at the first skipped step; names the first tensor that is not finite.

    The error has its module, rank and microbatch.
    """

    def __init__(self) -> None:
        self._finding: Finding | None = None

    def before_training(self, run: Run) -> None:
        """Watch inputs, outputs and gradients of all modules."""
        for stage in run.stages.values():
            for module_name, module in stage.named_modules():
                name = module_name or "the stage"
                module.register_forward_pre_hook(partial(self._before_forward, run=run, name=name))
                module.register_forward_hook(partial(self._after_forward, run=run, name=name))

    def after_step(self, run: Run, report: StepReport) -> None:
        """End the run at a skipped step, with the first tensor that was not finite."""
        if not report.output.skipped:
            self._finding = None
            return
        gathered_findings = all_gather_object(self._finding, run.context.control)
        findings = [finding for finding in gathered_findings if finding is not None]
        if not findings:
            where = ranks_at_fault(report.output.local_fault, run.context.control)
            shards = f", in the shards of {where}" if where else ""
            raise TrainingFault(
                f"step {report.step} is not finite, but every output and its gradient is",
                why=f"a weight gradient or its sum over ranks overflowed{shards}",
                fix="lower --lr or --clip-grad, or train in bf16 or fp32",
            )
        first = min(findings, key=lambda finding: finding.order)
        coords = f" ({first.coords})" if first.coords else ""
        raise TrainingFault(
            f"the first tensor of step {report.step} that is not finite is {first.what}",
            why=f"on rank {first.rank}{coords}, microbatch {first.microbatch}, "
            f"action {first.action}; "
            f"found on {named_ranks([finding.rank for finding in findings])}",
            fix="look at its inputs: the data of that microbatch, the learning rate, "
            "the parameters before it",
        )

    def _before_forward(self, module: nn.Module, *_inputs: Any, run: Run, name: str) -> None:
        """Check the parameters of the module: after the forward they may be released."""
        for parameter_name, parameter in module.named_parameters(recurse=False):
            # gathered fp8 weights: an overflow makes their scales NaN
            fp8 = getattr(module, "fp8", None)
            stored = fp8.stored if fp8 is not None and parameter_name == "weight" else None
            values = parameter.detach() if stored is None else stored.inverse_scales
            if values.untyped_storage().nbytes():
                self._check(values, f"parameter {name}.{parameter_name}", run=run)

    def _after_forward(
        self, module: nn.Module, *inputs_and_output: Any, run: Run, name: str
    ) -> None:
        """Check the output of a module now, and the gradient of it in the backward."""
        output = inputs_and_output[-1]
        for tensor in filter(torch.is_tensor, tree_leaves(output)):
            self._check(tensor.detach(), f"the output of {name}", run=run)
            if tensor.requires_grad:
                what = f"the gradient of the output of {name}"
                tensor.register_hook(partial(self._check, what=what, run=run))

    def _check(self, tensor: Tensor, what: str, *, run: Run) -> None:
        """Note a tensor if it is the first one of this rank that is not finite."""
        if self._finding is not None or not tensor.is_floating_point():
            return
        if bool(torch.isfinite(tensor).all()):
            return
        context = run.context
        action = context.heartbeat.read().action or "F0.0"
        self._finding = Finding(what, context.rank, context.coords_text, action)


class ReplicasHook(Hook):
    """Compares checksums over the replicas of each parameter.

    Raises:
        CorruptState: replicas differ; names the parameter and the ranks. Nothing is saved.
    """

    def before_training(self, run: Run) -> None:
        run.parts.by_name["replicas"] = _BeforeUpdate(run)

    def after_step(self, run: Run, report: StepReport) -> None:
        if _is_due(run, report.step):
            with gathered(run.data_parallel):
                _compare_replicas(run, run.data_parallel, when=f"after step {report.step}")


class _BeforeUpdate(StepPart):
    """Compares parameters with their replicas on other ranks, before the update changes them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._resident = [dp for dp in run.data_parallel if not dp.options.strategy.shard_params]

    def sums(self, *, is_logged: bool) -> None:
        step = self._run.state.step + 1
        if self._resident and _is_due(self._run, step):
            _compare_replicas(self._run, self._resident, when=f"before the update of step {step}")


def _is_due(run: Run, step: int) -> bool:
    return step % run.config.train.check_weight_hash_across_dp_replicas_interval == 0


def _compare_replicas(run: Run, data_parallel: Sequence[ParamBuffer], *, when: str) -> None:
    """Compare the parameters of some wrappers with their replicas; collective.

    Args:
        run: the run.
        data_parallel: wrappers with parameters of full size, gathered where they are sharded.
        when: moment of the comparison for the error, as "after step 4".
    """
    params: dict[str, Tensor] = {}
    for stage in run.stages.values():
        params.update(stage.named_parameters())
    for dp in data_parallel:
        if dp.fp8_weights is not None:
            params.update(dp.fp8_weights.values)
    faults = []
    for axis, names in replicated(data_parallel, run.context.groups):
        named = {name: params[name] for name in names}
        faults.append(find_difference(named, run.context.group(axis), when=when))
    # On all ranks, so that none saves: the replicas of another stage or expert may be sound.
    raise_on_all(next(filter(None, faults), None), run.context.control)


def find_difference(named: Mapping[str, Tensor], group: Group, *, when: str) -> CorruptState | None:
    """Compare complete parameters over the ranks with replicas of them. Collective.

    Args:
        named: parameters by name.
        group: group of the ranks.
        when: moment of the comparison for the error, as "after step 4".

    Returns:
        The error for the first parameter that differs, the same on every rank; None if all are
        equal.
    """
    if group.size == 1:
        return None
    sums = torch.stack([checksum(param) for param in named.values()])
    lowest = sums.clone()
    highest = sums.clone()
    all_reduce(lowest, group, op="min")
    all_reduce(highest, group, op="max")
    differs = (lowest != highest).nonzero().flatten().tolist()  # the same on all ranks of the group
    if not differs:
        return None
    first = differs[0]
    name = list(named)[first]
    ranks_by_sum: dict[int, list[int]] = {}
    for rank, value in zip(group.ranks, all_gather_object(int(sums[first]), group), strict=True):
        ranks_by_sum.setdefault(value, []).append(rank)
    smaller_first = sorted(ranks_by_sum.values(), key=len)
    sets = " and ".join(_listed_ranks(ranks) for ranks in smaller_first)
    more = f" (and {len(differs) - 1} more parameters)" if len(differs) > 1 else ""
    return CorruptState(
        f"replicas of parameter {name}{more} differ {when}",
        why=f"{sets} hold different bits: "
        "memory of the smaller set, or a transfer to it, is faulty",
        fix="resume from the newest checkpoint on other machines; "
        "`nanotrain checkpoint verify` checks it",
    )


def _listed_ranks(ranks: Sequence[int]) -> str:
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {', '.join(map(str, ranks))}"


def checksum(tensor: Tensor) -> Tensor:
    """An int64 sum of the bit patterns, with odd factors: any single bit flip changes it.

    >>> weight = torch.ones(3)
    >>> bool(checksum(weight) == checksum(weight.clone()))
    True
    """
    bits = tensor.detach().contiguous().flatten().view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].long()
        factors = torch.arange(2 * start + 1, 2 * (start + len(chunk)), 2, device=tensor.device)
        total += (chunk * factors).sum()
    return total


def replicated(
    data_parallel: Sequence[ParamBuffer], groups: Collection[GroupName]
) -> Iterator[tuple[GroupName, list[str]]]:
    """Groups with replicas of parameters, and the names of these; equal on every rank of a group.

    Args:
        data_parallel: wrappers of this rank.
        groups: groups of which this rank is a member.
    """
    at_both_ends = []
    for dp in data_parallel:
        is_expert = dp.groups.shard.name.startswith("expert")
        yield "expert_dp" if is_expert else "dp_cp", list(dp.params)
        axis: GroupName = "etp" if is_expert else "tp"
        unsharded = [name for name, param in dp.params.items() if not _is_sharded(param, axis)]
        if unsharded and axis in groups:
            yield axis, unsharded
        at_both_ends += [
            name for name, param in dp.params.items() if "embed" in param.spec.grad_sum_axes
        ]
    if at_both_ends and "embed" in groups:
        yield "embed", at_both_ends[:1]


def _is_sharded(param: LocalParam, axis: str) -> bool:
    return any(shard.axis == axis for shard in param.spec.shards)
