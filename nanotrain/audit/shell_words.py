"""The words of a shell script and the expansions in them; nothing is expanded or run here.

read_tokens     text -> words and operators
Word            a word: literal text, variables, sums and results of commands, in order

Comments, redirections and here-documents are left out, but for a document that a shell runs: it is
the argument of an `eval`. The grammar is that of POSIX sh with the arrays and `[[ ]]` of bash.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from nanotrain.errors import ConfigError

MAX_NESTING = 16  # defaults of variables within defaults
OPERATORS = (";;", "&&", "||", ";", "&", "|", "(", ")")
ENDS_WORD = " \t\n;&|()<>"
SHELLS = ("sbatch", "bash", "sh", "srun")  # they run a here-document
REDIRECTION = re.compile(r"\d*(?:<<<|<<-|<<|<&|<>|>>|>&|>\||<|>)|&>>?")
NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*|[0-9@*#?$!-]")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z_0-9]*)(\+?)=")
IN_BRACES = re.compile(
    r"([A-Za-z_][A-Za-z_0-9]*|[0-9]+|[@*])(\[[@*0]\])?(?:(:?[-=+?])(.*))?", flags=re.DOTALL
)


@dataclass(frozen=True)
class Part:
    """A part of a word that is in or out of quotes."""

    is_quoted: bool


@dataclass(frozen=True)
class Text(Part):
    """Literal text."""

    text: str


@dataclass(frozen=True)
class Variable(Part):
    """The value of a variable or of a parameter."""

    name: str
    operator: str = ""  # as :- and + of ${NAME:-TEXT}
    default: tuple[Part, ...] = ()  # TEXT
    takes_all: bool = False  # all items of an array
    is_joined: bool = False  # in quotes all items are one word: [*]


@dataclass(frozen=True)
class Sum(Part):
    """The value of `$((TEXT))`."""

    text: str


@dataclass(frozen=True)
class Result(Part):
    """The output of a command, or another value that is not computed."""


@dataclass(frozen=True)
class Word:
    """A word of a command."""

    parts: tuple[Part, ...]
    items: tuple["Word", ...] | None = None  # of an array that it assigns

    @property
    def plain(self) -> str:
        """The text of a word that is literal and without quotes, else empty."""
        if len(self.parts) != 1 or self.items is not None:
            return ""
        part = self.parts[0]
        return part.text if isinstance(part, Text) and not part.is_quoted else ""


Token = Word | str


def read_tokens(text: str, *, depth: int = 0) -> list[Token]:
    """The words and operators of a script, with "\\n" for the end of a line.

    Raises:
        ConfigError: quotes or braces that do not end, or defaults that are nested too deeply.

    >>> [token.plain for token in read_tokens("torchrun a.py # train") if token != "\\n"]
    ['torchrun', 'a.py']
    """
    return _Reader(text, depth).tokens()


class _Reader:
    """A position in the text of a script."""

    def __init__(self, text: str, depth: int) -> None:
        require_shallow(depth)
        self.text = text
        self.depth = depth
        self.at = 0
        self.first = ""  # word of the current line
        # ends of the here-documents that begin at the next line, and whether a shell runs them
        self.here_documents: list[tuple[str, bool]] = []

    def tokens(self) -> list[Token]:
        """All tokens up to the end."""
        tokens: list[Token] = []
        while self.skip_space():
            token = self.next_token()
            if token is None:
                continue
            tokens.append(token)
            if token == "\n":
                self.first = ""
                tokens += self.read_here_documents()
            elif isinstance(token, Word):
                self.first = self.first or token.plain
        return tokens

    def peek(self, length: int = 1) -> str:
        """The next characters."""
        return self.text[self.at : self.at + length]

    def skip_space(self) -> bool:
        """Skip blanks, joined lines and comments; returns whether text is left."""
        while self.at < len(self.text):
            if self.peek() in " \t\r":
                self.at += 1
            elif self.peek(2) == "\\\n":
                self.at += 2
            elif self.peek() == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return True
        return False

    def next_token(self) -> Token | None:
        """The next token; None for a redirection, which is left out."""
        if self.peek() == "\n":
            self.at += 1
            return "\n"
        redirection = REDIRECTION.match(self.text, self.at)
        if redirection:
            self.skip_redirection(redirection)
            return None
        for operator in OPERATORS:
            if self.peek(len(operator)) == operator:
                self.at += len(operator)
                return operator
        return self.word()

    def skip_redirection(self, match: re.Match[str]) -> None:
        """Skip a redirection with its target; remember the line that ends a here-document."""
        self.at = match.end()
        if self.peek() == "(":  # a process in place of a file
            self.skip_brackets("(", ")")
            return
        if self.skip_space() and self.peek() not in ENDS_WORD:
            target = self.word()
            if match.group().endswith(("<<", "<<-")):
                texts = [part.text for part in target.parts if isinstance(part, Text)]
                self.here_documents.append(("".join(texts), self.first in SHELLS))

    def read_here_documents(self) -> list[Token]:
        """Skip the here-documents of the last line; returns the commands of scripts among them."""
        tokens: list[Token] = []
        for end, is_script in self.here_documents:
            start = self.at
            length = self.skip_lines(end)
            if is_script:
                reader = _Reader(self.text[start : start + length], self.depth + 1)
                call = Word((Text(is_quoted=False, text="eval"),))
                tokens += [call, Word(tuple(reader.document_parts())), "\n"]
        self.here_documents = []
        return tokens

    def skip_lines(self, end: str) -> int:
        """Skip lines through the one that is `end`; returns the characters before it."""
        start = self.at
        while self.at < len(self.text):
            before = self.at
            newline = self.text.find("\n", self.at)
            self.at = len(self.text) if newline < 0 else newline + 1
            if self.text[before : self.at].strip() == end:
                return before - start
        return self.at - start

    def word(self) -> Word:
        """A word, with the items of an array that it assigns."""
        parts = self.parts(ENDS_WORD)
        first = parts[0] if len(parts) == 1 else None
        if self.peek() != "(" or not isinstance(first, Text):
            if not parts:  # a character that begins no word
                self.at += 1
            return Word(tuple(parts))
        match = ASSIGNMENT.fullmatch(first.text)
        if match is None:
            return Word(tuple(parts))
        self.at += 1
        return Word(tuple(parts), self.items())

    def items(self) -> tuple[Word, ...]:
        """The words of an array up to its closing bracket."""
        start = self.at
        self.depth += 1
        require_shallow(self.depth)
        items: list[Word] = []
        while self.skip_space():
            token = self.next_token()
            if token == ")":
                self.depth -= 1
                return tuple(items)
            if isinstance(token, Word):
                items.append(token)
        raise self.unterminated("the brackets of an array are not closed", start)

    def parts(self, ends: str) -> list[Part]:
        """The parts of a word up to one of the characters that end it."""
        parts: list[Part] = []
        while self.at < len(self.text) and self.peek() not in (ends or "\0"):
            parts += self.next_parts(ends)
        return joined(parts)

    def next_parts(self, ends: str) -> list[Part]:
        """The parts that begin at the next character."""
        character = self.peek()
        if character == "'":
            return [self.single_quoted()]
        if character == '"':
            return self.double_quoted()
        if character in "$`":
            return [self.expansion(is_quoted=False)]
        if character == "\\":
            text = self.text[self.at + 1 : self.at + 2]
            self.at += 2
            return [] if text == "\n" else [Text(is_quoted=True, text=text)]
        return [Text(is_quoted=False, text=self.take_until(ends + "'\"$`\\"))]

    def single_quoted(self) -> Part:
        """The text between single quotes."""
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise self.unterminated("a single quote is not closed", self.at)
        text = self.text[self.at + 1 : end]
        self.at = end + 1
        return Text(is_quoted=True, text=text)

    def double_quoted(self) -> list[Part]:
        """The parts between double quotes; empty quotes are empty text."""
        start = self.at
        self.at += 1
        parts: list[Part] = [Text(is_quoted=True, text="")]
        while self.at < len(self.text):
            if self.peek() == '"':
                self.at += 1
                return parts
            parts.append(self.quoted_part('"'))
        raise self.unterminated("a double quote is not closed", start)

    def document_parts(self) -> list[Part]:
        """The parts of a here-document."""
        parts: list[Part] = []
        while self.at < len(self.text):
            parts.append(self.quoted_part(""))
        return joined(parts)

    def quoted_part(self, end: str) -> Part:
        """A part of quoted text, which a character ends."""
        if self.peek() in "$`":
            return self.expansion(is_quoted=True)
        if self.peek() == "\\":
            return self.escaped()
        return Text(is_quoted=True, text=self.take_until(end + "$`\\"))

    def escaped(self) -> Part:
        """The text of a backslash and a character between double quotes."""
        text = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        if text == "\n":
            return Text(is_quoted=True, text="")
        return Text(is_quoted=True, text=text if text in '$`"\\' else f"\\{text}")

    def take_until(self, ends: str) -> str:
        """The text up to one of some characters."""
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in ends:
            self.at += 1
        return self.text[start : self.at]

    def expansion(self, *, is_quoted: bool) -> Part:
        """The part that begins with a dollar sign or a backquote: a variable, command or sum."""
        start = self.at
        if self.peek() == "`":
            end = self.text.find("`", self.at + 1)
            self.at = len(self.text) if end < 0 else end + 1
            return Result(is_quoted=is_quoted)
        self.at += 1
        if self.peek() == "(":
            self.skip_brackets("(", ")")
            inner = self.text[start + 2 : self.at - 1]
            if inner.startswith("(") and inner.endswith(")"):
                return Sum(is_quoted=is_quoted, text=inner[1:-1])
            return Result(is_quoted=is_quoted)
        if self.peek() == "{":
            self.skip_brackets("{", "}")
            return self.in_braces(self.text[start + 2 : self.at - 1], is_quoted=is_quoted)
        if self.peek() == "'" and not is_quoted:
            return self.single_quoted()
        match = NAME.match(self.text, self.at)
        if match is None:
            return Text(is_quoted=is_quoted, text="$")
        self.at = match.end()
        name = match.group()
        return Variable(
            is_quoted=is_quoted, name=name, takes_all=name in "@*", is_joined=name == "*"
        )

    def in_braces(self, inner: str, *, is_quoted: bool) -> Part:
        """The expansion `${inner}`."""
        match = IN_BRACES.fullmatch(inner)
        if match is None:
            return Result(is_quoted=is_quoted)
        name, index, operator, text = match.groups()
        takes_all = name in "@*" or index in ("[@]", "[*]")
        default: list[Part] = []
        if text:
            default = _Reader(text, self.depth + 1).default_parts(is_quoted=is_quoted)
        return Variable(
            is_quoted=is_quoted,
            name=name,
            operator=operator or "",
            default=tuple(default),
            takes_all=takes_all,
            is_joined=name == "*" or index == "[*]",
        )

    def default_parts(self, *, is_quoted: bool) -> list[Part]:
        """The parts of the text of a default, in which blanks end no word."""
        parts = self.parts("")
        return [replace(part, is_quoted=True) for part in parts] if is_quoted else parts

    def skip_brackets(self, opening: str, closing: str) -> None:
        """Skip to the end of the brackets that begin here; brackets in quotes do not count."""
        start = self.at
        depth = 0
        while self.at < len(self.text):
            character = self.peek()
            self.at += 1
            if character == "\\":
                self.at += 1
            elif character == "'" and opening == "(":
                end = self.text.find("'", self.at)
                self.at = len(self.text) if end < 0 else end + 1
            elif character == opening:
                depth += 1
            elif character == closing:
                depth -= 1
                if depth == 0:
                    return
        raise self.unterminated(f"a {opening} is not closed", start)

    def unterminated(self, what: str, start: int) -> ConfigError:
        """The error for text that ends within quotes or brackets, which begin at `start`."""
        line = self.text.count("\n", 0, start) + 1
        return ConfigError(
            f"the script cannot be read: {what}, from line {line}",
            fix="check it with bash -n SCRIPT",
        )


def require_shallow(depth: int) -> None:
    """Check the depth of defaults within defaults, and of arrays within arrays.

    Raises:
        ConfigError: they are nested too deeply.
    """
    if depth > MAX_NESTING:
        raise ConfigError(
            "the script has variables within variables",
            why=f"more than {MAX_NESTING} levels are not read",
        )


def joined(parts: Iterable[Part]) -> list[Part]:
    """Parts in which neighbouring texts with the same quotes are joined."""
    result: list[Part] = []
    for key, group in groupby(parts, key=_kind_of):
        if key is None:
            result += group
        else:
            texts = [part.text for part in group if isinstance(part, Text)]
            result.append(Text(is_quoted=key, text="".join(texts)))
    return result


def _kind_of(part: Part) -> bool | None:
    """Whether a text is in quotes; None for other parts."""
    return part.is_quoted if isinstance(part, Text) else None
