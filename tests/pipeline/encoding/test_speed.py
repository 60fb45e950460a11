"""The recorded speed of encoding."""

from __future__ import annotations

from pathlib import Path

from pipeline.encoding.speed import record_speed, recorded_speed


def test_speed_is_recorded_per_kind_and_a_damaged_record_is_ignored(tmp_path: Path) -> None:
    assert recorded_speed(tmp_path, "latents") is None
    record_speed(tmp_path, "latents", 0.5)
    record_speed(tmp_path, "text", 0.25)
    assert (recorded_speed(tmp_path, "latents"), recorded_speed(tmp_path, "text")) == (0.5, 0.25)
    flipped = (tmp_path / "speed.json").read_text().replace("0.25", "0.65")
    numbers = ("NaN", "1e999", "-1.0", "0.0", "1e300", "true", "1" + "0" * 400, '"fast"', "null")
    values = [f'{{"text": {number}}}' for number in numbers]
    for damaged in ("nonsense", "5", "[1]", "", *values, flipped):
        (tmp_path / "speed.json").write_text(damaged)
        assert recorded_speed(tmp_path, "text") is None
    record_speed(tmp_path / "speed.json", "text", 0.5)  # a folder that cannot be written
    assert recorded_speed(tmp_path / "speed.json", "text") is None
