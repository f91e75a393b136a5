"""`--replay-interval`: compare a rank with its replicas, against hardware that errs without a sign.

    before the step   the first microbatch goes to a rank of another replica, on another host where
                      there is one, which computes it; its loss and gradients come back as checksums
    in the step       the loss and the gradients of the first microbatch are summed before they are
                      reduced
    before the update both are compared; where they differ, a third replica computes the microbatch
                      too, and the run ends with the name of the rank that is alone.
                      main parameters and moments, which have no replica, are compared with
                      checksums from the end of the step before

A rank that repeats its own step, as `--rerun-mode` does, misses a processor that always errs alike.
On a CPU without `--torch-compile`, and with `--deterministic-mode`, results are compared bit for
bit; elsewhere norms and projections of gradients within `TOLERANCE`.
"""

import pickle
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nanotrain.comm.collectives import all_gather_object, all_reduce_scalars
from nanotrain.comm.group import Group
from nanotrain.comm.hosts import gather_hosts
from nanotrain.comm.send_recv import Message, start_send_recv
from nanotrain.data.batch import Batch
from nanotrain.errors import CorruptState
from nanotrain.log import get_logger
from nanotrain.optim.distributed import Update
from nanotrain.parallel.dp.bucket import Bucket
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.pp.actions import Action, ActionKind
from nanotrain.parallel.pp.executor import run_schedule
from nanotrain.parallel.pp.transfers import RankPlan
from nanotrain.quantities import count_of, named_ranks
from nanotrain.spec.boxes import TensorBox
from nanotrain.topology.replays import replay_distances, replica_of
from nanotrain.train.batches import GlobalBatch, raise_on_all
from nanotrain.train.hooks.faults import checksum
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.parts.part import StepPart
from nanotrain.train.run import Run, StepSchedules
from nanotrain.train.step import microbatch_contexts

# Relative difference of a gradient's norm, and of its projection, that kernels without a fixed
# order of sums may cause. bf16 sums of another order differ by 0.4 % per element, and by less in a
# norm.
TOLERANCE = 0.01
HASH_FACTOR = 2654435761  # multiplicative hashing of an index (Knuth, volume 3, 6.4)
MODULE_FIELDS = ("_modules", "_parameters")  # of an nn.Module, which a pass does not change
log = get_logger(__name__)


class ReplayHook(Hook):
    """Adds the replay to the parts of every step."""

    def before_training(self, run: Run) -> None:
        run.parts.by_name["replay"] = Replay(run)


@dataclass(frozen=True)
class Finding:
    """A first microbatch on whose results two ranks do not agree."""

    suspects: tuple[int, ...]  # ranks of which one errs
    witnesses: tuple[int, ...]  # ranks that agree with each other
    differing: tuple[str, ...]  # "the loss", "layers.0.mlp.fc1.weight (bucket 2)"
    num_compared: int


