from __future__ import annotations

import pytest
from PIL import Image

from pipeline.reporting.grids import CELL_PX, LABEL_PX, evenly_spaced, fitted, picture_grid


@pytest.mark.parametrize(
    ("number", "most", "expected"),
    [(0, 4, []), (3, 4, [0, 1, 2]), (4, 4, [0, 1, 2, 3]), (100, 4, [0, 33, 66, 99]), (9, 1, [0])],
    ids=str,
)
def test_indices_are_spaced_from_the_first_to_the_last(number: int, most: int, expected: list[int]) -> None:
    assert evenly_spaced(number, most) == expected


@pytest.mark.parametrize("size_wh", [(64, 64), (64, 48), (1024, 512), (1, 3000)], ids=str)
def test_every_picture_fills_its_cell_in_its_shape(size_wh: tuple[int, int]) -> None:
    picture = fitted(Image.new("RGBA", size_wh, (250, 0, 0, 255)), CELL_PX)
    assert max(picture.size) == CELL_PX
    assert picture.width / picture.height == pytest.approx(size_wh[0] / size_wh[1], rel=0.05, abs=0.01)
    assert picture.mode == "RGB"


def test_a_missing_picture_leaves_its_cell_empty() -> None:
    red = Image.new("RGB", (64, 64), (250, 0, 0))
    grid = picture_grid([("step 0", [None, red])], ["one", "two"])
    row_px = grid.height - CELL_PX // 2
    assert grid.getpixel((LABEL_PX + CELL_PX // 2, row_px)) == (255, 255, 255)
    assert grid.getpixel((LABEL_PX + CELL_PX + CELL_PX // 2, row_px)) == (250, 0, 0)
