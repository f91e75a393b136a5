"""Rules of a run: its lengths, learning rates, data and checkpoints; `sharding.py` has dtypes and
sharding.
"""

from nanotrain.config.data_stages import read_named
from nanotrain.config.optim import has_trained_stages
from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.config.schema import typed
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of
from nanotrain.storage.remote import is_address


def check_packing(c: Settings) -> Errors:
    """Check samples of whole documents."""
    if c.data.packing == "best_fit" and not c.data.reset_attention_mask:
        yield ConfigError(
            "packing best_fit without reset_attention_mask",
            why="a sample has documents that have nothing to do with each other",
            fix="add --reset-attention-mask",
        )


def check_auto_layout(c: Settings) -> Errors:
    """A search for the layout needs a batch that does not depend on it."""
    if c.parallel.auto_layout and c.train.global_batch_size is None:
        yield ConfigError(
            "auto_layout has no global_batch_size",
            why="without one the samples of a step follow from the layout that it would choose",
            fix="set --global-batch-size",
        )


def check_memory_checkpoints(c: Settings) -> Errors:
    """A run that starts from memory has one set of trained parameters, and all of their state."""
    if not c.checkpoint.memory_checkpoint_interval:
        return
    if has_trained_stages(c.optim):
        yield ConfigError(
            "memory_checkpoint_interval with stages that train other parameters",
            why="which stage a run goes on with is found from the checkpoints of the run folder",
            fix="leave --memory-checkpoint-interval out, or train the same in all stages",
        )
    if not c.checkpoint.save_optim:
        yield ConfigError(
            "memory_checkpoint_interval without save_optim",
            why="a restart needs the state of the optimizer",
            fix="leave --memory-checkpoint-interval or --no-save-optim out",
        )


def check_warmup(c: Settings) -> Errors:
    """The warmup leaves a part of the schedule."""
    optim = c.optim
    is_in_steps = optim.lr_warmup_samples is None and optim.lr_decay_samples is None
    unit = "steps" if is_in_steps else "samples"
    warmup, length = warmup_in_steps(c) if is_in_steps else warmup_in_samples(c)
    if length and warmup >= length:
        yield ConfigError(
            f"a warmup of {warmup:g} {unit} leaves nothing of a schedule of {length:g} {unit}",
            why="the learning rate decays from the end of the warmup to the end of the schedule",
            fix="lower the warmup (--lr-warmup-iters, --lr-warmup-samples) or raise the schedule "
            "(--lr-decay-iters, --lr-decay-samples)",
        )


def warmup_in_steps(c: Settings) -> tuple[int, int | None]:
    """Lengths of warmup and schedule, None where it is not set."""
    return c.optim.lr_warmup_iters, c.optim.lr_decay_iters


def warmup_in_samples(c: Settings) -> tuple[int, int | None]:
    """Lengths of warmup and schedule, None where it is not set or its unit is another one."""
    warmup = c.optim.lr_warmup_samples
    length = c.optim.lr_decay_samples
    batch_size = c.train.global_batch_size
    if batch_size is None:  # it follows from the number of ranks
        return warmup or 0, length
    if length is None and c.optim.lr_decay_iters is not None:
        length = c.optim.lr_decay_iters * batch_size
    if warmup is None:
        warmup = c.optim.lr_warmup_iters * batch_size
    return warmup, length


def num_decay_steps(c: Settings) -> int:
    """Steps of the learning-rate schedule."""
    if c.optim.lr_decay_samples is not None:
        batch_size = c.train.global_batch_size or c.train.micro_batch_size
        return c.optim.lr_decay_samples // batch_size
    return c.optim.lr_decay_iters or c.train.train_iters


