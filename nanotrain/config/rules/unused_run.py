"""Fields of the learning-rate schedule, of data, checkpoints and the run without effect."""

from nanotrain.config.rules.settings import Settings, UnusedFields, unused
from nanotrain.storage.remote import is_address


def unused_final_decay(c: Settings) -> UnusedFields:
    """The final decay of WSD, in other schedules."""
    if c.optim.lr_decay_style in ("constant", "linear", "cosine", "inverse-square-root"):
        yield unused(
            "lr_wsd_decay_iters",
            "lr_wsd_decay_samples",
            by="lr_decay_style",
            why="it belongs to lr_decay_style WSD",
        )
        yield unused(
            "lr_wsd_decay_style",
            by="lr_decay_style",
            why="it belongs to lr_decay_style WSD",
            is_harmless=True,
        )


def unused_graph_settings(c: Settings) -> UnusedFields:
    """Settings of CUDA graphs without graphs."""
    if c.train.cuda_graph_impl == "none":
        yield unused(
            "cuda_graph_scope",
            "cuda_graph_warmup_steps",
            by="cuda_graph_impl",
            why="it belongs to cuda_graph_impl local",
            is_harmless=True,
        )


def unused_schedule(c: Settings) -> UnusedFields:
    """Lengths and minima of a schedule that never decays."""
    by = "lr_decay_style"
    why = "lr_decay_style constant never decays"
    if c.optim.lr_wsd_decay_samples is not None:
        yield unused(
            "lr_wsd_decay_iters",
            by="lr_wsd_decay_samples",
            why="lr_wsd_decay_samples already sets the length of the final decay",
        )
    if c.optim.lr_decay_style == "constant":
        yield unused("min_lr", "decoupled_min_lr", by=by, why=why, is_harmless=True)
        if c.optim.lr_warmup_fraction is None:
            lengths = ("lr_decay_iters", "lr_decay_samples")
            yield unused(*lengths, by=by, why=why, is_harmless=True)


def unused_schedule_steps(c: Settings) -> UnusedFields:
    """Steps of a schedule in samples, and lengths of a warmup that is a fraction."""
    if c.optim.lr_decay_samples is not None:
        yield unused(
            "lr_decay_iters",
            by="lr_decay_samples",
            why="lr_decay_samples already sets the length of the schedule",
        )
    if c.optim.lr_warmup_fraction is not None:
        yield unused(
            "lr_warmup_iters",
            "lr_warmup_samples",
            by="lr_warmup_fraction",
            why="lr_warmup_fraction already sets the warmup",
        )


def unused_warmup_steps(c: Settings) -> UnusedFields:
    """Steps of a warmup in samples."""
    if c.optim.lr_warmup_samples is not None:
        yield unused(
            "lr_warmup_iters",
            by="lr_warmup_samples",
            why="lr_warmup_samples already sets the warmup",
        )


