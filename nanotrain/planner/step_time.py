"""Time of one training step, split by what it is spent on.

Every pipeline rank runs its actions of the real schedule, each when its input is there. Beside them
are the reductions of gradients, which begin during the last backward, and the gathers of
parameters.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from statistics import mean
from typing import NamedTuple

from nanotrain.optim.state import host_fraction
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape
from nanotrain.parallel.pp.schedules import build_schedule
from nanotrain.parallel.pp.simulate import Span, Timeline, runnable_steps
from nanotrain.planner.collectives import collective_s
from nanotrain.planner.kernels import memory_s
from nanotrain.planner.parts import Streams
from nanotrain.planner.scenario import Scenario
from nanotrain.planner.stage_time import Numel, Stages
from nanotrain.spec.counts import flops_per_token

# What a laptop cannot know: clocks under power limits and temperature, kernels of other versions,
# stragglers; and how busy and how regular the fabric is. Half of the range, relative to what
# computes and to what is exposed; it holds four of five published runs.
COMPUTE_RANGE, NETWORK_RANGE = 0.12, 0.4
HOST_UPDATE = 1.0e11  # bytes/s that an update on the host reads and writes
UPDATE_LAUNCHES = 10  # operators of an update with fused loops over the parameters
# parameters of a gradient bucket where its size is not set, as Megatron-LM's
MIN_BUCKET = 40_000_000
BUCKET_PER_RANK = 1_000_000


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the slowest pipeline rank."""

    scenario: Scenario
    compute: float  # operators of forward and backward
    # communication that does not overlap with computation, by group: tp, cp, ep, pp, dp
    exposed: Mapping[str, float]
    bubble: float  # waiting for other pipeline ranks
    optimizer: float  # update of the parameters
    data: float  # loading of the batch
    host: float  # waiting for the host to launch operators
    pp_rank: int  # pipeline rank that ends last

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(
            (
                self.compute,
                self.bubble,
                self.optimizer,
                self.data,
                self.host,
                *self.exposed.values(),
            )
        )

    @property
    def likely(self) -> tuple[float, float]:
        """The range of the total."""
        exposed = sum(self.exposed.values()) + self.bubble
        half = COMPUTE_RANGE * (self.total - exposed) + NETWORK_RANGE * exposed
        return self.total - half, self.total + half

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput."""
        tokens = (
            self.scenario.config.train.global_batch_size or 0
        ) * self.scenario.config.data.seq_length
        return tokens / self.total / self.scenario.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, of the peak in 16 bits."""
        flops = flops_per_token(self.scenario.shape, self.scenario.config.data.seq_length)
        return self.tokens_per_s_per_gpu * flops / self.peak_flops

    @property
    def peak_flops(self) -> float:
        """Dense peak of the GPU in 16 bits."""
        peaks = self.scenario.gpu.peak_flops
        return peaks.get("bf16") or peaks["fp16"]


class Step(NamedTuple):
    """An action, or a pair that runs in turns, in an order in which each follows those that it
    needs.
    """

    rank: int
    actions: tuple[Action, ...]
    received: tuple[int, ...]  # places of the steps of other ranks whose results it takes
    num_sent: int  # results that other ranks take


@dataclass(frozen=True)
class Run:
    """A schedule on a clock."""

    steps: tuple[Step, ...]
    starts: list[float]  # of every step
    ends: list[float]
    finish: list[float]  # per rank: end of its last step or transfer
    waits: list[float]  # per rank: seconds in which it sends and does not compute
    hidden: list[float]  # per rank: seconds of the transfers of tokens that pairs hide

    @property
    def duration(self) -> float:
        """Until all ranks end."""
        return max(self.finish)

    @cached_property
    def last_backwards(self) -> dict[int, int]:
        """By stage the place of the step that completes its gradients."""
        backwards = (
            (place, action) for place, step in enumerate(self.steps) for action in step.actions
        )
        return {action.stage: place for place, action in backwards if action.kind.has_wgrad}


