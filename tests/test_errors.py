"""Errors: they pickle, print as one message or as a list, and are collected."""

import pickle

import pytest

from nanotrain.errors import (
    CheckpointError,
    ConfigError,
    ConfigErrors,
    DataError,
    ErrorCollector,
    TopologyError,
    report,
)

TOPOLOGY = TopologyError("6 ranks cannot form tp=4", why="4 must divide 6", fix="run on 8 ranks")
RATE = ConfigError("lr is fast", fix="set --lr 1")


@pytest.mark.parametrize(
    "error", [TOPOLOGY, RATE, DataError("gone"), CheckpointError("damaged", why="a flipped bit")]
)
def test_an_error_pickles_with_its_class_and_texts(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error)
    assert (copy.what, copy.why, copy.fix) == (error.what, error.why, error.fix)


def test_several_errors_print_as_a_list_and_pickle():
    errors = ConfigErrors([TOPOLOGY, RATE])
    assert str(errors) == f"2 mistakes:\n  - {TOPOLOGY}\n  - {RATE}"
    copy = pickle.loads(pickle.dumps(errors))
    assert str(copy) == str(errors) and [type(error) for error in copy.errors] == [
        TopologyError,
        ConfigError,
    ]


def test_a_collector_keeps_configuration_errors_and_passes_others():
    collector = ErrorCollector()
    for error in (TOPOLOGY, TOPOLOGY, ConfigErrors([TOPOLOGY, RATE])):
        with collector:
            raise error
    with pytest.raises(ConfigErrors) as caught:
        collector.raise_errors()
    assert [str(error) for error in caught.value.errors] == [str(TOPOLOGY), str(RATE)]
    with pytest.raises(DataError), collector:
        raise DataError("no configuration error")


def test_one_collected_error_is_raised_as_it_is():
    collector = ErrorCollector()
    collector.raise_errors()
    with collector:
        raise TOPOLOGY
    with pytest.raises(TopologyError, match="6 ranks"):
        collector.raise_errors()


def test_report_prints_one_message(capsys):
    assert report(RATE) == report(RATE, quiet=True) == 2
    assert capsys.readouterr().err == "error: lr is fast; set --lr 1\n"


def test_a_note_is_added_to_every_mistake():
    errors = ConfigErrors(
        [ConfigError("a is 1", why="it must be 2", fix="set a"), TopologyError("b is 3")]
    )
    noted = errors.with_note(" in x.yaml")
    assert (
        str(noted) == "2 mistakes:\n  - a is 1 in x.yaml: it must be 2; set a\n  - b is 3 in x.yaml"
    )
    assert [type(error) for error in noted.errors] == [ConfigError, TopologyError]
    assert str(DataError("c", why="d").with_note(" (rank 1)")) == "c (rank 1): d"
