"""Cache jobs on a disk that fills up: a small tmpfs in a mount namespace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.pipeline.namespaces import namespace


def test_L14_a_disk_that_fills_up_during_a_job_loses_no_entry_and_the_next_run_resumes(
    photos: Path, tiny_sd: Path
) -> None:
    command = [*namespace(), sys.executable, "-m", "tests.pipeline.encoding.filled"]
    process = subprocess.run(
        [*command, str(photos.parent), str(tiny_sd)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    observed = json.loads(process.stdout.splitlines()[-1])
    filled, full, room = observed["filled"], observed["full"], observed["room"]

    assert "the disk is full: an entry of " in filled["error"]
    assert str(photos.parent / "cache" / "latents") in filled["error"]
    assert "existing entries stay valid" in filled["error"]
    assert [Path(name).suffix for name in filled["files"]] == [".safetensors"] * 2, (
        "a temporary file was not removed"
    )

    assert "bytes free for the missing entries" in full["error"]
    assert "(67,108,864 of them stay free), got 0" in full["error"]
    assert full["launched"] == filled["launched"] == 1, (
        "the space estimate must run before the encoder starts"
    )
    assert full["files"] == filled["files"]
    assert "the cache cannot be written: the disk is full" in observed["text"]["error"]
    assert "free space on that disk" in observed["text"]["error"]
    assert observed["text"]["launched"] == 1

    assert room["error"] == ""
    assert {name: room["report"][name] for name in ("encoded", "reused", "damaged")} == {
        "encoded": 3,
        "reused": 2,
        "damaged": 0,
    }
    assert {name: room["files"][name] for name in filled["files"]} == filled["files"]
