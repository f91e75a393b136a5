"""What layers of experts move, multiply and wait for, before and after: counted, not measured.

    python benchmarks/experts.py
    python benchmarks/experts.py --card H200 --recipe qwen3_30b_a3b

Per layer, microbatch and rank of a recipe, with even routing:

    weight gradients   torch's grouped product and the hook, or one kernel that adds in fp32
    router backward    two products in fp32, or in bf16 of a gradient in two terms
    one source         rows that a dispatch inside a node of one rank brings into their own order
    host waits         of a dispatch that sends a token to each node once
"""

import argparse
from dataclasses import dataclass

from cards import CARDS, Card

from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.planner.dispatch_time import GRADIENT_TERMS
from nanotrain.spec.shape import ModelShape

RECIPES = ["deepseek_v3", "qwen3_30b_a3b", "qwen3_next_80b_a3b", "mixtral_8x7b"]
# Bytes per weight of every microbatch but the first: the product writes 16 bits, the hook reads
# them; both forms read and write the fp32 buffer.
HOOK_BYTES = 2 + 2 + 4 + 4
KERNEL_BYTES = 4 + 4
# of an H100: data sheet, and the share that an fp32 product attains (assumed)
FP32_FLOPS = 67e12 * 0.75
BF16_FLOPS = 989e12


@dataclass(frozen=True)
class ExpertLayer:
    """Sizes of a layer of experts on one rank."""

    tokens: int  # that the rank routes
    hidden: int
    width: int  # of the rows that experts read
    num_choices: int  # of the router
    topk: int
    num_local: int  # experts of the rank
    expert_weights: int  # of one expert
    is_hierarchical: bool

    @classmethod
    def of(cls, config: Config) -> "ExpertLayer":
        """The layer of a recipe."""
        parallel = config.parallel
        shape = ModelShape.of(config.model)
        moe = shape.moe
        assert moe is not None, "the recipes have experts"
        tokens = config.train.micro_batch_size * config.data.seq_length
        num_matrices = 3 if shape.is_gated else 2
        return cls(
            tokens=tokens // (parallel.tensor_model_parallel_size * parallel.context_parallel_size),
            hidden=shape.hidden_size,
            width=shape.expert_input_size,
            num_choices=moe.num_choices,
            topk=moe.router_topk,
            num_local=moe.num_experts // parallel.expert_model_parallel_size,
            expert_weights=num_matrices * shape.expert_input_size * shape.moe_ffn_size,
            is_hierarchical=parallel.moe_hierarchical_dispatch == 1,
        )


@dataclass(frozen=True)
class Count:
    """A row of the table."""

    name: str
    before: str
    after: str


def counts_of(layer: ExpertLayer, card: Card) -> list[Count]:
    """The rows of a layer on a card."""
    weights = layer.num_local * layer.expert_weights
    router_flops = 2 * 2 * layer.tokens * layer.num_choices * layer.hidden
    router_s = GRADIENT_TERMS * router_flops / (BF16_FLOPS * card.gemm_share)
    counts = [
        Count(
            "weight gradients",
            _moved(weights * HOOK_BYTES, card),
            _moved(weights * KERNEL_BYTES, card),
        ),
        Count("router backward", _ms(router_flops / FP32_FLOPS), _ms(router_s)),
    ]
    if layer.is_hierarchical:
        # bf16 rows, read and written: there and back, in the forward and in the backward
        num_bytes = 4 * 2 * 2 * layer.tokens * layer.topk * layer.width
        counts.append(Count("one source", _moved(num_bytes, card), _moved(0, card)))
        counts.append(Count("host waits", "2", "1"))
    return counts


def needed_speed(layer: ExpertLayer, card: Card) -> float:
    """The speed from which on the kernel of weight gradients gains, of that of torch's product."""
    saved = layer.num_local * layer.expert_weights * (HOOK_BYTES - KERNEL_BYTES)
    saved_s = saved / _bandwidth(card)
    # a rank receives as many rows as it sends
    flops = 2 * layer.tokens * layer.topk * layer.expert_weights
    product_s = flops / (BF16_FLOPS * card.gemm_share)
    return product_s / (product_s + saved_s)


def _bandwidth(card: Card) -> float:
    return card.memory_bytes_per_s * card.memory_share


def _moved(num_bytes: float, card: Card) -> str:
    return f"{num_bytes / 1e9:.2f} GB, {_ms(num_bytes / _bandwidth(card))}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--card", choices=("H100", "H200"), default="H100")
    parser.add_argument("--recipe", nargs="+", default=RECIPES)
    arguments = parser.parse_args()
    card = CARDS[arguments.card]
    print("| recipe | per layer and microbatch, counted | before | after |\n|---|---|---:|---:|")
    for recipe in arguments.recipe:
        layer = ExpertLayer.of(load([f"+config={recipe}", "--mock-data"]).config)
        for count in counts_of(layer, card):
            print(f"| {recipe} | {count.name} | {count.before} | {count.after} |")
        share = needed_speed(layer, card)
        print(f"| {recipe} | the kernel gains from this share of torch's speed | | {share:.0%} |")


if __name__ == "__main__":
    main()
