"""Tables of measurements: odd ones, names without influence, and the file that is written."""

from pathlib import Path

import pytest

from nanotrain.cli.main import main
from nanotrain.errors import ConfigError
from nanotrain.planner.rows.table import COLUMNS, predict_row, read_table, run_rows
from tests.planner.rows.test_config import DENSE, EXPERTS


def table(path: Path, rows: list[dict[str, str]], columns: list[str] | None = None) -> Path:
    columns = columns or list(rows[0])
    lines = [
        "\t".join(columns),
        *("\t".join(row.get(column, "") for column in columns) for row in rows),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_names_have_no_influence() -> None:
    rows = [
        DENSE | {"id": "1", "model": "llama", "source": "A", "value": "1"},
        EXPERTS | {"id": "2", "model": "x"},
    ]
    other = [
        row | {"model": "nanotron-qwen", "source": "mosaicml deepseek", "value": "9"}
        for row in rows
    ]
    assert [*map(predict_row, rows)] == [*map(predict_row, other)]


def test_order_of_columns_and_empty_ones_have_no_influence(tmp_path: Path) -> None:
    columns = ["unknown column", *reversed(DENSE), "flags", "experts"]
    plain = read_table(table(tmp_path / "a.tsv", [DENSE]))
    other = read_table(table(tmp_path / "b.tsv", [DENSE | {"unknown column": "7"}], columns))
    assert [*map(predict_row, plain)] == [*map(predict_row, other)]


def test_odd_text_is_read(tmp_path: Path) -> None:
    path = table(tmp_path / "a.tsv", [DENSE])
    text = path.read_text()
    odd = (
        "\ufeff"
        + text.replace("hidden", " Hidden ").replace("4096\t", "4,096\t").replace("\n", "\r\n")
        + "\r\n\r\n"
    )
    path.write_text(odd, newline="")
    (row,) = read_table(path)
    assert predict_row(row).memory_gib == predict_row(DENSE | {"id": "1"}).memory_gib


def test_a_cell_may_have_several_lines(tmp_path: Path) -> None:
    path = table(tmp_path / "a.tsv", [DENSE | {"note": "first\vsecond"}], [*DENSE, "note"])
    (row,) = read_table(path)
    assert row["note"] == "first\vsecond"


def test_the_output_has_a_line_per_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        DENSE | {"id": "good"},
        DENSE | {"id": "bad", "layers": ""},
        DENSE | {"id": "big", "mbs": "32"},
    ]
    source, output = table(tmp_path / "in.tsv", rows), tmp_path / "out.tsv"
    assert main(["plan", "--rows", str(source), "--output", str(output)]) == 0
    assert "2 of 3 rows predicted" in capsys.readouterr().out
    lines = [line.split("\t") for line in output.read_text().splitlines()]
    assert tuple(lines[0]) == COLUMNS
    good, bad, big = (dict(zip(COLUMNS, line, strict=True)) for line in lines[1:])
    assert (good["fits"], big["fits"], bad["fits"]) == ("yes", "no", "")
    assert float(good["tokens_per_s_per_gpu"]) == pytest.approx(
        256 * 8192 / 64 / float(good["step_time_s"]), rel=1e-4
    )
    assert 0.1 < float(good["mfu"]) < 0.8
    assert bad["note"] == "not modelled: layers is not stated" and not bad["step_time_s"]
    assert "engine megatron" in good["note"]


def test_open_cells_get_the_best_choice_that_fits() -> None:
    cells = DENSE | {"id": "1", "mbs": "", "recompute": ""}
    best = predict_row(cells)
    stated = [
        predict_row(cells | {"mbs": str(2**power), "recompute": "none"}) for power in range(4)
    ]
    assert best.fits == "yes"
    fitting = [float(row.tokens_per_s_per_gpu) for row in stated if row.fits == "yes"]
    assert float(best.tokens_per_s_per_gpu) == max(fitting)
    assert "mbs not stated: " in best.note and "recompute not stated: none" in best.note
    odd = predict_row(cells | {"gbs": "24"})  # 3 samples for each of 8 data-parallel ranks
    assert "mbs not stated: 1" in odd.note
    tight = DENSE | {
        "id": "1",
        "recompute": "",
        "pp": "1",
        "vp": "1",
        "tp": "1",
        "gpus": "64",
        "gbs": "128",
        "mbs": "1",
    }
    row = predict_row(tight)
    assert "recompute not stated: selective" in row.note
    row = predict_row(tight | {"recompute": "none"})
    assert "not stated" not in row.note and row.fits == "no"


def test_flags_mean_the_last_rank() -> None:
    flags = (
        "tensor-model-parallel-size=1 pipeline-model-parallel-size=4 bf16 use-distributed-optimizer"
    )
    cells = DENSE | {"id": "1", "tp": "1", "vp": "", "flags": flags}
    row = predict_row(cells)
    assert "last pipeline rank" in row.note
    unknown = predict_row(cells | {"flags": flags + " perform-rl-step"})
    assert (
        unknown.note == "not modelled: reinforcement-learning has no model"
        and not unknown.memory_gib
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no table"),
        ("a\tb\n1\t2\n", "no layers, hidden, seq"),
        ("layers\thidden\tseq\tseq\n1\t2\t3\t4\n", "same name"),
        ("layers\thidden\tseq\n1\t2\t3\t4\n", "has 4 cells"),
    ],
)
def test_a_bad_table_is_one_error(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "in.tsv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        run_rows(path, tmp_path / "out.tsv")
    assert not (tmp_path / "out.tsv").exists()


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        run_rows(tmp_path / "none.tsv", tmp_path / "out.tsv")
    (tmp_path / "bytes.tsv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is no text"):
        run_rows(tmp_path / "bytes.tsv", tmp_path / "out.tsv")
    source = table(tmp_path / "in.tsv", [DENSE])
    with pytest.raises(ConfigError, match="cannot write"):
        run_rows(source, tmp_path / "no" / "out.tsv")
    with pytest.raises(ConfigError, match="unknown engine"):
        run_rows(source, tmp_path / "out.tsv", engine="megatorn")


def test_rows_and_output_belong_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rows", "a.tsv"]) == 2
    assert "--output" in capsys.readouterr().err
