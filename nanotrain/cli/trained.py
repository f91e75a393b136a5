"""`nanotrain evaluate` and `nanotrain generate`: a trained model on one rank, or on the ranks of a
layout.

arguments -> settings of the layout -> the model's configuration in that layout -> ranks -> result,
printed once
"""

import json
import os
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from nanotrain.cli.launch import refuse_inside_torchrun, require_no_misspelled, take_options
from nanotrain.cli.parser import CommandParser, declared
from nanotrain.config.config import Config, DataConfig, TrainConfig
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.config.rules.check import check_layout, validate_for_world
from nanotrain.errors import ConfigError, EnvironmentFault, TopologyError
from nanotrain.log import progress
from nanotrain.quantities import count_of
from nanotrain.system import importing_torch

MICROBATCHES_PER_STAGE = 2  # of a global batch and data-parallel rank, so that a pipeline is filled


def evaluate(argv: Sequence[str]) -> int:
    """Compute loss, perplexity and bits per byte of a model on a corpus, or its scores on tasks."""
    command = _Command.parse(evaluate, argv)
    args = command.args
    if args.tasks is not None and "=" not in args.tasks:
        if command.options:
            what = f"{command.options[0]} with --tasks"
            raise ConfigError(what, why="tasks run on one process", fix="leave it out")
        return _run_tasks(args, command.loaded)
    if args.include_path is not None or args.data is not None and args.num_fewshot is not None:
        flag = "--num-fewshot" if args.include_path is None else "--include-path"
        what = f"{flag} has no effect on {'--data' if args.data else 'tasks of files'}"
        raise ConfigError(what, why="it belongs to --tasks of lm-eval", fix="leave it out")
    return command.run(_evaluate, check=evaluation_config)


def generate(argv: Sequence[str]) -> int:
    """Continue texts with the model of a checkpoint or Hugging Face folder."""
    return _Command.parse(generate, argv).run(_generate, check=generation_config)


@dataclass(frozen=True)
class _Command:
    """A parsed command line."""

    name: str
    argv: Sequence[str]  # without torchrun's options
    options: Sequence[str]  # torchrun's
    args: Namespace  # arguments of the command; with `path` and `ema` of the model
    loaded: Loaded  # settings of the layout

    @classmethod
    def parse(cls, function: Callable[..., int], argv: Sequence[str]) -> "_Command":
        """Parse the arguments of the command of a function; settings of the layout are between
        them.
        """
        name, (options, argv) = function.__name__, take_options(argv)
        args, rest = CommandParser(name, function).parse_known_args(argv)
        require_no_misspelled(rest)
        loaded = load_line(parse(rest, listed_by=f"nanotrain {name} --help"), to_train=False)
        return cls(name, argv, options, args, loaded)

    def run(
        self, on_rank: Callable[[Namespace, Loaded], int], *, check: Callable[..., Config]
    ) -> int:
        """Run in this process, or with torchrun's options on one process per rank.

        Args:
            on_rank: the command on one rank.
            check: the configuration of a model in a layout, given that of its run, the settings and
                `world_size=`.

        Returns:
            The exit code.
        """
        if not self.options:
            return on_rank(self.args, self.loaded)
        refuse_inside_torchrun(self.name, options=self.options, environment=os.environ)
        with importing_torch():
            from nanotrain.inference.checkpoint import open_model
            from nanotrain.launch.start_ranks import start_ranks

        trained = open_model(self.args.path, ema=self.args.ema).config
        return start_ranks(
            ["nanotrain", self.name, *self.argv],
            options=self.options,
            environment=os.environ,
            check=lambda world_size: check(trained, self.loaded, world_size=world_size),
        )


