"""A shrunk configuration keeps structure and layout and is itself valid, for any recipe and layout."""

from dataclasses import replace
from functools import cache
from math import lcm

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nanotrain.config.compose import config_dir
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.config.model import DSAConfig, MLAConfig, ModelConfig
from nanotrain.config.rules.check import check_layout, check_model, validate_for_world
from nanotrain.config.schedules import num_microbatches
from nanotrain.config.schema import KEYS, flat_values, value_of, with_values
from nanotrain.errors import ConfigError, TopologyError
from nanotrain.parallel.cp import CORE_ATTENTIONS
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.parity.shrink import (
    LEFT_OUT,
    MAX_ATTENTION_LOGIT,
    MIN_ADAM_EPS,
    divide,
    left_out,
    on_one_rank,
    shrink,
)
from nanotrain.spec.counts import num_parameters
from nanotrain.spec.shape import ModelShape
from nanotrain.topology.topology import Topology
from tests.config.asking import validate

RECIPES = sorted(path.stem for path in (config_dir() / "config").glob("*.yaml"))
# Fields of the model section that are not sizes.
UNCHANGED = (
    *("position_embedding_type", "rotary_base", "use_rope_scaling", "normalization", "activation"),
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights"),
    *(
        "multi_latent_attention",
        "moe.router_topk",
        "moe.router_score_function",
        "moe.router_pre_softmax",
    ),
    *("moe.router_topk_scaling_factor", "moe.router_num_groups", "moe.router_group_topk"),
    *(
        "moe.router_load_balancing_type",
        "moe.aux_loss_coeff",
        "moe.z_loss_coeff",
        "moe.router_enable_expert_bias",
    ),
    "moe.expert_capacity_factor",
)


@cache
def recipe(name: str) -> Config:
    return load([f"+config={name}"], to_train=False).config


def assert_valid_and_alike(config: Config, world: int) -> None:
    small = shrink(config, world, num_steps=3)
    for checked in (small, on_one_rank(small)):
        validate(checked)
        check_model(checked)
        check_layout(checked)
    validate_for_world(small, world)
    before, after = config.model, small.model
    assert all(value_of(before, key) == value_of(after, key) for key in UNCHANGED)
    has_delta_rule = {"gated_delta_net", "kda"} & set(before.mixers)
    assert after.norm_epsilon == (1e-2 if has_delta_rule else before.norm_epsilon)
    if not before.multi_latent_attention:
        assert (
            before.num_attention_heads * after.query_groups
            == after.num_attention_heads * before.query_groups
        )
    assert set(before.moe_layers) == set(after.moe_layers)
    assert (before.moe is None) == (after.moe is None)
    dp = world // (
        Topology.of(small.parallel, world).size("model") * small.parallel.context_parallel_size
    )
    assert num_microbatches(small.train, dp) >= 2
    assert small.precision.params_dtype == "fp32"
    assert (
        after.vocab_size is not None and after.vocab_size % 128 and after.padded_vocab_size <= 512
    )
    assert (
        after.head_dim <= 16
        and after.hidden_size <= 512
        and after.hidden_size <= 12 * after.num_attention_heads * 4
    )


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_shrinks_for_its_own_layout(name: str) -> None:
    parallel = recipe(name).parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    experts = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or tp)
    assert_valid_and_alike(
        recipe(name), lcm(8, tp * parallel.context_parallel_size * pp, experts * pp)
    )


@pytest.mark.parametrize(
    "flags",
    [
        "--hybrid-layer-pattern MEM*EM-ME --num-layers 9 --num-experts 16 --mamba-num-heads 64",
        "--linear-attention-type gated_delta_net --linear-attention-freq 4 --num-layers 8 --num-attention-heads 8",
    ],
)
def test_models_of_several_kinds_of_layers_shrink(flags: str) -> None:
    layout = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2"
    )
    for way in ("p2p", "a2a"):
        words = (
            f"{layout} --cp-comm-type {way} --hidden-size 1024 --num-attention-heads 8 --mock-data"
        )
        config = load([*words.split(), *flags.split(), "--vocab-size", "512"]).config
        assert_valid_and_alike(config, 16)
        small = shrink(config, 16, num_steps=3).model
        assert {*small.mixers, *small.mlps} == {*config.model.mixers, *config.model.mlps}


