"""Folders with small tokenizers of every kind that model families publish, trained here.

KINDS         name -> function that writes the folder
write_kind    writes one
texts_for     texts of many languages and of odd characters, and with a tokenizer's own tokens
"""

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.interop.hf.tiny_tokenizers import CORPUS, GPT4, QWEN, byte_level, pieces, words

END = "<|endoftext|>"
DEEPSEEK = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", r"[\p{P}\p{S}]?\p{L}+| ?[\p{P}\p{S}]+|\s+")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
WORDS = (
    "the quick brown fox", "Größer als – naïve café", "e\u0301 o\u0308 a\u030a decomposed",
    "日本語 と 中文。漢字", "한국어 문장", "Привет, мир!", "العربية مرحبا", "עברית שלום",
    "हिन्दी नमस्ते", "ไทย สวัสดี", "Ελληνικά", "Tiếng Việt", "İstanbul ıİi", "ﬁne ﬂow ①②③ ｆｕｌｌ",
    "👩\u200d👧 🏳\ufe0f\u200d🌈 🙂👍🏽", "a\tb\t\tc", "line\nline\r\nline\rline", "\n\n\n", "  ", " ",
    "", " lead", "trail ", "a  b   c    d", "x" + " " * 40 + "y", "\x00\x01\x1b[0m\x7f", "\ufeffbom",
    "a\u00a0b\u2003c\u200bd\u2028e\u3000f", "\ufffd \ufffe \U0010ffff", "def f(x):\n    return x + 1\n",
    "if (a && b) { c[i] += 0x1F; } // ok", "<div class=\"x\">&amp;</div>", "https://a.b/c?d=e&f=%20",
    "1234567.89 1,000 3e-5 ½", "I'm we'LL they've don't 'tis", "``quoted'' \"text\" «x» “y”",
    "snake_case camelCase CONST_1", "$\\frac{1}{2}$ ∑∫√∞", "▁under ▁ bar Ġ Ċ", "<0x0A> <0xFF>",
    END, "</s>", "<s>", "<unk>", "[SEP] [CLS] [UNK] [MASK] [PAD]", "<|im_start|>user\nhi<|im_end|>",
    "x" + END + "y", "a <mask> b", "<pad><eos><bos>", "<new> <New> a<new>b", "low lower lowest",
)  # fmt: skip


def texts_for(special: Sequence[str]) -> list[str]:
    """300 texts, among them some with the tokens of a tokenizer.

    Args:
        special: texts of the tokenizer's added tokens.
    """
    texts = list(WORDS)
    for token in special[:12]:
        texts += [token, f"a{token}b", f"a {token} b", f" {token}{token}\n", f"{token.upper()} c"]
    for step in (1, 7, 11, 17, 23, 29):
        for number, word in enumerate(WORDS):
            texts.append(f"{word} {WORDS[(number + step) % len(WORDS)]}")
    return texts[:300]


def save(
    backend: Tokenizer,
    folder: Path,
    *,
    edit: Callable[[dict[str, Any]], object] | None = None,
    config: dict[str, Any] | None = None,
    special: dict[str, Any] | None = None,
    added: dict[str, int] | None = None,
    **settings: Any,
) -> None:
    """Write tokenizer.json, tokenizer_config.json and others."""
    definition = json.loads(backend.to_str())
    if edit is not None:
        edit(definition)
    contents = {
        "tokenizer.json": definition,
        "tokenizer_config.json": settings or None,
        "config.json": config,
        "special_tokens_map.json": special,
        "added_tokens.json": added,
    }
    for name, content in contents.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content, ensure_ascii=False))


@cache
def _definition(build: Callable[[], Tokenizer]) -> str:
    return build().to_str()


def trained(build: Callable[[], Tokenizer]) -> Tokenizer:
    """A tokenizer that is trained once in a process."""
    return Tokenizer.from_str(_definition(build))


def gpt2() -> Tokenizer:
    return byte_level(END)


def llama3() -> Tokenizer:
    return byte_level("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", pattern=GPT4)


def qwen() -> Tokenizer:
    backend = byte_level(END, "<|im_start|>", "<|im_end|>", pattern=QWEN)
    backend.normalizer = normalizers.NFC()
    return backend


def roberta() -> Tokenizer:
    backend = byte_level("<s>", "<pad>", "</s>", "<unk>")
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return backend


def deepseek() -> Tokenizer:
    backend = byte_level("<s>", "</s>")
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in DEEPSEEK]
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, rest])
    return backend


def sentencepiece() -> Tokenizer:
    return pieces("<unk>", "<s>", "</s>", prefix=True)


def gemma() -> Tokenizer:
    return pieces("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", prefix=False)


