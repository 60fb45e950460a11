"""Speed of encoding on this machine, in `<machine_state_dir>/speed.json`, for the estimates of `plan`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipeline.storage.checked_json import read_checked, write_checked

_FILE = "speed.json"

_MAX_S = 3600.0
"""Time of a pixel or caption from which a record is not one of this module."""


def record_speed(machine_state_dir: Path, kind: str, seconds_per_cost: float) -> None:
    """Record how long one unit of cost took to encode; a failure to write is ignored."""
    speeds = {**_speeds(machine_state_dir), kind: seconds_per_cost}
    with suppress(OSError):
        write_checked(machine_state_dir / _FILE, speeds)


def recorded_speed(machine_state_dir: Path, kind: str) -> float | None:
    """Return the seconds that one unit of cost took last time; None if nothing was recorded."""
    return _speeds(machine_state_dir).get(kind)


def _speeds(machine_state_dir: Path) -> dict[str, float]:
    try:
        speeds = read_checked(machine_state_dir / _FILE)
    except (OSError, ValueError):
        return {}
    # A file of another program may hold any JSON, also numbers that give no estimate.
    return {kind: each for kind, each in speeds.items() if isinstance(each, float) and 0 < each < _MAX_S}
