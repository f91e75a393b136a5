"""`nanotrain data COMMAND ...`: which documents a run has read and will read.

step | find | ledger | mix
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from nanotrain.cli.parser import Command, CommandParser
from nanotrain.errors import DataError
from nanotrain.quantities import table_lines


def step(argv: Sequence[str]) -> int:
    """List the documents of a step: corpus, document, epoch, bytes in the .bin, tokens, hash of the
    document.
    """
    args = CommandParser("data step", step).parse_args(argv)
    from nanotrain.data.order import DataOrder, document_hash

    rows = []
    for use in DataOrder.read(args.run).documents(args.step):
        hashed = document_hash(use.corpus, use.document)
        rows.append({**asdict(use), "corpus": str(use.corpus.prefix), "hash": hashed})
    _print_rows(rows, as_json=args.json)
    return 0


def find(argv: Sequence[str]) -> int:
    """List the steps that read a document, or the documents with a text."""
    args = CommandParser("data find", find).parse_args(argv)
    from nanotrain.data.find import documents_with
    from nanotrain.data.order import DataOrder
    from nanotrain.runs.metrics_file import last_step

    order, done = DataOrder.read(args.run), last_step(args.run / "metrics.jsonl")
    documents = (
        [order.document(args.document)]
        if args.document
        else documents_with(args.text, order, run=args.run)
    )
    rows = []
    for corpus, document in documents:
        for number, sample in order.samples_of(corpus, document, last_step=order.train_iters):
            state = "trained" if number <= done else "planned"
            row = {
                "corpus": str(corpus),
                "document": document,
                "step": number,
                "sample": sample,
                "state": state,
            }
            rows.append(row)
    if not documents:
        raise DataError(
            "no document has the text",
            why="all training documents were searched",
            fix="give less of it",
        )
    _print_rows(rows, as_json=args.json)
    return 0


def tokens_read(argv: Sequence[str]) -> int:
    """Print the tokens that a run has read of each corpus."""
    args = CommandParser("data ledger", tokens_read).parse_args(argv)
    from nanotrain.data.order import DataOrder
    from nanotrain.runs.metrics_file import last_step

    until = args.step or last_step(args.run / "metrics.jsonl")
    read = DataOrder.read(args.run).tokens_by_corpus(until)
    total = max(1, sum(tokens for tokens, _ in read.values()))
    rows = [
        {
            "corpus": corpus,
            "tokens": tokens,
            "share": round(tokens / total, 4),
            "epochs": round(epochs, 4),
        }
        for corpus, (tokens, epochs) in read.items()
    ]
    _print_rows(rows, as_json=args.json)
    return 0


def mix(argv: Sequence[str]) -> int:
    """Ask the running job of a run folder to change the weights of its corpora from a step on."""
    args = CommandParser("data mix", mix).parse_args(argv)
    from nanotrain.data.mix import request_mix
    from nanotrain.data.order import DataOrder

    DataOrder.read(args.run)  # it is a run's
    request_mix(args.run, args.weights, step=args.step)
    print(f"{args.run}: the job takes the request at its next logged step")
    return 0


def _print_rows(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """One JSON object per line, or columns."""
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    lines = (
        [list(rows[0]), *(list(map(_shown, row.values())) for row in rows)] if rows else [["none"]]
    )
    print("\n".join(table_lines(lines)))


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


DATA_COMMANDS: dict[str, Command] = {"step": step, "find": find, "ledger": tokens_read, "mix": mix}
