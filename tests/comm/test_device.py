"""Devices on a machine without a GPU; no other file uses torch.cuda."""

from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nanotrain
from nanotrain.comm import device as devices
from nanotrain.errors import EnvironmentFault
from tests.harness import ranks

CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def gpus(monkeypatch, count: int) -> list[torch.device]:
    """Pretend that `count` GPUs are there; returns the list of devices made current."""
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    return made_current


@pytest.mark.parametrize("kind", ["auto", "cpu"])
def test_without_a_gpu_the_cpu_is_chosen(no_gpu, kind):
    assert devices.pick_device(kind, 0) == CPU


def test_a_missing_gpu_is_an_error_with_a_fix(no_gpu):
    with pytest.raises(EnvironmentFault, match=r"finds no GPU.*--device cpu"):
        devices.pick_device("cuda", 0)


def test_each_local_rank_makes_its_own_gpu_current(monkeypatch):
    made_current = gpus(monkeypatch, 2)
    assert devices.pick_device("auto", 1, environment={}) == torch.device("cuda", 1)
    assert made_current == [torch.device("cuda", 1)]


def test_a_rank_that_slurm_shows_one_gpu_takes_it(monkeypatch):
    made_current = gpus(monkeypatch, 1)
    own = {"CUDA_VISIBLE_DEVICES": "3", "SLURM_LOCALID": "3"}
    assert devices.pick_device("cuda", 3, environment=own) == torch.device("cuda", 0)
    assert made_current == [torch.device("cuda", 0)]
    # torchrun inside of one task of Slurm: its ranks would share the GPU
    with pytest.raises(EnvironmentFault, match="local rank 3 has no GPU: 1 visible"):
        devices.pick_device("cuda", 3, environment=own | {"SLURM_LOCALID": "0"})


