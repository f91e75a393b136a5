"""Megatron-LM's flags on a command line: what they set, what is refused, what is noted."""

import pytest

from nanotrain.config.load import Loaded, load
from nanotrain.config.schema import value_of
from nanotrain.config.translate import is_same
from nanotrain.errors import ConfigError

YARN = "yarn"
DELTA_NET = "--linear-attention-freq 4"
MLA = "--multi-latent-attention --position-embedding-type rope"
GPT3 = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-4"


def loaded(arguments: str) -> Loaded:
    return load(arguments.split(), to_train=False)


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ("--disable-bias-linear", {"model.add_bias_linear": False}),
        ("--use-rotary-position-embeddings", {"model.position_embedding_type": "rope"}),
        ("--group-query-attention", {"model.num_query_groups": 1}),
        ("--group-query-attention --num-query-groups 2", {"model.num_query_groups": 2}),
        ("--use-torch-fsdp2", {"parallel.data_parallel_sharding_strategy": "optim_grads_params"}),
        (
            "--data-parallel-sharding-strategy 2",
            {"parallel.data_parallel_sharding_strategy": "optim_grads"},
        ),
        (
            "--train-samples 1000 --global-batch-size 8 --lr-warmup-samples 24",
            {
                "train.train_iters": 125,
                "optim.lr_decay_samples": 1000,
                "optim.lr_warmup_samples": 24,
            },
        ),
        (
            "--num-layers 32 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
            {
                "parallel.num_virtual_stages_per_pipeline_rank": 4,
                "parallel.pipeline_schedule": "interleaved",
            },
        ),
        (
            "--train-samples 1000 --global-batch-size 8 --lr-decay-style constant",
            {"train.train_iters": 125, "optim.lr_decay_samples": None},
        ),
        (
            "--num-experts 4 --recompute-granularity selective --recompute-modules core_attn --moe-layer-recompute",
            {"memory.recompute_modules": ["core_attn", "moe"]},
        ),
        ("--save ck", {"checkpoint.save": True, "train.run_dir": "ck"}),
        ("--save ck --load ck/", {"train.run_dir": "ck", "checkpoint.load": None}),
        (
            "--multi-latent-attention --rotary-scaling-factor 40",
            {"model.position_embedding_type": YARN},
        ),
        ("--save ck --load other", {"train.run_dir": "ck", "checkpoint.load": "other"}),
        ("--save=ck", {"train.run_dir": "ck"}),
        ("--save", {"checkpoint.save": True, "train.run_dir": "runs/train"}),
        ("--save=false", {"checkpoint.save": False}),
        ("--tensorboard-dir tb", {"train.tensorboard": True, "train.tensorboard_dir": "tb"}),
        (
            "--wandb-project p --wandb-exp-name e",
            {"train.wandb": True, "train.wandb_exp_name": "e"},
        ),
        ("--split '99,1,0'", {"data.split": "99,1,0"}),
        ("--window-size 127,0", {"model.window_size": 127}),
        ("--window-size (127,0)", {"model.window_size": 127}),
        ("--record-memory-history", {"train.memory_snapshot_path": "snapshot.pickle"}),
        (
            "--record-memory-history --memory-snapshot-path m.pickle",
            {"train.memory_snapshot_path": "m.pickle"},
        ),
        ("--log-straggler --disable-straggler-on-startup", {"train.log_straggler": False}),
        ("--rerun-mode disabled --error-injection-rate 0", {}),
        ("--lr-decay-style wsd --lr-wsd-decay-iters 10", {"optim.lr_decay_style": "WSD"}),
        (
            f"--experimental-attention-variant gated_delta_net {DELTA_NET}",
            {"model.linear_attention_type": "gated_delta_net"},
        ),
        (
            "--hybrid-layer-pattern M-|*-/*-/*- --is-hybrid-model --ddp-num-buckets 10 "
            "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
            {
                "model.num_layers": 4,
                "model.hybrid_layer_pattern": "M-*-/*-/*-",
                "model.mtp.num_layers": 2,
            },
        ),
        (
            f"--experimental-attention-variant gdn {DELTA_NET}",
            {"model.linear_attention_type": "gated_delta_net"},
        ),
        (
            f"{MLA} --q-lora-rank 8 --experimental-attention-variant dsa",
            {"model.sparse_attention_type": "dsa"},
        ),
        (
            "--qk-layernorm --no-weight-decay-cond-type apply_wd_to_qk_layernorm",
            {"optim.apply_wd_to_qk_layernorm": True},
        ),
        (
            f"{MLA} --rope-type yarn --rotary-scaling-factor 4",
            {"model.position_embedding_type": "yarn"},
        ),
        # as YaRN with a factor of 1
        (f"{MLA} --rope-type yarn", {"model.position_embedding_type": "rope"}),
        (
            f"{MLA} --rope-type rope --rotary-scaling-factor 4",
            {"model.position_embedding_type": "rope"},
        ),
        ("--eval-iters 0", {"train.eval_iters": 0}),
        ("--eval-iters -1", {"train.eval_iters": 0}),
        ("--sequence-parallel", {"parallel.sequence_parallel": False}),
        (
            "--vocab-size 50257 --padded-vocab-size 51200",
            {"model.make_vocab_size_divisible_by": 51200},
        ),
    ],
)
def test_a_flag_becomes_values_of_fields(arguments, values):
    config = loaded(arguments).config
    assert {key: value_of(config, key) for key in values} == values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--moe-token-drop-policy position",
            "an expert at its capacity keeps the tokens with the highest router weights",
        ),
        (
            "--spec megatron.core.models.gpt.gpt_layer_specs local_spec",
            "no Python file of layers is imported",
        ),
        ("--experimental-attention-variant gdn2", "it takes dsa or gated_delta_net or gdn"),
        (
            "--experimental-attention-variant gated_delta_net --linear-attention-type kda",
            "it means --linear-attention-type gated_delta_net; leave one of them out",
        ),
        ("--rope-type llama3", "it takes rope or yarn"),
        ("--rerun-mode report_stats", "write validate_results"),
        ("--error-injection-rate 0.1", "no faults are injected"),
        (
            "--no-save-optim --rollback-on-spike 3",
            "leave out --no-save-optim or --rollback-on-spike",
        ),
        ("--moe-router-dtype fp64", "router logits and scores are fp32"),
        ("--distributed-backend mpi", "NCCL on GPUs, gloo on CPUs"),
        (
            "--disable-bias-linear --add-bias-linear",
            "--disable-bias-linear contradicts --add-bias-linear: it means --no-add-bias-linear; leave one",
        ),
        (
            "--train-samples 100 --global-batch-size 8 --train-iters 7",
            "--train-samples 100 contradicts --train-iters 7",
        ),
        (
            "--use-torch-fsdp2 --data-parallel-sharding-strategy optim",
            "--use-torch-fsdp2 contradicts --data-parallel-sharding-strategy optim",
        ),
        ("--train-samples 100", "set --global-batch-size"),
        (
            "--no-position-embedding --position-embedding-type learned_absolute",
            "--position-embedding-type none instead",
        ),
        (
            "--data-parallel-random-init",
            "1 flag asks for what does not exist here: --data-parallel-random-init (",
        ),
        ("--position-embedding-type rope --rope-type yarn", "contradicts"),
    ],
)
def test_what_is_never_so_is_an_error(arguments, message):
    with pytest.raises(ConfigError) as caught:
        loaded(arguments)
    assert message in str(caught.value)


