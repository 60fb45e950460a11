"""Commands on a machine that has not unpacked the shards of a recipe, after a job on another machine."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from demo.tiny_models.captioners import write_idefics3
from pipeline.cli.main import latentline
from pipeline.maintenance import verify
from pipeline.processes import launch
from pipeline.recipe.packed import unpacked_folder
from tests.e2e.workspace import Workspace
from tests.in_process_worker import InProcessLaunch
from tests.pipeline.evaluation.evaluated import PROMPTS, SCORER


def test_commands_unpack_the_shards_that_they_read(
    fresh: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = tmp_path / "deployment.yaml"
    deployment.write_text(f"scratch: {tmp_path / 'scratch'}\n", encoding="utf-8")
    monkeypatch.setenv("LATENTLINE_DEPLOYMENT", str(deployment))
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(fresh.file.parent))
    for module in (launch, verify):
        monkeypatch.setattr(module, "LocalLaunch", lambda *_: InProcessLaunch())
    write_idefics3(tmp_path / "captioner")
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        for file in sorted(fresh.data.iterdir()):
            archive.add(file, file.name)
    shutil.rmtree(fresh.data)
    captions = {"from": "model", "model": str(tmp_path / "captioner"), "max_tokens": 4, "as": "column"}
    recipe = fresh.recipe(
        datasets=[{"name": "photos", "path": str(tmp_path / "photos.tar"), "captions": captions}],
        evaluation={"prompts": PROMPTS, "pictures": 1, "scorers": [SCORER]},
    )
    assert fresh.execute("train").success
    files = unpacked_folder(recipe.datasets[0])
    assert files.is_relative_to(tmp_path)
    shutil.rmtree(fresh.cache / "features")
    fresh.entries("latents")[0].write_bytes(b"damaged")

    for arguments in (["evaluate"], ["caption", "--sample", "2"], ["verify", "--repair"]):
        shutil.rmtree(files)
        command, *options = arguments
        result = CliRunner().invoke(latentline, [command, fresh.file.stem, *options])
        assert result.exit_code == 0, (result.output, result.exception)
        assert len(list(files.rglob("photo*.png"))) == 5
