"""The demo's dataset is complete, and a second call does not change it."""

from pathlib import Path

from PIL import Image

from demo.photographs import SHOTS, write_photographs


def test_each_photograph_has_a_caption_and_is_written_once(tmp_path: Path) -> None:
    assert write_photographs(tmp_path) == 2 * len(SHOTS) == 48
    aspect_ratios: list[float] = []
    for shot in SHOTS:
        (image,) = [path for path in tmp_path.glob(f"{shot.name}.*") if path.suffix != ".txt"]
        with Image.open(image) as picture:
            assert picture.size == (shot.width, shot.height)
            aspect_ratios.append(shot.width / shot.height)
        assert (tmp_path / f"{shot.name}.txt").read_text(encoding="utf-8") == shot.caption + "\n"
    assert min(aspect_ratios) < 0.6
    assert max(aspect_ratios) >= 2.0

    # A second call writes nothing and keeps edited files.
    caption = tmp_path / f"{SHOTS[0].name}.txt"
    caption.write_text("mine", encoding="utf-8")
    assert write_photographs(tmp_path) == 0
    assert caption.read_text(encoding="utf-8") == "mine"
