"""`nanotrain evaluate`: arguments, the layout of the ranks it runs on, and the printed result."""

import json
from argparse import Namespace
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from nanotrain.cli.launch import launch_command, require_no_misspelled, take_options
from nanotrain.cli.parser import OF_FOLDER, CommandParser, count
from nanotrain.config.config import Config, DataConfig, TrainConfig
from nanotrain.config.derive import data_parallel_size, with_padding_for
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.config.validate import check_layout, validate_for_world
from nanotrain.errors import ConfigError, EnvironmentFault
from nanotrain.system.process import importing_torch

# Settings that may differ from those of the training run; all others are the model's.
KEPT = ("data.seq_length", "train.micro_batch_size", "train.device", "precision.params_dtype")
# Settings of the layout that concern gradients and the optimizer, which an evaluation does not have.
OF_TRAINING = frozenset(
    f"parallel.{name}"
    for name in (
        *("ddp_bucket_size", "ddp_pad_buckets_for_high_nccl_busbw", "ddp_average_in_collective", "force_all_reduce"),
        *("reduce_scatter_with_fp32_accumulation", "overlap_grad_reduce", "outer_dp_sharding_strategy"),
        *("num_distributed_optimizer_instances", "pipeline_schedule"),
    )
)
MICROBATCHES_PER_STAGE = 2  # of a global batch and data-parallel rank, so that a pipeline is filled


def evaluate(argv: Sequence[str], *, environment: MutableMapping[str, str]) -> int:
    """Compute loss, perplexity and bits per byte of a model on a corpus, or run tasks of lm-eval."""
    options, argv = take_options(argv)
    args, rest = _parser().parse_known_args(argv)
    require_no_misspelled(rest)
    if args.tasks is not None:
        if options:
            raise ConfigError(f"{options[0]} with --tasks", why="tasks run on one process", fix="leave it out")
        return _run_tasks(args, load_line(parse(rest, listed_by="nanotrain evaluate --help"), to_train=False))
    if args.num_fewshot is not None or args.include_path is not None:
        flag = "--include-path" if args.num_fewshot is None else "--num-fewshot"
        raise ConfigError(f"{flag} has no effect on --data", why="it belongs to --tasks", fix="leave it out")
    loaded = load_line(parse(rest, listed_by="nanotrain evaluate --help"), to_train=False)
    if not options:
        return _run_corpus(args, loaded, environment=environment)
    command = ["evaluate", *argv]
    return launch_command(args, loaded, command=command, options=options, environment=environment, check=_check_world)


