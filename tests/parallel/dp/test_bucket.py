"""One bucket through its states, on one rank; the collectives are real or replaced by ones that finish late."""

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.parallel.dp import bucket as bucket_module
from nanotrain.parallel.dp.bucket import Bucket, GradPool, ReduceGroups, ResidentBucket, TransientBucket
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from tests.parallel.dp.toys import Toy, local_params

ALONE = ReduceGroups(Group.single_rank("dp_shard"), Group.single_rank("dp_replicate"))
LAYOUT = plan_layout(local_params(Toy(shapes=((7, 19), (13,), (70,)))), LayoutRules()).buckets[0]
NAMES = ["units.0.weight", "units.1.weight", "units.2.weight"]
SHAPES = dict(zip(NAMES, ((7, 19), (13,), (70,)), strict=True))
RUBBISH = 1e30


def resident() -> ResidentBucket:
    grads = torch.full((LAYOUT.numel,), RUBBISH)
    return ResidentBucket(LAYOUT, torch.zeros(LAYOUT.numel), groups=ALONE, grads=grads)


def transient(pool: GradPool | None = None) -> TransientBucket:
    pool = pool or full_pool()
    grad_shard = torch.full((LAYOUT.shard_numel,), RUBBISH)
    return TransientBucket(LAYOUT, torch.zeros(LAYOUT.numel), groups=ALONE, grad_shard=grad_shard, pool=pool)


def full_pool() -> GradPool:
    """A pool whose first storage holds what another bucket left there."""
    pool = GradPool(LAYOUT.numel + 128, device=torch.device("cpu"), dtype=torch.float32)
    pool.give(pool.take().fill_(RUBBISH))
    return pool


def fill(bucket: Bucket, value: float, *, names: list[str] = NAMES) -> None:
    bucket.expect_all()
    for name in names:
        bucket.add_grad(name, torch.full(SHAPES[name], value))


def shard_with(values: dict[str, float]) -> torch.Tensor:
    expected = torch.zeros(LAYOUT.numel)
    for slot in LAYOUT.slots:
        expected[slot.start : slot.stop] = values.get(slot.name, 0.0)
    return expected


@pytest.mark.parametrize("make", [resident, transient])
def test_microbatches_add_up_and_nothing_of_the_step_before_remains(make):
    bucket = make()
    for step in (1.0, 2.0):
        # When a step has three microbatches, reduced after each (transient) or after the last,
        bucket.begin_step()
        for _ in range(3):
            fill(bucket, step)
            if isinstance(bucket, TransientBucket):
                bucket.start_reduce()
                bucket.finish_reduce()
        if isinstance(bucket, ResidentBucket):
            bucket.start_reduce()
            bucket.finish_reduce()
        # then the shard holds their sum, and zero in gaps and padding, which began as rubbish.
        assert torch.equal(bucket.grad_shard, shard_with(dict.fromkeys(NAMES, 3 * step)))


@pytest.mark.parametrize("make", [resident, transient])
def test_a_parameter_without_a_gradient_counts_as_zero(make):
    bucket = make()
    bucket.begin_step()
    fill(bucket, 1.0)
    bucket.start_reduce()
    bucket.finish_reduce()
    # When the next step leaves a parameter out,
    bucket.begin_step()
    fill(bucket, 2.0, names=NAMES[:1])
    assert not bucket.is_ready
    bucket.start_reduce()
    bucket.finish_reduce()
    # then its gradient of the step before is gone.
    assert torch.equal(bucket.grad_shard, shard_with({NAMES[0]: 2.0}))


def test_a_bucket_is_ready_when_every_gradient_of_this_pass_has_come():
    bucket = resident()
    bucket.expect_all()
    states = []
    for name in NAMES:
        bucket.add_grad(name, torch.ones(SHAPES[name]))
        states.append(bucket.is_ready)
    assert states == [False, False, True]
    bucket.expect_all()
    assert not bucket.is_ready


def test_storage_is_lent_while_filling_and_in_flight_and_then_lent_again():
    # Given two buckets and one pool, which has storage already,
    pool = full_pool()
    one, other = transient(pool), transient(pool)
    # when they take turns,
    for bucket in (one, other, one):
        assert not bucket.is_open
        fill(bucket, 1.0)
        assert bucket.is_open
        bucket.start_reduce()
        assert bucket.is_in_flight and bucket.is_open
        bucket.finish_reduce()
        assert not bucket.is_in_flight and not bucket.is_open
    # then one storage was enough; only both at once take two.
    assert pool.num_allocated == 1
    fill(one, 1.0)
    fill(other, 1.0)
    assert pool.num_allocated == 2


def test_bf16_gradients_add_up_in_fp32():
    bucket = resident()
    bucket.begin_step()
    for _ in range(3):  # 1 + 2**-10 is not a bf16 number
        bucket.add_grad(NAMES[0], torch.ones(SHAPES[NAMES[0]], dtype=torch.bfloat16))
        bucket.add_grad(NAMES[0], torch.full(SHAPES[NAMES[0]], 2.0**-10, dtype=torch.bfloat16))
    assert torch.equal(bucket.slot(NAMES[0], bucket.grads), torch.full((7 * 19,), 3 * (1 + 2.0**-10)))


class Late(Work):
    """A reduction that reads its input only when it is waited for, as a collective in flight may."""

    def __init__(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        super().__init__(lambda: output)
        self.output, self.tensor, self.sent = output, tensor, tensor.clone()

    def wait(self) -> None:
        assert torch.equal(self.tensor, self.sent), "a gradient on its way was overwritten"
        self.output.copy_(self.tensor)


@pytest.fixture
def late(monkeypatch):
    """Replaces the reduce-scatter by one that finishes when it is waited for."""
    monkeypatch.setattr(bucket_module, "start_reduce_scatter_into", lambda output, tensor, group: Late(output, tensor))


def test_a_reduction_in_flight_ends_with_the_values_it_began_with(late):
    bucket = transient()
    bucket.begin_step()
    fill(bucket, 4.0)
    bucket.start_reduce()
    assert bucket.is_in_flight
    bucket.finish_reduce()
    assert torch.equal(bucket.grad_shard, shard_with(dict.fromkeys(NAMES, 4.0)))
