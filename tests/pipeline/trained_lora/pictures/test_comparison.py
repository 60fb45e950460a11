"""`latentline compare`: the rows of a comparison, their pictures and what differs between their runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from pipeline.errors import DrawingError
from pipeline.trained_lora.pictures.comparison import (
    LABEL_PX,
    Compared,
    draw_comparison,
    prepare_comparison,
)
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.pictures.drawings import InProcessDrawing, drawn, pixels
from tests.pipeline.trained_lora.runs import run, run_folders

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project

PROMPTS = ("a red cat", "a blue rocket")


def test_runs_and_steps_are_drawn_alike_and_their_differences_are_stated(trained: Project) -> None:
    (old,) = run_folders(trained)
    run(trained.changed("output", learning_rate=2e-2, seed=8), InProcessLaunch())
    rows = prepare_comparison(
        [Compared(trained.recipe, old.name, "all"), Compared(trained.recipe)], prompts=PROMPTS
    )
    assert [(row.letter, row.lora.step) for row in rows] == [("A", 2), ("B", 4), ("C", 4)]
    assert rows[0].differences is None
    assert rows[1].text.endswith(f"run {old.name}, step 4: the same run as A")
    assert rows[2].differences == ["optimizer.learning_rate 0.01 -> 0.02", "plan.seed 7 -> 8"]

    sheet, curves = draw_comparison(rows, {trained.recipe.name: InProcessDrawing()})
    assert curves is not None
    with Image.open(sheet) as picture:
        assert picture.width > LABEL_PX + len(PROMPTS) * 256
        assert picture.height > len(rows) * 256
    with Image.open(curves) as picture:
        assert np.asarray(picture).std() > 0

    # The second run has another seed in its recipe, but all rows are drawn with the first one's.
    alone = drawn(trained, run=rows[2].job.run, prompts=PROMPTS, seed=7)
    cells = [cell for cell in rows[2].job.cells() if cell.lora == rows[2].lora]
    for cell, other in zip(cells, alone.cells(), strict=True):
        assert np.array_equal(pixels(cell.path), pixels(other.path))


def test_another_recipe_draws_the_prompts_and_sizes_of_the_first_one(trained: Project) -> None:
    prompt = {"prompt": "a red cat", "steps": 3, "height": 48, "width": 80, "seed": 5}
    first = trained.changed("output", sample_prompts=trained.recipe.training.sample_prompts)
    values = first.recipe.training.model_dump(mode="json") | {"sample_prompts": [prompt]}
    training = type(first.recipe.training).model_validate(values, strict=False)
    first.recipe = first.recipe.model_copy(update={"training": training})
    other = trained.changed("other", learning_rate=2e-2)
    other.recipe = other.recipe.model_copy(update={"name": "other"})
    run(other, InProcessLaunch())

    rows = prepare_comparison([Compared(first.recipe), Compared(other.recipe)])
    assert [row.job.recipe.name for row in rows] == ["demo", "other"]
    for row in rows:
        (drawn_prompt,) = row.job.prompts
        assert (drawn_prompt.caption, drawn_prompt.steps) == ("a red cat", 3)
        assert (drawn_prompt.size_hw, drawn_prompt.seed) == ((48, 80), 5)
    assert rows[0].job.folder.parent == rows[1].job.folder.parent
    assert rows[0].job.folder.is_relative_to(first.recipe.output_dir)


def test_a_single_lora_has_nothing_to_compare_with(trained: Project) -> None:
    with pytest.raises(DrawingError, match="there is nothing to compare with"):
        prepare_comparison([Compared(trained.recipe)], prompts=PROMPTS)
    with pytest.raises(DrawingError, match="more than fit on one sheet"):
        prepare_comparison(
            [Compared(trained.recipe), Compared(trained.recipe)],
            prompts=tuple(f"prompt {number}" for number in range(121)),
        )
