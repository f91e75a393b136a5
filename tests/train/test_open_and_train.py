"""What `main` calls once this rank is checked; runs are in test_main.py."""

import builtins
from contextlib import contextmanager

import pytest

from nanotrain.comm.parallel_context import Launch
from nanotrain.config.load import load
from nanotrain.runs.folder import RunFolder
from nanotrain.runs.lock import is_in_use
from nanotrain.train import main as entry
from nanotrain.train.main import main
from nanotrain.train.open_and_train import taking_over
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


@pytest.mark.parametrize(
    ("launch", "is_locked"),
    [
        (Launch(1, 1, 3, True, 3).among([1, 2]), True),
        (Launch(2, 2, 3, True, 3).among([1, 2]), False),
        (Launch(0, 0, 3, True, 3).among([0, 2]), False),  # `main` has it
    ],
)
def test_the_first_rank_that_is_left_has_the_run_folder(tmp_path, launch, is_locked):
    config = load(arguments(tmp_path)).config
    folder = RunFolder.of(config).path
    folder.mkdir(parents=True, exist_ok=True)
    with taking_over(config, launch):
        assert is_in_use(folder) == is_locked
    assert not is_in_use(folder)
