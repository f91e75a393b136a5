"""Rows of tables as scenarios: what they say, what is assumed, and what cannot be read."""

import pytest

from nanotrain.errors import ConfigError
from nanotrain.planner.rows.config import scenario_of_row
from nanotrain.planner.rows.row import Row

DENSE = {
    "hardware": "H100 80 GB", "gpus": "64", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
    "ffn": "14336", "vocab": "128256", "seq": "8192", "tp": "2", "pp": "4", "vp": "2", "cp": "1", "mbs": "1",
    "gbs": "256", "precision": "bf16", "recompute": "none", "zero": "dist-opt",
}  # fmt: skip
EXPERTS = DENSE | {
    "layers": "61", "hidden": "7168", "heads": "128", "kv_heads": "MLA", "ffn": "2048", "experts": "256", "topk": "8",
    "ep": "16", "tp": "1", "vp": "1",
}  # fmt: skip


def test_columns_become_settings() -> None:
    row = Row(DENSE)
    scenario = scenario_of_row(row)
    model, parallel = scenario.config.model, scenario.config.parallel
    assert (model.num_layers, model.query_groups, model.activation) == (32, 8, "swiglu")
    assert (parallel.pipeline_schedule, parallel.num_virtual_stages_per_pipeline_rank) == (
        "interleaved",
        2,
    )
    assert (parallel.data_parallel_sharding_strategy, parallel.sequence_parallel) == ("optim", True)
    assert (scenario.sizes["dp"], scenario.pipeline.num_microbatches) == (8, 32)
    assert (scenario.engine.name, scenario.matmul_dtype, scenario.gpu.name) == (
        "megatron",
        "bf16",
        "h100",
    )
    assert row.assumed == ["overlap of tp not stated: piece by piece"]


@pytest.mark.parametrize(
    ("cells", "engine"),
    [
        ({"zero": "zero1", "overlap_flags": "tp_mode=REDUCE_SCATTER; 1f1b"}, "nanotron"),
        ({"zero": "fsdp1 full_shard (zero3)"}, "fsdp2"),
        ({"zero": "hsdp"}, "fsdp2"),
        ({"zero": "mfsdp optim_grads_params"}, "megatron"),
        ({"zero": "no"}, "megatron"),
        ({"flags": "use-distributed-optimizer bf16"}, "megatron"),
    ],
)
def test_the_engine_is_what_only_its_runs_say(cells: dict[str, str], engine: str) -> None:
    assert scenario_of_row(Row(DENSE | {"vp": "1"} | cells)).engine.name == engine
    assert (
        scenario_of_row(Row(DENSE | {"vp": "1"} | cells), engine="nanotrain").engine.name
        == "nanotrain"
    )


@pytest.mark.parametrize(
    ("text", "matmul"),
    [("bf16 (fp32 grad accumulation)", "bf16"), ("BF16", "bf16"), ("amp_bf16/DEFAULT", "bf16"), ("fp16", "fp16"),
        ("bf16/fp16", "bf16"), ("FP8-CS", "fp8"), ("FP8-MX", "mxfp8"), ("MXFP8", "mxfp8"), ("NVFP4", "nvfp4"),
        ("TF32", "fp32"), ("bf16+fp8-hybrid-tensorwise", "fp8"), ("float8 (rowwise)", "fp8"), ("bfloat16", "bf16"),
        ("FP8-SC", "fp8_block"),
    ],
)  # fmt: skip
def test_precisions_as_people_write_them(text: str, matmul: str) -> None:
    assert (
        scenario_of_row(Row(DENSE | {"precision": text, "hardware": "B200"})).matmul_dtype == matmul
    )


def test_a_compiled_model_runs_fused_operators() -> None:
    cells = DENSE | {"zero": "fsdp2 full_shard", "pp": "1", "vp": "1"}
    assert not scenario_of_row(Row(cells)).engine.operators.fused
    assert scenario_of_row(Row(cells | {"overlap_flags": "torch.compile"})).engine.operators.fused


def test_flags_of_megatron_are_read_with_its_defaults() -> None:
    flags = (
        "tensor-model-parallel-size=2 pipeline-model-parallel-size=2 swiglu disable-bias-linear bf16 "
        "attention-backend=unfused recompute-granularity=selective recompute-modules=[layernorm mlp] deterministic-mode"
    )
    cells = {
        **DENSE,
        "flags": flags,
        "vp": "",
        "tp": "2",
        "pp": "2",
        "vocab": "",
        "ffn": "1024",
        "recompute": "",
    }
    row = Row(cells)
    config = scenario_of_row(row).config
    assert config.model.attention_dropout == 0.1
    assert config.memory.recompute_modules == ["layernorm", "mlp"]
    assert (config.model.ffn_size, config.model.vocab_size) == (1024, 50257)
    assert config.model.padded_vocab_size == 50432  # a multiple of 128 per rank of tp
    assert any("GPT-2" in text for text in row.assumed)


def test_what_is_assumed_is_said() -> None:
    row = Row(
        {
            key: text
            for key, text in DENSE.items()
            if key not in ("vocab", "ffn", "kv_heads", "precision")
        }
    )
    scenario_of_row(row)
    for word in ("vocabulary", "ffn", "precision"):
        assert any(word in text for text in row.assumed), word


def test_programs_that_shard_parameters_need_no_layout() -> None:
    row = Row(DENSE | {"tp": "", "pp": "", "vp": "", "gbs": "", "zero": "fsdp2"})
    scenario = scenario_of_row(row)
    assert (scenario.sizes["dp"], scenario.pipeline.num_microbatches) == (64, 1)
    assert any("data parallelism alone" in text for text in row.assumed)


@pytest.mark.parametrize(
    ("cells", "what"),
    [
        ({"layers": ""}, "layers is not stated"),
        ({"hidden": "wide"}, "hidden is 'wide'"),
        ({"gpus": "60"}, "60 ranks cannot form tp=2 x cp=1 x pp=4"),
        ({"tp": "", "pp": ""}, "the layout is not stated"),
        ({"layers": "4"}, "4 layers cannot fill pp=4 x 2 = 8 pipeline stages"),
        ({"heads": "30", "kv_heads": "30"}, "do not divide"),
        ({"hardware": "Z9000"}, "unknown GPU"),
        ({"ep": "7"}, "7"),
    ],
)
def test_rows_that_cannot_be_modelled_say_why(cells: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what.replace("(", r"\(")):
        scenario_of_row(Row(DENSE | cells))