def layouts(draw: st.DrawFn, config: Config) -> Config:
    """The recipe with another layout, which may be invalid."""
    tp, pp, cp, ep = (
        draw(st.sampled_from(sizes))
        for sizes in ((1, 2, 3, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8))
    )
    has_experts = config.model.moe is not None
    schedule = draw(st.sampled_from(sorted(SCHEDULES.keys() - {"one_stage"}))) if pp > 1 else "1f1b"
    is_interleaved = schedule == "interleaved"
    ends = st.none() if pp == 1 or is_interleaved else st.none() | st.integers(1, 6)
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1 and draw(st.booleans()),
        pipeline_model_parallel_size=pp,
        pipeline_schedule=schedule,
        num_virtual_stages_per_pipeline_rank=2 if is_interleaved else 1,
        decoder_first_pipeline_num_layers=draw(ends),
        decoder_last_pipeline_num_layers=draw(ends),
        context_parallel_size=cp,
        cp_comm_type=draw(st.sampled_from(sorted(CORE_ATTENTIONS)))
        if cp > 1
        else config.parallel.cp_comm_type,
        expert_model_parallel_size=ep if has_experts else 1,
        expert_tensor_parallel_size=draw(st.sampled_from((None, 1, 2))) if has_experts else None,
    )
    return replace(config, parallel=parallel)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_recipe_shrinks_for_every_layout_that_it_can_have(data: st.DataObject) -> None:
    config = layouts(data.draw, recipe(data.draw(st.sampled_from(RECIPES))))
    parallel = config.parallel
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    world = tp * pp * cp * parallel.expert_model_parallel_size * 2
    try:
        check_layout(config)
        Topology.of(parallel, world)
    except ConfigError:
        assume(False)
    assert_valid_and_alike(config, world)


def test_both_kinds_of_layers_remain() -> None:
    model = replace(recipe("deepseek_v3").model, num_layers=61)
    config = replace(recipe("deepseek_v3"), model=model, parallel=recipe("tiny").parallel)
    small = shrink(config, 1, num_steps=1)
    assert (
        set(small.model.moe_layers) == {False, True}
        and num_parameters(ModelShape.of(small.model)) < 1_000_000
    )


def test_patterns_of_layers_are_sampled() -> None:
    line = [
        "+config=tiny",
        "--num-layers=12",
        "--window-size=16",
        "--window-attn-skip-freq=[1]*9+[0]*3",
    ]
    config = load([*line, "--no-rope-freq=[0]*9+[1]*3"], to_train=False).config
    small = shrink(config, 1, num_steps=1).model
    assert (small.window_layers, small.no_rope_layers) == ((True, False), (False, True))
    assert_valid_and_alike(config, 1)


def test_ends_of_a_pipeline_stay_uneven() -> None:
    parallel = shrink(recipe("deepseek_v3"), 1024, num_steps=1).parallel
    assert (
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
    ) == (3, 0)


SCHEDULED = (
    *(
        "--micro-batch-size",
        "4",
        "--global-batch-size",
        "64",
        "--rampup-batch-size",
        "16",
        "16",
        "1000",
    ),
    *(
        "--step-seq-length-schedule",
        "0:32",
        "1M:128",
        "--tensor-model-parallel-size",
        "2",
        "--sequence-parallel",
    ),
    *(
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "block",
        "--recompute-num-layers",
        "4",
    ),
    *("--lr", "1e-4", "--decoupled-lr", "3e-4"),
)


def test_schedules_change_after_the_first_step_and_recomputation_stays() -> None:
    config = load(["+config=tiny", *SCHEDULED], to_train=False).config
    small = shrink(config, 4, num_steps=3)
    train, data = small.train, small.data
    assert train.rampup_batch_size == [4, 4, 4] and (
        train.micro_batch_size,
        train.global_batch_size,
    ) == (2, 8)
    assert train.step_seq_length_schedule == [
        f"0:{data.seq_length // 2}",
        f"{4 * data.seq_length}:{data.seq_length}",
    ]
    assert small.memory == replace(config.memory, recompute_num_layers=2)
    assert small.optim.decoupled_lr == pytest.approx(3 * small.optim.lr)
    assert on_one_rank(small).memory.recompute_granularity is None
    assert_valid_and_alike(config, 4)
    steps = ["--step-batch-size-schedule", "0:8 1M:24"]
    small = shrink(
        load(["+config=tiny", "--micro-batch-size", "1", *steps], to_train=False).config,
        2,
        num_steps=3,
    )
    assert small.train.step_batch_size_schedule == ["0:2", f"{2 * small.data.seq_length}:4"]


