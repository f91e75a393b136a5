"""Worker processes: a user's script is not executed again, and a death names its signal or code."""

import os
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from multiprocessing.spawn import get_preparation_data
from pathlib import Path
from types import ModuleType

import pytest

from nanotrain.data.worker import WorkerContext, without_main_module

# as users write it: no `if __name__ == "__main__"`, and no function around it
SCRIPT = """
from pathlib import Path
import nanotrain
from nanotrain.prepare.corpus import prepare_corpus
from nanotrain.prepare.options import PrepareOptions

with open("starts", "a") as file:
    file.write("start ")
Path("t.txt").write_text("a text that a model reads. " * 100)
prepare_corpus(PrepareOptions(("t.txt",), Path("corpus"), "bytes", workers=2))
config = nanotrain.configure(
    "tiny", data_path=["corpus"], num_workers=1, train_iters=1, run_dir="run", global_batch_size=2,
    seq_length=32, eval_iters=0, eval_interval=0, generate_tokens=0, num_layers=1,
)
print("losses", len(nanotrain.pretrain(config).column("loss")))
"""


def test_a_script_without_a_guard_prepares_and_trains_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "losses 1" in done.stdout.splitlines()
    assert "Traceback" not in done.stderr
    assert (tmp_path / "starts").read_text() == "start "


@pytest.mark.parametrize("name", [None, "module"])
def test_neither_a_script_nor_a_module_is_named_to_a_worker(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__file__ = "script.py"
    main.__spec__ = ModuleSpec(name, None) if name else None
    monkeypatch.setitem(sys.modules, "__main__", main)
    named = {"init_main_from_name", "init_main_from_path"}
    assert named & set(get_preparation_data("worker"))
    with without_main_module():
        assert not named & set(get_preparation_data("worker"))
    assert sys.modules["__main__"] is main


def exit_with_3() -> None:
    os._exit(3)


def wait_for_a_signal() -> None:
    time.sleep(300)


@pytest.mark.parametrize(
    "sent, ended",
    [
        (None, "it ended with exit code 3; its own message is above"),
        (signal.SIGKILL, "SIGKILL ended it (the kernel sends it where memory runs out: see dmesg)"),
        (signal.SIGSEGV, "SIGSEGV ended it"),
    ],
)
def test_an_exit_code_is_told_from_a_signal(sent: signal.Signals | None, ended: str) -> None:
    context = WorkerContext(preload=[])
    process = context.Process(target=exit_with_3 if sent is None else wait_for_a_signal)
    # the pool of `prepare` ends the other workers of one that died
    other = context.Process(target=wait_for_a_signal)
    process.start()
    other.start()
    assert context.how_ended() == "" or sent is None
    if sent is not None:
        os.kill(process.pid, sent)
    process.join(60)
    other.terminate()
    other.join(60)
    assert context.how_ended() == ended