def metaspace(scheme: str, *, fallback: bool = True) -> Tokenizer:
    backend = pieces("<unk>", "<s>", "</s>", prefix=True)
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme != "never")
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if not fallback:
        definition = json.loads(backend.to_str())
        definition["model"] |= {"byte_fallback": False, "unk_token": None}
        backend = Tokenizer.from_str(json.dumps(definition))
    return backend


def unigram(*special: str, normalizer: Any = None, fallback: bool = False) -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizer or normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    unknown = next(token for token in special if "unk" in token)
    backend.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=90, special_tokens=list(special), unk_token=unknown, show_progress=False
        ),
    )
    if fallback:
        definition = json.loads(backend.to_str())
        definition["model"]["byte_fallback"] = True
        definition["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
        backend = Tokenizer.from_str(json.dumps(definition))
    return backend


def bert(*, lowercase: bool) -> Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return backend


def clip() -> Tokenizer:
    backend = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token=END))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|startoftext|>", END],
        initial_alphabet=[*alphabet, *(f"{letter}</w>" for letter in alphabet)],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def level(normalizer: Any) -> Tokenizer:
    backend = words(models.WordLevel, trainers.WordLevelTrainer, "<unk>", "</s>")
    backend.normalizer = normalizer
    return backend


def with_added(*tokens: AddedToken) -> Tokenizer:
    backend = trained(gpt2)
    for token in tokens:
        if token.special:
            backend.add_special_tokens([token])
        else:
            backend.add_tokens([token])
    return backend


def two_files(folder: Path) -> None:
    trained(gpt2).model.save(str(folder))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')


def word_list(folder: Path) -> None:
    vocabulary = trained(partial(bert, lowercase=True)).get_vocab()
    lines = sorted(vocabulary, key=vocabulary.__getitem__)
    (folder / "vocab.txt").write_text("".join(f"{line}\n" for line in lines))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')


def truncated(definition: dict[str, Any]) -> None:
    definition["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    definition["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip


def prefix_space(definition: dict[str, Any]) -> None:
    definition["pre_tokenizer"]["add_prefix_space"] = True


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
ODD_TOKENS = (
    AddedToken("<new>", lstrip=True, rstrip=True),
    AddedToken("lower", single_word=True, normalized=True),
    AddedToken("    ", normalized=False),
    AddedToken("<tool>", special=True, lstrip=True),
    AddedToken("日本", normalized=True),
)
DECODER = {
    "301": {
        "content": "<new>", "lstrip": False, "normalized": True, "rstrip": False,
        "single_word": False, "special": False,
    },
    "302": {
        "content": "<mask>", "lstrip": True, "normalized": False, "rstrip": False,
        "single_word": False, "special": True,
    },
}  # fmt: skip
T5 = partial(unigram, "<pad>", "</s>", "<unk>")
XLM = partial(unigram, "<s>", "<pad>", "</s>", "<unk>", "<mask>")
ALBERT = partial(unigram, "<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
XLNET = partial(unigram, "<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>")
CASED, UNCASED = partial(bert, lowercase=False), partial(bert, lowercase=True)
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
START = "<|begin_of_text|>"


def kind(build: Callable[[], Tokenizer], **options: Any) -> Callable[[Path], None]:
    """A function that writes a trained tokenizer with settings."""
    return lambda folder: save(trained(build), folder, **options)


def _edit_model(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda definition: definition["model"].update(values)


def _template(definition: dict[str, Any]) -> None:
    backend = Tokenizer.from_str(json.dumps(definition))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, 0)]
    )
    definition |= json.loads(backend.to_str())


