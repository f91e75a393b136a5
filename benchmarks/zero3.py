"""ZeRO-3 beside torch's FSDP2: CPU time per step, in the same processes, step by step in turn.

    python benchmarks/zero3.py                       # the 10m shape, fp32, two processes with one thread each
    python benchmarks/zero3.py --model 25m --rounds 20

The plain Llama of baselines.py under `fully_shard`, one unit per block, and nanotrain's
`train_step` with optim_grads_params, both with AdamW and gradient clipping. A round is one step of
every contender, in alternating order, so that what else runs on the machine disturbs all of them
alike. CPU time is summed over ranks and threads.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from baselines import SHAPES, Llama, Shape, batches, fsdp2, summed_over_ranks
from baselines import train_step as baseline_step
from throughput import Job, nanotrain_command

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.plan.plan import plan_run
from nanotrain.train.build import build_run
from nanotrain.train.inputs import open_inputs
from nanotrain.train.step import train_step

FSDP2 = "torch FSDP2"
OPTIONS = {
    "nanotrain optim_grads_params": (),
    "the same, --overlap-param-gather": ("--overlap-param-gather",),
    "the same, --fsdp-double-buffer": ("--overlap-param-gather", "--fsdp-double-buffer"),
    "the same, --gradient-accumulation-fusion": (
        "--overlap-param-gather",
        "--fsdp-double-buffer",
        "--gradient-accumulation-fusion",
    ),
}


def fsdp2_step(shape: Shape) -> Callable[[], float]:
    """A step of the plain Llama, sharded by torch."""
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    stack, data = fsdp2(Llama(shape), cpu, False), batches(shape, dist.get_rank(), cpu)
    return lambda: baseline_step(stack, [next(data)])


def nanotrain_step(job: Job, *flags: str) -> Callable[[], float]:
    """A step of a run of nanotrain, reading its batch included."""
    sharding = (
        "--data-parallel-sharding-strategy=optim_grads_params",
        "--overlap-grad-reduce",
        "--num-workers=0",
    )
    _, *arguments = nanotrain_command(*sharding, *flags)(
        job, Path(mkdtemp(prefix="nanotrain-zero3-"))
    )
    config, inputs = open_inputs(load(arguments))
    plan = plan_run(config, dist.get_world_size(), rank=dist.get_rank())
    run = build_run(plan, inputs, context=ParallelContext.attach(plan.topology))

    def step() -> float:
        batch = run.batch_iterator.next()
        assert batch is not None, "mock data does not end"
        return train_step(run, batch).loss

    return step


def run_rank(job: Job, *, rounds: int) -> None:
    """Step all contenders in turn; rank 0 prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders = {FSDP2: fsdp2_step(job.shape)}
    contenders |= {name: nanotrain_step(job, *flags) for name, flags in OPTIONS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-job.warmup, rounds):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            start = time.process_time()
            contenders[name]()
            if number >= 0:
                seconds[name].append(time.process_time() - start)
    seconds = {name: summed_over_ranks(each) for name, each in seconds.items()}
    if dist.get_rank() == 0:
        print("| contender | CPU time of a step | FSDP2 / contender |\n|---|---:|---:|")
        for name, each in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(seconds[FSDP2], each, strict=True))
            print(f"| {name} | {statistics.median(each):.2f} s | {ratio:.2f}x |", flush=True)
    dist.barrier()
    # meshes keep gloo groups alive, which sometimes abort the process when the interpreter exits
    os._exit(0)


def main() -> None:
    """Launch two processes and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="10m")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    job = Job(args.model, "fp32", warmup=2, steps=args.rounds)
    if "RANK" in os.environ:
        run_rank(job, rounds=args.rounds)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    subprocess.run([*launcher, __file__, *sys.argv[1:]], env=environment, check=True)


if __name__ == "__main__":
    main()
