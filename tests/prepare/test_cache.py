"""The cache gives complete folders or nothing, and never fails a run."""

from pathlib import Path

import pytest

from nanotrain.prepare import quickstart
from nanotrain.prepare.cache import fetch, keep, user_cache
from nanotrain.prepare.quickstart import prepare_quickstart
from nanotrain.runs.files import MARKER


def filled(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_text("content")
    (folder / MARKER).touch()
    return folder


def test_what_was_kept_is_fetched_without_the_marker(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    assert not fetch(tmp_path / "cache" / "a", target)
    keep(filled(tmp_path / "built"), tmp_path / "cache" / "a")
    assert fetch(tmp_path / "cache" / "a", target)
    assert [path.name for path in target.iterdir()] == ["sub"]
    assert (target / "sub" / "file").read_text() == "content"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["a"]


def test_a_second_writer_changes_nothing(tmp_path: Path) -> None:
    keep(filled(tmp_path / "first"), tmp_path / "cache" / "a")
    (filled(tmp_path / "second") / "sub" / "file").write_text("other")
    keep(tmp_path / "second", tmp_path / "cache" / "a")
    assert (tmp_path / "cache" / "a" / "sub" / "file").read_text() == "content"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["a"]


def test_a_cache_that_cannot_be_used_is_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    keep(filled(tmp_path / "built"), tmp_path / "file" / "a")
    target = tmp_path / "target"
    target.mkdir()
    assert not fetch(tmp_path / "file" / "a", target)
    # a link to nothing ends the copy in the middle
    broken = filled(tmp_path / "broken")
    (broken / "sub" / "gone").symlink_to(tmp_path / "absent")
    assert not fetch(broken, target)
    assert list(target.iterdir()) == []


def test_the_corpus_is_built_once_for_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"def function_{i}(x):\n    return x + {i}\n" for i in range(40)]
    monkeypatch.setattr(quickstart, "library_sources", lambda: iter(texts))
    lines: list[str] = []
    first, second = (
        prepare_quickstart(tmp_path / run, 300, cache=tmp_path / "cache", progress=lines.append) for run in "ab"
    )
    assert sum("training a BPE" in line for line in lines) == 1
    for suffix in (".bin", ".idx"):
        assert first.prefix.with_suffix(suffix).read_bytes() == second.prefix.with_suffix(suffix).read_bytes()
    assert second.tokenizer_path.read_text() == first.tokenizer_path.read_text()
    monkeypatch.setattr(quickstart, "_digest_of_library", lambda: "another library")
    prepare_quickstart(tmp_path / "c", 300, cache=tmp_path / "cache", progress=lines.append)
    assert sum("training a BPE" in line for line in lines) == 2


def test_the_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache("quickstart") == tmp_path / "nanotrain" / "quickstart"
