"""The counters of a run."""

import json

from nanotrain.train.run import TrainState


def test_a_step_advances_every_counter():
    state = TrainState()
    state.advance(samples=8, tokens=100)
    state.advance(samples=8, tokens=90)
    assert (state.step, state.consumed_samples, state.consumed_tokens) == (2, 16, 190)


def test_it_survives_json():
    state = TrainState(step=3, consumed_samples=24, consumed_tokens=2**60)
    assert TrainState(**json.loads(json.dumps(state.to_dict()))) == state
