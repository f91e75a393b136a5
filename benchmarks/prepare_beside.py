"""Tokens files from JSON lines: `nanotrain prepare` beside datatrove's and Megatron-LM's
tokenizers, on the same cores.

    python benchmarks/prepare_beside.py python benchmarks/prepare_beside.py --megatron ~/Megatron-LM
    --rounds 3 --write benchmarks/results/prepare.md

The text is the source files of Python's standard library, the tokenizer a BPE of 8192 trained on
it. Every program runs with as many processes as cores, which it is bound to: one, then two.
Start-up is the time for a hundredth of the text; it is left out of the rates, which are those of
the best round. datatrove needs `pip install datatrove[processing]` and orjson; it reads as many
files as processes, as it divides none. Megatron-LM's `tools/preprocess_data.py` is no part of its
package: name a checkout.

All write `.bin/.idx` of the same tokens, which is checked; nanotrain hashes its input and writes
checksums besides, and joins its parts to one pair.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanotrain.data.indexed import IndexedTokens

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer
if __name__ == "__main__":
    text, output, tokenizer, workers = sys.argv[1:]
    steps = [JsonlReader(text), MegatronDocumentTokenizer(output, tokenizer_name_or_path=tokenizer)]
    executor = LocalPipelineExecutor(steps, tasks=int(workers), workers=int(workers), logging_dir=output + "/logs")
    executor.run()
"""
MEGATRON = """
import runpy, sys, typing
if not hasattr(typing, "override"):  # Python 3.11
    typing.override = lambda function: function
sys.path.insert(0, sys.argv.pop(1))
sys.argv[0] = sys.path[0] + "/tools/preprocess_data.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# runs a command, waits for all of its processes, adopted ones too, and prints the seconds and their
# CPU time
TIMED = """
import ctypes, os, resource, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
os.sched_setaffinity(0, eval(sys.argv[1]))
start = time.perf_counter()
done = subprocess.run(sys.argv[2:], capture_output=True, text=True)
if done.returncode:
    sys.exit(done.stderr[-2000:])
seconds = time.perf_counter() - start
try:
    while True:
        os.wait()
