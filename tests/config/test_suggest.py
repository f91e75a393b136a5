"""What was probably meant: by meaning and by spelling, never a far guess, an opposite or another
quantity.
"""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config import tables
from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS, SWITCHES
from nanotrain.config.flags import parse
from nanotrain.config.load import load, load_line
from nanotrain.config.megatron import megatron
from nanotrain.config.schema import ENTRIES
from nanotrain.config.suggest import LISTED_BY, by_meaning, by_spelling, by_words, did_you_mean
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError

KNOWN = [*FLAGS, *NEGATIONS, *ALIASES, *megatron().flags]
# Settings that users of other frameworks write, all names of their own.
ELSEWHERE = """
out_dir eval_only always_save_checkpoint init_from wandb_log batch_size block_size n_layer n_head n_embd dropout bias
learning_rate max_iters beta1 grad_clip decay_lr warmup_iters backend dtype compile
overwrite_output_dir do_train do_eval eval_strategy per_device_eval_batch_size eval_accumulation_steps eval_delay
max_grad_norm num_train_epochs lr_scheduler_kwargs logging_strategy logging_first_step save_strategy save_total_limit
save_safetensors save_only_model data_seed tf32 ddp_backend ddp_find_unused_parameters dataloader_drop_last
dataloader_pin_memory disable_tqdm remove_unused_columns load_best_model_at_end fsdp_config label_smoothing_factor
adafactor group_by_length push_to_hub gradient_checkpointing_kwargs torch_compile_mode neftune_noise_alpha
auto_find_batch_size full_determinism use_liger_kernel average_tokens_across_devices attn_implementation
job.config_file job.dump_folder job.print_config profiling.profile_freq metrics.log_freq metrics.save_tb_folder
optimizer.implementation lr_scheduler.decay_ratio lr_scheduler.decay_type lr_scheduler.min_lr_factor training.steps
training.enable_cpu_offload training.mixed_precision_reduce training.gc_freq debug.deterministic
parallelism.fsdp_reshard_after_forward parallelism.module_fqns_per_model_part parallelism.tensor_parallel_degree
parallelism.pipeline_parallel_microbatch_size parallelism.context_parallel_rotate_method checkpoint.enable
checkpoint.folder checkpoint.last_save_model_only checkpoint.async_mode checkpoint.load_step compile.components
num_layers_in_first_pipeline_stage virtual_pipeline_model_parallel_size gated_linear_unit activation_func init_method
layernorm_zero_centered_gamma bias_activation_fusion apply_rope_fusion pipeline_dtype variable_seq_lengths
batch_p2p_comm deallocate_pipeline_outputs moe_token_dropping decoupled_weight_decay align_param_gather
activation_checkpoint.selective_ac_option float8.enable_fsdp_float8_all_gather comm.trace_buf_size
"""

