"""`latentline evaluate` on a trained project, whose workers run in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from pipeline.cli.main import latentline
from pipeline.maintenance import verify
from pipeline.processes import launch
from pipeline.recipe import Recipe, load_recipe, recipes_dir
from pipeline.recipe.schema import RecipeFile
from pipeline.reporting.reports import read_report
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.evaluation.evaluated import PROMPTS, SCORER

if TYPE_CHECKING:
    from click.testing import Result

    from tests.pipeline.trained_lora.project import Project

PER_RUN = {"seconds", "startup_seconds", "pictures_encoded", "pictures_reused"}
PER_RUN |= {"features_encoded", "features_reused"}
"""Keys of a report that differ between two evaluations with the same result."""


@dataclass
class Command:
    """The recipe `demo` of a trained project, in a file.

    Attributes:
        modules: Modules that the last call has launched.
    """

    project: Project
    modules: list[str] = field(default_factory=list)

    @property
    def output(self) -> Path:
        return self.project.recipe.output_dir

    @property
    def cache(self) -> Path:
        return Path(str(self.project.recipe.cache_dir))

    def recipe(self) -> Recipe:
        return load_recipe(recipes_dir() / "demo.yaml")

    def __call__(self, name: str, *arguments: str) -> Result:
        self.modules.clear()
        return CliRunner().invoke(latentline, [name, "demo", *arguments])

    def evaluate(self, *arguments: str) -> Result:
        shown = self("evaluate", *arguments)
        assert shown.exception is None, (shown.output, shown.exception)
        return shown

    def report(self, name: str = "evaluation") -> dict[str, Any]:
        report = read_report(self.output, name)
        assert report is not None
        return report

    def result(self) -> dict[str, Any]:
        """Return the report without what differs between two evaluations with the same result."""
        return {name: value for name, value in self.report().items() if name not in PER_RUN}


@pytest.fixture
def command(trained: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return the commands of a trained project with a section `evaluation`."""
    own = Command(trained)

    def in_process(*_: object) -> InProcessLaunch:
        launched = InProcessLaunch()
        launched.modules = own.modules
        return launched

    monkeypatch.setattr(launch, "LocalLaunch", in_process)
    monkeypatch.setattr(verify, "LocalLaunch", in_process)
    configs = tmp_path / "configs"
    configs.mkdir()
    recipe = trained.recipe
    values = recipe.model_dump(mode="json", include=set(RecipeFile.model_fields))
    values["evaluation"] = {"prompts": PROMPTS, "pictures": 1, "scorers": [SCORER]}
    # JSON is YAML too.
    (configs / "demo.yaml").write_text(json.dumps(values), encoding="utf-8")
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(configs))
    return own
