"""Time of one training step, split by causes.

predict_step    StepTime of a scenario
StepClock.run   the real schedule: every rank runs its actions in order
reduced_at      reductions of gradients, which begin during the last backward
gathers_s       gathers of updated parameters
update_s        update of the parameters
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
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
from nanotrain.spec.shared_state import message_width

# A laptop cannot know clocks under power limits and temperature, kernels of other versions and
# stragglers, nor how busy and how regular the fabric is. Half of the range, relative to the time
# that computes and to the time that is exposed; it holds four of five published runs.
COMPUTE_RANGE = 0.12
NETWORK_RANGE = 0.4
HOST_UPDATE = 1.0e11  # bytes/s that an update on the host reads and writes
UPDATE_LAUNCHES = 10  # operators of an update with fused loops over the parameters
# parameters of a gradient bucket where its size is not set, as Megatron-LM's
MIN_BUCKET = 40_000_000
BUCKET_PER_RANK = 1_000_000


class TimeRange(NamedTuple):
    """Seconds of a step."""

    low: float
    high: float


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
    products: float = 0.0  # matrix products and attention, a part of `compute`
    uneven: float = 0.0  # by which the busiest pipeline rank works longer, a part of `bubble`
    busiest: int = 0  # that pipeline rank

    @property
    def total(self) -> float:
        """Seconds of the step."""
        waiting = (self.bubble, self.optimizer, self.data, self.host)
        return sum((self.compute, *waiting, *self.exposed.values()))

    @property
    def likely(self) -> TimeRange:
        """The range of the total."""
        exposed = sum(self.exposed.values()) + self.bubble
        half = COMPUTE_RANGE * (self.total - exposed) + NETWORK_RANGE * exposed
        return TimeRange(self.total - half, self.total + half)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput of a GPU in the predicted step."""
        num_samples = self.scenario.config.train.global_batch_size or 0
        tokens = num_samples * self.scenario.config.data.seq_length
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
    """An action of a rank, or two that run in turns; starts once `received` have ended."""

    rank: int
    actions: tuple[Action, ...]
    received: tuple[int, ...]  # indices of the steps of other ranks whose results it takes
    num_sent: int  # results that other ranks take


