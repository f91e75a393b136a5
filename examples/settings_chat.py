"""Conversations and questions about nanotrain's settings, from the tables of docs/config.md.

    python examples/settings_chat.py docs/config.md data

writes DATA/settings.jsonl, a question and its reply per line, as `nanotrain prepare --format chat`
reads them, and DATA/settings_task.jsonl, questions with one right answer of four, as `nanotrain
evaluate --tasks` reads them. They are the data of docs/midtraining.md.
"""

import argparse
import json
import re
from pathlib import Path

ROW = re.compile(r"\| `(--[\w-]+)` \| [^|]* \| [^|]* \| (.*) \|")
NUM_QUESTIONS = 40


def read_settings(page: Path) -> list[tuple[str, str]]:
    """Flags of the page and the beginnings of their meanings."""
    settings = []
    for line in page.read_text().splitlines():
        row = ROW.fullmatch(line)
        if row is not None:
            meaning = re.split(r"[;(:]", row[2])[0].strip()
            settings.append((row[1], meaning))
    return settings


def conversation(flag: str, meaning: str) -> dict[str, object]:
    """A question and its reply."""
    question = {"role": "user", "content": f"What is {flag}?"}
    return {"messages": [question, {"role": "assistant", "content": meaning}]}


def task(settings: list[tuple[str, str]], number: int) -> dict[str, object]:
    """The meaning of a setting beside those of three others."""
    step = len(settings) // 4
    choices = [settings[(number + k * step) % len(settings)][1] for k in range(4)]
    gold = number % 4
    choices[0], choices[gold] = choices[gold], choices[0]
    return {"query": f"What is {settings[number][0]}?", "choices": choices, "gold": gold}


def write_rows(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{file}: {len(rows)} rows")


def main(page: Path, folder: Path) -> None:
    settings = read_settings(page)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "settings.jsonl", [conversation(*setting) for setting in settings])
    every = len(settings) // NUM_QUESTIONS
    questions = [task(settings, number * every) for number in range(NUM_QUESTIONS)]
    write_rows(folder / "settings_task.jsonl", questions)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="docs/config.md")
    parser.add_argument("folder", type=Path, metavar="DATA", help="folder that is written")
    arguments = parser.parse_args()
    main(arguments.page, arguments.folder)