KINDS: dict[str, Callable[[Path], None]] = {
    "byte-level": kind(gpt2),
    "byte-level prefix space": kind(gpt2, edit=prefix_space, **FAST, eos_token=END),
    "byte-level prefix in settings": kind(gpt2, **FAST, eos_token=END, add_prefix_space=True),
    "gpt2": kind(gpt2, tokenizer_class="GPT2Tokenizer", eos_token=END),
    "gpt2 prefix in settings": kind(gpt2, tokenizer_class="GPT2Tokenizer", add_prefix_space=True),
    "gpt2 two files": two_files,
    "gpt2 dropout": kind(gpt2, edit=_edit_model(dropout=0.4), **FAST, eos_token=END),
    "truncation and padding": kind(gpt2, edit=truncated, **FAST, eos_token=END),
    "special_tokens_map": kind(llama3, **FAST, special={"eos_token": "<|eot_id|>"}),
    "added_tokens": kind(gpt2, **FAST, eos_token=END, added={"<new>": 301}),
    "added_tokens_decoder": kind(gpt2, **FAST, eos_token=END, added_tokens_decoder=DECODER),
    "split_special_tokens": kind(gpt2, **FAST, eos_token=END, split_special_tokens=True),
    "eos outside the vocabulary": kind(gpt2, **FAST, eos_token="<end>"),
    "odd added tokens": kind(partial(with_added, *ODD_TOKENS), **FAST, eos_token=END),
    "gpt-neox": kind(partial(with_added, ODD_TOKENS[2]), tokenizer_class="GPTNeoXTokenizer"),
    "llama3": kind(llama3, edit=_template, **FAST, bos_token=START, eos_token="<|eot_id|>"),
    "llama3 ignore_merges": kind(llama3, edit=_edit_model(ignore_merges=True), **FAST),
    "llama class, byte-level": kind(llama3, tokenizer_class="LlamaTokenizerFast"),
    "qwen2": kind(qwen, tokenizer_class="Qwen2Tokenizer", eos_token="<|im_end|>"),
    "qwen2 by config": kind(qwen, config={"model_type": "qwen2"}, eos_token=END),
    "qwen3": kind(qwen, tokenizer_class="Qwen2TokenizerFast", config={"model_type": "qwen3"}),
    "gpt4 regex": kind(partial(byte_level, END, pattern=GPT4), **FAST, eos_token=END),
    "deepseek": kind(deepseek, tokenizer_class="LlamaTokenizerFast", eos_token="</s>"),
    "roberta": kind(roberta, tokenizer_class="RobertaTokenizer"),
    "roberta prefix space": kind(
        roberta, tokenizer_class="RobertaTokenizer", add_prefix_space=True
    ),
    "bart": kind(roberta, tokenizer_class="BartTokenizerFast"),
    "llama": kind(sentencepiece, tokenizer_class="LlamaTokenizer", add_bos_token=True, **LLAMA),
    "llama not legacy": kind(sentencepiece, tokenizer_class="LlamaTokenizer", legacy=False),
    "llama by config": kind(sentencepiece, config={"model_type": "llama"}, **LLAMA),
    "sentencepiece, any class": kind(sentencepiece, **FAST, add_eos_token=True, **LLAMA),
    "gemma": kind(gemma, tokenizer_class="GemmaTokenizer", bos_token="<bos>", eos_token="<eos>"),
    "metaspace always": kind(partial(metaspace, "always"), **FAST, **LLAMA),
    "metaspace first": kind(partial(metaspace, "first"), **FAST, **LLAMA),
    "metaspace never": kind(partial(metaspace, "never"), **FAST, **LLAMA),
    "nothing for unknown": kind(partial(metaspace, "first", fallback=False), **FAST),
    "unigram": kind(T5, **FAST, eos_token="</s>"),
    "unigram bytes": kind(partial(T5, fallback=True), **FAST, eos_token="</s>"),
    "t5": kind(T5, tokenizer_class="T5Tokenizer", eos_token="</s>", extra_ids=0),
    "albert": kind(ALBERT, tokenizer_class="AlbertTokenizer"),
    "xlnet": kind(XLNET, tokenizer_class="XLNetTokenizer"),
    "xlm-roberta": kind(XLM, tokenizer_class="XLMRobertaTokenizer"),
    "bert uncased": kind(UNCASED, tokenizer_class="BertTokenizer"),
    "bert cased": kind(CASED, tokenizer_class="BertTokenizerFast", do_lower_case=False),
    "bert other case": kind(CASED, tokenizer_class="BertTokenizer", do_lower_case=True),
    "bert strips accents": kind(CASED, tokenizer_class="BertTokenizer", strip_accents=True),
    "bert clean up": kind(UNCASED, **FAST, clean_up_tokenization_spaces=True, sep_token="[SEP]"),
    "bert vocab.txt": word_list,
    "electra": kind(UNCASED, tokenizer_class="ElectraTokenizer"),
    "clip": kind(clip, tokenizer_class="CLIPTokenizer", eos_token=END),
    "words NFKC": kind(partial(level, normalizers.NFKC()), **FAST, eos_token="</s>"),
    "words lower": kind(
        partial(
            level,
            normalizers.Sequence(
                [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
            ),
        ),
        **FAST,
        eos_token="</s>",
    ),
    "bloom": kind(gpt2, tokenizer_class="BloomTokenizerFast", eos_token=END),
    "chat template": kind(qwen, **FAST, eos_token="<|im_end|>", chat_template=TEMPLATE),
}


def write_kind(name: str, folder: Path) -> Path:
    """Write the folder of a kind."""
    folder.mkdir(parents=True)
    KINDS[name](folder)
    return folder
