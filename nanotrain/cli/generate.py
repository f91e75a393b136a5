"""`nanotrain generate`: text from a trained model."""

import os
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from typing import TYPE_CHECKING

from nanotrain.cli.addresses import read_name
from nanotrain.cli.chat import check_chat, given_conversations, prompt_of, talk, with_turn_end
from nanotrain.cli.parser import CommandParser
from nanotrain.cli.trained import MODEL_FLAGS, ModelCommand, add_model
from nanotrain.cli.values import count, number, without_surrogates
from nanotrain.config.config import Config, DataConfig, TrainConfig
from nanotrain.config.load import Loaded
from nanotrain.config.rules.check import check_layout, validate_for_world
from nanotrain.config.rules.layout import shortest_sequence
from nanotrain.config.rules.settings import Settings
from nanotrain.errors import ConfigError, TopologyError
from nanotrain.inference.generation_config import GenerationDefaults
from nanotrain.inference.sampling import LIMITS, Sampling
from nanotrain.log import get_logger, start_logging
from nanotrain.paths import local_path
from nanotrain.quantities import count_of
from nanotrain.system import importing_torch

if TYPE_CHECKING:
    from nanotrain.comm.parallel_context import ParallelContext
    from nanotrain.inference.checkpoint import LoadedModel, OpenedCheckpoint

log = get_logger(__name__)

TEMPERATURE = 0.8  # where neither the command line nor the model's folder sets one
# settings that a command line may have
SETTINGS = {
    "train.device",
    "precision.params_dtype",
    "parallel.distributed_timeout_minutes",
    "parallel.tensor_model_parallel_size",
    "parallel.expert_model_parallel_size",
    "parallel.expert_tensor_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.context_parallel_size",
    "parallel.cp_comm_type",
    "parallel.hierarchical_context_parallel_sizes",
    "parallel.pipeline_model_parallel_layout",
    "parallel.decoder_first_pipeline_num_layers",
    "parallel.decoder_last_pipeline_num_layers",
}
LENGTH_FLAGS = dict.fromkeys(
    ("--max-new-tokens", "--max_new_tokens", "--max-tokens", "--max-length", "--generate-tokens"),
    "--num-tokens",
)


def generate(argv: Sequence[str]) -> int:
    """Continue texts with the model of a checkpoint or Hugging Face folder."""
    command = ModelCommand.parse("generate", generate_parser(), argv=argv)
    check_chat(command.args)
    return command.run(generate_on_rank, check=generation_config)


def generate_parser() -> CommandParser:
    """The parser of `nanotrain generate`."""
    parser = CommandParser(
        "generate",
        generate,
        epilog="the sizes of tensor, expert, pipeline and context parallelism, --bf16, --device "
        "and, for several ranks, --nproc-per-node may follow",
        other_flags={**MODEL_FLAGS, **LENGTH_FLAGS},
    )
    add_model(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        help="the text to continue (default: none); several are sampled together and printed one "
        "after the other",
    )
    parser.add_argument(
        "--num-tokens",
        type=count,
        metavar="N",
        help="largest number of tokens to generate; unset: max_new_tokens of the model's "
        "generation_config.json, else 120",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a message of a user, by the tokenizer's chat template; the replies "
        "are printed. Without prompts: a conversation with standard input",
    )
    parser.add_argument(
        "--messages",
        type=local_path,
        metavar="FILE",
        help='with --chat: conversations to reply to, {"messages": [...]} in .json or per line of '
        ".jsonl",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="with --chat: the message of the system before it"
    )
    add_sampling(parser)
    parser.add_argument(
        "--tokenizer",
        type=read_name,
        help="Hugging Face name or folder, tokenizer.json; unset: the run's",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="read the whole text again for every token, instead of keeping keys and values",
    )
    return parser


