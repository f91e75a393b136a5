"""What a Hugging Face folder has beside weights and tokenizer: generation_config.json and the model card, README.md."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanotrain.config.config import ModelConfig
from nanotrain.runs.files import write_text
from nanotrain.topology.counts import num_active_parameters, num_parameters
from nanotrain.topology.shape import ModelShape

GENERATION_FILE, CARD_FILE = "generation_config.json", "README.md"


def write_generation_config(folder: Path, entries: Mapping[str, Any], *, source: Path | None) -> None:
    """That of the model that the tokenizer is from; otherwise the ids of the special tokens, where they are known.

    Args:
        folder: of the weights.
        entries: of config.json that name special tokens.
        source: the folder of the tokenizer, or its file.
    """
    inherited = None if source is None else source / GENERATION_FILE
    if inherited is not None and inherited.is_file():
        write_text(folder / GENERATION_FILE, inherited.read_text())
    elif entries:
        write_text(folder / GENERATION_FILE, json.dumps(dict(entries), indent=2, sort_keys=True) + "\n")


def model_card(model_config: ModelConfig, *, name: str, family: str, dtype: str, has_tokenizer: bool) -> str:
    """The text of a model card: what the hub reads of it, the sizes of the model, and how it is loaded."""
    shape = ModelShape.of(model_config)
    total, active = num_parameters(shape), num_active_parameters(shape)
    positions = model_config.max_position_embeddings
    experts = f" ({active:,} active per token)" if active < total else ""
    classes = "AutoModelForCausalLM, AutoTokenizer" if has_tokenizer else "AutoModelForCausalLM"
    tokenizer = f"\ntokenizer = AutoTokenizer.{_loaded(name)}" if has_tokenizer else ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- nanotrain
- {family}
---

# {name}

A language model trained with nanotrain: {total:,} parameters{experts}, {shape.num_layers} layers of width
{shape.hidden_size:,}, a vocabulary of {shape.vocab_size:,} tokens and up to {positions:,} positions.
The weights are {dtype}, with the names of the family `{family}`.

```python
from transformers import {classes}

model = AutoModelForCausalLM.{_loaded(name)}{tokenizer}
```
"""


def name_card(folder: Path, name: str) -> None:
    """Give the model card of an exported folder the name of the repository that the folder is uploaded to."""
    before, card = folder.resolve().name, folder / CARD_FILE
    text = card.read_text().replace(f"\n# {before}\n", f"\n# {name}\n").replace(_loaded(before), _loaded(name))
    write_text(card, text)


def _loaded(name: str) -> str:
    return f'from_pretrained("{name}")'
