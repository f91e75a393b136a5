"""Run folders of others: whatever is in their files, reports, lists and comparisons open at once,
and show no more.
"""

import io
import json
import os
import random
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nanotrain.errors import NanotrainError
from nanotrain.report.history import RunHistory, find_runs
from nanotrain.report.page import render
from nanotrain.report.terminal import compare_runs, list_runs
from nanotrain.report.timeline import read_timeline, save
from tests.report.runs import expert_load, write_run
from tests.report.traces import gpu_events, write_trace

FILES = (
    "config.yaml",
    "environment.json",
    "metrics.jsonl",
    "samples.jsonl",
    "starts.jsonl",
    "profile/timeline.json",
)
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"
ODD: tuple[Any, ...] = (
    -1,
    0,
    10**18,
    10**400,
    1e308,
    float("nan"),
    "x",
    SCRIPT,
    [1],
    {"a": [1]},
    None,
    True,
    [[]],
)
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def config(**sections: Any) -> str:
    return json.dumps({"train": {"train_iters": 40, "global_batch_size": 8}, **sections})


def facts(**values: Any) -> str:
    return json.dumps({"world_size": 4, "memory": {"params": 1}, **values})


def rows(*values: Any) -> str:
    return "".join(
        json.dumps({"step": step, "loss": 1.0} | value) + "\n" for step, value in enumerate(values)
    )


def loads(*values: Any) -> str:
    return rows(*({"moe": {"load": value}} for value in values))


HOSTILE: dict[str, tuple[str, str | bytes]] = {
    "aliases": ("config.yaml", ALIASES),
    "deep yaml": ("config.yaml", "[" * 500),
    "tags": ("config.yaml", "a: !!python/object/apply:os.system [id]"),
    "dates": ("config.yaml", "train: {train_iters: 2026-01-01, seed: 0x" + "f" * 9000 + "}"),
    "a section and a value": (
        "config.yaml",
        "model: 5\nmodel.hidden_size: 6\ntrain: {a.b: 1, a: 2}",
    ),
    "keys": ("config.yaml", "{1: 2, [1]: 3, null: {2: 1}}"),
    "huge config": ("config.yaml", "a: " + "x" * (1 << 20)),
    "deep json": ("environment.json", "[" * 100_000),
    "pipeline of 100,000": (
        "config.yaml",
        config(parallel={"pipeline_model_parallel_size": 100_000}),
    ),
    "batches": (
        "config.yaml",
        config(train={"global_batch_size": 10**7, "rampup_batch_size": [1, 1, 10**18]}),
    ),
    "a row of 100,000": ("metrics.jsonl", rows({str(number): 1.0 for number in range(100_000)})),
    "columns": ("metrics.jsonl", rows(*({f"m{step}": 1.0} for step in range(1200)))),
    "bytes": ("metrics.jsonl", b"\xff\xfe\x00" * 1000),
    "one long line": ("metrics.jsonl", b"[" * (3 << 20)),
    "blank lines": ("metrics.jsonl", b"\n" * (1 << 20)),
    "ragged loads": ("metrics.jsonl", loads({"a": [1, 2]}, {"a": [1]})),
    "loads of two sizes": ("metrics.jsonl", loads({"a": [1, 2], "b": [1]})),
    "stages": ("metrics.jsonl", rows(*({"data_stage": f"{SCRIPT}{step}"} for step in range(2000)))),
    "a column of script": ("metrics.jsonl", rows({SCRIPT: 1.0}, {SCRIPT: 2.0})),
    "a sample's step": ("samples.jsonl", json.dumps({"step": SCRIPT, "text": "a"}) + "\n"),
    "a sample's text": (
        "samples.jsonl",
        json.dumps({"step": 1, "text": SCRIPT + "\ud800\x1b[2J"}) + "\n",
    ),
    "samples": (
        "samples.jsonl",
        "".join(json.dumps({"step": n, "text": "a" * 9999}) + "\n" for n in range(3000)),
    ),
    **{f"world size {shown!r:.20}": ("environment.json", facts(world_size=shown)) for shown in ODD},
    **{
        f"memory {shown!r:.20}": (
            "environment.json",
            facts(memory={"params": shown}, origins=shown),
        )
        for shown in ODD
    },
    **{
        f"tp {shown!r:.20}": ("config.yaml", config(parallel={"tensor_model_parallel_size": shown}))
        for shown in ODD
    },
    **{f"load {shown!r:.20}": ("metrics.jsonl", loads(*[{"a": [1, shown]}] * 3)) for shown in ODD},
    **{
        f"start {shown!r:.20}": ("starts.jsonl", rows({"time_s": shown, "changed": shown}))
        for shown in ODD
    },
}
KINDS = ("pipe", "endless", "link", "folder")


