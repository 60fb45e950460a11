"""Server that runs pytest in forked processes, so that heavy libraries are imported once and not per mutant.

`python -m tools.mutants.worker` runs in a copy of the project and imports none of the modules under test. It
reads one JSON line per run and writes one JSON line with its result.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

PRELOADED = [
    *(
        "accelerate",
        "dagster",
        "hypothesis",
        "imagehash",
        "numpy",
        "pandera.polars",
        "peft",
        "polars",
        "pydantic",
    ),
    *("diffusers.loaders", "diffusers.models.autoencoders", "diffusers.pipelines.stable_diffusion"),
    *(
        "ruamel.yaml",
        "scipy.stats",
        "skimage",
        "torch",
        "transformers",
        "transformers.models.clip.modeling_clip",
    ),
]
"""Libraries that each run inherits."""

MAX_HEAP_BYTES = 8 * 2**30
SECONDS_PER_TEST = 120

_CONTEXT = multiprocessing.get_context("fork")


class FirstFailure:
    """A pytest plugin that writes the id of the first failing test to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a failed test."""
        if report.failed and not self._file.exists():
            self._file.write_text(report.nodeid, encoding="utf-8")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a test file that cannot be imported."""
        if report.failed and not self._file.exists():
            self._file.write_text(f"{report.nodeid} (import)", encoding="utf-8")


def _run_pytest(folder: Path, tests: list[str]) -> None:
    os.setsid()
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_HEAP_BYTES, MAX_HEAP_BYTES))
    arguments = [
        "-x",
        "-m",
        "not slow and not clusters",
        f"--basetemp={folder / 'temporary'}",
        f"--timeout={SECONDS_PER_TEST}",
    ]
    # pytest cannot rewrite the assertions of plugins that the preloaded libraries import.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning", *tests]
    os._exit(pytest.main(arguments, plugins=[FirstFailure(folder / "failed.txt")]))


def run(tests: list[str], limit_s: float, folder: Path) -> dict[str, Any]:
    """Run tests in a forked process until the first one fails; end it and its children after `limit_s`.

    Returns:
        `status`: pytest's exit status, or None at the time limit; `failed`: the first failing test, or
        the last lines of the output if none was reported; `seconds`.
    """
    folder.mkdir(parents=True)
    start = time.monotonic()
    process = _CONTEXT.Process(target=_run_pytest, args=(folder, tests))
    process.start()
    process.join(limit_s)
    status = process.exitcode
    with suppress(ProcessLookupError):  # no process is left
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()

    failed = folder / "failed.txt"
    output = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    name = failed.read_text(encoding="utf-8") if failed.is_file() else output[-1500:]
    shutil.rmtree(folder, ignore_errors=True)
    return {"status": status, "failed": name, "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    """Answer requests until the input ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # or each run copies the memory of the libraries when it collects garbage
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for line in sys.stdin:
        request = json.loads(line)
        result = run(request["tests"], request["limit_s"], Path(request["folder"]))
        answers.write(json.dumps(result) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
