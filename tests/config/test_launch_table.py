"""docs/megatron.md is made from the scripts, is fresh, and knows every flag."""

from tests.config.launch_table import page
from tests.harness import ROOT


def test_the_page_is_fresh_and_no_flag_is_unknown() -> None:
    assert (ROOT / "docs" / "megatron.md").read_text() == page(), (
        "python -m tests.config.launch_table > docs/megatron.md"
    )
    assert "| unknown |" not in page()
