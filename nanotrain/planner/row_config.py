"""A row of a table of measurements as a scenario, and what had to be assumed where the row says nothing.

A row is read by its columns and by Megatron-LM's flags where it has them; its source and the name of its model have no
influence. What a row leaves out of a published architecture comes from `data/models.yaml`, found by the sizes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, get_args

import yaml

from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import compose_line
from nanotrain.config.parallel import RecomputeModule
from nanotrain.config.schema import with_values
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.planner.hardware import GPU, gpu_of
from nanotrain.planner.scenario import DATA, Engine, Scenario, engine_of, scenario_of

GPT2_VOCAB_SIZE = 50257
UNSTATED = {"", "-", "?", "n/a", "na", "null", "unknown", "not stated"}
SIZES = ("hidden", "heads", "ffn", "experts", "topk")  # by which a published model is found
MODEL_FIELDS = ("qk_layernorm", "add_bias_linear", "softmax_type", "window_size", "window_attn_skip_freq")
FLAG_OF = {
    "layers": "num-layers",
    "hidden": "hidden-size",
    "heads": "num-attention-heads",
    "seq": "seq-length",
    "ffn": "ffn-hidden-size",
    "vp": "num-virtual-stages-per-pipeline-rank",
}


@cache
def read_data(name: str) -> Any:
    """A file of the folder `data`."""
    return yaml.safe_load((DATA / f"{name}.yaml").read_bytes())


@dataclass
class Row:
    """The cells of a row by column, and what is assumed about it."""

    cells: Mapping[str, str]
    assumed: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        """A cell in lower case; empty where nothing is stated."""
        text = (self.cells.get(column) or "").strip().lower()
        return "" if text in UNSTATED else text

    def number(self, column: str, otherwise: int | None = None) -> int | None:
        """A whole number; `otherwise` where the row has none.

        Raises:
            ConfigError: something else than a number.
        """
        text = self.text(column).replace(",", "").replace("_", "")
        if text in ("", "none"):
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

    def words(self, *columns: str) -> str:
        """Columns with a space for every hyphen and underscore."""
        return re.sub("[-_]", " ", " ".join(map(self.text, columns or ("zero", "precision", "overlap_flags", "flags"))))

    def choice(self, key: str, *columns: str) -> str | None:
        """The first choice of a key of `data/rows.yaml` that is found in columns."""
        words = self.words(*columns)
        found = (choice for choice, pattern in read_data("rows")[key].items() if re.search(pattern, words))
        return next((choice.partition(" ")[0] for choice in found), None)

    def leaves_open(self, column: str) -> bool:
        """Whether a user would have chosen what a column does not state."""
        if self.has_flags or self.text(column):
            return False
        return column != "vp" or "interleaved" in self.text("overlap_flags") and (self.number("pp") or 1) > 1

    @property
    def has_flags(self) -> bool:
        """Whether the row has the flags of a run of Megatron-LM."""
        return bool(self.text("flags"))

    @property
    def precision(self) -> str:
        """The data type of the products."""
        return self.choice("precision", "precision") or "bf16"


def scenario_of_row(row: Row, *, engine: str | None = None) -> Scenario:
    """The scenario of a row; what is assumed goes to `row.assumed`.

    Args:
        row: the row.
        engine: name of the engine; None infers it from the row.

    Raises:
        NanotrainError: what is missing, or what cannot be formed.
    """
    if kind := row.choice("not modelled", "flags"):
        raise ConfigError(f"{kind} has no model")
    chosen = engine_of(engine or ("megatron" if row.has_flags else row.choice("engine") or ""))
    config, world_size = _config(row, chosen)
    if not row.text("precision"):
        row.assumed.append("precision not stated: bf16")
    if re.search(r"\bcompiled?\b", row.words()):
        chosen = replace(chosen, fused=True)
    gpu = row.text("hardware") or row.assume("h100", "hardware not stated: H100, the time is a guess")
    tables, words = read_data("rows"), row.words()
    options: dict[str, Any] = {name: row.choice(name) for name in ("dispatcher", "tp_overlap")}
    options |= {name: re.search(pattern, words) is not None for name, pattern in tables["switches"].items()}
    features = (name for name, pattern in tables["features"].items() if re.search(pattern, words))
    if not row.choice("stated dispatcher") and not row.has_flags and _ep_leaves_the_node(row, gpu_of(gpu)):
        options["dispatcher"] = row.assume("flex", "dispatcher not stated: one that sends a token to a node once")
    if chosen.name == "megatron" and not row.has_flags and config.parallel.sequence_parallel:
        options["tp_overlap"] = options["tp_overlap"] or row.assume("tiles", "overlap of tp not stated: piece by piece")
    if row.number("experts") and row.has_flags and "force load balancing" not in words:
        options["imbalance"] = row.assume(1.2, "routing not balanced by force: 1.2 times an even share")
    return scenario_of(
        config,
        world_size,
        gpu=gpu_of(gpu),
        engine=chosen,
        matmul_dtype=row.precision,
        features=frozenset(features),
        **options,
    )


def _ep_leaves_the_node(row: Row, gpu: GPU) -> bool:
    return bool(row.number("experts")) and (row.number("ep") or 1) * (row.number("tp") or 1) > gpu.gpus_per_node


def _config(row: Row, engine: Engine) -> tuple[Config, int]:
    """The configuration and the number of ranks."""
    tp, pp, cp = (row.number(axis, 1) or 1 for axis in ("tp", "pp", "cp"))
    if not row.text("tp") and not row.text("pp") and (row.number("gpus") or 1) > 1:
        if engine.name != "fsdp2":
            raise ConfigError("the layout is not stated")
        row.assumed.append("layout not stated: data parallelism alone")
    world_size = row.number("gpus") or tp * pp * cp * row.required("dp")
    if world_size % (tp * pp * cp):
        raise ConfigError(f"{world_size} GPUs cannot form tp={tp} x pp={pp} x cp={cp}")
    dp = world_size // (tp * pp * cp)
    micro = row.number("mbs", 1) or 1
    batch = row.number("gbs") or row.assume(
        micro * dp * (8 * pp if pp > 1 else 1),
        "global batch not stated: 8 microbatches per stage of a pipeline, else 1",
    )
    if batch % (micro * dp):
        batch = row.assume(max(1, batch // (micro * dp)) * micro * dp, "global batch rounded to whole microbatches")
    values: dict[str, Any] = {
        "parallel.tensor_model_parallel_size": tp,
        "parallel.pipeline_model_parallel_size": pp,
        "parallel.context_parallel_size": cp,
        "parallel.expert_model_parallel_size": row.number("ep", 1),
        "parallel.data_parallel_sharding_strategy": row.choice("strategy", "zero"),
        "precision.params_dtype": row.precision if row.precision in ("fp16", "fp32") else "bf16",
        "train.micro_batch_size": micro,
        "train.global_batch_size": batch,
        "train.step_batch_size_schedule": [],
        "data.seq_length": row.required("seq"),
    }
    if not row.has_flags:
        values |= _model(row, engine) | _layout(row, engine, tp=tp, pp=pp) | _recomputation(row, engine)
    config = with_values(_with_flags(row) if row.has_flags else Config(), values)
    model, stages = config.model, pp * config.parallel.num_virtual_stages_per_pipeline_rank
    if model.vocab_size is None:
        size = row.number("vocab") or row.assume(GPT2_VOCAB_SIZE, "vocabulary not stated: GPT-2's")
        model = replace(model, vocab_size=size)
    pad = model.make_vocab_size_divisible_by * (tp if engine.name == "megatron" else 1)
    model = replace(model, make_vocab_size_divisible_by=pad).with_padding_for(tp)
    if model.num_layers + sum(config.parallel.counted_ends) < stages:
        raise ConfigError(f"{model.num_layers} layers cannot form {stages} pipeline stages")
    if model.num_attention_heads % tp or (model.mla is None and model.num_attention_heads % model.query_groups):
        raise ConfigError(f"{model.num_attention_heads} heads in {model.query_groups} groups cannot form tp={tp}")
    return replace(config, model=model), world_size


def _with_flags(row: Row) -> Config:
    """The configuration of Megatron-LM's flags, with its defaults."""
    stated = {flag: row.number(column) for column, flag in FLAG_OF.items() if row.number(column)}
    stated["max-position-embeddings"] = row.required("seq")
    config, ignored = _of_flags(tuple(f"{flag}={number}" for flag, number in stated.items()), row.cells["flags"])
    row.assumed += [f"flags left out: {ignored}"] if ignored else []
    return config


