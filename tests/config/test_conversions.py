"""Conversions of Megatron-LM's flags: exact values of fields, or an error."""

import json
from pathlib import Path

import pytest

from nanotrain.config.conversions import (
    ckpt_step,
    data_args_path,
    group_query_attention,
    layers_per_virtual_stage,
    moe_layer_recompute,
    no_position_embedding,
    padded_vocab_size,
    per_split_data_args_path,
    token_dispatcher_type,
    train_samples,
)
from nanotrain.config.load import load
from nanotrain.config.megatron import row_of
from nanotrain.errors import ConfigError
from tests.config.asking import config_of


def test_samples_become_steps_rounded_down_and_the_length_of_the_schedule():
    config = config_of(global_batch_size=128)
    assert train_samples(config, "1953125000") == {
        "train_iters": 15258789,
        "lr_decay_samples": 1953125000,
    }
    assert train_samples(config_of(global_batch_size=128, lr_decay_samples=5), "256") == {
        "train_iters": 2
    }
    assert train_samples(config_of(global_batch_size=10, lr_decay_samples=5), "1e9") == {
        "train_iters": 10**8
    }


def test_a_constant_learning_rate_has_a_schedule_only_for_a_warmup_that_is_a_fraction_of_it():
    constant = {"global_batch_size": 128, "lr_decay_style": "constant"}
    assert train_samples(config_of(**constant), "256") == {"train_iters": 2}
    assert (
        train_samples(config_of(**constant, lr_warmup_fraction=0.1), "256")["lr_decay_samples"]
        == 256
    )


@pytest.mark.parametrize(
    ("fields", "layers", "stages"),
    [((32, 4), "1", 8), ((32, 4), "2", 4), ((56, 8), "7", 1)],
)
def test_layers_per_virtual_stage_become_virtual_stages(fields, layers, stages):
    config = config_of(num_layers=fields[0], pipeline_model_parallel_size=fields[1])
    assert layers_per_virtual_stage(config, layers) == {
        "num_virtual_stages_per_pipeline_rank": stages
    }


def test_ends_that_count_as_layers_are_in_the_virtual_stages():
    ends = {f"account_for_{end}_in_pipeline_split": True for end in ("embedding", "loss")}
    for counted, layers, stages in ((2, "8", 1), (2, "4", 2), (1, "8", 1)):
        chosen = dict(list(ends.items())[:counted])
        config = config_of(num_layers=32 - counted, pipeline_model_parallel_size=4, **chosen)
        expected = {"num_virtual_stages_per_pipeline_rank": stages}
        assert layers_per_virtual_stage(config, layers) == expected


def test_a_padded_vocabulary_is_padded_to_that_size():
    assert padded_vocab_size(config_of(vocab_size=50257), "51200") == {
        "make_vocab_size_divisible_by": 51200
    }


def test_grouped_queries_without_a_number_share_one_head():
    assert group_query_attention(config_of(), "") == {"num_query_groups": 1}
    assert group_query_attention(config_of(num_query_groups=2), "") == {}


@pytest.mark.parametrize("folder", ["runs/a", "runs/a/checkpoints"])
def test_the_step_of_a_checkpoint_is_a_folder_of_the_run_to_load(folder):
    assert ckpt_step(config_of(load=folder), "400") == {"load": "runs/a/checkpoints/step-00000400"}


def test_a_step_of_megatron_lm_has_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("500")
    config = config_of(load=str(tmp_path))
    assert ckpt_step(config, "400") == {"load": str(tmp_path / "iter_0000400")}


def test_the_step_of_a_checkpoint_needs_a_run_to_load():
    with pytest.raises(
        ConfigError, match="--ckpt-step 4 without --load: .* set --load RUN, also for the run's own"
    ):
        ckpt_step(config_of(), "4")
    with pytest.raises(
        ConfigError, match="step-00000002 is the checkpoint of one step; leave --ckpt-step out"
    ):
        ckpt_step(config_of(load="a/step-00000002"), "4")


def test_a_run_goes_back_to_a_step_of_its_own_folder():
    config = load(
        ["--mock-data", "--save", "runs/a", "--load", "runs/a", "--ckpt-step", "400"]
    ).config
    assert (config.train.run_dir, config.checkpoint.load) == (
        "runs/a",
        "runs/a/checkpoints/step-00000400",
    )


def test_a_backend_of_the_dispatcher_flex_is_refused_beside_another_type():
    experts = {"expert_model_parallel_size": 2, "num_experts": 4}
    plain = config_of(**experts)
    with_backend = config_of(**experts, moe_flex_dispatcher_backend="deepep", params_dtype="bf16")
    for name in ("allgather", "alltoall", "flex"):
        assert token_dispatcher_type(plain, name) == {}
    assert token_dispatcher_type(with_backend, "flex") == {}
    for name in ("allgather", "alltoall"):
        with pytest.raises(ConfigError, match=f"type {name} with .*-backend deepep: .* flex"):
            token_dispatcher_type(with_backend, name)


