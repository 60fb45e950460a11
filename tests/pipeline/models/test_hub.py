from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hf_xet
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError

from pipeline.errors import ModelError
from pipeline.models.hub import explain_download_errors


@pytest.fixture
def closed() -> Iterator[str]:
    """Return an address that refuses every connection."""
    with socket.socket() as closed_socket:
        closed_socket.bind(("127.0.0.1", 0))  # and never listens
        yield f"http://127.0.0.1:{closed_socket.getsockname()[1]}"


def request_hub(address: str, folder: Path) -> None:
    HfApi(endpoint=address).model_info("someone/tiny")


def download_large(address: str, folder: Path) -> None:
    hub = {"endpoint": address, "token": "none", "token_expiry_unix_secs": 9_999_999_999}
    with hf_xet.XetSession().new_file_download_group(**hub) as group:
        group.start_download_file(hf_xet.XetFileInfo("0" * 64, 1000), str(folder / "file"))


@pytest.mark.parametrize(
    ("request_", "error"), [(request_hub, HTTPError), (download_large, RuntimeError)], ids=["hub", "xet"]
)
def test_a_refused_connection_is_an_error_with_where_and_fix(
    tmp_path: Path,
    closed: str,
    request_: Callable[[str, Path], None],
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "1")
    message = "someone/tiny is not a local folder and could not be downloaded"
    with (
        pytest.raises(ModelError, match=message) as excinfo,
        explain_download_errors("someone/tiny", "x.yaml, model.base"),
    ):
        request_(closed, tmp_path)
    assert isinstance(excinfo.value.__cause__, error)
    assert excinfo.value.where == "x.yaml, model.base"
    assert excinfo.value.fix is not None
    assert "check the network" in excinfo.value.fix


@pytest.mark.slow
def test_a_snapshot_with_nothing_but_its_index_is_an_error_if_the_hub_is_unreachable(
    tmp_path: Path, tiny_sd: Path, closed: str
) -> None:
    root = tmp_path / "hub" / "models--someone--tiny"
    snapshot = root / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abc")
    (snapshot / "model_index.json").write_bytes((tiny_sd / "model_index.json").read_bytes())
    code = "import sys; from pathlib import Path; from tests.pipeline.model_recipe import recipe\n"
    code += "from pipeline.errors import ModelError; from pipeline.models.resolve import resolve_base\n"
    code += (
        "try: resolve_base(recipe(Path(sys.argv[1]), 'someone/tiny'))\nexcept ModelError as err: print(err)"
    )
    env = {**os.environ, "HF_ENDPOINT": closed, "HF_HUB_CACHE": str(tmp_path / "hub")}
    stderr = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        env={**env, "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "someone/tiny is not a local folder and could not be downloaded" in stderr
    assert "Connection refused" in stderr
