"""The text, or the messages, of a row.

    column             the field of that name; a dotted name, content.text, is a field of an object
    --format chat      the messages in that column; where a row has none, they are made of

        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}
        {"instruction": "Add.", "input": "2 + 2", "output": "4"}

A column `tools` beside them has the tools that the assistant may call: a list of JSON schemas, or
its text. ShareGPT's speakers become roles by ROLES; the instruction and input of Alpaca are one
message of the user, divided by an empty line, and its output is the reply.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nanotrain.errors import DataError
from nanotrain.prepare.chat import as_text

KINDS = {
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
# roles of ShareGPT's speakers; others stay as they are
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "observation": "tool",
}
TOOLS = "tools"
SHAREGPT, ALPACA = "conversations", ("instruction", "output")
_MISSING = object()


def kind_of(value: Any) -> str:
    """Name of a value's type in error messages."""
    return KINDS.get(type(value), type(value).__name__)


def columns_to_read(names: Sequence[str], column: str, *, is_chat: bool) -> list[str]:
    """The columns that hold the text, or messages and tools; [] if there are none.

    >>> columns_to_read(["id", "content"], "content.text", is_chat=False)
    ['content']
    >>> columns_to_read(["id", "messages", "tools"], "messages", is_chat=True)
    ['messages', 'tools']
    """
    columns = _columns_of_document(names, column, is_chat=is_chat)
    has_tools = is_chat and TOOLS in names
    return [*columns, TOOLS] if columns and has_tools else columns


def _columns_of_document(names: Sequence[str], column: str, *, is_chat: bool) -> list[str]:
    """The columns that hold the text or the messages, without the tools beside them."""
    for name in (column, column.partition(".")[0]):
        if name in names:
            return [name]
    if is_chat and SHAREGPT in names:
        return [SHAREGPT]
    if is_chat and all(name in names for name in ALPACA):
        return [name for name in ("system", "instruction", "input", "output") if name in names]
    return []


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, perhaps of a dotted name; _MISSING if there is none.

    >>> value_at({"content": {"text": "a"}}, "content.text")
    'a'
    """
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def pick_text(
    row: Mapping[str, Any], column: str, *, source: str, columns: Sequence[str] | None = None
) -> str:
    """Get the text of a row; empty for null.

    Args:
        row: column name -> value.
        column: name of the column with the text.
        source: file or dataset of the row, for the error.
        columns: all columns, if the row holds only the one with the text.

    Raises:
        DataError: no such column, or no text in it.
    """
    text = value_at(row, column)
    if isinstance(text, str):
        return text
    if text is None:
        return ""
    names = columns or _names_in(row)
    if text is _MISSING:
        raise DataError(
            f"{source} has no column {column}",
            why=f"its columns are {', '.join(names)}",
            fix=_cure(names, "name one with --text-column"),
        )
    raise DataError(
        f"{source} holds no text in column {column}",
        why=f"it holds {kind_of(text)}; the columns are {', '.join(names)}",
        fix=_cure(names, "name a column of strings with --text-column"),
    )


def _names_in(row: Mapping[str, Any]) -> list[str]:
    """The columns of a row; fields of objects by their dotted names."""
    names = []
    for name, value in row.items():
        is_object = isinstance(value, Mapping) and len(value) > 0
        names += [f"{name}.{field}" for field in value] if is_object else [name]
    return names


def _cure(names: Sequence[str], otherwise: str) -> str:
    """The cure of the error for a column without text."""
    is_talk = "messages" in names or SHAREGPT in names or all(name in names for name in ALPACA)
    return f"read conversations with --format chat, or {otherwise}" if is_talk else otherwise


def pick_messages(
    row: Mapping[str, Any], column: str, *, source: str, columns: Sequence[str] | None = None
) -> str:
    """Get the messages and tools of a row as JSON; empty for null.

    Arguments and errors: see `pick_text`.
    """
    messages = value_at(row, column)
    tools = row.get(TOOLS)
    if messages is _MISSING:
        messages = _convert_conversation(row)
    if isinstance(messages, list):
        return as_text([_with_role(message) for message in messages], tools)
    text = pick_text(row, column, source=source, columns=columns)
    return as_text(text, tools) if text and tools is not None else text


def _convert_conversation(row: Mapping[str, Any]) -> Any:
    """The messages of a row of ShareGPT or Alpaca; _MISSING for other rows."""
    if SHAREGPT in row:
        return row[SHAREGPT]
    if not all(isinstance(row.get(name), str) for name in ALPACA):
        return _MISSING
    question = [row["instruction"], row.get("input")]
    messages = [
        {"role": "user", "content": "\n\n".join(part for part in question if part)},
        {"role": "assistant", "content": row["output"]},
    ]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def _with_role(message: Any) -> Any:
    """A chat message with `role` and `content`, also for ShareGPT's `from` and `value`."""
    if not isinstance(message, Mapping) or "role" in message or "from" not in message:
        return message
    speaker = message["from"]
    role = ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
    return {"role": role, "content": message.get("value")}
