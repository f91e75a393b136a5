"""A row of a table of measurements as a scenario, and what had to be assumed where the row says nothing.

A row is read by its columns and by Megatron-LM's flags where it has them; its source and the name of its model have no
influence. What a row leaves out of a published architecture comes from `data/models.yaml`, found by the sizes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import yaml

from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import compose_line
from nanotrain.config.schema import with_values
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.scenario import DATA, Engine, Scenario, engine_of, scenario_of

GPT2_VOCAB_SIZE = 50257
UNSTATED = {"", "-", "?", "n/a", "na", "none", "null", "unknown", "not stated"}
MODULES = ("core_attn", "mla_up_proj", "moe_act", "layernorm", "mlp", "moe")
MODEL_FIELDS = ("qk_layernorm", "add_bias_linear", "softmax_type", "window_size", "window_attn_skip_freq")
PRECISIONS = {"nvfp4": "nvfp4", "mxfp8": "mxfp8", "fp8-mx": "mxfp8", "fp8": "fp8", "bf16": "bf16", "fp16": "fp16"}


@dataclass
class Row:
    """The cells of a row by column, and what is assumed about it."""

    cells: Mapping[str, str]
    assumed: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        """A cell in lower case; empty where nothing is stated."""
        text = (self.cells.get(column) or "").strip()
        return "" if text.lower() in UNSTATED else text.lower()

    def number(self, column: str, otherwise: int | None = None) -> int | None:
        """A whole number; `otherwise` where the row has none.

        Raises:
            ConfigError: something else than a number.
        """
        text = self.text(column).replace(",", "").replace("_", "")
        if not text:
            return otherwise
        if not re.fullmatch(r"\d{1,12}(\.0*)?", text) or not float(text):
            raise ConfigError(f"{column} is {text!r}", why="it takes a whole number of at least 1")
        return int(float(text))

    def required(self, column: str) -> int:
        """A number that nothing else in the row implies."""
        if (number := self.number(column)) is None:
            raise ConfigError(f"{column} is not stated")
        return number

    def assume(self, value: Any, text: str) -> Any:
        """The value, with a note of what was assumed."""
        self.assumed.append(text)
        return value

    @property
    def has_flags(self) -> bool:
        """Whether the row has the flags of a run of Megatron-LM."""
        return bool(self.text("flags"))


def scenario_of_row(row: Row, *, engine: str | None = None) -> Scenario:
    """The scenario of a row; what is assumed goes to `row.assumed`.

    Args:
        row: the row.
        engine: name of the engine; None infers it from the row.

    Raises:
        NanotrainError: what is missing, or what cannot be formed.
    """
    chosen = engine_of(engine or _engine(row))
    config, world_size = _config(row, chosen)
    gpu = row.text("hardware") or row.assume("h100", "hardware not stated: H100, the time is a guess")
    return scenario_of(
        config, world_size, gpu=gpu_of(gpu), engine=chosen, matmul_dtype=_precision(row), **_options(row, chosen)
    )


def _engine(row: Row) -> str:
    """The program by what only its runs say."""
    zero, options = row.text("zero"), row.text("overlap_flags")
    if row.has_flags:
        return "megatron"
    if "tp_mode" in options or "fp32 grad accumulation" in row.text("precision"):
        return "nanotron"
    if "mfsdp" in zero or "dist-opt" in zero or "distributed-optimizer" in zero:
        return "megatron"
    is_sharded = re.search(r"fsdp|full_shard|hsdp|zero-?[23]", zero)
    return "fsdp2" if is_sharded else "megatron"


def _config(row: Row, engine: Engine) -> tuple[Config, int]:
    """The configuration and the number of ranks."""
    base = _with_flags(row) if row.has_flags else Config()
    tp, pp, cp = (row.number(axis, 1) or 1 for axis in ("tp", "pp", "cp"))
    if not row.text("tp") and not row.text("pp") and (row.number("gpus") or 1) > 1 and not row.has_flags:
        raise ConfigError("the layout is not stated")
    world_size = row.number("gpus") or tp * pp * cp * row.required("dp")
    if world_size % (tp * pp * cp):
        raise ConfigError(f"{world_size} GPUs cannot form tp={tp} x pp={pp} x cp={cp}")
    dp = world_size // (tp * pp * cp)
    micro = row.number("mbs") or row.assume(1, "micro-batch size not stated: 1")
    batch = row.number("gbs") or row.assume(micro * dp * 8 * pp, "global batch not stated: 8 microbatches per stage")
    if batch % (micro * dp):
        batch = row.assume(max(1, batch // (micro * dp)) * micro * dp, "global batch rounded to whole microbatches")
    values: dict[str, Any] = {
        "parallel.tensor_model_parallel_size": tp,
        "parallel.pipeline_model_parallel_size": pp,
        "parallel.context_parallel_size": cp,
        "parallel.expert_model_parallel_size": row.number("ep", 1),
        "train.micro_batch_size": micro,
        "train.global_batch_size": batch,
        "train.step_batch_size_schedule": [],
        "data.seq_length": row.required("seq"),
    }
    if not row.has_flags:
        values |= _model(row, engine) | _layout(row, engine, tp=tp, pp=pp)
    values |= _sharding(row, engine) | _recompute(row)
    config = with_values(base, values)
    if row.has_flags and config.model.vocab_size is None:
        size = row.number("vocab") or row.assume(GPT2_VOCAB_SIZE, "vocabulary not stated: GPT-2's")
        config = replace(config, model=replace(config.model, vocab_size=size))
    pad = config.model.make_vocab_size_divisible_by * (tp if engine.name == "megatron" else 1)
    model = replace(config.model, make_vocab_size_divisible_by=pad).with_padding_for(tp)
    stages = pp * config.parallel.num_virtual_stages_per_pipeline_rank
    if model.num_layers < stages and config.parallel.pipeline_model_parallel_layout is None:
        raise ConfigError(f"{model.num_layers} layers cannot form {stages} pipeline stages")
    heads = model.num_attention_heads
    if heads % tp or (model.mla is None and heads % model.query_groups):
        raise ConfigError(f"{heads} heads in {model.query_groups} groups cannot be split over tp={tp}")
    return replace(config, model=model), world_size


def _with_flags(row: Row) -> Config:
    """The configuration of Megatron-LM's flags, with its defaults."""
    columns = {"layers": "num-layers", "hidden": "hidden-size", "heads": "num-attention-heads", "seq": "seq-length"}
    words = tuple(f"{flag}={row.required(column)}" for column, flag in columns.items())
    for column, flag in (("ffn", "ffn-hidden-size"), ("vp", "num-virtual-stages-per-pipeline-rank")):
        words += (f"{flag}={row.number(column)}",) if row.number(column) else ()
    config, ignored = _of_flags(words + (f"max-position-embeddings={row.required('seq')}",), row.cells["flags"])
    if ignored:
        row.assumed.append(f"flags left out: {ignored}")
    return config


