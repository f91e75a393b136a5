"""Follow a shell script without running anything: its variables, and the commands that it launches.

    read_script(text)    the launches of Python programs, and the variables at the end

Assignments, arrays, `if`, `case`, functions, `for` over words and `sh -c TEXT` are followed. A
variable that the script does not set is a mark in the text, and so is what a command prints;
neither the environment nor a file is read. A test that depends on one of those is taken as false,
and other loops are left out: both are named if they hold arguments.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from nanotrain.audit.shell_tests import combined, simple_truth, truth_of
from nanotrain.audit.shell_values import (
    MARK,
    Value,
    Values,
    appended,
    require_short,
    without_marks,
)
from nanotrain.audit.shell_words import ASSIGNMENT, Text, Token, Word, read_tokens
from nanotrain.errors import ConfigError

MAX_DEPTH = 8  # functions and scripts within each other
MAX_BLOCKS = 50  # within each other
MAX_COMMANDS = 20_000
MAX_TURNS = 200  # of a loop
SEPARATORS = ("\n", ";", "&&", "||", "|", "&")
TESTS = ("[", "[[", "test")
DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
SILENT = ("echo", "printf", "cat", "read", "set", "shift", "unset", "exit", "return", "trap")
# what a published script leaves to the reader: NAME=<Specify path>, and <path> elsewhere
UNSET_BY_HAND = re.compile(
    r"^[ \t]*(?:export[ \t]+)?[A-Za-z_]\w*=<[^<>\n]*>[^\s;]*", flags=re.MULTILINE
)
PLACEHOLDER = re.compile(r"(?<![<\w&])<([A-Za-z][\w /.,-]*\w)>(?![>&(])")
LEAVES_LOOP = ("break", "continue", "exit", "return")


@dataclass
class Script:
    """The variables that a script sets, and the programs that it launches."""

    values: Values
    launches: list[list[str]] = field(default_factory=list)  # commands with a Python file
    loose: list[str] = field(default_factory=list)  # lines of arguments without a command
    notes: list[str] = field(default_factory=list)  # commands that were left out
    num_commands: int = 0

    @property
    def variables(self) -> dict[str, Value]:
        """The variables at the end."""
        return self.values.variables

    def note(self, text: str) -> None:
        """Add a note once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass
class Chain:
    """Commands that are joined with && and ||."""

    holds: bool | None = True  # the commands so far; None: not known, which counts as false
    runs: bool = True  # whether the next command does
    goes_on: bool = False  # whether && or || was the last word

    @property
    def is_unknown(self) -> bool:
        """Whether the last command was skipped for a test that is not known."""
        return not self.runs and self.holds is None

    def add(self, status: bool | None) -> None:
        """Add a command, with whether it held if it ran."""
        if self.runs:
            self.holds = status
        self.goes_on = False

    def separate(self, separator: str) -> None:
        """Go on behind a separator.

        >>> chain = Chain(holds=False)
        >>> chain.separate("&&")
        >>> chain.runs
        False
        """
        if separator == "|" or (separator == "\n" and self.goes_on):
            return
        self.goes_on = separator in ("&&", "||")
        if not self.goes_on:
            self.holds = True
        self.runs = (self.holds is True) == (separator != "||")


def read_script(text: str, *, variables: Mapping[str, str]) -> Script:
    """The launches and variables of a script.

    Args:
        text: the script.
        variables: values of variables that stand in place of the environment.

    Raises:
        ConfigError: it cannot be read.

    >>> read_script('A="--lr 1"; torchrun p.py $A', variables={}).launches
    [['torchrun', 'p.py', '--lr', '1']]
    """
    script = Script(Values(dict(variables)))
    text = without_placeholders(text.replace("\ue000", ""))
    Reader(script, read_tokens(text)).run()
    return script


def without_placeholders(text: str) -> str:
    r"""A script in which `<Specify path>` is the value of a variable that is not set.

    >>> without_placeholders("A=<your path>/x\npython p.py --save <your path>")
    '\npython p.py --save $your_path'
    """
    text = UNSET_BY_HAND.sub("", text)
    return PLACEHOLDER.sub(lambda match: "$" + re.sub(r"\W", "_", match.group(1)), text)


