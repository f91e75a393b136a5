"""The numbers and names of SECURITY.md are those of the code."""

from pathlib import Path

import pytest

from nanotrain.checkpoint.stored import MAX_FILES
from nanotrain.config import user_paths
from nanotrain.config.recipe_files import MAX_RECIPE_BYTES, MAX_RECIPE_VALUES
from nanotrain.data import encoding_budget, tasks
from nanotrain.planner.rows.table import MAX_TABLE_BYTES
from nanotrain.prepare.chat_process import BUDGET_S
from nanotrain.prepare.chat_template import MAX_CHARACTERS, MEMORY_BYTES
from nanotrain.storage.remote import MAX_LISTED
from nanotrain.untrusted import MAX_FILE_BYTES

PAGE = " ".join(Path(__file__).parents[1].joinpath("SECURITY.md").read_text().split())


@pytest.mark.parametrize(
    "sentence",
    [
        f"an encoding has {encoding_budget.BUDGET_S:.0f} s and 1 s more per "
        f"{encoding_budget.BYTES_PER_S:,} characters, and {encoding_budget.BUDGET_BYTES >> 30} GiB "
        f"of memory and {encoding_budget.BYTES_PER_CHARACTER:,} bytes more per character, looked "
        f"at {1 / encoding_budget.LOOK_S:.0f} times per second",
        f"with {BUDGET_S:.0f} s per conversation, {MEMORY_BYTES >> 30} GiB, and texts of at most "
        f"{MAX_CHARACTERS:,} characters",
        f"at most {MAX_LISTED:,} objects",
        f"{MAX_FILES:,} small files and {MAX_FILES:,} checkpoints, and a small file at "
        f"most {MAX_FILE_BYTES >> 30} GiB",
        f"a question has at most {tasks.MAX_QUESTION_BYTES >> 20} MiB, {tasks.MAX_CHOICES} choices "
        f"and {tasks.MAX_QUESTION_TEXT:,} characters in all of them, a task "
        f"{tasks.MAX_TASK_TOKENS:,} tokens, a table of measurements {MAX_TABLE_BYTES >> 20} MiB",
        f"of at most {MAX_RECIPE_BYTES >> 10} KiB and {MAX_RECIPE_VALUES:,} values",
        f'`{user_paths.ADDED}="A B"` adds others',
    ],
)
def test_the_page_says_the_bounds_of_the_code(sentence: str) -> None:
    assert sentence in PAGE


def test_every_variable_that_the_page_names_may_be_read_by_recipes() -> None:
    names = PAGE.partition("name folders, users and jobs: ")[2].partition(", those of")[0]
    assert all(user_paths.may_read(name, {}) for name in names.split(", "))
    for prefix in user_paths.PREFIXES:
        assert f"{prefix}\\*" in PAGE
