"""`nanotrain evaluate`: loss on a corpus, or scores on tasks."""

import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nanotrain.cli.addresses import read_name
from nanotrain.cli.parser import CommandParser
from nanotrain.cli.trained import MODEL_FLAGS, ModelCommand, add_model
from nanotrain.cli.values import count, examples
from nanotrain.config.config import Config, DataConfig, TrainConfig
from nanotrain.config.load import Loaded
from nanotrain.config.rules.check import check_layout, validate_for_world
from nanotrain.config.user_paths import expand_path, with_variables
from nanotrain.errors import ConfigError, EnvironmentFault
from nanotrain.log import progress, start_logging
from nanotrain.paths import expanded
from nanotrain.system import importing_torch

# microbatches of a data-parallel rank per pipeline stage, so that a pipeline is filled
MICROBATCHES_PER_STAGE = 2
LM_EVAL_BATCH = 8  # samples of a batch of lm-eval where the command line sets none
# settings besides the layout that may differ from the training run's
SETTINGS = {
    "data.seq_length",
    "train.micro_batch_size",
    "train.device",
    "precision.params_dtype",
}
# settings of the layout on gradients and the optimizer, which an evaluation does not have
TRAINING_SETTINGS = {
    "parallel.ddp_bucket_size",
    "parallel.ddp_pad_buckets_for_high_nccl_busbw",
    "parallel.force_all_reduce",
    "parallel.ddp_average_in_collective",
    "parallel.reduce_scatter_with_fp32_accumulation",
    "parallel.overlap_grad_reduce",
    "parallel.outer_dp_sharding_strategy",
    "parallel.num_distributed_optimizer_instances",
    "parallel.pipeline_schedule",
}


def evaluate(argv: Sequence[str]) -> int:
    """Compute loss, perplexity and bits per byte of a model on a corpus, or its scores on tasks."""
    command = ModelCommand.parse("evaluate", evaluate_parser(), argv=argv)
    args = command.args
    if args.tasks is not None and "=" not in args.tasks:
        if command.options:
            raise ConfigError(
                f"{command.options[0]} with --tasks",
                why="tasks run on one process",
                fix="leave it out",
            )
        return run_lm_eval(args, command.loaded)
    refuse_lm_eval_options(args)
    return command.run(evaluate_on_rank, check=evaluation_config)


