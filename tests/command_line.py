"""The command `latentline`, in a process of its own or in this one."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from pipeline.cli.main import main


def latentline_command(*arguments: str) -> list[str]:
    """Return the command line of `latentline <arguments>` for this environment's Python."""
    return [sys.executable, "-c", "from pipeline.cli.main import main; main()", *arguments]


@dataclass(frozen=True)
class Completed:
    """The end of a command, named as in `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def latentline(*arguments: str, **variables: str) -> Completed:
    """Run `latentline <arguments>` in this process, with additional environment variables."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, variables),
        patch.object(sys, "argv", ["latentline", *arguments]),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
    return Completed(status, stdout.getvalue(), stderr.getvalue())