class Replay(StepPart):
    """The comparison of the first microbatch of each rank with a replica's result for it.

    Args:
        run: the run; it has a second replica along data parallelism.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._dp = run.context.group("dp")
        self._hosts = gather_hosts(run.context.control)
        self._distances = replay_distances(run.context.topology, self._hosts)
        train = run.config.train
        is_plain_cpu = run.context.device.type == "cpu" and not train.torch_compile
        self._is_exact = is_plain_cpu or train.deterministic_mode
        self._observer = _Observer(run, is_exact=self._is_exact)
        self._schedules = StepSchedules(run.plan)
        self._batch: GlobalBatch | None = None  # of a step that is compared
        self._replayed = torch.empty(0)  # what the replica made of the first microbatch
        self._is_replaying = False
        self._state_sums: Tensor | None = None  # of the optimizer, after the step before

    def context(self, batch: GlobalBatch, counts: Sequence[float]) -> dict[str, Any]:
        """Have the first microbatch of a step computed by a replica, and observe the step."""
        if self._is_replaying or not self._is_due(self._run.state.step + 1):
            return {}
        self._batch = batch
        with _restoring_state(self._run):
            self._replayed = self._replay(self._distances[0])
        self._observer.begin(self._run.schedules.of(len(batch.microbatches)))
        return {}

    def sums(self, *, is_logged: bool) -> None:
        """Compare the step with the replay, before the optimizer changes the weights.

        Raises:
            CorruptState: ranks differ; on every rank.
        """
        if self._batch is None or self._is_replaying:
            return
        raise_on_all(self._state_fault(), self._run.context.control)
        observed = self._observer.take()
        differs = self._differences(observed, self._replayed)
        (num_different,) = all_reduce_scalars([float(bool(differs))], self._run.context.control)
        if num_different:
            self._raise_fault(observed, differs)
        self._batch = None

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """Keep checksums of the state of the optimizer before a step that is compared."""
        if self._is_due(self._run.state.step + 2):
            self._state_sums = self._sum_state()
        return sums

    def restored(self, missing: Collection[TensorBox], *, checkpoint: Path | None) -> None:
        """Forget the checksums: the optimizer has the state of a checkpoint now."""
        self._state_sums = None

    def _is_due(self, step: int) -> bool:
        return step % self._run.config.train.replay_interval == 0

    def _sum_state(self) -> Tensor:
        """[n] int64, checksums of main parameters and moments of this rank."""
        tensors = self._run.optimizer.state_tensors().values()
        return torch.stack([checksum(tensor) for tensor in tensors])

    def _state_fault(self) -> CorruptState | None:
        """The error of a rank whose optimizer state changed between two steps; None for none."""
        if self._state_sums is None:
            return None
        changed = (self._sum_state() != self._state_sums).nonzero().flatten().tolist()
        self._state_sums = None
        if not changed:
            return None
        names = [box.name for box in self._run.optimizer.state_tensors()]
        host = self._hosts[self._run.context.rank].name
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return CorruptState(
            f"rank {self._run.context.rank} (host {host}) holds other optimizer state than after "
            f"step {self._run.state.step}",
            why=f"{names[changed[0]]}{more} changed between two steps: its memory is faulty",
            fix=f"exclude host {host}; the same command resumes from the newest checkpoint",
        )

    def _replay(self, distance: int) -> Tensor:
        """The result of a replica for the first microbatch of this rank."""
        assert self._batch is not None, "a step is compared"
        group = self._dp
        computes_own = (group.index + distance) % group.size
        owner = (group.index - distance) % group.size
        device = self._run.context.device
        own = pickle.dumps(_on_host(self._batch.microbatches[0]))
        theirs = _exchange(own, group, to=computes_own, source=owner, device=device)
        microbatch: Batch = pickle.loads(theirs).to(device)
        result = self._compute(microbatch)
        return _exchange_tensor(result, group, to=owner, source=computes_own)

    def _compute(self, microbatch: Batch) -> Tensor:
        """The result of this rank for a microbatch, with the weights and scales of the step."""
        run, batch = self._run, self._batch
        assert batch is not None, "a step is compared"
        one = replace(batch, microbatches=(microbatch,))
        scale = run.loss_scale / max(batch.num_target_tokens, 1)
        self._is_replaying = True
        try:
            for dp in run.data_parallel:
                dp.begin_step()
            plan = self._schedules.of(1)
            self._observer.begin(run.schedules.of(len(batch.microbatches)))
            run_schedule(
                plan,
                run.runnable,
                microbatches=microbatch_contexts(run, one, loss_scale=scale),
                grad_scale=scale,
                pipeline=replace(
                    run.pipeline, hidden_shape=batch.settings.hidden_shape, stop_point=None
                ),
            )
            for dp in run.data_parallel:
                dp.finish_grad_reduce()
                dp.begin_step()
        finally:
            self._is_replaying = False
        return self._observer.take()

    def _differences(self, result: Tensor, other: Tensor) -> list[int]:
        """The rows in which two results differ."""
        if self._is_exact:
            return (result != other).any(1).nonzero().flatten().tolist()
        scale = result[:, :1].abs().maximum(other[:, :1].abs())
        differs = ~((result - other).abs() <= TOLERANCE * scale)
        return differs.any(1).nonzero().flatten().tolist()

    def _raise_fault(self, observed: Tensor, differs: Sequence[int]) -> None:
        """Ask a third replica, and end the run on all ranks."""
        finding: Finding | None = self._vote(observed)
        if finding is not None:
            rows = self._observer.rows
            finding = replace(finding, differing=tuple(rows[index] for index in differs))
        findings = all_gather_object(finding if differs else None, self._run.context.control)
        names = [host.name for host in self._hosts]
        step = self._run.state.step + 1
        raise describe([found for found in findings if found], names, step=step)

    def _vote(self, observed: Tensor) -> Finding:
        """Which rank is alone with its result for the first microbatch of this rank."""
        if len(self._distances) == 1:
            return self._compute_both_again(observed)
        rank = self._run.context.rank
        replica, third = (
            replica_of(self._run.context.topology, rank, distance=distance)
            for distance in self._distances
        )
        result = self._replay(self._distances[1])
        if not self._differences(result, self._replayed):
            return Finding((rank,), (replica, third), (), len(observed))
        if not self._differences(result, observed):
            return Finding((replica,), (rank, third), (), len(observed))
        return Finding((rank, replica, third), (), (), len(observed))

    def _compute_both_again(self, observed: Tensor) -> Finding:
        """Without a third replica: a fault that does not come again shows which of two it was."""
        assert self._batch is not None, "a step is compared"
        rank = self._run.context.rank
        replica = replica_of(self._run.context.topology, rank, distance=self._distances[0])
        replica_result = self._replay(self._distances[0])
        own_result = self._compute(self._batch.microbatches[0])
        if not self._differences(own_result, replica_result):
            if not self._differences(own_result, self._replayed):
                return Finding((rank,), (), (), len(observed))
            if not self._differences(own_result, observed):
                return Finding((replica,), (), (), len(observed))
        return Finding((rank, replica), (), (), len(observed))


class _Observer:
    """Takes the loss and the gradients of the first microbatch of a pass, before reductions.

    Args:
        run: the run.
        is_exact: sums of bits; else norm and projection.
    """

    def __init__(self, run: Run, *, is_exact: bool) -> None:
        self._device = run.context.device
        self._measure = _bits if is_exact else _norm_and_projection
        self._buckets: list[Bucket] = []
        for dp in run.data_parallel:
            if isinstance(dp, DataParallel):
                self._buckets += dp.buckets
        self.rows = ["the loss"]
        # in the order of the layout, which all ranks have in common
        self._names = [_names_of(bucket) for bucket in self._buckets]
        for number, names in enumerate(self._names):
            self.rows += [f"{name} (bucket {number})" for name in names]
        self._loss: Tensor | None = None
        self._is_observing = False
        self._grads: dict[int, dict[str, Tensor]] = {}  # by bucket
        self._skips_ahead = False
        for stage in run.stages.values():
            if stage.head is not None:
                stage.register_forward_hook(self._take_loss)

    def begin(self, plan: RankPlan) -> None:
        """Observe the next pass.

        Args:
            plan: schedule of a step: where forwards of several microbatches come before the first
                backward, gradients that forwards write are those of several.
        """
        self._skips_ahead = _has_early_forwards(plan)
        self._loss = None
        self._grads = {}
        self._is_observing = True
        for number, bucket in enumerate(self._buckets):
            bucket.observer = partial(self._take_grads, number)

    def take(self) -> Tensor:
        """[1 + parameters, n] the measures of the loss and of each gradient; ends the pass."""
        self._is_observing = False
        zero = self._measure(torch.zeros(1, device=self._device))
        rows = [zero if self._loss is None else self._measure(self._loss)]
        for number, bucket in enumerate(self._buckets):
            bucket.observer = None
            grads = self._grads.get(number, {})
            rows += [grads.get(name, zero) for name in self._names[number]]
        return torch.stack(rows)

    def _take_loss(self, module: nn.Module, *inputs_and_output: Any) -> None:
        if self._is_observing and self._loss is None:
            self._loss = inputs_and_output[-1].detach().clone().reshape(1)

    def _take_grads(self, number: int, bucket: Bucket) -> None:
        """Keep measurements of the gradients that a bucket has received, once."""
        if number in self._grads:
            return
        written = bucket.written_grads(with_ahead=not self._skips_ahead)
        self._grads[number] = {name: self._measure(grad) for name, grad in written.items()}


def _names_of(bucket: Bucket) -> list[str]:
    return [entry.name for entry in bucket.layout.params]


def _bits(tensor: Tensor) -> Tensor:
    """[1] int64, a sum that any flipped bit changes."""
    return checksum(tensor)[None]


def _norm_and_projection(tensor: Tensor) -> Tensor:
    """[2] fp64, the norm, and the product with a fixed vector of pseudo-random signs."""
    values = tensor.detach().flatten().double()
    index = torch.arange(len(values), device=values.device)
    signs = 1.0 - 2.0 * ((index * HASH_FACTOR >> 16) & 1)
    return torch.stack([values.norm(), values @ signs.double()])


def _has_early_forwards(plan: RankPlan) -> bool:
    """Whether this rank runs two forwards of its last stage before the first backward of it."""
    last = plan.num_stages - 1
    num_forwards = 0
    for step in plan.steps:
        for action in step if isinstance(step, tuple | list) else (step,):
            if isinstance(action, Action) and action.stage == last:
                if action.kind is not ActionKind.forward:
                    return num_forwards > 1
                num_forwards += 1
    return False


@contextmanager
def _restoring_state(run: Run) -> Iterator[None]:
    """Restore the statistics and other state of modules and parts after the block.

    A replay runs passes that are not part of the step; forward passes change such state.
    """
    owners: list[dict[str, Any]] = []
    for stage in run.stages.values():
        for module in stage.modules():
            owners += [module.__dict__, module._buffers]
    owners += [vars(part) for part in run.parts if not isinstance(part, Replay)]
    kept = []
    for owner in owners:
        entries = {key: value for key, value in owner.items() if key not in MODULE_FIELDS}
        tensors = [leaf for leaf in tree_leaves(entries) if type(leaf) is Tensor]
        kept.append((owner, dict(owner), [(tensor, tensor.clone()) for tensor in tensors]))
    yield
    for owner, entries, values in kept:
        owner.clear()
        owner.update(entries)
        for tensor, before in values:
            tensor.copy_(before)


def describe(findings: Sequence[Finding], hosts: Sequence[str], *, step: int) -> CorruptState:
    """The error for ranks that differ from their replicas; the same on every rank.

    Args:
        findings: findings of all ranks, at least one.
        hosts: the host of each rank.
        step: the step.
    """
    decided = [finding for finding in findings if len(finding.suspects) == 1]
    chosen = decided or list(findings)
    suspects = sorted({rank for finding in chosen for rank in finding.suspects})
    names = sorted({hosts[rank] for rank in suspects})
    first = chosen[0]
    where = ", ".join(names)
    if decided:  # "host" before each name is what a verdict reads
        named = ", ".join(f"host {name}" for name in names)
        what = f"{named_ranks(suspects)} ({named}) computed step {step} wrong"
        fix = f"exclude {named}"
    else:
        what = f"{named_ranks(suspects)} (hosts {where}) disagree on step {step}"
        fix = f"test the hosts {where}, one of which errs; exclude both until then"
    differing = count_of(len(first.differing), "result")
    why = f"of a first microbatch, {differing} of {first.num_compared} (loss and gradients before "
    why += f"their reduction) differ from those of a replica, the first is {first.differing[0]}"
    if first.witnesses:
        why += f"; {named_ranks(sorted(first.witnesses))} agree"
    return CorruptState(
        what, why=why, fix=f"{fix}; the same command resumes from the newest checkpoint"
    )


def _on_host(batch: Batch) -> Batch:
    """The batch in host memory."""
    return batch.to("cpu")


def _exchange(payload: bytes, group: Group, *, to: int, source: int, device: torch.device) -> bytes:
    """Send bytes to one rank of a group, and receive bytes from another."""
    sent = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    sizes = _exchange_tensor(torch.tensor([len(sent)], device=device), group, to=to, source=source)
    received = torch.empty(int(sizes), dtype=torch.uint8, device=device)
    _send_receive(sent, received, group=group, to=to, source=source)
    return received.cpu().numpy().tobytes()


def _exchange_tensor(tensor: Tensor, group: Group, *, to: int, source: int) -> Tensor:
    """Send a tensor to one rank of a group, and receive one of its shape from another."""
    received = torch.empty_like(tensor)
    _send_receive(tensor.contiguous(), received, group=group, to=to, source=source)
    return received


def _send_receive(sent: Tensor, received: Tensor, *, group: Group, to: int, source: int) -> None:
    """Send a tensor to one rank of a group and receive one from another, and wait for both."""
    started = start_send_recv([Message(sent, to)], [Message(received, source)], group=group)
    started.received[0].wait()
    started.sent.wait()
