"""Encoding processes that start in milliseconds, because they are forked from a server that imported torch.

`python -m tests.pipeline.encoding.fork_server` reads one JSON line per batch of tasks. It writes one line
after all children of the batch have exited. The server computes nothing, so its children inherit no threads.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline.errors import LaunchError
from pipeline.processes.launch import Meanwhile, launch_environment
from pipeline.recipe import AccelerateSettings

ROOT = Path(__file__).resolve().parents[3]
ENCODED_LOG = "encoded.log"
"""Name of a file next to an encoding's results, with one key per line for each image that the VAE encoded."""


class ForkServer:
    """A context manager for the fork server; see `ForkedLaunch` for its use as a launch."""

    def __init__(self, folder: Path) -> None:
        """Start the server; the output of its children goes to `folder`."""
        self._log = (folder / "forked.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.encoding.fork_server"],
            cwd=ROOT,
            env=launch_environment(AccelerateSettings(), folder / "error.json"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self._read_answer() == "ready"

    def run(self, tasks: Sequence[dict[str, Any]], kill_after_s: float | None = None) -> list[int]:
        """Run all tasks at once; return the exit status of each process, -9 if it was killed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"tasks": tasks, "kill_after_s": kill_after_s}) + "\n")
        self._process.stdin.flush()
        return self._read_answer()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _read_answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the forking process has ended"
        return json.loads(line)


class ForkedLaunch:
    """A `Launch` of one forked encoding process, optionally killed after `kill_after_s` seconds."""

    def __init__(self, server: ForkServer, kill_after_s: float | None = None) -> None:
        self._server = server
        self._kill_after_s = kill_after_s
        self.encoded: list[str] = []
        self.ended: set[str] = set()

    def __call__(self, module: str, encoding: Path, meanwhile: Meanwhile) -> None:
        from pipeline.encoding.workers import WORKERS

        meanwhile()
        assert module in WORKERS.values()
        (status,) = self._server.run([{"kind": "encode", "encoding": str(encoding)}], self._kill_after_s)
        log = encoding.parent / ENCODED_LOG
        self.encoded = log.read_text().split() if log.is_file() else []
        for results in encoding.parent.glob("results-*.jsonl"):
            complete_lines = results.read_text().rpartition("\n")[0].splitlines()
            self.ended |= {line["key"] for line in map(json.loads, complete_lines) if "key" in line}
        if status != 0:
            raise LaunchError(f"ended with {status}", where=str(encoding), fix="see forked.log")


class _StderrListener:
    def info(self, text: str) -> None:
        sys.stderr.write(text + "\n")

    def phase(self, text: str) -> None: ...

    def progress(self, done: int, total: int, text: str, **details: str) -> None:
        sys.stderr.write(f"{done}/{total} {text}\n")


def _log_encoded(folder: Path) -> None:
    """Log the key of each image that this process encodes."""
    from pipeline.vae_latents.worker.encoder import LatentEncoder

    original = LatentEncoder.outcome
    file = os.open(folder / ENCODED_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def logging_outcome(self: LatentEncoder, job: Any, *rest: Any) -> Any:
        os.write(file, f"{job.spec.key}\n".encode())
        return original(self, job, *rest)

    LatentEncoder.outcome = logging_outcome  # type: ignore[method-assign]


def _encode(task: dict[str, Any]) -> None:
    from tests.in_process_worker import run

    encoding = Path(task["encoding"])
    _log_encoded(encoding.parent)
    run(encoding, _StderrListener(), rank=task.get("rank", 0), num_ranks=task.get("num_ranks", 1))


def _stages(task: dict[str, Any]) -> None:
    """Run both cache stages of a job in this process."""
    from pipeline.recipe import Recipe
    from pipeline.storage.tables import Tables
    from pipeline.text_embeddings.stage import cache_text
    from pipeline.vae_latents.stage import cache_latents

    recipe = Recipe.model_validate_json(Path(task["recipe"]).read_text(encoding="utf-8"))
    tables = Tables(recipe.output_dir)

    def launch(_: str, encoding: Path, meanwhile: Meanwhile) -> None:
        meanwhile()
        _encode({"encoding": str(encoding)})

    buckets, validated = tables.read("aspect_buckets"), tables.read("validated_dataset")
    for asset, result in (
        ("vae_latents", cache_latents(recipe, buckets, tables, launch=launch, log=str)),
        ("text_embeddings", cache_text(recipe, validated, tables, launch=launch, log=str)),
    ):
        tables.write(asset, result.table)
        report = {name: result.report[name] for name in ("encoded", "reused", "failed")}
        (recipe.output_dir / f"{asset}.json").write_text(json.dumps(report))


def _fork(task: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.dup2(2, 1)  # stdout carries only the answers of the server
        {"encode": _encode, "stages": _stages}[task["kind"]](task)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    for module in ("torch", "diffusers.models", "transformers", "pipeline.encoding.worker.run"):
        importlib.import_module(module)
    import diffusers
    from transformers import CLIPTextModel, CLIPTokenizer

    assert diffusers.AutoencoderKL  # both packages import a class when it is first used
    assert CLIPTextModel
    assert CLIPTokenizer
    for stage in ("vae_latents", "text_embeddings"):
        importlib.import_module(f"pipeline.{stage}.worker.encoder")
    sys.stdout.write(json.dumps("ready") + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        children = [_fork(task) for task in request["tasks"]]
        if request["kill_after_s"] is not None:
            time.sleep(request["kill_after_s"])
            for child in children:
                os.kill(child, signal.SIGKILL)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(json.dumps(statuses) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