def unused_warmup_rate(c: Settings) -> UnusedFields:
    """The first learning rate without a warmup."""
    lengths = (c.optim.lr_warmup_iters, c.optim.lr_warmup_samples, c.optim.lr_warmup_fraction)
    if not any(lengths):
        yield unused(
            "lr_warmup_init",
            by=("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
            why="there is no warmup",
        )


def unused_corpora(c: Settings) -> UnusedFields:
    """Corpora of a run with synthetic tokens."""
    if not c.data.mock_data:
        return
    yield unused(
        "data_path",
        "train_data_path",
        "data_stages",
        "data_loss_weights",
        "quickstart",
        "quickstart_vocab_size",
        "generate_tokens",
        "generate_prompt",
        "packing",
        "sft",
        "exclude_documents",
        "fim_data",
        by="mock_data",
        why="mock_data has no text and no documents",
    )
    yield unused(
        "full_validation",
        by="mock_data",
        why="mock_data has no last sample, so eval_iters batches are taken",
        is_harmless=True,
    )
    yield unused(
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
        by="mock_data",
        why="mock_data has no documents",
        is_harmless=True,
    )


def unused_splits(c: Settings) -> UnusedFields:
    """Fill-in-the-middle, and corpora of validation and test."""
    data = c.data
    if not data.fim_data:
        yield unused(
            "fim_rate",
            "fim_spm_rate",
            "fim_prefix_token",
            "fim_suffix_token",
            "fim_middle_token",
            "fim_split_sample",
            "fim_no_prefix",
            by="fim_data",
            why="it belongs to fim_data",
        )
    if data.fim_split_sample is None:
        yield unused(
            "fim_fragment_rate",
            by="fim_split_sample",
            why="parts are not split into fragments",
            fix="set --fim-split-sample",
        )
    if not data.train_data_path and not data.stages:
        yield unused(
            "test_data_path",
            by=("train_data_path", "data_stages"),
            why="data_path is divided by split",
            fix="set --train-data-path",
        )
    has_validation_of_stages = bool(data.stages and data.valid_data_path)
    if data.stages and not data.valid_data_path:
        yield unused(
            "test_data_path",
            by=("data_stages", "valid_data_path"),
            why="without valid_data_path split divides the corpora of the stages",
            fix="set --valid-data-path too",
        )
    if data.train_data_path or has_validation_of_stages:
        yield unused(
            "split",
            by=("train_data_path", "data_stages", "valid_data_path"),
            why="each split has its own corpora",
            is_harmless=True,
        )


def unused_tokenizer(c: Settings) -> UnusedFields:
    """Tokenizers of synthetic tokens, and folders for runs in object storage."""
    if c.data.mock_data and c.model.vocab_size is not None:
        yield unused(
            "tokenizer_model",
            "vocab_file",
            "merge_file",
            by=("mock_data", "vocab_size"),
            why="mock_data has no text, and vocab_size is set",
            is_harmless=True,
        )
    if not uses_object_storage(c):
        yield unused(
            "staging_dir",
            by=("run_dir", "load"),
            why="nothing that it concerns is an address in object storage",
            fix="set --run-dir s3://BUCKET/NAME",
        )


def uses_object_storage(c: Settings) -> bool:
    """Whether the run, or the folder that it starts from, is in object storage."""
    checkpoint = c.checkpoint
    paths = (
        c.train.run_dir,
        checkpoint.load,
        checkpoint.pretrained_checkpoint,
        c.data.tokenizer_model,
    )
    return any(is_address(path) for path in paths if path is not None)


def unused_saving(c: Settings) -> UnusedFields:
    """Checkpoints, validation and reports that a run does not make."""
    if not c.checkpoint.save:
        yield unused(
            "save_optim",
            "save_interval",
            "save_retain_interval",
            "average_saves",
            "keep_last",
            "async_save",
            "exit_on_save_failure",
            "save_fallback_dir",
            "memory_checkpoint_interval",
            by="save",
            why="nothing is saved",
        )
    if c.checkpoint.memory_checkpoint_interval == 0:
        yield unused(
            "memory_checkpoint_dir",
            by="memory_checkpoint_interval",
            why="memory_checkpoint_interval 0 saves nothing in memory",
        )
    if c.train.eval_interval == 0:
        yield unused(
            "eval_iters",
            "full_validation",
            "eval_tasks",
            "eval_num_fewshot",
            "eval_task_limit",
            by="eval_interval",
            why="eval_interval 0 never validates",
            is_harmless=True,
        )
    elif c.train.full_validation:
        why = "full_validation reads every sample once"
        yield unused("eval_iters", by="full_validation", why=why, is_harmless=True)
    if not c.train.report:
        yield unused("report_interval", by="report", why="report is off")
    if c.train.generate_tokens == 0:
        yield unused("generate_prompt", by="generate_tokens", why="no sample is generated")


def unused_trackers(c: Settings) -> UnusedFields:
    """Profiles and trackers that are off."""
    train = c.train
    if not train.profile:
        yield unused("profile_step_start", "profile_step_end", by="profile", why="profile is off")
        if train.memory_snapshot_path is None:
            yield unused(
                "profile_ranks",
                by=("profile", "memory_snapshot_path"),
                why="neither profile nor memory_snapshot_path is set",
                is_harmless=True,
            )
    if train.prometheus_port is None:
        yield unused("prometheus_address", by="prometheus_port", why="prometheus_port is unset")
    if not train.log_straggler:
        yield unused(
            "straggler_factor",
            "straggler_duration_s",
            by="log_straggler",
            why="log_straggler is off",
        )
    if not train.preflight:
        yield unused("preflight_factor", by="preflight", why="preflight is off")
    if not train.inprocess_restart:
        yield unused(
            "inprocess_max_iterations",
            "inprocess_min_ranks",
            by="inprocess_restart",
            why="inprocess_restart is off",
        )
    if not train.tensorboard:
        yield unused("tensorboard_dir", by="tensorboard", why="tensorboard is off")
    if not train.wandb:
        yield unused(
            "wandb_project", "wandb_exp_name", "wandb_entity", by="wandb", why="wandb is off"
        )
