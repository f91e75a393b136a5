"""What `nanotrain prepare` adds to the tokenizer of conversations: a template, and their end.

The template is that of `--chat-template`:

    chatml     <|im_start|>user
               2 + 2?<|im_end|>
               <|im_start|>assistant
               4<|im_end|>              the reply and its end are marked by {% generation %}
    FILE       a Jinja program, as chat_template.jinja in a tokenizer's folder

A BPE that is trained with a template has those of its special tokens that are spelled `<|name|>`,
so a model is pretrained with the vocabulary of its conversations. Marks of another spelling, as
`[INST]`, stay text. A tokenizer that is loaded keeps its vocabulary.

The end of a reply is added to the ends of texts in generation_config.json, so that the tokenizer of
a run and its exports have it.
"""

import re
from pathlib import Path

from nanotrain.data.tokenizer import FastTokenizer, Tokenizer
from nanotrain.data.tokenizer_files import (
    GENERATION_FILE,
    TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
    json_bytes,
)
from nanotrain.errors import DataError
from nanotrain.untrusted import object_of, parse_json, read_file, unreadable

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% set text = (message.content or '') + '<|im_end|>' %}"
    "{% if message.role == 'assistant' %}{% generation %}{{ text }}{% endgeneration %}"
    "{% else %}{{ text }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML}
MAX_BYTES = 1 << 20
_SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")


def read_template(name: str) -> str:
    """The chat template of a name of TEMPLATES or of a file.

    Raises:
        DataError: it is neither, or it is empty.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    try:
        template = read_file(Path(name), most=MAX_BYTES).decode()
        if not template.strip():
            raise ValueError("it is empty")
    except (OSError, ValueError) as error:
        raise DataError(
            f"--chat-template {name} cannot be read",
            why=unreadable(error),
            fix=f"name a file with a chat template, or one of {', '.join(TEMPLATES)}",
        ) from None
    return template


def special_tokens(template: str) -> tuple[str, ...]:
    """The special tokens of the form `<|name|>` that a template writes, in their order.

    >>> special_tokens("{{ '<|user|>' + m.content }}<|end|>{{ '<|user|>' }}")
    ('<|user|>', '<|end|>')
    >>> special_tokens("[INST]{{ m.content }}</s>")
    ()
    """
    return tuple(dict.fromkeys(_SPECIAL_TOKEN.findall(template)))


def with_template(tokenizer: Tokenizer, template: str) -> FastTokenizer:
    """The tokenizer with another chat template, for conversations with tools too.

    Raises:
        DataError: its files cannot hold one.
    """
    if not isinstance(tokenizer, FastTokenizer):
        raise DataError(
            "--chat-template with a tokenizer without tokenizer.json",
            why="the template is stored beside that file",
            fix="name another --tokenizer, or leave --chat-template out",
        )
    tokenizer.files[TEMPLATE_FILE] = template.encode()
    tokenizer.files.pop(TOOL_TEMPLATE_FILE, None)
    tokenizer.settings.pop("chat_template", None)  # an older form of the same file
    return tokenizer


def with_end(tokenizer: FastTokenizer, token: int) -> FastTokenizer:
    """The tokenizer with one more token that ends texts.

    Raises:
        DataError: its generation_config.json is damaged.
    """
    try:
        content = tokenizer.files.get(GENERATION_FILE, b"{}")
        settings = object_of(parse_json(content, allow_nan=True), "it")
        ends = settings.get("eos_token_id", tokenizer.eod)
        known = ends if isinstance(ends, list) else [ends]
        others = [end for end in known if end not in (None, token)]
    except ValueError as error:
        raise DataError(
            f"{GENERATION_FILE} of the tokenizer cannot be read",
            why=str(error),
            fix="correct or remove it",
        ) from None
    if token not in known:
        settings["eos_token_id"] = [token, *others]
        tokenizer.files[GENERATION_FILE] = json_bytes(settings)
    return tokenizer
