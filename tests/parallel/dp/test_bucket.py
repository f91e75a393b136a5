"""One bucket on one rank, with either gradient store; its collectives are real or finish late, in `wait`."""

from types import SimpleNamespace

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.parallel.dp import reduction as reduction_module
from nanotrain.parallel.dp.bucket import Bucket
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.parallel.dp.reduction import ReduceGroups, Reduction
from nanotrain.parallel.dp.stores import GradPool, GradStore, ResidentGrads, ResidentParams, TransientGrads
from tests.parallel.dp.toys import Toy, local_params

GROUPS = ReduceGroups(Group.single_rank("dp_shard"), Group.single_rank("dp_replicate"))
LAYOUT = plan_layout(local_params(Toy(shapes=((7, 19), (13,), (70,)))), LayoutRules()).buckets[0]
NAMES = ["units.0.weight", "units.1.weight", "units.2.weight"]
SHAPES = dict(zip(NAMES, ((7, 19), (13,), (70,)), strict=True))
GARBAGE = 1e30


def bucket_with(grads: GradStore) -> Bucket:
    params = ResidentParams(torch.zeros(LAYOUT.numel), groups=GROUPS)
    return Bucket(LAYOUT, params=params, grads=grads, reduction=Reduction(GROUPS))


def resident() -> Bucket:
    return bucket_with(ResidentGrads(torch.full((LAYOUT.numel,), GARBAGE), groups=GROUPS))


def transient() -> Bucket:
    pool = GradPool(LAYOUT.numel + 128, device=torch.device("cpu"), dtype=torch.float32)
    pool.release(pool.acquire().fill_(GARBAGE))  # what another bucket left there
    shard = torch.full((LAYOUT.shard_numel,), GARBAGE)
    return bucket_with(TransientGrads(LAYOUT.numel, shard, pool=pool, groups=GROUPS))


def fill(bucket: Bucket, value: float, *, names: list[str] = NAMES) -> None:
    bucket.begin_backward()
    for name in names:
        bucket.add_grad(name, torch.full(SHAPES[name], value))


def reduce(bucket: Bucket, *, is_last: bool = True) -> None:
    bucket.start_reduce(is_last=is_last)
    bucket.finish_reduce()


def shard_with(values: dict[str, float]) -> torch.Tensor:
    expected = torch.zeros(LAYOUT.numel)
    for entry in LAYOUT.params:
        expected[entry.start : entry.stop] = values.get(entry.name, 0.0)
    return expected


@pytest.mark.parametrize("make", [resident, transient])
def test_microbatches_accumulate_and_nothing_of_the_last_step_remains(make):
    bucket = make()
    for step in (1.0, 2.0):
        # When a step has three microbatches, reduced after each (transient) or after the last,
        bucket.begin_step()
        for microbatch in range(3):
            fill(bucket, step)
            if make is transient or microbatch == 2:
                reduce(bucket, is_last=microbatch == 2)
        # then the shard holds their sum, and zero in gaps and padding, which were garbage.
        assert torch.equal(bucket.grads.shard, shard_with(dict.fromkeys(NAMES, 3 * step)))


@pytest.mark.parametrize("make", [resident, transient])
def test_a_parameter_without_a_gradient_contributes_zero(make):
    bucket = make()
    bucket.begin_step()
    fill(bucket, 1.0)
    reduce(bucket)
    # When the next step has no gradient of two parameters,
    bucket.begin_step()
    fill(bucket, 2.0, names=NAMES[:1])
    assert not bucket.is_ready
    reduce(bucket)
    # then their gradients of the last step are gone.
    assert torch.equal(bucket.grads.shard, shard_with({NAMES[0]: 2.0}))


def test_a_bucket_is_ready_when_every_gradient_of_this_backward_was_added():
    bucket = resident()
    bucket.begin_backward()
    states = []
    for name in NAMES:
        bucket.add_grad(name, torch.ones(SHAPES[name]))
        states.append(bucket.is_ready)
    assert states == [False, False, True]
    bucket.begin_backward()
    assert not bucket.is_ready


def test_bf16_gradients_accumulate_in_fp32():
    bucket = resident()
    bucket.begin_step()
    for _ in range(3):  # 1 + 2**-10 is not a bf16 number
        bucket.add_grad(NAMES[0], torch.ones(SHAPES[NAMES[0]], dtype=torch.bfloat16))
        bucket.add_grad(NAMES[0], torch.full(SHAPES[NAMES[0]], 2.0**-10, dtype=torch.bfloat16))
    assert torch.equal(bucket.view(NAMES[0], bucket.grads.full()), torch.full((7 * 19,), 3 * (1 + 2.0**-10)))


class LateReduceScatter(Work):
    """A reduce-scatter over two ranks that reads its input in `wait`, as a collective in flight may."""

    def __init__(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        super().__init__(lambda: output)
        self.output, self.tensor, self.sent = output, tensor, tensor.clone()

    def wait(self) -> None:
        assert torch.equal(self.tensor, self.sent), "a gradient in flight was overwritten"
        self.output.copy_(self.tensor[: self.output.numel()])


def late_groups(monkeypatch) -> ReduceGroups:
    """A shard group of two ranks, of which this is the first, whose collectives are `LateReduceScatter`."""
    monkeypatch.setattr(
        reduction_module,
        "start_reduce_scatter_into",
        lambda output, tensor, group, op: LateReduceScatter(output, tensor),
    )
    return ReduceGroups(SimpleNamespace(size=2, index=0), GROUPS.replicate)  # type: ignore[arg-type]


def test_a_reduction_in_flight_keeps_its_storage_and_ends_with_the_values_it_began_with(monkeypatch):
    groups = late_groups(monkeypatch)
    pool = GradPool(LAYOUT.numel, device=torch.device("cpu"), dtype=torch.float32)
    half = LAYOUT.numel // 2
    grads = TransientGrads(LAYOUT.numel, torch.zeros(half), pool=pool, groups=groups)
    params = ResidentParams(torch.zeros(LAYOUT.numel), groups=groups)
    bucket = Bucket(LAYOUT, params=params, grads=grads, reduction=Reduction(groups))
    bucket.begin_step()
    fill(bucket, 4.0)
    bucket.start_reduce(is_last=True)
    assert bucket.is_in_flight and grads.holds_pooled
    bucket.finish_reduce()
    assert not bucket.is_in_flight and not grads.holds_pooled
    assert torch.equal(bucket.grads.shard, shard_with(dict.fromkeys(NAMES, 4.0))[:half])
