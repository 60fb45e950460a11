"""`latentline ui` explains why it cannot start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.ui import command
from tests.command_line import latentline


def test_a_busy_port_is_an_error_with_its_fix(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "home").mkdir()
    variables = {"LATENTLINE_CONFIGS": str(tmp_path / "configs"), "DAGSTER_HOME": str(tmp_path / "home")}
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        completed = latentline("ui", "--port", str(port), **variables)
    assert completed.returncode == 1
    assert f"port {port} is not available" in completed.stderr
    assert "--port" in completed.stderr


@pytest.mark.parametrize(
    "url",
    [
        "training.example",
        "ftp://training.example",
        "https://a/b",
        "https://anna:x@a",
        "https://[",
        "https://a?b",
    ],
)
def test_the_address_of_a_proxy_must_be_scheme_and_host(url: str) -> None:
    result = CliRunner().invoke(command, ["--public-url", url])
    assert result.exit_code == 2
    assert "it must be https:// and a host" in result.stderr
