"""Folders of others: every entry, tensor and line is accounted for, or one error names it."""

import json
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from nanotrain.errors import NanotrainError
from nanotrain.interop.hf.derive import folder as folder_module
from nanotrain.interop.hf.derive.folder import candidates, derive_family, nearest_family
from nanotrain.interop.hf.derive.tensors import Vocabulary
from nanotrain.interop.hf.families import FAMILIES
from tests.interop.hf.derive.folders import (
    change_config,
    restored_tables,
    write_folder,
    write_own_code,
)
from tests.interop.hf.test_hostile import HOSTILE

SECONDS = 100


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """The tables of families stay as they are, and a test ends, whatever hangs."""
    signal.alarm(SECONDS)
    with restored_tables():
        yield
    signal.alarm(0)


@pytest.mark.parametrize("is_own", [True, False], ids=["own code", "transformers' class"])
def test_every_entry_with_every_hostile_value_is_a_row_or_one_error(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code does not change, so it is read once, and so are the names of known families."""
    monkeypatch.setattr(folder_module, "read_source", cache(folder_module.read_source))
    if is_own:
        folder = write_own_code(tmp_path)
    else:
        folder = write_folder(tmp_path, "hy_v3")
        del FAMILIES["hy_v3"]
    vocabulary = Vocabulary.of(FAMILIES.values())
    monkeypatch.setattr(Vocabulary, "of", lambda _: vocabulary)
    path = folder / "config.json"
    good = json.loads(path.read_text())
    count = refused = 0
    for entry in good:
        for value in HOSTILE[::3]:
            count += 1
            path.write_text(json.dumps(good | {entry: value}))
            try:
                findings = derive_family(folder)
                candidates(findings)
                refused += bool(findings.missing)
            except NanotrainError:
                refused += 1
    assert count > 100 and refused > count / 4


def test_entries_without_code_that_reads_them_are_passed_over(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path)
    change_config(folder, foo=3.5)
    findings = derive_family(folder)
    assert not findings.missing and "foo" in findings.row["passed_over"]


def test_without_code_every_entry_needs_a_meaning(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path)
    for path in folder.glob("*.py"):
        path.unlink()
    change_config(folder, foo=3.5)
    findings = derive_family(folder)
    assert findings.source is None
    assert [str(missing) for missing in findings.missing] == [
        "the meaning of an entry: config.json has foo: 3.5"
    ]


def test_literal_defaults_of_a_configuration_file_are_read_as_text(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path)
    (folder / "configuration_mine.py").write_text(
        "raise SystemExit\nclass MineConfig:\n"
        "    model_type = 'mine'\n"
        "    def __init__(self, rms_norm_eps=1e-3, x=[], *, foo_rate=0.25): ...\n"
    )
    findings = derive_family(folder)
    assert findings.row["defaults"] == {"rms_norm_eps": 1e-3, "foo_rate": 0.25}


def test_orders_that_shapes_do_not_tell_apart_are_candidates(tmp_path: Path) -> None:
    """EXAONE's c_fc_0 and c_fc_1: gate and up, or up and gate."""
    folder = write_folder(tmp_path, "exaone")
    del FAMILIES["exaone"]
    rows = candidates(derive_family(folder))
    gates = [row["layers"]["mlp.gate"] for row in rows]
    assert sorted(gates) == ["mlp.c_fc_0", "mlp.c_fc_1"]


def test_the_nearest_family_has_most_in_common(tmp_path: Path) -> None:
    folder = write_own_code(tmp_path)
    nearest, common, total = nearest_family(derive_family(folder))
    assert nearest in ("llama", "internlm3", "iquestcoder") and common == total