def opened(folder: Path) -> str:
    """All that is shown of a run folder."""
    out = Console(file=io.StringIO(), width=120)
    runs = find_runs(folder)
    list_runs(runs, console=out)
    run = runs[0] if runs else RunHistory.read(folder)  # without config.yaml it is in no list
    compare_runs([run, run], console=out)
    assert isinstance(out.file, io.StringIO) and "\x1b" not in out.file.getvalue()
    return render([run])


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test ends within a time, whatever hangs; without plotly, whose 5 MB take most of it."""
    monkeypatch.setattr("nanotrain.report.page._plotly", lambda: ("", ""))
    signal.alarm(90)
    yield
    signal.alarm(0)


def run_folder(folder: Path) -> Path:
    write_run(folder, steps=5, moe=expert_load)
    (folder / "samples.jsonl").write_text('{"step": 5, "text": "a"}\n')
    start = {"step": 0, "time_s": 1.0, "world_size": 4, "changed": {}}
    (folder / "starts.jsonl").write_text(
        json.dumps(start) + "\n" + json.dumps(start | {"step": 3}) + "\n"
    )
    write_trace(folder, gpu_events())
    save(read_timeline(folder), folder)
    return folder


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_read_in_part_or_not(name: str, tmp_path: Path, soon: None) -> None:
    folder, (file, content) = run_folder(tmp_path / "a"), HOSTILE[name]
    (folder / file).write_bytes(
        content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    )
    page = opened(folder)
    assert "<img src=x" not in page and not re.search(
        "<[^>]*onerror", re.sub("(?s)<script.*?</script>", "", page)
    )
    assert page.count("<script") == 3 and "\ud800" not in page


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_read(kind: str, file: str, tmp_path: Path, soon: None) -> None:
    folder = run_folder(tmp_path / "a")
    (folder / file).unlink()
    (tmp_path / "secret").write_text('{"step": 7, "text": "SECRET", "loss": 2.0}\n')
    match kind:
        case "pipe":
            os.mkfifo(folder / file)
        case "folder":
            (folder / file).mkdir()
        case _:
            (folder / file).symlink_to("/dev/zero" if kind == "endless" else tmp_path / "secret")
    assert "SECRET" not in opened(folder)


def test_a_sparse_file_of_a_terabyte_is_read_at_its_end(tmp_path: Path, soon: None) -> None:
    folder, before = run_folder(tmp_path / "a"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for file in FILES:
        os.truncate(folder / file, 1 << 40)
    render([RunHistory.read(folder)])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "1 GB"


def test_400_flips_of_a_run_folder(tmp_path: Path, soon: None) -> None:
    folder, draw = run_folder(tmp_path / "a"), random.Random(3)
    for number in range(400):
        file = folder / FILES[number % len(FILES)]
        content = file.read_bytes()
        changed = bytearray(content)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        file.write_bytes(changed if number % 3 else content[: draw.randrange(len(content))])
        try:
            render([RunHistory.read(folder)])
        except NanotrainError as error:
            assert "is not a run folder" in str(error)
        file.write_bytes(content)
