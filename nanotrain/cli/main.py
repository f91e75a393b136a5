"""`nanotrain COMMAND ...`: one function per command, which parses its arguments and calls another
package.

    train | prepare | parity | topology | report | watch | runs | compare | timeline | config
    completion | sweep, plan, dry-run, checkpoint COMMAND and data COMMAND (files of these names)
    evaluate, generate (trained.py)

Packages are imported inside the commands, so that `--help` does not load torch.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nanotrain.cli.checkpoint import CHECKPOINT_COMMANDS
from nanotrain.cli.data import DATA_COMMANDS
from nanotrain.cli.dry_run import dry_run
from nanotrain.cli.launch import check_names, launch, split_arguments
from nanotrain.cli.parser import Command, CommandParser, run_command
from nanotrain.cli.places import is_fetched, transfers, written_path
from nanotrain.cli.plan import plan
from nanotrain.cli.sweep import sweep
from nanotrain.cli.trained import evaluate, generate
from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS
from nanotrain.config.flags import parse
from nanotrain.config.help import CONFIG_USAGE
from nanotrain.config.load import load_line, reply, to_yaml
from nanotrain.config.rules.check import check_data_parallel_size
from nanotrain.config.schema import check_choice
from nanotrain.errors import EXIT_CODE, INTERRUPTED, ConfigError, NanotrainError
from nanotrain.errors import report as print_error
from nanotrain.storage.remote import is_address
from nanotrain.system import require_folders, run_program, usable_cores

ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit"


def train(argv: Sequence[str]) -> int:
    """Train on one rank, or on N of this machine: --nproc-per-node N and torchrun's other options."""
    options, arguments = split_arguments(argv)
    if options:
        return launch(options, arguments, environment=os.environ)
    from nanotrain.train.main import main as train_main

    return train_main(arguments)


def prepare(argv: Sequence[str]) -> int:
    """Tokenize text into token files (.bin/.idx) for --data-path."""
    from nanotrain.data.token_format import prefix_of
    from nanotrain.prepare.corpus import prepare_corpus
    from nanotrain.prepare.options import PrepareOptions

    args = prepare_parser().parse_args(argv)
    if is_address(args.output):
        if args.part is not None or args.executor != "local":
            why = "machines put their parts together in a folder that all of them see"
            raise ConfigError(
                f"--output {args.output} on several machines",
                why=why,
                fix="write to a shared folder",
            )
        args.output = str(written_path(prefix_of(args.output), suffix=".idx"))
    prepare_corpus(PrepareOptions.from_args(args))
    return 0


def prepare_parser() -> CommandParser:
    """The parser of `nanotrain prepare`."""
    from nanotrain.prepare.inputs import Limits
    from nanotrain.prepare.options import Verify

    parser = CommandParser("prepare", prepare)
    verify_help = "only compare every token of PREFIX.bin with its checksums"
    parser.add_argument("--verify", action=Verify, metavar="PREFIX", help=verify_help)
    limits = {"max_document_bytes": Limits.document_bytes, "max_inflation": Limits.inflation}
    parser.set_defaults(workers=usable_cores(), **limits)
    return parser


def parity(argv: Sequence[str]) -> int:
    """Compare the training of a parallel layout with one rank: a shrunk model, on CPU processes of
    this machine.
    """
    args, rest = CommandParser("parity", parity).parse_known_args(argv)
    loaded = load_line(parse(rest))
    from nanotrain.parity.check import check_parity

    result = check_parity(loaded, args.world_size, num_steps=args.steps, tolerance=args.tolerance)
    print(result.to_json() if args.json else result.text())
    return 0 if result.holds else EXIT_CODE


def topology(argv: Sequence[str]) -> int:
    """Print the process groups of a number of ranks, or draw a pipeline schedule."""
    parser = CommandParser("topology", topology)
    args, rest = parser.parse_known_args(argv)
    if args.world_size is None and args.schedule is None:
        parser.error("give --world-size N, --schedule NAME or both")
    if args.json and (args.schedule is not None or args.world_size is None):
        parser.error("--json prints groups: it needs --world-size and excludes --schedule")
    if args.schedule is None and (args.num_microbatches is not None or args.png is not None):
        parser.error("--num-microbatches and --png belong to --schedule")
    if args.schedule is not None:
        from nanotrain.parallel.pp.schedules import SCHEDULES

        check_choice("pipeline_schedule", args.schedule, known=SCHEDULES)
    loaded = load_line(parse(rest), to_train=False)
    if args.schedule is not None and "parallel.pipeline_schedule" in loaded.explicit:
        parser.error("--schedule and --pipeline-schedule are both given")
    parallel = loaded.config.parallel
    if args.world_size is not None:
        from nanotrain.topology.picture import run_topology

        wide = (
            parallel.expert_model_parallel_size > 1
            or parallel.expert_tensor_parallel_size is not None
        )
        has_experts = wide or loaded.config.model.moe is not None
        text = run_topology(parallel, args.world_size, as_json=args.json, has_experts=has_experts)
        dp = parallel.data_parallel_size(args.world_size)
        check_data_parallel_size(dp, loaded.data_parallel_size, world_size=args.world_size)
        print(text)
    if args.schedule is not None:
        from nanotrain.parallel.pp.actions import PipelineShape
        from nanotrain.parallel.pp.draw import draw_schedule

        shape = PipelineShape.of(
            parallel, args.num_microbatches or 2 * parallel.pipeline_model_parallel_size
        )
        print(draw_schedule(args.schedule, shape, png=args.png))
    return 0


