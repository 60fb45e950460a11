"""A disk that fills up while entries are written: a real one, small, in a mount namespace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.pipeline.namespaces import namespace


def test_L14_a_disk_that_fills_up_meanwhile_loses_nothing_and_the_next_run_goes_on(
    photos: Path, tiny_sd: Path
) -> None:
    command = [*namespace(), sys.executable, "-m", "tests.pipeline.encoding.filled"]
    ran = subprocess.run(
        [*command, str(photos.parent), str(tiny_sd)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = json.loads(ran.stdout.splitlines()[-1])
    filled, full, room = seen["filled"], seen["full"], seen["room"]

    assert "the disk is full: an entry of " in filled["error"]
    assert str(photos.parent / "cache" / "latents") in filled["error"]
    assert "what is in the cache stays valid" in filled["error"]
    assert [Path(name).suffix for name in filled["files"]] == [".safetensors"] * 2, "no temporary file stays"

    assert "the missing entries need " in full["error"]
    assert "(67,108,864 of them stay free), got 0" in full["error"]
    assert full["launched"] == filled["launched"] == 1, "the estimate comes before any model is loaded"
    assert full["files"] == filled["files"]
    assert "the cache cannot be written: the disk is full" in seen["text"]["error"]
    assert "free space on that disk" in seen["text"]["error"]
    assert seen["text"]["launched"] == 1

    assert room["error"] == ""
    assert {name: room["report"][name] for name in ("encoded", "reused", "damaged")} == {
        "encoded": 3,
        "reused": 2,
        "damaged": 0,
    }
    assert {name: room["files"][name] for name in filled["files"]} == filled["files"]
