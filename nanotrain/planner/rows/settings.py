"""Settings and options that the words of a row mean, and assumptions where it says nothing.

run_settings      settings of every row
stated_settings   settings of rows without Megatron-LM's flags, except the model
scenario_options  fields of a scenario that are no settings
"""

import re
from typing import Any, get_args

from nanotrain.config.parallel import RecomputeModule
from nanotrain.planner.rows.row import ABOVE_ONE, Row

Settings = dict[str, Any]  # values by the key of a setting
FULL = r"\bfull\b"


def run_settings(products: str) -> Settings:
    """Settings of every run, by the dtype of its products."""
    params_dtype = products if products in ("fp16", "fp32") else "bf16"
    return {"train.step_batch_size_schedule": [], "precision.params_dtype": params_dtype}


def stated_settings(row: Row, *, engine: str, products: str, is_published: bool) -> Settings:
    """Settings of a row without flags, except the model.

    Args:
        row: the row.
        engine: name of the training program.
        products: dtype of the products of linear layers.
        is_published: whether the model is one of `models.yaml`.
    """
    num_layers = row.required("layers")
    return {
        **_pipeline_settings(row),
        **_parallel_settings(row, engine=engine),
        **_precision_settings(row, engine=engine, products=products),
        **_memory_settings(row, engine=engine, num_layers=num_layers),
        **_attention_settings(row, is_published=is_published),
    }


def _pipeline_settings(row: Row) -> Settings:
    """The schedule and its virtual stages."""
    settings: Settings = {"parallel.pipeline_schedule": "1f1b"}
    if row.has("vp", ABOVE_ONE):
        settings["parallel.pipeline_schedule"] = "interleaved"
    virtual = row.number_after("vp", r"(\d+)")
    if virtual is not None:
        settings["parallel.num_virtual_stages_per_pipeline_rank"] = virtual
    return settings


def _parallel_settings(row: Row, *, engine: str) -> Settings:
    """Experts, context and sequence parallelism, and overlap of communication."""
    settings: Settings = {
        "parallel.sequence_parallel": _is_sequence_parallel(row, engine),
        "parallel.cp_comm_type": "p2p",
    }
    overlaps = not row.has("overlap_flags", "no tp/dp/p2p overlap|no overlap")
    settings["parallel.overlap_grad_reduce"] = overlaps
    settings["parallel.overlap_param_gather"] = overlaps
    if row.has("experts", r"\d"):
        settings["parallel.expert_tensor_parallel_size"] = 1
        settings["model.moe.router_force_load_balancing"] = True
    etp = row.number_after("etp", r"(\d+)")
    if etp is not None:
        settings["parallel.expert_tensor_parallel_size"] = etp
    if row.has("cp", ABOVE_ONE) and row.has("overlap_flags", "a2a"):
        settings["parallel.cp_comm_type"] = "a2a"
    if _has_words(row, "overlap moe expert parallel comm(?! = false)"):
        settings["parallel.overlap_moe_expert_parallel_comm"] = True
    return settings


def _has_words(row: Row, pattern: str) -> bool:
    """Whether a pattern is found in the columns with options together."""
    return re.search(pattern, row.words()) is not None


def _is_sequence_parallel(row: Row, engine: str) -> bool:
    """Sequence parallelism, assumed where tensor parallelism is stated without it."""
    if not row.has("tp", ABOVE_ONE) or row.has("overlap_flags", "no sequence parallel"):
        return False
    if engine == "megatron" and not row.has("zero", "dist opt"):
        row.assumed.append("sequence parallelism not stated: none")
        return False
    return True


def _precision_settings(row: Row, *, engine: str, products: str) -> Settings:
    """The dtypes, and the kernels of attention in the years of fp16."""
    settings: Settings = {}
    has_fused_attention = row.has("overlap_flags", "flash|fused")
    if engine == "megatron" and row.has("precision", "fp16") and not has_fused_attention:
        settings["train.attention_backend"] = "unfused"
        row.assumed.append("attention not stated: not fused, as in the years of fp16")
    if row.has("precision", "pure"):
        settings["precision.grad_reduce_in_bf16"] = True
    if "fp8" in products or products == "nvfp4":
        settings["precision.fp8.format"] = "hybrid"
        settings["precision.fp8.recipe"] = "tensorwise"
    return settings


