"""Tiny Hugging Face folders whose tokenizers begin and end a text in different ways.

bos        Llama with a BPE that adds <s>                         weights set by name, so that
gpt2       GPT-2: <|endoftext|> is BOS and EOS, nothing is added  values can be recorded
qwen       Qwen-2: no BOS, two ends in generation_config.json
unigram    Mistral with a Unigram that adds <s>, blanks are U+2581
no_bos     Llama with a BOS that is not added
eos        OLMo-2 with a BPE that ends every text with </s>
both       Qwen-3 with a WordLevel that adds <s> and </s>
"""

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog", "a cat sat on the mat and saw two dogs"]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": None,
}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
STARTS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
ENDS = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
BOTH = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])


@dataclass(frozen=True)
class Kind:
    """A kind of folder."""

    family: str
    train: Callable[[], Tokenizer]
    adds: Any = None  # post-processor
    bos: str | None = "<s>"
    eos: str = "</s>"


def byte_level_bpe(*specials: str) -> Tokenizer:
    """A byte-level BPE with special tokens at the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(specials),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer


def plain_bpe() -> Tokenizer:
    """A byte-level BPE with <s> and </s>."""
    return byte_level_bpe("<s>", "</s>")


def unigram() -> Tokenizer:
    """A Unigram whose words begin with U+2581."""
    words = sorted(set(" ".join(CORPUS).split()))
    pieces = {f"\u2581{word[:size]}" for word in words for size in (0, 2, 3)}
    pieces |= {letter for word in words for letter in word}
    scored = [(piece, -2.0 - 0.1 * index) for index, piece in enumerate(sorted(pieces))]
    vocabulary = [("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *scored]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    return tokenizer


def word_level() -> Tokenizer:
    """One token per word."""
    words = ["<s>", "</s>", "<unk>", *sorted(set(" ".join(CORPUS).split()))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


KINDS = {
    "bos": Kind("llama", plain_bpe, adds=STARTS),
    "gpt2": Kind(
        "gpt2",
        lambda: byte_level_bpe("<|endoftext|>"),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
    ),
    "qwen": Kind(
        "qwen2", lambda: byte_level_bpe("<|endoftext|>", "<|im_end|>"), bos=None, eos="<|im_end|>"
    ),
    "unigram": Kind("mistral", unigram, adds=STARTS),
    "no_bos": Kind("llama", plain_bpe),
    "eos": Kind("olmo2", plain_bpe, adds=ENDS),
    "both": Kind("qwen3", word_level, adds=BOTH),
}


def write_folder(name: str, folder: Path) -> Path:
    """Write the folder of a kind; returns it."""
    kind = KINDS[name]
    tokenizer = kind.train()
    if kind.adds is not None:
        tokenizer.post_processor = kind.adds
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=kind.bos, eos_token=kind.eos, pad_token=kind.eos
    )
    fast.save_pretrained(folder)
    write_model(folder, kind.family, vocab_size=len(fast), eos_token_id=fast.eos_token_id)
    return folder


def write_model(folder: Path, family: str, **options: Any) -> None:
    """Write weights that depend on their names alone."""
    sizes = GPT2_SIZES if family == "gpt2" else SIZES
    extra = {"head_dim": 8} if family == "qwen3" else {}
    config = transformers.AutoConfig.for_model(
        family, **sizes, **extra, **options, bos_token_id=None
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter_name, weight in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(parameter_name.encode()))
        noise = torch.randn(weight.shape, generator=generator) * 0.3
        weight.data.copy_(1.0 + noise if weight.dim() == 1 and "norm" in parameter_name else noise)
    model.generation_config = transformers.GenerationConfig(eos_token_id=options["eos_token_id"])
    model.save_pretrained(folder)


def edit_json(file: Path, **fields: Any) -> None:
    """Set fields of a JSON file, which is created if absent; None removes a field."""
    content = json.loads(file.read_text()) if file.exists() else {}
    content |= fields
    kept = {name: value for name, value in content.items() if value is not None}
    file.write_text(json.dumps(kept))
