"""What a rank adds to the gradient norm and saves of one bucket, from plans; test_distributed.py has values."""

from types import SimpleNamespace

import pytest
import torch

from nanotrain.config.load import load_config
from nanotrain.optim.bucket_state import BucketState
from nanotrain.train.plans.plan import plan_run

LINE = "+config=tiny --vocab-size 2048 --tensor-model-parallel-size 2 --data-parallel-sharding-strategy optim"


def states_of(rank: int, replica: tuple[int, int] = (0, 1)) -> list[BucketState]:
    """The buckets of a rank, 4 ranks with tp 2; gradients are 1, 2, 3, ..., gaps and padding zero; no parts."""
    states = []
    for buffer in plan_run(load_config([*LINE.split(), "--ddp-bucket-size", "50000"]), 4, rank=rank).buffers:
        for layout in buffer.layout.buckets:
            ranges, grads = layout.update_ranges(buffer.shard.index, outer_index=0), torch.zeros(layout.update_numel)
            for part in ranges:
                grads[part.elements] = torch.arange(part.elements.start, part.elements.stop).float() + 1
            bucket = SimpleNamespace(update_ranges=ranges, layout=layout, grads=SimpleNamespace(main=grads))
            states.append(BucketState(bucket, replica, parts=()))
    return states


def test_the_norm_takes_the_gradients_of_replica_0_and_leaves_nothing_else_out() -> None:
    states, num_left_out = states_of(1), 0
    assert len(states) > 1
    for state in states:
        expected = state.grads.clone()
        for part in state.ranges:
            if not part.param.is_first_replica:
                expected[part.elements], num_left_out = 0, num_left_out + 1
        taken = torch.cat([torch.zeros(0), *state.grads_for_norm()])
        assert taken[taken > 0].tolist() == expected[expected > 0].tolist()
    assert num_left_out  # norms are replicated over tp


def test_a_bucket_without_other_replicas_is_one_tensor_of_the_norm() -> None:
    for state in states_of(0):
        [grads] = state.grads_for_norm()
        assert grads.data_ptr() == state.grads.data_ptr() and grads.shape == state.grads.shape


@pytest.mark.parametrize("rank", [0, 1])
def test_of_ranks_that_update_the_same_part_the_first_adds_to_the_norm_and_each_saves_a_part(rank: int) -> None:
    first, second = states_of(rank, (0, 2)), states_of(rank, (1, 2))
    assert not [grads for state in second for grads in state.grads_for_norm()]
    for one, other in zip(first, second, strict=True):
        boxes = [box for state in (one, other) for box, _ in state.grad_tensors(state.ranges_to_save)]
        num_expected = sum(part.numel for part in one.ranges if part.param.is_first_replica)
        assert len(boxes) == len(set(boxes)) and sum(box.box.numel for box in boxes) == num_expected
