"""What `main` calls once this rank is checked; runs are in test_main.py."""

import builtins
from contextlib import contextmanager

import pytest

from nanotrain.train import main as entry
from nanotrain.train.main import main
from tests.train.small_run import arguments

pytestmark = pytest.mark.usefixtures("logging_as_before")


def test_what_a_run_imports_it_imports_without_garbage_collection(tmp_path, monkeypatch):
    outside, is_inside = [], [False]
    import_module = builtins.__import__

    @contextmanager
    def importing_torch():
        is_inside[0] = True
        yield
        is_inside[0] = False

    def note(name, names=None, *args, **options):
        path = (names or {}).get("__name__", "")
        if path in ("nanotrain.train.main", "nanotrain.train.open_and_train") and not is_inside[0]:
            outside.append(name)
        return import_module(name, names, *args, **options)

    monkeypatch.setattr(entry, "importing_torch", importing_torch)
    monkeypatch.setattr(builtins, "__import__", note)
    assert main(arguments(tmp_path, "--train-iters", "1")) == 0
    assert outside == [], "torch is there already, so that collections are not left out"
