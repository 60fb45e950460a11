"""The folder of a drawing: pictures, their text chunks, the sheet, and what stays after an interruption."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from pipeline.storage.atomic import temp_path_for
from pipeline.trained_lora.pictures.draw import draw, num_drawn
from pipeline.trained_lora.pictures.prepare import Request, prepare_drawing
from tests.pipeline.trained_lora.pictures.drawings import InProcessDrawing

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def test_a_grid_of_steps_strengths_and_prompts_is_one_picture_each_and_a_sheet(trained: Project) -> None:
    request = Request(
        steps=(2, 4), strengths=(0.0, 0.5), prompts=("a red cat", "prompt outside of the cache")
    )
    job = prepare_drawing(trained.recipe, request)
    launch = InProcessDrawing()
    entries = sorted(Path(str(trained.recipe.cache_dir)).rglob("*.safetensors"))
    sheet = draw(job, launch)
    assert sorted(path.name for path in job.folder.iterdir()) == sorted(
        ["sheet.jpg"]
        + [
            f"step-0000000{step}-strength-{strength}-prompt-0{number}.png"
            for step in (2, 4)
            for strength in ("0", "0.5")
            for number in (1, 2)
        ]
    )
    assert launch.progress_lines[-1] == "8/8 drawing pictures"
    assert "loading the text encoders" in launch.phases, "one prompt was encoded"
    assert sorted(Path(str(trained.recipe.cache_dir)).rglob("*.safetensors")) == entries

    with Image.open(job.folder / "step-00000004-strength-0.5-prompt-02.png") as picture:
        facts = {"prompt": "prompt outside of the cache", "strength": "0.5", "seed": "7", "steps": "20"}
        assert picture.info.items() >= {**facts, "lora": f"run {job.run}, step 4"}.items()
        assert picture.size == (64, 64)
    with Image.open(sheet) as image:
        assert image.width > 2 * 256, "a column for each prompt"
        assert image.height > 4 * 256, "a row for each step and strength"


@pytest.mark.slow
def test_with_one_prompt_the_columns_of_the_sheet_are_strengths(trained: Project) -> None:
    job = prepare_drawing(trained.recipe, Request(prompts=("a red cat",), strengths=(0.5, 0.75, 1.0)))
    with Image.open(draw(job, InProcessDrawing())) as image:
        assert image.width > 3 * 256
        assert image.height < 2 * 256


def test_an_interrupted_drawing_keeps_complete_pictures_and_removes_partial_files(trained: Project) -> None:
    class Interrupted(InProcessDrawing):
        def progress(self, done: int, total: int, text: str, **details: str) -> None:
            if done == 1:
                temp_path_for(job.folder / "x.png").write_bytes(b"part")
                raise KeyboardInterrupt

    job = prepare_drawing(trained.recipe, Request(strengths=(0.5, 1.0)))
    with pytest.raises(KeyboardInterrupt):
        draw(job, Interrupted())
    assert num_drawn(job) == 1
    assert [path.name for path in job.folder.iterdir()] == ["step-00000004-strength-0.5-prompt-01.png"]

    class InterruptedAtStart(InProcessDrawing):
        def phase(self, text: str) -> None:
            raise KeyboardInterrupt

    empty = prepare_drawing(trained.recipe, Request())
    with pytest.raises(KeyboardInterrupt):
        draw(empty, InterruptedAtStart())
    assert not empty.folder.exists()
