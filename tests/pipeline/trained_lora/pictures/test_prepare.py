"""Requests are checked before anything is loaded: runs, steps, prompts, folders, existing files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeline.errors import DrawingError, PathIsolationError, RecipeError, TrainingError
from pipeline.recipe import PreviewPrompt
from pipeline.trained_lora.pictures.job import DrawingJob, read_drawing_job
from pipeline.trained_lora.pictures.prepare import MAX_PICTURES, Request, prepare_drawing
from pipeline.trained_lora.run_folder import RunLayout, hold_run
from tests.pipeline.trained_lora.runs import run_folders

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def prepared(project: Project, **request: Any) -> DrawingJob:
    return prepare_drawing(project.recipe, Request(**request))


def problem(project: Project, **request: Any) -> DrawingError:
    with pytest.raises(DrawingError) as raised:
        prepared(project, **request)
    return raised.value


def test_a_request_without_options_draws_the_published_lora_with_the_recipe_s_prompts(
    trained: Project, tmp_path: Path
) -> None:
    job = prepared(trained)
    [lora] = job.loras
    assert (lora.file, lora.step) == (
        trained.recipe.output_dir / "lora" / "pytorch_lora_weights.safetensors",
        4,
    )
    assert job.run == run_folders(trained)[0].name
    assert [(prompt.caption, prompt.size_hw) for prompt in job.prompts] == [
        ("a red cat", (64, 64)),
        ("a blue rocket", (64, 64)),
    ]
    assert (job.strengths, job.seed) == ((1.0,), 7)
    assert job.folder == trained.recipe.output_dir / "reports" / "pictures" / "001"
    assert not job.folder.exists(), "nothing is written"
    assert read_drawing_job(job.write(tmp_path / "order.json")) == job


def test_steps_and_runs_are_chosen_by_name_and_an_unknown_one_names_the_closest(trained: Project) -> None:
    name = run_folders(trained)[0].name
    folder = run_folders(trained)[0] / "checkpoints"
    assert [lora.step for lora in prepared(trained, steps="all").loras] == [2, 4]
    assert [lora.step for lora in prepared(trained, run=name).loras] == [4]
    [lora] = prepared(trained, run=name, steps=(2,)).loras
    assert lora.file == folder / "step-00000002" / "pytorch_lora_weights.safetensors"

    missing = problem(trained, steps=(2, 900))
    assert f"run {name} did not save a LoRA at step 900; the closest is step 4" in missing.what
    assert missing.where == str(folder)
    assert missing.fix == "use --step 4, or another of its 2 steps: 2, 4"
    misspelled = problem(trained, run=f"{name[:-1]}x")
    assert "does not exist" in misspelled.what
    assert misspelled.fix == f"did you mean {name}?"
    assert problem(trained, run="../..").fix == f"use one of {name}"

    lora.file.write_bytes(lora.file.read_bytes()[:-1])
    assert "step-00000002 is damaged" in problem(trained, steps=(2,)).what


def test_a_recipe_that_was_not_trained_or_has_no_prompts_is_an_error_with_a_fix(
    trained: Project,
) -> None:
    with pytest.raises(TrainingError) as raised:
        prepared(trained.changed("untrained"))
    assert "no checkpoint holds LoRA files" in raised.value.what
    without = trained.recipe.training.model_copy(update={"sample_prompts": ()})
    recipe = trained.recipe.model_copy(update={"training": without})
    with pytest.raises(DrawingError) as missing:
        prepare_drawing(recipe, Request())
    assert "prompts are missing" in missing.value.what
    assert "--prompt" in missing.value.fix
    assert prepare_drawing(recipe, Request(prompts=("a dog",))).prompts[0].caption == "a dog"


def test_references_for_a_model_that_accepts_none_are_an_error(trained: Project, tmp_path: Path) -> None:
    refused = problem(trained, references=(tmp_path / "before.png",))
    assert "accepts no reference images, got 1" in refused.what
    assert (refused.where, refused.fix) == ("--reference", "remove --reference")


def test_a_run_is_drawn_as_it_was_trained_although_the_recipe_has_changed(trained: Project) -> None:
    changed = trained.recipe.model_copy(
        update={
            "accelerate": trained.recipe.accelerate.model_copy(
                update={"mixed_precision": "bf16", "num_processes": 4}
            ),
            "training": trained.recipe.training.model_copy(
                update={"seed": 99, "sample_prompts": (PreviewPrompt(prompt="new"),)}
            ),
        }
    )
    job = prepare_drawing(changed, Request())
    assert job.recipe.accelerate.mixed_precision == "no"
    assert job.recipe.accelerate.num_processes == 1
    assert job.seed == 7
    assert [prompt.caption for prompt in job.prompts] == ["new"]
    assert prepare_drawing(changed, Request(seed=3)).seed == 3


def test_prompts_of_the_recipe_are_drawn_with_their_settings_and_a_requested_seed_replaces_theirs(
    trained: Project,
) -> None:
    own = PreviewPrompt(prompt="a red cat", height=32, width=96, steps=3, seed=11, lora_scale=0.5)
    training = trained.recipe.training.model_copy(update={"sample_prompts": (own,)})
    recipe = trained.recipe.model_copy(update={"training": training})
    [prompt] = prepare_drawing(recipe, Request()).prompts
    assert (prompt.size_hw, prompt.steps, prompt.seed, prompt.lora_scale) == ((32, 96), 3, 11, 0.5)
    [prompt] = prepare_drawing(recipe, Request(seed=5)).prompts
    assert (prompt.steps, prompt.seed) == (3, None)
    [prompt] = prepare_drawing(recipe, Request(prompts=("a red cat",))).prompts
    assert (prompt.size_hw, prompt.steps, prompt.seed) == ((64, 64), 20, None)

    odd = training.model_copy(update={"sample_prompts": (own.model_copy(update={"height": 33}),)})
    with pytest.raises(RecipeError, match="must be multiples of 8"):
        prepare_drawing(recipe.model_copy(update={"training": odd}), Request())


def test_a_run_that_is_being_trained_can_be_drawn(trained: Project) -> None:
    with hold_run(RunLayout(run_folders(trained)[0]), print):
        assert [lora.step for lora in prepared(trained, steps=(2, 4)).loras] == [2, 4]


def test_the_published_lora_of_a_deleted_run_is_drawn_with_the_recipe(trained: Project) -> None:
    run_folders(trained)[0].rename(trained.recipe.output_dir / "away")
    assert [lora.step for lora in prepared(trained).loras] == [4]


def test_no_existing_picture_is_replaced_and_each_call_gets_a_new_folder(
    trained: Project, tmp_path: Path
) -> None:
    pictures = trained.recipe.output_dir / "reports" / "pictures"
    (pictures / "007").mkdir(parents=True)
    assert prepared(trained).folder == pictures / "008"
    output = tmp_path / "comparison"
    output.mkdir()
    (output / "notes.txt").write_text("mine", encoding="utf-8")
    job = prepared(trained, output=output)
    picture = next(job.cells()).path
    picture.write_bytes(b"mine")
    existing = problem(trained, output=output)
    assert existing.what == f"1 picture exists already, such as {picture.name}"
    assert existing.where == str(output)
    assert "--output" in existing.fix
    assert prepared(trained, output=output, seed=3, prompts=("a",), strengths=(0.5,)).folder == output


def test_the_output_folder_must_not_overlap_a_dataset_the_cache_or_a_run(trained: Project) -> None:
    root = trained.recipe.output_dir.parent
    (root / "photos").mkdir()
    for name in ("photos", "photos/new", "cache", "output", "output/lora", "output/runs/x", ""):
        with pytest.raises(PathIsolationError) as raised:
            prepared(trained, output=root / name)
        assert "--output" in raised.value.where, name
    assert prepared(trained, output=trained.recipe.output_dir / "comparison")


def test_more_pictures_than_fit_on_a_sheet_are_an_error(trained: Project) -> None:
    strengths = tuple(number / 10 for number in range(MAX_PICTURES // 2 + 1))
    too_many = problem(trained, strengths=strengths)
    assert f"{MAX_PICTURES + 2} pictures" in too_many.what
    assert too_many.where == "1 step, 121 strengths, 2 prompts"
    assert len({cell.path for cell in prepared(trained, strengths=strengths[:-1]).cells()}) == MAX_PICTURES


def test_a_lora_file_that_cannot_be_used_is_an_error_with_a_fix(trained: Project, tmp_path: Path) -> None:
    folder = run_folders(trained)[0] / "checkpoints" / "step-00000002"
    state = problem(trained, file=folder / "adapter.safetensors")
    assert "not a LoRA" in state.what
    assert state.fix == f"use {folder / 'pytorch_lora_weights.safetensors'}"
    typo = problem(trained, file=folder / "demo_kohia.safetensors")
    assert typo.fix == f"did you mean {folder / 'demo_kohya.safetensors'}?"
    (tmp_path / "torn.safetensors").write_bytes(b"\x10\x00")
    assert "cannot be read" in problem(trained, file=tmp_path / "torn.safetensors").what
    job = prepared(trained, file=folder)
    assert (job.run, job.loras[0].label) == (None, "pytorch_lora_weights.safetensors")


def test_a_run_of_version_0_2_has_the_lora_of_its_last_step(trained: Project) -> None:
    folder = run_folders(trained)[0]
    for record in folder.glob("checkpoints/*/lora.json"):
        record.unlink()
    assert [lora.step for lora in prepared(trained, run=folder.name).loras] == [4]
    assert problem(trained, run=folder.name, steps=(2,)).fix.startswith("use --step 4")
    (folder / "finished.json").unlink()
    assert "has not saved a LoRA yet" in problem(trained, run=folder.name).what
    assert json.loads((folder / "run.json").read_text("utf-8"))


def test_a_requested_prompt_gets_the_trigger_word_of_the_run(trained: Project) -> None:
    file = run_folders(trained)[0] / "order.json"
    order = json.loads(file.read_text("utf-8"))
    order["recipe"]["datasets"][0]["captions"] |= {"trigger": "sks", "placeholder": "[trigger]"}
    file.write_text(json.dumps(order), encoding="utf-8")
    job = prepared(trained, prompts=("[trigger] on a table", "sks on a table", "a cat"))
    assert [prompt.caption for prompt in job.prompts] == ["sks on a table", "a cat"]

    order["recipe"]["datasets"][-1]["captions"] |= {"trigger": "sks", "placeholder": "[trigger]"}
    order["recipe"]["datasets"].append({**order["recipe"]["datasets"][0], "name": "other", "path": "/other"})
    order["recipe"]["datasets"][-1]["captions"] = {"trigger": "zwx", "placeholder": "[trigger]"}
    file.write_text(json.dumps(order), encoding="utf-8")
    error = problem(trained, prompts=("[trigger]",))
    assert error.what == "the placeholder [trigger] in a prompt stands for sks and zwx"