def checkpoint(argv: Sequence[str]) -> int:
    """Inspect, verify, compare, average, prune, import or export checkpoints."""
    return run_command("nanotrain checkpoint", argv, commands=CHECKPOINT_COMMANDS)


def data(argv: Sequence[str]) -> int:
    """List the documents of a step, the steps of a document, or the tokens read of each corpus."""
    return run_command("nanotrain data", argv, commands=DATA_COMMANDS)


def report(argv: Sequence[str]) -> int:
    """Write an HTML report of one or several runs: curves, settings, memory, checkpoints, samples."""
    args = CommandParser("report", report).parse_args(argv)
    from nanotrain.report.history import RunHistory
    from nanotrain.report.page import require_html, write_report

    page = args.output or args.runs[0] / "report.html"
    if is_fetched(page):
        raise ConfigError(
            "--output is not set",
            why="the first run is in object storage",
            fix="set --output FILE.html",
        )
    read = [RunHistory.read(folder) for folder in args.runs]
    require_html(page)
    write_report(read, page, fix="choose another file with --output")
    print(page)
    return 0


def watch(argv: Sequence[str]) -> int:
    """Serve the report of runs on this machine; the page follows them while they train."""
    args = CommandParser("watch", watch).parse_args(argv)
    from nanotrain.report.serve import LOCALHOST, open_server

    with open_server(args.runs, args.port) as server:
        print(f"http://{LOCALHOST}:{server.server_address[1]}  (Ctrl-C ends)", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def runs(argv: Sequence[str]) -> int:
    """List the runs in a folder: state, step, loss, tokens per second, last change, size."""
    args = CommandParser("runs", runs).parse_args(argv)
    if not args.folder.is_dir():
        raise ConfigError(
            f"there is no folder {args.folder}",
            why="it should hold run folders",
            fix="name another",
        )
    from nanotrain.report.history import find_runs
    from nanotrain.report.terminal import list_runs, terminal

    list_runs(find_runs(args.folder), console=terminal())
    return 0


def compare(argv: Sequence[str]) -> int:
    """Compare runs in the terminal: results, the settings that differ, losses at common steps."""
    parser = CommandParser("compare", compare)
    args = parser.parse_args(argv)
    if len(args.runs) < 2:
        parser.error("name at least two run folders")
    from nanotrain.report.history import RunHistory
    from nanotrain.report.terminal import compare_runs, terminal

    compare_runs([RunHistory.read(folder) for folder in args.runs], console=terminal())
    return 0


def timeline(argv: Sequence[str]) -> int:
    """Draw a profiled step: compute, communication and copies of every rank, and what overlaps."""
    args = CommandParser("timeline", timeline).parse_args(argv)
    from nanotrain.report.terminal import print_timeline, terminal
    from nanotrain.report.timeline import read_timeline, save, save_png

    picture = args.png or args.run / "profile" / "timeline.png"
    read = read_timeline(args.run, step=args.step, ranks=args.ranks)
    print_timeline(read, console=terminal())
    save_png(read, picture)
    save(read, args.run)
    print(picture)
    return 0


def config(argv: Sequence[str]) -> int:
    """Print the resolved configuration; with --explain, the origin of each value."""
    line = parse(argv)
    text = reply(line, usage=CONFIG_USAGE)
    if text is None:
        loaded = load_line(line, to_train=False)
        check_names(loaded.config)
        text = to_yaml(loaded.config).rstrip()
        unread = "model: replaced at the start of a run by the model of the checkpoint that it begins from"
        for note in [*loaded.notes, *([] if loaded.config.is_model_known else [unread])]:
            print(f"note: {note}", file=sys.stderr)
    print(text)
    return 0


def completion(argv: Sequence[str]) -> int:
    """Print the completion script of bash or zsh: source <(nanotrain completion bash)."""
    shell = CommandParser("completion", completion).parse_args(argv).shell
    from nanotrain.config.compose import config_dir, names_in  # Hydra takes 0.2 s

    names = {
        "recipes": names_in("config", [config_dir()]),
        "commands": COMMANDS,
        "checkpoint": CHECKPOINT_COMMANDS,
        "data": DATA_COMMANDS,
        "flags": sorted({*FLAGS, *NEGATIONS, *ALIASES, "--nproc-per-node"}),
    }
    script = Path(__file__).with_name("completion.bash").read_text()
    for name, words in names.items():
        script = script.replace(f"@{name}@", " ".join(words))
    print(f"{ZSH}\n{script}" if shell == "zsh" else script)
    return 0


_ALL = (
    *(train, prepare, sweep, plan, dry_run, parity, topology, checkpoint, data, evaluate, generate),
    *(report, watch, runs, compare, timeline, config, completion),
)
COMMANDS: dict[str, Command] = {command.__name__.replace("_", "-"): command for command in _ALL}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 2 for a user error, which is printed on standard error."""
    if argv is None:  # this process is the command's
        run_program(lambda: main(sys.argv[1:]))
    try:
        if list(argv) == ["--version"]:
            from importlib.metadata import version

            print(f"nanotrain {version('nanotrain')}", flush=True)
            return 0
        require_folders()
        with transfers():
            return run_command("nanotrain", argv, commands=COMMANDS)
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except NanotrainError as error:
        return print_error(error, quiet=os.environ.get("RANK", "0") != "0")
