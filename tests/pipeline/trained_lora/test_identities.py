"""The identity of a run: contents and captions of its samples, and never their names (FAILURES R17)."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from safetensors.torch import load_file

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import LaunchError
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.trained_lora.fingerprint import run_facts, run_id, write_facts
from pipeline.trained_lora.identities import by_content, planned_run
from pipeline.trained_lora.inputs import training_inputs
from pipeline.trained_lora.job import TrainingJob
from pipeline.trained_lora.run_folder import RunLayout, read_metrics, run_folder
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.trained_lora.project import Project, put, unchecked, write_tables
from tests.pipeline.trained_lora.runs import begin, run, run_folders
from tests.pipeline.trained_lora.slider_project import slider_project
from tests.tensor_differences import differing_tensors

if TYPE_CHECKING:
    from pipeline.trained_lora.plan.steps import Slot
    from pipeline.trained_lora.recipe_facts import Facts

TWO: dict[str, dict[str, Any]] = {"holiday": {}, "garden": {}}

Make = Callable[..., Project]


def new_name(path: str) -> str:
    """Return a name at another place in the alphabet; both images of a slider's pair get the same."""
    # Not the beginning of a SHA-256, which the contents of these projects are.
    return f"{hashlib.md5(path.encode()).hexdigest()[:6]} ü.jpg"


def renamed(
    project: Project, *, images: Callable[[str], str] = str, datasets: Mapping[str, str] | None = None
) -> Project:
    """Return the project with other names of images and datasets, and the same contents."""
    new = {each.name: (datasets or {}).get(each.name, each.name) for each in project.recipe.datasets}
    recipe = project.recipe.model_copy(
        update={
            "datasets": tuple(
                each.model_copy(update={"name": new[each.name]}) for each in project.recipe.datasets
            )
        }
    )
    paths = {path: images(path) for path in project.latents["path"]}

    def with_new_names(table: pl.DataFrame, *keys: str) -> pl.DataFrame:
        named = table.with_columns(pl.col("path").replace(paths), pl.col("dataset").replace(new))
        named = named.with_columns(sample_id=pl.format("{}/{}", "dataset", "path"))
        return named.sort("sample_id", *keys)

    other = Project(
        recipe,
        with_new_names(project.latents, "bucket"),
        with_new_names(project.text, "variant"),
    )
    write_tables(other)
    return other


def plan_of(project: Project) -> tuple[Facts, TrainingJob]:
    entries = RecipeEntries(project.recipe)
    named = training_inputs(project.recipe, entries, project.latents, project.text)
    recipe, inputs, facts = planned_run(entries, named, project.latents)
    job = TrainingJob(recipe, entries.model_folder, run_id(facts), inputs, entries.text_spec(""), prompts=())
    return facts, job


def draws(job: TrainingJob) -> list[list[tuple[Any, ...]]]:
    """Return everything that the plan draws, with entries in place of names."""

    def drawn(slot: Slot) -> tuple[Any, ...]:
        item = job.inputs.named(slot.variant_id)
        view, text = item.views[slot.view], item.variants[slot.variant]
        files = [entry.key for entries in view.side_inputs.values() for entry in entries]
        chosen = (slot.index, slot.epoch, slot.occurrence, slot.drop_caption)
        return (*chosen, view.entry.key, text.entry.key, item.bucket, *files)

    return [[drawn(slot) for slot in step.slots()] for step in job.plan()]


COPIES = {"64x64-2.jpg": "64x64-0.jpg", "64x64-3.jpg": "64x64-1.jpg", "64x64-4.jpg": "64x64-1.jpg"}
"""Images that are copies of others: in the same dataset, and in the other one."""


def with_copies(project: Project) -> Project:
    """Return a project of two datasets with copies of images that have other captions."""
    entries = RecipeEntries(project.recipe)
    hashes = dict(project.latents.select("path", "content_hash").iter_rows())
    rows = [
        {**row, "content_hash": hashes[COPIES.get(row["path"], row["path"])]}
        for row in project.latents.to_dicts()
    ]
    rows = [{**row, **put(entries, entries.latent_spec(row))} for row in rows]
    copied = Project(project.recipe, unchecked("vae_latents", rows), project.text)
    write_tables(copied)
    return copied


PROJECTS: dict[str, Callable[[Make], Project]] = {
    "one dataset": lambda make: make(),
    "repeats": lambda make: make(datasets={"holiday": {"repeats": 2}, "garden": {}}),
    "weights": lambda make: make(datasets={"holiday": {"weight": 3.0}, "garden": {"weight": 1.0}}),
    "weights that end together": lambda make: make(
        datasets={"holiday": {"weight": 1.0}, "garden": {"weight": 1.0}}, exhausted="end_epoch"
    ),
    "losses": lambda make: make(datasets={"holiday": {"loss_weight": 0.5}, "garden": {}}),
    "prior and masks": lambda make: make(
        datasets={
            "holiday": {"mask": {"path": "/masks", "unmasked_weight": 0.2}},
            "garden": {"role": "prior"},
        }
    ),
    "references": lambda make: make(
        prediction="klein", datasets={"holiday": {"references": [{"path": "/before"}]}}
    ),
    "holdout": lambda make: make(datasets={"holiday": {"validation_fraction": 0.4}, "garden": {}}),
    "slider": slider_project,
    "copies": lambda make: with_copies(make(datasets=TWO)),
}
"""Projects in which each kind of fact depends on samples or datasets."""


