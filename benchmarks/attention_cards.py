"""Attention by card: the backend of each GPU, and what multi-latent attention costs by it.

    python benchmarks/attention_cards.py

Predicted on a CPU: a layer of deepseek_v3 (128 heads, keys of 192 channels, values of 128, one
sequence of 4,096 tokens) and its step on 2,048 GPUs, by FlashAttention 2 with padded values and by
the backend that is chosen.
"""

from dataclasses import dataclass

from nanotrain.attention.backends import AttentionDevice, AttentionNeed, choose_backend
from nanotrain.cli.dry_run import complete
from nanotrain.comm.device import PLANNED_CUDNN
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.planner.attention_kernel import attention_flops_per_s
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.kernels import AttentionShape, attention_s
from nanotrain.planner.prediction import predict
from nanotrain.planner.scenario import scenario_of

CARDS = {
    "A100": (8, 0),
    "L40S": (8, 9),
    "H100": (9, 0),
    "B200": (10, 0),
    "B300": (10, 3),
    "RTX 5090": (12, 0),
}
CASES = {
    "64": ((64, 64), ()),
    "128": ((128, 128), ()),
    "192 and 128": ((192, 128), ()),
    "192 and 128, documents": ((192, 128), ("documents",)),
    "256": ((256, 256), ()),
    "128, ring": ((128, 128), ("ring cp",)),
}
LAYER = AttentionShape(1, 128, 128, 4096, 192, 128)


@dataclass(frozen=True)
class MlaCost:
    """Milliseconds of a layer, forward and backward, and tokens/s per GPU of a step."""

    layer_ms: float
    tokens_per_s: float


def chosen(card: str, case: str) -> str:
    """The row of backends.yaml."""
    dims, features = CASES[case]
    device = AttentionDevice("cuda", CARDS[card], cudnn=PLANNED_CUDNN)
    need = AttentionNeed("bf16", *dims, frozenset(features))
    return choose_backend("auto", need, device=device).name


def mla_cost(gpu_name: str, flag: str) -> MlaCost:
    """The cost of attention with a value of --attention-backend."""
    gpu = gpu_of(gpu_name)
    need = AttentionNeed("bf16", LAYER.head_dim, 128, frozenset())
    flops_per_s = attention_flops_per_s(gpu, need, flag=flag)
    seconds = attention_s(gpu, LAYER, flops_per_s=flops_per_s)
    seconds += attention_s(gpu, LAYER, backward=True, flops_per_s=flops_per_s)
    config = complete(
        load_line(
            parse(["+config=deepseek_v3", "precision.fp8.format=null", "--attention-backend", flag])
        )
    )
    step = predict(scenario_of(config, 2048, gpu=gpu, engine="nanotrain")).time
    return MlaCost(1000 * seconds, step.tokens_per_s_per_gpu)


def main() -> None:
    """Print the tables."""
    print(f"| heads | {' | '.join(CARDS)} |")
    print("|---" * (1 + len(CARDS)) + "|")
    for case in CASES:
        print(f"| {case} | {' | '.join(chosen(card, case) for card in CARDS)} |")
    print()
    print("| GPU | flash: ms of a layer | tokens/s per GPU | chosen: ms of a layer | tokens/s |")
    print("|---|---|---|---|---|")
    for gpu_name in ("h100", "b200"):
        before, after = (mla_cost(gpu_name, flag) for flag in ("flash", "auto"))
        costs = [f"{cost.layer_ms:.2f} | {cost.tokens_per_s:,.0f}" for cost in (before, after)]
        print(f"| {gpu_name} | {' | '.join(costs)} |")
    print("predicted, not measured")


if __name__ == "__main__":
    main()
