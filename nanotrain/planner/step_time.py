"""Time of one training step, split by what it is spent on.

Every pipeline rank runs its actions of the real schedule, each when its input is there. Beside them are the reductions
of gradients, which begin during the last backward, and the gathers of parameters.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from statistics import mean
from typing import NamedTuple

from nanotrain.optim.state import host_fraction
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape
from nanotrain.parallel.pp.schedules import build_schedule
from nanotrain.parallel.pp.simulate import Span, Timeline
from nanotrain.planner.collectives import collective_s
from nanotrain.planner.kernels import memory_s
from nanotrain.planner.parts import Streams
from nanotrain.planner.scenario import Scenario
from nanotrain.planner.stage_time import Numel, Stages
from nanotrain.spec.counts import flops_per_token

# What a laptop cannot know: clocks under power limits and temperature, kernels of other versions, stragglers; and how
# busy and how regular the fabric is. Half of the range, relative to what computes and to what is exposed; it holds four
# of five published runs.
COMPUTE_RANGE, NETWORK_RANGE = 0.12, 0.4
HOST_UPDATE = 1.0e11  # bytes/s that an update on the host reads and writes
UPDATE_LAUNCHES = 10  # operators of an update with fused loops over the parameters
MIN_BUCKET = 40_000_000  # parameters of a gradient bucket where its size is not set, as Megatron-LM's
BUCKET_PER_RANK = 1_000_000


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the slowest pipeline rank."""

    scenario: Scenario
    compute: float  # operators of forward and backward
    exposed: Mapping[str, float]  # communication that does not overlap with computation, by group: tp, cp, ep, pp, dp
    bubble: float  # waiting for other pipeline ranks
    optimizer: float  # update of the parameters
    data: float  # loading of the batch
    host: float  # waiting for the host to launch operators
    pp_rank: int  # pipeline rank that ends last

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum((self.compute, self.bubble, self.optimizer, self.data, self.host, *self.exposed.values()))

    @property
    def likely(self) -> tuple[float, float]:
        """The range of the total."""
        exposed = sum(self.exposed.values()) + self.bubble
        half = COMPUTE_RANGE * (self.total - exposed) + NETWORK_RANGE * exposed
        return self.total - half, self.total + half

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput."""
        tokens = (self.scenario.config.train.global_batch_size or 0) * self.scenario.config.data.seq_length
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
    """An action in an order in which every action follows those that it needs."""

    rank: int
    action: Action
    needs: int  # place of the action of another stage whose result it takes; -1: none
    receives: bool  # whether another rank sends that
    sends: bool  # whether another rank takes its result
    turn: int = 0  # of a pair 1 or 2, which follow each other


class Order(NamedTuple):
    """The actions of all ranks in an order in which they can run."""

    steps: tuple[Step, ...]
    last_backwards: dict[int, int]  # by stage the place of the action that completes its gradients


@dataclass(frozen=True)
class Run:
    """A schedule on a clock."""

    order: Order
    starts: list[float]  # of every action
    ends: list[float]
    finish: list[float]  # per rank: end of its last action or transfer
    waits: list[float]  # per rank: seconds in which it sends and does not compute
    hidden: list[float]  # per rank: seconds of the transfers of tokens that pairs hide

    @property
    def duration(self) -> float:
        """Until all ranks end."""
        return max(self.finish)


@dataclass(frozen=True)
class DataParallel:
    """What data parallelism and the update add to the step of a pipeline rank."""

    exposed: float  # reductions that end after the last backward
    gathers: float  # gathers of updated parameters that the forward waits for
    update: float  # the update
    reductions: float  # reductions, exposed or not


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
        order, specs = self.order(self.lengths[0]), [spec for stages in scenario.stages for spec in stages]
        self.kinds = {step.action.kind for step in order.steps}
        self.streams = {(spec.index, kind): self.stages.streams(spec, kind) for spec in specs for kind in self.kinds}
        self.durations = {action: self.stages.seconds(streams) for action, streams in self.streams.items()}

    def order(self, num_microbatches: int) -> Order:
        """The order of the actions of so many microbatches."""
        shape = replace(self.shape, num_microbatches=num_microbatches)
        return order_of(self.scenario.config.parallel.pipeline_schedule, shape)

    def step_time(self) -> StepTime:
        """The parts of the time of the rank that ends last."""
        lengths, runs = self.lengths, [self.run(length) for length in self.lengths]
        run, number = runs[0], self.shape.num_microbatches
        ends = [self.data_parallel(run, rank) for rank in range(self.shape.num_ranks)]
        slowest = max(range(self.shape.num_ranks), key=lambda rank: run.finish[rank] + ends[rank].exposed)
        total = run.finish[slowest] + ends[slowest].exposed + (number - lengths[0]) * self.per_microbatch(runs)
        actions = self.actions(slowest)
        spent = Streams()
        for action in actions:
            spent.add(self.streams[action])
        exposed = defaultdict(float, {group: number * seconds for group, seconds in spent.exposed.items()})
        compute, host = number * spent.compute, number * (sum(self.durations[each] for each in actions) - spent.seconds)
        exposed["ep"] -= run.hidden[slowest] + (number - lengths[0]) * self.hidden_s(runs)[slowest]
        exposed["pp"] = run.waits[slowest] * number / lengths[0]
        exposed["dp"] += ends[slowest].exposed
        bubble = max(0.0, total - compute - host - sum(exposed.values()))
        exposed["dp"] += max(end.gathers for end in ends)
        return StepTime(
            self.scenario,
            compute=compute,
            exposed={group: seconds for group, seconds in exposed.items() if seconds > 0},
            bubble=bubble,
            optimizer=max(end.update for end in ends),
            data=self.stages.lost_s,
            host=host,
            pp_rank=slowest,
        )

    def per_microbatch(self, runs: Sequence[Run]) -> float:
        """Seconds of a microbatch more: those between two runs, and at least those of the busiest rank."""
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
        """Run the schedule; every rank runs its actions in order, each as soon as its input is there."""
        order, shape = self.order(num_microbatches), self.shape
        transfer = self.transfer_s if shape.num_ranks > 1 else 0.0
        blocked = 0.0 if self.scenario.engine.p2p_overlap or shape.num_stages_per_rank > 1 else transfer
        finish, waits, hidden = ([0.0] * shape.num_ranks for _ in range(3))
        starts, ends = [0.0] * len(order.steps), [0.0] * len(order.steps)
        for place, (rank, (kind, stage, _), needs, receives, sends, turn) in enumerate(order.steps):
            start = finish[rank]
            if receives:
                start = max(start, ends[needs] + transfer - blocked) + blocked
            if turn == 1 and order.steps[place + 1].receives:  # both wait for the inputs of both
                start = max(start, ends[order.steps[place + 1].needs] + transfer)
            starts[place], ends[place] = start, start + self.durations[stage, kind]
            if turn == 2:  # and are complete at the end
                seconds = self._hidden(order.steps[place - 1].action.stage, stage)
                ends[place] = ends[place - 1] = ends[place] - seconds
                hidden[rank] += seconds
            finish[rank] = ends[place] + blocked * sends
            waits[rank] += blocked * (sends + receives)
        return Run(order, starts, ends, finish, waits, hidden)

    @cached_property
    def _hidden(self) -> Callable[[int, int], float]:
        """Seconds that a pair of the forward of a stage and the backward of one hides."""
        specs = {spec.index: spec for stages in self.scenario.stages for spec in stages}
        return cache(lambda forward, backward: self.stages.hidden_s(specs[forward], specs[backward]))

    @cached_property
    def transfer_s(self) -> float:
        """Seconds of a transfer of hidden states between neighbouring pipeline ranks."""
        slow, layers = self.scenario.engine.slow_transfer, self.stages.layers
        number = self.scenario.num_nodes
        if slow and number > 1 and (number >= slow[0] or self.memory_share >= slow[1]):
            return slow[2]
        num_bytes = layers.outside * layers.width
        return collective_s(self.gpu, "p2p", num_bytes=num_bytes, ranks=self.scenario.ranks("pp")[:2])

    def data_parallel(self, run: Run, rank: int) -> DataParallel:
        """Reductions of gradients, the update and gathers of parameters of one pipeline rank."""
        scenario, stages, engine = self.scenario, self.stages, self.scenario.engine
        numel, (reductions, end) = stages.numel(scenario.stages[rank]), self._reductions(run, rank)
        updated = numel.dense / stages.shards[0] + numel.expert / stages.shards[1]
        update = memory_s(self.gpu, engine.optimizer_bytes * updated) + UPDATE_LAUNCHES * engine.launch_s
        if scenario.config.optim.optimizer_cpu_offload:
            on_host = updated * host_fraction(scenario.config.optim)
            copied = on_host * (stages.precision.main_grads.itemsize + stages.precision.params.itemsize)
            update += copied / self.gpu.host_bandwidth + on_host * engine.optimizer_bytes / HOST_UPDATE
        gathers = 0.0
        if stages.strategy in ("optim", "optim_grads") and stages.shards[0] > 1:
            gathers = stages.collective_s("all_gather", numel, itemsize=stages.precision.params.itemsize)
            gathers = engine.gather_factor * gathers + numel.tensors * stages.shards[0] * engine.gather_copy_s
            if stages.overlaps("params"):
                number = max(1, round(sum(numel[:2]) / self._bucket_numel))
                first = sum(self.durations[spec.index, ActionKind.forward] for spec in scenario.stages[rank])
                gathers = max(gathers / number, gathers - first)
        return DataParallel(max(0.0, end - run.finish[rank]), gathers, update, reductions)

    @property
    def _bucket_numel(self) -> int:
        size = self.scenario.engine.bucket_numel or self.scenario.config.parallel.ddp_bucket_size
        return size or max(MIN_BUCKET, BUCKET_PER_RANK * self.stages.shards[0])

    def _reductions(self, run: Run, rank: int) -> tuple[float, float]:
        """Seconds of the reductions of one rank, and their end; from the last backward of each of its stages on.

        Gradients that are sharded were reduce-scattered in each backward; what is left is the sum over the replicas.
        """
        stages, engine = self.stages, self.scenario.engine
        scatters = stages.strategy == "optim" and not engine.zero_all_reduces
        is_scattered = stages.strategy in ("optim_grads", "optim_grads_params")
        last, total, end, itemsize = run.order.last_backwards, 0.0, 0.0, stages.precision.grads.itemsize
        for spec in sorted(self.scenario.stages[rank], key=lambda spec: last[spec.index]):
            numel, place = stages.numel([spec]), last[spec.index]
            number = max(1, round(sum(numel[:2]) / self._bucket_numel))
            bucket = Numel(numel.dense // number, numel.expert // number, 0)
            operation = "reduce_scatter" if scatters else "all_reduce"
            seconds = 0.0 if is_scattered else stages.collective_s(operation, bucket, itemsize=itemsize)
            shard = Numel(bucket.dense // stages.shards[0], bucket.expert // stages.shards[1], 0)
            seconds += stages.collective_s("all_reduce", shard, itemsize=itemsize, level="replicate")
            for index in range(number if seconds else 0):
                ready = run.starts[place] + (run.ends[place] - run.starts[place]) * (index + 1) / number
                end = max(ready if stages.overlaps("grads") else run.finish[rank], end) + seconds
            total += number * seconds
        return total, end

    def timeline(self) -> Timeline:
        """The actions of the first microbatches, or of all if they are few; an average forward takes 1."""
        run = self.run(self.lengths[0])
        forwards = [seconds for (_, kind), seconds in self.durations.items() if kind is ActionKind.forward]
        ranks, unit = [list[Span]() for _ in run.finish], mean(forwards)
        for step, start, end in zip(run.order.steps, run.starts, run.ends, strict=True):
            ranks[step.rank].append(Span(step.action, start / unit, end / unit, end / unit))
        return Timeline(tuple(map(tuple, ranks)))


def simulated(shape: PipelineShape) -> list[int]:
    """Microbatches to simulate: all, or enough for the steady state, and one more period, by which to extend them.

    >>> simulated(PipelineShape(4, 1, 10)), simulated(PipelineShape(4, 1, 1023))
    ([10], [8, 12])
    """
    ranks, number = shape.num_ranks, shape.num_microbatches
    has_longer_rounds = shape.num_stages_per_rank > 1 and number % ranks > 0
    return [number] if number <= 4 * ranks or has_longer_rounds else [2 * ranks, 3 * ranks]


@lru_cache(maxsize=256)
def order_of(name: str, shape: PipelineShape) -> Order:
    """The order of a schedule.

    Args:
        name: schedule.
        shape: its arguments.
    """
    schedule, last = build_schedule(name, shape), shape.num_stages - 1
    steps: list[Step] = []
    inputs: dict[Action, int] = {}  # places of the actions of other stages whose results they take
    following = [deque(schedule.steps(rank)) for rank in range(shape.num_ranks)]

    def is_ready(action: Action) -> bool:
        kind, stage, _ = action
        has_input = stage > 0 if kind is ActionKind.forward else kind.has_dgrad and stage < last
        return not has_input or action in inputs

    while any(following):
        for rank, further in enumerate(following):
            while further:
                actions = (further[0],) if isinstance(further[0], Action) else further[0]
                if not all(map(is_ready, actions)):
                    break
                further.popleft()
                for turn, action in enumerate(actions, start=len(actions) - 1):
                    needs, consumer = inputs.get(action, -1), schedule.consumer_of(action)
                    sends = consumer is not None and schedule.rank_of_stage[consumer.stage] != rank
                    receives = needs >= 0 and steps[needs].rank != rank
                    if consumer is not None:
                        inputs[consumer] = len(steps)
                    steps.append(Step(rank, action, needs, receives, sends, turn))
    last_backwards = {step.action.stage: place for place, step in enumerate(steps) if step.action.kind.has_wgrad}
    return Order(tuple(steps), last_backwards)
