"""Tables with padding: which they are, and their load with other padding than in the checkpoint."""

import torch

from nanotrain.checkpoint.manifest import Manifest, TensorEntry
from nanotrain.checkpoint.padding import fit_padding, vocabulary_rows
from nanotrain.config.model import ModelConfig
from nanotrain.spec.boxes import Box, TensorBox

NAME = "model/embedding.word.weight"


def manifest(rows: int, tokens: int) -> Manifest:
    return Manifest(1, {}, {NAME: TensorEntry((rows, 2), "fp32", ())}, {}, {"model": {"vocab_size": tokens}}, {})


def test_tables_of_the_vocabulary_are_the_embedding_and_a_head_of_its_own() -> None:
    tied, untied = (
        vocabulary_rows(ModelConfig(vocab_size=100, untie_embeddings_and_output_weights=is_untied))
        for is_untied in (False, True)
    )
    assert tied == {"embedding.word.weight": 100}
    assert len(untied) == 2 and set(untied.values()) == {100} and tied.items() <= untied.items()


def test_rows_that_the_checkpoint_lacks_are_zero_and_its_own_are_read_into_views() -> None:
    rows = {"embedding.word.weight": 5}
    target = torch.ones(4, 2)  # rows 4 to 7 of 8: token 4, and padding
    box = TensorBox(NAME, (8, 2), Box((4, 0), (8, 2)))
    fitted = fit_padding(manifest(6, 5), {box: target}, rows=rows)
    ((read, view),) = fitted.items()
    assert read == TensorBox(NAME, (6, 2), Box((4, 0), (5, 2)))
    view.fill_(7.0)
    assert target.tolist() == [[7.0, 7.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    padding = TensorBox(NAME, (8, 2), Box((6, 0), (8, 2)))
    assert fit_padding(manifest(6, 5), {padding: torch.ones(2, 2)}, rows=rows) == {}


def test_the_same_padding_and_another_vocabulary_are_left_to_the_comparison_of_shapes() -> None:
    rows, target = {"embedding.word.weight": 5}, torch.ones(8, 2)
    for there in (manifest(8, 5), manifest(6, 6)):
        fitted = fit_padding(there, {TensorBox.full(NAME, (8, 2)): target}, rows=rows)
        assert list(fitted) == [TensorBox.full(NAME, (8, 2))] and target.eq(1).all()
