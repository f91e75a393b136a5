"""On one GPU: update rules give the values of a CPU, also with state in host memory, whose copies
race with nothing.
"""

from dataclasses import replace

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import OptimConfig
from nanotrain.config.parallel import ParallelConfig
from nanotrain.topology.topology import Topology
from tests.optim.test_distributed import CONFIG, Trainee, grads_of
from tests.optim.test_muon import CONFIG as MUON

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RULES = {
    "adam": CONFIG,
    "sgd": replace(CONFIG, optimizer="sgd"),
    "lion": replace(CONFIG, optimizer="lion"),
    "muon": replace(MUON, muon_fp32_matmul_prec="highest"),
}
SHAPES = ((700, 400), (1300,), (500, 600))


def weights_on(kind: str, config: OptimConfig) -> dict[str, torch.Tensor]:
    ctx = ParallelContext.attach(Topology.of(ParallelConfig(), 1))
    device = torch.device(kind)
    trainee = Trainee(
        ctx, "no_shard", config=config, shapes=SHAPES, device=device, bucket_size=100_000
    )
    for step in range(5):
        trainee.step(grads_of(0, step, shapes=SHAPES))
    return {name: weight.cpu() for name, weight in trainee.weights().items()}


@pytest.mark.parametrize("rule", RULES)
def test_a_gpu_updates_as_a_cpu_does(rule):
    expected = weights_on("cpu", RULES[rule])
    for fraction in (0.0, 0.5, 1.0):
        config = replace(
            RULES[rule],
            optimizer_cpu_offload=fraction > 0,
            optimizer_offload_fraction=fraction or 1.0,
        )
        for name, weight in weights_on("cuda", config).items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-5)
