"""The values that the tables of rules read, by name: every field, and what follows from several
fields.
"""

from collections.abc import Callable
from math import ceil, lcm
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.layer_kinds import DELTA_RULES
from nanotrain.config.model import ModelConfig
from nanotrain.config.notation import (
    count_mtp_layers,
    read_hybrid_pattern,
    read_mtp_patterns,
    read_named,
    read_pipeline_layout,
)
from nanotrain.config.parallel import DISCARDED_MODULES
from nanotrain.config.schedules import length_schedule
from nanotrain.config.schema import ENTRIES, value_of
from nanotrain.errors import ConfigError
from nanotrain.storage.remote import is_address


class Unreadable(Exception):
    """A rule reads a field whose text could not be read, which is an error of its own."""


class Values:
    """Every field of a configuration by its unique name, the sizes of the model, and SIZES.

    >>> Values(Config()).moe_router_topk, Values(Config()).cp
    (2, 1)
    """

    def __init__(self, config: Config, unreadable: frozenset[str] = frozenset()) -> None:
        self.config, self._unreadable = config, unreadable
        self._has_model = all(
            ENTRIES[name].section.partition(".")[0] != "model" for name in unreadable
        )

    def __getattr__(self, name: str) -> Any:
        if name in self._unreadable:
            raise Unreadable(name)
        if name in SIZES:
            value = SIZES[name](self)
        else:
            value = (
                value_of(self.config, ENTRIES[name].key)
                if name in ENTRIES
                else getattr(self.model, name)
            )
        self.__dict__[name] = value  # many rules read the same ones
        return value

    def __getitem__(self, name: str) -> Any:
        """As an attribute; what the texts of rules read."""
        return getattr(self, name)

    @property
    def model(self) -> ModelConfig:
        """The model section, whose sizes depend on each other."""
        if not self._has_model:
            raise Unreadable("model")
        return self.config.model


def uses_object_storage(v: Values) -> bool:
    """Whether the run, or what it starts from, is in object storage."""
    return any(
        is_address(v[name] or "")
        for name in ("run_dir", "load", "pretrained_checkpoint", "tokenizer_model")
    )


def has_split(v: Values) -> bool:
    """Whether the data split is one to three finite proportions, of which the first is not zero."""
    try:
        parts = [float(part) for part in v.split.split(",")]
    except ValueError:
        return False
    return len(parts) <= 3 and parts[0] > 0 and all(0 <= part < float("inf") for part in parts)


