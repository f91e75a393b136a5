"""The section of the run: length, batch size, logging, validation and exit."""

from dataclasses import dataclass
from typing import Literal

from nanotrain.config.option import above, at_least, option, url

DeviceKind = Literal["auto", "cpu", "cuda"]
RerunMode = Literal["disabled", "validate_results"]
# of Megatron-LM's values transformer_engine becomes local; full, full_iteration and moe are refused
CudaGraphImpl = Literal["none", "local", "transformer_engine"]
CudaGraphScope = Literal[
    "attn", "mamba", "mlp", "moe_router", "moe_preprocess", "full", "full_iteration", "moe"
]


@dataclass(frozen=True)
class TrainConfig:
    """The run: length, batch size, logging, validation and exit."""

    train_iters: int = option(100, check=at_least(0, at_most=10**12))
    """optimizer steps; 0: build everything, train nothing"""

    micro_batch_size: int = option(1, check=at_least(1))
    """samples per rank and microbatch"""

    global_batch_size: int | None = option(None, check=at_least(1, at_most=10**7))
    """samples per optimizer step over all ranks; unset: micro_batch_size x data-parallel size"""

    rampup_batch_size: list[int] = option([], check=at_least(1))
    """START INCREMENT SAMPLES: the global batch grows from START by INCREMENT over the first
    SAMPLES samples to global_batch_size
    """

    step_batch_size_schedule: list[str] = option([])
    """TOKENS:SIZE pairs such as 0:768 250B:1536: the global batch size from each number of tokens
    on, instead of global_batch_size
    """

    step_seq_length_schedule: list[str] = option([])
    """TOKENS:LENGTH pairs such as 0:1024 10B:4096: the sequence length from each number of tokens
    on, ascending to seq_length; a sample stays seq_length tokens, split into consecutive sequences
    of that length
    """

    seed: int = option(1234, check=at_least(0, at_most=2**62))
    """random seed"""

    run_dir: str | None = option(None, is_path="or address")
    """folder of the run, or its address in object storage; unset: runs/<recipe>"""

    device: DeviceKind = option("auto")
    """auto (cuda where available), cpu or cuda"""

    rerun_mode: RerunMode = option("disabled")
    """validate_results: take a step whose loss is not finite again, and log whether that repeats,
    which tells a transient fault of hardware from one of data, settings or weights; the host then
    waits for every step; disabled: skip it
    """

    replay_interval: int = option(0, check=at_least(0))
    """steps between comparisons with another replica, which computes the first microbatch of the
    step again, against hardware that errs without a sign; 0: none
    """

    deterministic_mode: bool = option(False)
    """deterministic algorithms of torch, cuBLAS, cuDNN and NCCL; an operator that has none is an
    error
    """

    torch_compile: bool | None = option(None)
    """compile every transformer block with torch.compile; unset: on GPUs, where nothing that is set
    forbids it
    """

    cuda_graph_impl: CudaGraphImpl = option("none")
    """local: capture parts of every layer as CUDA graphs, which the host launches at once, as does
    transformer_engine; none: do not
    """

    cuda_graph_scope: list[CudaGraphScope] = option([])
    """parts of layers that are captured: attn, mamba (layers in place of attention), mlp (dense),
    moe_router and moe_preprocess (router and shared expert); empty: all of these, dense layers as a
    whole
    """

    cuda_graph_warmup_steps: int = option(3, check=at_least(0))
    """passes of a part, forward and backward, that run before it is captured; 0 is as 1"""

    attention_backend: str = option("auto")
    """kernels of the core attention: auto, flash, fused, unfused, local or flex"""

    log_interval: int = option(1, check=at_least(1))
    """steps between log lines"""

    timing_log_level: int = option(0, check=at_least(0, at_most=2))
    """log the time of every phase of a step on the first rank, and mark the phases in traces
    (torch, NVTX); 2: the actions of the pipeline schedule too; 0: neither
    """

    log_max_attention_logit: bool = option(False)
    """log the largest attention logit since the last logged step; computes the scores once more"""

    log_params_norm: bool = option(False)
    """log the 2-norm of all parameters"""

    log_norms_by_group: bool = option(False)
    """log the 2-norms of gradients, updates and parameters of embedding, attention, MLP, experts,
    norms, head and multi-token prediction; a logged step copies the main parameters
    """

    log_straggler: bool = option(False)
    """log the seconds of a step in which each rank did not wait for others, and name stragglers; on
    CPUs
    """

    straggler_factor: float = option(1.5, check=above(1))
    """with log_straggler: multiple of the median of the ranks above which a rank is slow"""

    straggler_duration_s: float = option(60.0, check=above(0))
    """with log_straggler: seconds of slow steps in a row after which a rank is a straggler"""

    log_num_zeros_in_grad: bool = option(False)
    """log the number of zeros in the gradients"""

    eval_interval: int = option(500, check=at_least(0))
    """steps between validations; 0: never"""

    eval_iters: int = option(10, check=at_least(0))
    """global batches per validation; 0: no validation"""

    full_validation: bool = option(False)
    """validate on every sample of the validation sets, each once, in place of eval_iters batches"""

    eval_tasks: list[str] = option([], is_path=True)
    """NAME=FILE.jsonl entries: tasks that are scored at every validation"""

    eval_num_fewshot: int = option(0, check=at_least(0, at_most=64))
    """examples before each question of a task: the first other questions of its file"""

    eval_task_limit: int | None = option(None, check=at_least(1))
    """questions per task; unset: all"""

    exit_interval: int | None = option(None, check=at_least(1))
    """save and exit at steps that are a multiple of this"""

    exit_duration_in_mins: float | None = option(None, check=above(0))
    """save and exit after this many minutes"""

    preflight: bool = option(False)
    """before the run, test matrix products, messages between pairs of ranks, disk and clocks, and
    end it where a rank, a pair or a host is an outlier
    """

    preflight_factor: float = option(2.0, check=above(1))
    """with preflight: multiple of the median above which a measurement is an outlier"""

    hang_timeout_s: float | None = option(None, check=at_least(0))
    """seconds without progress after which the run ends with hang-report.txt; 0: never; unset: 0.9
    of the timeout of collectives
    """

    inprocess_restart: bool = option(False)
    """after a fault of one rank the others stay: they form their groups anew and go on from the
    newest checkpoint, and `nanotrain train --nproc-per-node` starts a rank that died again, alone
    """

    inprocess_max_iterations: int = option(10, check=at_least(1))
    """with inprocess_restart: restarts in place after which a fault ends the run"""

    inprocess_min_ranks: int | None = option(None, check=at_least(1))
    """with inprocess_restart: a rank that dies again without a new step, or does not start again,
    leaves the run, and the others go on in the same layout with fewer data-parallel ranks, on at
    least so many ranks; unset: none leaves
    """

    max_consecutive_skips: int = option(50, check=at_least(0))
    """steps skipped in a row, as not finite, after which the run saves and ends; 0: never"""

    rollback_on_spike: float | None = option(None, check=above(1))
    """after a loss above this multiple of the median of the last steps go back to the newest
    checkpoint and skip the data since then; unset: never
    """

    debug_nan: bool = option(False)
    """search the first tensor that is not finite, by module, rank and microbatch; slow"""

    check_weight_hash_across_dp_replicas_interval: int = option(0, check=at_least(0))
    """steps between comparisons of the replicas of every parameter, bit for bit; 0: never"""

    manual_gc_interval: int = option(100, check=at_least(0))
    """steps between manual garbage collections; 0: automatic collection"""

    profile: bool = option(False)
    """write a torch profiler trace into the run folder"""

    profile_step_start: int = option(3, check=at_least(1))
    """first profiled step"""

    profile_step_end: int = option(5, check=at_least(1))
    """last profiled step"""

    profile_ranks: list[int] = option([], check=at_least(0))
    """ranks that write a trace, or a memory snapshot; empty: all, of more than 64 those of one
    data-parallel replica
    """

    memory_snapshot_path: str | None = option(None, is_path=True)
    """file for the history of GPU memory, written at the end of the run or after an error, with the
    rank in its name
    """

    trackers: list[str] = option([])
    """names of experiment trackers that get the numbers of every step: tensorboard, wandb,
    prometheus, mlflow
    """

    tensorboard: bool = option(False)
    """write TensorBoard event files"""

    tensorboard_dir: str | None = option(None, is_path=True)
    """folder of the TensorBoard event files, turns tensorboard on; unset: in the run folder"""

    wandb: bool = option(False)
    """log to Weights & Biases; offline without an API key"""

    wandb_project: str = option("nanotrain")
    """Weights & Biases project; on the command line it turns wandb on"""

    wandb_exp_name: str | None = option(None)
    """Weights & Biases: name of the run; unset: the name of the run folder"""

    wandb_entity: str | None = option(None)
    """Weights & Biases: team or user; unset: the default of the account"""

    prometheus_port: int | None = option(None, check=at_least(1, at_most=65535))
    """serve the metrics for Prometheus at this port, from the first rank; unset: do not"""

    prometheus_address: str = option("127.0.0.1")
    """address that the Prometheus endpoint binds to; 0.0.0.0: all interfaces"""

    notify: str | None = option(None, check=url(), secret="NANOTRAIN_NOTIFY")
    """URL that gets a JSON message at start, end, failure and loss spikes; files refer to
    $NANOTRAIN_NOTIFY
    """

    report: bool = option(True)
    """write report.html into the run folder at the end"""

    report_interval: int = option(0, check=at_least(0))
    """also write the report every this many steps; 0: only at the end"""

    generate_tokens: int = option(0, check=at_least(0))
    """tokens to generate at the end of training; 0: none"""

    generate_prompt: str = option("")
    """prompt of the generated sample; empty: a new document"""
