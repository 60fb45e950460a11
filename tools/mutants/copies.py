"""Copies of the project, in which one file at a time is mutated and tested."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class TestRun:
    """Result of a test run.

    Attributes:
        failed: The first failing test; "" if all pass.
        at_limit: Whether the time limit ended the run.
        seconds: Duration of the run.
    """

    failed: str
    at_limit: bool
    seconds: float


class ProjectCopy:
    """A copy of the project's files, and a server that runs tests in it."""

    def __init__(self, folder: Path) -> None:
        """Copy the files that git tracks or would track, and start the server."""
        self._folder = folder
        self._project = folder / "project"
        self._runs = 0
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(
            listed, cwd=ROOT, capture_output=True, check=True, text=True
        ).stdout.splitlines():
            if (ROOT / name).is_file():
                (self._project / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._project / name)

        # A checked hash, because a mutant may have the size and the second of modification of the original.
        compileall = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."]
        subprocess.run(compileall, cwd=self._project, check=True)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tools.mutants.worker"],
            cwd=self._project,
            env={**os.environ, "PYTHONPATH": str(self._project)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def source(self, module: str) -> str:
        """Return the text of a file of the copy."""
        return (self._project / module).read_text(encoding="utf-8")

    def test(self, tests: list[str], limit_s: float, changed: dict[str, str] | None = None) -> TestRun:
        """Run tests until the first failure, with other texts for some files."""
        originals = {module: self.source(module) for module in changed or {}}
        for module, text in (changed or {}).items():
            (self._project / module).write_text(text, encoding="utf-8")
        try:
            answer = self._ask(
                {"tests": tests, "limit_s": limit_s, "folder": str(self._folder / f"run-{self._runs}")}
            )
        finally:
            self._runs += 1
            for module, text in originals.items():
                (self._project / module).write_text(text, encoding="utf-8")
        failed = "" if answer["status"] == 0 else str(answer["failed"])
        return TestRun(failed, at_limit=answer["status"] is None, seconds=answer["seconds"])

    def __enter__(self) -> ProjectCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.kill()
        self._server.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the test server ended with status {self._server.wait()}; its messages are above"
            )
        return json.loads(line)
