"""Texts between the threads of a save, over the store at which the ranks met."""

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from nanotrain.checkpoint.background import POLL_S
from nanotrain.errors import StorageFault


@dataclass(frozen=True)
class Messages:
    """Texts between the threads of one save, by name; a failure of any rank ends all waits."""

    store: Store
    prefix: str
    timeout_s: float
    is_cancelled: Callable[[], bool]

    def put(self, name: str, text: str = "") -> None:
        """Send a text."""
        compressed = zlib.compress(text.encode(), 1)
        self.store.set(self.prefix + name, compressed)  # type: ignore[arg-type]

    def take(self, name: str, *, is_last: bool = False) -> str:
        """Wait for a text and return it; `is_last` deletes it, as no other rank reads it.

        Raises:
            StorageFault: a rank failed, the time is over, or the save was given up.
        """
        deadline = time.monotonic() + self.timeout_s
        pause = POLL_S[0]
        while not self.store.check([self.prefix + name]):
            if self.store.check([self.prefix + "failed"]):
                raise StorageFault("the checkpoint cannot be written", why=self._read("failed"))
            if self.is_cancelled() or time.monotonic() > deadline:
                raise StorageFault(
                    "the checkpoint was given up",
                    why=f"another rank did not send {name} within {self.timeout_s:g} s",
                    fix="raise --distributed-timeout-minutes",
                )
            time.sleep(pause)
            pause = min(2 * pause, POLL_S[1])
        text = self._read(name)
        if is_last:
            self.forget(name)
        return text

    def forget(self, name: str) -> None:
        """Delete a text that all ranks have read."""
        self.store.delete_key(self.prefix + name)

    @contextmanager
    def telling_failure(self, rank: int) -> Iterator[None]:
        """Send an error of the block to all ranks."""
        try:
            yield
        except Exception as error:
            with suppress(Exception):  # the error itself matters more
                self.put("failed", f"rank {rank}: {error}"[:2000])
            raise

    def _read(self, name: str) -> str:
        return zlib.decompress(self.store.get(self.prefix + name)).decode()
