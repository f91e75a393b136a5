"""A model card names the repository, and a tokenizer only where the folder has one."""

from pathlib import Path

import pytest

from nanotrain.interop.hf.card import CARD_FILE, model_card, name_card
from tests.model.building import LLAMA


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_card_names_the_repository_and_only_what_is_there(tmp_path: Path, has_tokenizer: bool) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    card = model_card(LLAMA, name="out", family="llama", dtype="fp32", has_tokenizer=has_tokenizer)
    (folder / CARD_FILE).write_text(card)
    name_card(folder, "me/model")
    text = (folder / CARD_FILE).read_text()
    assert text == model_card(LLAMA, name="me/model", family="llama", dtype="fp32", has_tokenizer=has_tokenizer)
    assert text.count('from_pretrained("me/model")') == 1 + has_tokenizer and "\n# me/model\n" in text
    assert ("Tokenizer" in text) == has_tokenizer and "out" not in text
