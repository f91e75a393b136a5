"""scripts/cache_drill: readers that share a cache are killed; many objects with odd names."""

import pytest

from tests.scripts import load_script

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


def test_readers_that_share_a_cache_survive_the_kills_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # in this process, which may have a server already; its readers are processes of their own
    drill = load_script("cache_drill")
    code = drill.main(["--kills", "2", "--processes", "2", "--objects", "12"])
    printed = capsys.readouterr()
    assert code == 0, printed.out + printed.err
    assert "2 kills, " in printed.out and " 0 faults" in printed.out
    assert "12 objects: 0 differ after the mirror, 0 are left" in printed.out
