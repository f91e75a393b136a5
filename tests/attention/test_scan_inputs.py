"""Documents of a batch, packed, and maps of the inputs."""

import numpy as np
import torch

from nanotrain.attention.scan_inputs import DeltaInputs, PackedDocuments


def test_rows_end_their_last_document() -> None:
    starts = np.array([[False, False, True, False], [True, False, False, True]])
    documents = PackedDocuments.of(starts)
    assert documents.bounds.tolist() == [0, 2, 4, 7, 8]
    assert documents.number == 4
    assert documents.first.tolist() == [0, 2]
    assert documents.last.tolist() == [1, 3]
    assert documents.continues.tolist() == [True, False]


def test_a_map_leaves_out_what_is_not_per_token() -> None:
    x = torch.ones(1, 2, 1, 1)
    inputs = DeltaInputs(x, x, x, x, x, A=torch.ones(1))
    halved = inputs.map(lambda x: x[:, :1])
    assert halved.value.shape == (1, 1, 1, 1)
    assert halved.A is None and halved.starts is None
