"""Every difference from Megatron-LM on purpose, and every convention that is the cited one, has a
test that is here.

`DIFFERENCES` has one entry per row of the table in docs/from_megatron.md, by the beginning of the
row.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRANSLATE, LR, BATCHES = (
    "tests/config/test_translate.py",
    "tests/optim/test_lr.py",
    "tests/config/test_schedules.py",
)
DIFFERENCES: dict[str, tuple[str, ...]] = {
    "dropout 0.1": (
        f"{TRANSLATE}::test_megatron_s_defaults_are_below_files_and_arguments",
        "tests/kernels/test_dropout.py::test_words_depend_on_the_seed_the_sample_and_all_its_bits",
        "tests/laws/test_model_features.py::test_a_layout_keeps_the_laws_with_every_feature",
    ),
    "the vocabulary is padded": (
        "tests/config/test_model.py::test_the_padded_vocabulary_is_the_next_multiple",
    ),
    "the loss is the mean of means": (
        "tests/parallel/pp/test_executor.py::test_the_loss_is_the_sum_over_microbatches_and_is_not_scaled",
        "tests/laws/test_every_axis.py::test_a_layout_trains_as_one_rank_does",
    ),
    "`--qk-l2-norm` normalizes": (
        "tests/spec/test_shape.py::test_heads_have_l2_norms_in_layers_with_rotary_positions",
    ),
    "MLA normalizes": ("tests/config/test_translate.py::test_mla_without_norms_is_noted",),
    "a loss of multi-token prediction": (
        "tests/laws/test_mtp.py::test_multi_token_prediction_trains_as_on_one_rank",
    ),
    "`--pipeline-model-parallel-layout`": (
        "tests/config/test_notation.py::test_layers_of_multi_token_prediction_before_the_last_stage_are_noted",
        "tests/spec/test_parameters.py::"
        "test_layers_of_multi_token_prediction_are_on_the_last_stage_and_like_the_last_layer",
    ),
    "a skipped step": (
        "tests/train/test_step.py::test_a_gradient_that_is_not_finite_skips_the_update",
    ),
    "fp16 gradients": (
        "tests/precision/test_dtypes.py::test_gradients_and_main_params_are_fp32_by_default",
    ),
    "router logits": (
        "tests/model/test_router.py::test_logits_are_fp32_whatever_the_activations_are",
    ),
    "`--moe-router-load-balancing-type sinkhorn`": (
        "tests/model/test_router_sinkhorn.py::test_every_sequence_is_balanced_by_itself",
    ),
    "an expert's capacity": (
        "tests/model/test_router_capacity.py::test_every_sequence_has_a_capacity_of_its_own",
    ),
    "one bucket without": (
        "tests/parallel/dp/test_layout.py::test_a_bucket_closes_as_soon_as_it_holds_the_bucket_size",
        "tests/laws/test_one_rank.py::test_every_layout_trains_as_one_rank_does",
    ),
    "default bucket size": (
        "tests/parallel/dp/test_layout.py::test_the_default_bucket_size_grows_with_the_shards",
    ),
    "a setting without effect": (
        "tests/config/rules/test_unused.py::test_a_setting_without_effect_on_the_command_line_is_an_error",
    ),
    "with `--step-batch-size-schedule`": (
        f"{BATCHES}::test_train_samples_give_the_steps_of_the_schedule_and_the_length_of_the_decay",
    ),
    "`global_aux_loss`": (
        "tests/laws/test_balance_losses.py::test_load_balancing_losses_are_those_of_one_rank",
        f"{TRANSLATE}::test_megatron_s_defaults_are_below_files_and_arguments",
    ),
    "random state": ("tests/laws/test_resume.py::test_three_and_three_steps_are_six",),
    "several checkpoint formats": (
        "tests/laws/test_any_topology.py::test_any_topology_loads_what_any_other_saved",
    ),
    "index files": ("tests/data/test_gpt.py::test_every_size_and_key_gives_a_bijection",),
    "`--use-checkpoint-opt-param-scheduler`": (
        "tests/train/resume/test_restore.py::test_changed_settings_are_those_that_change_the_loss",
    ),
}
ROUTER = "tests/model/test_router.py"
# Conventions that are those of the cited source, against numbers of that source.
CONVENTIONS: dict[str, tuple[str, ...]] = {
    "rank order tp-cp-ep-dp-pp (Megatron-LM)": (
        "tests/topology/test_topology.py::test_worked_example_of_eight_ranks_tp2_pp2",
        "tests/topology/test_topology.py::test_worked_example_of_eight_ranks_ep2",
        "tests/topology/test_topology.py::test_worked_example_of_eight_ranks_in_two_optimizer_instances",
    ),
    "rank order tp-cp-ep-pp-dp (Megatron-LM)": (
        "tests/topology/test_topology.py::test_worked_example_of_eight_ranks_tp2_pp2_with_pp_before_dp",
        "tests/topology/test_grid.py::test_pp_before_dp_needs_no_expert_grid_without_experts",
    ),
    "buffers and buckets (Megatron-LM)": (
        "tests/parallel/dp/test_layout.py::test_three_small_parameters_as_worked_out",
        "tests/parallel/dp/test_layout.py::test_ten_matrices_in_four_buckets_as_worked_out",
        "tests/parallel/dp/test_layout.py::test_padding_for_busbw_rounds_every_bucket_up_to_65536",
    ),
    "resident and sent bytes (ZeRO, closed form)": (
        "tests/laws/test_bytes.py::test_resident_and_sent_bytes_are_planned_and_the_closed_form",
    ),
    "FLOPs of LLaMA-7B": ("tests/spec/test_counts.py::test_llama_7b_costs_what_is_known",),
    "aux loss of unbiased, ungrouped scores (DeepSeek-V3, equation 18)": (
        f"{ROUTER}::test_the_aux_loss_counts_the_best_scores_whatever_bias_and_groups_choose",
    ),
    "groups ranked by logits, choice by logits (Megatron-LM)": (
        f"{ROUTER}::test_groups_are_ranked_by_logits_unless_the_softmax_comes_first",
        f"{ROUTER}::test_experts_whose_probabilities_underflow_are_compared_by_their_logits",
    ),
    "coefficients of aux losses (transformers' definition)": (
        "tests/interop/hf/test_mixture.py::test_the_coefficient_of_a_recipe_is_the_published_one_in_transformers_definition",
    ),
    "layers of uneven virtual stages (Megatron-LM)": (
        "tests/spec/test_stages.py::test_virtual_stages_share_the_layers_of_their_rank",
    ),
    "interleaved steps as short as torch's": (
        "tests/parallel/pp/test_schedules.py::test_nine_microbatches_on_eight_ranks_take_the_time_of_torch",
        "tests/parallel/pp/test_schedules.py::test_no_step_is_longer_than_that_of_torch_or_of_a_shorter_last_round",
    ),
    "warmup below the decay (Megatron-LM)": (
        f"{LR}::test_warmup_and_decay_of_equal_length_do_not_divide_by_zero",
        "tests/config/rules/test_check.py::test_a_broken_rule_is_named_with_its_numbers",
    ),
    "norms of queries and keys (Megatron-LM)": (
        "tests/model/test_norm.py::test_norms_of_heads_are_of_the_kind_of_the_others",
    ),
    "RoPE of interleaved pairs (Megatron-LM)": (
        "tests/model/test_rope.py::test_interleaved_pairs_are_the_same_scores_with_the_channels_in_another_order",
    ),
    "layers without rotary positions (transformers)": (
        "tests/interop/hf/test_against_transformers.py::test_logits_and_every_gradient_are_those_of_transformers",
        "tests/laws/test_model_features.py::test_a_layout_keeps_the_laws_with_every_feature",
    ),
    "learning rate in samples, decay styles (Megatron-LM)": (
        f"{LR}::test_the_schedule_does_not_depend_on_the_batch_size",
        f"{LR}::test_wsd_is_constant_and_then_decays_in_its_style",
    ),
    "ramp-up of the batch (Megatron-LM)": (
        f"{BATCHES}::test_the_ramp_up_of_gpt_3_175b_has_the_sizes_of_megatron_lm",
    ),
    "tokenizers as transformers encodes": (
        "tests/data/test_tokenizer.py::test_stored_truncation_and_padding_are_ignored",
    ),
    "lone surrogates": (
        "tests/prepare/test_corpus.py::test_a_lone_surrogate_does_not_stop_the_training_of_a_tokenizer",
    ),
    "patterns of layers (Megatron-LM)": (
        "tests/config/test_notation.py::test_a_pattern_is_lists_joined_and_repeated",
    ),
    "unbroken runs of characters": (
        "tests/prepare/test_bpe.py::test_an_unbroken_run_of_characters_is_trained_on_in_parts",
    ),
    "files of tokens (Megatron-LM)": (
        "tests/data/test_token_format.py::test_codes_are_megatrons",
        "tests/data/test_token_format.py::test_an_index_with_modes_is_refused_and_says_why",
    ),
    "sizes that a family may leave out (transformers)": (
        "tests/interop/hf/test_parts.py::test_the_families_differ_in_what_they_may_leave_out",
    ),
    "ranks without tokens": (
        "tests/parallel/ep/test_token_dispatcher.py::test_a_rank_may_receive_no_tokens",
    ),
    "no sample with experts on other ranks": (
        "tests/train/hooks/test_end_of_run.py::test_where_experts_are_on_other_ranks_no_rank_waits_for_a_sample",
    ),
    "a changed model is named at resume": (
        "tests/train/resume/test_restore.py::test_changed_settings_of_the_model_and_its_sections_are_named",
    ),
    "FLOPs of MLA": (
        "tests/spec/test_counts.py::test_latent_attention_counts_its_two_steps_and_its_own_widths",
    ),
    "loss scale of fp16 (Megatron-LM)": (
        "tests/precision/test_loss_scale.py::"
        "test_it_halves_at_the_overflow_that_uses_up_the_hysteresis_and_at_every_further_one",
    ),
    "initial weights N(0, std), output projections narrower": (
        "tests/model/test_parameters.py::test_matrices_are_normal_and_output_projections_narrower",
    ),
    "YaRN (transformers)": ("tests/model/test_rope.py::test_yarn_is_that_of_transformers",),
    "Llama 3's RoPE scaling": (
        "tests/model/test_rope.py::test_llama3_scaling_keeps_short_waves_and_divides_long_ones",
    ),
    "GELU of fused and of separate kernels (Megatron-LM)": (
        "tests/config/test_translate.py::test_gelu_is_that_of_megatron_s_kernel",
    ),
    "activations": ("tests/model/test_activations.py::test_every_activation_is_its_formula",),
    "logits of every family (transformers)": (
        "tests/interop/hf/test_against_transformers.py::test_logits_and_every_gradient_are_those_of_transformers",
    ),
}


def rows() -> list[str]:
    """The first cells of the table of differences."""
    page = (ROOT / "docs" / "from_megatron.md").read_text(encoding="utf-8")
    table = page.partition("## Differences on purpose")[2].partition("\n## ")[0]
    return re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE)[1:]  # without the header


def test_every_row_of_the_table_of_differences_has_a_test() -> None:
    differences = rows()
    assert len(differences) == len(DIFFERENCES) > 10
    for start in DIFFERENCES:
        assert sum(row.startswith(start) for row in differences) == 1, start


@pytest.mark.parametrize(
    "name",
    sorted({test for tests in (*DIFFERENCES.values(), *CONVENTIONS.values()) for test in tests}),
)
def test_a_named_test_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert re.search(
        rf"^def {function}\(", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE
    )
