"""The program that renders chat templates, without its process."""

from pathlib import Path

import pytest

from nanotrain.errors import DataError
from nanotrain.prepare.chat_template import ChatEncoder
from tests.prepare.test_chat import TALK, save_tokenizer


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
    ],
)
def test_a_template_that_fails_is_one_error(template: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"the chat template refuses it: .*{why}"):
        ChatEncoder(save_tokenizer(tmp_path, template)).encode(TALK)
