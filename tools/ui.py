"""`python -m tools.ui`: Dagster's UI, TensorBoard and the pages of the recipes, until Ctrl-C.

TensorBoard reads one folder, `<DAGSTER_HOME>/tensorboard/`, with a symbolic link to the runs of each recipe.
The links follow the recipes while the UI is open.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from pipeline.errors import LatentlineError
from pipeline.processes.tree import ProcessTree
from pipeline.recipe.load import load_recipe, project_root, recipes_dir
from pipeline.reporting import tensorboard

LINK_INTERVAL_S = 10.0
"""Seconds between two updates of the links."""

END_WAIT_S = 30.0
"""Seconds within which Dagster's UI must end; it stops its daemon and code servers first."""

STOP_WAIT_S = 5.0
"""Seconds that the remaining processes have to end before they are killed."""


@click.command()
@click.option("--port", default=3000, show_default=True, help="Port of Dagster's UI.")
@click.option("--tensorboard-port", type=int, help="Port of TensorBoard.  [default: 6006]")
@click.option("--page-port", default=8765, show_default=True, help="Port of the pages; 0 chooses one.")
def main(port: int, tensorboard_port: int | None, page_port: int) -> None:
    """Serve Dagster's UI, TensorBoard and the pages of the recipes on 127.0.0.1 until Ctrl-C."""
    home = Path(os.environ.get("DAGSTER_HOME") or project_root() / ".dagster").absolute()
    os.environ["DAGSTER_HOME"] = str(home)
    if tensorboard_port is not None:
        os.environ[tensorboard.PORT_VARIABLE] = str(tensorboard_port)

    links = home / "tensorboard"
    link_runs(links)
    board = start_tensorboard(links, home / "tensorboard.log")
    command = [sys.executable, "-m", "dagster", "dev", "-w", "workspace.yaml"]
    command += ["--host", tensorboard.HOST, "--port", str(port)]

    # A script that starts this in its background makes it ignore SIGINT, and Dagster would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dagster = subprocess.Popen(command, cwd=project_root())
    pages = start_pages(page_port, f"http://{tensorboard.HOST}:{port}")
    click.echo(f"TensorBoard: {tensorboard.url()}")

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        dagster.send_signal(signal.SIGINT)
        raise KeyboardInterrupt

    # The terminal sends Ctrl-C to all processes. A SIGTERM reaches only this one, which forwards it.
    signal.signal(signal.SIGTERM, interrupt)
    try:
        wait_for_dagster(dagster, board, links)
    except KeyboardInterrupt:
        end(dagster)
    finally:
        for process in (board, pages):
            process.terminate()
            end(process)
    sys.exit(dagster.returncode)


def link_runs(folder: Path) -> None:
    """Link the folder of runs of each valid recipe into `folder`, and remove all other links."""
    folder.mkdir(parents=True, exist_ok=True)
    targets: dict[str, Path] = {}
    for file in sorted(recipes_dir().glob("*.yaml")):
        with suppress(LatentlineError):  # Dagster's UI shows why a recipe is not valid
            recipe = load_recipe(file)
            targets[recipe.name] = recipe.output_dir / "runs"

    existing = {link.name: link.readlink() for link in folder.iterdir() if link.is_symlink()}
    wanted = {name: target for name, target in targets.items() if target.is_dir()}
    for name, target in existing.items():
        if wanted.get(name) != target:
            (folder / name).unlink()
    for name, target in wanted.items():
        if existing.get(name) != target:
            (folder / name).symlink_to(target, target_is_directory=True)


def start_tensorboard(links: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start TensorBoard on `links`; its output goes to `log`."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(links)]
    command += ["--host", tensorboard.HOST, "--port", str(tensorboard.port()), "--reload_interval", "10"]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def start_pages(port: int, dagster: str) -> subprocess.Popen[bytes]:
    """Start `latentline ui`, which prints its address, or why it cannot start."""
    command = [sys.executable, "-m", "pipeline.cli", "ui", "--port", str(port), "--dagster", dagster]
    return subprocess.Popen(command, cwd=project_root())


def wait_for_dagster(dagster: subprocess.Popen[bytes], board: subprocess.Popen[bytes], links: Path) -> None:
    """Update the links until Dagster's UI ends.

    Dagster's UI continues without TensorBoard, whose failure is reported once.
    """
    is_reported = False
    while dagster.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            dagster.wait(timeout=LINK_INTERVAL_S)
        link_runs(links)
        if board.poll() is not None and not is_reported:
            is_reported = True
            click.echo(tensorboard_problem(links.with_suffix(".log")), err=True)


def tensorboard_problem(log: Path) -> str:
    """Return what happened to TensorBoard, where and the fix, from its log."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    reason = lines[-1].strip() if lines else "it wrote no message"
    return (
        f"TensorBoard has ended, and Dagster's UI continues without it: {reason}\n"
        f"  where: {log}\n"
        f"  fix:   stop the program that uses port {tensorboard.port()}, or set "
        f"{tensorboard.PORT_VARIABLE} to a free port, and start `make ui` again"
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait at most `END_WAIT_S` for a signalled process, and stop what is left of it and its descendants."""
    tree = ProcessTree(process.pid)
    tree.members()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=END_WAIT_S)
    tree.stop(grace_s=STOP_WAIT_S)
    process.wait()


if __name__ == "__main__":
    main()