def test_a_value_that_is_never_so_is_one_mistake():
    with pytest.raises(
        ConfigError, match="^--error-injection-rate 100 contradicts what nanotrain always does"
    ):
        loaded("--error-injection-rate 100")


def test_missing_features_are_one_error_that_names_all_of_them():
    with pytest.raises(ConfigError) as caught:
        loaded("--fp4-param-gather --skip-train --moe-use-upcycling --lr fast")
    text = str(caught.value)
    assert "3 flags ask for what does not exist here" in text and text.startswith("2 mistakes")
    for flag in (
        "--fp4-param-gather (",
        "--skip-train (",
        "--moe-use-upcycling (",
    ):
        assert flag in text


def test_values_that_ask_for_nothing_are_accepted():
    loaded("--mtp-num-layers 0 --mtp-loss-scaling-factor 0.3 --rotary-scaling-factor 1.0")
    loaded("--softmax-type vanilla --vocab-extra-ids 0")
    model = loaded(
        "--num-experts 0 --window-size -1,0 --moe-expert-capacity-factor -1"
    ).config.model
    assert model.moe is model.window_size is None


def test_flags_without_effect_are_counted_once():
    notes = loaded(
        f"--manual-gc --manual-gc --log-throughput --timing-log-option all --megatron-defaults {GPT3}"
    ).notes
    assert "2 flags name what nanotrain always does (--help=megatron lists them)" in notes
    assert "1 flag tunes parts of Megatron-LM that do not exist here" in notes


