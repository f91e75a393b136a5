"""The quick-start corpus is built once, atomically, from the library's sources."""

from pathlib import Path

import numpy as np
import pytest

from nanotrain.config.config import DataConfig
from nanotrain.data.build import build_data
from nanotrain.data.corpus_info import recorded_tokenizer, tokenizer_path
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.tokenizer import load_tokenizer
from nanotrain.errors import DataError, EnvironmentFault
from nanotrain.prepare import quickstart
from nanotrain.prepare.quickstart import (
    fetch,
    keep,
    library_sources,
    prepare_quickstart,
    user_cache,
)
from nanotrain.runs.files import MARKER

TEXTS = [f"def function_{i}(x):\n    return x + {i}\n" for i in range(40)]


@pytest.fixture
def small_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "library_sources", lambda: iter(TEXTS))


def test_sources_are_a_fixed_shuffle_of_readable_library_files(tmp_path: Path) -> None:
    for name in [*"abcdefgh", "site-packages/left_out"]:
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(name)
    (tmp_path / "latin.py").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty.py").touch()
    (tmp_path / "data.txt").write_text("no source")
    texts = list(library_sources(tmp_path))
    assert sorted(texts) == list("abcdefgh")
    assert texts != sorted(texts)
    assert texts == list(library_sources(tmp_path))


def test_the_running_python_has_sources() -> None:
    assert any("def " in text for text in library_sources())


@pytest.mark.usefixtures("small_library")
def test_one_document_a_file_ended_by_eod_and_read_by_the_trainer(tmp_path: Path) -> None:
    made = prepare_quickstart(tmp_path, 300)
    tokenizer = load_tokenizer(str(tokenizer_path(made)))
    corpus = IndexedTokens(made)
    assert tokenizer.vocab_size == 300
    assert corpus.num_documents == len(TEXTS)
    assert corpus.unchecked == [], "a start would say that damage is not noticed"
    ids = corpus.read(0, corpus.document_start(1))
    assert ids[-1] == tokenizer.eod
    assert tokenizer.decode(ids[:-1].tolist()) == TEXTS[0]
    assert load_tokenizer(recorded_tokenizer(made) or "").vocab_size == 300
    data = DataConfig(data_path=[str(made)], split="8,2,0", seq_length=8)
    assert build_data(data, vocab_size=300, seed=1).valid is not None


@pytest.mark.usefixtures("small_library")
def test_it_is_built_once_and_again_for_another_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = prepare_quickstart(tmp_path, 300)
    assert "training a BPE" in capsys.readouterr().err
    assert prepare_quickstart(tmp_path, 300) == first
    assert not capsys.readouterr().err
    assert prepare_quickstart(tmp_path, 310) != first
    assert not list(tmp_path.glob(".building-*"))


@pytest.mark.usefixtures("small_library")
def test_two_that_build_at_once_leave_one_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given: while this process builds, another one finishes
    build = quickstart._build
    theirs: list[Path] = []

    def build_late(*args: object, **options: object) -> None:
        monkeypatch.setattr(quickstart, "_build", build)
        theirs.append(prepare_quickstart(tmp_path, 300))
        build(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(quickstart, "_build", build_late)
    # when
    mine = prepare_quickstart(tmp_path, 300)
    # then
    assert mine == theirs[0]
    assert np.array_equal(*(IndexedTokens(made).read(0, 50) for made in (mine, theirs[0])))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_python_without_sources_and_a_closed_folder_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "library_sources", lambda: iter(()))
    with pytest.raises(DataError, match="no library sources.*--data-path"):
        prepare_quickstart(tmp_path, 300)
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        prepare_quickstart(tmp_path / "file", 300)


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


def test_the_corpus_is_built_once_for_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"def function_{i}(x):\n    return x + {i}\n" for i in range(40)]
    monkeypatch.setattr(quickstart, "library_sources", lambda: iter(texts))
    first, second = (
        prepare_quickstart(tmp_path / run, 300, cache=tmp_path / "cache") for run in "ab"
    )
    assert capsys.readouterr().err.count("training a BPE") == 1
    for suffix in (".bin", ".idx"):
        assert first.with_suffix(suffix).read_bytes() == second.with_suffix(suffix).read_bytes()
    assert (tokenizer_path(second) / "tokenizer.json").read_text() == (
        tokenizer_path(first) / "tokenizer.json"
    ).read_text()
    monkeypatch.setattr(quickstart, "_digest_of_library", lambda: "another library")
    prepare_quickstart(tmp_path / "c", 300, cache=tmp_path / "cache")
    assert capsys.readouterr().err.count("training a BPE") == 1


def test_the_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache("quickstart") == tmp_path / "nanotrain" / "quickstart"
