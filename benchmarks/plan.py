"""Errors of `nanotrain plan` on published measurements, by source, beside a constant MFU.

    python benchmarks/plan.py                     # a sample: benchmarks/data/published_runs.tsv
    python benchmarks/plan.py FILE.tsv            # another table in the format of `nanotrain plan --rows`

error   of tokens per second: median and 90th percentile; of `constant MFU` every run of a source has the source's
        median MFU, which needs the measurements that the planner does not see
fits    of the runs, all of which ran, those that are said to fit
regret  over the sets of layouts of one model, batch and number of GPUs: what the best predicted layout of those that
        are said to fit loses against the best measured one, on average
"""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from nanotrain.errors import NanotrainError, report
from nanotrain.planner.rows.table import RowPrediction, predict_row, read_table

SAMPLE = Path(__file__).parent / "data" / "published_runs.tsv"
# of one set of layouts
CELL = ("hardware", "gpus", "layers", "hidden", "ffn", "seq", "gbs", "precision")
MIN_CELL = 5  # layouts
ROW = "{:<34}{:>6}{:>11}{:>9}{:>7}{:>15}{:>7}"


@dataclass(frozen=True)
class Run:
    """A measured run and its prediction."""

    cells: dict[str, str]
    predicted: RowPrediction

    @property
    def source(self) -> str:
        """The repository or the paper."""
        return re.split(r"[@ ]", self.cells.get("source", ""))[0] or "not stated"

    @property
    def measured(self) -> float | None:
        """Tokens per second and GPU; FLOP/s are read by the formula of Narayanan et al. (2021),
        with recomputation.
        """
        cells = self.cells
        if not cells.get("value"):
            return None
        value, metric = float(cells["value"]), cells.get("metric")
        if metric == "tokens_per_s_per_gpu":
            return value
        if metric == "step_time_s":
            return int(cells["gbs"]) * int(cells["seq"]) / int(cells["gpus"]) / value
        if metric != "tflops_per_gpu" or cells.get("experts"):
            return None
        layers, hidden, seq = (int(cells[name]) for name in ("layers", "hidden", "seq"))
        per_token = (96 if cells.get("recompute") == "full" else 72) * layers * hidden**2
        head = int(cells.get("vocab") or 50304) / 16 / layers / hidden
        return value * 1e12 / per_token / (1 + seq / 6 / hidden + head)

    @property
    def error(self) -> float | None:
        """Relative error of the predicted tokens per second."""
        if not self.predicted.tokens_per_s_per_gpu or self.measured is None:
            return None
        return float(self.predicted.tokens_per_s_per_gpu) / self.measured - 1

    @property
    def mfu(self) -> float:
        """Measured MFU."""
        assert self.error is not None
        return float(self.predicted.mfu) / (1 + self.error)


def table_of(runs: Sequence[Run]) -> list[str]:
    """The table by source, the largest first, and the regret."""
    by_source = defaultdict(list)
    for run in runs:
        by_source[run.source].append(run)
    lines = [ROW.format("source", "runs", "predicted", "median", "p90", "constant MFU", "fits")]
    for source, source_runs in sorted(by_source.items(), key=lambda item: -len(item[1])):
        lines.append(line_of(source, source_runs))
    if len(by_source) > 1:
        lines.append(line_of("all", runs))
    ours, least = regrets(runs)
    if ours:
        lines += [
            "",
            f"regret of the layout over {len(ours)} sets: {mean(ours):.1%}, at worst {max(ours):.1%}",
        ]
        lines.append(f"regret of the least tp x pp: {mean(least):.1%}, at worst {max(least):.1%}")
    return lines


def line_of(name: str, runs: Sequence[Run]) -> str:
    """One line of the table."""
    predicted = [run for run in runs if run.predicted.memory_gib]
    known = [run for run in predicted if run.error is not None]
    fits = sum(run.predicted.fits == "yes" for run in predicted) / max(1, len(predicted))
    if not known:
        return ROW.format(
            name[:33], len(runs), f"{len(predicted) / len(runs):.0%}", "", "", "", f"{fits:.0%}"
        )
    errors = sorted(abs(run.error or 0.0) for run in known)
    constant = median(run.mfu for run in known)
    others = median(abs(constant / run.mfu - 1) for run in known)
    at = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    shares = (len(predicted) / len(runs), median(errors), at, others, fits)
    return ROW.format(
        name[:33],
        len(runs),
        *(f"{share:.0%}" if i in (0, 4) else f"{share:.1%}" for i, share in enumerate(shares)),
    )


def regrets(runs: Iterable[Run]) -> tuple[list[float], list[float]]:
    """Share of the best measured throughput that is lost per set, by the planner and by the least
    tp x pp.
    """
    cells = defaultdict(list)
    for run in runs:
        if run.error is not None:
            cells[tuple(run.cells.get(name, "") for name in CELL)].append(run)
    ours, least = [], []
    for layouts in cells.values():
        if (
            len(
                {
                    (run.cells.get("tp"), run.cells.get("pp"), run.cells.get("mbs"))
                    for run in layouts
                }
            )
            < MIN_CELL
        ):
            continue
        best = max(run.measured or 0.0 for run in layouts)
        fitting = [run for run in layouts if run.predicted.fits == "yes"] or layouts
        chosen = max(fitting, key=lambda run: float(run.predicted.tokens_per_s_per_gpu))
        small = min(
            layouts, key=lambda run: int(run.cells.get("tp") or 1) * int(run.cells.get("pp") or 1)
        )
        ours.append(1 - (chosen.measured or 0.0) / best)
        least.append(1 - (small.measured or 0.0) / best)
    return ours, least


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit code is 2 for a table that cannot be read."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "table", nargs="?", type=Path, default=SAMPLE, help="measurements (default: a sample)"
    )
    parser.add_argument(
        "--engine", metavar="NAME", help="engine of all rows (default: inferred from each)"
    )
    args = parser.parse_args(argv)
    try:
        runs = [
            Run(cells, predict_row(cells, engine=args.engine)) for cells in read_table(args.table)
        ]
    except NanotrainError as error:
        return report(error)
    print("\n".join(table_of(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
