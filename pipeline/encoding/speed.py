"""Speed of encoding on this machine, in `<machine_state_dir>/speed.json`, for the estimates of `plan`."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from pipeline.storage.atomic import write_bytes

_FILE = "speed.json"


def record_speed(machine_state_dir: Path, kind: str, seconds_per_cost: float) -> None:
    """Record how long one unit of cost took to encode; a failure to write is ignored."""
    speeds = {**_speeds(machine_state_dir), kind: seconds_per_cost}
    with suppress(OSError):
        write_bytes(machine_state_dir / _FILE, json.dumps(speeds).encode())


def recorded_speed(machine_state_dir: Path, kind: str) -> float | None:
    """Return the seconds that one unit of cost took last time; None if nothing was recorded."""
    return _speeds(machine_state_dir).get(kind)


def _speeds(machine_state_dir: Path) -> dict[str, float]:
    try:
        return dict(json.loads((machine_state_dir / _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
