"""`nanotrain parity --invariant`: the first tensor of a layout with other bits than one rank.

train one rank and N ranks   `Step`: hidden states after every part of a layer and their
                             gradients, gradients and weights, loss and gradient norm
in the order of a step       forward by layer, loss, backward by layer, gradients, norm, weights
compare_steps                the first tensor that has other bits in the layout
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.load import Loaded
from nanotrain.config.rules.check import check_layout, check_model, validate_for_world
from nanotrain.data.build import DatasetSplits
from nanotrain.model.context import BatchContext
from nanotrain.model.sublayers import Sublayers
from nanotrain.parity.bit_comparison import Hidden, Step, compare_steps
from nanotrain.parity.check import RandomDataset
from nanotrain.parity.local_ranks import run_local_ranks
from nanotrain.parity.shrink import on_one_rank, shrink
from nanotrain.plan.plan import plan_run
from nanotrain.quantities import count_of
from nanotrain.runs.folder import RunFolder
from nanotrain.topology.topology import Topology
from nanotrain.train.build import build_run
from nanotrain.train.inputs import with_known_model
from nanotrain.train.run import Run, RunInputs
from nanotrain.train.step import train_step


@dataclass(frozen=True)
class BitReport:
    """The result of the comparison."""

    world_size: int  # ranks of the layout
    num_steps: int
    num_tensors: int  # tensors of all steps that were compared, up to the first difference
    num_left_out: int  # gradients of outputs that one rank does not compute: not compared
    difference: str  # the first difference in words; empty if all bits are equal

    @property
    def holds(self) -> bool:
        """Whether all bits are equal."""
        return not self.difference

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self) | {"holds": self.holds}, indent=2)

    def text(self) -> str:
        """The report for a terminal."""
        steps = count_of(self.num_steps, "step")
        if self.difference:
            return f"NOT EQUAL: {self.difference}"
        ranks = count_of(self.world_size, "rank", verb="trains")
        text = (
            f"equal: {ranks} as one does in every bit of {steps}, {self.num_tensors:,} tensors: "
            "hidden states and their gradients by layer, gradients, weights, losses and norms"
        )
        if self.num_left_out:
            gradients = count_of(self.num_left_out, "gradient")
            text += f"; not compared: {gradients} of hidden states, which one rank does not compute"
        return text


def check_bits(loaded: Loaded, world_size: int, *, num_steps: int) -> BitReport:
    """Train a shrunk form of a configuration with `--invariant` on one rank and on N ranks.

    Args:
        loaded: validated configuration with `--invariant`.
        world_size: number of ranks, N, which are processes on this machine.
        num_steps: number of optimizer steps.

    Raises:
        TopologyError: the layout does not fit the ranks.
        ConfigError: the small model, or the layout, has no invariant form.
    """
    small, single = small_configs(loaded, world_size, num_steps=num_steps)
    (reference,) = run_local_ranks(_topology(single, 1), record_bits, arguments=[single])
    topology = _topology(small, world_size)
    records = run_local_ranks(topology, record_bits, arguments=[small])
    result = compare_steps(reference, records)
    return BitReport(
        world_size,
        num_steps,
        num_tensors=result.num_tensors,
        num_left_out=result.num_left_out,
        difference=result.difference,
    )


def _topology(config: Config, world_size: int) -> Topology:
    """The topology of a configuration; TopologyError if its layout does not fit the ranks."""
    return Topology.of(config.parallel, world_size, has_experts=config.model.moe is not None)


def small_configs(loaded: Loaded, world_size: int, *, num_steps: int) -> tuple[Config, Config]:
    """The shrunk form of a configuration in its layout and on one rank; checks both.

    Raises:
        TopologyError: the layout does not fit the ranks.
        ConfigError: the small model, or the layout, has no invariant form.
    """
    config = with_known_model(loaded.config, loaded.explicit)
    _topology(config, world_size)
    small = shrink(config, world_size, num_steps=num_steps)
    small = replace(small, precision=config.precision)
    validate_for_world(small, world_size, expected_dp=loaded.data_parallel_size)
    single = on_one_rank(small)
    fused = config.parallel.gradient_accumulation_fusion
    one_rank = replace(single.parallel, gradient_accumulation_fusion=fused)
    single = replace(single, parallel=one_rank)
    for checked in (small, single):
        check_model(checked)
        check_layout(checked)
    return small, single


def record_bits(context: ParallelContext, config: Config) -> list[Step]:
    """Train a shrunk configuration on this rank for `train_iters` steps."""
    steps = []
    with TemporaryDirectory(prefix="nanotrain-parity-") as folder:
        plan = plan_run(config, context.topology.world_size, rank=context.rank)
        data = DatasetSplits(RandomDataset(config), None, None)
        run = build_run(plan, RunInputs(RunFolder(Path(folder)), data), context=context)
        recorder = _HiddenRecorder(context)
        for stage in run.stages.values():
            recorder.attach(stage)
        try:
            for _ in range(config.train.train_iters):
                recorder.step = Step(layers=recorder.layers)
                _train_step(run, recorder.step)
                steps.append(recorder.step)
        finally:
            run.batches.close()
    return steps


def _train_step(run: Run, step: Step) -> None:
    """Train a step and add its results."""
    batch = run.batch_iterator.next()
    assert batch is not None, "no rank stops early here"
    result = train_step(run, batch)
    step.loss = result.loss
    step.grad_norm = result.grad_norm
    step.grads = {box: grad.clone() for box, grad in run.optimizer.grad_tensors().items()}
    for box, tensor in run.optimizer.tensors_to_save("model").items():
        step.weights[replace(box, name=box.name.removeprefix("model/"))] = tensor.clone()


class _HiddenRecorder:
    """Records outputs of layers and of their parts, and the gradients of these outputs.

    A recomputed forward records nothing: the first forward has the outputs, and their gradients.

    Args:
        context: context of this rank.

    Attributes:
        step: where results are recorded.
        layers: names of the layers whose outputs have to be recorded.
    """

    def __init__(self, context: ParallelContext) -> None:
        self.step = Step()
        self.layers: list[str] = []
        self._tp = context.groups["tp"]

    def attach(self, stage: nn.Module) -> None:
        """Record the outputs of a stage."""
        running: list[BatchContext] = []

        def begin(_: nn.Module, args: tuple[Any, ...]) -> None:
            running[:] = [args[1]]

        def record(name: str, out: Any) -> None:
            if isinstance(out, Tensor) and out.ndim == 3:
                self._record_output(name, out, context=running[0])

        def observe(module: nn.Module, name: str) -> None:
            module.register_forward_hook(lambda _, args, out: record(name, out))

        stage.register_forward_pre_hook(begin)
        for name, module in stage.named_modules():
            if isinstance(module, Sublayers):
                self.layers.append(name)
                observe(module, name)
                for part, child in module.named_children():
                    if not isinstance(child, nn.Identity):
                        observe(child, f"{name}.{part}")

    def _record_output(self, name: str, out: Tensor, *, context: BatchContext) -> None:
        """Record an output now, and its gradient once a backward computes it."""
        samples = context.batch.sample_ids
        assert samples is not None, "the loader numbers samples"
        known = self.step.forward.setdefault(name, [])
        if any(torch.equal(hidden.samples, samples) for hidden in known):
            return
        known.append(Hidden(samples, self._positions(out, context), out.detach().clone()))
        if not out.requires_grad:
            return
        gradients = self.step.backward.setdefault(name, [])

        def add_gradient(grad: Tensor) -> None:
            gradients.append(Hidden(samples, self._positions(grad, context), grad.clone()))

        out.register_hook(add_gradient)

    def _positions(self, values: Tensor, context: BatchContext) -> Tensor:
        """[S'] int64, the positions of hidden states [B, S', H] in the full sequence."""
        positions = context.sequence_positions
        if positions is None:
            positions = torch.arange(context.batch.tokens.shape[1])
        num_local = values.shape[1]
        if num_local == len(positions):
            return positions
        return positions[num_local * self._tp.index :][:num_local]  # sequence parallelism
