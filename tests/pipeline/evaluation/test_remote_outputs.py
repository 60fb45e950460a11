"""An evaluation with output_dir at an address, on machines that share the address and the cache only."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assets.metadata import publish
from pipeline.encoding.workers import EVALUATION_MODULE
from pipeline.evaluation.choice import Choice
from pipeline.evaluation.prepare import Request
from pipeline.evaluation.publishing import publish_choice
from pipeline.evaluation.stage import ASSET, evaluate
from pipeline.log import discard
from pipeline.outputs.folder import OutputFolder, outputs_of
from pipeline.outputs.stage_files import stage_files
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.storage.tables import Tables
from pipeline.trained_lora.export.earlier_step import exportable_run
from pipeline.trained_lora.pictures.prepare import fetch_loras
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.evaluation.evaluated import evaluated_recipe

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.reporting.reports import StageResult
    from tests.pipeline.trained_lora.project import Project


def at_an_address(trained: Project, **values: Any) -> Recipe:
    """Upload the trained project's outputs, and return its recipe with their address."""
    address = Url(f"memory://{uuid.uuid4().hex}/out")
    folder = trained.recipe.output_dir
    files = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    OutputFolder(address, folder).upload(*files)
    return evaluated_recipe(trained, **values).model_copy(update={"output_address": address})


def evaluated_on(machine: Path, recipe: Recipe) -> tuple[StageResult, list[str]]:
    """Evaluate with an empty scratch folder as the asset does, and return the modules that were launched."""
    own = recipe.model_copy(update={"output_dir": machine})
    launch = InProcessLaunch()
    with stage_files(outputs_of(own), ASSET, checks_only=False, log=discard):
        result = evaluate(own, Request(), Tables(machine), launch=launch, log=discard)
        publish(own, ASSET, result)
    return result, launch.modules


def test_a_second_machine_draws_nothing_and_finds_the_first_ones_results(
    trained: Project, tmp_path: Path
) -> None:
    recipe = at_an_address(trained)
    first, launched = evaluated_on(tmp_path / "first", recipe)
    assert launched == [EVALUATION_MODULE, EVALUATION_MODULE]
    results = {"reports/evaluation.json", "reports/evaluation/curves.png", "reports/evaluation/grid.jpg"}
    remote = RemoteFolder(Url(str(recipe.output_address)))
    assert results | {"tables/evaluation_entries.parquet"} <= set(remote.list_files())
    assert not [file for file in (tmp_path / "first/runs").rglob("*") if file.name == "optimizer.pt"]

    second, launched = evaluated_on(tmp_path / "second", recipe)
    assert launched == []
    assert second.table.equals(first.table)
    assert second.report["pictures_reused"] == first.report["pictures_encoded"] == 6


def test_a_chosen_step_is_published_at_the_address(trained: Project, tmp_path: Path) -> None:
    recipe = at_an_address(trained, publish="best")
    own = recipe.model_copy(update={"output_dir": tmp_path / "machine"})
    run = exportable_run(recipe.output_dir)
    with stage_files(outputs_of(own), ASSET, checks_only=False, log=discard):
        fetch_loras(own, run, "all")
        step, _ = publish_choice(own, run, Choice(2, "step 2 is the best of 2"), log=discard)
    assert step == 2
    remote = RemoteFolder(Url(str(recipe.output_address)))
    assert json.loads(remote.read("lora/provenance.json"))["step"] == 2