@cache
def _of_flags(words: tuple[str, ...], flags: str) -> tuple[Config, str]:
    """The configuration of flags without their hyphens, and the mistakes in them."""
    # A list is written as name=[a b c]; its further values have no flag before them.
    listed = re.sub(r"=\[([^\[\]=]*)\]", lambda match: " " + match.group(1), flags)
    known, argv = {word.partition("=")[0] for word in flags.split()}, ["--megatron-defaults"]
    for word in (*listed.split(), *words):
        argv.append(f"--{word}" if word in words or word.partition("=")[0] in known else word)
    errors = ErrorCollector()
    config = compose_line(parse(argv), errors=errors).config
    if config.parallel.num_virtual_stages_per_pipeline_rank > 1 and config.parallel.pipeline_schedule == "1f1b":
        config = with_values(config, {"parallel.pipeline_schedule": "interleaved"})
    return config, "; ".join(error.what for error in errors.errors)


def _model(row: Row, engine: Engine) -> dict[str, Any]:
    """Values of the model section."""
    layers, hidden = row.required("layers"), row.required("hidden")
    known, heads = _known(row), row.number("heads")
    if heads is None:
        heads = row.assume(max(1, hidden // 128), "heads not stated: 128 channels each")
    head_dim = known.get("head_dim") or hidden // heads
    if "head_dim" not in known and hidden % heads:
        raise ConfigError(f"{heads} heads do not divide hidden {hidden}")
    is_mla = row.text("kv_heads") == "mla" or "q_lora" in known
    groups = heads if is_mla else row.number("kv_heads") or known.get("kv") or heads
    ffn = row.number("ffn") or row.assume(4 * hidden, "ffn not stated: 4 x hidden")
    vocab = row.number("vocab") or row.assume(GPT2_VOCAB_SIZE, "vocabulary not stated: GPT-2's")
    gated = known.get("gated", engine.name == "nanotron" or groups < heads or ffn != 4 * hidden)
    options, note = row.text("overlap_flags"), row.text("note")
    tied = known.get("tied", re.search(r"\btied", options + " " + note) is not None)
    stated = re.search(r"n_params (\d+)", note)
    if stated and not row.number("experts"):  # the kind of MLP and of head whose parameters are as many as stated
        attention = layers * hidden * head_dim * 2 * (heads + groups)
        counts = {
            (is_gated, is_tied): attention + layers * (2 + is_gated) * hidden * ffn + (2 - is_tied) * vocab * hidden
            for is_gated in (False, True)
            for is_tied in (False, True)
        }
        gated, tied = min(counts, key=lambda kind: abs(counts[kind] - int(stated.group(1))))
    values = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": head_dim,
        "vocab_size": vocab,
        "ffn_hidden_size": ffn,
        "max_position_embeddings": row.required("seq"),
        "activation": "swiglu" if gated else "gelu_tanh",
        "normalization": "RMSNorm" if gated else "LayerNorm",
        "position_embedding_type": "rope" if gated else "learned_absolute",
        "untie_embeddings_and_output_weights": not tied,
        **{name: known[name] for name in MODEL_FIELDS if name in known},
    }
    if is_mla:
        rank = known.get("q_lora", 1536)
        values |= {"multi_latent_attention": True, "kv_channels": None, "mla.q_lora_rank": rank or None}
        if "q_lora" not in known:
            row.assumed.append("sizes of MLA not stated: those of DeepSeek-V3")
    if num_experts := row.number("experts"):
        values |= _experts(row, known, num_experts=num_experts, ffn=ffn)
    return {f"model.{name}": value for name, value in values.items()}


def _experts(row: Row, known: Mapping[str, Any], *, num_experts: int, ffn: int) -> dict[str, Any]:
    """Values of the model section that concern experts."""
    layers, topk, published = row.required("layers"), row.required("topk"), known.get("layers", 0)
    dense, shared = known.get("dense", 0), known.get("shared")
    if dense and layers != published:  # a model that was cut
        dense = min(layers, max(1, round(dense * layers / published)))
    dense_ffn = known.get("dense_ffn", ffn * (topk + bool(shared)))
    if not known:
        row.assumed.append("no published model has these sizes: all layers with experts, none shared")
    elif "dense" in known or shared:
        row.assumed.append(f"{dense} dense layers of ffn {dense_ffn} and shared expert of {shared}, as published")
    has_mtp = known.get("mtp") and layers == published and not re.search(r"w/o mtp|no mtp", row.text("note"))
    return {
        "ffn_hidden_size": dense_ffn,
        "moe.num_experts": num_experts,
        "moe.router_topk": topk,
        "moe.ffn_hidden_size": ffn,
        "moe.shared_expert_intermediate_size": shared,
        "moe.layer_freq": known.get("layer_freq", f"[0]*{dense}+[1]*{layers - dense}"),
        "moe.router_force_load_balancing": True,
        "mtp.num_layers": 1 if has_mtp else None,
    }


@cache
def _models() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = yaml.safe_load((DATA / "models.yaml").read_bytes())
    return rows


def _known(row: Row) -> dict[str, Any]:
    """The published model with the sizes of a row; empty without one."""
    columns = ("hidden", "heads", "ffn", "experts", "topk")
    sizes = {column: row.number(column) for column in columns}
    kv, layers = row.text("kv_heads"), row.number("layers") or 0
    found = [
        model
        for model in _models()
        if all(model.get(column) == sizes[column] for column in columns)
        and (not kv or "kv" not in model or kv == str(model["kv"]))
        and not (kv.isdigit() and "q_lora" in model and int(kv) != model["heads"])
    ]
    return min(found, key=lambda model: abs(model["layers"] - layers), default={})


def _layout(row: Row, engine: Engine, *, tp: int, pp: int) -> dict[str, Any]:
    """Values of the parallel section that columns state in words."""
    options, virtual = row.text("overlap_flags"), row.number("vp")
    if virtual is None and pp > 1 and "interleaved" in options:
        layers = row.required("layers")
        virtual = 2 if layers % (2 * pp) == 0 else 1
        row.assumed.append(f"virtual stages not stated: {virtual}")
    sequence_parallel = tp > 1 and "no sequence parallel" not in options
    if sequence_parallel and engine.name == "megatron" and "dist-opt" not in row.text("zero"):
        sequence_parallel = row.assume(False, "sequence parallelism not stated: none")
    overlaps = not re.search(r"no tp/dp/p2p overlap|no overlap", options)
    return {
        "parallel.num_virtual_stages_per_pipeline_rank": virtual or 1,
        "parallel.pipeline_schedule": "interleaved" if (virtual or 1) > 1 else "1f1b",
        "parallel.sequence_parallel": sequence_parallel,
        "parallel.expert_tensor_parallel_size": row.number("etp") or (1 if row.number("experts") else None),
        "parallel.cp_comm_type": "a2a" if "a2a" in options and (row.number("cp") or 1) > 1 else "p2p",
        "parallel.overlap_grad_reduce": overlaps,
        "parallel.overlap_param_gather": overlaps,
    }


def _sharding(row: Row, engine: Engine) -> dict[str, Any]:
    """The data-parallel strategy and the dtypes of parameters and gradients."""
    zero, matmul = row.text("zero").replace("-", "_"), _precision(row)
    dtype = matmul if matmul in ("fp16", "fp32") else "bf16"
    values: dict[str, Any] = {"precision.params_dtype": dtype}
    if engine.name == "fsdp2" and "pure" in row.text("precision"):
        values["precision.grad_reduce_in_bf16"] = dtype == "bf16"
    if matmul in ("fp8", "mxfp8", "nvfp4") and not row.has_flags:
        values |= {"precision.fp8.format": "hybrid", "precision.fp8.recipe": "tensorwise"}
    if re.search(r"optim_grads_params|zero_?3|full_shard|fsdp|hsdp", zero):
        strategy = "optim_grads_params"
    elif re.search(r"zero_?2|optim_grads|grad_op", zero):
        strategy = "optim_grads"
    else:
        strategy = "optim" if re.search(r"zero_?1|dist_opt|distributed_opt|\boptim\b", zero) else "no_shard"
    return values | {"parallel.data_parallel_sharding_strategy": strategy}


def _precision(row: Row) -> str:
    """The data type of the products."""
    text = row.text("precision")
    found = [dtype for word, dtype in PRECISIONS.items() if word in text]
    if found:
        return found[0]
    return "fp32" if re.search(r"fp32|tf32", text) else row.assume("bf16", "precision not stated: bf16")


def _recompute(row: Row) -> dict[str, Any]:
    """Values of the memory section."""
    text, options = row.text("recompute"), row.text("overlap_flags")
    values: dict[str, Any] = {}
    if offloaded := re.search(r"cpu_offloading_num_layers\W+(\d+)", options):
        values = {"memory.cpu_offloading": True, "memory.cpu_offloading_num_layers": int(offloaded.group(1))}
    if row.has_flags:
        return values
    modules = [name for name in MODULES if re.search(rf"\b{name}\b", text)]
    is_full = re.search(r"\bfull\b", text)
    if is_full or modules or "selective" in text:
        values["memory.recompute_granularity"] = "full" if is_full else "selective"
        values["memory.recompute_modules"] = [] if is_full else modules
    number = re.search(r"num_layers\W+(\d+)", text)
    if is_full and number:
        values["memory.recompute_num_layers"] = int(number.group(1))
        values["memory.recompute_method"] = "block" if "block" in text else "uniform"
    if not (row.cells.get("recompute") or "").strip():
        row.assumed.append("recomputation not stated: none")
    return values


def _options(row: Row, engine: Engine) -> dict[str, Any]:
    """Fields of the scenario that no setting of nanotrain says."""
    text = (row.text("overlap_flags") + " " + row.text("flags")).replace("-", " ").replace("_", " ")
    is_wide = re.search(r"flex|hybridep|deepep", text)
    features = {
        "fused loss": re.search(r"fusion impl=te|cross entropy fusion", text),
        "compiled loss": "cross entropy loss fusion" in text and "fusion impl=te" not in text,
        "deferred wgrad of the head": "defer embedding wgrad compute" in text,
        "local layers": "transformer impl=local" in text,
        "attention mask": row.has_flags and "no create attention mask" not in text,
    }
    options: dict[str, Any] = {
        "dispatcher": "flex" if is_wide else "allgather" if "dispatcher type=allgather" in text else "alltoall",
        "cuda_graphs": "cuda graph" in text,
        "ep_overlap": re.search(r"overlap moe expert parallel comm(?! = false)", text) is not None,
        "features": frozenset(name for name, has in features.items() if has),
    }
    if re.search(r"no tp/dp/p2p overlap|tp comm overlap = false", text):
        options["tp_overlap"] = "none"
    elif "tp comm overlap" in text:
        options["tp_overlap"] = "tiles"
    if row.number("experts") and engine.name == "megatron" and row.has_flags and "force load" not in text:
        options["imbalance"] = row.assume(1.1, "routing not balanced by force: 1.1 times an even share")
    return options