def _run_tasks(args: Namespace, loaded: Loaded) -> int:
    """Run tasks of lm-eval on one process."""
    why, fix = "tasks run on one process, in fp32", "leave it out, or evaluate with --data"
    loaded.require_only(
        {"train.device", "train.micro_batch_size"}, what="--tasks", why=why, fix=fix
    )
    try:
        from nanotrain.inference.lm_eval import NanotrainLM, evaluate_tasks
    except ModuleNotFoundError as error:
        fix = "pip install nanotrain[lm-eval]"
        raise EnvironmentFault(
            "--tasks needs lm-eval", why=f"{error.name} is not installed", fix=fix
        ) from None
    from nanotrain.comm.device import pick_device

    device = str(pick_device(loaded.config.train.device, local_rank=0))
    batch_size = (
        loaded.config.train.micro_batch_size if "train.micro_batch_size" in loaded.explicit else 8
    )
    model = NanotrainLM(
        str(args.path), tokenizer=args.tokenizer, ema=args.ema, device=device, batch_size=batch_size
    )
    options = {
        "include_path": args.include_path,
        "num_fewshot": args.num_fewshot,
        "limit": args.max_samples,
    }
    results = evaluate_tasks(model, args.tasks.split(","), **options)
    if args.json:
        print(json.dumps(results, default=str))
        return 0
    for task, metrics in results.items():
        numbers = {
            name.removesuffix(",none"): value
            for name, value in metrics.items()
            if isinstance(value, float)
        }
        print(f"{task}: {', '.join(f'{name} {value:.4f}' for name, value in numbers.items())}")
    return 0


def _evaluate(args: Namespace, loaded: Loaded) -> int:
    """Evaluate on a corpus or on tasks of files, on all ranks."""
    with importing_torch():
        from nanotrain.comm.parallel_context import Launch, ParallelContext
        from nanotrain.data.corpus_info import require_tokenizer_of
        from nanotrain.data.tokenizer import load_tokenizer
        from nanotrain.inference.checkpoint import open_model, tokenizer_name
        from nanotrain.plan.plan import plan_run
        from nanotrain.train.evaluate import evaluate_model, score_model
        from nanotrain.train.inputs import read_tasks

    launch, model = Launch.of(os.environ), open_model(args.path, ema=args.ema)
    config = evaluation_config(model.config, loaded, world_size=launch.world_size)
    name = args.tokenizer or tokenizer_name(model)
    tokenizer = None if name is None else load_tokenizer(name)
    if args.data is not None:
        require_tokenizer_of(name, args.data)
    entries, num_fewshot = args.tasks.split(",") if args.tasks else [], args.num_fewshot or 0
    tasks = read_tasks(
        TrainConfig(
            eval_tasks=entries, eval_num_fewshot=num_fewshot, eval_task_limit=args.max_samples
        ),
        tokenizer,
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
        _print_results(results, as_json=args.json)
    return 0


def _print_results(results: Mapping[str, Any], *, as_json: bool) -> None:
    """Print one line per task, or the one of a corpus."""
    if as_json:
        fields = {name: result.to_dict() for name, result in results.items()}
        print(json.dumps(fields.get("", fields)))
        return
    for name, result in results.items():
        print(f"{name}: {result.text()}" if name else result.text())


def evaluation_config(trained: Config, loaded: Loaded, *, world_size: int) -> Config:
    """The model and masks of a run in the layout of a command line, in fp32 unless it sets another
    dtype.

    Args:
        trained: the configuration of the model's run.
        loaded: settings of the command line.
        world_size: ranks of the evaluation.

    Raises:
        ConfigError: a setting that belongs to training.
        TopologyError: ranks that cannot form the layout.
    """
    why = "the model's own configuration gives everything but the layout"
    of_layout = {key for key in loaded.explicit if key.startswith("parallel.")}.difference(
        declared("evaluate")["of_training"]
    )
    loaded.require_only(
        of_layout.union(declared("evaluate")["settings"]), what="an evaluation", why=why
    )
    given, parallel = loaded.config, loaded.config.parallel
    of_run = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    data = DataConfig(
        seq_length=(given if "data.seq_length" in loaded.explicit else trained).data.seq_length,
        num_workers=0,
        **{name: getattr(trained.data, name) for name in of_run},
    )
    num_microbatches = MICROBATCHES_PER_STAGE * parallel.pipeline_model_parallel_size
    dp = parallel.data_parallel_size(world_size)
    train = TrainConfig(
        micro_batch_size=given.train.micro_batch_size,
        global_batch_size=given.train.micro_batch_size * dp * num_microbatches,
        device=given.train.device,
    )
    model_config = trained.model.with_padding_for(parallel.tensor_model_parallel_size)
    config = replace(given, model=model_config, data=data, train=train)
    check_layout(config)
    validate_for_world(config, world_size, expected_dp=loaded.data_parallel_size)
    return config


def _generate(args: Namespace, loaded: Loaded) -> int:
    """Generate on all ranks; the first prints."""
    with importing_torch():
        from nanotrain.comm.parallel_context import Launch, ParallelContext
        from nanotrain.inference.checkpoint import load_model, open_model
        from nanotrain.inference.generate import Sampling
        from nanotrain.topology.topology import Topology

    launch, checkpoint = Launch.of(os.environ), open_model(args.path, ema=args.ema)
    config = generation_config(checkpoint.config, loaded, world_size=launch.world_size)
    has_experts = config.model.moe is not None
    topology = Topology.of(config.parallel, launch.world_size, has_experts=has_experts)
    timeout_s = config.parallel.distributed_timeout_minutes * 60
    sampling = Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )
    # Bytes of an argument that are not of the locale's encoding are lone surrogates, which no
    # tokenizer encodes.
    prompts = [
        text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        for text in args.prompt or [""]
    ]
    with ParallelContext.start(
        topology, device=config.train.device, timeout_s=timeout_s
    ) as context:
        dtype = config.precision.params_dtype
        checkpoint = checkpoint.with_model(config.model)
        model = load_model(checkpoint, tokenizer=args.tokenizer, context=context, dtype=dtype)
        options = {"sampling": sampling, "stops": args.stop, "use_cache": not args.no_cache}
        pieces = model.stream(prompts, num_tokens=args.num_tokens, **options)
        _print(prompts, pieces, is_first=launch.rank == 0, is_alone=launch.world_size == 1)
    return 0