def _memory_settings(row: Row, *, engine: str, num_layers: int) -> Settings:
    """Recomputation and offloading of activations."""
    modules = [name for name in get_args(RecomputeModule) if _names_module(row, name)]
    settings = _recompute_settings(row)
    leaves_modules_open = not modules and not row.has("recompute", rf"{FULL}|none")
    if engine == "fsdp2" and row.has("recompute", "selective|modules") and leaves_modules_open:
        # torchtitan keeps every second product
        settings["memory.recompute_granularity"] = "full"
        settings["memory.recompute_method"] = "block"
        settings["memory.recompute_num_layers"] = max(1, num_layers // 2)
        row.assumed.append("selective recomputation: every second product")
    is_full = settings.get("memory.recompute_granularity") == "full"
    settings["memory.recompute_modules"] = [] if is_full else modules
    num_offloaded = row.number_after("overlap_flags", r"cpu offloading num layers\W+(\d+)")
    if num_offloaded is not None:
        settings["memory.cpu_offloading"] = True
        settings["memory.cpu_offloading_num_layers"] = num_offloaded
    return settings


def _names_module(row: Row, name: str) -> bool:
    """Whether the column of recomputation names a module."""
    return re.search(rf"\b{name}\b", row.text("recompute")) is not None


def _recompute_settings(row: Row) -> Settings:
    """Granularity, method and number of layers of recomputation."""
    settings: Settings = {}
    if row.has("recompute", "none") and not row.has("recompute", "modules"):
        settings["memory.recompute_granularity"] = None
        settings["memory.recompute_num_layers"] = None
        settings["memory.recompute_method"] = None
        return settings
    if row.has("recompute", "selective|modules"):
        settings["memory.recompute_granularity"] = "selective"
    if not row.has("recompute", FULL):
        return settings
    settings["memory.recompute_granularity"] = "full"
    num_layers = row.number_after("recompute", r".*num layers\W+(\d+)")
    if num_layers is not None:
        settings["memory.recompute_num_layers"] = num_layers
        is_block = row.has("recompute", "block")
        settings["memory.recompute_method"] = "block" if is_block else "uniform"
    return settings


def _attention_settings(row: Row, *, is_published: bool) -> Settings:
    """Multi-head latent attention."""
    if not row.has("kv_heads", "^mla$"):
        return {}
    settings: Settings = {"model.multi_latent_attention": True}
    if not is_published:
        settings["model.mla.q_lora_rank"] = 1536
        row.assumed.append("sizes of MLA not stated: those of DeepSeek-V3")
    return settings


def scenario_options(
    row: Row, *, engine: str, has_far_experts: bool, is_sequence_parallel: bool
) -> dict[str, Any]:
    """Fields of a scenario that are no settings.

    Args:
        row: the row.
        engine: name of the training program.
        has_far_experts: whether expert parallelism leaves the node.
        is_sequence_parallel: whether the configuration has sequence parallelism.
    """
    options: dict[str, Any] = {}
    if not row.words("precision"):
        row.assumed.append("precision not stated: bf16")
    if _has_words(row, "cuda graph"):
        options["cuda_graphs"] = True
    dispatcher = _dispatcher(row, has_far_experts)
    if dispatcher is not None:
        options["dispatcher"] = dispatcher
    overlap = _tp_overlap(row, engine == "megatron" and is_sequence_parallel)
    if overlap is not None:
        options["tp_overlap"] = overlap
    balances_by_force = _has_words(row, "force load balancing")
    if row.has_flags and row.has("experts", r"\d") and not balances_by_force:
        options["imbalance"] = 1.2
        row.assumed.append("routing not balanced by force: 1.2 times an even share")
    return options


def _dispatcher(row: Row, has_far_experts: bool) -> str | None:
    """The token dispatcher; None: the configuration's."""
    dispatcher = None
    if _has_words(row, "dispatcher type=allgather"):
        dispatcher = "allgather"
    if _has_words(row, "flex|hybridep|deepep"):
        dispatcher = "flex"
    is_stated = row.has_flags or _has_words(row, "dispatcher|hybridep|deepep")
    if has_far_experts and not is_stated:
        dispatcher = "flex"
        row.assumed.append("dispatcher not stated: one that sends a token to a node once")
    return dispatcher


def _tp_overlap(row: Row, is_megatron: bool) -> str | None:
    """The overlap of tensor parallelism; None: the engine's.

    Args:
        row: the row.
        is_megatron: whether it is Megatron-LM with sequence parallelism.
    """
    overlap = None
    is_stated = _has_words(row, "no tp/dp/p2p overlap|tp comm overlap")
    if is_megatron and not row.has_flags and not is_stated:
        overlap = "tiles"
        row.assumed.append("overlap of tp not stated: piece by piece")
    if _has_words(row, "tp comm overlap"):
        overlap = "tiles"
    if _has_words(row, "no tp/dp/p2p overlap|tp comm overlap = false"):
        overlap = "none"
    return overlap
