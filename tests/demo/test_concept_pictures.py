"""The demo's datasets: every file is written once, and its caption describes the picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from demo.concept_pictures import concept_scenes, known_scenes, write_pictures
from demo.score import read_picture


def test_each_picture_shows_what_its_caption_describes(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    for name, expected in (("concept", concept_scenes()), ("known", known_scenes())):
        images = list((tmp_path / name).glob("*.png"))
        assert len(images) == len(expected) == 24
        for image in images:
            reading = read_picture(np.asarray(Image.open(image)))
            caption = image.with_suffix(".txt").read_text()
            assert f"{reading.colour} {reading.shape} on a {reading.background} background" in caption


def test_edited_files_are_not_overwritten(tmp_path: Path) -> None:
    assert write_pictures(tmp_path) == 96
    caption = next((tmp_path / "concept").glob("*.txt"))
    caption.write_text("my caption")
    next((tmp_path / "known").glob("*.png")).unlink()
    assert write_pictures(tmp_path) == 1
    assert caption.read_text() == "my caption"
