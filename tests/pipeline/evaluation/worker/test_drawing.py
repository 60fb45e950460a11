"""Several processes share the pictures of an evaluation, and draw the same ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pipeline.encoding.workers import EVALUATION_MODULE
from pipeline.evaluation.prepare import Request
from pipeline.evaluation.stage import evaluate
from pipeline.processes.launch import LocalLaunch
from pipeline.storage.tables import Tables
from tests.in_process_worker import InProcessLaunch
from tests.in_process_worker import run as run_rank
from tests.pipeline.evaluation.evaluated import evaluated_recipe, pixels_of, prepared

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from tests.pipeline.trained_lora.project import Project


class TwoRanks(InProcessLaunch):
    """Runs the two ranks of a launch one after the other."""

    def __call__(self, module: str, job_file: Path, meanwhile: Any = None) -> None:
        assert module == EVALUATION_MODULE
        if meanwhile is not None:
            meanwhile()
        for rank in range(2):
            run_rank(job_file, self, rank=rank, num_ranks=2)
        self.results = sorted(path.name for path in job_file.parent.glob("results-*"))


def drawn(recipe: Recipe, launch: Any) -> dict[Any, Any]:
    evaluate(recipe, Request(), Tables(recipe.output_dir), launch=launch, log=lambda _: None)
    return pixels_of(prepared(recipe))


def other_cache(recipe: Recipe, tmp_path: Path) -> Recipe:
    # The texts of the project are random values, which no text encoder returns.
    cache = tmp_path / "other cache"
    shutil.copytree(Path(str(recipe.cache_dir), "text"), cache / "text")
    return recipe.model_copy(update={"cache_dir": cache})


def test_two_ranks_draw_what_one_draws(trained: Project, tmp_path: Path) -> None:
    recipe = evaluated_recipe(trained, pictures=2)
    launch = TwoRanks()
    two = drawn(other_cache(recipe, tmp_path), launch)
    one = drawn(recipe, InProcessLaunch())
    assert launch.results == ["results-0.jsonl", "results-1.jsonl"]
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[each], two[each]) for each in one)


@pytest.mark.slow
def test_two_processes_draw_what_one_draws(trained: Project, tmp_path: Path) -> None:
    recipe = evaluated_recipe(trained, pictures=2)
    accelerate = recipe.accelerate.model_copy(update={"num_processes": 2})
    shared = other_cache(recipe, tmp_path).model_copy(update={"accelerate": accelerate})
    one = drawn(recipe, LocalLaunch(recipe.accelerate))
    two = drawn(shared, LocalLaunch(accelerate))
    assert all(np.array_equal(one[each], two[each]) for each in one)
