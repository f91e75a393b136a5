"""A rank of `scripts/restart_kills`: the program of a run, killed at random instants.

    scripts.killed_rank          one rank
    scripts.killed_rank.spare    a process that waits to take the place of a rank that died

The plan of the kills is in a variable of the environment. Each is carried out once, in its order.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLAN = "NANOTRAIN_KILLS"
STEP = "a step"
DISK = "a save to disk"
MEMORY = "a save to memory"
RESTORE = "a restore"
PHASES = (STEP, DISK, MEMORY, RESTORE)
SPARE = "spare"  # note of a spare process that has done its imports
WAIT_FOR_SPARE_S = 120.0


@dataclass(frozen=True)
class Kill:
    """One kill of a rank: a share of the usual time of a phase after one of them has begun."""

    rank: int
    phase: str
    number: int  # of the phase in its process, from 0
    share: float


@dataclass(frozen=True)
class Plan:
    """The kills of a run.

    Args:
        folder: folder of notes: `kill-N`, when kill N was; `PHASE-RANK`, what phases took; `spare`.
        kills: the kills in their order.
        seconds: usual seconds of each phase.
    """

    folder: str
    kills: Sequence[Kill] = ()
    seconds: dict[str, float] | None = None

    def to_environment(self) -> dict[str, str]:
        """The variable of a plan."""
        return {PLAN: json.dumps(asdict(self))}

    @classmethod
    def read(cls) -> "Plan":
        """The plan of this process."""
        values = json.loads(os.environ[PLAN])
        kills = [Kill(**kill) for kill in values.pop("kills")]
        return cls(**values, kills=kills)


class Phases:
    """Counts the phases of this process, notes their seconds, and kills in the one of the plan."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._folder = Path(plan.folder)
        self._counts = dict.fromkeys(PHASES, 0)
        self._running = set[str]()

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Make the calls of a function or method phases."""
        call = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            return self._run(phase, lambda: call(*args, **options))

        setattr(owner, name, watched)

    def _run(self, phase: str, call: Callable[[], Any]) -> Any:
        number = self._counts[phase]
        self._counts[phase] += 1
        self._start_kill(phase, number)
        self._running.add(phase)
        begun = time.monotonic()
        try:
            return call()
        finally:
            self._running.discard(phase)
            seconds = time.monotonic() - begun
            with open(self._folder / f"{phase}-{self._rank}", "a") as notes:
                notes.write(f"{seconds}\n")

    def _start_kill(self, phase: str, number: int) -> None:
        """Have this process killed soon, where the next kill of the plan is in this phase."""
        index = sum(1 for _ in self._folder.glob("kill-*"))
        if index >= len(self._plan.kills):
            return
        kill = self._plan.kills[index]
        if (kill.rank, kill.phase, kill.number) != (self._rank, phase, number):
            return
        if index == 0:
            self._wait_for_spare()
        assert self._plan.seconds is not None, "kills have usual times"
        delay_s = kill.share * self._plan.seconds[phase]
        timer = threading.Timer(delay_s, self._kill, args=[index, phase])
        timer.daemon = True  # a run that ends before its kill ends at once
        timer.start()

    def _wait_for_spare(self) -> None:
        """Wait for the spare process, as if the run had been running for some time."""
        deadline = time.monotonic() + WAIT_FOR_SPARE_S
        while not (self._folder / SPARE).exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _kill(self, index: int, phase: str) -> None:
        note = {"time_s": time.time(), "is_inside": phase in self._running}
        (self._folder / f"kill-{index}").write_text(json.dumps(note))
        os.kill(os.getpid(), signal.SIGKILL)


def watch_phases() -> None:
    """Make steps, saves and restores of this rank phases; its variables are set."""
    from nanotrain.checkpoint.checkpointer import Checkpointer
    from nanotrain.checkpoint.memory_checkpointer import MemoryCheckpointer
    from nanotrain.train import build, fit

    phases = Phases(Plan.read(), int(os.environ["RANK"]))
    phases.watch(fit, "train_step_with_repeats", STEP)
    phases.watch(build, "restore", RESTORE)
    phases.watch(Checkpointer, "save", DISK)
    phases.watch(Checkpointer, "_write", DISK)  # of a save in the background
    phases.watch(MemoryCheckpointer, "_write", MEMORY)


def train() -> int:
    """One rank of the run; the exit code."""
    from nanotrain.train.main import main, prepare_environment

    prepare_environment()
    watch_phases()
    return main()
