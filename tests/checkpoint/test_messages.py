"""Texts between the threads of a save: a failure of one ends the waits of all."""

import pytest
from torch._C._distributed_c10d import HashStore

from nanotrain.checkpoint.messages import Messages
from nanotrain.errors import StorageFault


def test_a_text_arrives_and_a_failure_ends_all_waits() -> None:
    messages = Messages(HashStore(), "save-1/", 5.0, lambda: False)
    messages.put("shard-0", "text")
    assert messages.take("shard-0", is_last=True) == "text"

    with pytest.raises(OSError), messages.telling_failure(3):
        raise OSError("no space")

    with pytest.raises(StorageFault, match="rank 3: no space"):
        messages.take("shard-1")


def test_a_wait_ends_with_its_save() -> None:
    with pytest.raises(StorageFault, match="another rank did not send manifest"):
        Messages(HashStore(), "save-1/", 5.0, lambda: True).take("manifest")
