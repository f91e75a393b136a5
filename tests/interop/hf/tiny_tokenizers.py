"""Small tokenizers of every kind, trained here: bare ones, and those of model families with their
settings.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "def f(x):\n    return x + 1\n",
    "größer als – 日本語\n",
    "low lower lowest new 123 4567",
    "I'm we'll e\u0301",
] * 9
TEXTS = (
    "",
    " ",
    "a b",
    "  two  blanks \n\n\ttab ",
    "größer é e\u0301 日本語 👩\u200d👧",
    "x<|endoftext|></s>[SEP] <eos>y",
)
GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + GPT4[GPT4.index("| ?") :]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(*special: str, pattern: str | None = None) -> Tokenizer:
    """As GPT-2's, or with the pattern of a newer family."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"), rest]
        )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {
        "vocab_size": 300,
        "initial_alphabet": alphabet,
        "special_tokens": list(special),
        "show_progress": False,
    }
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(**options))
    return backend


def pieces(*special: str, prefix: bool) -> Tokenizer:
    """BPE with U+2581 for blanks and bytes for unknown characters, as converted from sentencepiece."""
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    if prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), backend.normalizer])
    else:
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    options = {"vocab_size": 400, "special_tokens": [*special, *BYTES], "show_progress": False}
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(**options))
    content = json.loads(backend.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] in special
    ]
    return Tokenizer.from_str(json.dumps(content))


def unigram() -> Tokenizer:
    """A sentencepiece model of the other kind, as T5's."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    options = {"vocab_size": 90, "special_tokens": ["<pad>", "</s>", "<unk>"], "unk_token": "<unk>"}
    backend.train_from_iterator(CORPUS, trainers.UnigramTrainer(**options, show_progress=False))
    return backend


def words(model: Any, trainer: Any, *special: str) -> Tokenizer:
    """A tokenizer that splits at blanks."""
    backend = Tokenizer(model(unk_token=special[0]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(
        CORPUS, trainer(vocab_size=90, special_tokens=list(special), show_progress=False)
    )
    return backend


def llama3() -> Tokenizer:
    backend = byte_level("<|begin_of_text|>", "<|end_of_text|>", pattern=GPT4)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    return backend


def qwen() -> Tokenizer:
    backend = byte_level("<|endoftext|>", "<|im_start|>", "<|im_end|>", pattern=QWEN)
    backend.normalizer = normalizers.NFC()
    return backend


BOS = {"__type": "AddedToken", "content": "<bos>"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any] | None]] = {
    "byte-level": (lambda: byte_level("<|endoftext|>"), None),
    "bpe": (lambda: words(models.BPE, trainers.BpeTrainer, "<unk>", "<eos>"), None),
    "unigram": (unigram, None),
    "wordpiece": (
        lambda: words(models.WordPiece, trainers.WordPieceTrainer, "[UNK]", "[CLS]", "[SEP]"),
        None,
    ),
    "words": (lambda: words(models.WordLevel, trainers.WordLevelTrainer, "<unk>", "</s>"), None),
    "sentencepiece": (lambda: pieces("<unk>", "<s>", "</s>", prefix=True), None),
    "t5": (unigram, {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>"}),
    "llama2": (
        lambda: pieces("<unk>", "<s>", "</s>", prefix=True),
        {
            "tokenizer_class": "LlamaTokenizer",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": True,
        },
    ),
    "llama3": (llama3, {**FAST, "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}),
    "qwen3": (
        qwen,
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None},
    ),
    "gemma3": (
        lambda: pieces(
            "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", prefix=False
        ),
        {"tokenizer_class": "GemmaTokenizer", "bos_token": BOS, "eos_token": "<eos>"},
    ),
    "gpt-oss": (
        lambda: byte_level(
            "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", pattern=GPT4
        ),
        {**FAST, "bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
    ),
}


def write_tokenizer(kind: str, folder: Path) -> str:
    """Write a tokenizer: a lone tokenizer.json, or a folder with settings; returns what
    `load_tokenizer` takes.
    """
    make, settings = KINDS[kind]
    folder.mkdir(parents=True)
    make().save(str(folder / "tokenizer.json"))
    if settings is None:
        return str(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"temperature": 0.25}')
    return str(folder)