@pytest.mark.parametrize(("threshold", "expected"), [("100", MAX_ATTENTION_LOGIT), ("0.5", 0.5)])
def test_qk_clip_acts_on_the_logits_of_a_small_model(threshold: str, expected: float) -> None:
    config = load(
        ["+config=tiny", "--qk-clip", "--qk-clip-threshold", threshold], to_train=False
    ).config
    assert shrink(config, 1, num_steps=2).optim.qk_clip_threshold == expected


# Fields of data and train that every small run has as they are, and those that have no part in a
# training step.
CARRIED = {
    "data.reset_position_ids",
    "data.reset_attention_mask",
    "data.eod_mask_loss",
    "train.seed",
}
SHRUNK = {
    *("data.seq_length", "train.train_iters", "train.micro_batch_size", "train.global_batch_size"),
    *(
        "train.rampup_batch_size",
        "train.step_batch_size_schedule",
        "train.step_seq_length_schedule",
    ),
}
OF_FILES = (
    "data.data_path",
    "data.valid",
    "data.test",
    "data.split",
    "data.token",
    "data.vocab",
    "data.merge",
)
OF_RUNS = (
    *(
        "data.mock_data",
        "data.num_workers",
        "data.object_storage",
        "data.quickstart",
        "train.run_dir",
        "train.device",
        "train.log_",
    ),
    *(
        "train.eval_",
        "train.full_validation",
        "train.exit_",
        "train.hang_",
        "train.max_consecutive",
        "train.rollback",
        "train.debug_nan",
    ),
    *(
        "train.check_weight_hash",
        "train.rerun_mode",
        "train.replay_interval",
        "train.preflight",
        "train.inprocess_",
        "train.straggler_",
        "train.manual_gc",
        "train.profile",
        "train.trackers",
        "train.tensorboard",
        "train.wandb",
    ),
    *(
        "train.prometheus",
        "train.notify",
        "train.report",
        "train.generate",
        "train.deterministic_mode",
    ),
    *("train.timing_log_level", "train.memory_snapshot_path"),
)


def test_the_first_layer_of_a_smaller_model_keeps_its_indexer() -> None:
    dsa = DSAConfig(share_freq="[0]+[1]*3+[0]+[1]*3")
    model = ModelConfig(num_layers=8, multi_latent_attention=True, sparse_attention_type="dsa")
    config = Config(model=replace(model, mla=MLAConfig(q_lora_rank=8), vocab_size=64, dsa=dsa))
    assert shrink(config, 1, num_steps=2).model.mixers == ("dsa", "shared_dsa")


@pytest.mark.parametrize("cp", [2, 4])
def test_windows_beside_compressed_keys_fit_the_chunks_of_a_rank(cp: int) -> None:
    words = f"""--mock-data --vocab-size 64 --num-layers 4 --hidden-size 512 --num-attention-heads 8
        --num-query-groups 1 --sparse-attention-type compressed --window-size 127
        --compressed-output-groups 2 --compressed-heavy-ratio 128 --seq-length 4096
        --max-position-embeddings 4096 --context-parallel-size {cp} --cp-comm-type allgather"""
    small = shrink(load(words.split()).config, cp, num_steps=2)
    assert small.model.window_size is not None and small.model.window_size >= 1
    check_model(small)
    check_layout(small)