def check_final_decay(c: Settings) -> Errors:
    """WSD: the final decay is a part of the schedule."""
    optim = c.optim
    in_steps = optim.lr_wsd_decay_iters
    in_samples = optim.lr_wsd_decay_samples
    tenth = max(1, num_decay_steps(c) // 10)
    if optim.lr_decay_style == "WSD" and in_steps is None and in_samples is None:
        yield ConfigError(
            "lr_decay_style WSD has no length for its final decay",
            why="lr_wsd_decay_iters is unset",
            fix=f"set --lr-wsd-decay-iters, for example {tenth}",
        )
    samples = optim.lr_decay_samples
    if in_samples is not None and samples is not None and in_samples > samples:
        yield ConfigError(
            f"lr_wsd_decay_samples {in_samples} is longer than the schedule of "
            f"{count_of(samples, 'sample')}",
            why="the final decay is its last part",
            fix="lower --lr-wsd-decay-samples",
        )
    is_too_long = in_steps is not None and in_steps > num_decay_steps(c)
    if optim.lr_decay_style == "WSD" and is_too_long:
        yield ConfigError(
            f"lr_wsd_decay_iters {in_steps} is longer than the whole schedule of "
            f"{count_of(num_decay_steps(c), 'step')}",
            why="the final decay is its last part",
            fix=f"set --lr-wsd-decay-iters {tenth}",
        )


def check_validation_data(c: Settings) -> Errors:
    """Check validation sets together with data that `split` divides."""
    data = c.data
    if not data.valid_data_path:
        return
    has_names = bool(read_named(data.valid_data_path))
    if not has_names and not data.train_data_path and not data.stages:
        yield ConfigError(
            "valid_data_path has no effect",
            why="data_path is divided by split",
            fix="set --train-data-path, or write --valid-data-path NAME=PREFIX",
        )


def check_fragments(c: Settings) -> Errors:
    """Check fill-in-the-middle in fragments of a part."""
    data = c.data
    if data.fim_data and data.fim_split_sample is not None and data.fim_fragment_rate is None:
        yield ConfigError(
            f"fim_split_sample {data.fim_split_sample} without fim_fragment_rate",
            why="it is the share of the fragments that are rewritten",
            fix="set --fim-fragment-rate 0.5",
        )


def check_split(c: Settings) -> Errors:
    """Check proportions of training, validation and test."""
    if not is_split(c.data.split):
        yield ConfigError(
            f"split is {c.data.split!r}",
            why="it takes proportions of training, validation and test, and training needs some",
            fix="set --split 969,30,1",
        )


def is_split(text: str) -> bool:
    """Whether a text is one to three finite proportions, of which the first is not zero.

    >>> is_split("969,30,1"), is_split("0,1")
    (True, False)
    """
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        return False
    return len(parts) <= 3 and parts[0] > 0 and all(0 <= part < float("inf") for part in parts)


def check_profiled_steps(c: Settings) -> Errors:
    """Profiled steps are steps of the run."""
    first = c.train.profile_step_start
    last = c.train.profile_step_end
    if c.train.profile and not first <= last <= c.train.train_iters:
        yield ConfigError(
            f"steps {first} to {last} of {c.train.train_iters} cannot be profiled",
            why="profile_step_start <= profile_step_end <= train_iters must hold",
            fix="set --profile-step-start and --profile-step-end",
        )


def check_timeouts(c: Settings) -> Errors:
    """The watchdog reports before a collective fails."""
    minutes = c.parallel.distributed_timeout_minutes
    hang = c.train.hang_timeout_s
    if hang is not None and hang >= 60 * minutes:
        yield ConfigError(
            f"hang_timeout_s {hang:g} is not below distributed_timeout_minutes {minutes:g}",
            why="a collective then fails before the watchdog reports",
            fix="lower --hang-timeout-s or raise --distributed-timeout-minutes",
        )
    later = c.parallel.distributed_timeout_seconds_after_init
    if later is not None and later > 60 * minutes:
        yield ConfigError(
            f"distributed_timeout_seconds_after_init {later:g} is above "
            f"distributed_timeout_minutes {minutes:g}",
            why="a start takes longer than a step: the timeout is lowered after the first step",
            fix="lower --distributed-timeout-seconds-after-init or raise "
            "--distributed-timeout-minutes",
        )


def check_learning_rates(c: Settings) -> Errors:
    """Minima of the learning rates are below their peaks."""
    optim = c.optim
    min_lr = optim.min_lr
    if min_lr > optim.lr:
        yield ConfigError(
            f"min_lr {min_lr:g} is above lr {optim.lr:g}",
            why="lr is the peak",
            fix="set --min-lr or --lr",
        )
    peak = optim.decoupled_lr
    if peak is None:
        return
    if optim.decoupled_min_lr is not None and optim.decoupled_min_lr > peak:
        yield ConfigError(
            f"decoupled_min_lr {optim.decoupled_min_lr:g} is above decoupled_lr {peak:g}",
            why="decoupled_lr is the peak",
            fix="set --decoupled-min-lr or --decoupled-lr",
        )
    if optim.decoupled_min_lr is None and min_lr > peak:
        yield ConfigError(
            f"min_lr {min_lr:g} is above decoupled_lr {peak:g}",
            why="decoupled_min_lr is unset, so min_lr is used",
            fix="set --decoupled-min-lr",
        )


def check_decoupled_warmup_rate(c: Settings) -> Errors:
    """The warmup begins below the peak of embedding and output layer."""
    first = c.optim.lr_warmup_init
    peak = c.optim.decoupled_lr
    if c.optim.lr_warmup_iters != 0 and peak is not None and first > peak:
        yield ConfigError(
            f"lr_warmup_init {first:g} is above decoupled_lr {peak:g}",
            why="decoupled_lr is the peak",
            fix="set --lr-warmup-init or --decoupled-lr",
        )


def check_warmup_rate(c: Settings) -> Errors:
    """The warmup begins below the peak."""
    first = c.optim.lr_warmup_init
    if first > c.optim.lr:
        yield ConfigError(
            f"lr_warmup_init {first:g} is above lr {c.optim.lr:g}",
            why="lr is the peak",
            fix="set --lr-warmup-init or --lr",
        )


def check_weight_decay(c: Settings) -> Errors:
    """Weight decay grows from a start to an end."""
    style = c.optim.weight_decay_incr_style
    start = c.optim.start_weight_decay
    end = c.optim.end_weight_decay
    if style != "constant" and (start is None or end is None):
        yield ConfigError(
            f"weight_decay_incr_style {style} has no start or no end",
            why=f"start_weight_decay is {typed(start)}, end_weight_decay is {typed(end)}",
            fix="set --start-weight-decay and --end-weight-decay",
        )
    if start is not None and end is not None and start > end:
        yield ConfigError(
            f"start_weight_decay {start:g} is above end_weight_decay {end:g}",
            why="weight decay grows over the run",
            fix="raise --end-weight-decay or lower --start-weight-decay",
        )


def check_newton_schulz(c: Settings) -> Errors:
    """Check steps of coefficients that differ by step."""
    steps = c.optim.muon_num_ns_steps
    kind = c.optim.muon_coefficient_type
    if kind == "quintic" and steps % 5 != 0:
        yield ConfigError(
            f"muon_num_ns_steps {steps} with muon_coefficient_type quintic",
            why="its five steps are optimized together",
            fix="set --muon-num-ns-steps 5, or --muon-coefficient-type simple",
        )
    if kind == "hybrid" and steps < 3:
        yield ConfigError(
            f"muon_num_ns_steps {steps} with muon_coefficient_type hybrid",
            why="its last two steps are others than those before",
            fix="set --muon-num-ns-steps 10",
        )


def check_average_saves(c: Settings) -> Errors:
    """Checkpoints that are averaged must be there."""
    checkpoint = c.checkpoint
    num_saves = checkpoint.average_saves
    if num_saves is None:
        return
    if checkpoint.save_interval == 0:
        yield ConfigError(
            f"average_saves {num_saves} with save_interval 0",
            why="a start of the run saves once, at its end",
            fix="set --save-interval, or leave out --average-saves",
        )
    if 0 < checkpoint.keep_last < num_saves:
        yield ConfigError(
            f"average_saves {num_saves} with keep_last {checkpoint.keep_last}",
            why="an average is read from the checkpoints that are kept",
            fix=f"set --keep-last {num_saves}",
        )
    if is_address(c.train.run_dir or ""):
        yield ConfigError(
            f"average_saves {num_saves} with run_dir {c.train.run_dir}",
            why="averages are read from checkpoints on a disk",
            fix="leave it out, and average with nanotrain checkpoint average later",
        )


def check_blockwise(c: Settings) -> Errors:
    """Check rules that need full matrices."""
    optimizer = c.optim.optimizer
    if c.optim.muon_tp_mode == "blockwise" and optimizer in ("normuon", "muon_h"):
        yield ConfigError(
            f"muon_tp_mode blockwise with optimizer {optimizer}",
            why="its rows and norms are those of full matrices",
            fix="set --muon-tp-mode distributed, or --optimizer muon",
        )


def check_optimizer_offload(c: Settings) -> Errors:
    """Check optimizer state in host memory."""
    fraction = c.optim.optimizer_offload_fraction
    if fraction > 1:
        yield ConfigError(
            f"optimizer_offload_fraction {fraction:g} is above 1",
            why="it is a fraction of the state",
            fix="set --optimizer-offload-fraction to at most 1",
        )
    if c.optim.optimizer_cpu_offload and c.train.device == "cpu":
        yield ConfigError(
            "optimizer_cpu_offload has no effect",
            why="optimizer state of a CPU is in host memory already",
            fix="leave --optimizer-cpu-offload out",
        )


def check_corpora(c: Settings) -> Errors:
    """A run names its corpora in one way."""
    data = c.data
    if data.data_path and data.train_data_path:
        yield ConfigError(
            "data_path and train_data_path are both set",
            why="a run divides one blend by --split, or has one blend per split",
            fix="leave out --data-path or --train-data-path",
        )
    if data.stages and data.data_path:
        yield ConfigError(
            "data_stages and data_path are both set",
            why="each stage names its own blend",
            fix="leave out --data-stages or the other",
        )
    if data.stages and data.train_data_path and not data.data_path:
        yield ConfigError(
            "data_stages and train_data_path are both set",
            why="each stage names its own blend",
            fix="leave out --data-stages or the other",
        )


def check_trained_stages(c: Settings) -> Errors:
    """Stages of the data that train other parameters: the run goes on from a checkpoint."""
    if not has_trained_stages(c.optim):
        return
    flags = "patterns of --freeze or --train-only for one of data_stages"
    if not c.checkpoint.save:
        yield ConfigError(
            f"{flags} with --no-save",
            why="where another set of parameters begins, the run goes on from a checkpoint",
            fix="leave out --no-save, or train the stages as runs of their own",
        )
    if c.train.rollback_on_spike is not None:
        yield ConfigError(
            f"{flags} with rollback_on_spike",
            why="a rollback could return to a stage that trains other parameters",
            fix="leave out --rollback-on-spike, or train the stages as runs of their own",
        )


def check_tokenizer(c: Settings) -> Errors:
    """A run has one tokenizer."""
    vocab = c.data.vocab_file
    merges = c.data.merge_file
    if (vocab is None) != (merges is None):
        yield ConfigError(
            f"vocab_file is {typed(vocab)} and merge_file is {typed(merges)}",
            why="GPT-2's tokenizer has both files",
            fix="set --vocab-file and --merge-file, or --tokenizer-model",
        )
    tokenizer = c.data.tokenizer_model
    if vocab is not None and tokenizer is not None:
        yield ConfigError(
            f"vocab_file {typed(vocab)} and tokenizer_model {typed(tokenizer)}",
            why="a run has one tokenizer",
            fix="leave out --vocab-file and --merge-file, or --tokenizer-model",
        )


def check_initial_weights(c: Settings) -> Errors:
    """A run starts from one set of weights."""
    load = c.checkpoint.load
    pretrained = c.checkpoint.pretrained_checkpoint
    if load is not None and pretrained is not None:
        yield ConfigError(
            f"load {typed(load)} and pretrained_checkpoint {typed(pretrained)}",
            why="a run starts either from a checkpoint or from Hugging Face weights",
            fix="leave out --load or --pretrained-checkpoint",
        )


def check_rollback(c: Settings) -> Errors:
    """A run that goes back after a spike needs complete checkpoints."""
    multiple = c.train.rollback_on_spike
    if multiple is None:
        return
    if not c.checkpoint.save or c.checkpoint.save_interval == 0:
        yield ConfigError(
            f"rollback_on_spike {multiple:g} has no checkpoint to go back to",
            why="save is off, or save_interval is 0",
            fix="set --save-interval",
        )
    if not c.checkpoint.save_optim:
        yield ConfigError(
            f"rollback_on_spike {multiple:g} with checkpoints without optimizer state",
            why="save_optim is off, and a step cannot be repeated without the state before it",
            fix="leave out --no-save-optim or --rollback-on-spike",
        )


def check_debugging(c: Settings) -> Errors:
    """Check the search for values that are not finite, and the watchdog after the first step."""
    if c.train.debug_nan and c.train.torch_compile:
        yield ConfigError(
            "debug_nan and torch_compile are set",
            why="modules inside a compiled block are not seen",
            fix="leave out --torch-compile for the search",
        )
    hang = c.train.hang_timeout_s
    later = c.parallel.distributed_timeout_seconds_after_init
    if hang is not None and later is not None and hang >= later:
        yield ConfigError(
            f"hang_timeout_s {hang:g} is not below distributed_timeout_seconds_after_init "
            f"{later:g}",
            why="a collective then fails before the watchdog reports",
            fix="lower --hang-timeout-s or raise --distributed-timeout-seconds-after-init",
        )
