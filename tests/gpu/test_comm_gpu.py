"""On one GPU: NCCL starts, collectives run, memory is counted."""

import os

import pytest
import torch
import torch.distributed as dist

from nanotrain.comm import collectives
from nanotrain.comm import device as devices
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.work import Work
from nanotrain.topology.groups import GroupSpec
from nanotrain.topology.topology import Topology
from tests.harness import parallel_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def nccl_world(monkeypatch, tmp_path):
    """The context of a torchrun job of one rank on a GPU."""
    with_torchrun = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    for name, value in with_torchrun.items():
        monkeypatch.setitem(os.environ, name, value)
    with ParallelContext.start(
        Topology.of(parallel_config(), 1), device="cuda", timeout_s=60
    ) as ctx:
        yield ctx


def test_the_context_takes_the_gpu_and_joins_over_nccl(nccl_world):
    assert nccl_world.device == torch.device("cuda", 0)
    assert torch.cuda.current_device() == 0
    assert dist.get_backend() == "nccl"
    assert devices.process_group_device(dist.group.WORLD).type == "cuda"
    collectives.barrier(nccl_world.control)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nccl_runs_the_collectives_under_the_names_this_torch_has(nccl_world, dtype):
    group = Group(GroupSpec.single_rank("world"), dist.group.WORLD)
    full, part = (
        torch.arange(8, device="cuda").to(dtype),
        torch.empty(8, device="cuda", dtype=dtype),
    )
    scatter = collectives._reduce_scatter_flat(part, full, group=dist.group.WORLD, async_op=True)
    Work(lambda: None, op="reduce_scatter", group=group, handles=[scatter]).wait()
    gathered = torch.empty_like(part)
    gather = collectives._all_gather_flat(gathered, part, group=dist.group.WORLD, async_op=True)
    Work(lambda: None, op="all_gather", group=group, handles=[gather]).wait()
    reduce = dist.all_reduce(gathered, group=dist.group.WORLD, async_op=True)
    Work(lambda: None, op="all_reduce", group=group, handles=[reduce]).wait()
    assert torch.equal(gathered.cpu(), torch.arange(8).to(dtype))


def test_peak_memory_counts_from_its_reset():
    device = devices.pick_device("cuda", 0)
    devices.reset_peak_memory(device)
    before = devices.peak_memory(device)
    block = torch.empty(32 << 20, dtype=torch.uint8, device=device)
    devices.synchronize(device)
    assert devices.peak_memory(device) - before >= block.nbytes
    assert devices.device_name(device)
