"""The cards of roofline.py: peaks from data sheets, shares of them that are attained, and the
kernel of attention.
"""

from dataclasses import dataclass

from nanotrain.attention.backends import AttentionChoice, AttentionDevice, AttentionNeed
from nanotrain.comm.device import PLANNED_CUDNN
from nanotrain.plan.plan import Plan
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.kernels import AttentionShape, attention_s, attention_work


@dataclass(frozen=True)
class Card:
    """Peaks of a card, from the vendor's data sheet, and the shares of them that large operators
    attain (assumed).
    """

    device_name: str  # a name that `peak_flops` has, in bf16
    memory_bytes_per_s: float
    link_bytes_per_s: float  # NVLink, one direction
    gemm_share: float
    planned_as: str  # the GPU of the planner, which has measured times of attention
    capability: tuple[int, int]
    flash_share: float  # of FlashAttention-2, where it is not the kernel that the planner measured
    memory_share: float = 0.85
    link_share: float = 0.75


# NVIDIA data sheets: H100 SXM5 80 GB, H200 SXM 141 GB, A100 SXM4 80 GB. FlashAttention-2 reaches
# about the same FLOP/s on Hopper as 60 % of an A100's peak.
CARDS = {
    "H100": Card("NVIDIA H100 80GB HBM3", 3.35e12, 450e9, 0.72, "h100", (9, 0), flash_share=0.35),
    "H200": Card("NVIDIA H200", 4.8e12, 450e9, 0.72, "h200", (9, 0), flash_share=0.35),
    "A100": Card(
        "NVIDIA A100-SXM4-80GB", 2.039e12, 300e9, 0.8, "a100-80gb", (8, 0), flash_share=0.6
    ),
}


def attention_kernel(plan: Plan, card: Card) -> str:
    """The row of backends.yaml whose kernel computes causal attention on a card."""
    device = AttentionDevice("cuda", card.capability, cudnn=PLANNED_CUDNN)
    choice = AttentionChoice.of(plan.config, device)
    row, _ = choice.backends.get(False) or choice.backends[True]
    return row.name


def attention_share(plan: Plan, card: Card) -> float:
    """The share of the peak that attention attains, forward and backward together.

    That of the planner's measured kernels, which are cuDNN's on Hopper and FlashAttention-2 on an
    A100. Values that are narrower than keys are padded by all but cuDNN.
    """
    shape, config, tp = plan.shape, plan.config, plan.groups["tp"].size
    need = AttentionNeed.of(config, has_window=False)
    batch, length = config.train.micro_batch_size, config.data.seq_length
    heads, kv_heads = shape.num_heads // tp, max(1, config.model.query_groups // tp)
    if attention_kernel(plan, card) != "cudnn" and card.capability >= (9, 0):
        return card.flash_share * (need.head_dim + need.value_head_dim) / (2 * need.head_dim)
    gpu = gpu_of(card.planned_as)
    call = AttentionShape(batch, heads, kv_heads, length, need.head_dim, need.value_head_dim)
    seconds = attention_s(gpu, call) + attention_s(gpu, call, backward=True)
    return 3.5 * attention_work(call)[0] / seconds / gpu.peak("bf16")