except ChildProcessError:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(seconds, used.ru_utime + used.ru_stime)
"""


@dataclass(frozen=True)
class Text:
    """A text on disk, once as one file and once divided for two processes."""

    folder: Path
    num_bytes: int

    def split(self, count: int) -> Path:
        """The folder with the text in `count` files."""
        return self.folder / str(count)


def write_text(folder: Path, documents: list[str]) -> Text:
    """Write documents as JSON lines, in one file and in two."""
    for count in (1, 2):
        (folder / str(count)).mkdir(parents=True)
        for part in range(count):
            lines = (json.dumps({"text": text}) + "\n" for text in documents[part::count])
            (folder / str(count) / f"{part}.jsonl").write_text("".join(lines))
    return Text(folder, sum(len(text.encode()) for text in documents))


def commands(tokenizer: Path, megatron: Path | None, scratch: Path) -> dict[str, list[str]]:
    """The command of every program, with TEXT, OUTPUT and WORKERS to replace."""
    words = "-m nanotrain prepare --input TEXT1/0.jsonl --output OUTPUT/all --workers WORKERS --tokenizer"
    found = {"nanotrain": [*words.split(), str(tokenizer)]}
    if importlib.util.find_spec("datatrove") is not None:
        (scratch / "run_datatrove.py").write_text(DATATROVE)
        found["datatrove"] = [
            str(scratch / "run_datatrove.py"),
            "TEXTN",
            "OUTPUT",
            str(tokenizer / "tokenizer.json"),
            "WORKERS",
        ]
    if megatron is not None:
        (scratch / "run_megatron.py").write_text(MEGATRON)
        flags = "--input TEXT1/0.jsonl --output-prefix OUTPUT/all --append-eod --workers WORKERS"
        kind = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
        found["Megatron-LM"] = [
            str(scratch / "run_megatron.py"),
            str(megatron),
            *flags.split(),
            *kind.split(),
            str(tokenizer),
        ]
    return found


def run(command: list[str], text: Text, *, workers: int, output: Path) -> np.ndarray:
    """[2] seconds, and those of CPU time, of a command that is bound to as many cores as it has
    processes.
    """
    output.mkdir(parents=True)
    values = {
        "TEXT1": text.split(1),
        "TEXTN": text.split(workers),
        "OUTPUT": output,
        "WORKERS": workers,
    }
    words = [sys.executable]
    for word in command:
        for name, value in values.items():
            word = word.replace(name, str(value))
        words.append(word)
    cores = str(sorted(os.sched_getaffinity(0))[:workers])
    timed = subprocess.run(
        [sys.executable, "-c", TIMED, cores, *words], capture_output=True, text=True
    )
    if timed.returncode:
        raise SystemExit(f"{words[1]} failed: {timed.stderr}")
    return np.array(timed.stdout.split(), dtype=float)


def num_tokens(output: Path) -> int:
    """Tokens of all pairs in a folder."""
    return sum(IndexedTokens(file.with_suffix("")).num_tokens for file in output.glob("*.idx"))


def compare(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The rows of the table."""
    files = sorted(Path(os.__file__).parent.rglob("*.py"), key=lambda file: file.name)
    documents, size = [], 0
    for file in files:
        documents.append(file.read_text(errors="replace"))
        size += len(documents[-1].encode())
        if size > arguments.megabytes * 1e6:
            break
    text, little = (
        write_text(folder / "text", documents),
        write_text(folder / "little", documents[::100]),
    )
    make = [
        "-m",
        "nanotrain",
        "prepare",
        "--input",
        "TEXT1/0.jsonl",
        "--output",
        "OUTPUT/bpe",
        "--tokenizer",
        "bpe:8192",
    ]
    run(make, text, workers=2, output=folder / "bpe")
    contenders = commands(folder / "bpe" / "bpe.tokenizer", arguments.megatron, folder)
    rows, tokens = [], {}
    for workers in (1, 2):
        times: dict[str, list[np.ndarray]] = {name: [] for name in contenders}
        startup: dict[str, list[np.ndarray]] = {name: [] for name in contenders}
        for number in range(arguments.rounds):
            for name, command in contenders.items():
                output = folder / f"{name}-{workers}-{number}"
                startup[name].append(
                    run(command, little, workers=workers, output=output / "little")
                )
                times[name].append(run(command, text, workers=workers, output=output / "full"))
                tokens[name] = num_tokens(output / "full")
        assert len(set(tokens.values())) == 1, f"other tokens: {tokens}"
        megabytes = (text.num_bytes - little.num_bytes) / 1e6
        rates = {
            name: megabytes / (np.min(times[name], axis=0) - np.min(startup[name], axis=0))
            for name in contenders
        }
        for name, (rate, by_cpu) in rates.items():
            ratios = " | ".join(f"{ratio:.2f}" for ratio in rates["nanotrain"] / rates[name])
            start = np.min(startup[name], axis=0)[0]
            rows.append(
                f"| {name} | {workers} | {start:.1f} | {rate:.2f} | {by_cpu:.2f} | {ratios} |"
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=12.0, help="text to tokenize")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM")
    parser.add_argument("--write", type=Path, help="file for the table")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(arguments, Path(folder))
    when = f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {arguments.megabytes:g} MB of text"
    head = "| program | processes | start-up, s | MB/s | MB per s of CPU | nanotrain's MB/s : its | by CPU time |"
    table = "\n".join([f"# Preparing a corpus\n\n{when}.\n", head, "|---" * 7 + "|", *rows]) + "\n"
    print(table)
    if arguments.write is not None:
        arguments.write.write_text(table)


if __name__ == "__main__":
    main()