@pytest.mark.parametrize("name", PROJECTS)
def test_R17_other_names_keep_the_run_id_and_the_plan(make_project: Make, name: str) -> None:
    project = PROJECTS[name](make_project)
    facts, job = plan_of(project)
    drawn = draws(job)
    assert job.inputs.named(job.inputs[3].variant_id) == job.inputs[3]

    # The new names are in another order than the old ones.
    names = [each.name for each in project.recipe.datasets]
    datasets = {each: f"set_{9 - number}" for number, each in enumerate(names)}
    for changes in ({"images": new_name}, {"datasets": datasets}, {"images": new_name, "datasets": datasets}):
        facts_after, job_after = plan_of(renamed(project, **changes))
        assert job_after.run == job.run, (changes, facts, facts_after)
        assert draws(job_after) == drawn, changes


MOVES: dict[str, dict[str, dict[str, Any]]] = {
    "weight": {"holiday": {"weight": 2.0}, "garden": {"weight": 1.0}},
    "loss_weight": {"holiday": {"loss_weight": 0.5}, "garden": {}},
    "mask": {"holiday": {"mask": {"path": "/masks"}}, "garden": {}},
    "role": {"holiday": {"role": "prior"}, "garden": {}},
    "repeats": {"holiday": {"repeats": 2}, "garden": {}},
}
"""Settings of a dataset by which its images differ from those of another one."""


@pytest.mark.parametrize("setting", MOVES)
def test_R17_an_image_that_moves_to_a_dataset_with_other_settings_is_another_run(
    make_project: Make, setting: str
) -> None:
    project = make_project(datasets=MOVES[setting])
    exchanged = renamed(project, datasets={"holiday": "garden", "garden": "holiday"})
    # Only the recipe's datasets keep their names, so that all images are now in the other one.
    moved = Project(project.recipe, exchanged.latents, exchanged.text)
    assert plan_of(moved)[1].run != plan_of(project)[1].run


def test_R17_the_order_of_datasets_in_the_recipe_keeps_the_run_id(make_project: Make) -> None:
    project = make_project(datasets=MOVES["weight"])
    recipe = project.recipe.model_copy(update={"datasets": project.recipe.datasets[::-1]})
    (_, job), (_, job_after) = plan_of(project), plan_of(Project(recipe, project.latents, project.text))
    assert job_after.run == job.run
    assert draws(job_after) == draws(job)


def test_R17_copies_of_an_image_are_trained_as_often_as_they_exist(make_project: Make) -> None:
    project = with_copies(make_project(datasets=TWO))
    _, job = plan_of(project)
    identities = job.inputs.identities
    assert identities.is_sorted()
    assert identities.n_unique() == len(project.latents) == 8
    assert identities.str.contains(" #").sum() == len(COPIES)
    one_less = Project(project.recipe, project.latents.head(-1), project.text)
    assert plan_of(one_less)[1].run != job.run


def test_R17_a_renamed_image_and_dataset_train_nothing_again(make_project: Make) -> None:
    project, launch = make_project(datasets=MOVES["weight"]), InProcessLaunch()
    first = run(project, launch)
    other, log = renamed(project, images=new_name, datasets={"holiday": "urlaub"}), list[str]()
    second = run(other, launch, log)
    assert len(launch.job_files) == 1
    assert second.report["run"] == first.report["run"]
    assert not second.report["launched"]
    assert f"run {first.report['run']} is finished and unchanged: nothing is launched" in log
    assert all(name.startswith(("urlaub/", "garden/")) for name in second.table["sample_id"])


@pytest.mark.parametrize("name", ["weights", "slider", "copies"])
def test_R17_names_decide_no_bit_of_the_weights(make_project: Make, name: str) -> None:
    project = PROJECTS[name](make_project)
    run(project, InProcessLaunch())
    other = renamed(project.changed("other"), images=new_name)
    run(other, InProcessLaunch())
    loras, losses = [], []
    for each in (project, other):
        layout = RunLayout(run_folders(each)[0])
        loras.append(load_file(each.recipe.output_dir / "lora" / "pytorch_lora_weights.safetensors"))
        losses.append([line["loss"] for line in read_metrics(layout.metrics, 6)])
    assert losses[0] == losses[1]
    assert differing_tensors(loras[0], loras[1]) == []


