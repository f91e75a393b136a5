"""The model card of an exported folder, README.md."""

from pathlib import Path

from nanotrain.config.config import ModelConfig
from nanotrain.runs.files import write_text
from nanotrain.spec.counts import num_active_parameters, num_parameters
from nanotrain.spec.shape import ModelShape

CARD_FILE = "README.md"


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