def evaluate_parser() -> CommandParser:
    """The parser of `nanotrain evaluate`."""
    parser = CommandParser(
        "evaluate",
        evaluate,
        epilog="the flags of the layout, --seq-length, --micro-batch-size, --bf16, --device, "
        "--nproc-per-node may follow",
        other_flags={**MODEL_FLAGS, "--data-path": "--data NAME"},
    )
    data_or_tasks = parser.add_mutually_exclusive_group(required=True)
    data_or_tasks.add_argument(
        "--data",
        type=partial(expanded, may_be_address=True),
        metavar="NAME",
        help="prefix of token files (.bin/.idx), or text: a .txt or .jsonl file or a folder of "
        "them",
    )
    data_or_tasks.add_argument(
        "--tasks",
        metavar="NAMES",
        help="tasks of lm-eval on one process, or NAME=FILE.jsonl; separated by commas",
    )
    add_model(parser)
    parser.add_argument(
        "--include-path",
        type=expanded,
        metavar="FOLDER",
        help="tasks: a folder with further tasks (YAML)",
    )
    parser.add_argument(
        "--num-fewshot", type=examples, metavar="N", help="tasks: examples before a question"
    )
    parser.add_argument(
        "--tokenizer",
        type=read_name,
        help="Hugging Face name or folder, tokenizer.json; unset: the model's",
    )
    parser.add_argument(
        "--max-samples",
        type=count,
        metavar="N",
        help="windows of seq_length tokens, or documents of a task, to read; unset: all",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="tasks: questions and examples as turns, by the tokenizer's chat template",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def refuse_lm_eval_options(args: Namespace) -> None:
    """Check that no option of tasks is given without them.

    Raises:
        ConfigError: one is.
    """
    owner = "--tasks"
    if args.include_path is not None:
        flag = "--include-path"
        owner = "--tasks of lm-eval"
    elif args.data is not None and args.chat:
        flag = "--chat"
    elif args.data is not None and args.num_fewshot is not None:
        flag = "--num-fewshot"
    else:
        return
    raise ConfigError(
        f"{flag} has no effect on {'--data' if args.data else 'tasks of files'}",
        why=f"it belongs to {owner}",
        fix="leave it out",
    )


def run_lm_eval(args: Namespace, loaded: Loaded) -> int:
    """Run tasks of lm-eval on one process."""
    loaded.require_only(
        {"train.device", "train.micro_batch_size"},
        what="--tasks",
        why="tasks run on one process, in fp32",
        fix="leave it out, or evaluate with --data",
    )
    try:
        from nanotrain.inference.lm_eval import NanotrainLM, evaluate_tasks
    except ModuleNotFoundError as error:
        raise EnvironmentFault(
            "--tasks needs lm-eval",
            why=f"{error.name} is not installed",
            fix="pip install nanotrain[lm-eval]",
        ) from None
    from nanotrain.comm.device import pick_device

    start_logging()
    batch_size = LM_EVAL_BATCH
    if "train.micro_batch_size" in loaded.explicit:
        batch_size = loaded.config.train.micro_batch_size
    model = NanotrainLM(
        str(args.path),
        tokenizer=args.tokenizer,
        ema=args.ema,
        device=str(pick_device(loaded.config.train.device, local_rank=0)),
        batch_size=batch_size,
    )
    scores = evaluate_tasks(
        model,
        args.tasks.split(","),
        include_path=args.include_path,
        num_fewshot=args.num_fewshot,
        limit=args.max_samples,
        chat=args.chat,
    )
    if args.json:
        print(json.dumps(scores, default=str))
        return 0
    for task, metrics in scores.items():
        texts = []
        for name, value in metrics.items():
            if isinstance(value, float):
                texts.append(f"{name.removesuffix(',none')} {value:.4f}")
        print(f"{task}: {', '.join(texts)}")
    return 0


def evaluate_on_rank(args: Namespace, loaded: Loaded) -> int:
    """Evaluate on a corpus or on tasks of files, on all ranks."""
    with importing_torch():
        from nanotrain.comm.parallel_context import Launch, ParallelContext
        from nanotrain.data.same_tokenizer import require_tokenizer_of
        from nanotrain.data.tokenizer import load_tokenizer
        from nanotrain.inference.checkpoint import open_model, tokenizer_name
        from nanotrain.plan.plan import plan_run
        from nanotrain.prepare.chat import ChatTemplate
        from nanotrain.train.evaluate import evaluate_model, score_model
        from nanotrain.train.open_tasks import read_tasks

    launch = Launch.of(os.environ)
    start_logging(is_first=launch.rank == 0)  # opening a folder logs which files are read
    model = open_model(args.path, ema=args.ema)
    config = evaluation_config(model.config, loaded, world_size=launch.world_size)
    name = args.tokenizer or tokenizer_name(model)
    tokenizer = None if name is None else load_tokenizer(name)
    if args.data is not None:
        require_tokenizer_of(name, args.data)
    task_settings = TrainConfig(
        eval_tasks=expand_path(with_variables(args.tasks.split(","))) if args.tasks else [],
        eval_num_fewshot=args.num_fewshot or 0,
        eval_task_limit=args.max_samples,
    )
    tasks = read_tasks(
        task_settings,
        tokenizer,
        is_pretrained=model.is_pretrained,
        seq_length=config.data.seq_length,
        chat=ChatTemplate(name).prompt if args.chat and name else None,
    )
    plan = plan_run(config, launch.world_size, rank=launch.rank)
    timeout_s = config.parallel.distributed_timeout_minutes * 60
    with (
        ParallelContext.start(
            plan.topology, device=config.train.device, timeout_s=timeout_s
        ) as context,
        progress("evaluating", is_shown=launch.rank == 0),
    ):
        if args.data is None:
            results: dict[str, Any] = score_model(model, tasks, plan=plan, context=context)
        else:
            evaluation = evaluate_model(
                model,
                args.data,
                plan=plan,
                context=context,
                tokenizer=tokenizer,
                max_samples=args.max_samples,
            )
            results = {"": evaluation}
    if launch.rank == 0:
        print_results(results, as_json=args.json)
    return 0


def print_results(results: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one line per task; a corpus is the result without a name."""
    if as_json:
        fields = {name: result.to_dict() for name, result in results.items()}
        print(json.dumps(fields.get("", fields)))
        return
    for name, result in results.items():
        print(f"{name}: {result.text()}" if name else result.text())


def evaluation_config(trained: Config, loaded: Loaded, *, world_size: int) -> Config:
    """The model and masks of a run in the layout of a command line, by default in fp32.

    Args:
        trained: the configuration of the model's run.
        loaded: settings of the command line.
        world_size: ranks of the evaluation.

    Raises:
        ConfigError: a setting that belongs to training.
        TopologyError: ranks that cannot form the layout.
    """
    layout_keys = {key for key in loaded.explicit if key.startswith("parallel.")}
    loaded.require_only(
        (layout_keys - TRAINING_SETTINGS) | SETTINGS,
        what="an evaluation",
        why="the model's own configuration gives everything but the layout",
    )
    given = loaded.config
    length_from = given if "data.seq_length" in loaded.explicit else trained
    data = DataConfig(
        seq_length=length_from.data.seq_length,
        num_workers=0,
        reset_position_ids=trained.data.reset_position_ids,
        reset_attention_mask=trained.data.reset_attention_mask,
        eod_mask_loss=trained.data.eod_mask_loss,
    )
    micro_batch_size = given.train.micro_batch_size
    num_microbatches = MICROBATCHES_PER_STAGE * given.parallel.pipeline_model_parallel_size
    dp = given.parallel.data_parallel_size(world_size)
    train = TrainConfig(
        micro_batch_size=micro_batch_size,
        global_batch_size=micro_batch_size * dp * num_microbatches,
        device=given.train.device,
    )
    model_config = trained.model.with_padding_for(given.parallel.tensor_model_parallel_size)
    config = replace(given, model=model_config, data=data, train=train)
    check_layout(config)
    validate_for_world(config, world_size, expected_dp=loaded.data_parallel_size)
    return config
