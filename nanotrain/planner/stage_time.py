"""How long the actions of a pipeline stage take: forward, backward and its two halves, with FSDP's
collectives.

Stages.streams(stage, kind)  Streams of one action
      .numel(stages)         parameters of stages on one rank, dense and of experts
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import NamedTuple

from nanotrain.memory.block_transforms import recomputed_groups
from nanotrain.parallel.pp.actions import ActionKind
from nanotrain.planner.operators import GRAPH_LAUNCHES, Layers
from nanotrain.planner.parts import Parts, Streams
from nanotrain.planner.scenario import Scenario
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.parameters import declare_stage, layer
from nanotrain.spec.params import ParamSpec
from nanotrain.spec.stages import StageSpec

# a group waits for the sum of the stalls of its ranks, and a little more: fitted to tp of 2 to 32
STALL_GROWTH = 1.15


class Numel(NamedTuple):
    """Parameters on one rank, and their tensors."""

    dense: int
    expert: int
    tensors: int


@dataclass(frozen=True, eq=False)
class Unit:
    """A layer, the embedding or the head."""

    parts: Parts
    numel: Numel
    is_recomputed: bool = False


def _sides(parts: Parts) -> tuple[Parts, Parts]:
    """What a layer computes outside of dispatch and combine, and between them; all of a dense layer
    is beside both.
    """
    places = [index for index, part in enumerate(parts) if part.group == "ep"]
    if not places:
        return parts, parts
    return [*parts[: places[0] + 1], *parts[places[-1] :]], parts[places[0] + 1 : places[-1]]


class Stages:
    """The actions of the stages of a scenario.

    Args:
        scenario: configuration, machine and engine.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.config, self.layers = scenario, scenario.config, Layers(scenario)
        self.precision = Precision.of(self.config.precision)
        self.strategy = self.config.parallel.data_parallel_sharding_strategy
        self._unit, self.units, self._action = (
            cache(self._build_unit),
            cache(self._units),
            cache(self._build_action),
        )
        self._like = dict[tuple[object, ...], int]()  # the first layer of every kind

    def streams(self, spec: StageSpec, kind: ActionKind) -> Streams:
        """What an action of a stage runs; stages of the same units take equally long."""
        return self._action(self.units(spec), kind)

    def numel(self, specs: Iterable[StageSpec]) -> Numel:
        """Parameters of stages on one rank."""
        parts = (unit.numel for spec in specs for unit in self.units(spec))
        return Numel(*map(sum, zip((0, 0, 0), *parts, strict=True)))

    @cached_property
    def shards(self) -> tuple[int, int]:
        """Ranks that share the state of dense parameters, and of experts."""
        return len(self.scenario.ranks("dp_shard")), len(self.scenario.ranks("expert_dp_shard"))

    def seconds(self, streams: Streams) -> float:
        """Duration of an action: on the device, or of its launches on the host where these take
        longer.
        """
        if self.scenario.gpu.is_cpu:
            return streams.seconds + self.host_s(streams)
        return max(streams.seconds, self.host_s(streams))

    def host_s(self, streams: Streams) -> float:
        """Host time of an action."""
        engine, sizes = self.scenario.engine, self.scenario.sizes
        seconds = (
            streams.launches * engine.launches.operator_s
            + streams.collectives * engine.launches.collective_s
        )
        if self.lost_s or (
            sizes["pp"] > 1 and self.scenario.world_size > self.scenario.machine.gpus_per_node
        ):
            seconds += (
                streams.collectives * sizes["tp"] ** STALL_GROWTH * engine.network.host_stall_s
            )
        seconds *= self.scenario.gpu.calibration.compute
        return seconds * (GRAPH_LAUNCHES if self.scenario.cuda_graphs else 1.0)

    @property
    def lost_s(self) -> float:
        """Seconds that a step without a pipeline loses on many nodes."""
        slow = self.scenario.engine.network.slow_step
        if slow is None or self.scenario.sizes["pp"] > 1:
            return 0.0
        return slow.seconds if self.scenario.num_nodes >= slow.min_nodes else 0.0

    def modules(self, spec: StageSpec) -> list[str | int]:
        """The embedding, the layers by their index in the model, the head, and layers of
        multi-token prediction.
        """
        further = ["head", *self.layers.shape.mtp_layers] if spec.has_head else []
        return ["embedding"] * spec.has_embedding + [*spec.layers, *further]

    def _units(self, spec: StageSpec) -> tuple[Unit, ...]:
        """The modules of a stage, in forward order."""
        is_full = self.config.memory.recompute_granularity == "full"
        groups = recomputed_groups(self.config, len(spec.layers)) if is_full else []
        recomputed = {spec.layers[index] for group in groups for index in group}
        recomputed.update(self.layers.shape.mtp_layers if groups else ())
        units = []
        for name in self.modules(spec):
            is_alone = name == "head" and spec.has_embedding
            units.append(
                self._unit(
                    self._kind(name), is_recomputed=name in recomputed, has_embedding=is_alone
                )
            )
        return tuple(units)

    def _kind(self, name: str | int) -> str | int:
        """The first layer of the same kind."""
        if isinstance(name, str):
            return name
        shape = self.layers.shape
        return self._like.setdefault(
            (shape.kinds(name), shape.has_window(name), name >= shape.num_layers), name
        )

    def _build_unit(self, name: str | int, *, is_recomputed: bool, has_embedding: bool) -> Unit:
        """A module; a tied head has no parameters where the stage has the embedding."""
        shape, layers = self.layers.shape, self.layers
        if isinstance(name, int) and name < shape.num_layers:
            return Unit(
                layers.block(name), self._count(layer(self._declaration, name)), is_recomputed
            )
        if name == "embedding":
            parts, units = layers.embedding(), {"embedding"}
        elif name == "head":
            parts, units = (
                layers.head(),
                {"final_norm", "head"} | (set() if has_embedding else {"embedding"}),
            )
        else:
            parts, units = layers.multi_token(int(name)), {f"mtp.{int(name) - shape.num_layers}"}
        specs = declare_stage(
            self._declaration, StageSpec(0, 0, 0, name == "embedding", name != "embedding")
        )
        return Unit(
            parts, self._count([spec for spec in specs if spec.unit in units]), is_recomputed
        )

    @cached_property
    def _declaration(self) -> Declaration:
        return Declaration(
            self.layers.shape,
            self.layers.dtype,
            self.layers.tp,
            self.config.parallel.sequence_parallel,
        )

    def _count(self, specs: Sequence[ParamSpec]) -> Numel:
        sizes = self.scenario.sizes
        local = [
            (spec.is_expert, spec.numel // prod(sizes[shard.axis] for shard in spec.shards))
            for spec in specs
        ]
        expert = sum(numel for is_expert, numel in local if is_expert)
        return Numel(sum(numel for _, numel in local) - expert, expert, len(local))

    def _build_action(self, units: Sequence[Unit], kind: ActionKind) -> Streams:
        """All units of a stage, in order or in reverse."""
        total, is_forward = Streams(), kind is ActionKind.forward
        for unit in units if is_forward else reversed(units):
            streams = Streams(
                self.scenario.engine.overlap.contention, self.scenario.engine.operators.time_factor
            )
            again = unit.parts if is_forward or unit.is_recomputed else self._selected(unit.parts)
            for part in again if is_forward or kind.has_dgrad else ():
                part.run_forward(streams)
            for part in reversed(unit.parts):  # of a forward nothing
                part.run_backward(streams, dgrad=kind.has_dgrad, wgrad=kind.has_wgrad)
            self._shard(streams, unit, kind=kind)
            total.add(streams)
        if self.config.memory.cpu_offloading:
            self._offload(total, units)
        return total

    def hidden_s(self, forward: StageSpec, backward: StageSpec) -> float:
        """Seconds of dispatch and combine that a forward and a backward hide that run in turns.

        Layer by layer, the first of one beside the last of the other: the experts of one compute
        while tokens of the other are dispatched, attention while they are combined; what is left of
        the longer stage hides nothing.
        """
        ahead, back = ([unit.parts for unit in self.units(spec)] for spec in (forward, backward))
        engine, hidden = self.scenario.engine, 0.0
        for one, other in zip(ahead, reversed(back), strict=False):
            sent = [part.before for part in one if part.group == "ep"]
            returned = [part.last for part in reversed(other) if part.group == "ep"]
            computed = [sum(part.forward for part in side) for side in _sides(one)]
            computed_back = [
                sum(part.dgrad + part.wgrad for part in side) for side in reversed(_sides(other))
            ]
            for pair in (
                *zip(sent, computed_back, strict=False),
                *zip(returned, computed, strict=False),
            ):
                hidden += (1 - engine.overlap.contention) * min(
                    pair[0], engine.operators.time_factor * pair[1]
                )
        return hidden

    def _selected(self, parts: Parts) -> Parts:
        modules = self.config.memory.recomputed_modules
        return [
            part
            for part in parts
            if part.name in modules or ("moe" in modules and part.name.startswith("moe"))
        ]

    def _shard(self, streams: Streams, unit: Unit, *, kind: ActionKind) -> None:
        """The collectives of sharded parameters and gradients, beside the unit before or the next
        one.
        """
        parallel, beside = self.config.parallel, streams.compute / streams.factor
        gathers = self.strategy == "optim_grads_params" and kind is not ActionKind.backward_weight
        if gathers and (kind is ActionKind.forward or parallel.reshard_after_forward):
            seconds = self.collective_s(
                "all_gather", unit.numel, itemsize=self.precision.params.itemsize
            )
            streams.wait("dp", seconds, beside=beside * bool(self.overlaps("params")))
            beside = max(0.0, beside - seconds)
        if self.strategy in ("optim_grads", "optim_grads_params") and kind.has_wgrad:
            seconds = self.collective_s(
                "reduce_scatter", unit.numel, itemsize=self.precision.grads.itemsize
            )
            streams.wait("dp", seconds, beside=beside * bool(self.overlaps("grads")))

    def overlaps(self, what: str) -> bool:
        """Whether reductions of `grads` or gathers of `params` run beside the computation."""
        parallel, chosen = self.config.parallel, getattr(self.scenario.engine.overlap, what)
        configured = (
            parallel.overlap_param_gather if what == "params" else parallel.overlap_grad_reduce
        )
        return configured if chosen is None else bool(chosen)

    def collective_s(
        self, operation: str, numel: Numel, *, itemsize: int, level: str = "shard"
    ) -> float:
        """A collective of data parallelism over dense parameters and those of experts, one after
        the other.
        """
        names = (f"dp_{level}", f"expert_dp_{level}")
        pairs = zip(names, numel[:2], strict=True)
        return sum(
            self.layers.collective(name, operation, num_bytes=each * itemsize)
            for name, each in pairs
            if each
        )

    def _offload(self, streams: Streams, units: Sequence[Unit]) -> None:
        """Copies of activations to the host and back, beside the computation."""
        number = min(self.config.memory.cpu_offloading_num_layers, len(units))
        # Korthikanti et al. 2022, equation 1
        num_bytes = number * self.layers.tokens * self.layers.width * 34 / 2
        streams.wait(
            "host",
            num_bytes / self.layers.tp / self.scenario.gpu.host_bandwidth,
            beside=streams.compute,
        )
