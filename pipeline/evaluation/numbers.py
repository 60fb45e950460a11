"""What a step of a run has learned and what it has damaged, in four numbers per step and scorer.

f(x) is the feature of a picture or text, cos the cosine. x is a picture of a step, b the base model's picture
of the same prompt and seed, H and T are the held-out and the training images of the prompt's concept.

    learned   mean over h in H of cos(x, h) - cos(b, h)              prompts of the concept
    obeys     cos(x, text) - cos(b, text)                            prompts of the concept, other subjects
    drift     1 - cos(x, b)                                          prompts without the concept
    copies    mean over own t in T of cos(x, t)                      captions of trained images
              - mean over own h in H of cos(y, h)

An image is a prompt's own if the prompt is its caption. A prompt with held-out images of its own has only
these as its H in `learned`. In `copies`, y is a picture of the same step and seed for the caption of a
held-out image. If no caption tells trained from held-out images, `copies` compares the closest ones:

    copies    max over T of cos(x, t) - max over H of cos(x, h)      prompts of the concept
              - mean over h in H of the same of h, with H without h

docs/evaluation.md has the reasons and the sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from pipeline.evaluation.intervals import CELL, Interval, interval

if TYPE_CHECKING:
    import numpy.typing as npt

    from pipeline.evaluation.features import References, ScorerFeatures

    Floats = npt.NDArray[np.floating[Any]]

NUMBERS = ("learned", "obeys", "drift", "copies")

SCORES: dict[str, Any] = {
    "step": pl.Int64,
    "strength": pl.Float64,
    "prompt": pl.String,
    "role": pl.String,
    "concept": pl.String,
    "seed": pl.Int64,
    "scorer": pl.String,
    "number": pl.String,
    "score": pl.Float64,
    "picture": pl.String,
}
"""Columns of the scores, with one row per picture, scorer and number."""

_STEP = ("step", "strength", "seed")
"""Columns that pictures of two prompts have in common."""

_ABSENT = {
    "learned": "learned needs held-out images of the concept and prompts with the role concept; set "
    "datasets[].validation_fraction",
    "obeys": "obeys needs a scorer that reads texts, such as clip",
    "drift": "drift needs prompts with the role base",
    "copies": "copies needs captions of trained images as prompts with the role trained and captions of "
    "held-out images as prompts with the role concept, or two held-out images with a caption that trained "
    "images have too; use prompts: auto, and raise datasets[].validation_fraction",
}
"""Reason by number for which no scorer has it."""


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of one step at one strength; None if the pictures, texts or images for it are missing."""

    step: int
    strength: float
    learned: Interval | None
    obeys: Interval | None
    drift: Interval | None
    copies: Interval | None

    def __getitem__(self, number: str) -> Interval | None:
        """Return a number by its name in `NUMBERS`."""
        return getattr(self, number)

    def as_json(self) -> dict[str, Any]:
        """Return the values for a report."""
        values = {name: self[name] for name in NUMBERS}
        return {
            "step": self.step,
            "strength": self.strength,
            **{name: value and value.as_json() for name, value in values.items()},
        }


@dataclass(frozen=True)
class Bleeding:
    """How much closer to each concept a step draws the prompts of each concept than the base model does.

    Attributes:
        concepts: Order of rows and columns.
        matrix: `learned` with all held-out images; a row is the concept of the prompts, a column that of the
            images.
        bled: Pairs of a prompted concept and another one, to which its pictures have come measurably closer
            than to their own.
    """

    step: int
    strength: float
    concepts: tuple[str, ...]
    matrix: tuple[tuple[Interval, ...], ...]
    bled: tuple[tuple[str, str], ...]

    def as_json(self) -> dict[str, Any]:
        """Return the values for a report."""
        return {
            "step": self.step,
            "strength": self.strength,
            "concepts": list(self.concepts),
            "matrix": [[cell.as_json() for cell in row] for row in self.matrix],
            "bled": [list(pair) for pair in self.bled],
        }


@dataclass(frozen=True)
class Measured:
    """Result of an evaluation.

    Attributes:
        scores: Contribution of each picture to each number, with the columns `SCORES`.
        steps: Numbers by ascending step and strength, each from the first scorer that has it.
        by_scorer: Numbers of each scorer.
        absent: Reason for each number that no scorer has.
        bleeding: One matrix per step and strength, from the first scorer; empty unless several concepts have
            held-out images.
    """

    scores: pl.DataFrame
    steps: tuple[StepNumbers, ...]
    by_scorer: Mapping[str, tuple[StepNumbers, ...]]
    absent: Mapping[str, str]
    bleeding: tuple[Bleeding, ...]


