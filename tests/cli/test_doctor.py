"""The command line of `nanotrain doctor`."""

import json

import pytest

from nanotrain.cli.main import main
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.watch import sniff


def test_one_rank_is_tested_and_printed(tmp_path, capsys):
    assert main(["doctor", "--folder", str(tmp_path), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 rank on 1 host" and lines[-1] == "no outlier"
    assert main(["doctor", "--folder", str(tmp_path), "--device", "cpu", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [item["kind"] for item in values["measurements"]] == ["product", "disk", "clock"]
    assert values["outliers"] == []


def test_an_outlier_is_exit_code_1(tmp_path, capsys, monkeypatch):
    def measured(context: ParallelContext, folder) -> list[sniff.Measurement]:
        return [sniff.Measurement("product", value, 0, "a") for value in (0.01, 0.01, 0.5)]

    monkeypatch.setattr(sniff, "measure", measured)
    assert main(["doctor", "--folder", str(tmp_path), "--device", "cpu"]) == 1
    assert "outlier: rank 0 on host a: product takes 500.0 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--factor", "1"], "'1' is no factor above 1"),
        (["--folder", "/none/at/all"], "/none/at/all is no folder: its disk is tested on host"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--lr", "1"], "unrecognized arguments: --lr 1"),
    ],
)
def test_what_cannot_be_tested_is_one_message(flags, message, capsys):
    assert main(["doctor", "--device", "cpu", *flags]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("error:") == 1
