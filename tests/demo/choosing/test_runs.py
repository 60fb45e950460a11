"""One short run of the study, from pictures to results."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.choosing.datasets import study_datasets
from demo.choosing.report import FinishedRun
from demo.choosing.runs import TRUE_CONCEPT, TRUE_KNOWN, Artist, StudyRun, results, train, with_lora
from demo.drawing import draw_prompts
from demo.learned import load_pipeline
from pipeline.recipe.project import project_root


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_short_run_has_truth_loss_and_scores_of_every_step(tmp_path: Path) -> None:
    run, dataset = StudyRun("six pictures", 1e-5, 1, 30, 10), study_datasets()["six pictures"]
    (tmp_path / "run").mkdir()
    recipe = train(run, dataset, tmp_path / "run", tmp_path / "cache")
    lines = results(run, dataset, recipe, Artist(load_pipeline(project_root() / "demo" / "base")))

    assert [line["step"] for line in lines] == [0, 20, 30]
    finished = FinishedRun(run.name, lines)
    assert finished.concept[0].shape == (24, TRUE_CONCEPT)
    assert finished.known[0].shape == (32, TRUE_KNOWN)
    assert finished.concept[0].mean() <= 0.05
    assert finished.known[0].mean() >= 0.5
    assert all(line["validation_loss"] > 0 for line in lines)
    assert all(lines[0]["cpu_seconds"][part] > 0 for part in ("pictures", "features", "truth"))
    world, pixels = lines[1]["world"], lines[1]["pixels"]
    assert set(world) == {"learned", "obeys", "drift"}
    assert set(pixels) == set(world) - {"obeys"}
    assert (len(world["learned"]), len(world["learned"][0])) == (24, 4)
    assert not finished.choice("world").decided


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_lora_that_is_merged_draws_what_it_draws_beside_the_weights(tmp_path: Path) -> None:
    run, dataset = StudyRun("six pictures", 1e-2, 1, 20), study_datasets()["six pictures"]
    (tmp_path / "run").mkdir()
    lora = train(run, dataset, tmp_path / "run", tmp_path / "cache").output_dir / "lora"
    pipeline, prompts = load_pipeline(project_root() / "demo" / "base"), ["a red nof on a white background"]
    before = draw_prompts(pipeline, prompts, seed=0)[0].astype(int)
    merged = draw_prompts(with_lora(pipeline, lora), prompts, seed=0)[0].astype(int)
    assert (draw_prompts(pipeline, prompts, seed=0)[0] == before).all()

    pipeline.load_lora_weights(str(lora))
    beside = draw_prompts(pipeline, prompts, seed=0)[0].astype(int)
    assert abs(merged - beside).max() <= 3
    assert abs(merged - before).max() > 30