def measure(per_scorer: Sequence[ScorerFeatures]) -> Measured:
    """Return the numbers of all steps from the features of one or more scorers, in the recipe's order."""
    pictures = [_Pictures(each) for each in per_scorer]
    return measured(pl.concat([each.scores() for each in pictures]), pictures[0].bleeding())


def measured(scores: pl.DataFrame, bleeding: tuple[Bleeding, ...] = ()) -> Measured:
    """Return the numbers of all steps from scores with the columns `SCORES`, in the order of the scorers."""
    by_scorer = {
        str(name): _step_numbers(rows) for (name,), rows in scores.group_by("scorer", maintain_order=True)
    }
    present = set(scores["number"])
    absent = {name: reason for name, reason in _ABSENT.items() if name not in present}
    return Measured(scores, _step_numbers(first_scorers(scores)), by_scorer, absent, bleeding)


def first_scorers(scores: pl.DataFrame) -> pl.DataFrame:
    """Return the scores of the first scorer of each number."""
    return scores.filter(pl.col("scorer") == pl.col("scorer").first().over("number"))


def _step_numbers(scores: pl.DataFrame) -> tuple[StepNumbers, ...]:
    steps = scores.select("step", "strength").unique().sort("step", "strength")
    groups = dict(scores.group_by("step", "strength", "number"))
    return tuple(
        StepNumbers(step, strength, **{name: _number(groups.get((step, strength, name))) for name in NUMBERS})
        for step, strength in steps.iter_rows()
    )


def _number(scores: pl.DataFrame | None) -> Interval | None:
    return None if scores is None else interval(scores)


