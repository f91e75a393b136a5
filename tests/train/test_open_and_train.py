"""What `main` calls once this rank is checked; runs are in test_main.py."""

import builtins
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from nanotrain.comm import device
from nanotrain.comm.parallel_context import Launch
from nanotrain.config.load import load
from nanotrain.runs.folder import RunFolder
from nanotrain.runs.lock import is_in_use
from nanotrain.train import main as entry
from nanotrain.train import open_and_train
from nanotrain.train.checks import Start
from nanotrain.train.main import main
from nanotrain.train.open_and_train import taking_over
from nanotrain.train.phases import EarlyEnd
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


def test_a_restart_does_not_measure_the_memory_again(tmp_path, monkeypatch):
    measured = []

    def available_memory():
        measured.append(1200 // (1 + len(measured)))
        return measured[-1]

    monkeypatch.setattr(device, "available_memory", available_memory)
    monkeypatch.setattr(
        open_and_train, "_open_planned", lambda *args, start, **_: seen.append(start)
    )
    seen: list[Start] = []
    loaded = load(arguments(tmp_path, "--device", "cpu"))
    start = Start(loaded.config, Launch(2, 2, 3, True, 3))
    for members in [(0, 1, 2), (0, 1, 2), (0, 2)]:
        generation = SimpleNamespace(members=members)
        open_and_train._open_once(loaded, generation, start=start, early_end=EarlyEnd())
    assert [each.available for each in seen] == [400, 400, 600]
    assert [each.launch.rank for each in seen] == [2, 2, 1]
    assert measured == [1200]
