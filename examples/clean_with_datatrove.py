"""Filter and deduplicate documents with datatrove, then make token files of what is left.

    pip install datatrove orjson
    python examples/clean_with_datatrove.py --input raw --output data/web --tokenizer bpe:8192

`raw` is a folder of JSON lines with a field "text". datatrove's LocalPipelineExecutor becomes its
SlurmPipelineExecutor on a cluster; `nanotrain prepare --executor slurm` makes the token files
there. Without --input a small folder is made.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from nanotrain.cli.main import main as nanotrain

try:
    import orjson  # noqa: F401  (datatrove's reader of JSON lines needs it)
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import ExactDedupFilter, ExactDedupSignature, ExactFindDedups
    from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig
    from datatrove.pipeline.filters import LambdaFilter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.hashing import HashConfig
except ModuleNotFoundError as error:
    print(f"error: no package {error.name}; pip install datatrove orjson", file=sys.stderr)
    sys.exit(2)


def is_long_enough(document: Document) -> bool:
    """A filter of your own; datatrove has those of Gopher, C4 and FineWeb beside it."""
    return len(document.text.split()) >= 5


def text_of(document: Document) -> str:
    """What makes two documents equal."""
    return document.text.strip()


def clean(raw: Path, scratch: Path, *, workers: int) -> Path:
    """The folder with the documents that are long enough, each once."""
    sha1 = HashConfig(hash_fc="sha1")  # datatrove's xxhash needs a version of that package below 4
    config, clean = ExactDedupConfig(content_getter=text_of, hash_config=sha1), scratch / "clean"
    stages = [
        [
            JsonlReader(str(raw)),
            LambdaFilter(is_long_enough),
            JsonlWriter(f"{scratch}/long", compression=None),
        ],
        [JsonlReader(f"{scratch}/long"), ExactDedupSignature(f"{scratch}/hashes", config)],
        [ExactFindDedups(f"{scratch}/hashes", f"{scratch}/found", config)],
        [
            JsonlReader(f"{scratch}/long"),
            ExactDedupFilter(f"{scratch}/found", config),
            JsonlWriter(str(clean), compression=None),
        ],
    ]
    for number, steps in enumerate(stages):
        tasks = 1 if number == 2 else workers
        LocalPipelineExecutor(
            steps, tasks=tasks, workers=tasks, logging_dir=f"{scratch}/logs/{number}"
        ).run()
    return clean


def main() -> None:
    """Clean a folder of documents and prepare what is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path)
    parser.add_argument("--output", type=Path, default=Path("web"))
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        raw = arguments.input or Path(scratch) / "raw"
        if arguments.input is None:
            raw.mkdir()
            texts = [
                "too short",
                *["one of two equal documents"] * 2,
                "a document of its own, alone",
            ]
            (raw / "0.jsonl").write_text(
                "".join(json.dumps({"text": text}) + "\n" for text in texts)
            )
        cleaned = clean(raw, Path(scratch), workers=arguments.workers)
        line = f"prepare --tokenizer {arguments.tokenizer} --workers {arguments.workers}"
        files = ["--input", str(cleaned), "--output", str(arguments.output)]
        raise SystemExit(nanotrain([*line.split(), *files]))


if __name__ == "__main__":
    main()
