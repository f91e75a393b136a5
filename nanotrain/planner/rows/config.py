"""A row of a table of measurements as a scenario, and the assumptions where the row says nothing.

A row is read by its columns and by Megatron-LM's flags where it has them; its source and the name
of its model have no influence.
"""

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import compose_line
from nanotrain.config.rules.check import check_layout
from nanotrain.config.schema import with_values
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.planner.engine import engine_of, with_sections
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.rows.model import model_settings, published_model
from nanotrain.planner.rows.row import Row, read_data
from nanotrain.planner.rows.settings import run_settings, scenario_options, stated_settings
from nanotrain.planner.scenario import Scenario, scenario_of

GPT2_VOCAB_SIZE = 50257
# columns by the flag of Megatron-LM that they state
FLAGS = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "num-attention-heads": "heads",
    "seq-length": "seq",
    "ffn-hidden-size": "ffn",
    "num-virtual-stages-per-pipeline-rank": "vp",
}


@dataclass(frozen=True)
class RowLayout:
    """Sizes of the layout of a row; 1 where it states none."""

    tp: int
    pp: int
    cp: int
    ep: int
    micro_batch_size: int

    @classmethod
    def of(cls, row: Row) -> "RowLayout":
        """The layout of a row."""
        return cls(
            tp=row.number("tp") or 1,
            pp=row.number("pp") or 1,
            cp=row.number("cp") or 1,
            ep=row.number("ep") or 1,
            micro_batch_size=row.number("mbs") or 1,
        )

    def settings(self) -> dict[str, Any]:
        """The sizes by the key of their setting."""
        return {
            "parallel.tensor_model_parallel_size": self.tp,
            "parallel.pipeline_model_parallel_size": self.pp,
            "parallel.context_parallel_size": self.cp,
            "parallel.expert_model_parallel_size": self.ep,
            "train.micro_batch_size": self.micro_batch_size,
        }


def scenario_of_row(row: Row, *, engine: str | None = None) -> Scenario:
    """The scenario of a row; assumptions go to `row.assumed`.

    Args:
        row: the row.
        engine: name of the engine; None infers it from the row.

    Raises:
        NanotrainError: a setting that is missing, or a scenario that cannot be formed.
    """
    unknown = row.choice("not modelled", "flags")
    if unknown:
        raise ConfigError(f"{unknown} has no model")
    chosen = engine_of(engine or ("megatron" if row.has_flags else row.choice("engine")))
    products = row.choice("precision", "precision") or "bf16"
    layout = RowLayout.of(row)
    world_size = _world_size(row, layout, engine=chosen.name)
    config = _config(row, layout, world_size=world_size, engine=chosen.name, products=products)
    gpu = gpu_of(
        row.text("hardware") or row.assume("h100", "hardware not stated: H100, the time is a guess")
    )
    parallel = config.parallel
    expert_ranks = parallel.expert_model_parallel_size * parallel.tensor_model_parallel_size
    options = scenario_options(
        row,
        engine=chosen.name,
        has_far_experts=bool(row.number("experts")) and expert_ranks > gpu.gpus_per_node,
        is_sequence_parallel=parallel.sequence_parallel,
    )
    words = row.words()
    if re.search(r"\bcompiled?\b", words):
        chosen = with_sections(chosen, {"operators": {"fused": True}})
    patterns = read_data("words")["features"]
    return scenario_of(
        config,
        world_size,
        gpu=gpu,
        engine=chosen,
        matmul_dtype=products,
        features=frozenset(name for name in patterns if re.search(patterns[name], words)),
        **options,
    )


def _world_size(row: Row, layout: RowLayout, *, engine: str) -> int:
    """Ranks of the run."""
    num_gpus = row.number("gpus")
    states_layout = row.text("tp") or row.text("pp")
    if (num_gpus or 1) > 1 and not states_layout:
        if engine != "fsdp2":
            raise ConfigError("the layout is not stated")
        row.assumed.append("layout not stated: data parallelism alone")
    return num_gpus or layout.tp * layout.pp * layout.cp * row.required("dp")