def predict_step(scenario: Scenario, *, memory_share: float = 0.0) -> StepTime:
    """The time of one step; `memory_share` is the share of the memory that is reserved."""
    return StepClock(scenario, memory_share=memory_share).step_time()


class StepClock:
    """One step of all pipeline ranks.

    Args:
        scenario: configuration, machine and engine.
        memory_share: share of the memory that is reserved.
    """

    def __init__(self, scenario: Scenario, *, memory_share: float = 0.0) -> None:
        self.scenario, self.stages, self.shape = scenario, Stages(scenario), scenario.pipeline
        self.gpu, self.memory_share = scenario.machine, memory_share
        self.lengths = simulated(self.shape)
        specs = [spec for stages in scenario.stages for spec in stages]
        self.kinds = {
            action.kind for step in self.steps(self.lengths[0]) for action in step.actions
        }
        self.streams = {
            (spec.index, kind): self.stages.streams(spec, kind)
            for spec in specs
            for kind in self.kinds
        }
        self.durations = {
            action: self.stages.seconds(streams) for action, streams in self.streams.items()
        }

    def steps(self, num_microbatches: int) -> tuple[Step, ...]:
        """The actions of so many microbatches."""
        shape = replace(self.shape, num_microbatches=num_microbatches)
        return steps_of(self.scenario.config.parallel.pipeline_schedule, shape)

    def step_time(self) -> StepTime:
        """The parts of the time of the rank that ends last."""
        lengths, runs = self.lengths, [self.run(length) for length in self.lengths]
        run, number, ranks = runs[0], self.shape.num_microbatches, range(self.shape.num_ranks)
        ends = [max(run.finish[rank], self.reduced_at(run, rank)) for rank in ranks]
        slowest = max(ranks, key=lambda rank: ends[rank])
        total = ends[slowest] + (number - lengths[0]) * self.per_microbatch(runs)
        actions = self.actions(slowest)
        spent = Streams()
        for action in actions:
            spent.add(self.streams[action])
        exposed = defaultdict(
            float, {group: number * seconds for group, seconds in spent.exposed.items()}
        )
        compute = number * spent.compute
        host = max(0.0, number * (sum(self.durations[each] for each in actions) - spent.seconds))
        exposed["ep"] -= run.hidden[slowest] + (number - lengths[0]) * self.hidden_s(runs)[slowest]
        exposed["pp"] = run.waits[slowest] * number / lengths[0]
        exposed["dp"] += ends[slowest] - run.finish[slowest]
        bubble = max(0.0, total - compute - host - sum(exposed.values()))
        exposed["dp"] += max(map(self.gathers_s, ranks))
        return StepTime(
            self.scenario,
            compute=compute,
            exposed={group: seconds for group, seconds in exposed.items() if seconds > 0},
            bubble=bubble,
            optimizer=max(map(self.update_s, ranks)),
            data=self.stages.lost_s,
            host=host,
            pp_rank=slowest,
        )

    def per_microbatch(self, runs: Sequence[Run]) -> float:
        """Seconds of a microbatch more: those between two runs, and at least those of the busiest
        rank.
        """
        if len(runs) == 1:
            return 0.0
        ranks, hidden = range(self.shape.num_ranks), self.hidden_s(runs)
        spent = [sum(self.durations[action] for action in self.actions(rank)) for rank in ranks]
        busy = (spent[rank] - hidden[rank] + runs[0].waits[rank] / 2 / len(ranks) for rank in ranks)
        return max((runs[1].duration - runs[0].duration) / len(ranks), *busy)

    def hidden_s(self, runs: Sequence[Run]) -> list[float]:
        """Seconds per microbatch in the steady state that pairs hide, by rank."""
        both = zip(runs[0].hidden, runs[-1].hidden, strict=True)
        return [(after - before) / self.shape.num_ranks for before, after in both]

    def actions(self, rank: int) -> list[tuple[int, ActionKind]]:
        """Stages and kinds of the actions that a rank runs of every microbatch."""
        halves = {ActionKind.backward_input, ActionKind.backward_weight}
        # where there are full backwards, some may be split, which take as long
        kinds = self.kinds - halves if ActionKind.full_backward in self.kinds else self.kinds
        return [(spec.index, kind) for spec in self.scenario.stages[rank] for kind in kinds]

    def run(self, num_microbatches: int) -> Run:
        """Run the schedule; every rank runs its actions in order, each as soon as its input is
        there.
        """
        steps, num_ranks = self.steps(num_microbatches), self.shape.num_ranks
        transfer = self.transfer_s if num_ranks > 1 else 0.0
        blocked = (
            0.0
            if self.scenario.engine.pipeline.overlaps_p2p or self.shape.num_stages_per_rank > 1
            else transfer
        )
        finish, waits, hidden = ([0.0] * num_ranks for _ in range(3))
        starts, ends = [0.0] * len(steps), [0.0] * len(steps)
        for place, (rank, actions, received, num_sent) in enumerate(steps):
            start = max([finish[rank], *(ends[other] + transfer - blocked for other in received)])
            starts[place] = start = start + blocked * len(received)
            seconds = sum(self.durations[stage, kind] for kind, stage, _ in actions)
            if len(actions) > 1:
                together = self._hidden(*(stage for _, stage, _ in actions))
                hidden[rank] += together
                seconds -= together
            ends[place] = start + seconds
            finish[rank] = ends[place] + blocked * num_sent
            waits[rank] += blocked * (num_sent + len(received))
        return Run(steps, starts, ends, finish, waits, hidden)

    @cached_property
    def _hidden(self) -> Callable[[int, int], float]:
        """Seconds that a pair of the forward of a stage and the backward of one hides."""
        specs = {spec.index: spec for stages in self.scenario.stages for spec in stages}
        return cache(
            lambda forward, backward: self.stages.hidden_s(specs[forward], specs[backward])
        )

    @cached_property
    def transfer_s(self) -> float:
        """Seconds of a transfer of hidden states between neighbouring pipeline ranks."""
        slow, layers = self.scenario.engine.pipeline.slow_transfer, self.stages.layers
        number = self.scenario.num_nodes
        if (
            slow
            and number > 1
            and (number >= slow.min_nodes or self.memory_share >= slow.min_memory_share)
        ):
            return slow.seconds
        num_bytes = layers.outside * layers.width
        return collective_s(
            self.gpu, "p2p", num_bytes=num_bytes, ranks=self.scenario.ranks("pp")[:2]
        )

    def update_s(self, rank: int) -> float:
        """Seconds of the update of a pipeline rank."""
        stages, engine, optim = self.stages, self.scenario.engine, self.scenario.config.optim
        numel = stages.numel(self.scenario.stages[rank])
        updated = numel.dense / stages.shards[0] + numel.expert / stages.shards[1]
        seconds = (
            memory_s(self.gpu, engine.optimizer.update_bytes * updated)
            + UPDATE_LAUNCHES * engine.launches.operator_s
        )
        if not optim.optimizer_cpu_offload:
            return seconds
        on_host = updated * host_fraction(optim)
        copied = on_host * (stages.precision.main_grads.itemsize + stages.precision.params.itemsize)
        return (
            seconds
            + copied / self.gpu.host_bandwidth
            + on_host * engine.optimizer.update_bytes / HOST_UPDATE
        )

    def gathers_s(self, rank: int) -> float:
        """Seconds of the gathers of updated parameters that the forward of a pipeline rank waits
        for.
        """
        stages, engine = self.stages, self.scenario.engine
        if stages.strategy not in ("optim", "optim_grads") or stages.shards[0] == 1:
            return 0.0
        numel = stages.numel(self.scenario.stages[rank])
        seconds = stages.collective_s(
            "all_gather", numel, itemsize=stages.precision.params.itemsize
        )
        seconds = (
            engine.optimizer.gather_factor * seconds
            + numel.tensors * stages.shards[0] * engine.optimizer.gather_copy_s
        )
        if not stages.overlaps("params"):
            return seconds
        first = sum(
            self.durations[spec.index, ActionKind.forward] for spec in self.scenario.stages[rank]
        )
        return max(seconds / self._num_buckets(numel), seconds - first)

    def _num_buckets(self, numel: Numel) -> int:
        size = (
            self.scenario.engine.optimizer.bucket_numel
            or self.scenario.config.parallel.ddp_bucket_size
        )
        size = size or max(MIN_BUCKET, BUCKET_PER_RANK * self.stages.shards[0])
        return max(1, round((numel.dense + numel.expert) / size))

    def reduced_at(self, run: Run, rank: int) -> float:
        """When the reductions of one rank end, which begin at the last backward of each of its
        stages.

        Gradients that are sharded were reduce-scattered in each backward; what is left is the sum
        over the replicas.
        """
        stages, itemsize, last = (
            self.stages,
            self.stages.precision.grads.itemsize,
            run.last_backwards,
        )
        operation = {"no_shard": "all_reduce", "optim": "reduce_scatter"}.get(stages.strategy)
        end = 0.0
        for spec in sorted(self.scenario.stages[rank], key=lambda spec: last[spec.index]):
            numel, place = stages.numel([spec]), last[spec.index]
            number = self._num_buckets(numel)
            bucket = Numel(numel.dense // number, numel.expert // number, 0)
            shard = Numel(bucket.dense // stages.shards[0], bucket.expert // stages.shards[1], 0)
            seconds = (
                stages.collective_s(operation, bucket, itemsize=itemsize) if operation else 0.0
            )
            seconds += stages.collective_s(
                "all_reduce", shard, itemsize=itemsize, level="replicate"
            )
            for index in range(number if seconds else 0):
                ready = (
                    run.starts[place] + (run.ends[place] - run.starts[place]) * (index + 1) / number
                )
                end = max(ready if stages.overlaps("grads") else run.finish[rank], end) + seconds
        return end

    def timeline(self) -> Timeline:
        """The actions of the first microbatches, or of all if they are few; an average forward
        takes 1.
        """
        run = self.run(self.lengths[0])
        forwards = [
            seconds for (_, kind), seconds in self.durations.items() if kind is ActionKind.forward
        ]
        ranks, unit = [list[Span]() for _ in run.finish], mean(forwards)
        for step, start, end in zip(run.steps, run.starts, run.ends, strict=True):
            for action in step.actions:
                stop = min(end, start + self.durations[action.stage, action.kind])
                ranks[step.rank].append(Span(action, start / unit, stop / unit, end / unit))
                start = stop
        return Timeline(tuple(map(tuple, ranks)))


def simulated(shape: PipelineShape) -> list[int]:
    """Microbatches to simulate: all, or enough for the steady state, and one more period, by which
    to extend them.

    >>> simulated(PipelineShape(4, 1, 10)), simulated(PipelineShape(4, 1, 1023))
    ([10], [8, 12])
    """
    ranks, number = shape.num_ranks, shape.num_microbatches
    has_longer_rounds = shape.num_stages_per_rank > 1 and number % ranks > 0
    return [number] if number <= 4 * ranks or has_longer_rounds else [2 * ranks, 3 * ranks]


@lru_cache(maxsize=256)
def steps_of(name: str, shape: PipelineShape) -> tuple[Step, ...]:
    """The actions of all ranks in an order in which they can run.

    Args:
        name: schedule.
        shape: its arguments.
    """
    schedule = build_schedule(name, shape)
    steps: list[Step] = []
    places: dict[Action, int] = {}  # of the steps of actions
    for rank, actions, needed in runnable_steps(schedule):
        received = [places[each] for each in needed if schedule.rank_of_stage[each.stage] != rank]
        consumers = [each for each in map(schedule.consumer_of, actions) if each is not None]
        num_sent = sum(schedule.rank_of_stage[each.stage] != rank for each in consumers)
        places |= dict.fromkeys(actions, len(steps))
        steps.append(Step(rank, actions, tuple(received), num_sent))
    return tuple(steps)
