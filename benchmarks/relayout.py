"""A relayout in place beside a stop and a start in the other layout, on processes of this machine.

    python benchmarks/relayout.py --ranks 2 --hidden-size 256

Three runs of one model over gloo, each under `nanotrain train --nproc-per-node N`: one changes its
layout while it goes on, one stops with a checkpoint, and one starts from it in the other layout. The
restart is the time from its command to its first step; the relayout is what the job records.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nanotrain.quantities import describe_bytes, table_lines
from nanotrain.runs.relayout import DONE, request_layout
from nanotrain.untrusted import read_rows

BEFORE, BORDER = "--tensor-model-parallel-size 1", 10
POLL_S = 0.05


def start(folder: Path, flags: str, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a run."""
    line = f"""+config=tiny --mock-data --eval-interval 0 --generate-tokens 0 --no-report
        --num-layers 4 --hidden-size {args.hidden_size} --num-workers 0 --log-interval {BORDER}
        --save-interval 1000 --run-dir {folder} --train-iters {2 * BORDER}"""
    command = [sys.executable, "-m", "nanotrain", "train", "--nproc-per-node", str(args.ranks)]
    output = (folder.parent / "log").open("ab")
    return subprocess.Popen([*command, *line.split(), *flags.split()], stdout=output, stderr=output)


def wait_for(process: subprocess.Popen[bytes], file: Path, num_rows: int) -> None:
    """Wait until a file has so many rows; ends the benchmark where the run ends before."""
    while len(list(read_rows(file))) < num_rows:
        if process.poll() is not None and len(list(read_rows(file))) < num_rows:
            sys.exit(f"the run ended with code {process.returncode}")
        time.sleep(POLL_S)


def relayout_row(folder: Path, after: str, args: argparse.Namespace) -> dict[str, float]:
    """What a run records that changes its layout."""
    folder.mkdir()
    request_layout(folder, after.split(), ranks=None)
    process = start(folder, BEFORE, args)
    wait_for(process, folder / DONE, 1)
    process.wait()
    (row,) = read_rows(folder / DONE)
    return row


def restart_s(folder: Path, after: str, args: argparse.Namespace) -> float:
    """Seconds from the command of a start in the other layout to its first step, saved before."""
    stopped = start(folder, f"{BEFORE} --exit-interval {BORDER}", args)
    stopped.wait()
    begun = time.monotonic()
    process = start(folder, after, args)
    wait_for(process, folder / "metrics.jsonl", BORDER + 1)
    seconds = time.monotonic() - begun
    process.wait()
    return seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of the run")
    parser.add_argument("--hidden-size", type=int, default=256, metavar="N", help="of the model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    after = f"--tensor-model-parallel-size {args.ranks}"
    with tempfile.TemporaryDirectory() as folder:
        row = relayout_row(Path(folder) / "relayout", after, args)
        restart = restart_s(Path(folder) / "restart", after, args)
    numbers = {
        "sent": describe_bytes(int(row["sent_bytes"])),
        "relayout, s": row["total_seconds"],
        "of them plan and sending, s": round(row["seconds"], 3),
        "restart to its first step, s": round(restart, 3),
        "share of a restart": f"{row['total_seconds'] / restart:.1%}",
    }
    if args.json:
        print(json.dumps(numbers))
        return
    print("\n".join(table_lines([[name, str(value)] for name, value in numbers.items()])))


if __name__ == "__main__":
    main()