def add_sampling(parser: CommandParser) -> None:
    """Add the arguments that choose the next token, and where a text ends."""
    parser.add_argument(
        "--temperature",
        type=option("temperature"),
        metavar="T",
        help="sampling temperature; 0 is greedy; unset: generation_config.json, else 0.8",
    )
    parser.add_argument(
        "--top-k",
        type=option("top_k"),
        metavar="K",
        help="sample from the K most likely tokens; unset: generation_config.json, else from all",
    )
    parser.add_argument(
        "--top-p",
        type=option("top_p"),
        metavar="P",
        help="sample from the fewest most likely tokens of probability P; unset: "
        "generation_config.json, else from all",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end at this text, which is not printed; may be repeated",
    )
    parser.add_argument(
        "--seed", type=option("seed"), default=0, help="random seed of the sampling (default: 0)"
    )
    parser.add_argument(
        "--repetition-penalty",
        type=option("repetition_penalty"),
        metavar="R",
        help="make tokens of the text less likely, above 1; unset: generation_config.json, else 1",
    )


def option(name: str) -> Callable[[str], float]:
    """The converter of an option of sampling, with the limits that `Sampling` has."""
    limit = LIMITS[name]
    return number(limit.what, low=limit.low, high=limit.high)


def sampling_of(args: Namespace, defaults: GenerationDefaults) -> Sampling:
    """The sampling of a command line; the model's folder has the defaults."""
    sampling = defaults.sampling(temperature=TEMPERATURE, seed=args.seed)
    given = {}
    for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
        value = getattr(args, name)
        if value is not None:
            given[name] = value
    return replace(sampling, **given)


def generate_on_rank(args: Namespace, loaded: Loaded) -> int:
    """Generate on all ranks; the first prints."""
    with importing_torch():
        from nanotrain.comm.parallel_context import Launch, ParallelContext
        from nanotrain.inference.checkpoint import open_model, tokenizer_name
        from nanotrain.prepare.chat import ChatTemplate
        from nanotrain.topology.topology import Topology

    launch = Launch.of(os.environ)
    start_logging(is_first=launch.rank == 0)  # opening a folder logs which files are read
    checkpoint = open_model(args.path, ema=args.ema)
    config = generation_config(checkpoint.config, loaded, world_size=launch.world_size)
    if args.prompt is not None:
        args.prompt = [without_surrogates(text) for text in args.prompt]
    if args.system is not None:
        args.system = without_surrogates(args.system)
    conversations = given_conversations(args) if args.chat else []
    has_experts = config.model.moe is not None
    topology = Topology.of(config.parallel, launch.world_size, has_experts=has_experts)
    timeout_s = config.parallel.distributed_timeout_minutes * 60
    with ParallelContext.start(
        topology, device=config.train.device, timeout_s=timeout_s
    ) as context:
        model = load_on_rank(
            checkpoint.with_model(config.model), config, tokenizer=args.tokenizer, context=context
        )
        template = None
        if args.chat:
            template = ChatTemplate(str(args.tokenizer or tokenizer_name(checkpoint)))
            model = with_turn_end(model, template)
        for line in model.defaults.describe():
            log.info("%s", line)
        stream = partial(
            model.stream,
            num_tokens=args.num_tokens,
            sampling=sampling_of(args, model.defaults),
            stops=args.stop,
            use_cache=not args.no_cache,
        )
        if template is not None and not conversations:
            talk(template, stream, system=args.system, control=context.control)
            return 0
        prompts = args.prompt or [""]
        shown = prompts
        if template is not None:
            prompts = [prompt_of(conversation, template) for conversation in conversations]
            shown = [""] * len(prompts)
        is_first = launch.rank == 0
        print_pieces(shown, stream(prompts), is_first=is_first, is_alone=launch.world_size == 1)
    return 0


