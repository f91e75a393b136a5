"""Scenarios for the tests of the planner."""

from typing import Any

from nanotrain.config.load import configure
from nanotrain.planner.engine import engine_of, with_sections
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.scenario import Scenario, scenario_of

LLAMA = {
    "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8,
    "ffn_hidden_size": 14336, "vocab_size": 128256, "seq_length": 4096, "max_position_embeddings": 4096,
    "bf16": True, "mock_data": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
NAMES = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size", "v": "num_virtual_stages_per_pipeline_rank",
    "strategy": "data_parallel_sharding_strategy", "mbs": "micro_batch_size", "gbs": "global_batch_size",
}  # fmt: skip


def llama(
    world_size: int = 8,
    *,
    gpu: Any = "h100",
    engine: str = "megatron",
    options: Any = None,
    **values: Any,
) -> Scenario:
    """An 8B model; `values` are fields, some by short names. The engine has every schedule."""
    named = {NAMES.get(name, name): value for name, value in values.items()}
    named.setdefault("sequence_parallel", named.get("tensor_model_parallel_size", 1) > 1)
    config = configure(
        **{name: value for name, value in (LLAMA | named).items() if value is not None}
    )
    gpu = gpu_of(gpu) if isinstance(gpu, str) else gpu
    with_schedules = with_sections(engine_of(engine), {"pipeline": {"schedules": None}})
    return scenario_of(config, world_size, gpu=gpu, engine=with_schedules, **options or {})
