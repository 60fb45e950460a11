from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from pipeline.recipe import Recipe
from pipeline.text_embeddings.report import TOKENS_FILE, write_caption_report
from tests.small_recipe import small_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return small_recipe(tmp_path)


def table(tokens: list[int], cut: list[int]) -> pl.DataFrame:
    return pl.DataFrame(
        {"variant": [0] * len(tokens), "num_tokens": tokens, "num_cut": cut},
        schema=dict.fromkeys(("variant", "num_tokens", "num_cut"), pl.Int32),
    )


def coloured(data: bytes, red: int, green: int, blue: int) -> int:
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), dtype=int)
    return int((np.abs(pixels - (red, green, blue)).max(axis=2) < 30).sum())


def test_the_histogram_shows_the_token_limit_only_if_a_caption_is_truncated(recipe: Recipe) -> None:
    folder = write_caption_report(recipe, table([5, 5, 9, 77], [0, 0, 0, 0]))
    without_limit = (folder / TOKENS_FILE).read_bytes()
    assert coloured(without_limit, 31, 119, 180) > 100
    assert coloured(without_limit, 214, 39, 40) == 0
    write_caption_report(recipe, table([5, 5, 9, 90], [0, 0, 0, 13]))
    with_limit = (folder / TOKENS_FILE).read_bytes()
    assert coloured(with_limit, 214, 39, 40) > 50
    assert max(len(without_limit), len(with_limit)) < 66_000


def test_captions_of_one_length_are_one_narrow_bar(recipe: Recipe) -> None:
    picture = (write_caption_report(recipe, table([9], [0])) / TOKENS_FILE).read_bytes()
    assert 0 < coloured(picture, 31, 119, 180) < 560 * 320 / 4


def test_the_histogram_is_drawn_again_only_if_a_count_has_changed(recipe: Recipe) -> None:
    file = write_caption_report(recipe, table([5, 9], [0, 0])) / TOKENS_FILE
    before, picture = file.stat(), file.read_bytes()
    write_caption_report(recipe, table([9, 5], [0, 0]))
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    write_caption_report(recipe, table([9, 6], [0, 0]))
    assert file.read_bytes() != picture
    write_caption_report(recipe, table([], []))
    assert not file.exists()