@pytest.mark.parametrize("backend", ["--moe-enable-deepep", "--moe-flex-dispatcher-backend=deepep"])
def test_the_type_of_the_dispatcher_is_checked_with_what_other_flags_set(backend: str):
    line = ["--mock-data", "--num-experts=4", "--expert-model-parallel-size=2", "--bf16"]
    for flags in ([backend], [backend, "--moe-token-dispatcher-type=flex"]):
        assert load([*line, *flags]).config.parallel.uses_deep_ep
    with pytest.raises(ConfigError, match="--moe-token-dispatcher-type alltoall with"):
        load([*line, "--moe-token-dispatcher-type=alltoall", backend])
    kinds = ["--moe-token-dispatcher-type=alltoall", "--moe-token-dispatcher-type=flex"]
    assert load([*line, *kinds, backend]).config.parallel.uses_deep_ep, "the last one counts"
    with pytest.raises(ConfigError, match="dispatcher-type"):
        load([*line, "--moe-token-dispatcher-type=uneven"])


def test_no_position_embedding_is_accepted_with_rope():
    assert no_position_embedding(config_of(), "") == {}
    with pytest.raises(ConfigError, match="set --position-embedding-type none instead"):
        no_position_embedding(config_of(position_embedding_type="learned_absolute"), "")


def test_the_dtypes_of_megatron_fsdp_become_those_of_gradients():
    grads, comm = (row_of(f"--megatron-fsdp-{name}-dtype") for name in ("main-grads", "grad-comm"))
    assert grads.values(config_of(), "auto") == comm.values(config_of(), "fp32") == {}
    assert grads.values(config_of(), "bf16") == {"main_grads_dtype": "bf16"}
    assert comm.values(config_of(), "bf16") == {"grad_reduce_in_bf16": True}
    with pytest.raises(
        ConfigError,
        match="--megatron-fsdp-grad-comm-dtype is 'fp16': it takes auto or fp32 or bf16",
    ):
        load(["--megatron-fsdp-grad-comm-dtype", "fp16"])


def test_recomputing_moe_layers_adds_to_what_is_recomputed():
    assert moe_layer_recompute(config_of(), "")["recompute_modules"] == ["moe"]
    selective = config_of(recompute_granularity="selective")
    assert moe_layer_recompute(selective, "")["recompute_modules"] == ["core_attn", "moe"]
    listed = config_of(recompute_granularity="selective", recompute_modules=["mlp", "moe"])
    assert moe_layer_recompute(listed, "")["recompute_modules"] == ["mlp", "moe"]


@pytest.mark.parametrize(
    ("convert", "fields", "text", "message"),
    [
        (train_samples, {}, "512", "set --global-batch-size"),
        (train_samples, {"global_batch_size": 8}, "7", "--train-samples 7 is no whole step"),
        (train_samples, {"global_batch_size": 8}, "1.5e0", "it takes a whole number from 1"),
        (
            layers_per_virtual_stage,
            {"num_layers": 10, "pipeline_model_parallel_size": 4},
            "1",
            "10 layers are not a multiple",
        ),
        (
            layers_per_virtual_stage,
            {
                "num_layers": 8,
                "pipeline_model_parallel_size": 2,
                "decoder_last_pipeline_num_layers": 2,
            },
            "1",
            "set --num-virtual-stages-per-pipeline-rank",
        ),
        (padded_vocab_size, {"vocab_size": 300}, "256", "the vocabulary has 300 tokens"),
    ],
)
def test_what_has_no_exact_value_is_an_error(convert, fields, text, message):
    with pytest.raises(ConfigError) as caught:
        convert(config_of(**fields), text)
    assert message in str(caught.value)


def test_a_file_holds_the_words_of_data_path(tmp_path):
    (file := tmp_path / "blend.txt").write_text("0.7 data/a\n0.3 data/b\n")
    assert data_args_path(config_of(), str(file)) == {
        "data_path": ["0.7", "data/a", "0.3", "data/b"]
    }
    file.write_text("\n")
    for path, why in (
        (file, "the file is empty"),
        (tmp_path / "none", "it does not exist"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(ConfigError, match=why):
            data_args_path(config_of(), str(path))


def test_a_json_file_holds_the_words_of_each_split_as_a_text_or_a_list(tmp_path):
    (file := tmp_path / "blend.json").write_text(
        json.dumps({"train": "0.7 a 0.3 b", "valid": [1, "c"], "test": None})
    )
    expected = {"train_data_path": ["0.7", "a", "0.3", "b"], "valid_data_path": ["1", "c"]}
    assert per_split_data_args_path(config_of(), str(file)) == expected
    bad = {
        "[]": "must be an object",
        "{": "Expecting",
        '{"valid": "c"}': "train has no data",
        '{"train": 1}': "must be a list",
        '{"train": [[]]}': "must be text",
        '{"train": "a", "dev": "b"}': "the key 'dev'",
    }
    for text, why in bad.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            per_split_data_args_path(config_of(), str(file))