def load_on_rank(
    checkpoint: "OpenedCheckpoint",
    config: Config,
    *,
    tokenizer: str | None,
    context: "ParallelContext",
) -> "LoadedModel":
    """Load this rank's part of a model: shards of all layers, or with pp or cp stages of a plan."""
    if shares_layers_or_tokens(config):
        from nanotrain.plan.plan import plan_run
        from nanotrain.train.generate import load_layout

        plan = plan_run(config, context.topology.world_size, rank=context.rank)
        return load_layout(checkpoint, tokenizer=tokenizer, plan=plan, context=context)
    from nanotrain.inference.checkpoint import load_model

    dtype = config.precision.params_dtype
    return load_model(checkpoint, tokenizer=tokenizer, context=context, dtype=dtype)


def print_pieces(
    prompts: Sequence[str], pieces: Iterator[tuple[int, str]], *, is_first: bool, is_alone: bool
) -> None:
    """Print the texts on the first rank.

    All ranks generate them, also after the reader of a pipe has closed it.
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
    loaded.require_only(
        SETTINGS,
        what="generation",
        why="the model's own configuration gives everything but the sizes of the layout",
    )
    parallel = loaded.config.parallel
    tp = parallel.tensor_model_parallel_size
    config = replace(loaded.config, model=trained.model.with_padding_for(tp))
    ranks = ranks_of_model(config)
    # without a part of a sequence on a rank, its length is one that the rules on training accept
    seq_length = tp
    if shares_layers_or_tokens(config):
        require_no_capacity(config)
        seq_length = shortest_sequence(Settings(config))
        dp = max(1, world_size // (tp * parallel.pipeline_model_parallel_size * cp_of(config)))
        train = TrainConfig(
            micro_batch_size=1, global_batch_size=dp, device=loaded.config.train.device
        )
        config = replace(config, train=train)
    config = replace(config, data=DataConfig(seq_length=seq_length, num_workers=0))
    check_layout(config)
    if world_size != ranks:
        raise TopologyError(
            f"generation on {count_of(world_size, 'rank')} with {describe_sizes(config)}",
            why=f"the shards of one model are on {count_of(ranks, 'rank')}, and there is one "
            "replica",
            fix=f"set --tensor-model-parallel-size {world_size}, or start {ranks}: "
            f"nanotrain generate --nproc-per-node {ranks} ...",
        )
    validate_for_world(config, world_size, expected_dp=loaded.data_parallel_size)
    return config


def cp_of(config: Config) -> int:
    """The ranks that share the tokens of a sequence."""
    return config.parallel.context_parallel_size


def shares_layers_or_tokens(config: Config) -> bool:
    """Whether a rank holds some layers, or some tokens of a sequence, only."""
    return config.parallel.pipeline_model_parallel_size > 1 or cp_of(config) > 1


def ranks_of_model(config: Config) -> int:
    """The ranks that hold one model."""
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    ranks = tp * cp_of(config)
    if config.model.moe is not None:
        etp = parallel.expert_tensor_parallel_size or tp
        ranks = lcm(ranks, parallel.expert_model_parallel_size * etp)
    return ranks * parallel.pipeline_model_parallel_size


def describe_sizes(config: Config) -> str:
    """The sizes of the layout in words: tp and ep, with pp and cp if either is above 1."""
    parallel = config.parallel
    text = f"tp={parallel.tensor_model_parallel_size} and ep={parallel.expert_model_parallel_size}"
    if shares_layers_or_tokens(config):
        text += f", pp={parallel.pipeline_model_parallel_size} and cp={cp_of(config)}"
    return text


def require_no_capacity(config: Config) -> None:
    """Check that no experts have a capacity, which padding of texts would share.

    Raises:
        ConfigError: they have.
    """
    moe = config.model.moe
    if moe is not None and moe.expert_capacity_factor is not None:
        raise ConfigError(
            "generation with pp or cp of a model with moe.expert_capacity_factor",
            why="the capacity depends on the number of tokens read together, and texts are padded "
            "to a length that the ranks can share",
            fix="set --tensor-model-parallel-size or --expert-model-parallel-size instead",
        )
