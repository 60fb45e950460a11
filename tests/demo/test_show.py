"""The demo ends with an enlarged picture of before and after."""

from __future__ import annotations

import numpy as np
from PIL import Image

from demo.show import ENLARGED_PX, before_after_sheet


def test_the_sheet_shows_both_pictures_labelled_and_enlarged_next_to_one_another() -> None:
    pictures = [Image.new("RGB", (64, 64), colour) for colour in ((0, 0, 250), (250, 0, 0))]
    sheet = np.asarray(before_after_sheet(*pictures), dtype=int)
    assert ENLARGED_PX >= 512
    blue, red = (np.abs(sheet - colour).max(axis=2) < 10 for colour in ((0, 0, 250), (250, 0, 0)))
    assert blue.sum() == red.sum() == ENLARGED_PX**2
    assert np.flatnonzero(blue.any(axis=0)).max() < np.flatnonzero(red.any(axis=0)).min()
    top = np.flatnonzero(blue.any(axis=1)).min()
    for columns in (blue.any(axis=0), red.any(axis=0)):
        assert (sheet[top // 2 : top, columns].max(axis=2) < 60).sum() > 50, "the label is missing"
