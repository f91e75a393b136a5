"""The values of variables of a shell script, and words with their values in place.

Values            variables, and the fields of words after expansion
without_marks     a text with the names of what is not known
"""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanotrain.audit.shell_words import Part, Result, Sum, Text, Variable, Word
from nanotrain.errors import ConfigError

Value = str | list[str]
MAX_VALUE = 1 << 18  # characters of a value, or of all words of a command
# a mark around the name of a variable that is not set, and one for the result of a command
UNSET = "\ue000{}\ue001"
COMMAND = "\ue000\ue001"
# a variable in a sum, or an argument of a function: A, $A, ${A}, $1, $#
NUMBER_NAME = re.compile(r"\$(?:\w+|#|\{(?:\w+|#)\})|[A-Za-z_]\w*")
MARK = re.compile("\ue000(\\w*|[#?$!])\ue001")


def without_marks(text: str) -> str:
    """A text with the names of unset variables and of commands in place of their marks.

    >>> without_marks(UNSET.format("DATA") + "/x")
    '$DATA/x'
    """
    return MARK.sub(_name_of_mark, text)


def _name_of_mark(match: re.Match[str]) -> str:
    """The variable or command that a mark in a text stands for, as a script writes it."""
    name = match.group(1)
    return f"${name}" if name else "$(...)"


def unset_names(text: str) -> list[str]:
    """The names of the unset variables in a text; `$(...)` for the result of a command."""
    return [_name_of_mark(match) for match in MARK.finditer(text)]


@dataclass
class Values:
    """The variables of a script."""

    variables: dict[str, Value] = field(default_factory=dict)
    arguments: list[str] | None = None  # of the function that is followed; None outside of one

    def fields(self, words: Sequence[Word]) -> list[str]:
        """The arguments that a command gets from words: their fields after expansion."""
        fields: list[str] = []
        for word in words:
            fields += self.fields_of(word)
        require_short(fields)
        return fields

    def fields_of(self, word: Word) -> list[str]:
        """The fields of one word: unquoted values are divided at blanks."""
        fields: list[str] = []
        is_open = False  # whether the next text continues the last field
        for part in self.with_defaults(word.parts):
            for index, text in enumerate(self.values_of(part)):
                if index > 0:
                    is_open = False
                is_open = add_text(fields, text, part=part, is_open=is_open)
        return fields

    def with_defaults(self, parts: Sequence[Part]) -> list[Part]:
        """Parts in which the default replaces each variable that takes it, as in `${NAME:-TEXT}`.

        `${NAME:=TEXT}` sets the variable too.
        """
        result: list[Part] = []
        for part in parts:
            if part.is_quoted or not isinstance(part, Variable) or not self.takes_default(part):
                result.append(part)
            else:
                if part.operator.endswith("="):
                    self.variables[part.name] = self.joined_text(part.default)
                result += self.with_defaults(part.default)
        return result

    def values_of(self, part: Part) -> list[str]:
        """The values of a part: one, or the items of an array."""
        if not isinstance(part, Variable) or not part.takes_all:
            return [self.value_of(part)]
        value = self.value_named(part.name)
        if value is None:
            return []
        items = value if isinstance(value, list) else [value]
        return [" ".join(items)] if part.is_joined and part.is_quoted else items

    def value_named(self, name: str) -> Value | None:
        """The value of a variable, or of an argument of the function; None if it is not set."""
        arguments = self.arguments
        if name in ("@", "*"):
            return arguments
        if name == "#" and arguments is not None:
            return str(len(arguments))
        if not name.isdecimal():
            return self.variables.get(name)
        number = int(name)
        if arguments is None or not 1 <= number <= len(arguments):
            return None
        return arguments[number - 1]

    def value_of(self, part: Part) -> str:
        """The text of a part."""
        match part:
            case Text(text=text):
                return text
            case Sum(text=text):
                return self.sum_of(text)
            case Result():
                return COMMAND
            case Variable() as variable:
                return self.variable(variable)
        raise AssertionError("all kinds of parts are listed")

    def variable(self, variable: Variable) -> str:
        """The value of a variable, its default, or a mark."""
        if self.takes_default(variable):
            default = self.joined_text(variable.default)
            if variable.operator.endswith("="):
                self.variables[variable.name] = default
            return default
        text = self.text_named(variable)
        if variable.operator in ("+", ":+"):
            return ""
        if text is not None and not self.is_missing(variable):
            return text
        return "" if variable.name in ("@", "*") else UNSET.format(variable.name)

    def text_named(self, variable: Variable) -> str | None:
        """The value of a variable as one text; an array gives its first item, or with @ all."""
        value = self.value_named(variable.name)
        if not isinstance(value, list):
            return value
        if variable.takes_all:
            return " ".join(value)
        return value[0] if value else ""

    def is_missing(self, variable: Variable) -> bool:
        """Whether a variable is not set, or empty where its operator asks for more."""
        text = self.text_named(variable)
        return text is None or (text == "" and ":" in variable.operator)

    def takes_default(self, variable: Variable) -> bool:
        """Whether the text after the operator is in place of the value."""
        operator = variable.operator.removeprefix(":")
        if operator == "+":
            return not self.is_missing(variable)
        return operator in ("-", "=") and self.is_missing(variable)

    def joined_text(self, parts: Sequence[Part]) -> str:
        """The text of parts, not divided at blanks."""
        texts = []
        for part in parts:
            texts.append(" ".join(self.values_of(part)))
        require_short(texts)
        return "".join(texts)

    def text_of(self, word: Word) -> str:
        """The text of a word, not divided at blanks."""
        return self.joined_text(word.parts)

    def sum_of(self, text: str) -> str:
        """The value of whole numbers and variables with + - * / %; a mark for anything else."""
        filled = NUMBER_NAME.sub(self._number_of, text)
        value = whole_result(filled) if len(filled) < 200 else None
        return COMMAND if value is None else str(value)

    def _number_of(self, match: re.Match[str]) -> str:
        """The value of a variable in a sum; its own text where that is no number."""
        name = match.group().strip("${}")
        value = self.value_named(name)
        return value if isinstance(value, str) and value.isdecimal() else match.group()


