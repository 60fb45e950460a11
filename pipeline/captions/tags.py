"""The tags of a tagger of the WD14 family, and the caption that they make."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.errors import ModelError
from pipeline.models.captioner_folder import TAGS_FILE
from pipeline.models.diffusers_folder import read_bounded

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.recipe.captions import TaggerSettings

_CHARACTER, _RATING = 4, 9
"""Values of the column `category` that are not ordinary tags."""

# Faces such as ^_^ and o_o: at most one letter or digit on each side of the only underscore.
_FACE = re.compile(r"[^\w]*[^\W_]?[^\w]*_[^\w]*[^\W_]?[^\w]*")


class Tag(NamedTuple):
    """A tag as the model's file names it, such as long_hair, and the number of its category."""

    name: str
    category: int


def read_tags(folder: Path) -> list[Tag]:
    """Return the tags of a model in the order of its outputs; raises ModelError if its file is not usable."""
    file = folder / TAGS_FILE
    try:
        rows = csv.DictReader(read_bounded(file).decode("utf-8-sig").splitlines())
        return [Tag(row["name"], int(row["category"])) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError) as err:
        raise ModelError(
            f"the tags of the tagger cannot be read: {type(err).__name__} {err}",
            where=str(file),
            fix="set captions.model to a complete tagger; the file must be UTF-8 and have the columns name "
            "and category",
        ) from err


def as_words(name: str) -> str:
    """Return a tag as captions have it: with spaces in place of underscores, except in faces such as ^_^."""
    return name if _FACE.fullmatch(name) else name.replace("_", " ")


def comparable(tag: str) -> str:
    """Return what equal tags have in common, whether they have spaces or underscores, A or a."""
    return " ".join(tag.replace("_", " ").split()).casefold()


def comparable_tags(tags: Iterable[str]) -> set[str]:
    """Return `comparable` of each tag."""
    return {comparable(tag) for tag in tags}


def require_known(settings: TaggerSettings, tags: Sequence[Tag], *, where: str) -> None:
    """Raise ModelError if the model has no tag that the settings name, which is a misspelling."""
    known = {comparable(tag.name): tag.name for tag in tags}
    for key, names in (("vocabulary", settings.vocabulary or ()), ("exclude", settings.exclude)):
        unknown = next((name for name in names if comparable(name) not in known), None)
        if unknown is not None:
            close = difflib.get_close_matches(comparable(unknown), known, n=1)
            fix = f"did you mean {as_words(known[close[0]])}?" if close else f"remove it, or see {TAGS_FILE}"
            what = f"captions.tagger.{key} must have tags of the model, got {unknown}"
            raise ModelError(what, where=where, fix=fix)


def tags_of(tags: Sequence[Tag], probabilities: np.ndarray[Any, Any], settings: TaggerSettings) -> list[str]:
    """Return the tags of an image, the most probable first; ties are in the order of the model.

    Args:
        tags: Tags of the model.
        probabilities: Float array (number of tags,) in [0, 1].
        settings: Thresholds and vocabulary.
    """
    categories = np.array([tag.category for tag in tags])
    is_rating = categories == _RATING
    limits = np.where(categories == _CHARACTER, settings.character_threshold, settings.threshold)
    chosen = (probabilities >= limits) & ~is_rating
    if settings.ratings and is_rating.any():
        chosen[np.argmax(np.where(is_rating, probabilities, -1.0))] = True

    allowed = None if settings.vocabulary is None else comparable_tags(settings.vocabulary)
    excluded = comparable_tags(settings.exclude)
    order = np.argsort(-probabilities, kind="stable")
    names = [tags[index].name for index in order if chosen[index]]
    return [
        as_words(name)
        for name in names
        if comparable(name) not in excluded and (allowed is None or comparable(name) in allowed)
    ]