def _config(row: Row, layout: RowLayout, *, world_size: int, engine: str, products: str) -> Config:
    """The configuration, checked as far as a layout goes."""
    values = layout.settings()
    values["train.global_batch_size"] = _batch_size(row, layout, world_size=world_size)
    values |= run_settings(products)
    values["parallel.data_parallel_sharding_strategy"] = row.choice("strategy", "zero")
    values["data.seq_length"] = row.required("seq")
    if row.has_flags:
        config = with_values(_config_of_row_flags(row), values)
    else:
        published = published_model(row)
        values |= stated_settings(
            row, engine=engine, products=products, is_published=bool(published)
        )
        for name, value in model_settings(row, published, engine=engine).items():
            values[f"model.{name}"] = value
        config = with_values(Config(), values)
    config = _with_vocabulary(row, config, tp=layout.tp, engine=engine)
    # a row may recompute modules that its model lacks
    check_layout(replace(config, memory=Config().memory))
    return config


def _batch_size(row: Row, layout: RowLayout, *, world_size: int) -> int:
    """The global batch size, a multiple of the samples of a microbatch of all ranks."""
    parallel = with_values(Config(), layout.settings()).parallel
    least = layout.micro_batch_size * parallel.data_parallel_size(world_size)
    num_microbatches = 8 * layout.pp if layout.pp > 1 else 1
    batch: int = row.number("gbs") or row.assume(
        least * num_microbatches,
        "global batch not stated: 8 microbatches per stage of a pipeline, else 1",
    )
    if batch % least:
        rounded = max(1, batch // least) * least
        batch = row.assume(rounded, "global batch rounded to whole microbatches")
    return batch


def _with_vocabulary(row: Row, config: Config, *, tp: int, engine: str) -> Config:
    """The configuration with a vocabulary size, padded as the engine pads it."""
    model = config.model
    if model.vocab_size is None:
        size = row.number("vocab") or row.assume(GPT2_VOCAB_SIZE, "vocabulary not stated: GPT-2's")
        model = replace(model, vocab_size=size)
    multiple = model.make_vocab_size_divisible_by
    if engine == "megatron":
        multiple *= tp
    model = replace(model, make_vocab_size_divisible_by=multiple).with_padding_for(tp)
    return replace(config, model=model)


def _config_of_row_flags(row: Row) -> Config:
    """The configuration of Megatron-LM's flags, with its defaults."""
    stated = {}
    for flag, column in FLAGS.items():
        number = row.number(column)
        if number:
            stated[flag] = number
    stated["max-position-embeddings"] = row.required("seq")
    words = tuple(f"{flag}={number}" for flag, number in stated.items())
    read = _config_of_flags(words, row.cells["flags"])
    if read.ignored:
        row.assumed.append(f"flags left out: {read.ignored}")
    return read.config


@dataclass(frozen=True)
class FlagConfig:
    """The configuration of flags, and the mistakes in them."""

    config: Config
    ignored: str


@cache
def _config_of_flags(words: tuple[str, ...], flags: str) -> FlagConfig:
    """The configuration of flags without their hyphens."""
    argv = ["--megatron-defaults"]
    # a list is written as name=[a b c]
    for word in re.findall(r"\S+=\[[^]]*\]|\S+", " ".join([flags, *words])):
        name, _, values = word.partition("=[")
        argv += [f"--{name}", *values.rstrip("]").split()]
    errors = ErrorCollector()
    config = compose_line(parse(argv), errors=errors).config
    if config.parallel.num_virtual_stages_per_pipeline_rank > 1:
        config = with_values(config, {"parallel.pipeline_schedule": "interleaved"})
    return FlagConfig(config, "; ".join(error.what for error in errors.errors))
