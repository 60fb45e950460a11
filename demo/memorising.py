"""LoRAs that memorise six pictures, and healthy ones: does the check `not_memorised` tell them apart?

    python -m demo.memorising outputs/memorising          # stop it at any time; finished runs stay
    python -m demo.memorising outputs/memorising --runs 0 # the report only

No caption names the position and the size of a shape. So copies can be counted: a picture for the caption of
a training image copies it if both agree. For captions of held-out images, which no LoRA has seen, agreement
is chance. The results are in demo/results/memorised.jsonl, one line per run.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from PIL import Image

from demo.choosing.datasets import CONCEPT, HELD_OUT, KNOWN, NAME, Picture, concept_pictures
from demo.concept_pictures import known_scenes
from demo.experiments import changed_demo
from demo.world import draw_scene
from pipeline.cache.entry_format import PICTURE
from pipeline.evaluation.choice import breaks_limit
from pipeline.evaluation.pictures import picture_spec, picture_table
from pipeline.evaluation.prepare import Request, prepare_evaluation
from pipeline.images.pixel_values import perceptual_hash
from pipeline.log import discard
from pipeline.recipe import load_recipe
from pipeline.recipe.project import project_root
from pipeline.reporting.reports import read_report

if TYPE_CHECKING:
    from demo.world import Array
    from pipeline.recipe import Recipe

RESULTS_FILE = project_root() / "demo" / "results" / "memorised.jsonl"

OVERTRAINED, HEALTHY = "overtrained", "healthy"

TRAINING: dict[str, dict[str, Any]] = {
    OVERTRAINED: {
        "steps": 240,
        "batch_size": 3,
        "learning_rate": 3e-3,
        "lora": {"rank": 64, "alpha": 64.0, "conv_rank": 64},
    },
    HEALTHY: {"steps": 60, "batch_size": 8, "learning_rate": 4e-3},
}
"""Settings by kind. A healthy run has those of demo.choosing and sees each of its 38 pictures about 12 times;
an overtrained run sees each of its 6 pictures 120 times."""

NUM_PICTURES = {OVERTRAINED: (6, 6), HEALTHY: (14, 6)}
"""Pictures of the concept that are trained on, and held out, by kind."""

SEEDS = range(1, 11)

NUM_PROMPTS = 6
"""Captions of trained images that are drawn, and captions of held-out images."""

SCORERS = {
    "edges": "demo.edge_maps:EdgeScorer",
    "pixels": "demo.pixel_statistics:PixelScorer",
    "world": "demo.score:WorldScorer",
}
"""Scorers by their name in the results. The check uses the first one."""

MAX_SHIFT_PX = 0.75
"""Largest difference in position, along each axis, between a copy and its original."""

MAX_GROWTH_PX = 0.5
"""Largest difference in half the size. By chance, 1% of pictures agree in position and size."""

_CROSS_AREA = 2 * 2.1 * 0.7 - 0.7**2
"""Area of a cross with half size 1, see demo.world."""

_BORDER_PX = 3

_ALMOST_ALL = 0.999999
"""`validation_fraction` of the dataset that is held out; 1 is not allowed."""


@dataclass(frozen=True)
class Run:
    """One training of the study."""

    kind: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the run in the results."""
        return f"{self.kind}, seed {self.seed}"


def write_pictures(run: Run, folder: Path) -> None:
    """Write the pictures of a run; each run has its own colours, backgrounds, positions and sizes.

    Pictures with the same perceptual hash would be near duplicates of each other, and trained on together.
    """
    random = np.random.default_rng([50, run.seed])
    # Overtrained trial runs drew no yellow crosses at all, copied or new.
    concept = [each for each in concept_pictures() if each.scene.colour != "yellow"]
    order = [concept[index] for index in random.permutation(len(concept))]
    num_trained, num_held_out = NUM_PICTURES[run.kind]
    parts = {CONCEPT: order[:num_trained], HELD_OUT: order[num_trained:][:num_held_out]}
    if run.kind == HEALTHY:
        parts[KNOWN] = [Picture(scene, scene.caption) for scene in known_scenes()]

    hashes = set[int | None]()
    for name, pictures in parts.items():
        for number, each in enumerate(pictures):
            while True:
                picture = Image.fromarray(draw_scene(each.scene, random))
                if (bits := perceptual_hash(picture)) not in hashes:
                    break
            hashes.add(bits)
            file = folder / name / f"{number:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            picture.save(file)
            file.with_suffix(".txt").write_text(each.caption + "\n", encoding="utf-8")