# arguments, what the message must have, what it must not have
MESSAGES = [
    ("--learning-rate 1e-3", "did you mean --lr?", "--outer"),
    ("--learning_rate 1e-3", "did you mean --lr?", "--outer"),
    ("optim.learning_rate=1", "did you mean optim.lr?", "clip_grad"),
    ("--tp 2", "did you mean --tensor-model-parallel-size?", "--help"),
    ("--pp 2", "did you mean --pipeline-model-parallel-size?", "--help"),
    (
        "--batch-size 8",
        "--micro-batch-size (samples per rank and microbatch) or --global-batch-size",
        "did you mean",
    ),
    ("--num-train-epochs 3", "write --train-iters: steps = epochs x samples", "--help"),
    ("--max-steps 10", "did you mean --train-iters?", "--help"),
    ("--num-heads 4", "did you mean --num-attention-heads?", "--num-experts"),
    ("--n-embd 64", "did you mean --hidden-size?", "--help"),
    ("--block-size 64", "did you mean --seq-length?", "--ddp-bucket-size"),
    ("--gradient-accumulation-steps 4", "--global-batch-size: micro_batch_size x", "did you mean"),
    ("--device gpu", "write --device cuda", "cpu?"),
    ("--gpu", "write --device cuda", "--help"),
    ("tiny", "write +config=tiny for the recipe of that name", "--help"),
    ("bf16", "write --bf16", "+config=bf16"),
    ("--bf16 true", "--bf16 takes no more values; leave true out", "--lr"),
    ("--use-mcore-models true", "--use-mcore-models takes no more values; leave true out", "--lr"),
    ("--shuffle false", "write --shuffle=false", "leave"),
    ("--model llama7b", "+config=NAME for a recipe, model=NAME for a model", "--help"),
    ("--output-dir x", "did you mean --run-dir?", "--help"),
    ("--nproc-per-node 2", "nanotrain train --nproc-per-node N", "did you mean"),
    ("--zero-stage 2", "optim_grads (ZeRO-2)", "--help"),
    (
        "--data-parallel-sharding-strategy zero2",
        "write --data-parallel-sharding-strategy optim_grads",
        "no_shard?",
    ),
    ("--dropout 0.1", "--hidden-dropout", "did you mean"),
    ("--dtype bf16", "--params-dtype bf16, fp16 or fp32", "did you mean"),
    ("--params-dtype bfloat16", "write --params-dtype bf16", "--help"),
    ("--hiden-size 64", "did you mean --hidden-size?", "--ffn"),
    ("--warmup-iters 5", "did you mean --lr-warmup-iters?", "--help"),
    ("--szve", "did you mean --save?", "--help"),
    ("--push", "nanotrain train --help=all lists the flags", "nproc"),
    ("--add-linear-bias", "did you mean --add-bias-linear?", "--help"),
    ("--disable-linear", "nanotrain train --help=all lists the flags", "--add-bias-linear"),
    ("--num-mtp-layers 1", "did you mean --mtp-num-layers?", "--help"),
    ("--tensor-parallel-layers 1", "nanotrain train --help=all lists the flags", "did you mean"),
    ("--save ck --run-dirr x", "did you mean --run-dir?", "--save=ck"),
    ("optim=muon", "write optim.FIELD=muon or --optimizer muon", "did you mean optim?"),
    ("learning_rate=1", "write --lr 1", "did you mean"),
    ("model.n_layer=4", "did you mean model.num_layers?", "--help"),
    ("--optimizer_type adam", "did you mean --optimizer?", "--help"),
    ("--no-bf16", "write --params-dtype fp32", "--help"),
    ("--config-path x", "did you mean --config-dir?", "--help"),
    ("--multirun", "write nanotrain sweep --over lr=1e-3,3e-4", "--help"),
    ("--training.steps 5", "did you mean --train-iters?", "--help"),
    ("--optimizer.lr 1", "did you mean --lr?", "--help"),
    ("--checkpoint.interval 5", "did you mean --save-interval?", "--help"),
    ("--deepspeed_config ds.json", "leave it out: what that file sets are flags here", "--help"),
    ("--use-fused-rmsnorm", "leave it out: fused kernels are chosen by torch", "write"),
    (
        "--ds-sequence-parallel-size 2",
        "write --context-parallel-size N --cp-comm-type a2a",
        "--help",
    ),
    ("--activation_checkpoint.mode full", "write --recompute-granularity full", "--help"),
    ("--activation geglu", "it takes one of", "write --activation swiglu"),
    ("zzz=1", "it is neither section.field nor a group", "did you mean"),
]


@pytest.mark.parametrize(("arguments", "has", "has_not"), MESSAGES)
def test_a_message_leads_to_what_was_meant(arguments, has, has_not):
    line = parse(arguments.split())
    with pytest.raises(ConfigError) as caught:
        line.errors.raise_errors()
        load_line(line)
    text = str(caught.value)
    assert has in text and has_not not in text and "mistakes" not in text


def test_one_rank_is_told_how_to_start_more():
    from nanotrain.config.rules.check import validate_for_world

    with pytest.raises(ConfigError, match=r"run on 2 ranks \(nanotrain train --nproc-per-node 2"):
        validate_for_world(load(["--tensor-model-parallel-size", "2"]).config, 1)


def test_mistaken_arguments_and_broken_rules_are_one_message():
    with pytest.raises(ConfigError) as caught:
        load(
            [
                "--train-itres=5",
                "--min-lr=1",
                "--hidden-size=100",
                "--num-attention-heads=3",
                "--seed=fast",
            ]
        )
    text = str(caught.value)
    assert text.startswith("4 mistakes")
    for part in (
        "--train-itres",
        "min_lr 1 is above lr",
        "hidden_size 100 cannot be split",
        "train.seed is 'fast'",
    ):
        assert part in text


