"""Times of the actions of a pipeline stage: forward, backward and its halves, with FSDP.

Stages.streams(stage, kind)  Streams of one action
      .seconds(streams)      duration of an action
      .numel(stages)         parameters of stages on one rank, dense and of experts
      .hidden_s              dispatch and combine that two actions hide that run in turns
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

from nanotrain.memory.block_transforms import recompute_plan, recomputed_groups
from nanotrain.parallel.pp.actions import ActionKind
from nanotrain.planner.dispatch_time import GRAPH_LAUNCHES
from nanotrain.planner.graph_time import capture_layer
from nanotrain.planner.operator_time import OperatorTimes
from nanotrain.planner.parts import Part, Parts, Streams
from nanotrain.planner.scenario import Scenario
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds.block import (
    block_operators,
    embedding_operators,
    head_operators,
    mtp_operators,
)
from nanotrain.spec.layer_inputs import input_operators
from nanotrain.spec.parameters import declare_stage, layer
from nanotrain.spec.params import ParamSpec
from nanotrain.spec.stages import StageSpec

# a group waits for the sum of the stalls of its ranks, and a little more: fitted to tp of 2 to 32
STALL_GROWTH = 1.15
# bytes per token and hidden element that a layer saves: Korthikanti et al. 2022, equation 1
LAYER_BYTES = 34


class Numel(NamedTuple):
    """Parameters on one rank, and their tensors."""

    dense: int
    expert: int
    tensors: int


class Shards(NamedTuple):
    """Ranks that share the state of parameters."""

    dense: int
    expert: int


class LayerSides(NamedTuple):
    """A layer split at the token dispatch; in a dense layer both sides are the whole layer."""

    outside: Parts  # before the dispatch and after the combination
    between: Parts  # the experts


@dataclass(frozen=True, eq=False)
class Unit:
    """A layer, the embedding or the head."""

    parts: Parts
    numel: Numel
    recomputed: Parts  # the parts that run again in the backward


def _split_at_dispatch(parts: Parts) -> LayerSides:
    """Split a layer into the parts outside dispatch and combine, and the parts between."""
    transfers = [index for index, part in enumerate(parts) if part.group == "ep"]
    if not transfers:
        return LayerSides(parts, parts)
    dispatch = transfers[0]
    combine = transfers[-1]
    outside = [*parts[: dispatch + 1], *parts[combine:]]
    return LayerSides(outside, parts[dispatch + 1 : combine])


def _forward_s(parts: Iterable[Part]) -> float:
    return sum(part.forward for part in parts)


def _backward_s(parts: Iterable[Part]) -> float:
    return sum(part.dgrad + part.wgrad for part in parts)


class Stages:
    """The actions of the stages of a scenario.

    Args:
        scenario: configuration, machine and engine.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.config = scenario.config
        self.times = OperatorTimes(scenario)
        self.sizes = self.times.sizes
        self.precision = Precision.of(self.config.precision)
        self.strategy = self.config.parallel.data_parallel_sharding_strategy
        self.units = cache(self._build_units)
        self._unit = cache(self._build_unit)
        self._action = cache(self._build_action)
        self._first_of_kind = dict[tuple[object, ...], int]()  # the first layer of every kind

    def streams(self, spec: StageSpec, kind: ActionKind) -> Streams:
        """Operators and collectives of an action; stages of the same units take equally long."""
        return self._action(self.units(spec), kind)

    def numel(self, specs: Iterable[StageSpec]) -> Numel:
        """Parameters of stages on one rank."""
        numels = [unit.numel for spec in specs for unit in self.units(spec)]
        return Numel(
            dense=sum(numel.dense for numel in numels),
            expert=sum(numel.expert for numel in numels),
            tensors=sum(numel.tensors for numel in numels),
        )

    @cached_property
    def shards(self) -> Shards:
        """Ranks that share the state of dense parameters, and of experts."""
        dense = len(self.scenario.ranks("dp_shard"))
        return Shards(dense, len(self.scenario.ranks("expert_dp_shard")))

    def seconds(self, streams: Streams) -> float:
        """Duration of an action, on the device or on the host, whichever takes longer."""
        if self.scenario.gpu.is_cpu:
            return streams.seconds + self.host_s(streams)
        return max(streams.seconds, self.host_s(streams))

    def host_s(self, streams: Streams) -> float:
        """Host time of an action."""
        engine = self.scenario.engine
        operators_s = streams.launches * engine.launches.operator_s
        seconds = operators_s + streams.collectives * engine.launches.collective_s
        if self._host_stalls:
            growth = self.scenario.sizes["tp"] ** STALL_GROWTH
            seconds += streams.collectives * growth * engine.network.host_stall_s
        seconds *= self.scenario.gpu.calibration.compute
        return seconds * GRAPH_LAUNCHES if self.scenario.cuda_graphs else seconds

    @property
    def _host_stalls(self) -> bool:
        """Whether hosts wait for other nodes in their collectives."""
        has_several_nodes = self.scenario.world_size > self.scenario.machine.gpus_per_node
        return self.lost_s > 0 or (self.scenario.sizes["pp"] > 1 and has_several_nodes)

    @property
    def lost_s(self) -> float:
        """Seconds that a step without a pipeline loses on many nodes."""
        slow = self.scenario.engine.network.slow_step
        if slow is None or self.scenario.sizes["pp"] > 1:
            return 0.0
        return slow.seconds if self.scenario.num_nodes >= slow.min_nodes else 0.0

    def modules(self, spec: StageSpec) -> list[str | int]:
        """Modules of a stage in forward order; layers are indices in the model."""
        modules: list[str | int] = ["embedding"] if spec.has_embedding else []
        modules += spec.layers
        if spec.has_head:
            modules += ["head", *self.sizes.shape.mtp_layers]
        return modules

    def _build_units(self, spec: StageSpec) -> tuple[Unit, ...]:
        """The modules of a stage, in forward order."""
        recomputed = self._recomputed_layers(spec)
        units = []
        for module in self.modules(spec):
            kind = module if isinstance(module, str) else self._layer_like(module)
            has_embedding = module == "head" and spec.has_embedding
            unit = self._unit(kind, is_recomputed=module in recomputed, has_embedding=has_embedding)
            units.append(unit)
        return tuple(units)

    def _recomputed_layers(self, spec: StageSpec) -> set[int]:
        """Layers of a stage that full recomputation runs again, by their index in the model.

        Of a layer of multi-token prediction, a part.
        """
        if self.config.memory.recompute_granularity != "full":
            return set()
        groups = recomputed_groups(self.config, len(spec.layers))
        recomputed = {spec.layers[index] for group in groups for index in group}
        # Megatron-LM has no recomputation of them with the method `block`
        if self.scenario.engine.name == "nanotrain" or recompute_plan(self.config)[0] == "uniform":
            recomputed.update(self.sizes.shape.mtp_layers)
        return recomputed

    def _layer_like(self, index: int) -> int:
        """The first layer of the same kind."""
        shape = self.sizes.shape
        kind = (shape.kinds(index), shape.has_window(index), index >= shape.num_layers)
        return self._first_of_kind.setdefault(kind, index)

    def _build_unit(self, name: str | int, *, is_recomputed: bool, has_embedding: bool) -> Unit:
        """A module; a tied head has no parameters if the stage has the embedding."""
        num_layers = self.sizes.shape.num_layers
        if name == "embedding":
            operators = embedding_operators(self.sizes) + input_operators(self.sizes)
            parts = self.times.parts(operators)
            numel = self._end_numel({"embedding", "layer_inputs"}, is_first=True)
            return Unit(parts, numel, recomputed=[])
        if name == "head":
            names = {"final_norm", "head"} if has_embedding else {"final_norm", "head", "embedding"}
            parts = self.times.parts(head_operators(self.sizes))
            return Unit(parts, self._end_numel(names), recomputed=[])
        index = int(name)
        if index < num_layers:
            parts = self.times.parts(block_operators(self.sizes, index))
            parts = capture_layer(parts, self.config.train)
            numel = self._count(layer(self._declaration, index))
            again = parts
        else:
            num_predictions = self.sizes.shape.mtp_predictions.count(index)
            parts = self.times.parts(mtp_operators(self.sizes, index) * num_predictions)
            numel = self._end_numel({f"mtp.{index - num_layers}"})
            again = self._recomputed_mtp_parts(index)
        return Unit(
            parts, numel, again if is_recomputed else self._parts_recomputed_selectively(parts)
        )

    def _recomputed_mtp_parts(self, index: int) -> Parts:
        """Operators of multi-token prediction that full recomputation runs again, never the head.

        The block alone; in Megatron-LM (multi_token_prediction.py) also what is before it.
        """
        num_predictions = self.sizes.shape.mtp_predictions.count(index)
        if self.scenario.engine.name == "nanotrain":
            return self.times.parts(block_operators(self.sizes, index) * num_predictions)
        num_before_head = -len(head_operators(self.sizes))
        again = mtp_operators(self.sizes, index)[:num_before_head]
        return self.times.parts(again * num_predictions)

    def _end_numel(self, units: set[str], *, is_first: bool = False) -> Numel:
        """Parameters of some units of the first or the last stage, without layers."""
        stage = StageSpec(0, 0, 0, has_embedding=is_first, has_head=not is_first)
        specs = declare_stage(self._declaration, stage)
        return self._count([spec for spec in specs if spec.unit in units])

    @cached_property
    def _declaration(self) -> Declaration:
        return Declaration(
            self.sizes.shape,
            self.times.dtype,
            self.sizes.tp,
            self.config.parallel.sequence_parallel,
        )

    def _count(self, specs: Sequence[ParamSpec]) -> Numel:
        """Parameters of declared tensors on one rank."""
        dense = expert = 0
        for spec in specs:
            num_shards = prod(self.scenario.sizes[shard.axis] for shard in spec.shards)
            if spec.is_expert:
                expert += spec.numel // num_shards
            else:
                dense += spec.numel // num_shards
        return Numel(dense, expert, len(specs))

    def _build_action(self, units: Sequence[Unit], kind: ActionKind) -> Streams:
        """All units of a stage, in order or in reverse."""
        total = Streams()
        for unit in units if kind is ActionKind.forward else reversed(units):
            total.add(self._unit_streams(unit, kind))
        if self.config.memory.cpu_offloading:
            self._offload(total, units)
        return total

    def _unit_streams(self, unit: Unit, kind: ActionKind) -> Streams:
        """The work of one unit in a forward, or in a backward with its recomputation."""
        engine = self.scenario.engine
        streams = Streams(engine.overlap.contention, engine.operators.time_factor)
        if kind is ActionKind.forward:
            for part in unit.parts:
                part.run_forward(streams)
        else:
            if kind.has_dgrad:
                for part in unit.recomputed:
                    part.run_forward(streams)
            for part in reversed(unit.parts):
                part.run_backward(streams, dgrad=kind.has_dgrad, wgrad=kind.has_wgrad)
        self._shard(streams, unit, kind=kind)
        return streams

    def _parts_recomputed_selectively(self, parts: Parts) -> Parts:
        """Parts that selective recomputation runs again."""
        modules = set(self.config.memory.recomputed_modules)
        return [part for part in parts if modules.intersection(part.recomputed_by)]

    def hidden_s(self, forward: StageSpec, backward: StageSpec) -> float:
        """Seconds of dispatch and combine that a forward and a backward hide that run in turns.

        The first layer of one runs with the last of the other: the experts of one compute while
        tokens of the other are dispatched, attention while they are combined. The further layers of
        the longer stage hide nothing.
        """
        ahead_parts = [unit.parts for unit in self.units(forward)]
        back_parts = [unit.parts for unit in self.units(backward)]
        hidden = 0.0
        for ahead, back in zip(ahead_parts, reversed(back_parts), strict=False):
            sent = [part.before for part in ahead if part.group == "ep"]
            returned = [part.last for part in reversed(back) if part.group == "ep"]
            ahead_sides = _split_at_dispatch(ahead)
            back_sides = _split_at_dispatch(back)
            forward_s = (_forward_s(ahead_sides.outside), _forward_s(ahead_sides.between))
            backward_s = (_backward_s(back_sides.between), _backward_s(back_sides.outside))
            for transfer_s, compute_s in zip(sent, backward_s, strict=False):
                hidden += self._overlapped_s(transfer_s, compute_s)
            for transfer_s, compute_s in zip(returned, forward_s, strict=False):
                hidden += self._overlapped_s(transfer_s, compute_s)
        return hidden

    def _overlapped_s(self, transfer_s: float, compute_s: float) -> float:
        """Seconds of a transfer that operators of `compute_s` seconds hide."""
        engine = self.scenario.engine
        gained = 1 - engine.overlap.contention
        return gained * min(transfer_s, engine.operators.time_factor * compute_s)

    def _shard(self, streams: Streams, unit: Unit, *, kind: ActionKind) -> None:
        """Collectives of sharded parameters and gradients, while the neighbouring unit computes."""
        compute_s = streams.compute / streams.factor
        if self._gathers_params(kind):
            itemsize = self.precision.params.itemsize
            seconds = self.collective_s("all_gather", unit.numel, itemsize=itemsize)
            streams.wait("dp", seconds, overlapped_s=compute_s if self.overlaps_params else 0.0)
            compute_s = max(0.0, compute_s - seconds)
        if self.strategy in ("optim_grads", "optim_grads_params") and kind.has_wgrad:
            itemsize = self.precision.grads.itemsize
            seconds = self.collective_s("reduce_scatter", unit.numel, itemsize=itemsize)
            streams.wait("dp", seconds, overlapped_s=compute_s if self.overlaps_grads else 0.0)

    def _gathers_params(self, kind: ActionKind) -> bool:
        """Whether an action gathers sharded parameters."""
        parallel = self.config.parallel
        if self.strategy != "optim_grads_params" or kind is ActionKind.backward_weight:
            return False
        return kind is ActionKind.forward or parallel.reshard_after_forward

    @property
    def overlaps_grads(self) -> bool:
        """Whether reductions of gradients run during the computation."""
        overlaps = self.scenario.engine.overlap.grads
        return self.config.parallel.overlap_grad_reduce if overlaps is None else overlaps

    @property
    def overlaps_params(self) -> bool:
        """Whether gathers of parameters run during the computation."""
        overlaps = self.scenario.engine.overlap.params
        return self.config.parallel.overlap_param_gather if overlaps is None else overlaps

    def collective_s(
        self, operation: str, numel: Numel, *, itemsize: int, level: str = "shard"
    ) -> float:
        """A collective of data parallelism over dense and then expert parameters.

        Args:
            operation: name of the collective.
            numel: parameters of the rank.
            itemsize: bytes of an element.
            level: shard, among ranks that share state, or replicate, among replicas of it.
        """
        seconds = 0.0
        if numel.dense:
            dense_bytes = numel.dense * itemsize
            seconds += self.times.collective(f"dp_{level}", operation, num_bytes=dense_bytes)
        if numel.expert:
            expert_bytes = numel.expert * itemsize
            group = f"expert_dp_{level}"
            seconds += self.times.collective(group, operation, num_bytes=expert_bytes)
        return seconds

    def _offload(self, streams: Streams, units: Sequence[Unit]) -> None:
        """Copies of activations to the host and back during the computation."""
        num_offloaded = min(self.config.memory.cpu_offloading_num_layers, len(units))
        hidden_bytes = self.sizes.tokens * self.sizes.width
        num_bytes = num_offloaded * hidden_bytes * LAYER_BYTES / 2
        seconds = num_bytes / self.sizes.tp / self.scenario.gpu.host_bandwidth
        streams.wait("host", seconds, overlapped_s=streams.compute)
