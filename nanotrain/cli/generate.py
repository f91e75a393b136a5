"""`nanotrain generate`: arguments, the layout of the ranks it runs on, and the printed texts."""

from argparse import Namespace
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path

from nanotrain.cli.launch import launch_command, require_no_misspelled, take_options
from nanotrain.cli.parser import OF_FOLDER, CommandParser, count, not_negative, probability, seed
from nanotrain.config.config import Config, DataConfig
from nanotrain.config.derive import with_padding_for
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.config.validate import check_layout, validate_for_world
from nanotrain.errors import ConfigError, TopologyError
from nanotrain.quantities import count_of
from nanotrain.system.process import importing_torch

# Flags that other programs, and the settings of a training, have for the number of tokens to sample.
OF_TOKENS = dict.fromkeys(
    ("--max-new-tokens", "--max_new_tokens", "--max-tokens", "--max-length", "--generate-tokens"), "--num-tokens"
)
# Settings that a command line may have; all others are the model's.
KEPT = frozenset(
    {"train.device", "precision.params_dtype", "parallel.distributed_timeout_minutes"}
    | {f"parallel.{axis}_parallel_size" for axis in ("tensor_model", "expert_model", "expert_tensor")}
    | {f"parallel.{axis}_parallel_size" for axis in ("pipeline_model", "context")}  # accepted if 1
)


def generate(argv: Sequence[str], *, environment: MutableMapping[str, str]) -> int:
    """Continue texts with the model of a checkpoint or Hugging Face folder."""
    options, argv = take_options(argv)
    args, rest = _parser().parse_known_args(argv)
    require_no_misspelled(rest)
    loaded = load_line(parse(rest, listed_by="nanotrain generate --help"), to_train=False)
    if not options:
        return _run(args, loaded, environment=environment)
    command = ["generate", *argv]
    return launch_command(
        args, loaded, command=command, options=options, environment=environment, check=generation_config
    )


def _parser() -> CommandParser:
    epilog = "the sizes of tensor and expert parallelism, --bf16, --device and, for shards, --nproc-per-node may follow"
    parser = CommandParser("generate", generate, epilog=epilog, elsewhere=OF_FOLDER | OF_TOKENS)
    parser.add_argument("path", type=Path, help="run folder, step folder, or Hugging Face folder")
    prompt_help = "the text to continue (default: none); several are sampled together and printed one after the other"
    parser.add_argument("--prompt", action="append", help=prompt_help)
    tokens_help = "largest number of tokens to generate (default: 120)"
    parser.add_argument("--num-tokens", type=count, default=120, metavar="N", help=tokens_help)
    temperature_help = "sampling temperature; 0 is greedy (default: 0.8)"
    parser.add_argument("--temperature", type=not_negative, default=0.8, metavar="T", help=temperature_help)
    top_k_help = "sample from the K most likely tokens; unset: from all"
    parser.add_argument("--top-k", type=count, metavar="K", help=top_k_help)
    top_p_help = "sample from the fewest most likely tokens of probability P; unset: from all"
    parser.add_argument("--top-p", type=probability, metavar="P", help=top_p_help)
    stop_help = "end at this text, which is not printed; may be repeated"
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop_help)
    parser.add_argument("--seed", type=seed, default=0, help="random seed of the sampling (default: 0)")
    parser.add_argument("--tokenizer", help="Hugging Face name or folder, tokenizer.json; unset: the run's")
    cache_help = "read the whole text again for every token, instead of keeping keys and values"
    parser.add_argument("--no-cache", action="store_true", help=cache_help)
    parser.add_argument("--ema", action="store_true", help="use the moving average of the weights (--ema-decay)")
    return parser


def _run(args: Namespace, loaded: Loaded, *, environment: MutableMapping[str, str]) -> int:
    """Generate on all ranks; the first prints."""
    with importing_torch():
        from nanotrain.comm.parallel_context import Launch, ParallelContext
        from nanotrain.inference.checkpoint import load_model, open_model
        from nanotrain.inference.generate import Sampling
        from nanotrain.topology.topology import Topology

    launch, checkpoint = Launch.of(environment), open_model(args.path, ema=args.ema)
    config = generation_config(checkpoint.config, loaded, world_size=launch.world_size)
    has_experts = config.model.moe is not None
    topology = Topology.of(config.parallel, launch.world_size, has_experts=has_experts)
    timeout_s = config.parallel.distributed_timeout_minutes * 60
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    # Bytes of an argument that are not of the locale's encoding are lone surrogates, which no tokenizer encodes.
    prompts = [text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for text in args.prompt or [""]]
    with ParallelContext.start(topology, device=config.train.device.value, timeout_s=timeout_s) as context:
        dtype = config.precision.params_dtype.value
        checkpoint = checkpoint.with_model(config.model)
        model = load_model(checkpoint, tokenizer=args.tokenizer, context=context, dtype=dtype)
        options = {"sampling": sampling, "stops": args.stop, "use_cache": not args.no_cache}
        pieces = model.stream(prompts, num_tokens=args.num_tokens, **options)
        _print(prompts, pieces, is_first=launch.rank == 0, is_alone=launch.world_size == 1)
    return 0


def _print(prompts: Sequence[str], pieces: Iterator[tuple[int, str]], *, is_first: bool, is_alone: bool) -> None:
    """Print the texts on the first rank; the others generate them too, for their shards."""
    from nanotrain.inference.text import print_texts

    try:
        if is_first:
            print_texts(prompts, pieces)
    except BrokenPipeError:  # the other ranks wait for this one
        if not is_alone:
            deque(pieces, maxlen=0)
        raise
    deque(pieces, maxlen=0)


def generation_config(trained: Config, loaded: Loaded, *, world_size: int) -> Config:
    """The model of a run in the layout of a command line, in fp32 unless it sets another dtype.

    Args:
        trained: the configuration of the model's run.
        loaded: of the command line.
        world_size: ranks of the generation.

    Raises:
        ConfigError: a setting that generation does not read.
        TopologyError: ranks that are not those of the shards.
    """
    why = "the model's own configuration gives everything but the sizes of tensor and expert parallelism"
    loaded.require_only(KEPT, what="generation", why=why)
    parallel = loaded.config.parallel
    pp, cp, tp = (
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.tensor_model_parallel_size,
    )
    if pp > 1 or cp > 1:
        raise ConfigError(
            f"generation cannot run with pp={pp} and cp={cp}",
            why="every rank runs all layers on all tokens; only tensor and expert parallelism shard them",
            fix=f"set --tensor-model-parallel-size {tp * pp * cp} instead: a checkpoint of any layout loads in it",
        )
    # no rank has a part of a sequence: its length is one that the rules on training accept
    config = replace(loaded.config, model=with_padding_for(trained.model, tp), data=DataConfig(seq_length=tp))
    check_layout(config)
    etp = parallel.expert_tensor_parallel_size or tp
    ranks = lcm(tp, parallel.expert_model_parallel_size * etp) if trained.model.moe is not None else tp
    if world_size != ranks:
        raise TopologyError(
            f"generation on {count_of(world_size, 'rank')} with tp={tp} and ep={parallel.expert_model_parallel_size}",
            why=f"the shards of one model are on {count_of(ranks, 'rank')}, and there is one replica",
            fix=f"start {ranks} (nanotrain generate --nproc-per-node {ranks} ...)"
            + (f" or set --tensor-model-parallel-size {world_size}" if world_size > 1 else " or leave the sizes out"),
        )
    validate_for_world(config, world_size, expected_dp=loaded.data_parallel_size)
    return config