def decay_iters(v: Values) -> int:
    """Steps of the learning-rate schedule."""
    if v.lr_decay_samples is not None:
        return int(v.lr_decay_samples // (v.global_batch_size or v.micro_batch_size))
    return int(v.lr_decay_iters or v.train_iters)


def warmup_and_decay(v: Values) -> tuple[float, float]:
    """Lengths of warmup and schedule in one unit; without a set length, or a common unit, the
    schedule is endless.
    """
    decay, warmup = v.lr_decay_samples, v.lr_warmup_samples
    if v.schedule_unit == "steps":
        decay, warmup = v.lr_decay_iters, v.lr_warmup_iters
    elif v.global_batch_size is not None:  # else its size follows from the number of ranks
        decay = decay or v.lr_decay_iters and v.lr_decay_iters * v.global_batch_size
        warmup = v.lr_warmup_iters * v.global_batch_size if warmup is None else warmup
    return warmup or 0, decay or float("inf")


def channels_with_pairs(v: Values) -> int:
    """The least channels of a head, from those that are set on, of which RoPE rotates an even
    number.
    """
    rotated = max(2, v.rotary_dim + v.rotary_dim % 2)
    channels = ceil(rotated / v.rotary_percent)
    # 100 * 0.58 is 57.99 in floating point
    return channels + (int(channels * v.rotary_percent) < rotated)


def has_different_losses(v: Values) -> bool:
    """Whether the load-balancing losses are one, or several that are different and not none."""
    losses = v.moe_router_load_balancing_type
    return len(losses) == 1 or len({*losses} - {"none"}) == len(losses) > 0


def sequence_parts(v: Values) -> int:
    """What seq_length must be a multiple of."""
    chunks = 2 * v.cp if v.cp > 1 else 1
    return lcm(chunks, v.tp_cp) if v.splits_sequence_by_tp else chunks


def why_sequence_parts(v: Values) -> str:
    """The reasons for `sequence_parts`."""
    reasons = [f"cp={v.cp} ranks have two chunks each"] if v.cp > 1 else []
    if v.splits_sequence_by_tp:
        what = "sequence_parallel" if v.sequence_parallel else "a layer with experts"
        reasons.append(
            f"{what} splits {'the two together' if v.cp > 1 else 'the sequence'} over tp={v.tp} ranks"
        )
    return " and ".join(reasons)


def uneven_lengths(v: Values) -> list[int]:
    """Lengths of the schedule below seq_length that cannot be split into `sequence_parts`."""
    if not v.step_seq_length_schedule:
        return []
    try:
        schedule = length_schedule(v.config)
    except ConfigError:  # of the schedule itself
        return []
    return [
        length for length in (schedule.sizes[:-1] if schedule else ()) if length % v.sequence_parts
    ]


def ranks_without_layers(v: Values) -> list[int]:
    """Pipeline ranks without first and last stage to which a layout gives no layers."""
    lengths = v.layout_lengths
    if lengths is None or len(lengths) != v.num_stages:
        return []
    parallel = v.config.parallel
    ranks = (rank for rank in range(v.pp) if rank not in parallel.end_ranks)
    return [rank for rank in ranks if not any(lengths[stage] for stage in parallel.stages_of(rank))]


def end_lengths(v: Values) -> list[int]:
    """Layers of the first and of the last of several pipeline ranks, where they are set."""
    ends = (v.decoder_first_pipeline_num_layers, v.decoder_last_pipeline_num_layers)
    return [length for length in ends if length is not None and v.pp > 1]


def longest_stage(v: Values) -> int:
    """Layers of the longest pipeline stage, or virtual stage."""
    if v.layout_lengths is not None:
        return max(v.layout_lengths)
    per_rank = v.num_stages // v.pp
    between = [-(-v.layers_between // v.stages_between)] if v.stages_between > 0 else []
    return max(*(-(-length // per_rank) for length in v.end_lengths), *between, 1)


def odd_sizes(v: Values) -> list[tuple[str, int]]:
    """The sizes of a rank's fp8 matrices that are no multiple of 16, as torch's products need, with
    their names.
    """
    heads = v.num_attention_heads // v.tp
    sizes = {"hidden_size": v.hidden_size}
    if v.multi_latent_attention:
        sizes |= {
            "q_lora_rank": v.q_lora_rank or 0,
            "kv_lora_rank": v.kv_lora_rank,
            "kv_lora_rank + qk_pos_emb_head_dim": v.kv_lora_rank + v.qk_pos_emb_head_dim,
            "queries per rank: heads / tp x (qk_head_dim + qk_pos_emb_head_dim)": heads
            * v.head_dim,
            "keys and values per rank: heads / tp x (qk_head_dim + v_head_dim)": heads
            * (v.qk_head_dim + v.v_head_dim),
            "values per rank: heads / tp x v_head_dim": heads * v.v_head_dim,
        }
        if v.sparse_attention_type == "dsa":
            sizes["index queries: heads x dsa_indexer_head_dim"] = (
                v.dsa_indexer_n_heads * v.dsa_indexer_head_dim
            )
            sizes["dsa_indexer_head_dim"] = v.dsa_indexer_head_dim
    else:
        sizes["queries per rank: heads / tp x kv_channels"] = heads * v.head_dim
        sizes["keys per rank: query groups / tp x kv_channels"] = (
            max(1, v.query_groups // v.tp) * v.head_dim
        )
    if v.delta_key_heads is not None:
        sizes["linear queries per rank: key heads / tp x channels"] = (
            v.delta_key_heads // v.tp * v.linear_key_head_dim
        )
        sizes["linear values per rank: value heads / tp x channels"] = (
            v.delta_value_heads // v.tp * v.linear_value_head_dim
        )
    if v.has_dense_layers:
        sizes["ffn_hidden_size / tp"] = v.ffn_size // v.tp
    if v.num_experts is not None:
        sizes["moe_ffn_hidden_size / etp"] = v.moe_ffn_size // v.etp
        sizes["moe_latent_size"] = v.moe_latent_size or 0
        sizes["moe_shared_expert_intermediate_size / tp"] = (
            v.moe_shared_expert_intermediate_size or 0
        ) // v.tp
    return [(name, size) for name, size in sizes.items() if size % 16]


SIZES: dict[str, Callable[[Values], Any]] = {
    "tp": lambda v: v.tensor_model_parallel_size,
    "cp": lambda v: v.context_parallel_size,
    "pp": lambda v: v.pipeline_model_parallel_size,
    "ep": lambda v: v.expert_model_parallel_size,
    "etp": lambda v: v.expert_tensor_parallel_size or v.tp,
    "tp_cp": lambda v: v.tp * v.cp,
    # settings of stages without effect on one rank are an error of their own (unused.py)
    "num_stages": lambda v: 1 if v.pp == 1 else v.pp * v.num_virtual_stages_per_pipeline_rank,
    "stages": lambda v: (
        f"pp={v.pp}"
        + (f" x {v.num_stages // v.pp} = {v.num_stages}" if v.num_stages > v.pp else "")
    ),
    "num_groups": lambda v: v.moe_router_num_groups or 1,
    "group_topk": lambda v: v.moe_router_group_topk or 1,
    "experts_per_group": lambda v: (v.num_experts or 0) // v.num_groups,
    "reachable_experts": lambda v: v.group_topk * v.experts_per_group,
    "groups_needed": lambda v: -(-v.moe_router_topk // max(1, v.experts_per_group)),
    "num_balancing_losses": lambda v: len(v.moe_router_load_balancing_type),
    "num_coefficients": lambda v: len(v.moe_aux_loss_coeff),
    "has_global_aux_loss": lambda v: "global_aux_loss" in v.moe_router_load_balancing_type,
    "has_different_losses": has_different_losses,
    "rotates_pairs": lambda v: v.rotary_dim > 0 and v.rotary_dim % 2 == 0,
    "channels_with_pairs": channels_with_pairs,
    # 0 without a tokenizer yet: checked again once its size is known (`open_inputs`)
    "vocab_rows": lambda v: 0 if v.vocab_size is None else v.model.padded_vocab_size,
    "vocab_multiple": lambda v: lcm(v.make_vocab_size_divisible_by, v.tp),
    "has_rope_layers": lambda v: not all(v.model.no_rope_layers),
    "has_window_layers": lambda v: any(v.model.window_layers),
    "has_expert_layers": lambda v: any(v.model.moe_layers),
    "has_dense_layers": lambda v: "dense" in v.model.mlps or v.moe_shortcut,
    "mixers": lambda v: v.model.mixers,
    "pattern_letters": lambda v: read_hybrid_pattern(v.hybrid_layer_pattern or ""),
    "pattern_length": lambda v: len(v.pattern_letters) or None,
    "pattern_mtp_layers": lambda v: (
        v.hybrid_layer_pattern and len(read_mtp_patterns(v.hybrid_layer_pattern))
    ),
    "has_linear_layers": lambda v: v.linear_attention_type in v.mixers,
    "why_no_linear_layers": lambda v: (
        "hybrid_layer_pattern has no G"
        if v.hybrid_layer_pattern
        else f"linear_attention_freq is {v.linear_attention_freq}"
    ),
    "delta_key_heads": lambda v: v.linear_num_key_heads if DELTA_RULES & {*v.mixers} else None,
    "delta_value_heads": lambda v: v.linear_num_value_heads if DELTA_RULES & {*v.mixers} else None,
    # the tokens that a chunk gets from the one before
    "halo_tokens": lambda v: (
        max(
            v.has_mamba * v.mamba_conv_kernel_dim, v.has_linear_layers * v.linear_conv_kernel_dim, 1
        )
        - 1
    ),
    "has_mamba": lambda v: bool({"mamba2", "attention_mamba2"} & {*v.mixers}),
    "num_mamba_multipliers": lambda v: len(v.mamba_multipliers),
    "output_multiplier": lambda v: v.residual_multiplier * v.mlp_output_multiplier,
    "chunk_tokens": lambda v: v.seq_length // (2 * v.cp),
    "recomputed_modules": lambda v: (
        v.recompute_granularity and v.config.memory.recomputed_modules or ()
    ),
    "discarded_modules": lambda v: [
        name for name in v.recomputed_modules if name in DISCARDED_MODULES
    ],
    "splits_sequence_by_tp": lambda v: (
        v.tp > 1 and bool(v.sequence_parallel or v.num_experts is not None)
    ),
    "sequence_parts": sequence_parts,
    "why_sequence_parts": why_sequence_parts,
    "uneven_lengths": uneven_lengths,
    # layers of every stage, and layers of multi-token prediction, in the layout; None where there
    # are none
    "layout_lengths": lambda v: (
        (text := v.pipeline_model_parallel_layout) and read_pipeline_layout(text)
    ),
    "layout_layers": lambda v: v.layout_lengths and sum(v.layout_lengths),
    "layout_stages": lambda v: v.layout_lengths and len(v.layout_lengths),
    "layout_mtp_layers": lambda v: (
        (text := v.pipeline_model_parallel_layout) and count_mtp_layers(text)
    ),
    "valid_names": lambda v: list(read_named(v.valid_data_path)),
    "mtp_layers": lambda v: v.mtp_num_layers or 0,
    "ranks_without_layers": ranks_without_layers,
    # layers that are split evenly over stages, with those that embedding and head count as
    "counted_layers": lambda v: (
        v.num_layers + (0 if v.pp == 1 else sum(v.config.parallel.counted_ends))
    ),
    "end_lengths": end_lengths,
    "lengths_of_ends": lambda v: " + ".join(map(str, v.end_lengths)),
    # stages whose length is not set, and the layers left for them
    "stages_between": lambda v: (v.pp - len(v.end_lengths)) * (v.num_stages // v.pp),
    "layers_between": lambda v: v.num_layers - sum(v.end_lengths),
    "longest_stage": longest_stage,
    "offloading_fix": lambda v: (
        f"set --cpu-offloading-num-layers to at most {v.longest_stage - 1}"
        if v.longest_stage > 1
        else "leave --cpu-offloading out"
    ),
    "offloading_flags": lambda v: " and ".join(
        ENTRIES[name].flag for name in ("optimizer_cpu_offload", "cpu_offloading") if v[name]
    ),
    "bf16_layers": lambda v: v.num_layers_at_start_in_bf16 + v.num_layers_at_end_in_bf16,
    "odd_sizes": odd_sizes,
    "odd_sizes_text": lambda v: ", ".join(f"{name} is {size}" for name, size in v.odd_sizes),
    "reduces_in_fp32": lambda v: (
        v.params_dtype == "fp32" or v.config.precision.accumulates_grads_in_fp32
    ),
    # the update rule of the parameters that Muon leaves, or of all
    "scalar_rule": lambda v: v.muon_scalar_optimizer if v.optimizer == "muon" else v.optimizer,
    "has_split": has_split,
    "uses_object_storage": uses_object_storage,
    "decay_iters": decay_iters,
    "tenth_of_schedule": lambda v: max(1, v.decay_iters // 10),
    "schedule_unit": lambda v: (
        "steps" if v.lr_warmup_samples is None and v.lr_decay_samples is None else "samples"
    ),
    "warmup_length": lambda v: warmup_and_decay(v)[0],
    "schedule_length": lambda v: warmup_and_decay(v)[1],
    "timeout_s": lambda v: 60 * v.distributed_timeout_minutes,
}