def memorising_recipe(run: Run, folder: Path, cache: Path) -> Recipe:
    """Write the pictures of a run into an empty folder, and return its recipe."""
    write_pictures(run, folder / "study")
    drawn = {"steps": 4, "guidance_scale": 2.5, "height": 64, "width": 64}
    prompts = [
        {"prompt": file.read_text("utf-8").strip(), "role": role, **drawn}
        for role, name in (("trained", CONCEPT), ("concept", HELD_OUT))
        for file in sorted((folder / "study" / name).glob("*.txt"))[:NUM_PROMPTS]
    ]
    return changed_demo(
        folder,
        datasets=[
            {
                "name": name,
                "path": str(folder / "study" / name),
                # Held-out pictures have the same trigger word, so they belong to the concept.
                "captions": {
                    "from": "sidecar",
                    "suffix": ".txt",
                    "trigger": None if name == KNOWN else NAME,
                },
                "validation_fraction": _ALMOST_ALL if name == HELD_OUT else 0.0,
            }
            for name in (CONCEPT, HELD_OUT, KNOWN)
            if (folder / "study" / name).is_dir()
        ],
        cache_dir=str(cache),
        checks={"near_duplicate_bits": 0},
        accelerate={"cpu_threads": 1, "mixed_precision": "bf16"},
        training={
            **TRAINING[run.kind],
            "lr_scheduler": "cosine",
            "warmup_steps": 10,
            "seed": run.seed,
            "checkpoint_every": TRAINING[run.kind]["steps"],
            "sample_every": 0,
            "trackers": [],
        },
        evaluation={"prompts": prompts, "pictures": 4, "steps": "last", "scorers": [*SCORERS.values()]},
    )


def execute(recipe: Recipe) -> None:
    """Run the recipe's job in this process, with forked launches."""
    from assets.definitions import build_definitions
    from assets.names import LAUNCHER_RESOURCE
    from demo.forked_launch import ForkedLauncher

    job = build_definitions([recipe]).resolve_job_def(f"{recipe.name}_train")
    job.execute_in_process(resources={LAUNCHER_RESOURCE: ForkedLauncher()})


def pose(picture: Array) -> tuple[float, float, float]:
    """Return x, y and half the size of the cross in a picture, in pixels; NaN in a plain picture."""
    pixels = picture.astype(np.float32)
    border = np.ones(pixels.shape[:2], dtype=bool)
    border[_BORDER_PX:-_BORDER_PX, _BORDER_PX:-_BORDER_PX] = False
    background = np.median(pixels[border], axis=0)
    distance = np.linalg.norm(pixels - background, axis=-1)
    inside = distance > 0.8 * np.quantile(distance, 0.98)
    if not inside.any():
        return math.nan, math.nan, math.nan

    # Each pixel's place between the two colours, because pixels at the edges are mixed.
    to_shape = np.median(pixels[inside], axis=0) - background
    mask = np.clip((pixels - background) @ to_shape / float(to_shape @ to_shape), 0, 1)
    rows, columns = np.indices(mask.shape) + 0.5
    area = float(mask.sum())
    x, y = (float((mask * each).sum()) / area for each in (columns, rows))
    return x, y, math.sqrt(area / _CROSS_AREA)


def is_copy(picture: Array, image: Array) -> bool:
    """Return whether a picture of a cross has the position and the size of another one."""
    x, y, half = np.abs(np.subtract(pose(picture), pose(image)))
    return bool(max(x, y) <= MAX_SHIFT_PX and half <= MAX_GROWTH_PX)


def result(run: Run, recipe: Recipe) -> dict[str, Any]:
    """Return the result of a finished and evaluated run."""
    report = read_report(recipe.output_dir, "evaluation")
    checks = read_report(recipe.output_dir, "evaluation_checks")
    assert report is not None
    assert checks is not None
    (check,) = (each for each in checks["checks"] if each["name"] == "not_memorised")
    folder = recipe.source.parents[1] / "study"
    copied = {role: _copied(recipe, role, folder / name) for role, name in _IMAGES.items()}
    return {
        "run": run.name,
        "kind": run.kind,
        "seed": run.seed,
        "copied": copied["trained"],
        "chance": copied["concept"],
        **{name: report["by_scorer"][scorer][-1]["copies"] for name, scorer in SCORERS.items()},
        "limit": report["limits"]["copies"],
        "passed": check["passed"],
    }