class Reader:
    """A position in the tokens of a script."""

    def __init__(self, script: Script, tokens: Sequence[Token], *, depth: int = 0) -> None:
        self.script = script
        self.values = script.values
        self.tokens = tokens
        self.depth = depth
        self.at = 0
        self.nesting = 0  # blocks around the current command
        self.status: bool | None = True  # whether the last command held; None: not known
        self.functions: dict[str, Sequence[Token]] = {}

    def run(self) -> None:
        """Follow all commands."""
        while self.at < len(self.tokens):
            self.follow(until=(), is_active=True)
            self.at += 1  # an operator that ends no block here

    def peek(self) -> Token:
        """The next token; a line end after the last one."""
        return self.tokens[self.at] if self.at < len(self.tokens) else "\n"

    def keyword(self) -> str:
        """The next token as an operator or a plain word; empty for other words."""
        token = self.peek()
        return token if isinstance(token, str) else token.plain

    def follow(self, *, until: Collection[str], is_active: bool) -> None:
        """Follow commands up to a keyword, which is not consumed.

        Args:
            until: keywords that end the block.
            is_active: whether the commands would run.
        """
        chain = Chain()
        while self.at < len(self.tokens):
            keyword = self.keyword()
            if keyword in until or (keyword in (")", ";;") and not until):
                return
            if keyword in SEPARATORS:
                self.at += 1
                chain.separate(keyword)
                continue
            start = self.at
            self.status = True
            self.statement(keyword, is_active=is_active and chain.runs)
            chain.add(self.status)
            if is_active and chain.is_unknown:
                self.note_skipped("a command that depends on what is not known", start)

    def statement(self, keyword: str, *, is_active: bool) -> None:
        """Follow one command or one block."""
        self.nesting += 1
        self.count_command()
        self.block_or_command(keyword, is_active=is_active)
        self.nesting -= 1

    def block_or_command(self, keyword: str, *, is_active: bool) -> None:
        """Follow the block that a keyword begins, or a simple command."""
        if keyword == "if":
            self.follow_if(is_active=is_active)
        elif keyword in ("for", "while", "until", "select"):
            self.follow_loop(is_active=is_active)
        elif keyword == "case":
            self.follow_case(is_active=is_active)
        elif keyword in ("{", "("):
            self.at += 1
            self.follow(until=("}" if keyword == "{" else ")",), is_active=is_active)
            self.at += 1
        elif self.begins_function(keyword):
            self.define_function(keyword)
        elif keyword in (")", ";;"):
            self.at += 1
        else:
            words = self.simple_command()
            if is_active:
                self.execute(words)
                self.status = self.test(words) if self.begins_test(words) else True

    def count_command(self) -> None:
        """Count a command.

        Raises:
            ConfigError: too many.
        """
        self.script.num_commands += 1
        is_deep = self.depth > MAX_DEPTH or self.nesting > MAX_BLOCKS
        if self.script.num_commands > MAX_COMMANDS or is_deep:
            raise ConfigError(
                "the script is too long to follow",
                why=f"at most {MAX_COMMANDS:,} commands are read, {MAX_BLOCKS} blocks deep",
                fix="name a file with the arguments alone",
            )

    def begins_function(self, keyword: str) -> bool:
        """Whether a function definition begins: `function NAME` or `NAME ()`."""
        if keyword == "function":
            return True
        return bool(keyword) and list(self.tokens[self.at + 1 : self.at + 3]) == ["(", ")"]

    def define_function(self, keyword: str) -> None:
        """Keep the tokens of a function."""
        self.at += 1
        name = keyword
        if keyword == "function":
            name = self.keyword()
            self.at += 1
        while self.keyword() in ("(", ")", "\n"):
            self.at += 1
        start = self.at
        self.statement(self.keyword(), is_active=False)
        self.functions[name] = self.tokens[start : self.at]

    def simple_command(self) -> list[Word]:
        """The words of a command; in `[[ ]]` operators are words."""
        words: list[Word] = []
        is_test = self.keyword() == "[["
        while self.at < len(self.tokens):
            token = self.peek()
            if isinstance(token, Word):
                words.append(token)
                is_test = is_test and token.plain != "]]"
            elif is_test and token != "\n":
                words.append(Word((Text(is_quoted=False, text=token),)))
            elif token in SEPARATORS or token in (")", ";;", "("):
                break
            self.at += 1
        if not words:
            self.at += 1
        return words

    def follow_if(self, *, is_active: bool) -> None:
        """Follow the branches of an `if` whose conditions hold."""
        has_run = False
        while self.keyword() in ("if", "elif"):
            self.at += 1
            holds = self.condition(is_active=is_active and not has_run)
            self.at += 1  # then
            start = self.at
            runs = is_active and not has_run and bool(holds)
            self.follow(until=("elif", "else", "fi"), is_active=runs)
            if is_active and not has_run and holds is None:
                self.note_skipped("an if that depends on what is not known", start)
            has_run = has_run or runs
        if self.keyword() == "else":
            self.at += 1
            self.follow(until=("fi",), is_active=is_active and not has_run)
        self.at += 1  # fi

    def condition(self, *, is_active: bool) -> bool | None:
        """The truth of the commands up to `then`; None if it is not known."""
        value: bool | None = True
        operator = "&&"
        while self.at < len(self.tokens) and self.keyword() != "then":
            token = self.peek()
            if isinstance(token, str):
                operator = token if token in ("&&", "||") else operator
                self.at += 1
                continue
            words = self.simple_command()
            holds = self.test(words) if is_active else None
            value = combined(value, holds, operator=operator)
            operator = "&&"
        return value

    def test(self, words: Sequence[Word]) -> bool | None:
        """The truth of a test; None if the command is no test, or its truth is unknown."""
        texts = [self.values.text_of(word) for word in words]
        is_negated = bool(texts) and texts[0] == "!"
        if is_negated:
            texts = texts[1:]
        if len(texts) < 2 or texts[0] not in TESTS:
            return None
        value = truth_of(texts[1:] if texts[0] == "test" else texts[1:-1])
        if is_negated and value is not None:
            return not value
        return value

    def begins_test(self, words: Sequence[Word]) -> bool:
        """Whether a command is a test, whose truth is its status."""
        plain = [word.plain for word in words[:2] if word.plain != "!"]
        return bool(plain) and plain[0] in TESTS

    def follow_case(self, *, is_active: bool) -> None:
        """Follow the first branch of a `case` whose pattern fits."""
        self.at += 1
        token = self.peek()
        text = self.values.text_of(token) if isinstance(token, Word) and is_active else ""
        has_run = not is_active or MARK.search(text) is not None
        self.at += 1
        while self.at < len(self.tokens) and self.keyword() != "esac":
            if self.keyword() in ("\n", ";;", "(", "in"):
                self.at += 1
                continue
            fits = self.fits_pattern(text)
            self.follow(until=(";;", "esac"), is_active=fits and not has_run)
            has_run = has_run or fits
        self.at += 1

    def fits_pattern(self, text: str) -> bool:
        """Whether a text fits the patterns up to a closing bracket, which is consumed."""
        fits = False
        while self.at < len(self.tokens) and self.peek() != ")":
            token = self.peek()
            if isinstance(token, Word) and not fits:
                fits = simple_truth([text, "==", self.values.text_of(token)]) is True
            self.at += 1
        self.at += 1
        return fits

    def follow_loop(self, *, is_active: bool) -> None:
        """Follow a `for` once per word; skip a loop whose turns are not known."""
        start = self.at
        is_for = self.keyword() == "for"
        self.at += 1
        name = self.keyword()
        turns = self.words_of_loop() if is_for and is_active else None
        self.follow(until=("do",), is_active=False)
        self.at += 1
        body = self.at
        self.follow(until=("done",), is_active=False)
        end = self.at
        if turns is not None and not self.leaves_loop(body, end):
            for text in turns:
                self.values.variables[name] = text
                self.at = body
                self.follow(until=("done",), is_active=True)
        elif is_active:
            self.note_skipped("a loop", start)
        self.at = end + 1

    def words_of_loop(self) -> list[str] | None:
        """The words of `for NAME in WORDS`, at NAME; None where they are not known."""
        self.at += 1
        if self.keyword() != "in":
            return None
        self.at += 1
        if self.keyword() in SEPARATORS:
            return []
        fields = self.values.fields(self.simple_command())
        is_known = len(fields) <= MAX_TURNS and not any(map(MARK.search, fields))
        return fields if is_known else None

    def leaves_loop(self, start: int, end: int) -> bool:
        """Whether a loop may end before its last word."""
        words = [token.plain for token in self.tokens[start:end] if isinstance(token, Word)]
        return any(word in LEAVES_LOOP for word in words)

    def note_skipped(self, what: str, start: int) -> None:
        """Note skipped commands that set arguments."""
        for token in self.tokens[start : self.at]:
            flag = assigned_flag(token) if isinstance(token, Word) else ""
            if flag:
                self.script.note(f"{what} is left out, with {flag}")
                return

    def execute(self, words: list[Word]) -> None:
        """Follow a command: assignments, functions, and launches of Python files."""
        while words and self.assign(words[0]):
            words = words[1:]
        name = words[0].plain if words else ""
        if name in DECLARATIONS:
            for word in words[1:]:
                self.assign(word)
        elif name in self.functions:
            self.call(name, words[1:])
        elif name == "shift":
            self.shift(self.values.fields(words[1:]))
        elif name == ":":
            self.values.fields(words[1:])  # sets what ${NAME:=TEXT} sets
        elif name in ("source", "."):
            texts = [without_marks(self.values.text_of(word)) for word in words[1:2]]
            self.script.note(f"{' '.join(texts)} is not read, which the script sources")
        elif words and name not in SILENT:
            self.launch(self.values.fields(words))

    def call(self, name: str, words: Sequence[Word]) -> None:
        """Follow a function, in which `$1` and `$@` are its arguments."""
        outer = self.values.arguments
        self.values.arguments = self.values.fields(words)
        reader = Reader(self.script, self.functions[name], depth=self.depth + 1)
        reader.functions = self.functions
        reader.run()
        self.values.arguments = outer

    def shift(self, fields: Sequence[str]) -> None:
        """Leave out the first arguments of the function, one where no number says how many."""
        number = fields[0] if fields else "1"
        if self.values.arguments is not None and number.isdecimal():
            self.values.arguments = self.values.arguments[int(number) :]

    def assign(self, word: Word) -> bool:
        """Whether a word is an assignment, which is carried out."""
        first = word.parts[0] if word.parts else None
        if not isinstance(first, Text) or first.is_quoted:
            return False
        match = ASSIGNMENT.match(first.text)
        if match is None:
            return False
        name, plus = match.groups()
        if word.items is not None:
            new: Value = self.values.fields(word.items)
        else:
            rest = Text(is_quoted=False, text=first.text[match.end() :])
            new = self.values.joined_text((rest, *word.parts[1:]))
        if plus:
            new = appended(self.values.variables.get(name, ""), new)
        require_short(new)
        self.values.variables[name] = new
        return True

    def launch(self, fields: list[str]) -> None:
        """Keep a command that runs a Python file, and follow a script that is an argument."""
        if not fields:
            return
        if fields[0].startswith("--"):
            self.script.loose += fields
            return
        scripts = [text for text in fields if ".py" in text and len(text.split()) > 2]
        if fields[0] == "eval":
            scripts = [" ".join(fields[1:])]
        if any(text.endswith(".py") for text in fields) or (not scripts and has_flags(fields)):
            self.script.launches.append(fields)
            return
        for text in scripts:
            tokens = read_tokens(text)
            Reader(self.script, tokens, depth=self.depth + 1).run()


def has_flags(fields: Sequence[str]) -> bool:
    """Whether a command has several long flags, as a launch has."""
    return sum(text.startswith("--") for text in fields) > 2


def assigned_flag(word: Word) -> str:
    """The first flag in a value that a word assigns; empty without one."""
    if ASSIGNMENT.match(text_in(word)) is None:
        return ""
    texts = [ASSIGNMENT.sub("", text_in(word), count=1), *map(text_in, word.items or ())]
    flags = [text.split()[0] for text in texts if text.strip().startswith("--")]
    return flags[0] if flags else ""


def text_in(word: Word) -> str:
    """The literal text in a word."""
    return "".join(part.text for part in word.parts if isinstance(part, Text))
