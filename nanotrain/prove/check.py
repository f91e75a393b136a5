"""The proof of a layout: one rank per kind of pipeline stage trains a step with types.

prove(config, world_size) -> Proof.text(), Proof.faults
verdict(loaded, world_size) -> the last lines of `nanotrain parity`
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanotrain.comm.recorded_world import recorded_world
from nanotrain.config.config import Config, DataConfig
from nanotrain.config.load import Loaded
from nanotrain.config.model import ModelConfig
from nanotrain.config.schedules import with_batch_size
from nanotrain.config.schema import with_values
from nanotrain.config.tables import read_table
from nanotrain.data.build import build_data
from nanotrain.dry_run.stand_ins import on_meta
from nanotrain.errors import ScheduleError
from nanotrain.parity.shrink import shrink
from nanotrain.plan.plan import Plan, plan_run
from nanotrain.prove.axes import Axes, Untypable
from nanotrain.prove.rules import TypedRecorder
from nanotrain.prove.seams import Seams
from nanotrain.quantities import count_of
from nanotrain.runs.folder import RunFolder
from nanotrain.topology.topology import Topology
from nanotrain.train.build import build_run
from nanotrain.train.inputs import with_known_model
from nanotrain.train.run import RunInputs
from nanotrain.train.step import train_step

NUM_MICROBATCHES = 2  # the second one adds its gradients to the first one's
DRY_RUN = Path(__file__).parents[1] / "dry_run"
NO_SHARD: dict[str, Any] = {
    "parallel.data_parallel_sharding_strategy": "no_shard",
    "parallel.num_distributed_optimizer_instances": 1,
}


@dataclass(frozen=True)
class Proof:
    """The ranks and operators that were typed, and the faults that were found."""

    topology: Topology
    ranks: tuple[int, ...]  # that were typed
    parameters: frozenset[str]  # whose gradients were followed
    num_operators: int
    num_sums: int
    faults: tuple[str, ...]

    def text(self) -> str:
        """The report."""
        ranks = count_of(self.topology.world_size, "rank")
        operators = count_of(self.num_operators, "operator")
        lines = [
            f"{ranks}: {count_of(len(self.ranks), 'rank')} of a small model typed, {operators}, "
            f"{count_of(self.num_sums, 'sum')} of gradients"
        ]
        return "\n".join([*lines, *self.verdict()])

    def verdict(self) -> list[str]:
        """One line on the proof, or one per fault."""
        if self.faults:
            return [f"error: {fault}" for fault in self.faults]
        parameters = count_of(len(self.parameters), "parameter")
        return [
            f"proved: the gradients of {parameters} are summed once over their axes, "
            "the norm counts each element once, and all ranks step alike"
        ]


def prove(config: Config, world_size: int, *, shapes: dict[Any, Any] | None = None) -> Proof:
    """Type a step of every kind of rank of a layout.

    Types do not depend on sizes, so the model is shrunk: of equal layers one per stage is typed.
    Where data-parallel ranks share gradients, a second run without shards sees the sums over tp of
    all parameters; a shard has some of them only. It has one microbatch where the schedule has.

    Args:
        config: a validated configuration; its vocabulary is replaced.
        world_size: ranks of the run.
        shapes: shapes of results of operators, which several proofs may share to be faster.

    Raises:
        Untypable: the groups of the layout have no common axes, or a layer reads values on the
            host.
        ScheduleError: the pipeline schedule has no form with few microbatches.
    """
    if config.precision.invariant and config.model.moe is not None:
        raise Untypable(
            "invariant layers of experts cannot be typed",
            why="the host reads how many tokens each expert has",
            fix="leave --invariant out: the sums over ranks are the same",
        )
    layers_per_stage = _layers_per_stage(config.model)
    small = shrink(config, world_size, num_steps=1, layers_per_stage=layers_per_stage)
    small = replace(
        small,
        precision=replace(config.precision, fp8=None),
        optim=replace(small.optim, clip_grad=config.optim.clip_grad),
    )
    small = with_values(small, read_table("settings", folder=DRY_RUN))
    small = _with_microbatches(small, world_size, count=NUM_MICROBATCHES)
    topology = Topology.of(small.parallel, world_size, has_experts=small.model.moe is not None)
    variants = [small]
    is_sharded = small.parallel.data_parallel_sharding_strategy != "no_shard"
    if is_sharded and topology.size("tp") * topology.size("pp") > 1:
        complete = with_values(small, NO_SHARD)
        variants.append(_with_microbatches(complete, world_size, count=1))
    ranks = []
    parameters: set[str] = set()
    faults: dict[str, None] = {}
    num_operators = 0
    num_sums = 0
    if shapes is None:
        shapes = {}
    for variant in variants:
        for rank, plan in _kinds_of_ranks(variant, topology).items():
            seams = _type_rank(plan, shapes=shapes)
            ranks.append(rank)
            parameters |= seams.typed
            faults |= seams.recorder.faults
            num_operators += seams.recorder.num_operators
            num_sums += seams.recorder.num_sums
    return Proof(
        topology,
        tuple(dict.fromkeys(ranks)),
        frozenset(parameters),
        num_operators,
        num_sums,
        tuple(faults),
    )


def verdict(loaded: Loaded, world_size: int) -> list[str]:
    """Lines on a layout: the numbers that parity has compared, and the facts that types prove."""
    config = with_known_model(loaded.config, loaded.explicit)
    what = "bits" if config.precision.invariant else "numbers"
    compared = f"compared: losses, norms, gradients and weights, as {what} of the small model"
    try:
        return [compared, *prove(config, world_size).verdict()]
    except (Untypable, ScheduleError) as error:
        return [compared, f"not proved: {error}"]


def _layers_per_stage(model: ModelConfig) -> int:
    """One layer where all are equal, else two."""
    kinds = {*zip(model.mixers, model.moe_layers, model.window_layers, strict=True)}
    has_own = model.num_kv_shared_layers > 0 or model.compressed is not None
    return 2 if len(kinds) > 1 or has_own or any(model.shared_selections) else 1


def _with_microbatches(config: Config, world_size: int, *, count: int) -> Config:
    """The configuration with `count` microbatches, or as few as its schedule has."""
    if config.parallel.num_virtual_stages_per_pipeline_rank > 1:
        count = config.parallel.pipeline_model_parallel_size
    dp = config.parallel.data_parallel_size(world_size)
    return with_batch_size(config, config.train.micro_batch_size * dp * count)


def _kinds_of_ranks(config: Config, topology: Topology) -> Mapping[int, Plan]:
    """The plans of ranks that hold every kind of parameter, the ends of the pipeline first.

    A rank between them has further messages, but only of kinds that the ends send too.
    """
    plans: dict[int, Plan] = {}
    known: set[Any] = set()
    ranks = list(dict.fromkeys(topology.members(0, "pp")))
    for rank in sorted(ranks, key=lambda rank: rank not in (ranks[0], ranks[-1])):
        plan = plan_run(config, topology.world_size, rank=rank)
        kinds: set[Any] = set()
        for stage in plan.stages:
            kinds.update(_kind_of_stage(stage.params))
        if not kinds <= known:
            plans[rank] = plan
        known |= kinds
    return plans


def _kind_of_stage(params: Any) -> tuple[Any, ...]:
    """The parameters of a stage without the numbers of layers."""
    kinds = []
    for param in params:
        name = ".".join(part for part in param.spec.name.split(".") if not part.isdigit())
        kinds.append((name, param.spec.shape, param.spec.shards, param.spec.grad_sum_axes))
    return tuple(kinds)


def _type_rank(plan: Plan, *, shapes: dict[Any, Any]) -> Seams:
    """Build the run of a rank and train a step with types."""
    axes = Axes.of(plan.topology, rank=plan.rank)
    recorder = TypedRecorder(axes, plan.rank, shapes=shapes)
    seams = Seams(plan, axes, recorder)
    with (
        TemporaryDirectory() as folder,
        recorded_world(plan.topology, plan.rank, recorder=recorder) as context,
        on_meta(plan),
        seams.active(),
        recorder,
    ):
        run = build_run(plan, _run_inputs(plan, Path(folder)), context=context)
        seams.declare_weights(run)
        batch = run.batch_iterator.next()
        assert batch is not None, "no rank stops here"
        train_step(run, seams.declare_batch(batch))
        run.batch_iterator.discard()
        for data_parallel in run.data_parallel:
            data_parallel.wait_for_params()
        seams.check_weights(run)
    return seams


def _run_inputs(plan: Plan, folder: Path) -> RunInputs:
    """A run folder and mock data."""
    data = replace(DataConfig(), mock_data=True, seq_length=plan.config.data.seq_length)
    datasets = build_data(data, vocab_size=plan.shape.vocab_size, seed=0, required={"train"})
    return RunInputs(RunFolder(folder), datasets)
