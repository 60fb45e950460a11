"""`accelerate launch` under Dagster: watched while it runs, and ended as a whole when the step is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dagster import (
    AssetExecutionContext,
    ConfigurableResource,
    PipesTempFileContextInjector,
    PipesTempFileMessageReader,
    PreviewWarning,
    open_pipes_session,
)
from pydantic import Field

from pipeline.processes.launch import Launch, Meanwhile, launch_command, launch_environment, launch_error

if TYPE_CHECKING:
    from pipeline.processes.tree import ProcessTree
    from pipeline.recipe import AccelerateSettings

POLL_S = 0.05
LOOK_INTERVAL_S = 1.0
"""Between two looks at the tree, so that processes whose parent dies first are known by then."""


class AccelerateLauncher(ConfigurableResource):
    """Starts entry modules with `accelerate launch` in a Dagster Pipes session."""

    grace_s: float = Field(
        default=20.0,
        ge=0.0,
        description="Seconds that encoding or training has to end by itself when the run is stopped, which "
        "a training needs for its checkpoint; what is left after them is killed.",
    )

    def bind(self, context: AssetExecutionContext, settings: AccelerateSettings) -> Launch:
        """A `Launch` whose processes report to `context`'s log and never outlive the step."""

        def launch(module: str, order: Path, meanwhile: Meanwhile | None = None) -> None:
            command = launch_command(settings, module, order)
            with _session(context) as session_variables, tempfile.TemporaryDirectory() as folder:
                variables = launch_environment(settings, Path(folder) / "error.json")
                variables |= session_variables
                output = _Output(Path(folder) / "output.txt")
                status = _run_watched(
                    command,
                    variables=variables,
                    output=output,
                    grace_s=self.grace_s,
                    context=context,
                    meanwhile=meanwhile,
                )
                if status != 0:
                    error_file = Path(folder) / "error.json"
                    raise launch_error(module, status, output=output.lines(), error_file=error_file)

        return launch


@contextmanager
def _session(context: AssetExecutionContext) -> Generator[Mapping[str, str]]:
    """Environment variables that connect a launched process to `context`'s log."""
    with ExitStack() as stack:
        with warnings.catch_warnings():
            # Dagster's session itself reads what Dagster calls deprecated or in preview
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", PreviewWarning)
            session = stack.enter_context(
                open_pipes_session(
                    context=context,
                    context_injector=PipesTempFileContextInjector(),
                    message_reader=PipesTempFileMessageReader(),
                )
            )
        yield session.get_bootstrap_env_vars()


def _run_watched(
    command: list[str],
    *,
    variables: Mapping[str, str],
    output: _Output,
    grace_s: float,
    context: AssetExecutionContext,
    meanwhile: Meanwhile | None,
) -> int:
    """Run `command` in a session of its own to its end, and end what it leaves behind.

    Whatever interrupts `meanwhile` or the waiting (Dagster's stop, SIGINT, SIGTERM, an error) ends the whole
    tree first.

    Returns:
        The exit status, or minus the number of the signal that ended the process.
    """
    from pipeline.processes.tree import ProcessTree

    with output.file.open("wb") as file:
        process = subprocess.Popen(
            command, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    tree = ProcessTree(process.pid)
    try:
        if meanwhile is not None:
            meanwhile()
        _wait(process, tree, output)
    except BaseException as err:
        with _uninterrupted():
            context.log.info(f"{type(err).__name__}: all processes are asked to stop, and have {grace_s:g} s")
            killed = tree.stop(grace_s=grace_s)
            process.wait()
            output.forward(final=True)
            context.log.info(f"all processes have ended, {len(killed)} of them killed")
        raise
    with _uninterrupted():
        tree.stop(grace_s=grace_s)
        output.forward(final=True)
    return process.returncode


def _wait(process: subprocess.Popen[bytes], tree: ProcessTree, output: _Output) -> None:
    next_look_s = 0.0
    while process.poll() is None:
        output.forward()
        if time.monotonic() >= next_look_s:
            tree.members()
            next_look_s = time.monotonic() + LOOK_INTERVAL_S
        time.sleep(POLL_S)


@contextmanager
def _uninterrupted() -> Generator[None]:
    """Let signals that would break off the clean-up wait until it is over; only the main thread gets any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@dataclass
class _Output:
    """What launched processes print: in a file, because a pipe breaks under them when the step is killed."""

    file: Path
    _forwarded_bytes: int = 0

    def forward(self, *, final: bool = False) -> None:
        """Print what is new to standard error, which Dagster captures; whole lines until it is `final`."""
        with self.file.open("rb") as file:
            file.seek(self._forwarded_bytes)
            new = file.read()
        new = new if final else new[: new.rfind(b"\n") + 1]
        self._forwarded_bytes += len(new)
        if new:
            sys.stderr.write(new.decode("utf-8", errors="replace"))
            sys.stderr.flush()

    def lines(self) -> list[str]:
        """All of it, by line."""
        return self.file.read_text(encoding="utf-8", errors="replace").splitlines()
