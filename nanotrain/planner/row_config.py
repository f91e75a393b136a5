"""A row of a table of measurements as a scenario, and what had to be assumed where the row says
nothing.

A row is read by its columns and by Megatron-LM's flags where it has them; its source and the name
of its model have no influence.

    data/rows.yaml     what words in a row mean: choices, and rules that set settings
    data/models.yaml   what rows leave out of a published architecture, found by the sizes
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, get_args

from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import compose_line
from nanotrain.config.parallel import RecomputeModule
from nanotrain.config.rules.check import check_layout
from nanotrain.config.schema import with_values
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.planner.engine import Engine, engine_of, with_sections
from nanotrain.planner.hardware import gpu_of, read_data
from nanotrain.planner.scenario import Scenario, scenario_of

GPT2_VOCAB_SIZE = 50257
UNSTATED = {"", "-", "?", "n/a", "na", "null", "unknown", "not stated"}


@dataclass
class Row:
    """The cells of a row by column, what follows from several of them, and what is assumed about
    it.
    """

    cells: Mapping[str, str]
    assumed: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def text(self, column: str) -> str:
        """A cell in lower case; empty where nothing is stated."""
        text = (self.facts.get(column) or self.cells.get(column) or "").strip().lower()
        return "" if text in UNSTATED else text

    def number(self, column: str) -> int | None:
        """A whole number; None where the row has none.

        Raises:
            ConfigError: something else than a number.
        """
        text = self.text(column).replace(",", "").replace("_", "")
        if text in ("", "none"):
            return None
        if not re.fullmatch(r"\d{1,12}(\.0*)?", text) or not float(text):
            raise ConfigError(f"{column} is {text!r}", why="it takes a whole number of at least 1")
        return int(float(text))

    def numbers(self, key: str) -> dict[str, int | None]:
        """The numbers of the columns of a key of `data/rows.yaml`, by the setting that they state."""
        return {setting: self.number(column) for setting, column in read_data("rows")[key].items()}

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
        return re.sub(
            "[-_]",
            " ",
            " ".join(map(self.text, columns or ("zero", "precision", "overlap_flags", "flags"))),
        )

    def choice(self, key: str, *columns: str) -> str:
        """The first choice of a key of `data/rows.yaml` that is found in columns; empty without
        one.
        """
        words = self.words(*columns)
        found = (
            choice
            for choice, pattern in read_data("rows")[key].items()
            if re.search(pattern, words)
        )
        return next((choice.partition(" ")[0] for choice in found), "")

    def settings(self, key: str) -> dict[str, Any]:
        """What the rules of a key of `data/rows.yaml` set."""
        values: dict[str, Any] = {}
        for rule in read_data("rows")[key]:
            found = [
                re.search(pattern, self.words(column))
                for column, pattern in rule.get("when", {}).items()
            ]
            unless = (
                re.search(pattern, self.words(column))
                for column, pattern in rule.get("unless", {}).items()
            )
            if all(found) and not any(unless):
                number = next((int(match[1]) for match in found if match and match.re.groups), None)
                values |= {
                    name: number if value == "NUMBER" else value
                    for name, value in rule.get("set", {}).items()
                }
                self.assumed += [rule["assumed"]] if "assumed" in rule else []
        return values

    def leaves_open(self, column: str) -> bool:
        """Whether a user would have chosen what a column does not state."""
        if self.has_flags or self.text(column):
            return False
        return (
            column != "vp"
            or "interleaved" in self.text("overlap_flags")
            and (self.number("pp") or 1) > 1
        )

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
    if kind := row.choice("not modelled", "flags"):
        raise ConfigError(f"{kind} has no model")
    chosen = engine_of(engine or ("megatron" if row.has_flags else row.choice("engine")))
    products, words = row.choice("precision", "precision") or "bf16", row.words()
    row.facts |= {"engine": chosen.name, "products": products, "words": words}
    config, world_size = _config(row, chosen)
    gpu = gpu_of(
        row.text("hardware") or row.assume("h100", "hardware not stated: H100, the time is a guess")
    )
    if re.search(r"\bcompiled?\b", words):
        chosen = with_sections(chosen, {"operators": {"fused": True}})
    sizes = config.parallel.expert_model_parallel_size, config.parallel.tensor_model_parallel_size
    row.facts |= {
        "far_experts": "yes"
        if row.number("experts") and sizes[0] * sizes[1] > gpu.gpus_per_node
        else "",
        "sequence_parallel": "yes" if config.parallel.sequence_parallel else "",
    }
    features = (
        name for name, pattern in read_data("rows")["features"].items() if re.search(pattern, words)
    )
    return scenario_of(
        config,
        world_size,
        gpu=gpu,
        engine=chosen,
        matmul_dtype=products,
        features=frozenset(features),
        **row.settings("options"),
    )


def _config(row: Row, engine: Engine) -> tuple[Config, int]:
    """The configuration and the number of ranks."""
    values: dict[str, Any] = {
        setting: number or 1 for setting, number in row.numbers("numbers").items()
    }
    tp, pp, cp, _, micro = values.values()
    if not row.text("tp") and not row.text("pp") and (row.number("gpus") or 1) > 1:
        if engine.name != "fsdp2":
            raise ConfigError("the layout is not stated")
        row.assumed.append("layout not stated: data parallelism alone")
    world_size = row.number("gpus") or tp * pp * cp * row.required("dp")
    # samples of a microbatch
    least = micro * with_values(Config(), values).parallel.data_parallel_size(world_size)
    batch = row.number("gbs") or row.assume(
        least * (8 * pp if pp > 1 else 1),
        "global batch not stated: 8 microbatches per stage of a pipeline, else 1",
    )
    if batch % least:
        batch = row.assume(
            max(1, batch // least) * least, "global batch rounded to whole microbatches"
        )
    values |= row.settings("run") | {
        "parallel.data_parallel_sharding_strategy": row.choice("strategy", "zero")
    }
    values |= {"train.global_batch_size": batch, "data.seq_length": row.required("seq")}
    config = (
        with_values(_with_flags(row), values)
        if row.has_flags
        else with_values(Config(), values | _stated(row))
    )
    model = config.model
    if model.vocab_size is None:
        size = row.number("vocab") or row.assume(GPT2_VOCAB_SIZE, "vocabulary not stated: GPT-2's")
        model = replace(model, vocab_size=size)
    pad = model.make_vocab_size_divisible_by * (tp if engine.name == "megatron" else 1)
    model = replace(model, make_vocab_size_divisible_by=pad).with_padding_for(tp)
    config = replace(config, model=model)
    # a row may recompute modules that its model lacks
    check_layout(replace(config, memory=Config().memory))
    return config, world_size


def _with_flags(row: Row) -> Config:
    """The configuration of Megatron-LM's flags, with its defaults."""
    stated = {flag: number for flag, number in row.numbers("flags").items() if number}
    stated["max-position-embeddings"] = row.required("seq")
    config, ignored = _of_flags(
        tuple(f"{flag}={number}" for flag, number in stated.items()), row.cells["flags"]
    )
    row.assumed += [f"flags left out: {ignored}"] if ignored else []
    return config


