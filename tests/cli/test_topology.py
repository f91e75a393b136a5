"""`nanotrain topology`: groups and schedules as it prints them."""

import json

from nanotrain.cli.main import main


def test_topology_prints_the_groups_as_json(capsys):
    argv = "topology --world-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --json"
    assert main(argv.split()) == 0
    groups = json.loads(capsys.readouterr().out)
    assert groups["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["pp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups["dp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_topology_shows_optimizer_instances_without_a_strategy(capsys):
    assert (
        main(
            [
                "topology",
                "--world-size",
                "8",
                "--num-distributed-optimizer-instances",
                "2",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["dp_shard"] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_topology_draws_a_schedule_in_place_of_the_groups(capsys, tmp_path):
    argv = "topology --schedule 1f1b --num-microbatches 8 --pipeline-model-parallel-size 4"
    assert main([*argv.split(), "--png", str(tmp_path / "schedule.png")]) == 0
    out = capsys.readouterr().out
    assert "1f1b: 4 ranks, 4 stages, 8 microbatches" in out and "bubble     3/11 = 27.3%" in out
    assert (tmp_path / "schedule.png").stat().st_size > 1000

    argv = "topology --schedule interleaved --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    assert main([*argv.split(), "--num-layers", "8"]) == 0
    assert "8 microbatches" in (out := capsys.readouterr().out) and "bubble     3/19 = 15.8%" in out


def test_a_schedule_is_drawn_on_one_rank_too(capsys):
    assert main(["topology", "--schedule", "zb-h1"]) == 0
    assert "zb-h1: 1 rank, 1 stage, 2 microbatches" in capsys.readouterr().out


def test_groups_of_experts_are_those_of_a_model_with_experts(capsys):
    argv = "topology --world-size 8 --context-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"
    assert main(argv.split()) == 0  # with experts the two grids would not agree
    assert "expert_dp" not in capsys.readouterr().out
    assert main([*argv.split(), "--expert-model-parallel-size", "2"]) == 0
    assert "expert_dp" in capsys.readouterr().out


def test_groups_and_schedule_can_be_asked_for_together(capsys):
    assert (
        main(
            [
                "topology",
                "--world-size",
                "2",
                "--pipeline-model-parallel-size",
                "2",
                "--schedule",
                "gpipe",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert (
        "2 ranks = tp 1 x cp 1 x dp 1 x pp 2" in printed
        and "gpipe: 2 ranks, 2 stages, 4 microbatches" in printed
    )
