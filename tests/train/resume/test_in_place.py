"""What a run holds while it changes its layout; the change itself is in tests/laws."""

from pathlib import Path

import pytest

from nanotrain.checkpoint.live import MEMORY_BYTES
from nanotrain.errors import ConfigError
from nanotrain.train.resume import in_place
from nanotrain.train.resume.in_place import hold_state, require_room
from nanotrain.train.run import Successor
from tests.train.small_run import small_run


def test_a_layout_without_memory_for_both_states_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_run(tmp_path) as run:
        state = sum(tensor.nbytes for tensor in run.optimizer.state_tensors().values())
        monkeypatch.setattr(in_place, "memory_per_rank", lambda *_: MEMORY_BYTES + 2 * state)
        with pytest.raises(ConfigError, match="a rank lacks .* of memory"):
            require_room(run, run.config, world_size=1)
        monkeypatch.setattr(in_place, "memory_per_rank", lambda *_: MEMORY_BYTES + 100 * state)
        require_room(run, run.config, world_size=1)
        monkeypatch.setattr(in_place, "memory_per_rank", lambda *_: None)
        require_room(run, run.config, world_size=1)


def test_state_that_is_held_has_the_counters_of_a_checkpoint(tmp_path: Path) -> None:
    with small_run(tmp_path) as run:
        run.stop.successor = Successor(run.config, 1, {})
        held = hold_state(run)
        manifest = held.source.manifest
        assert manifest.objects["train"] == run.state.to_dict()
        assert manifest.objects["optimizer"]["num_updates"] == 0
        assert held.source.moved.sent_bytes == 0
