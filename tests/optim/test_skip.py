"""A step with a gradient that is not finite changes no bit of the state, under every update rule,
on the device.
"""

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.parallel import ParallelConfig
from nanotrain.topology.topology import Topology
from nanotrain.train.step import train_step
from tests.laws.worlds import Case, build_here

CASES = {
    "adam": {"optim": {"optimizer": "adam"}},
    "adam in low precision": {
        "precision": {
            "params_dtype": "bf16",
            "grad_reduce_in_bf16": True,
            "main_grads_dtype": "bf16",
            "exp_avg_dtype": "fp16",
            "use_precision_aware_optimizer": True,
        }
    },
    "sgd": {"optim": {"optimizer": "sgd"}},
    "lion": {"optim": {"optimizer": "lion"}},
    "muon": {"optim": {"optimizer": "muon"}},
    "muon and lion": {"optim": {"optimizer": "muon", "muon_scalar_optimizer": "lion"}},
}


def state_of(run) -> list[torch.Tensor]:
    params = [
        param.detach().clone() for stage in run.stages.values() for param in stage.parameters()
    ]
    return params + [tensor.clone() for tensor in run.optimizer.state_tensors().values()]


@pytest.mark.parametrize("name", CASES)
def test_a_skipped_step_changes_no_bit(name):
    run = build_here(
        ParallelContext.attach(Topology.of(ParallelConfig(), 1)), Case(steps=2).but(**CASES[name])
    )
    train_step(run, run.batch_iterator.next())
    before = state_of(run)
    bucket = run.data_parallel[0].buckets[-1]
    bucket.grads.main[bucket.update_ranges[0].elements.start + 5] = float("nan")
    update = run.optimizer.step(1e-2)
    assert update.skipped and run.optimizer.num_updates == 1
    for old, new in zip(before, state_of(run), strict=True):
        assert torch.equal(old, new), "a tensor changed"
    bucket.grads.main[bucket.update_ranges[0].elements.start + 5] = 0.0
    assert not run.optimizer.step(1e-2).skipped and run.optimizer.num_updates == 2
    assert all(tensor.isfinite().all() for tensor in state_of(run)), (
        "gaps or padding hold what the skipped step left"
    )