def _print(
    prompts: Sequence[str], pieces: Iterator[tuple[int, str]], *, is_first: bool, is_alone: bool
) -> None:
    """Print the texts on the first rank; the others generate them too, also after a pipe's reader
    has closed it.
    """
    from nanotrain.inference.generate import print_texts

    try:
        if is_first:
            print_texts(prompts, pieces)
    finally:
        if not is_alone:
            deque(pieces, maxlen=0)


def generation_config(trained: Config, loaded: Loaded, *, world_size: int) -> Config:
    """The model of a run in the layout of a command line, in fp32 unless it sets another dtype.

    Args:
        trained: the configuration of the model's run.
        loaded: settings of the command line.
        world_size: ranks of the generation.

    Raises:
        ConfigError: a setting that generation does not read.
        TopologyError: ranks that are not those of the shards.
    """
    why = "the model's own configuration gives everything but the sizes of tensor and expert parallelism"
    loaded.require_only(declared("generate")["settings"], what="generation", why=why)
    parallel = loaded.config.parallel
    pp, cp = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    tp = parallel.tensor_model_parallel_size
    if pp > 1 or cp > 1:
        raise ConfigError(
            f"generation cannot run with pp={pp} and cp={cp}",
            why="every rank runs all layers on all tokens; only tensor and expert parallelism shard them",
            fix=f"set --tensor-model-parallel-size {tp * pp * cp} instead: a checkpoint of any layout loads in it",
        )
    # no rank has a part of a sequence: its length is one that the rules on training accept
    config = replace(
        loaded.config, model=trained.model.with_padding_for(tp), data=DataConfig(seq_length=tp)
    )
    check_layout(config)
    etp = parallel.expert_tensor_parallel_size or tp
    ranks = (
        lcm(tp, parallel.expert_model_parallel_size * etp) if trained.model.moe is not None else tp
    )
    if world_size != ranks:
        raise TopologyError(
            f"generation on {count_of(world_size, 'rank')} with tp={tp} and ep={parallel.expert_model_parallel_size}",
            why=f"the shards of one model are on {count_of(ranks, 'rank')}, and there is one replica",
            fix=f"set --tensor-model-parallel-size {world_size}, or start {ranks}: "
            f"nanotrain generate --nproc-per-node {ranks} ...",
        )
    validate_for_world(config, world_size, expected_dp=loaded.data_parallel_size)
    return config
