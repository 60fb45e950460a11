"""`latentline gc` of a cache that it shares with output folders that this user may not read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cache.store import Store
from pipeline.cache.users import read_users, register_run, register_user
from pipeline.trained_lora.run_folder import RunLayout, run_folder
from tests.pipeline.packs_case import spec_of, values_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

NOBODY = 65534
RUN = "1" * 16

AS_NOBODY = f"""
import os, sys
import polars
from pipeline.cli.main import latentline
import pipeline.cli.gc, pipeline.outputs.folder
os.setgid({NOBODY})
os.setuid({NOBODY})
latentline(sys.argv[1:])
"""
"""Imports everything as root, then runs a command as another user."""


def gc_as_nobody(cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AS_NOBODY, "gc", "--cache-dir", str(cache), "--grace-hours", "0", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )


def fill(cache: Path, output: Path) -> list[Path]:
    """Return four entries: of a job, of its run, of a job with a readable folder, and an orphan."""
    store, specs = Store(cache), [spec_of(number) for number in range(4)]
    for number, spec in enumerate(specs):
        store.write(spec, values_of(number), {})
    register_user(cache, output, recipe="private", kind="latents", keys=[specs[0].key])
    layout = RunLayout(run_folder(output, RUN))
    layout.folder.mkdir(parents=True)
    layout.facts.write_text("{}")
    layout.finished.write_text("{}")
    register_run(cache, output, recipe="private", run=RUN, keys=[specs[1].key])
    readable = cache.parent / "readable"
    register_user(cache, readable, recipe="shared", kind="latents", keys=[specs[2].key])
    (output / "tables").mkdir()
    (output / "tables" / "vae_latents.parquet").write_bytes(b"not read")

    # All users share the cache.
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o777)
    for path in (cache.parent, *cache.parent.parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o755)
    return [store.path(spec) for spec in specs]


def close_parent(output: Path) -> None:
    output.parent.chmod(0o700)


def close_folder(output: Path) -> None:
    output.chmod(0o700)


def close_runs_and_table(output: Path) -> None:
    (output / "runs").chmod(0o700)
    (output / "tables" / "vae_latents.parquet").chmod(0o600)


@pytest.mark.parametrize("close", [close_parent, close_folder, close_runs_and_table])
def test_L13_entries_that_an_unreadable_output_folder_has_registered_are_kept_and_others_deleted(
    tmp_path: Path, close: Callable[[Path], None]
) -> None:
    cache, output = tmp_path / "cache", tmp_path / "home" / "out"
    output.parent.mkdir()
    entries = fill(cache, output)
    close(output)
    completed = gc_as_nobody(cache, "--delete")
    assert completed.returncode == 0, completed.stderr
    assert f"1 needed by private: {output}   cannot be read: registered entries kept\n" in completed.stdout
    assert f"run {RUN} of private, unfinished: entries kept" in completed.stdout
    assert f"1 needed by shared: {tmp_path}/readable\n" in completed.stdout
    assert [path.exists() for path in entries] == [True, True, True, False]
    assert [set(user.run_keys) for user in read_users(cache) if user.recipe == "private"] == [{RUN}]


def test_the_run_of_an_output_folder_that_may_only_be_read_stays_registered(tmp_path: Path) -> None:
    """Its lock cannot be opened, so it may be in training."""
    cache, output = tmp_path / "cache", tmp_path / "out"
    fill(cache, output)
    (output / "tables" / "vae_latents.parquet").unlink()
    completed = gc_as_nobody(cache, "--delete")
    assert completed.returncode == 0, completed.stderr
    assert "cannot be read" not in completed.stdout
    assert [set(user.run_keys) for user in read_users(cache) if user.recipe == "private"] == [{RUN}]


def test_an_output_folder_that_may_still_exist_is_not_forgotten(tmp_path: Path) -> None:
    cache, output = tmp_path / "cache", tmp_path / "home" / "out"
    output.parent.mkdir()
    fill(cache, output)
    close_parent(output)
    completed = gc_as_nobody(cache, "--forget", str(output))
    assert completed.returncode != 0
    assert "StoreError: the output folder may still exist" in completed.stderr
    assert "give this user permission" in completed.stderr
    assert {user.recipe for user in read_users(cache)} == {"private", "shared"}
