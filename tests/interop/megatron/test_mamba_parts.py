"""Joined tensors of Mamba-2 in files of ranks are divided into their parts."""

import pytest
import torch

from nanotrain.interop.megatron.mamba_parts import with_parts

LAYER = "decoder.layers.3."
# 2 heads of 3 channels, states of 1 group x 4
ROWS = {"mixer.in_proj.weight": 22, "mixer.conv1d.weight": 14, "mixer.conv1d.bias": 14}
LENGTHS = {"z": 6, "x": 6, "B": 4, "C": 4, "dt": 2}


def layer() -> dict[str, dict[str, torch.Tensor]]:
    rows = ROWS | {"mixer.A_log": 2}
    moment = "optimizer.state.exp_avg."
    tensors = {}
    for name, size in rows.items():
        values = torch.arange(size).float()
        tensors[LAYER + name] = {"": values, moment: -values}
    return tensors | {"embedding.weight": {"": torch.ones(5)}}


def test_parts_follow_one_another_with_their_state():
    found = with_parts(layer())
    names = [f"{LAYER}mixer.in_proj.weight.{part}" for part in LENGTHS]
    names += [f"{LAYER}mixer.conv1d.{kind}.{part}" for kind in ("weight", "bias") for part in "xBC"]
    assert set(found) == {*names, f"{LAYER}mixer.A_log", "embedding.weight"}
    start = 0
    for part, size in LENGTHS.items():
        states = found[f"{LAYER}mixer.in_proj.weight.{part}"]
        expected = torch.arange(start, start + size).float()
        assert torch.equal(states[""], expected)
        assert torch.equal(states["optimizer.state.exp_avg."], -expected)
        start += size
    assert found[f"{LAYER}mixer.conv1d.bias.C"][""].tolist() == [10, 11, 12, 13]


def test_names_of_later_versions_are_read_as_the_earlier_ones():
    tensors = layer()
    for kind in ("weight", "bias"):
        tensors[f"{LAYER}mixer.conv1d_{kind}"] = tensors.pop(f"{LAYER}mixer.conv1d.{kind}")
    assert with_parts(tensors).keys() == with_parts(layer()).keys()


def test_a_model_without_mamba_is_as_it_was():
    tensors = {"a": {"": torch.ones(2)}, "b.in_proj.weight": {"": torch.ones(3)}}
    assert with_parts(tensors) == tensors


def test_shapes_that_do_not_fit_are_an_error():
    for changed in ({"A_log": 9}, {"A_log": 3}, {"in_proj.weight": 15}):
        tensors = layer()
        for name, rows in changed.items():
            tensors[f"{LAYER}mixer.{name}"] = {"": torch.ones(rows)}
        with pytest.raises(ValueError, match="do not fit each other"):
            with_parts(tensors)
    tensors = layer()
    del tensors[f"{LAYER}mixer.A_log"]
    with pytest.raises(ValueError, match=r"mixer\.A_log' is missing|mixer.A_log is missing"):
        with_parts(tensors)
    tensors = layer()
    tensors[f"{LAYER}mixer.conv1d.bias"] = {"": torch.ones(13)}
    with pytest.raises(ValueError, match="has not 14 rows"):
        with_parts(tensors)
