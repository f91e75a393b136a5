"""The tokenizer of stored data sections, whose names may not be on this machine."""

import pytest

from nanotrain.config.config import DataConfig
from nanotrain.data.build import addresses_of
from nanotrain.data.run_tokenizer import remote_name_of, tokenizer_of_stored
from nanotrain.errors import DataError


@pytest.mark.parametrize(
    ("data", "remote"),
    [
        (DataConfig(tokenizer_model="no-such/model"), "no-such/model"),
        (DataConfig(tokenizer_model="s3://host/tokenizer"), "s3://host/tokenizer"),
        (DataConfig(data_path=["0.5", "s3://host/web", "0.5", "b"]), "s3://host/web"),
        (DataConfig(stages=["a@0: gs://host/web"]), "gs://host/web"),
        (DataConfig(tokenizer_model="bytes", data_path=["s3://host/web"]), None),
        (DataConfig(mock_data=True), None),
    ],
)
def test_a_stored_tokenizer_is_not_fetched(data: DataConfig, remote: str | None) -> None:
    assert remote_name_of(data) == remote
    if remote is not None and remote == data.tokenizer_model:
        with pytest.raises(DataError, match=f"write --tokenizer {remote} to fetch it"):
            tokenizer_of_stored(data)
    else:
        assert tokenizer_of_stored(data) == data.tokenizer_model


def test_addresses_are_found_in_blends_stages_and_named_sets() -> None:
    data = DataConfig(
        data_path=["0.5 s3://b/a 0.5 c"],
        valid_data_path=["web=gs://b/d"],
        stages=["x@0: 1 az://b/e"],
    )
    assert addresses_of(data) == ["s3://b/a", "gs://b/d", "az://b/e"]
