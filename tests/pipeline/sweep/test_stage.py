"""The complete stage: halving without repeated steps, the winner's run, failures, stops and the pictures."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cli.main import latentline
from pipeline.encoding.workers import EVALUATION_MODULE
from pipeline.errors import RecipeError, StoppedError, SweepError
from pipeline.log import discard
from pipeline.processes import launch as processes
from pipeline.processes.launch import TRAINING_MODULE, Meanwhile
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.schema import RecipeFile
from pipeline.recipe.sweep import SweepSettings
from pipeline.reporting.findings import CheckContext
from pipeline.reporting.reports import StageResult
from pipeline.storage.tables import SCHEMAS, Tables
from pipeline.sweep import checks
from pipeline.sweep.concurrency import Concurrency
from pipeline.sweep.stage import sweep
from pipeline.sweep.variants import variants
from pipeline.trained_lora.job import read_job
from pipeline.trained_lora.run_folder import RunLayout
from pipeline.trained_lora.stage import plan_run
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.evaluation.evaluated import settings
from tests.pipeline.trained_lora.equal_runs import assert_equal_runs
from tests.pipeline.trained_lora.project import Project
from tests.pipeline.trained_lora.runs import run


def with_sweep(project: Project, **values: Any) -> Project:
    section = SweepSettings.model_validate_json(json.dumps(values))
    update = {"sweep": section, "evaluation": settings(pictures=2)}
    return Project(project.recipe.model_copy(update=update), project.latents, project.text)


def swept(project: Project, launch: InProcessLaunch) -> StageResult:
    return sweep(project.recipe, project.latents, project.text, launch=launch, log=launch.lines.append)


def trained_steps(launch: InProcessLaunch) -> int:
    return sum(line.endswith(" training") for line in launch.lines)


def found(recipe: Recipe) -> dict[str, Any]:
    context = CheckContext(recipe, Tables(recipe.output_dir))
    return {finding.name: finding for finding in checks.run(context)}


class StopsAfter(InProcessLaunch):
    """A launch that raises `StoppedError` once a training has been stopped."""

    def __call__(self, module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
        try:
            super().__call__(module, job_file, meanwhile)
        except Exception as err:
            if "stopped" in str(err):
                raise StoppedError("stopped", where="", fix="") from err
            raise


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_R21_variants_are_judged_by_the_same_pictures_and_nothing_is_trained_or_drawn_twice(
    trained: Project,
) -> None:
    grid = {"training.learning_rate": [0.1, 1e-9]}
    project, launch = with_sweep(trained, grid=grid, halving={"first": 0.5}), InProcessLaunch()
    output = project.recipe.output_dir
    before = files_of(output)
    result = swept(project, launch)

    # The first variant is the recipe's own run, which has finished; it has the LoRAs of both rungs.
    assert trained_steps(launch) == 2, "the second variant stops at the first rung"
    assert launch.modules.count(TRAINING_MODULE) == 1
    assert launch.modules.count(EVALUATION_MODULE) == 2 * 3
    table = result.table
    assert dict(table.schema) == SCHEMAS["sweep"]
    columns = ("variant", "step", "steps", "error")
    assert table.select(columns).rows() == [(1, 2, 2, None), (1, 4, 2, None), (2, 2, 2, None)]
    assert table["promoted"].to_list()[::2] == [True, False]
    second = table.filter(variant=2).row(0, named=True)
    assert second["score"] == pytest.approx(0.0, abs=0.05), "it has learned nothing"
    assert json.loads(second["overrides"]) == {"training.learning_rate": 1e-9}
    report = json.loads(json.dumps(result.report))
    assert (report["steps"], report["steps_of_all"]) == (6, 8)

    # The recipe's lora/, tables and reports stay as they are.
    after = files_of(output)
    assert {name for name in before if before[name] != after[name]} == set()
    new = {name for name in after.keys() - before.keys() if not name.startswith("runs/")}
    assert new == {f"reports/sweep/{name}" for name in ("parallel.png", "scores.png", "sheet.jpg")}

    again = InProcessLaunch()
    assert swept(project, again).table.equals(table)
    assert again.modules == []


def test_R21_R22_a_stopped_sweep_goes_on_and_its_winner_is_the_finished_run_of_a_plain_recipe(
    make_project: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = {"photos": {"validation_fraction": 0.4}}
    options = {"steps": 8, "validate_every": 8, "gradient_accumulation": 1, "lr_scheduler": "cosine"}
    project = make_project(datasets=datasets, **options)
    grid = {"training.optimizer": ["adamw", "torch.optim.Missing", "torch.optim.SGD"]}
    sweeping = with_sweep(project, grid=grid, judge="validation_loss", halving={"first": 0.5})

    # Stopped in the middle of the first rung, and started again by the command.
    with pytest.raises(StoppedError):
        swept(sweeping, StopsAfter(stop_after=1))
    launch = InProcessLaunch()
    monkeypatch.setattr(processes, "LocalLaunch", lambda *_: launch)
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path))
    values = sweeping.recipe.model_dump(mode="json", include=set(RecipeFile.model_fields))
    # JSON is YAML too.
    (tmp_path / "demo.yaml").write_text(json.dumps(values), encoding="utf-8")
    shown = CliRunner().invoke(latentline, ["sweep", "demo"])
    assert shown.exception is None, (shown.output, shown.exception)
    assert trained_steps(launch) == 4 * 3 - 2, "the first variant had two steps"
    table = Tables(sweeping.recipe.output_dir).read("sweep")
    rows = table.select("variant", "step", "steps", "promoted").rows()
    assert rows == [(1, 4, 4, True), (1, 8, 4, False), (2, 4, 0, False), (3, 4, 4, False)]
    assert "torch.optim does not define Missing" in table.drop_nulls("error")["error"].item()
    assert "failed: torch.optim does not define Missing" in shown.stdout
    assert "not decided: no variant is measurably better than the base model" in shown.stdout
    assert "12 steps, 50% of what all variants would take to their ends" in shown.stdout
    finding = found(sweeping.recipe)["variants_finished"]
    assert not finding.passed
    assert finding.rows[0]["variant"] == 2

    plain = Project(variants(sweeping.recipe)[0].recipes[0], project.latents, project.text)
    after = InProcessLaunch()
    assert run(plain, after).report["launched"] is False
    assert after.modules == []

    whole = plain.changed("whole")
    run(whole, InProcessLaunch())
    expected = plan_run(RecipeEntries(whole.recipe), whole.latents, whole.text, log=discard)[0]
    finished = plan_run(RecipeEntries(plain.recipe), plain.latents, plain.text, log=discard)[0]
    assert_equal_runs(read_job(finished.folder / "order.json"), expected, 8)


def test_variants_go_on_by_the_loss_that_they_reach_at_the_next_rung_if_it_goes_on_falling(
    make_project: Callable[..., Project],
) -> None:
    datasets = {"photos": {"validation_fraction": 0.4}}
    project = make_project(datasets=datasets, steps=8, validate_every=8, gradient_accumulation=1)
    grid = {"training.learning_rate": [4.0, 2.0, 0.3]}
    halving = {"first": 0.25, "keep": 0.5}
    table = swept(
        with_sweep(project, grid=grid, judge="validation_loss", halving=halving), InProcessLaunch()
    ).table

    score = {row[:2]: row[2] for row in table.select("variant", "step", "score").iter_rows()}
    assert score[2, 2] > score[1, 2] > score[3, 2], "there is no earlier rung, so the scores decide"
    assert score[2, 4] > score[1, 4]
    expected = {
        variant: score[variant, 4] + 2 * (score[variant, 4] - score[variant, 2]) for variant in (1, 2)
    }
    assert expected[1] > expected[2], "the second variant hardly improves any more"
    promoted = table.filter("promoted").select("variant", "step").rows()
    assert promoted == [(1, 2), (1, 4), (1, 8), (2, 2)]


def test_held_out_images_decide_which_variants_go_on_when_pictures_are_judged(trained: Project) -> None:
    grid = {"training.learning_rate": [0.3, 1e-9]}
    halving = {"first": 0.25, "keep": 0.25}
    table = swept(with_sweep(trained, grid=grid, halving=halving), InProcessLaunch()).table
    first = table.filter(step=1)
    assert first["score"].to_list() == sorted(first["score"]), "its pictures are worse"
    assert first["promoted"].to_list() == [True, False]


class TwoAtOnce(InProcessLaunch):
    """A launch of two trainings at the same time, of which each waits for the other before it starts."""

    def __init__(self) -> None:
        super().__init__()
        self._both, self._one = threading.Barrier(2), threading.Lock()

    def __call__(self, module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
        if module == TRAINING_MODULE:
            self._both.wait(timeout=240)
        # Threads of a process share its random numbers.
        with self._one:
            super().__call__(module, job_file, meanwhile)


def test_variants_that_are_trained_at_the_same_time_have_the_table_of_a_sweep_one_after_another(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    datasets = {"photos": {"validation_fraction": 0.4}}
    project = make_project(datasets=datasets, steps=2, validate_every=2, gradient_accumulation=1)
    grid = {"training.learning_rate": [0.1, 0.2, 1e-9, 1e-8]}
    sweeping = with_sweep(project, grid=grid, judge="validation_loss", halving={"first": 0.5})
    output = sweeping.recipe.output_dir
    pristine = shutil.copytree(output, tmp_path / "pristine")
    expected = swept(sweeping, InProcessLaunch()).table
    shutil.rmtree(output)
    shutil.copytree(pristine, output)

    launch, events = TwoAtOnce(), list[str]()

    @contextmanager
    def place() -> Generator[None]:
        assert threading.current_thread() is threading.main_thread(), "signals interrupt no other one"
        events.append(f"{launch.modules.count(TRAINING_MODULE)} before")
        yield
        events.append(f"{launch.modules.count(TRAINING_MODULE)} after")

    def result() -> StageResult:
        tables = (sweeping.recipe, sweeping.latents, sweeping.text)
        return sweep(*tables, launch=launch, log=launch.lines.append, concurrency=Concurrency(2, place))

    assert result().table.equals(expected)
    assert events == ["0 before", "4 after", "4 before", "6 after"]
    assert result().table.equals(expected)
    assert len(events) == 4, "a sweep with nothing to train waits for no place"

    for name in expected.filter(step=2)["run"]:
        next(RunLayout(output / "runs" / name).exported.glob("*.safetensors")).unlink()
    assert result().table.equals(expected)
    assert events[4:] == ["6 before", "8 after"], "damaged results are trained again"


class Killed(BaseException):
    """The end of a process at an arbitrary point."""


class DiesAfter(InProcessLaunch):
    """A launch that ends the sweep when its workers have written `num_lines` lines.

    The progress of encoders is not counted: how many lines it has depends on time, and a thread of its own
    writes some of them.
    """

    def __init__(self, num_lines: int) -> None:
        super().__init__()
        self.num_lines = num_lines

    def _count(self) -> None:
        self.num_lines -= 1
        if self.num_lines == 0:
            raise Killed

    def info(self, text: str) -> None:
        super().info(text)
        self._count()

    def phase(self, text: str) -> None:
        self._count()

    def progress(self, done: int, total: int, text: str, **details: str) -> None:
        super().progress(done, total, text, **details)
        if text.endswith("training"):
            self._count()


@pytest.mark.slow
@pytest.mark.parametrize("judge", ["evaluation", "validation_loss"])
def test_R21_a_sweep_that_is_killed_at_random_points_ends_with_the_same_table(
    trained: Project, judge: str
) -> None:
    training = trained.recipe.training.model_copy(update={"steps": 4, "checkpoint_every": 3, "seed": 11})
    project = Project(trained.recipe.model_copy(update={"training": training}), trained.latents, trained.text)
    grid = {"training.learning_rate": [0.1, 0.02, 1e-9]}
    sweeping = with_sweep(project, grid=grid, judge=judge, halving={"first": 0.5})
    output = sweeping.recipe.output_dir
    pristine = shutil.copytree(output, output.with_name("pristine"))
    counting = DiesAfter(10**9)
    expected = swept(sweeping, counting).table
    num_lines = 10**9 - counting.num_lines

    for point in random.Random(0).sample(range(1, num_lines), 10):
        shutil.rmtree(output)
        shutil.copytree(pristine, output)
        with pytest.raises(Killed):
            swept(sweeping, DiesAfter(point))
        launch = InProcessLaunch()
        assert swept(sweeping, launch).table.equals(expected), f"killed after {point} of {num_lines} lines"


def test_variants_that_are_the_same_run_and_a_budget_that_is_too_small_are_refused(
    trained: Project,
) -> None:
    same = with_sweep(trained, grid={"training.sample_every": [0, 2]})
    launch = InProcessLaunch()
    with pytest.raises(SweepError, match=r"variant 1 \(sample_every 0\) and variant 2 .* are the same run"):
        swept(same, launch)
    grid = {"training.learning_rate": [0.1, 0.2, 0.3]}
    small = with_sweep(trained, grid=grid, halving={"first": 0.5}, budget={"steps": 7})
    with pytest.raises(SweepError, match=r"7 steps is too small: 3 variants .* are 8 steps"):
        swept(small, launch)
    assert launch.modules == []

    recipe = trained.recipe.model_dump(mode="json", include=set(RecipeFile.model_fields))
    with pytest.raises(RecipeError, match="the recipe has no section sweep"):
        swept(Project(recipe_from_mapping("demo", recipe), trained.latents, trained.text), launch)


def test_checks_without_a_report_fail(tmp_path: Path, trained: Project) -> None:
    recipe = trained.recipe.model_copy(update={"output_dir": tmp_path})
    assert {name: finding.passed for name, finding in found(recipe).items()} == {
        "variants_finished": False,
        "sweep_decided": False,
    }
