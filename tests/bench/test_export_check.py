from __future__ import annotations

import json
from pathlib import Path

from bench import page
from bench.export_check import Model, measure, save
from demo.tiny_models import make_tiny


def test_a_verification_is_timed_for_all_modules_of_a_model(tmp_path: Path) -> None:
    make_tiny(tmp_path / "published")
    config = json.loads((tmp_path / "published" / "unet" / "config.json").read_text())
    model = Model("tiny", make_tiny, "UNet2DConditionModel", config)
    (tmp_path / "work").mkdir()
    timing = measure(model, tmp_path / "work", rank=4)
    save([timing], tmp_path / "results" / "export_check.json")
    assert timing.num_modules == 32
    assert timing.file_bytes > 0
    assert 0 < timing.cpu_s < 60
    size = f"{timing.file_bytes / 1e6:.0f} MB"
    row = f"| tiny | 4 | 32 | {size} | {timing.cpu_s:.1f} s |"
    assert row in page.page_text(tmp_path / "results").splitlines()
