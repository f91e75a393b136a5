"""Entries of --data-stages: form, order and unit."""

import pytest

from nanotrain.config.data_stages import read_stages, stage_bounds
from nanotrain.config.load import load_config
from nanotrain.errors import ConfigError


def test_starts_are_steps_or_samples_and_are_converted_by_the_schedule_of_batches():
    stages = read_stages(
        ["warm@0: web", "main@10: 0.7 web 0.3 code", "end@1.5K: a path with blanks"]
    )
    assert [stage.blend for stage in stages] == ["web", "0.7 web 0.3 code", "a path with blanks"]
    assert stage_bounds(stages, lambda steps: 8 * steps) == ((0, None), (80, None), (12_000, None))
    assert stage_bounds(read_stages(["a@0: x", "b@100samples: y"]), lambda n: 8 * n) == (
        (0, None),
        (100, None),
    )
    changing = read_stages(["a@0: x", "b@1K..1.5K: y"])
    assert stage_bounds(changing, lambda steps: 8 * steps) == ((0, None), (8000, 12_000))
    assert stage_bounds(read_stages(["a@0: x", "b@5..9samples: y"]), lambda n: 8 * n) == (
        (0, None),
        (5, 9),
    )


def test_all_mistakes_of_the_stages_are_one_error():
    texts = ["a@5: web", "a@5: web", "b@4: web", "c@900: web"]
    with pytest.raises(ConfigError) as caught:
        read_stages(texts, 100)
    for fact in (
        "a is the name of 2 stages",
        "the first stage, a, starts at 5",
        "a starts at 5, not after a at 5",
        "b starts at 4, not after a at 5",
        "c starts at step 900 of a run of 100 steps",
    ):
        assert fact in str(caught.value)
    with pytest.raises(ConfigError, match=r"'web' is not NAME@START: BLEND; 'a@x: web' is not"):
        read_stages(["web", "a@x: web"])
    for texts, fact in (
        (["a@0..5: web"], "the first stage, a, has none before it to change from"),
        (["a@0: web", "b@9..9: web"], "b changes from 9 to 9, which is not later"),
        (["a@0: web", "b@9..20: web", "c@15: web"], "b changes until 20, after c starts at 15"),
        (["a@0: web", "b@9..x: web"], "is not NAME@START: BLEND"),
    ):
        with pytest.raises(ConfigError, match=fact):
            read_stages(texts)
    with pytest.raises(ConfigError, match="some stages start at steps and some at samples"):
        read_stages(["a@0: web", "b@10: web", "c@20samples: web"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data-path", "web"], "data_stages and data_path are both set"),
        (["--train-data-path", "web"], "data_stages and train_data_path are both set"),
        (["--mock-data"], "data.stages = .* has no effect"),
        (["--train-iters", "5"], "late starts at step 7 of a run of 5 steps"),
    ],
)
def test_a_command_line_refuses_what_contradicts_the_stages(more, message):
    with pytest.raises(ConfigError, match=message):
        load_config(["--vocab-size", "9", "--data-stages", "early@0: web", "late@7: code", *more])
