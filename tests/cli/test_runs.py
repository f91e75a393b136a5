"""Commands that read run folders: what they refuse before they read one."""

import pytest

from nanotrain.cli.runs import compare, report, runs, timeline, watch
from nanotrain.errors import ConfigError
from tests.report.runs import write_run


@pytest.mark.parametrize(
    ("command", "argv", "message"),
    [
        (report, [], "required: RUN"),
        (watch, ["s3://bucket/run"], "the page follows files as they grow"),
        (watch, ["run", "--port", "70000"], "'70000' is no port from 0 to 65535"),
        (runs, ["nowhere"], "there is no folder nowhere"),
        (compare, ["one"], "name at least two run folders"),
        (timeline, ["s3://bucket/run"], "profiles stay on the machines of the ranks"),
        (timeline, ["run", "--ranks", "1;2"], "'1;2' is no list of whole numbers"),
        (timeline, ["run", "--png", "notes.txt"], "does not end in .png"),
    ],
)
def test_arguments_that_cannot_be_are_one_error(command, argv, message):
    with pytest.raises(ConfigError) as caught:
        command(argv)
    assert message in str(caught.value)


def test_runs_are_listed_inside_of_their_folder_too(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "runs" / "tiny")
    for folder in (tmp_path, tmp_path / "runs"):
        monkeypatch.chdir(folder)
        assert runs([]) == 0
        assert "tiny" in capsys.readouterr().out
    assert runs([str(tmp_path)]) == 0
    assert (
        f"no runs in {tmp_path}: none of its folders has a config.yaml" in capsys.readouterr().out
    )