def test_R17_a_run_that_was_stopped_resumes_under_other_names(make_project: Make) -> None:
    project = make_project()
    with pytest.raises(LaunchError):
        run(project, InProcessLaunch(stop_after=3))
    resumed = run(renamed(project, images=new_name), InProcessLaunch())
    assert resumed.report["resumed_from"] == 4
    without_stop = project.changed("other")
    run(without_stop, InProcessLaunch())
    loras = [
        load_file(each.recipe.output_dir / "lora" / "pytorch_lora_weights.safetensors")
        for each in (project, without_stop)
    ]
    assert differing_tensors(loras[0], loras[1]) == []


def former_facts(project: Project) -> Facts:
    """Return the facts of the project's run as 0.3.0 and earlier: with names of samples and datasets."""
    entries = RecipeEntries(project.recipe)
    named = training_inputs(project.recipe, entries, project.latents, project.text)
    return run_facts(project.recipe, entries, named)


def with_former_run(project: Project) -> str:
    """Write what a run of 0.3.0 begins with, and return its id."""
    facts = former_facts(project)
    write_facts(RunLayout(run_folder(project.recipe.output_dir, run_id(facts))), facts)
    return run_id(facts)


@pytest.mark.parametrize("name", PROJECTS)
def test_R17_a_run_of_0_3_0_is_found_in_its_order(make_project: Make, name: str) -> None:
    project = PROJECTS[name](make_project)
    new = plan_of(project)[1].run
    former = with_former_run(project)
    facts, job = plan_of(project)
    assert facts == former_facts(project)
    assert job.run == former != new
    assert job.inputs.table["variant_id"].is_sorted()
    assert not job.inputs.is_by_content


def test_R17_a_run_of_0_3_0_that_only_the_address_has_is_found(make_project: Make) -> None:
    project = make_project()
    former = run_id(former_facts(project))
    address = Url(f"memory://{uuid.uuid4().hex}/out")
    recipe = project.recipe.model_copy(update={"output_address": address})
    remote = Project(recipe, project.latents, project.text)
    assert plan_of(remote)[1].run != former
    RemoteFolder(address).put(f"runs/{former}/run.json", b"{}")
    assert plan_of(remote)[1].run == former


def test_R17_a_run_of_0_3_0_is_trained_to_its_end_and_then_not_repeated(make_project: Make) -> None:
    project = make_project(datasets=MOVES["weight"])
    former = with_former_run(project)
    results = [run(project, InProcessLaunch()).report for _ in range(2)]
    assert [report["run"] for report in results] == [former, former]
    assert [report["launched"] for report in results] == [True, False]


def test_R17_the_reason_of_a_new_run_after_a_run_of_0_3_0_names_no_false_change(make_project: Make) -> None:
    project = make_project()
    former = with_former_run(project)
    begin(project)
    log = begin(project.changed("output", learning_rate=1e-3))
    lora = project.recipe.training.lora
    log += begin(project.changed("output", lora=lora.model_copy(update={"rank": 8})))
    reasons = [line.partition("; ")[2] for line in log if " is new; " in line]
    assert reasons[0] == f"it differs from {former} in optimizer.learning_rate 0.01 -> 0.001"
    assert "lora.rank 4 -> 8" in reasons[1]
    assert "samples" not in reasons[1]


def test_R17_the_reason_of_a_new_run_contains_no_other_names(make_project: Make) -> None:
    project = make_project(datasets=MOVES["weight"])
    begin(project)
    other = renamed(project, images=new_name, datasets={"holiday": "urlaub"})
    datasets = tuple(
        each.model_copy(update={"weight": 4.0}) if each.name == "urlaub" else each
        for each in other.recipe.datasets
    )
    other = Project(other.recipe.model_copy(update={"datasets": datasets}), other.latents, other.text)
    reasons = [line.partition("; ")[2] for line in begin(other) if " is new; " in line]
    assert len(reasons) == 1
    assert reasons[0].endswith("in plan.weights.urlaub 2.0 -> 4.0")


def test_by_content_keeps_every_column_but_the_order(make_project: Make) -> None:
    project = slider_project(make_project)
    entries = RecipeEntries(project.recipe)
    named = training_inputs(project.recipe, entries, project.latents, project.text)
    ordered = by_content(named, project.recipe, project.latents)
    same = ordered.table.drop("identity", "pair").sort("variant_id")
    assert same.equals(named.table.drop("pair"))
    pairs = named.table.join(ordered.table, on="variant_id", suffix="_after")
    assert pairs.select("pair", "pair_after").unique()["pair"].n_unique() == pairs["pair_after"].n_unique()
    assert (pairs["pair"].is_null() == pairs["pair_after"].is_null()).all()


def test_inputs_are_found_by_name_in_every_order(make_project: Make) -> None:
    _, job = plan_of(make_project())
    assert not job.inputs.table["variant_id"].is_sorted()
    for number, item in enumerate(job.inputs):
        assert job.inputs.number_of(item.variant_id) == number
    for missing in ("", "photos/", "zzz", f"{job.inputs[0].variant_id}x"):
        with pytest.raises(KeyError):
            job.inputs.number_of(missing)