@cache
def _of_flags(words: tuple[str, ...], flags: str) -> tuple[Config, str]:
    """The configuration of flags without their hyphens, and the mistakes in them."""
    argv = ["--megatron-defaults"]
    # a list is written as name=[a b c]
    for word in re.findall(r"\S+=\[[^]]*\]|\S+", " ".join([flags, *words])):
        name, _, values = word.partition("=[")
        argv += [f"--{name}", *values.rstrip("]").split()]
    errors = ErrorCollector()
    config = compose_line(parse(argv), errors=errors).config
    if config.parallel.num_virtual_stages_per_pipeline_rank > 1:
        config = with_values(config, {"parallel.pipeline_schedule": "interleaved"})
    return config, "; ".join(error.what for error in errors.errors)


def _stated(row: Row) -> dict[str, Any]:
    """Settings of a row without flags."""
    known = _known(row)
    modules = [
        name
        for name in get_args(RecomputeModule)
        if re.search(rf"\b{name}\b", row.text("recompute"))
    ]
    half = str(max(1, row.required("layers") // 2))
    row.facts |= {
        "published": "yes" if known else "",
        "modules": " ".join(modules),
        "half_layers": half,
    }
    values = row.settings("settings") | {
        f"model.{name}": value for name, value in _model(row, known).items()
    }
    is_full = values.get("memory.recompute_granularity") == "full"
    return values | {"memory.recompute_modules": [] if is_full else modules}


def _known(row: Row) -> dict[str, Any]:
    """The published model with the sizes of a row; empty without one."""
    sizes, kv = row.numbers("sizes"), row.text("kv_heads")
    found = [
        model
        for model in read_data("models")
        if all(model.get(column) == size for column, size in sizes.items())
        and (not kv.isdigit() or kv == str(model.get("kv", kv)))
    ]
    layers = row.required("layers")
    return min(found, key=lambda model: abs(model["layers"] - layers), default={})


def _model(row: Row, known: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the model section; `known` is the published model of the same sizes."""
    hidden, settings = row.required("hidden"), known.get("settings", {})
    heads = row.number("heads") or row.assume(
        max(1, hidden // 128), "heads not stated: 128 channels each"
    )
    if "kv_channels" not in settings and hidden % heads:
        raise ConfigError(f"{heads} heads do not divide hidden {hidden}")
    is_mla = row.text("kv_heads") == "mla" or "multi_latent_attention" in settings
    groups = heads if is_mla else row.number("kv_heads") or known.get("kv") or heads
    ffn = row.number("ffn") or row.assume(4 * hidden, "ffn not stated: 4 x hidden")
    gated = known.get(
        "gated", row.text("engine") == "nanotron" or groups < heads or ffn != 4 * hidden
    )
    tied = known.get("tied", bool(re.search(r"\btied", row.words("overlap_flags", "note"))))
    row.facts |= {"heads": str(heads), "groups": str(groups), "ffn": str(ffn)}
    values = row.numbers("model") | {"untie_embeddings_and_output_weights": not tied}
    values |= read_data("rows")["models"][gated] | settings
    return values | (_experts(row, known, ffn=ffn) if row.number("experts") else {})


def _experts(row: Row, known: Mapping[str, Any], *, ffn: int) -> dict[str, Any]:
    """Settings of the model section that concern experts, of the width `ffn`."""
    layers, topk, published = row.required("layers"), row.required("topk"), known.get("layers", 0)
    settings, dense = known.get("settings", {}), known.get("dense", 0)
    shared = settings.get("moe.shared_expert_intermediate_size")
    if dense and layers != published:  # a model that was cut
        dense = min(layers, max(1, round(dense * layers / published)))
    dense_ffn = known.get("dense_ffn", ffn * (topk + bool(shared)))
    if not known:
        row.assumed.append(
            "no published model has these sizes: all layers with experts, none shared"
        )
    elif "dense" in known or shared:
        row.assumed.append(
            f"{dense} dense layers of ffn {dense_ffn} and shared expert of {shared}, as published"
        )
    has_mtp = (
        known.get("mtp")
        and layers == published
        and not re.search(r"w/o mtp|no mtp", row.text("note"))
    )
    row.facts["dense_ffn"] = str(dense_ffn)
    frequency = settings.get("moe.layer_freq", f"[0]*{dense}+[1]*{layers - dense}")
    return row.numbers("experts") | {
        "moe.layer_freq": frequency,
        "mtp.num_layers": 1 if has_mtp else None,
    }