def add_text(fields: list[str], text: str, *, part: Part, is_open: bool) -> bool:
    """Add the text of a part to fields; whether the next part continues the last one."""
    if part.is_quoted:
        pieces = [text]
    else:
        pieces = text.split()
        if not pieces:
            return is_open and not text
        is_open = is_open and not text[0].isspace()
    if is_open:
        fields[-1] += pieces.pop(0)
    fields += pieces
    ends_field = not part.is_quoted and text[-1:].isspace()
    return not ends_field


def appended(old: Value, new: Value) -> Value:
    """The value of `NAME+=...`: texts are joined, and an array gets further items."""
    if isinstance(old, str) and isinstance(new, str):
        return old + new
    if isinstance(old, str):
        old = [old] if old else []  # an empty text is no item
    return [*old, *new] if isinstance(new, list) else [*old, new]


def require_short(value: Value) -> None:
    """Check that a value is not longer than any launch script needs.

    Raises:
        ConfigError: it is.
    """
    length = len(value) if isinstance(value, str) else sum(map(len, value)) + len(value)
    if length > MAX_VALUE:
        raise ConfigError(
            "the script has a value that is too long",
            why=f"variables and commands have at most {MAX_VALUE:,} characters",
            fix="name a file with the arguments alone",
        )


def whole_result(text: str) -> int | None:
    """The value of whole numbers with + - * / % and brackets; None for anything else.

    >>> whole_result("8*(2+1)"), whole_result("2**9"), whole_result("a")
    (24, None, None)
    """
    try:
        return _whole(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _whole(node: ast.expr) -> int:
    """The value of a node of an expression."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_whole(node.operand)
    if not isinstance(node, ast.BinOp):
        raise ValueError("no whole number")
    left = _whole(node.left)
    right = _whole(node.right)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return int(left / right)
        case ast.Mod():
            return left % right
    raise ValueError("no whole number")