_IMAGES = {"trained": CONCEPT, "concept": HELD_OUT}
"""Dataset of the images with a prompt's caption, by the prompt's role."""


def _copied(recipe: Recipe, role: str, folder: Path) -> str:
    """Return a digit per picture of the last step: 1 if it copies the image with its caption."""
    images = {
        file.with_suffix(".txt").read_text("utf-8").strip(): np.asarray(Image.open(file))
        for file in folder.glob("*.png")
    }
    evaluation = prepare_evaluation(recipe, Request(), log=discard)
    rows = picture_table(evaluation).filter(pl.col("step") > 0, role=role).sort("prompt", "seed")
    store = evaluation.entries.store
    return "".join(
        str(int(is_copy(store.read(picture_spec(row))[PICTURE], images[row["prompt"]])))
        for row in rows.iter_rows(named=True)
    )


def study_runs() -> Iterator[Run]:
    """Yield all runs."""
    for seed in SEEDS:
        for kind in (OVERTRAINED, HEALTHY):
            yield Run(kind, seed)


def add_runs(runs: Sequence[Run], folder: Path, results_file: Path) -> None:
    """Train and evaluate runs one after another, and add their results to a file."""
    for run in runs:
        own = folder / f"{run.kind}-{run.seed}"
        file = own / "configs" / "demo.yaml"
        if file.is_file():
            # An interrupted run continues.
            recipe = load_recipe(file)
        else:
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir(parents=True)
            recipe = memorising_recipe(run, own, folder / "cache")
        execute(recipe)
        line = result(run, recipe)
        results_file.parent.mkdir(exist_ok=True)
        with results_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_results(file: Path) -> list[dict[str, Any]]:
    """Return the results of finished runs, overtrained ones first and by seed; [] without a file."""
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return sorted(map(json.loads, lines), key=lambda line: (line["kind"] == HEALTHY, line["seed"]))


def is_flagged(result: Mapping[str, Any], limit: float | None = None) -> bool:
    """Return whether the check's scorer breaks a limit of `copies`; None for the recipe's."""
    number = result[next(iter(SCORERS))]
    return breaks_limit("copies", number["mean"], number["low"], result["limit"] if limit is None else limit)


def report(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the results, and how many LoRAs of each kind are flagged."""
    rows = [
        "| run | copied | by chance | `copies`, edges | pixels | world | `not_memorised` |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        copied = [f"{result[name].count('1')} of {len(result[name])}" for name in ("copied", "chance")]
        numbers = [
            f"{number['mean']:.2f} ({number['low']:.2f} to {number['high']:.2f})"
            for number in (result[name] for name in SCORERS)
        ]
        shown = "passed" if result["passed"] else "flagged"
        rows.append(f"| {' | '.join([result['run'], *copied, *numbers, shown])} |")

    rows += ["", "| LoRAs | flagged | with a limit of 0 |", "|---|---|---|"]
    for kind in (OVERTRAINED, HEALTHY):
        own = [result for result in results if result["kind"] == kind]
        flagged = [sum(is_flagged(result, limit) for result in own) for limit in (None, 0.0)]
        rows.append(f"| {kind} | {' | '.join(f'{number} of {len(own)}' for number in flagged)} |")
    return "\n".join(rows)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the cache and of the runs")
    parser.add_argument("--runs", type=int, help="maximum number of runs to add; all by default")
    parser.add_argument("--part", default="1/1", help="part of the missing runs, such as 1/2")
    arguments = parser.parse_args()

    finished = {line["run"] for line in read_results(RESULTS_FILE)}
    part, num_parts = map(int, arguments.part.split("/"))
    missing = [run for run in study_runs() if run.name not in finished]
    missing = missing[part - 1 :: num_parts][: arguments.runs]
    add_runs(missing, arguments.folder.absolute(), RESULTS_FILE)
    print(report(read_results(RESULTS_FILE)))


if __name__ == "__main__":
    main()