def test_factors_of_longrope_are_those_of_the_smaller_heads() -> None:
    factors = ",".join(str(1 + index / 10) for index in range(16))
    words = f"""--mock-data --vocab-size 64 --hidden-size 256 --num-attention-heads 8
        --position-embedding-type longrope model.longrope.short_factor=[{factors}]
        model.longrope.long_factor=[{factors}]"""
    config = load(words.split()).config
    small = shrink(config, 1, num_steps=2)
    assert small.model.longrope is not None
    assert small.model.longrope.long_factor == [
        1 + i / 10 for i in range(small.model.rotary_dim // 2)
    ]
    check_model(small)


def test_every_field_is_carried_shrunk_or_left_out_for_a_reason() -> None:
    """Sections of the model, the layout, recomputation and the update rule are carried as a whole."""
    left = {key for keys in LEFT_OUT.values() for key in keys}
    for key in KEYS:
        if key.startswith(("data.", "train.")):
            ways = [
                key in CARRIED,
                key in SHRUNK,
                key in left,
                key.startswith((*OF_FILES, *OF_RUNS)),
            ]
            assert sum(ways) == 1, key
        assert not key.startswith("precision.") or key in left
    config = with_values(
        recipe("tiny"), {"data.reset_position_ids": True, "model.hidden_dropout": 0.1}
    )
    carried = {
        key: value
        for key, value in flat_values(shrink(config, 1, num_steps=3)).items()
        if key in CARRIED
    }
    assert carried == {key: value for key, value in flat_values(config).items() if key in CARRIED}


def test_what_is_left_out_is_named_with_its_reason() -> None:
    arguments = ["+config=tiny", "--bf16", "--lr-decay-style", "constant", "--lr-warmup-iters", "0"]
    lines = left_out(
        load([*arguments, "--clip-grad", "0.5", "--no-shuffle"], to_train=False).config
    )
    names = {line.partition(":")[0] for line in lines}
    assert "params_dtype" in names and "shuffle" in names
    assert any(name.endswith("clip_grad") for name in names)


@pytest.mark.parametrize(
    "flags", ["--optimizer lion", "--optimizer muon --muon-scalar-optimizer lion"]
)
def test_adam_is_in_place_of_the_sign_of_lion(flags: str) -> None:
    config = load(["+config=tiny", *flags.split()], to_train=False).config
    optim = shrink(config, 1, num_steps=1).optim
    assert (
        "lion" not in (optim.optimizer, optim.muon_scalar_optimizer)
        and optim.adam_eps >= MIN_ADAM_EPS
    )
    assert any(line.startswith("lion: ") for line in left_out(config))


def test_of_losses_over_two_kinds_of_microbatches_one_is_left_out() -> None:
    losses = [
        "--moe-router-load-balancing-type",
        "aux_loss",
        "global_aux_loss",
        "--moe-aux-loss-coeff",
        "0.1",
        "0.2",
    ]
    config = load(["+config=tiny_moe", *losses], to_train=False).config
    moe = shrink(config, 2, num_steps=1).model.moe
    assert moe is not None and (moe.router_load_balancing_type, moe.aux_loss_coeff) == (
        ["global_aux_loss"],
        [0.2],
    )
    assert any(line.startswith("aux_loss: ") for line in left_out(config))


def test_ranks_that_do_not_fit_the_layout_are_a_topology_error() -> None:
    with pytest.raises(TopologyError, match="6 ranks cannot form tp=4 x cp=1 x pp=4"):
        shrink(recipe("llama70b"), 6, num_steps=1)


def test_sizes_are_divided_by_one_number_as_far_as_the_rules_allow() -> None:
    line = [
        "+config=tiny",
        "--num-attention-heads=96",
        "--hidden-size=768",
        "--num-query-groups=48",
    ]
    config = load([*line, "--tensor-model-parallel-size=4"], to_train=False).config
    names = ("num_attention_heads", "num_query_groups")
    small = divide(config, names).model
    assert (small.num_attention_heads, small.num_query_groups) == (16, 8), "two groups per rank"
    few = with_values(config, {"model.num_query_groups": 4})
    assert divide(few, names) == few, "a rank had one group"


def test_numbers_of_experts_are_divided_exactly() -> None:
    config = load(["+config=qwen3_next_80b_a3b"], to_train=False).config
    assert config.model.moe is not None and config.model.moe.router_topk == 10
    small = divide(config, ["num_experts"]).model.moe
    assert small is not None and small.num_experts == 32, "of 512, and at least twice the top 10"