def test_what_megatron_saves_is_named_where_it_is_not_saved():
    notes = loaded(
        f"--ddp-num-buckets 2 --manual-gc --mlp-chunks-for-training 2 --ddp-num-buckets 2 --megatron-defaults {GPT3}"
    ).notes
    start = "features of Megatron-LM that save"
    (note,) = [note for note in notes if note.startswith(start)]
    assert (
        note.count("--ddp-num-buckets (") == 1
        and "--mlp-chunks-for-training (an MLP computes all tokens" in note
    )
    assert "2 flags tune parts of Megatron-LM that do not exist here" in notes


def test_a_layout_with_more_stages_than_ranks_has_virtual_stages():
    result = loaded(
        "--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|tt|tt|L"
    )
    assert result.config.parallel.num_virtual_stages_per_pipeline_rank == 2
    assert result.config.parallel.pipeline_schedule == "interleaved"


def test_a_virtual_stage_asks_for_the_interleaved_schedule_unless_another_is_set():
    words = (
        "--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    )
    result = loaded(words)
    assert result.config.parallel.pipeline_schedule == "interleaved"
    assert (
        "--pipeline-schedule interleaved is implied: there are 2 virtual stages per pipeline rank"
        in result.notes
    )
    assert loaded(words + " --pipeline-schedule 1f1b").config.parallel.pipeline_schedule == "1f1b"


def test_a_pasted_line_names_the_defaults_that_it_leaves_out():
    line = "--num-layers 2 --hidden-size 64 --swiglu --use-mcore-models --disable-bias-linear --weight-decay 0.1"
    (note,) = [note for note in loaded(line).notes if "left out" in note]
    assert (
        "normalization RMSNorm (Megatron-LM: LayerNorm)" in note
        and "adam_beta2 0.95 (Megatron-LM: 0.999)" in note
    )
    assert "add_bias_linear" not in note and "activation" not in note and "weight_decay" not in note
    for other in (
        line.replace("--use-mcore-models --disable-bias-linear", ""),
        line + " +config=tiny",
    ):
        assert not [note for note in loaded(other).notes if "left out" in note]


def test_megatron_s_defaults_are_below_files_and_arguments():
    model = loaded(f"--megatron-defaults {GPT3} --normalization RMSNorm").config.model
    assert model.normalization == "RMSNorm" and model.add_bias_linear
    assert model.position_embedding_type == "learned_absolute" and model.activation == "gelu_tanh"
    result = loaded(f"--megatron-defaults {GPT3} --adam-beta2 0.9")
    optim = result.config.optim
    assert (optim.adam_beta2, optim.weight_decay, optim.lr_decay_style) == (0.9, 0.01, "linear")
    assert result.origins["optim.weight_decay"] == "--megatron-defaults"
    experts = loaded(
        f"--megatron-defaults {GPT3} --num-experts 4 --moe-aux-loss-coeff 0.01 --no-add-bias-linear"
    ).config
    assert experts.model.moe.router_load_balancing_type == ["aux_loss"]
    assert not experts.model.moe.divide_global_aux_loss_by_dp, "there is no such loss"
    whole = f"{GPT3} --num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01"
    for line, divides in (
        (f"--megatron-defaults {whole} --no-add-bias-linear", True),
        (whole, False),
    ):
        assert loaded(line).config.model.moe.divide_global_aux_loss_by_dp is divides
    mla = loaded(
        f"--megatron-defaults {GPT3} --multi-latent-attention --no-add-bias-linear --position-embedding-type rope"
    ).config
    assert mla.model.mla.kv_lora_rank == 32
    assert result.origins["optim.adam_beta2"] == "command line: --adam-beta2 0.9"


@pytest.mark.parametrize("choice", ["+config=gpt2_124m", "model=gpt2_124m"])
def test_a_recipe_is_written_for_other_defaults_than_megatron_s(choice):
    with pytest.raises(ConfigError) as caught:
        loaded(f"--megatron-defaults {choice}")
    assert f"--megatron-defaults with {choice}" in str(
        caught.value
    ) and "leave one of them out" in str(caught.value)


def test_a_file_of_a_run_is_read_with_megatron_s_defaults(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: {num_layers: 4, activation: swiglu, ffn_hidden_size: null}\ncheckpoint: {save: false}\n"
    )
    line = ["--megatron-defaults", f"+config={path}", "--optimizer", "lion"]
    result = load(line, to_train=False)
    model = result.config.model
    assert (model.num_layers, model.normalization) == (4, "LayerNorm")
    assert model.ffn_hidden_size is None, "the file says that nanotrain's width is meant"
    # Megatron-LM's defaults of what is switched off are no one's settings
    assert (
        result.origins["checkpoint.keep_last"] == "default, not Megatron-LM's 0: nothing is saved"
    )
    assert result.origins["optim.adam_beta2"].startswith("default, not Megatron-LM's 0.999")
    with pytest.raises(ConfigError, match="optim.adam_beta2 = 0.9 has no effect"):
        load([*line, "--adam-beta2", "0.9"], to_train=False)


@pytest.mark.parametrize(("hidden", "width"), [("4096", 10880), ("64", 128), ("1536", 4096)])
def test_megatron_s_width_of_a_gated_mlp_is_rounded_down(hidden, width):
    line = f"--megatron-defaults {GPT3} --hidden-size {hidden} --swiglu"
    assert loaded(line).config.model.ffn_hidden_size == width


def test_megatron_has_no_defaults_for_sizes():
    with pytest.raises(
        ConfigError, match="--megatron-defaults without --num-layers, --hidden-size"
    ):
        loaded("--megatron-defaults")


def test_numbers_are_compared_as_numbers():
    assert is_same("0", "0.000") and is_same("1.0", "1") and not is_same("0", "none")


@pytest.mark.parametrize(
    "others", ["--rope-type rope", "--position-embedding-type rope --rotary-scaling-factor 4"]
)
def test_the_positions_of_gpt_oss_overrule_the_line_in_any_order(others):
    for text in (f"--enable-gpt-oss {others}", f"{others} --enable-gpt-oss"):
        model = loaded(text).config.model
        assert (model.position_embedding_type, model.yarn.rotary_scaling_factor) == ("yarn", 32.0)


def test_mla_without_norms_is_noted():
    """Megatron-LM normalizes the compressed vectors of MLA with --qk-layernorm only; here they
    always are.
    """
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    line = f"{sizes} --megatron-defaults --multi-latent-attention --position-embedding-type rope --disable-bias-linear"
    notes = [load(f"{line} {more}".split()).notes for more in ("", "--qk-layernorm")]
    noted = [any("MLA normalizes" in note for note in each) for each in notes]
    assert noted == [True, False]


@pytest.mark.parametrize(
    ("arguments", "activation"),
    [
        ("", "gelu_tanh"),
        ("--no-bias-gelu-fusion", "gelu"),
        ("--disable-bias-linear", "gelu"),
        ("--activation gelu", "gelu"),
        ("--squared-relu", "squared_relu"),
    ],
)
def test_gelu_is_that_of_megatron_s_kernel(arguments, activation):
    """Its kernel of bias and GELU has the tanh approximation; without it, or without biases, GELU
    is exact.
    """
    assert (
        load(f"{GPT3} --megatron-defaults {arguments}".split()).config.model.activation
        == activation
    )


@pytest.mark.parametrize(
    ("arguments", "strategy"),
    [
        ("--use-megatron-fsdp --use-distributed-optimizer", "optim_grads_params"),
        ("--use-megatron-fsdp", "optim_grads_params"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "optim_grads"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy 0", "no_shard"),
        ("--use-distributed-optimizer", "optim"),
    ],
)
def test_megatron_fsdp_shards_parameters_unless_a_strategy_is_set(arguments, strategy):
    assert loaded(arguments).config.parallel.data_parallel_sharding_strategy == strategy
