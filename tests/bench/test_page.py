"""docs/benchmarks.md shows the stored runs."""

from __future__ import annotations

import re
from pathlib import Path

from bench import page, results

FIGURE = {
    "unit": "s",
    "count": 10,
    "ours": "the job",
    "limit": "a bare loop",
    "most": 1.1,
    "ours_s": [1.3, 1.2, 1.4],
    "limit_s": [1.0, 1.0, 1.0],
    "ratio": [1.2, 1.3, 1.4],
}


def test_the_page_is_up_to_date() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page_text(), "generate it: python -m bench.page"


def test_each_stored_run_is_on_the_page_with_its_machine() -> None:
    text = page.page_text()
    stored_runs = sorted(page.RESULTS.glob("*.json"))
    assert stored_runs, "bench/results has no runs"
    for file in stored_runs:
        assert f"## {file.name}" in text
        assert results.load(file)["machine"]["processor"] in text


def test_the_page_lists_figures_above_their_bound(tmp_path: Path) -> None:
    run = {"machine": results.machine(), "commit": "abc", "full": False, "figures": {"latents cold": FIGURE}}
    results.save(run, tmp_path / "one.json")
    text = page.page_text(tmp_path)
    assert "Above the bound: latents cold (1.30, at most 1.10)." in text
    assert re.search(r"latents cold +10 +130 ms +100 ms +1\.30 +1\.20-1\.40 +1\.10", text)
    results.save(run | {"figures": {"latents cold": FIGURE | {"most": None}}}, tmp_path / "one.json")
    assert "No figure exceeds its bound." in page.page_text(tmp_path)


def test_a_run_on_a_gpu_shows_its_notes_and_unmeasured_experiments(tmp_path: Path) -> None:
    run = {"machine": results.machine(), "commit": "abc", "full": True, "figures": {"SDXL VAE": FIGURE}}
    results.save(run, tmp_path / "cpu.json")
    assert "contains no complete run on a GPU yet" in page.page_text(tmp_path)
    run["machine"] = {**run["machine"], "gpu": "NVIDIA H200"}
    run["notes"] = {"SDXL VAE": {"chosen": 4, "images_per_s": {"4": [40.0, 44.0, 42.0]}, "took_s": 9.5}}
    run["missing"] = {"SDXL LoRA step, nf4": "TrainingError: nf4 needs bitsandbytes"}
    results.save(run, tmp_path / "gpu.json")
    text = page.page_text(tmp_path)
    assert "contains no complete run on a GPU yet" not in text
    assert "NVIDIA H200" in text
    machine = run["machine"]
    assert f"Python {machine['python']}, " in text
    assert f"torch {machine['packages']['torch']}" in text
    assert "- SDXL VAE: chosen 4; images_per_s (4: 42)\n" in text
    assert "- SDXL LoRA step, nf4: not measured, TrainingError: nf4 needs bitsandbytes" in text