@dataclass(frozen=True)
class Run:
    """A simulated schedule: when each step of each rank starts and ends, in seconds."""

    steps: tuple[Step, ...]
    starts: list[float]  # start of every step
    ends: list[float]
    finish: list[float]  # per rank: end of its last step or transfer
    waits: list[float]  # per rank: seconds in which it sends and does not compute
    hidden: list[float]  # per rank: seconds of the transfers of tokens that pairs hide

    @property
    def duration(self) -> float:
        """Seconds until all ranks have ended."""
        return max(self.finish)

    @cached_property
    def last_backwards(self) -> dict[int, int]:
        """By stage, the index of the step that completes its gradients."""
        last = {}
        for index, step in enumerate(self.steps):
            for action in step.actions:
                if action.kind.has_wgrad:
                    last[action.stage] = index
        return last


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
        self.scenario = scenario
        self.stages = Stages(scenario)
        self.shape = scenario.pipeline
        self.gpu = scenario.machine
        self.memory_share = memory_share
        self.lengths = counts_to_simulate(self.shape)
        steps = self.steps(self.lengths[0])
        kinds = {action.kind for step in steps for action in step.actions}
        # in a fixed order, so that sums have the same bits in every process
        self.kinds = [kind for kind in ActionKind if kind in kinds]
        self.streams: dict[tuple[int, ActionKind], Streams] = {}
        for specs in scenario.stages:
            for spec in specs:
                for kind in self.kinds:
                    self.streams[spec.index, kind] = self.stages.streams(spec, kind)
        self.durations = {
            action: self.stages.seconds(streams) for action, streams in self.streams.items()
        }

    def steps(self, num_microbatches: int) -> tuple[Step, ...]:
        """The steps of all ranks for a number of microbatches, in an order they can run in."""
        shape = replace(self.shape, num_microbatches=num_microbatches)
        return steps_of(self.scenario.config.parallel.pipeline_schedule, shape)

    def step_time(self) -> StepTime:
        """The time of a step and its parts, on the rank that ends last.

        Microbatches beyond the simulated ones add `per_microbatch` seconds each.
        """
        ranks = range(self.shape.num_ranks)
        runs = [self.run(length) for length in self.lengths]
        run = runs[0]
        ends = [max(run.finish[rank], self.reduced_at(run, rank)) for rank in ranks]
        slowest = max(ranks, key=lambda rank: ends[rank])
        num_microbatches = self.shape.num_microbatches
        num_further = num_microbatches - self.lengths[0]  # microbatches that are not simulated
        total = ends[slowest] + num_further * self.per_microbatch(runs)

        streams = self.spent(slowest)
        busy = self.busy_s(slowest)
        compute = num_microbatches * streams.compute
        host = max(0.0, num_microbatches * (busy - streams.seconds))

        exposed = defaultdict[str, float](float)
        for group, seconds in streams.exposed.items():
            exposed[group] = num_microbatches * seconds
        hidden_per_microbatch = self.hidden_s(runs)[slowest]
        exposed["ep"] -= run.hidden[slowest] + num_further * hidden_per_microbatch
        exposed["pp"] = run.waits[slowest] * num_microbatches / self.lengths[0]
        exposed["dp"] += ends[slowest] - run.finish[slowest]
        bubble = max(0.0, total - compute - host - sum(exposed.values()))
        work = {rank: self.busy_s(rank) for rank in ranks}
        busiest = max(ranks, key=lambda rank: work[rank])
        uneven = num_microbatches * (work[busiest] - work[slowest])
        exposed["dp"] += max(self.gathers_s(rank) for rank in ranks)
        optimizer = max(self.update_s(rank) for rank in ranks)
        positive = {group: seconds for group, seconds in exposed.items() if seconds > 0}
        return StepTime(
            self.scenario,
            compute=compute,
            exposed=positive,
            bubble=bubble,
            optimizer=optimizer,
            data=self.stages.lost_s,
            host=host,
            pp_rank=slowest,
            products=num_microbatches * streams.products,
            uneven=min(bubble, uneven),
            busiest=busiest,
        )

    def busy_s(self, rank: int) -> float:
        """Seconds of the actions of one microbatch on a rank."""
        return sum(self.durations[action] for action in self.actions(rank))

    def spent(self, rank: int) -> Streams:
        """Streams of one microbatch on a rank."""
        spent = Streams()
        for action in self.actions(rank):
            spent.add(self.streams[action])
        return spent

    def per_microbatch(self, runs: Sequence[Run]) -> float:
        """Time that one more microbatch adds.

        It follows from two simulated lengths, and is at least the time of the busiest rank.
        """
        if len(runs) == 1:
            return 0.0
        num_ranks = self.shape.num_ranks
        hidden = self.hidden_s(runs)
        times = [(runs[1].duration - runs[0].duration) / num_ranks]
        for rank in range(num_ranks):
            busy = self.busy_s(rank)
            waits = runs[0].waits[rank] / 2 / num_ranks
            times.append(busy - hidden[rank] + waits)
        return max(times)

    def hidden_s(self, runs: Sequence[Run]) -> list[float]:
        """Seconds per microbatch that each rank hides in pairs, in the steady state.

        The longer run has `num_ranks` microbatches more than the shorter one.
        """
        shorter = runs[0]
        longer = runs[-1]
        seconds = []
        for before, after in zip(shorter.hidden, longer.hidden, strict=True):
            seconds.append((after - before) / self.shape.num_ranks)
        return seconds

    def actions(self, rank: int) -> list[tuple[int, ActionKind]]:
        """Stages and kinds of the actions that a rank runs of every microbatch."""
        kinds = self.kinds
        if ActionKind.full_backward in kinds:
            # some full backwards may be split, which take as long
            kinds = [ActionKind.forward, ActionKind.full_backward]
        return [(spec.index, kind) for spec in self.scenario.stages[rank] for kind in kinds]

    def run(self, num_microbatches: int) -> Run:
        """Run the schedule: every rank runs its actions in order, when their inputs are there."""
        steps = self.steps(num_microbatches)
        num_ranks = self.shape.num_ranks
        transfer = self.transfer_s if num_ranks > 1 else 0.0
        blocked = 0.0 if self._overlaps_p2p else transfer  # seconds in which a transfer blocks
        run = Run(
            steps,
            starts=[0.0] * len(steps),
            ends=[0.0] * len(steps),
            finish=[0.0] * num_ranks,
            waits=[0.0] * num_ranks,
            hidden=[0.0] * num_ranks,
        )
        for index, (rank, actions, received, num_sent) in enumerate(steps):
            arrivals = [run.ends[other] + transfer - blocked for other in received]
            num_received = len(received)
            start = max([run.finish[rank], *arrivals]) + blocked * num_received
            seconds = sum(self.durations[stage, kind] for kind, stage, _ in actions)
            if len(actions) > 1:
                forward_stage, backward_stage = (stage for _, stage, _ in actions)
                hidden = self._hidden_by_pair(forward_stage, backward_stage)
                run.hidden[rank] += hidden
                seconds -= hidden
            run.starts[index] = start
            run.ends[index] = start + seconds
            run.finish[rank] = run.ends[index] + blocked * num_sent
            run.waits[rank] += blocked * (num_sent + num_received)
        return run

    @property
    def _overlaps_p2p(self) -> bool:
        """Whether transfers between pipeline ranks overlap with computation."""
        return self.scenario.engine.pipeline.overlaps_p2p or self.shape.num_stages_per_rank > 1

    @cached_property
    def _hidden_by_pair(self) -> Callable[[int, int], float]:
        """Seconds that the forward of a stage and the backward of another hide as a pair."""
        specs = {spec.index: spec for stages in self.scenario.stages for spec in stages}

        @cache
        def hidden_s(forward: int, backward: int) -> float:
            return self.stages.hidden_s(specs[forward], specs[backward])

        return hidden_s

    @cached_property
    def transfer_s(self) -> float:
        """Seconds of a transfer of hidden states between neighbouring pipeline ranks.

        Of the slowest link: some neighbours may be on one node, some on two.
        """
        slow = self.scenario.engine.pipeline.slow_transfer
        num_nodes = self.scenario.num_nodes
        if slow and num_nodes > 1:
            has_many_nodes = num_nodes >= slow.min_nodes
            if has_many_nodes or self.memory_share >= slow.min_memory_share:
                return slow.seconds
        sizes = self.stages.sizes
        first_layers = [spec.first_layer for stages in self.scenario.stages for spec in stages]
        width = max(message_width(sizes, layer) for layer in first_layers)
        num_bytes = sizes.outside * width * sizes.itemsize
        times = []
        for neighbours in pairwise(self.scenario.ranks("pp")):
            times.append(collective_s(self.gpu, "p2p", num_bytes=num_bytes, ranks=neighbours))
        return max(times)

    def update_s(self, rank: int) -> float:
        """Seconds of the update of a pipeline rank."""
        stages = self.stages
        engine = self.scenario.engine
        optim = self.scenario.config.optim
        numel = stages.numel(self.scenario.stages[rank])
        updated = numel.dense / stages.shards.dense + numel.expert / stages.shards.expert
        launches_s = UPDATE_LAUNCHES * engine.launches.operator_s
        seconds = memory_s(self.gpu, engine.optimizer.update_bytes * updated) + launches_s
        if not optim.optimizer_cpu_offload:
            return seconds
        on_host = updated * host_fraction(optim)
        copied = on_host * (stages.precision.main_grads.itemsize + stages.precision.params.itemsize)
        host_bytes = on_host * engine.optimizer.update_bytes
        return seconds + copied / self.gpu.host_bandwidth + host_bytes / HOST_UPDATE

    def gathers_s(self, rank: int) -> float:
        """Seconds of parameter gathers for which the first forward of a pipeline rank waits."""
        stages = self.stages
        optimizer = self.scenario.engine.optimizer
        if stages.strategy not in ("optim", "optim_grads") or stages.shards.dense == 1:
            return 0.0
        specs = self.scenario.stages[rank]
        numel = stages.numel(specs)
        itemsize = stages.precision.params.itemsize
        gather_s = stages.collective_s("all_gather", numel, itemsize=itemsize)
        copies_s = numel.tensors * stages.shards.dense * optimizer.gather_copy_s
        seconds = optimizer.gather_factor * gather_s + copies_s
        if not stages.overlaps_params:
            return seconds
        forward_s = sum(self.durations[spec.index, ActionKind.forward] for spec in specs)
        return max(seconds / self._num_buckets(numel), seconds - forward_s)

    def _num_buckets(self, numel: Numel) -> int:
        """Gradient buckets of parameters."""
        size = self.scenario.engine.optimizer.bucket_numel
        size = size or self.scenario.config.parallel.ddp_bucket_size
        size = size or max(MIN_BUCKET, BUCKET_PER_RANK * self.stages.shards.dense)
        return max(1, round((numel.dense + numel.expert) / size))

    def reduced_at(self, run: Run, rank: int) -> float:
        """Time at which the reductions of one rank end; they begin in its last backwards."""
        last = run.last_backwards
        end = 0.0
        for spec in sorted(self.scenario.stages[rank], key=lambda spec: last[spec.index]):
            numel = self.stages.numel([spec])
            num_buckets = self._num_buckets(numel)
            seconds = self._bucket_reduction_s(numel, num_buckets)
            if not seconds:
                continue
            start = run.starts[last[spec.index]]
            duration = run.ends[last[spec.index]] - start
            for index in range(num_buckets):
                ready = run.finish[rank]
                if self.stages.overlaps_grads:
                    ready = start + duration * (index + 1) / num_buckets
                end = max(ready, end) + seconds
        return end

    def _bucket_reduction_s(self, numel: Numel, num_buckets: int) -> float:
        """Seconds of the reduction of one gradient bucket after the last backward.

        Sharded gradients were reduce-scattered in each backward; only the sum over the replicas is
        left.
        """
        stages = self.stages
        itemsize = stages.precision.grads.itemsize
        bucket = Numel(numel.dense // num_buckets, numel.expert // num_buckets, 0)
        seconds = 0.0
        operation = {"no_shard": "all_reduce", "optim": "reduce_scatter"}.get(stages.strategy)
        if operation:
            seconds = stages.collective_s(operation, bucket, itemsize=itemsize)
        shards = stages.shards
        shard = Numel(bucket.dense // shards.dense, bucket.expert // shards.expert, 0)
        return seconds + stages.collective_s(
            "all_reduce", shard, itemsize=itemsize, level="replicate"
        )

    def timeline(self) -> Timeline:
        """The actions of the first microbatches; an average forward takes 1."""
        run = self.run(self.lengths[0])
        forwards = [
            seconds for (_, kind), seconds in self.durations.items() if kind is ActionKind.forward
        ]
        unit = mean(forwards)
        ranks = [list[Span]() for _ in run.finish]
        for step, start, end in zip(run.steps, run.starts, run.ends, strict=True):
            for action in step.actions:
                stop = min(end, start + self.durations[action.stage, action.kind])
                ranks[step.rank].append(Span(action, start / unit, stop / unit, end / unit))
                start = stop
        return Timeline(tuple(map(tuple, ranks)))


def counts_to_simulate(shape: PipelineShape) -> list[int]:
    """Numbers of microbatches to simulate: all, or two lengths of the steady state.

    >>> shape = PipelineShape(4, 1, 1023)
    >>> counts_to_simulate(PipelineShape(4, 1, 10)), counts_to_simulate(shape)
    ([10], [8, 12])
    """
    ranks = shape.num_ranks
    count = shape.num_microbatches
    has_longer_rounds = shape.num_stages_per_rank > 1 and count % ranks > 0
    return [count] if count <= 4 * ranks or has_longer_rounds else [2 * ranks, 3 * ranks]


@lru_cache(maxsize=256)
def steps_of(name: str, shape: PipelineShape) -> tuple[Step, ...]:
    """The actions of all ranks in an order in which they can run.

    Args:
        name: schedule.
        shape: its arguments.
    """
    schedule = build_schedule(name, shape)
    rank_of_stage = schedule.rank_of_stage
    steps: list[Step] = []
    step_of_action: dict[Action, int] = {}
    for rank, actions, needed in runnable_steps(schedule):
        received = [step_of_action[one] for one in needed if rank_of_stage[one.stage] != rank]
        num_sent = 0
        for action in actions:
            consumer = schedule.consumer_of(action)
            if consumer is not None and rank_of_stage[consumer.stage] != rank:
                num_sent += 1
            step_of_action[action] = len(steps)
        steps.append(Step(rank, actions, tuple(received), num_sent))
    return tuple(steps)