@cache
def _of_flags(words: tuple[str, ...], flags: str) -> tuple[Config, str]:
    """The configuration of flags without their hyphens, and the mistakes in them."""
    # A list is written as name=[a b c]; its further values are no flags.
    argv, is_list = ["--megatron-defaults"], False
    for word in (*flags.split(), *words):
        name, _, value = word.partition("=[")
        argv += [word.rstrip("]")] if is_list else [f"--{name}", value.rstrip("]")] if value else [f"--{word}"]
        is_list = (is_list or bool(value)) and not word.endswith("]")
    errors = ErrorCollector()
    config = compose_line(parse(argv), errors=errors).config
    if config.parallel.num_virtual_stages_per_pipeline_rank > 1:
        config = with_values(config, {"parallel.pipeline_schedule": "interleaved"})
    return config, "; ".join(error.what for error in errors.errors)


def _model(row: Row, engine: Engine) -> dict[str, Any]:
    """Values of the model section."""
    layers, hidden = row.required("layers"), row.required("hidden")
    known = _known(row)
    heads = row.number("heads") or row.assume(max(1, hidden // 128), "heads not stated: 128 channels each")
    if "head_dim" not in known and hidden % heads:
        raise ConfigError(f"{heads} heads do not divide hidden {hidden}")
    is_mla = row.text("kv_heads") == "mla" or "q_lora" in known
    groups = heads if is_mla else row.number("kv_heads") or known.get("kv") or heads
    ffn = row.number("ffn") or row.assume(4 * hidden, "ffn not stated: 4 x hidden")
    vocab = row.number("vocab") or row.assume(GPT2_VOCAB_SIZE, "vocabulary not stated: GPT-2's")
    gated = known.get("gated", engine.name == "nanotron" or groups < heads or ffn != 4 * hidden)
    tied = known.get("tied", bool(re.search(r"\btied", row.words("overlap_flags", "note"))))
    stated = re.search(r"n_params (\d+)", row.text("note"))
    if stated and not row.number("experts"):  # the kind of MLP and of head whose parameters are as many as stated
        attention = layers * hidden * hidden * 2 * (heads + groups) // heads
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
        "kv_channels": known.get("head_dim"),
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
        rank = known["q_lora"] if known else row.assume(1536, "sizes of MLA not stated: those of DeepSeek-V3")
        values |= {"multi_latent_attention": True, "mla.q_lora_rank": rank or None}
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
        "moe.router_num_groups": known.get("groups"),
        "moe.router_group_topk": known.get("group_topk"),
        "moe.router_force_load_balancing": True,
        "mtp.num_layers": 1 if has_mtp else None,
    }


def _known(row: Row) -> dict[str, Any]:
    """The published model with the sizes of a row; empty without one."""
    sizes, kv = {column: row.number(column) for column in SIZES}, row.text("kv_heads")
    found = [
        model
        for model in read_data("models")
        if all(model.get(column) == size for column, size in sizes.items())
        and not (kv.isdigit() and kv != str(model.get("kv", model["heads"] if "q_lora" in model else kv)))
    ]
    layers = row.number("layers") or 0
    return min(found, key=lambda model: abs(model["layers"] - layers), default={})


def _layout(row: Row, engine: Engine, *, tp: int, pp: int) -> dict[str, Any]:
    """Values of the parallel and precision sections that columns state in words."""
    options, virtual = row.text("overlap_flags"), row.number("vp")
    sequence_parallel = tp > 1 and "no sequence parallel" not in options
    if sequence_parallel and engine.name == "megatron" and "dist opt" not in row.words("zero"):
        sequence_parallel = row.assume(False, "sequence parallelism not stated: none")
    overlaps = not re.search(r"no tp/dp/p2p overlap|no overlap", options)
    values = {
        "parallel.num_virtual_stages_per_pipeline_rank": virtual or 1,
        "parallel.pipeline_schedule": "interleaved" if (virtual or 1) > 1 else "1f1b",
        "parallel.sequence_parallel": sequence_parallel,
        "parallel.expert_tensor_parallel_size": row.number("etp") or (1 if row.number("experts") else None),
        "parallel.cp_comm_type": "a2a" if "a2a" in options and (row.number("cp") or 1) > 1 else "p2p",
        "parallel.overlap_grad_reduce": overlaps,
        "parallel.overlap_param_gather": overlaps,
    }
    if engine.name == "megatron" and "fp16" in row.text("precision") and not re.search("flash|fused", options):
        row.assumed.append("attention not stated: not fused, as in the years of fp16")
        values["train.attention_backend"] = "unfused"
    if "pure" in row.words("precision"):
        values["precision.grad_reduce_in_bf16"] = True
    if row.precision in ("fp8", "mxfp8", "nvfp4"):
        values |= {"precision.fp8.format": "hybrid", "precision.fp8.recipe": "tensorwise"}
    return values


def _recomputation(row: Row, engine: Engine) -> dict[str, Any]:
    """Values of the memory section."""
    text, number = row.text("recompute"), re.search(r"num_layers\W+(\d+)", row.text("recompute"))
    granularity = row.choice("granularity", "recompute")
    if "none" in text and "modules" not in text:
        granularity = None
    modules = [name for name in get_args(RecomputeModule) if re.search(rf"\b{name}\b", text)]
    is_full = granularity == "full"
    if engine.name == "fsdp2" and granularity == "selective" and not modules:
        # torchtitan keeps every second product and recomputes the rest: as long as every second layer takes
        half = row.assume(max(1, row.required("layers") // 2), "selective recomputation: every second product")
        return {
            "memory.recompute_granularity": "full",
            "memory.recompute_method": "block",
            "memory.recompute_num_layers": half,
        }
    values: dict[str, Any] = {"recompute_granularity": granularity, "recompute_modules": [] if is_full else modules}
    if is_full and number:
        method = "block" if "block" in text else "uniform"
        values |= {"recompute_num_layers": int(number.group(1)), "recompute_method": method}
    if offloaded := re.search(r"cpu_offloading_num_layers\W+(\d+)", row.text("overlap_flags")):
        values |= {"cpu_offloading": True, "cpu_offloading_num_layers": int(offloaded.group(1))}
    return {f"memory.{name}": value for name, value in values.items()}