class _Pictures:
    """Similarities between the pictures, prompts and images of one scorer."""

    def __init__(self, scored: ScorerFeatures) -> None:
        self._scorer, self._texts = scored.scorer, scored.texts
        self._held_out, self._training = scored.held_out, scored.training
        self._pictures = _unit(scored.features)
        self._held_out_images = _unit(scored.held_out.features)
        self._training_images = _unit(scored.training.features)

        # Each picture beside the base model's, from the same noise.
        base = scored.pictures.filter(step=0).select(*CELL, base_row="row")
        self._table = scored.pictures.filter(pl.col("step") > 0).join(base, on=CELL, how="inner")

    def scores(self) -> pl.DataFrame:
        """Return a table with the columns `SCORES`."""
        tables = [
            rows.with_columns(
                scorer=pl.lit(self._scorer), number=pl.lit(number), score=pl.Series(values, dtype=pl.Float64)
            ).select(*SCORES)
            for number, rows, values in self._scored()
        ]
        return pl.concat([pl.DataFrame(schema=SCORES), *tables])

    def _scored(self) -> Iterator[tuple[str, pl.DataFrame, Floats]]:
        """Yield numbers with rows of the table and their scores."""
        for (role, concept, prompt), rows in self._table.group_by("role", "concept", "prompt"):
            drawn, base = (self._pictures[rows[name].to_numpy()] for name in ("row", "base_row"))
            if role == "base":
                yield "drift", rows, 1 - (drawn * base).sum(axis=1)
            if role not in ("concept", "other"):
                continue
            if self._texts is not None:
                yield "obeys", rows, (drawn - base) @ _unit(self._texts[str(prompt)])
            held_out = _of_concept(self._held_out, str(concept))
            if role == "concept" and held_out:
                images = self._held_out_images[_of_caption(self._held_out, held_out, str(prompt)) or held_out]
                yield "learned", rows, ((drawn - base) @ images.T).mean(axis=1)
        for (concept,), rows in self._table.group_by("concept"):
            held_out, training = (
                _of_concept(images, str(concept)) for images in (self._held_out, self._training)
            )
            if held_out and training:
                yield from self._copies(rows, held_out, training)

    def _copies(
        self, rows: pl.DataFrame, held_out: list[int], training: list[int]
    ) -> Iterator[tuple[str, pl.DataFrame, Floats]]:
        """Yield rows of one concept's prompts with their scores of `copies`."""
        trained: list[tuple[pl.DataFrame, list[int]]] = []
        new: list[tuple[pl.DataFrame, list[int]]] = []
        either: list[pl.DataFrame] = []
        for (role, prompt), prompted in rows.sort("prompt").group_by("role", "prompt", maintain_order=True):
            own_trained = _of_caption(self._training, training, str(prompt))
            own_held_out = _of_caption(self._held_out, held_out, str(prompt))
            if role == "trained" and own_trained and not own_held_out:
                trained.append((prompted, own_trained))
            elif role == "concept" and own_held_out and not own_trained:
                new.append((prompted, own_held_out))
            elif role == "concept" and bool(own_trained) == bool(own_held_out):
                either.append(prompted)

        if trained and new:
            # In pairs, so that the interval covers the captions of both and their common seeds.
            for (prompted, own), (others, own_of_others) in zip(trained, cycle(new), strict=False):
                pairs = prompted.join(others.select(*_STEP, other_row="row"), on=_STEP, how="inner")
                drawn, other = (self._pictures[pairs[name].to_numpy()] for name in ("row", "other_row"))
                to_trained = (drawn @ self._training_images[own].T).mean(axis=1)
                yield (
                    "copies",
                    pairs,
                    to_trained - (other @ self._held_out_images[own_of_others].T).mean(axis=1),
                )
        elif either and (advantage := self._advantage(held_out, training)) is not None:
            for prompted in either:
                drawn = self._pictures[prompted["row"].to_numpy()]
                nearest_trained = (drawn @ self._training_images[training].T).max(axis=1)
                nearest_held_out = (drawn @ self._held_out_images[held_out].T).max(axis=1)
                yield "copies", prompted, nearest_trained - nearest_held_out - advantage

    def _advantage(self, held_out: list[int], training: list[int]) -> float | None:
        """Return how much closer real images that were not trained on are to `training` than to `held_out`.

        The nearest of many images is closer than the nearest of few. None without two held-out images that
        are no near duplicates of each other.
        """
        images = self._held_out_images[held_out]
        groups = np.array([self._held_out.groups[index] for index in held_out])
        among = np.where(groups[:, None] == groups[None, :], -np.inf, images @ images.T)
        if not np.isfinite(among).any(axis=1).all():
            return None
        to_training = images @ self._training_images[training].T
        return float((to_training.max(axis=1) - among.max(axis=1)).mean())

    def bleeding(self) -> tuple[Bleeding, ...]:
        """Return one matrix per step and strength; () unless several concepts have images and prompts."""
        prompted = self._table.filter(role="concept")
        images = {
            concept: self._held_out_images[indices].mean(axis=0)
            for concept in sorted(set(prompted["concept"]))
            if (indices := _of_concept(self._held_out, concept))
        }
        if len(images) < 2:
            return ()
        steps = prompted.filter(pl.col("concept").is_in(list(images))).sort("step", "strength")
        return tuple(
            self._bleeding(rows, images)
            for _, rows in steps.group_by("step", "strength", maintain_order=True)
        )

    def _bleeding(self, rows: pl.DataFrame, images: Mapping[str, Floats]) -> Bleeding:
        matrix: list[tuple[Interval, ...]] = []
        bled: list[tuple[str, str]] = []
        for concept in images:
            own = rows.filter(concept=concept)
            moved = self._pictures[own["row"].to_numpy()] - self._pictures[own["base_row"].to_numpy()]
            towards = {other: moved @ image for other, image in images.items()}
            matrix.append(tuple(_interval_of(own, values) for values in towards.values()))
            for other in images:
                ahead = _interval_of(own, towards[other] - towards[concept])
                if other != concept and ahead.low is not None and ahead.low > 0:
                    bled.append((concept, other))
        step, strength = rows.select("step", "strength").row(0)
        return Bleeding(step, strength, tuple(images), tuple(matrix), tuple(bled))


def _interval_of(rows: pl.DataFrame, values: Floats) -> Interval:
    return interval(rows.select(CELL).with_columns(score=pl.Series(values, dtype=pl.Float64)))


def _of_concept(images: References, concept: str) -> list[int]:
    return [index for index, each in enumerate(images.concepts) if each == concept]


def _of_caption(images: References, indices: list[int], caption: str) -> list[int]:
    return [index for index in indices if images.captions[index] == caption]


def _unit(features: Floats) -> Floats:
    """Return features divided by their norm; features of zeros, which have no direction, stay zero."""
    norms = np.linalg.norm(features, axis=-1, keepdims=True)
    return np.divide(features, norms, out=np.zeros_like(features), where=norms > 0)
