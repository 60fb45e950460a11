from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from pipeline.vae_latents.mask_checks import cropped_masks
from tests.pipeline.cached_job import recipe_of


@pytest.mark.parametrize(("mask_ppm", "named"), [(500_000, []), (499_000, [0.499])])
def test_a_mask_is_named_only_if_the_crop_keeps_less_than_half_of_it(
    tmp_path: Path, tiny_sd: Path, mask_ppm: int, named: list[float]
) -> None:
    mask = {"path": str(tmp_path / "masks")}
    dataset = {"name": "photos", "path": str(tmp_path / "photos"), "mask": mask}
    size = {f"{kind}_{edge}": 64 for kind in ("resized", "target") for edge in ("height", "width")}
    sample = {"sample_id": "photos/cat.png", "dataset": "photos", "bucket": "64x64", "flipped": False}
    row = {**sample, **size, "mask_hash": "ab", "mask_mean": 1.0, "mask_ppm": mask_ppm}

    outcome = cropped_masks(recipe_of(tmp_path, tiny_sd, datasets=[dataset]), pl.DataFrame([row]))
    assert [each["kept"] for each in outcome.rows] == named, f"a crop that keeps {mask_ppm / 1e6:.1%}"
    assert outcome.passed == (named == []), outcome.summary
