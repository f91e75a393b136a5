"""Commands that read run folders: `nanotrain report | watch | runs | compare | timeline`."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from nanotrain.cli.addresses import is_fetched, read_path, show, written_path
from nanotrain.cli.parser import CommandParser
from nanotrain.cli.values import count, png_file, port, whole_numbers
from nanotrain.errors import ConfigError
from nanotrain.paths import local_path

WATCH_IS_LOCAL = (
    "the page follows files as they grow, and objects arrive at saves; "
    "`nanotrain report` takes it, or name the folder below --staging-dir"
)
PROFILES_ARE_LOCAL = (
    "profiles stay on the machines of the ranks; name the run folder below --staging-dir there"
)


def report(argv: Sequence[str]) -> int:
    """Write an HTML report of runs: curves, settings, memory, checkpoints, samples."""
    parser = CommandParser("report", report)
    add_runs(parser)
    parser.add_argument(
        "--output",
        type=written_path,
        metavar="FILE",
        help="the HTML file (default: report.html in the first run folder)",
    )
    args = parser.parse_args(argv)
    from nanotrain.report.history import RunHistory
    from nanotrain.report.page import require_html, write_report

    page = args.output or args.runs[0] / "report.html"
    if is_fetched(page):
        raise ConfigError(
            "--output is not set",
            why="the first run is in object storage",
            fix="set --output FILE.html",
        )
    histories = [RunHistory.read(folder) for folder in args.runs]
    require_html(page)
    write_report(histories, page, fix="choose another file with --output")
    show(str(page))
    return 0


def add_runs(parser: CommandParser, *, convert: Callable[..., object] | None = None) -> None:
    """Add the argument for one or several run folders."""
    parser.add_argument(
        "runs",
        type=convert or read_path,
        nargs="+",
        metavar="RUN",
        help="run folder; several are compared",
    )


def watch(argv: Sequence[str]) -> int:
    """Serve the report of runs on this machine; the page follows them while they train."""
    parser = CommandParser("watch", watch)
    add_runs(parser, convert=partial(local_path, why=WATCH_IS_LOCAL))
    parser.add_argument(
        "--port",
        type=port,
        default=6007,
        metavar="P",
        help="port; 0 chooses one (default: 6007)",
    )
    args = parser.parse_args(argv)
    from nanotrain.report.serve import LOCALHOST, open_server

    with open_server(args.runs, args.port) as server:
        print(f"http://{LOCALHOST}:{server.server_address[1]}  (Ctrl-C ends)", flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def runs(argv: Sequence[str]) -> int:
    """List the runs in a folder: state, step, loss, tokens per second, last change, size."""
    parser = CommandParser("runs", runs)
    parser.add_argument(
        "folder",
        type=read_path,
        nargs="?",
        help="folder of run folders (default: runs; inside of it the current folder)",
    )
    args = parser.parse_args(argv)
    from nanotrain.report.history import find_runs
    from nanotrain.report.terminal import list_runs, terminal

    folder = args.folder or Path("runs")
    if args.folder is None and not folder.is_dir() and find_runs(Path.cwd()):
        folder = Path.cwd()
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}",
            why="it should hold run folders",
            fix="name another",
        )
    found = find_runs(folder)
    if not found:
        show(f"no runs in {folder}: none of its folders has a config.yaml")
        return 0
    list_runs(found, console=terminal())
    return 0


def compare(argv: Sequence[str]) -> int:
    """Compare runs in the terminal: results, the settings that differ, losses at common steps."""
    parser = CommandParser("compare", compare)
    add_runs(parser)
    args = parser.parse_args(argv)
    if len(args.runs) < 2:
        parser.error("name at least two run folders")
    from nanotrain.report.history import RunHistory
    from nanotrain.report.terminal import compare_runs, terminal

    compare_runs([RunHistory.read(folder) for folder in args.runs], console=terminal())
    return 0


def timeline(argv: Sequence[str]) -> int:
    """Draw a profiled step: compute, communication and copies of every rank, and what overlaps."""
    args = timeline_parser().parse_args(argv)
    from nanotrain.report.terminal import print_timeline, terminal
    from nanotrain.report.timeline import profile_folder, read_timeline, save, save_png

    picture = args.png or profile_folder(args.run) / "timeline.png"
    steps = read_timeline(args.run, step=args.step, ranks=args.ranks)
    print_timeline(steps, console=terminal())
    save_png(steps, picture)
    save(steps, args.run)
    show(str(picture))
    return 0


def timeline_parser() -> CommandParser:
    """The parser of `nanotrain timeline`."""
    parser = CommandParser("timeline", timeline)
    parser.add_argument(
        "run",
        type=partial(local_path, why=PROFILES_ARE_LOCAL),
        metavar="RUN",
        help="folder of a run that was trained with --profile",
    )
    parser.add_argument(
        "--step", type=count, metavar="N", help="a profiled step (default: the last one)"
    )
    parser.add_argument(
        "--ranks",
        type=whole_numbers,
        default=[],
        metavar="LIST",
        help="ranks to draw, as 0,1,8 (default: the first 8)",
    )
    parser.add_argument(
        "--png",
        type=png_file,
        metavar="FILE",
        help="the picture (default: profile/timeline.png in the run folder)",
    )
    return parser
