"""Names of other frameworks lead to flags that exist, and are none themselves."""

import pytest

from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS, SWITCHES
from nanotrain.config.flags import parse
from nanotrain.config.megatron import MEGATRON
from nanotrain.config.schema import ENTRIES
from nanotrain.config.suggest import LISTED_BY
from nanotrain.config.synonyms import CURES, NAMES, VALUES

# Settings that users of other frameworks write, all names of their own.
ELSEWHERE = """
out_dir eval_only always_save_checkpoint init_from wandb_log batch_size block_size n_layer n_head n_embd dropout bias
learning_rate max_iters beta1 grad_clip decay_lr warmup_iters backend dtype compile
overwrite_output_dir do_train do_eval eval_strategy per_device_eval_batch_size eval_accumulation_steps eval_delay
max_grad_norm num_train_epochs lr_scheduler_kwargs logging_strategy logging_first_step save_strategy save_total_limit
save_safetensors save_only_model data_seed tf32 ddp_backend ddp_find_unused_parameters dataloader_drop_last
dataloader_pin_memory disable_tqdm remove_unused_columns load_best_model_at_end fsdp_config label_smoothing_factor
adafactor group_by_length push_to_hub gradient_checkpointing_kwargs torch_compile_mode neftune_noise_alpha
auto_find_batch_size full_determinism use_liger_kernel average_tokens_across_devices attn_implementation packing
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
KNOWN = {*FLAGS, *NEGATIONS, *ALIASES, *MEGATRON}


def test_settings_of_other_frameworks_are_one_error_that_says_what_to_write():
    errors = [parse([f"--{name}", "3"]).errors.errors for name in ELSEWHERE.split()]
    assert all(len(each) == 1 and LISTED_BY not in str(each[0]) for each in errors)


@pytest.mark.parametrize(
    ("flag", "cure"),
    [
        ("--validation.steps", "--eval-iters"),  # training.steps are --train-iters
        ("--training.dataset", "--data-path PREFIX"),  # --dataset is a flag of a fork of Megatron-LM
        ("--moe-loss-coeff", "--moe-aux-loss-coeff"),  # of DeepSpeed, near --moe-z-loss-coeff
        ("--training.seq-length", "--seq-length"),
        ("--dist-url", "--master-addr and --master-port of torchrun"),  # no option of torchrun itself
    ],
)
def test_a_meaning_goes_before_a_spelling_and_before_the_name_without_its_section(flag, cure):
    (error,) = parse([flag, "3"]).errors.errors
    assert cure in str(error)


def test_every_cure_by_meaning_names_flags_that_exist():
    for cure in NAMES:
        flag = cure.split()[0].rstrip(",:")
        assert not flag.startswith("--") or flag in {*KNOWN, *SWITCHES, "--data-parallel-size", "--config-dir"}, cure
    assert not {name for name in CURES if f"--{name.replace('_', '-')}" in KNOWN}
    assert sum(len(names.split()) for names in NAMES.values()) == len(CURES), "a name has one meaning"
    for name, values in VALUES.items():
        assert name in ENTRIES and not (set(values) & set(ENTRIES[name].choices))
