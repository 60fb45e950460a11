"""The corpus through scan and validation: the outcome and the pixels of each file."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import skimage
from PIL import Image

from pipeline.images.decode import decode
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.storage.tables import Tables
from pipeline.validated_dataset.stage import validate
from tests.corpus.corpus import all_cases, make
from tests.corpus.drawing import FORMATS, Case, of_format

# Pillow warns about damaged metadata. In tests, warnings are errors, which would reject the file.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

CASES = all_cases()


def recipe(root: Path, photos: Path) -> Recipe:
    values = {
        "datasets": [{"name": "d", "path": photos, "duplicates": "keep_all"}],
        "output_dir": root / "out",
        "cache_dir": root / "cache",
        "model": {"base": "a/b"},
    }
    return recipe_from_mapping("corpus", values)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pl.DataFrame, pl.DataFrame]:
    """Return the folder, the kept rows and the rejected rows."""
    root = tmp_path_factory.mktemp("corpus")
    make(root / "photos", CASES)
    corpus_recipe = recipe(root, root / "photos")
    tables = Tables(corpus_recipe.output_dir)
    raw = scan(corpus_recipe, tables, log=str)
    valid = validate(corpus_recipe, raw.table, tables, log=str)
    return root / "photos", valid.table, pl.concat([raw.rejected, valid.rejected])


def test_the_corpus_has_at_least_120_cases_with_unique_names() -> None:
    assert len(CASES) >= 120
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []
    assert len({case.reason for case in CASES}) >= 10


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.encode("unicode_escape").decode()[:60])
def test_each_file_has_its_expected_outcome(
    case: Case, outcome: tuple[Path, pl.DataFrame, pl.DataFrame]
) -> None:
    root, kept, rejected = outcome
    kept_rows = kept.filter(pl.col("path") == case.name)
    rejections = rejected.filter(pl.col("path") == case.name).to_dicts()
    if case.reason is None:
        assert rejections == []
        assert len(kept_rows) == 1
    elif case.reason == "skipped":
        assert rejections == []
        assert len(kept_rows) == 0
    else:
        assert len(kept_rows) == 0
        assert len(rejections) == 1
        assert rejections[0]["reason"] in case.reason.split(" or ")
        assert rejections[0]["detail"]
        assert rejections[0]["fix"]
    if case.pixels is not None:
        pixels = np.asarray(decode(root / case.name, (255, 255, 255))).astype(int)
        assert pixels.shape == case.pixels.shape == (*kept_rows.select("height", "width").row(0), 3)
        assert np.abs(pixels - case.pixels).max() <= case.tolerance


def test_every_image_is_either_kept_or_rejected(outcome: tuple[Path, pl.DataFrame, pl.DataFrame]) -> None:
    _, kept, rejected = outcome
    expected = [case.name for case in CASES if case.reason != "skipped"]
    assert sorted([*kept["path"], *rejected["path"]]) == sorted(expected)


def test_I22_sources_are_not_modified(tmp_path: Path) -> None:
    """The files are read-only for every user, and their time stamps must not change."""
    photos = tmp_path / "photos"
    make(photos, [case for case in CASES if case.name.startswith(("plain/", "broken/"))])
    files = sorted(photos.rglob("*"), reverse=True)
    for path in files:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in [*files, photos]}
    corpus_recipe = recipe(tmp_path, photos)
    tables = Tables(corpus_recipe.output_dir)
    validate(corpus_recipe, scan(corpus_recipe, tables, log=str).table, tables, log=str)
    assert {path: path.stat().st_mtime_ns for path in [*files, photos]} == before
    assert sorted(photos.rglob("*"), reverse=True) == files
    for path in files:
        path.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_I21_unreadable_files_and_folders_are_rejected(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    (photos / "closed").mkdir(parents=True)
    for name in ("good.png", "secret.png", "closed/a.png"):
        (photos / name).write_bytes(of_format("png"))
        (photos / name).with_suffix(".txt").write_text("x")
    (photos / "secret.png").chmod(0)
    (photos / "closed").chmod(0)
    for path in (tmp_path, *tmp_path.parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(0o755)
    reasons = as_nobody(tmp_path, photos)
    assert reasons == {"secret.png": "unreadable", "closed/": "unreadable_folder"}
    (photos / "closed").chmod(0o755)


AS_NOBODY = """
import json, os, sys
from pathlib import Path
from pipeline.raw_images.stage import scan
from pipeline.recipe import Recipe
from pipeline.storage.tables import Tables
import pipeline.validated_dataset.stage, pandera.polars
recipe = Recipe.model_validate_json(sys.stdin.read())
os.setgid(65534)
os.setuid(65534)
result = scan(recipe, Tables(recipe.output_dir), log=str)
print(json.dumps(dict(result.rejected.select("path", "reason").iter_rows())))
"""
"""Imports everything as root, then scans as another user."""


def as_nobody(root: Path, photos: Path) -> dict[str, str]:
    """Return the rejections of a scan in a process of another user."""
    process = subprocess.run(
        [sys.executable, "-c", AS_NOBODY],
        input=recipe(root, photos).model_dump_json(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    return json.loads(process.stdout.splitlines()[-1])


PHOTOS = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg")


@pytest.mark.parametrize(
    "count", [1000, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_I02_random_damage_to_images_never_fails_the_stage(tmp_path: Path, count: int) -> None:
    """Bytes are changed, deleted, inserted and overwritten, in photographs of every format."""
    draw = random.Random(2)
    sources: list[tuple[str, bytes]] = []
    for name in PHOTOS:
        with Image.open(Path(skimage.__file__).parent / "data" / name) as photo:
            small = photo.convert("RGB").resize((96, 72))
        for suffix, (kind, options) in FORMATS.items():
            file = tmp_path / f"x.{suffix}"
            small.save(file, kind, **options)
            sources.append((suffix, file.read_bytes()))
            file.unlink()
    photos = tmp_path / "photos"
    photos.mkdir()
    for index in range(count):
        suffix, data = sources[index % len(sources)]
        (photos / f"{index:05}.{suffix}").write_bytes(damaged(data, draw))
        (photos / f"{index:05}.txt").write_text("x")
    corpus_recipe = recipe(tmp_path, photos)
    tables = Tables(corpus_recipe.output_dir)
    started_s = time.monotonic()
    raw = scan(corpus_recipe, tables, log=str)
    valid = validate(corpus_recipe, raw.table, tables, log=str)
    rejected = pl.concat([raw.rejected, valid.rejected])
    assert len(valid.table) + len(rejected) == count
    assert rejected.filter(pl.any_horizontal(pl.col("fix", "detail").fill_null("") == "")).rows() == []
    assert 0 < len(rejected) < count, "the damage must affect some images, but not all"
    assert time.monotonic() - started_s < 30 + count * 0.2, "one file blocks the others"


def damaged(data: bytes, draw: random.Random) -> bytes:
    raw = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8, 40))):
        at = draw.randrange(len(raw)) if draw.random() < 0.7 else draw.randrange(min(64, len(raw)))
        how = draw.randrange(5)
        if how == 0:
            raw[at] ^= 1 << draw.randrange(8)
        elif how == 1:
            raw[at] = draw.randrange(256)
        elif how == 2 and len(raw) > 40:
            del raw[at : at + draw.randrange(1, 30)]
        elif how == 3:
            raw[at:at] = draw.randbytes(draw.randrange(1, 30))
        else:
            raw[at : at + 4] = draw.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
    return bytes(raw)
