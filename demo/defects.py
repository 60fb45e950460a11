"""The study of all that a user can find before training: defects that are planted in the demo's dataset.

    python -m demo.defects outputs/defects            # ten seeds, half a minute each; stop it at any time
    python -m demo.defects outputs/defects --seeds 0  # the table of the stored results

The results are in demo/results/defects.jsonl, one line per seed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageFilter

from demo.concept_pictures import write_pictures
from demo.diagnosing import diagnosed, exchange_captions
from demo.experiments import changed_demo
from demo.picture_faults import CHECKS, named_samples
from demo.world import SHAPES, draw_scene, scene_of
from pipeline.aspect_buckets.stage import assign_buckets
from pipeline.log import discard
from pipeline.processes.launch import TRAINING_MODULE
from pipeline.raw_images.stage import scan
from pipeline.recipe.project import project_root
from pipeline.reporting.findings import CheckContext
from pipeline.storage.needed_columns import needed_columns
from pipeline.storage.tables import Tables
from pipeline.text_embeddings.stage import cache_text
from pipeline.vae_latents.stage import cache_latents
from pipeline.validated_dataset import checks
from pipeline.validated_dataset.stage import validate

if TYPE_CHECKING:
    from pipeline.processes.launch import Meanwhile
    from pipeline.recipe import Recipe
    from pipeline.reporting.reports import StageResult

RESULTS = project_root() / "demo" / "results" / "defects.jsonl"

TOP = 6
"""Number of images that a person looks at."""

BLUR_PX = 1.5
"""Sigma of the blur, the weakest one of `demo.picture_faults`."""

Result = dict[str, Any]
Change = Callable[[Path], dict[str, str]]


def plant(pictures: Path, seed: int) -> dict[str, str]:
    """Plant four defects, and return the kind of each defect by the name of its image."""
    wrong = sorted(Path(each).stem for each in exchange_captions(pictures, 2, seed))
    others = [file for file in sorted(pictures.rglob("*.png")) if file.stem not in wrong]
    choice = random.Random(seed)
    reshaped, blurred = choice.sample(others, 2)

    scene = scene_of(reshaped.with_suffix(".txt").read_text("utf-8"))
    assert scene is not None
    shape = choice.choice([each for each in SHAPES if each != scene.shape])
    picture = draw_scene(replace(scene, shape=shape), np.random.default_rng(seed))
    Image.fromarray(picture).save(reshaped)

    with Image.open(blurred) as opened:
        image = opened.filter(ImageFilter.GaussianBlur(BLUR_PX))
    image.save(blurred)
    return {**dict.fromkeys(wrong, "caption"), reshaped.stem: "shape", blurred.stem: "blurred"}


def trial(folder: Path, cache: Path, seed: int) -> Result:
    """Return what caption swap and checks name, in a dataset with the defects and in one without."""
    result: Result = {}
    for name, change in (("planted", plant_with(seed)), ("clean", nothing)):
        recipe, planted = dataset(folder / name, cache, seed, change)
        tables = Tables(recipe.output_dir)
        table = diagnosed(recipe, frozenset(), in_process).table
        worst = table.filter(verdict="does not fit").sort("score", descending=True)
        findings = {each.name: each for each in checks.run(CheckContext(recipe, tables))}
        named = set[str]().union(*(named_samples(findings[check]) for check in CHECKS))
        prefix = "" if name == "planted" else "clean_"
        result |= {f"{prefix}captions": [Path(each).stem for each in worst["sample_id"]]}
        result |= {f"{prefix}pictures": sorted(named)}
        if planted:
            result["planted"] = planted
    return result


def dataset(
    folder: Path, cache: Path, seed: int, change: Change, *, without: Sequence[str] = (), **sections: Any
) -> tuple[Recipe, dict[str, str]]:
    """Draw the demo's dataset, change it, fill its caches, and return its recipe and what was changed.

    Args:
        folder: An existing folder.
        cache: Folder of the cache, which datasets may share.
        seed: Seed of the pictures.
        change: Changes the pictures.
        without: Names of images to remove then.
        sections: Changes of the demo's recipe.
    """
    pictures = folder / "pictures"
    write_pictures(pictures, seed)
    # Pictures of one world resemble each other more than photographs.
    checks_section = {"near_duplicate_bits": 0}
    recipe = changed_demo(folder, cache_dir=str(cache), checks=checks_section, **sections)
    changed = change(pictures)
    for name in without:
        for file in pictures.rglob(f"{name}.*"):
            file.unlink()

    tables = Tables(recipe.output_dir)
    _keep(tables, "raw_images", scan(recipe, tables, log=discard))
    scanned = tables.read("raw_images", needed_columns("validated_dataset", "raw_images"))
    _keep(tables, "validated_dataset", validate(recipe, scanned, tables, log=discard))
    valid = tables.read("validated_dataset")
    _keep(tables, "aspect_buckets", assign_buckets(recipe, valid, log=discard))
    buckets = tables.read("aspect_buckets")
    _keep(tables, "vae_latents", cache_latents(recipe, buckets, tables, launch=in_process, log=discard))
    _keep(tables, "text_embeddings", cache_text(recipe, valid, tables, launch=in_process, log=discard))
    return recipe, changed


def plant_with(seed: int) -> Change:
    """Return the change of a dataset that plants the defects of a seed."""
    return lambda pictures: plant(pictures, seed)


def nothing(_pictures: Path) -> dict[str, str]:
    """Change no picture."""
    return {}


def _keep(tables: Tables, asset: str, result: StageResult) -> None:
    tables.write(asset, result.table)
    tables.write_rejected(asset, result.rejected)


class _Silent:
    """Receiver of the progress of a worker, which shows nothing."""

    def info(self, text: str) -> None: ...

    def phase(self, text: str) -> None: ...

    def progress(self, done: int, total: int, text: str, *, unit: str = "", note: str = "") -> None: ...


def in_process(module: str, job_file: Path, meanwhile: Meanwhile | None = None) -> None:
    """Run a worker in this process, because importing torch takes longer than the work on 48 pictures."""
    if meanwhile is not None:
        meanwhile()
    if module != TRAINING_MODULE:
        import_module(f"{module}.__main__").run(job_file, _Silent(), rank=0, num_ranks=1)
        return

    from pipeline.trained_lora.job import read_job
    from pipeline.trained_lora.worker.loop import train
    from pipeline.trained_lora.worker.stop_request import StopRequest

    train(read_job(job_file), _Silent(), StopRequest())


def read_results(file: Path) -> list[Result]:
    """Return the stored results by seed; none without a file."""
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return sorted(map(json.loads, lines), key=lambda each: each["seed"])


def top(result: Result) -> list[str]:
    """Return the images that a person looks at first: captions by score, then pictures."""
    return list(dict.fromkeys([*result["captions"], *result["pictures"]]))[:TOP]


def report(results: Iterable[Result]) -> Iterator[str]:
    """Yield the table of docs/diagnosis.md as Markdown."""
    yield "| seed | found in the first six | by the checks | false alarms | false alarms, clean |"
    yield "|---" * 5 + "|"
    for each in results:
        planted, named = each["planted"], {*each["captions"], *each["pictures"]}
        missed = sorted(kind for name, kind in planted.items() if name not in top(each))
        found = f"{len(planted) - len(missed)} of {len(planted)}"
        cells = (
            each["seed"],
            f"{found}, not {', '.join(missed)}" if missed else found,
            len(planted.keys() & set(each["pictures"])),
            len(named - planted.keys()),
            len({*each["clean_captions"], *each["clean_pictures"]}),
        )
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the cache and of the dataset in work")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds; stored ones are skipped")
    arguments = parser.parse_args()
    stored = {each["seed"] for each in read_results(RESULTS)}
    for seed in range(arguments.seeds):
        if seed not in stored:
            _add(arguments.folder.absolute(), seed)
    print("\n".join(report(read_results(RESULTS))))


def _add(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        result = trial(Path(own), folder / "cache", seed)
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"seed": seed, **result}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
