"""docs/families.md is made from the tables of the families."""

from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanotrain.interop.hf.families import FAMILIES
from nanotrain.interop.hf.tables import MODELS, read_tables
from scripts.families_page import document

PAGE = (Path(__file__).parent.parent / "docs" / "families.md").read_text()


def test_the_page_is_current() -> None:
    assert document(PAGE) == PAGE, "run: python -m scripts.families_page docs/families.md"


def test_every_family_has_the_names_of_its_models() -> None:
    assert FAMILIES.keys() == read_tables(MODELS)["supported"].keys(), (
        "nanotrain/interop/hf/models.yaml names the others"
    )


# Types of `AutoModelForCausalLM` that are no decoders of text alone: encoders that may have a
# causal mask, decoders of an encoder, models of images or audio, and names of whole folders, whose
# text model has a name of its own.
NO_DECODERS = """bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small
camembert data2vec-text dots3_note electra ernie fuyu gemma4_assistant gemma4_unified
gemma4_unified_assistant git got_ocr2 gpt-sw3 llama4 marian mbart megatron-bert mllama
moss_transcribe_diarize musicgen musicgen_melody mvp pegasus plbart prophetnet qwen3_5 qwen3_5_moe
reformer rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta
xlm-roberta-xl xlnet xmod emu3 gemma3 gemma4 gemma4_unified_text"""


def test_every_causal_language_model_of_transformers_has_a_family_or_says_what_it_needs() -> None:
    tables = read_tables(MODELS)
    known = {*FAMILIES, *tables["unsupported"], *NO_DECODERS.split()}
    assert sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - known) == []
    assert not set(NO_DECODERS.split()) & FAMILIES.keys()
