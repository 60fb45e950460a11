"""The captioner in demo/captioner: small, traceable, and right about the demo's pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.concept_pictures import concept_scenes, known_scenes, scene_of_file, write_pictures
from demo.pretrain import MIN_CAPTIONS
from demo.pretraining.captioner import captioner_scores
from pipeline.captions.stage import caption_images
from pipeline.raw_images.stage import scan
from pipeline.recipe import load_recipe
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.stage import validate
from tests.in_process_worker import InProcessLaunch

ROOT = Path(__file__).parents[2]
CAPTIONER, BASE = ROOT / "demo" / "captioner", ROOT / "demo" / "base"
MAX_BYTES = 8_000_000


def quiet(_: str) -> None: ...


@pytest.fixture(scope="module")
def provenance() -> dict[str, Any]:
    return json.loads((CAPTIONER / "provenance.json").read_text("utf-8"))


def test_the_files_fit_in_8_mb_with_those_of_the_base_model() -> None:
    files = [file for folder in (CAPTIONER, BASE) for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES


def test_commit_seed_loss_curve_and_scores_are_recorded(provenance: dict[str, Any]) -> None:
    assert len(provenance["commit"]) == 40
    assert provenance["seed"] == 0
    losses = provenance["captioner"]["losses"]
    assert losses[-1]["step"] == provenance["captioner"]["steps"]
    assert losses[-1]["loss"] < losses[0]["loss"] / 50
    assert set(provenance["scores"]) == {"known", "doodles", "concept"}
    assert min(provenance["scores"].values()) >= MIN_CAPTIONS


@pytest.mark.slow
def test_new_pictures_score_as_recorded(provenance: dict[str, Any]) -> None:
    assert captioner_scores(CAPTIONER, seed=0) == pytest.approx(provenance["scores"], abs=0.01)


def test_the_recipe_differs_from_the_demo_s_in_nothing_but_the_captions() -> None:
    captioned, given = (
        yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text("utf-8"))
        for name in ("demo_captions", "demo")
    )
    assert [each["name"] for each in captioned["datasets"]] == [each["name"] for each in given["datasets"]]
    for values in (captioned, given):
        del values["datasets"], values["output_dir"]
    assert captioned == given


def test_the_recipe_captions_pictures_without_a_text_as_their_scenes(tmp_path: Path) -> None:
    number = write_pictures(tmp_path / "pictures", with_captions=False)
    assert number == len(list((tmp_path / "pictures").rglob("*"))) - 2
    file = tmp_path / "demo_captions.yaml"
    text = (ROOT / "configs" / "demo_captions.yaml").read_text("utf-8")
    text = text.replace(" data/demo_captions", f" {tmp_path / 'pictures'}")
    text = text.replace(" .cache/latentline", f" {tmp_path / 'cache'}")
    file.write_text(text.replace(" outputs/demo_captions", f" {tmp_path / 'out'}"), "utf-8")

    recipe = load_recipe(file)
    tables = Tables(recipe.output_dir)
    raw = scan(recipe, tables, log=quiet).table
    written = caption_images(recipe, raw, tables, launch=InProcessLaunch(), log=quiet).table
    valid = validate(recipe, raw, tables, log=quiet, written=written).table
    expected = {scene.caption for scene in (*concept_scenes(), *known_scenes())}
    assert len(valid) == number == len(expected)
    assert set(valid["caption"]) == expected
    for path, caption in valid.select("path", "caption").iter_rows():
        scene = scene_of_file(Path(path))
        assert scene is not None
        assert scene.caption == caption