def _parser() -> CommandParser:
    epilog = "the flags of the layout, --seq-length, --micro-batch-size, --bf16, --device, --nproc-per-node may follow"
    parser = CommandParser("evaluate", evaluate, epilog=epilog, elsewhere={**OF_FOLDER, "--data-path": "--data NAME"})
    parser.add_argument("path", type=Path, help="run folder, step folder, or Hugging Face folder")
    data_help = "prefix of token files (.bin/.idx), or text: a .txt or .jsonl file or a folder of them"
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--data", metavar="NAME", help=data_help)
    what.add_argument("--tasks", metavar="NAMES", help="tasks of lm-eval, separated by commas, on one process")
    parser.add_argument("--include-path", metavar="FOLDER", help="tasks: a folder with further tasks (YAML)")
    parser.add_argument(
        "--num-fewshot", type=int, choices=range(65), metavar="N", help="tasks: examples before a question"
    )
    parser.add_argument("--tokenizer", help="Hugging Face name or folder, tokenizer.json; unset: the model's")
    samples_help = "windows of seq_length tokens, or documents of a task, to read; unset: all"
    parser.add_argument("--max-samples", type=count, metavar="N", help=samples_help)
    parser.add_argument("--ema", action="store_true", help="use the moving average of the weights (--ema-decay)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _run_tasks(args: Namespace, loaded: Loaded) -> int:
    """Run tasks of lm-eval on one process."""
    why, fix = "tasks run on one process, in fp32", "leave it out, or evaluate with --data"
    loaded.require_only({"train.device", "train.micro_batch_size"}, what="--tasks", why=why, fix=fix)
    try:
        from nanotrain.inference.lm_eval import NanotrainLM, evaluate_tasks
    except ModuleNotFoundError as error:
        fix = "pip install nanotrain[lm-eval]"
        raise EnvironmentFault("--tasks needs lm-eval", why=f"{error.name} is not installed", fix=fix) from None
    from nanotrain.comm.device import pick_device

    device = str(pick_device(loaded.config.train.device.value, local_rank=0))
    batch_size = loaded.config.train.micro_batch_size if "train.micro_batch_size" in loaded.explicit else 8
    model = NanotrainLM(str(args.path), tokenizer=args.tokenizer, ema=args.ema, device=device, batch_size=batch_size)
    found = evaluate_tasks(
        model,
        args.tasks.split(","),
        include_path=args.include_path,
        num_fewshot=args.num_fewshot,
        limit=args.max_samples,
    )
    if args.json:
        print(json.dumps(found, default=str))
        return 0
    for task, metrics in found.items():
        numbers = [
            f"{name.removesuffix(',none')} {value:.4f}" for name, value in metrics.items() if isinstance(value, float)
        ]
        print(f"{task}: {', '.join(numbers)}")
    return 0


def _run_corpus(args: Namespace, loaded: Loaded, *, environment: MutableMapping[str, str]) -> int:
    """Evaluate on a corpus, on all ranks."""
    with importing_torch():
        from nanotrain.comm.parallel_context import Launch, ParallelContext
        from nanotrain.data.corpus_info import require_tokenizer_of
        from nanotrain.data.tokenizer import load_tokenizer
        from nanotrain.inference.checkpoint import open_model, tokenizer_name
        from nanotrain.train.evaluate import evaluate_model
        from nanotrain.train.plans.plan import plan_run

    launch, model = Launch.of(environment), open_model(args.path, ema=args.ema)
    config = _check_world(model.config, loaded, world_size=launch.world_size)
    name = args.tokenizer or tokenizer_name(model)
    require_tokenizer_of(name, args.data)
    tokenizer = None if name is None else load_tokenizer(name)
    plan = plan_run(config, launch.world_size, rank=launch.rank)
    timeout_s = config.parallel.distributed_timeout_minutes * 60
    with ParallelContext.start(plan.topology, device=config.train.device.value, timeout_s=timeout_s) as context:
        result = evaluate_model(
            model, args.data, plan=plan, context=context, tokenizer=tokenizer, max_samples=args.max_samples
        )
    if launch.rank == 0:
        print(result.to_json() if args.json else result.text())
    return 0


def _check_world(trained: Config, loaded: Loaded, *, world_size: int) -> Config:
    """The configuration of an evaluation on a number of ranks, after a check that they can form its layout."""
    config = evaluation_config(trained, loaded, world_size=world_size)
    check_layout(config)
    validate_for_world(config, world_size, expected_dp=loaded.data_parallel_size)
    return config


def evaluation_config(trained: Config, loaded: Loaded, *, world_size: int) -> Config:
    """The model and masks of a run in the layout of a command line, in fp32 unless it sets another dtype.

    Args:
        trained: the configuration of the model's run.
        loaded: of the command line.
        world_size: ranks of the evaluation.

    Raises:
        ConfigError: a setting that belongs to training.
        TopologyError: ranks that cannot form the layout.
    """
    why = "the model's own configuration gives everything but the layout"
    of_layout = {key for key in loaded.explicit if key.startswith("parallel.")} - OF_TRAINING
    loaded.require_only(of_layout.union(KEPT), what="an evaluation", why=why)
    given, parallel = loaded.config, loaded.config.parallel
    set_length = "data.seq_length" in loaded.explicit
    masks = {name: getattr(trained.data, name) for name in ("reset_position_ids", "reset_attention_mask")}
    data = DataConfig(
        seq_length=given.data.seq_length if set_length else trained.data.seq_length,
        eod_mask_loss=trained.data.eod_mask_loss,
        num_workers=0,
        **masks,
    )
    num_microbatches = MICROBATCHES_PER_STAGE * parallel.pipeline_model_parallel_size
    dp = data_parallel_size(parallel, world_size)
    train = TrainConfig(
        micro_batch_size=given.train.micro_batch_size,
        global_batch_size=given.train.micro_batch_size * dp * num_microbatches,
        device=given.train.device,
    )
    model_config = with_padding_for(trained.model, parallel.tensor_model_parallel_size)
    return replace(given, model=model_config, data=data, train=train)