def test_a_rule_on_a_misspelt_field_is_not_reported():
    with pytest.raises(ConfigError) as caught:
        load(["--hiden-size=300", "--num-attention-heads=3"])
    assert "mistakes" not in str(caught.value) and "--hidden-size" in str(caught.value)


@given(st.sampled_from(KNOWN), st.data())
def test_one_slip_in_a_flag_is_found(flag, data):
    position = data.draw(st.integers(3, len(flag) - 1))
    letter = data.draw(st.sampled_from("aeiouxyz"))
    slip = flag[:position] + letter + flag[position + 1 :]
    if slip in KNOWN or len(flag) < 10 or flag[position].isdigit():
        return
    assert by_spelling(slip, [flag, "--lr", "--seed"]) == flag
    nearest = by_spelling(slip, KNOWN)
    assert nearest is not None and abs(len(nearest) - len(flag)) <= 2


def test_numbers_opposites_and_extra_words_are_never_guessed():
    assert (
        by_spelling("--fp8", ["--fp16"]) is None
        and by_spelling("--adam-beta3", ["--adam-beta1"]) is None
    )
    assert by_words("--disable-bias-linear", ["--add-bias-linear"]) is None
    assert by_words("--mtp-num-layers", ["--num-layers"]) is None
    assert by_words("--bias", ["--add-bias-linear"]) is None
    assert (
        by_words("--grad-reduce", ["--overlap-grad-reduce", "--no-overlap-grad-reduce"])
        == "--overlap-grad-reduce"
    )
    assert by_meaning("--lr") is None and by_meaning("TP") == "--tensor-model-parallel-size"


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("--compile.enable", "--torch-compile"),
        ("--checkpoint.initial_load_path", "--load DIR"),
        ("--checkpoint.last_save_in_hf", "export-hf"),
        ("--model.hf_assets_path", "--pretrained-checkpoint DIR"),
    ],
)
def test_names_of_torchtitan_lead_to_what_to_write(name: str, cure: str) -> None:
    assert cure in (by_meaning(name) or "")


def test_a_swap_of_neighbours_is_one_slip():
    assert did_you_mean("trian", ["train", "data"]) == "did you mean train?"
    assert did_you_mean("completely-else", ["train"]) == "nanotrain train --help=all lists them"


def test_settings_of_other_frameworks_are_one_error_that_says_what_to_write():
    errors = [parse([f"--{name}", "3"]).errors.errors for name in ELSEWHERE.split()]
    assert all(len(each) == 1 and LISTED_BY not in str(each[0]) for each in errors)


@pytest.mark.parametrize(
    ("flag", "cure"),
    [
        ("--validation.steps", "--eval-iters"),  # training.steps are --train-iters
        # --dataset is a flag of a fork of Megatron-LM
        ("--training.dataset", "--data-path PREFIX"),
        ("--moe-loss-coeff", "--moe-aux-loss-coeff"),  # of DeepSpeed, near --moe-z-loss-coeff
        ("--training.seq-length", "--seq-length"),
        # no option of torchrun itself
        ("--dist-url", "--master-addr and --master-port of torchrun"),
    ],
)
def test_a_meaning_goes_before_a_spelling_and_before_the_name_without_its_section(flag, cure):
    (error,) = parse([flag, "3"]).errors.errors
    assert cure in str(error)


def test_every_cure_by_meaning_names_flags_that_exist_and_no_name_is_a_flag():
    table = read_table("other_frameworks")
    for cure in table["cures"]:
        flag = cure.split()[0].rstrip(",:")
        assert not flag.startswith("--") or flag in {
            *KNOWN,
            *SWITCHES,
            "--data-parallel-size",
            "--config-dir",
            "--config-name",
            "--cfg",
        }, cure
    names = " ".join(table["cures"].values()).split()
    assert len(names) == len(set(names)), "a name has one meaning"
    assert not {name for name in names if f"--{name.replace('_', '-')}" in KNOWN}


def test_every_other_value_leads_to_one_of_its_field():
    for name, values in read_table("other_frameworks")["values"].items():
        choices = ENTRIES[name].choices
        assert not {*values} & {*choices} and (not choices or {*values.values()} <= {*choices}), (
            name
        )


def test_no_cure_replaces_another():
    text = (Path(tables.__file__).parent / "other_frameworks.yaml").read_text()
    cures = re.findall(r'^  ("[^"]+"|[^ ].*?):(?: |$)', text, re.MULTILINE)
    assert len(cures) == sum(map(len, read_table("other_frameworks").values()))
