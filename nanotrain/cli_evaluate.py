"""`nanotrain evaluate`: arguments, the layout of the ranks it runs on, and the printed result."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nanotrain.cli_parser import CommandParser, count
from nanotrain.config.config import Config, DataConfig, TrainConfig
from nanotrain.config.derive import data_parallel_size
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.config.schema import KEYS
from nanotrain.config.validate import check_layout, validate_for_world
from nanotrain.errors import ConfigError

# Settings that may differ from those of the training run; all others are the model's.
KEPT = ("data.seq_length", "train.micro_batch_size", "train.device", "precision.params_dtype")
MICROBATCHES_PER_STAGE = 2  # of a global batch and data-parallel rank, so that a pipeline is filled


def evaluate(argv: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Compute loss, perplexity and bits per byte of a checkpoint or Hugging Face folder on a corpus."""
    epilog = "the flags of the layout, --seq-length, --micro-batch-size, --bf16 and --device may follow"
    parser = CommandParser("evaluate", evaluate, epilog=epilog)
    parser.add_argument("path", type=Path, help="run folder, step folder, or Hugging Face folder")
    data_help = "prefix of token files (.bin/.idx), or text: a .txt or .jsonl file or a folder of them"
    parser.add_argument("--data", required=True, metavar="NAME", help=data_help)
    parser.add_argument("--tokenizer", help="Hugging Face name or folder, tokenizer.json; unset: the model's")
    samples_help = "windows of seq_length tokens to read; unset: all"
    parser.add_argument("--max-samples", type=count, metavar="N", help=samples_help)
    parser.add_argument("--ema", action="store_true", help="use the moving average of the weights (--ema-decay)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args, rest = parser.parse_known_args(argv)
    loaded = load_line(parse(rest), to_train=False)
    from nanotrain.comm.parallel_context import Launch, ParallelContext
    from nanotrain.data.tokenizer import load_tokenizer
    from nanotrain.inference.checkpoint import open_model, tokenizer_name
    from nanotrain.train.evaluate import evaluate_model
    from nanotrain.train.plans.plan import plan_run

    launch, model = Launch.of(environment), open_model(args.path, ema=args.ema)
    config = evaluation_config(model.config, loaded, world_size=launch.world_size)
    check_layout(config)
    validate_for_world(config, launch.world_size, expected_dp=loaded.data_parallel_size)
    name = args.tokenizer or tokenizer_name(model)
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
    if loaded.recipe is not None:
        fix = "leave it out and give the flags of the layout"
        raise ConfigError(f"+config={loaded.recipe} has no effect on an evaluation", why=why, fix=fix)
    others = sorted(key for key in loaded.explicit if not key.startswith("parallel.") and key not in KEPT)
    if others:
        flags = ", ".join(KEYS[key].flag for key in others)
        raise ConfigError(f"{flags} has no effect on an evaluation", why=why, fix="leave it out")
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
    return replace(given, model=trained.model, data=data, train=train)