def test_segments_of_the_allocator_grow_and_streams_have_queues_unless_the_environment_has_other_settings(
    monkeypatch,
):
    gpus(monkeypatch, 1)
    environment: dict[str, str] = {}
    devices.pick_device("cuda", 0, environment=environment)
    assert environment == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environment = {name: "max_split_size_mb:128", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        devices.pick_device("cuda", 0, environment=environment)
        assert environment == {name: "max_split_size_mb:128", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_the_queues_are_set_before_cuda_is_asked_for_anything(monkeypatch):
    seen, environment = [], {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen.append(dict(environment)) or False)
    devices.pick_device("auto", 0, environment=environment)
    assert seen == [{"CUDA_DEVICE_MAX_CONNECTIONS": "32"}]


def test_more_local_ranks_than_gpus_is_an_error_with_the_numbers(monkeypatch):
    gpus(monkeypatch, 2)
    with pytest.raises(
        EnvironmentFault, match=r"local rank 2 has no GPU: 2 visible.*--nproc-per-node 2"
    ):
        devices.pick_device("cuda", 2, environment={})


def test_auto_is_the_cpu_of_one_machine_with_fewer_gpus_than_ranks(monkeypatch):
    made_current = gpus(monkeypatch, 1)
    two = {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    assert [devices.pick_device("auto", rank, environment=dict(two)) for rank in (0, 1)] == [
        CPU,
        CPU,
    ]
    assert "2 ranks and 1 GPU on this machine" in devices.describe_unused_gpus(
        "auto", environment=two
    )
    assert made_current == []
    # the GPU where it is set, on several machines, alone, or one per rank
    own = {"LOCAL_RANK": "1", "SLURM_LOCALID": "1", "CUDA_VISIBLE_DEVICES": "1"}
    assert devices.pick_device("auto", 1, environment=two | own) == torch.device("cuda", 0)
    assert devices.describe_unused_gpus("auto", environment=two | own) == ""
    # torchrun in it
    one_task = two | {"TORCHELASTIC_RUN_ID": "1", "SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "0"}
    picked = [
        devices.pick_device("auto", rank, environment=one_task | {"LOCAL_RANK": str(rank)})
        for rank in (0, 1)
    ]
    assert picked == [CPU, CPU]
    for kind, world in (
        ("cuda", two),
        ("auto", two | {"WORLD_SIZE": "4"}),
        ("auto", {}),
        ("auto", {"WORLD_SIZE": "1"}),
    ):
        assert devices.pick_device(kind, 0, environment=dict(world)) == torch.device("cuda", 0), (
            kind,
            world,
        )
        assert devices.describe_unused_gpus(kind, environment=world) == "", (kind, world)


def test_everything_works_on_a_cpu():
    devices.synchronize(CPU)
    assert devices.device_name(CPU) == "cpu"


# a process of its own: in this one an earlier test may have set glibc to keep freed memory
@ranks(1)
def test_peak_memory_of_a_cpu_counts_from_its_reset(ctx):
    if devices.peak_memory(CPU) == 0:
        pytest.skip("not supported by this system")
    size = 64 << 20
    torch.ones(size, dtype=torch.uint8)
    devices.reset_peak_memory(CPU)
    before = devices.peak_memory(CPU)
    block = torch.ones(size, dtype=torch.uint8)
    assert devices.peak_memory(CPU) - before >= 0.9 * block.nbytes


def test_no_other_file_uses_torch_cuda():
    package = Path(nanotrain.__file__).parent
    guilty = [
        f"{path.relative_to(package)}:{number}"
        for path in sorted(package.rglob("*.py"))
        if path.name != "device.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "torch.cuda." in line
    ]
    assert not guilty, f"on a CPU-only torch these raise; go through comm/device.py: {guilty}"


def test_a_cpu_has_no_compute_capability():
    assert devices.compute_capability(CPU) is None


def test_copies_after_collectives_share_one_stream_and_on_a_cpu_have_none(monkeypatch):
    streams: list[object] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: streams.append(device) or len(streams))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    waits: list[int] = []
    work = SimpleNamespace(wait=lambda: waits.append(1))
    assert (
        devices.HostCopy.after(work, torch.tensor([2.0])).read() == [2.0]
        and waits == [1]
        and not streams
    )
    tensor = SimpleNamespace(device=torch.device("cuda", 0), record_stream=lambda stream: None)
    devices._side_stream.cache_clear()
    monkeypatch.setattr(devices.HostCopy, "__init__", lambda self, tensor: None)
    for _ in range(40):
        devices.HostCopy.after(work, tensor)
    devices._side_stream.cache_clear()
    assert len(streams) == 1 and len(waits) == 41


def test_buffers_are_copied_at_once_on_a_cpu() -> None:
    copies, target = (
        devices.HostTransfer(CPU),
        devices.host_zeros(4, dtype=torch.float32, device=CPU),
    )
    copies.wait_for_device()
    copies.start(target, torch.ones(4)).wait_on_host()
    copies.finish()
    assert target.tolist() == [1.0] * 4
    with pytest.raises(AssertionError, match="a conversion"):
        copies.start(target, torch.ones(4, dtype=torch.bfloat16))


def test_the_history_of_memory_is_recorded_until_it_is_written(monkeypatch, tmp_path):
    """Every call fits the signature of torch's function for GPUs, which a CPU build cannot run."""
    calls: list[object] = []
    parameters = signature(torch.cuda.memory._record_memory_history_impl)

    def record(*args: object, **given: object) -> None:
        bound = parameters.bind(*args, **given)
        bound.apply_defaults()
        calls.append(bound.arguments["enabled"])

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"history")
    )
    devices.start_memory_history(CPU)
    devices.write_memory_history(tmp_path / "m.pickle")
    assert (tmp_path / "m.pickle").read_bytes() == b"history" and calls == ["all", None]
    with pytest.raises(OSError):
        devices.write_memory_history(tmp_path / "none" / "m.pickle")
    assert calls[-1] is None


@pytest.mark.parametrize(("device", "expected"), [("cpu", []), ("cuda", ["push optimizer", "pop"])])
def test_a_range_in_traces_is_one_of_nvtx_on_a_gpu(monkeypatch, device, expected):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    with torch.profiler.profile() as profiler:
        devices.trace_range("optimizer", torch.device(device)).close()
    assert calls == expected and "optimizer" in {event.key for event in profiler.key_averages()}
