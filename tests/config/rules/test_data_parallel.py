"""Rules of data parallelism: every contradiction is one error, and what is always so is accepted."""

import pytest

from nanotrain.config.load import load_config
from nanotrain.errors import NanotrainError
from nanotrain.precision.dtypes import Precision

MODEL = ["--vocab-size", "256", "--global-batch-size", "8"]
GATHERED = "--data-parallel-sharding-strategy optim_grads_params"
MISTAKES = {
    "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32": "reduced in fp32 and in bf16",
    "--bf16 --grad-reduce-in-bf16 --grad-reduce-in-fp32": "reduced in fp32 and in bf16",
    "--grad-reduce-in-bf16": "grad_reduce_in_bf16 with params_dtype fp32",
    "--fp16 --grad-reduce-in-bf16": "set --no-accumulate-allreduce-grads-in-fp32 for fp16 gradients",
    "--no-accumulate-allreduce-grads-in-fp32": "params_dtype is fp32, and so are the gradients",
    "--main-grads-dtype bf16": "main_grads_dtype bf16 with params_dtype fp32",
    "--bf16 --main-grads-dtype bf16 --grad-reduce-in-fp32": "and gradients accumulated in fp32",
    "--main-grads-dtype fp16": "it takes one of fp32, bf16",
    "--bf16 --grad-reduce-in-bf16 --reduce-scatter-with-fp32-accumulation": "no_shard all-reduces gradients",
    "--bf16 --grad-reduce-in-bf16 --reduce-scatter-with-fp32-accumulation --use-distributed-optimizer "
    "--force-all-reduce": "force_all_reduce all-reduces gradients",
    "--force-all-reduce --data-parallel-sharding-strategy optim_grads": "it keeps whole gradients on every rank",
    "--outer-dp-sharding-strategy optim": "with data_parallel_sharding_strategy no_shard",
    "--outer-dp-sharding-strategy optim --use-distributed-optimizer": "there is nothing to shard across",
    "--fsdp-double-buffer": "only data_parallel_sharding_strategy optim_grads_params gathers units",
    "--use-distributed-optimizer --no-reshard-after-forward": "optim_grads_params gathers units",
    f"{GATHERED} --fsdp-prefetch-depth 2": "with overlap_param_gather gathers units ahead",
    f"{GATHERED} --fsdp-double-buffer --no-reshard-after-forward": "units take turns in fixed memory",
}
SHARDED = "--bf16 --use-distributed-optimizer"
ACCEPTED = {
    "--grad-reduce-in-fp32 --accumulate-allreduce-grads-in-fp32": ("fp32", "fp32"),
    "--reduce-scatter-with-fp32-accumulation": ("fp32", "fp32"),
    "--bf16 --force-all-reduce": ("fp32", "fp32"),
    f"{SHARDED} --grad-reduce-in-bf16 --reduce-scatter-with-fp32-accumulation": ("bf16", "fp32"),
    f"{SHARDED} --main-grads-dtype bf16": ("bf16", "bf16"),
    f"{SHARDED} --grad-reduce-in-bf16 --main-grads-dtype bf16": ("bf16", "bf16"),
    f"{SHARDED} --outer-dp-sharding-strategy optim --num-distributed-optimizer-instances 2": ("fp32", "fp32"),
    "--fp16 --no-accumulate-allreduce-grads-in-fp32 --ddp-average-in-collective": ("fp16", "fp32"),
}
NAMES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_contradiction_is_one_error(line: str) -> None:
    with pytest.raises(NanotrainError) as caught:
        load_config([*MODEL, *line.split()])
    assert MISTAKES[line] in str(caught.value)
    assert str(caught.value).count("\n  - ") <= 1, "one mistake is one error"


@pytest.mark.parametrize("line", ACCEPTED)
def test_dtypes_of_gradients(line: str) -> None:
    precision = Precision.of(load_config([*MODEL, *line.split()]).precision)
    assert (str(precision.grads), str(precision.main_grads)) == tuple(NAMES[name] for name in ACCEPTED[line])
