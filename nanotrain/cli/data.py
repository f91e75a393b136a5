"""`nanotrain data COMMAND ...`: which documents a run has read and will read.

step | find | ledger | mix
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from nanotrain.cli.addresses import read_path
from nanotrain.cli.parser import Command, CommandParser
from nanotrain.cli.values import count
from nanotrain.errors import DataError
from nanotrain.paths import local_path
from nanotrain.quantities import table_lines

REQUESTS_ARE_LOCAL = (
    "the job reads requests in its local folder; "
    "name the run folder below --staging-dir, on the machine of the first rank"
)


def step(argv: Sequence[str]) -> int:
    """List the documents of a step: corpus, document, epoch, bytes in the .bin, tokens, hash of the
    document.
    """
    parser = CommandParser("data step", step)
    add_run(parser)
    parser.add_argument(
        "step", type=count, metavar="N", help="a step of the run, trained or to come"
    )
    add_json(parser)
    args = parser.parse_args(argv)
    from nanotrain.data.order import DataOrder, document_hash

    rows = []
    order = DataOrder.read(args.run, opens_addresses=args.open_addresses)
    for use in order.documents(args.step):
        hashed = document_hash(use.corpus, use.document)
        rows.append({**asdict(use), "corpus": str(use.corpus.prefix), "hash": hashed})
    print_rows(rows, as_json=args.json)
    return 0


def add_run(parser: CommandParser) -> None:
    """Add the arguments for a run folder, and for the corpora in object storage that it names."""
    parser.add_argument("run", type=read_path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--open-addresses",
        action="store_true",
        help="open the corpora in object storage that the run folder names",
    )


def add_json(parser: CommandParser) -> None:
    """Add the argument for the form of the output."""
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def find(argv: Sequence[str]) -> int:
    """List the steps that read a document, or the documents with a text."""
    args = find_parser().parse_args(argv)
    from nanotrain.data.find import documents_with
    from nanotrain.data.order import DataOrder
    from nanotrain.runs.metrics_file import last_step

    order = DataOrder.read(args.run, opens_addresses=args.open_addresses)
    done = last_step(args.run / "metrics.jsonl")
    if args.document:
        documents = [order.document(args.document)]
    else:
        documents = documents_with(args.text, order, run=args.run)
    if not documents:
        raise DataError(
            "no document has the text",
            why="all training documents were searched",
            fix="give less of it",
        )
    rows = []
    for corpus, document in documents:
        for step, sample in order.samples_of(corpus, document, last_step=order.train_iters):
            row = {
                "corpus": str(corpus),
                "document": document,
                "step": step,
                "sample": sample,
                "state": "trained" if step <= done else "planned",
            }
            rows.append(row)
    print_rows(rows, as_json=args.json)
    return 0


def find_parser() -> CommandParser:
    """The parser of `nanotrain data find`."""
    parser = CommandParser("data find", find)
    document = parser.add_mutually_exclusive_group(required=True)
    document.add_argument(
        "--text", metavar="TEXT", help="text of a document, at least a few words of it"
    )
    document.add_argument(
        "--document", metavar="PREFIX:INDEX", help="a document by corpus and index"
    )
    add_run(parser)
    add_json(parser)
    return parser


def tokens_read(argv: Sequence[str]) -> int:
    """Print the tokens that a run has read of each corpus."""
    parser = CommandParser("data ledger", tokens_read)
    add_run(parser)
    parser.add_argument(
        "--step", type=count, metavar="N", help="the last step that counts (default: the newest)"
    )
    add_json(parser)
    args = parser.parse_args(argv)
    from nanotrain.data.order import DataOrder
    from nanotrain.runs.metrics_file import last_step

    until = args.step or last_step(args.run / "metrics.jsonl")
    order = DataOrder.read(args.run, opens_addresses=args.open_addresses)
    tokens_by_corpus = order.tokens_by_corpus(until)
    total = max(1, sum(tokens for tokens, _ in tokens_by_corpus.values()))
    rows = []
    for corpus, (tokens, epochs) in tokens_by_corpus.items():
        row = {
            "corpus": corpus,
            "tokens": tokens,
            "share": round(tokens / total, 4),
            "epochs": round(epochs, 4),
        }
        rows.append(row)
    print_rows(rows, as_json=args.json)
    return 0


def mix(argv: Sequence[str]) -> int:
    """Ask the running job of a run folder to change the weights of its corpora from a step on."""
    args = mix_parser().parse_args(argv)
    from nanotrain.data.mix import request_mix, require_mixable
    from nanotrain.data.order import DataOrder
    from nanotrain.runs.metrics_file import last_step

    order = DataOrder.read(args.run)
    require_mixable(
        order.starts[-1].config.data,
        args.weights,
        step=args.step,
        done=last_step(args.run / "metrics.jsonl"),
        train_iters=order.train_iters,
    )
    request_mix(args.run, args.weights, step=args.step)
    print(f"{args.run}: the job takes the request at its next logged step")
    return 0


def mix_parser() -> CommandParser:
    """The parser of `nanotrain data mix`."""
    parser = CommandParser("data mix", mix)
    parser.add_argument(
        "run",
        type=partial(local_path, why=REQUESTS_ARE_LOCAL),
        metavar="RUN",
        help="run folder",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        required=True,
        metavar="WORD",
        help="weights and corpora of the run, as 0.5 web 0.5 math",
    )
    parser.add_argument(
        "--step",
        type=count,
        metavar="N",
        help="the first step with these weights (default: the next one)",
    )
    return parser


def print_rows(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """One JSON object per line, or columns."""
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    table = [["none"]]
    if rows:
        table = [list(rows[0])]
        for row in rows:
            table.append([cell_text(value) for value in row.values()])
    print("\n".join(table_lines(table)))


def cell_text(value: Any) -> str:
    """A value as a cell of a table."""
    return f"{value:,}" if isinstance(value, int) else str(value)


DATA_COMMANDS: dict[str, Command] = {"step": step, "find": find, "ledger": tokens_read, "mix": mix}
