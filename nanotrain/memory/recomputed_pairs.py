"""The functions of a block that the modules of `--recompute-modules` recompute.

    name          recomputes                                  keeps
    core_attn     core attention                              its inputs and its output
    mlp           dense MLP                                   its input and its output
    moe           mixture-of-experts layer with its router    its input and its output
    layernorm     both norms of a block                       their inputs
    mla_up_proj   up-projections and rotary positions of MLA  their inputs
    moe_act       activation of the experts                   its inputs
    pointwise     all operators between products and          outputs of products and attention
                  attention: norms, activations, gates,
                  permutation of tokens on one rank

The first three keep their outputs too, if a function after them saves them; the others are pairs
(`Recompute.discarding`), none of which communicates. Names and meaning as in Megatron-LM, which has
no `pointwise`. Source: Korthikanti et al. 2022, section 5.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """Two functions of a block, by their paths: the second does not keep outputs of the first."""

    first: str
    second: str
    # a module with which alone the pair drops more than it keeps; empty: always
    requires: str = ""
    inside: str = ""  # the recompute module that runs both functions again
    is_traceable: bool = True  # whether a compiled graph may contain both functions


def _mixer_pairs(path: str) -> tuple[Pair, ...]:
    """Pairs of the functions before core attention or a scan, and of the functions after it."""
    output = f"{path}.output.forward"
    return (
        Pair(f"{path}.prepare_query_key", f"{path}.core_attention", requires=f"{path}.query_norm"),
        Pair(
            f"{path}.prepare_scan",
            f"{path}.run_scan",
            requires=f"{path}.query_conv",
            is_traceable=False,
        ),
        Pair(f"{path}.apply_gate", output, requires=f"{path}.gate"),
        Pair(f"{path}.gate_output", output),
        Pair(f"{path}.mix", output, requires=f"{path}.conv"),
    )


# by name: functions of a block that keep their inputs and outputs; a block has one of them at most
CHECKPOINTED = {
    "core_attn": (
        "attention.core_attention",
        "attention.attention.core_attention",  # beside Mamba-2
    ),
    "mlp": ("mlp.forward",),
    "moe": ("mlp.forward",),
}
NORMS = (
    Pair("attention_norm.forward", "attention.forward"),
    Pair("mlp_norm.forward", "mlp.forward"),
    Pair("input_norm.forward", "attend_and_transform"),  # one norm of both
)
EXPERT_ACTIVATION = Pair("mlp.experts.activation", "mlp.experts.down.forward", inside="moe")
# by name: pairs of functions
DISCARDED = {
    "mla_up_proj": (Pair("attention.up_project", "attention.core_attention", is_traceable=False),),
    "moe_act": (EXPERT_ACTIVATION,),
    "layernorm": NORMS,
    "pointwise": (
        *NORMS,
        EXPERT_ACTIVATION,
        Pair("mlp.activation", "mlp.down.forward", inside="mlp"),
        Pair("mlp.shared.activation", "mlp.shared.down.forward", inside="moe"),
        Pair("mlp.dispatcher.permute", "mlp.experts.forward", inside="moe"),
        *_mixer_pairs("attention"),
        *_mixer_pairs("attention.attention"),  # beside Mamba-2
        *_mixer_pairs("attention.mamba"),
    ),
}


def discarded_pairs(modules: Collection[str]) -> list[Pair]:
    """The pairs of modules, without pairs inside of another recomputed module."""
    pairs: list[Pair] = []
    for name, pairs_of_module in DISCARDED.items():
        if name in modules:
            pairs += [pair for pair in pairs_of_module if pair.inside not in modules]
    return pairs
