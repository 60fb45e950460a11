"""Scorers by name, folder and import path: their fingerprints, and errors before anything is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.errors import EvaluationError, ModelError
from pipeline.evaluation.scorers import ResolvedScorer, resolve_scorers
from pipeline.recipe.evaluation import ScorerSettings
from tests.pipeline.evaluation.evaluated import SCORER
from tests.pipeline.evaluation.tiny_scorers import WRITERS, changed_weights
from tests.small_recipe import small_recipe


@pytest.fixture
def resolve(tmp_path: Path) -> Callable[..., ResolvedScorer]:
    entries = RecipeEntries(small_recipe(tmp_path))

    def resolved(name: str, weights: Path | str | None = None, **settings: str) -> ResolvedScorer:
        each = ScorerSettings(name=name, weights=None if weights is None else str(weights), **settings)
        (scorer,) = resolve_scorers(entries, [each])
        return scorer

    return resolved


def test_the_fingerprint_is_that_of_the_files_and_not_of_their_folder(
    resolve: Callable[..., ResolvedScorer], tmp_path: Path, tiny_sd: Path
) -> None:
    for name, write in WRITERS.items():
        write(tmp_path / name, tiny_sd)
    dino = resolve("dino", tmp_path / "dino")
    assert (dino.name, dino.weights, dino.reads_texts) == ("dino", str(tmp_path / "dino"), False)
    (tmp_path / "dino").rename(tmp_path / "moved")
    assert resolve("dino", tmp_path / "moved").fingerprint == dino.fingerprint

    other = changed_weights(tmp_path / "moved", tmp_path / "changed")
    assert resolve("dino", other).fingerprint != dino.fingerprint, "the preprocessing decides features too"
    assert [resolve(name, tmp_path / name).reads_texts for name in ("clip", "siglip")] == [True, True]


def test_incomplete_and_pickled_weights_are_errors(
    resolve: Callable[..., ResolvedScorer], tmp_path: Path, tiny_sd: Path
) -> None:
    WRITERS["clip"](tmp_path / "clip", tiny_sd)
    (tmp_path / "clip" / "preprocessor_config.json").rename(tmp_path / "away.json")
    with pytest.raises(ModelError, match=r"the scorer clip has no preprocessor_config.json"):
        resolve("clip", tmp_path / "clip")
    (tmp_path / "away.json").rename(tmp_path / "clip" / "preprocessor_config.json")
    (tmp_path / "clip" / "model.safetensors").rename(tmp_path / "clip" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="got a pickle"):
        resolve("clip", tmp_path / "clip")
    with pytest.raises(ModelError, match="which does not exist"):
        resolve("clip", tmp_path / "no/such/folder")
    with pytest.raises(ModelError, match="is a local folder"):
        resolve("clip", tmp_path / "clip", revision="main")


def test_an_import_path_gets_the_weights_of_the_recipe(resolve: Callable[..., ResolvedScorer]) -> None:
    assert resolve(SCORER).fingerprint == f"{SCORER} colours "
    assert resolve(SCORER, "any text").fingerprint == f"{SCORER} colours any text"
    assert not resolve(SCORER).reads_texts


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("no.such.module:Scorer", "ModuleNotFoundError"),
        ("json:Scorer", "AttributeError"),
        ("json:JSONDecoder", "the scorer json:JSONDecoder has no fingerprint"),
    ],
)
def test_a_class_that_is_no_scorer_is_an_error(
    resolve: Callable[..., ResolvedScorer], name: str, what: str
) -> None:
    with pytest.raises(EvaluationError, match=what):
        resolve(name)


def test_an_import_path_is_never_imported_for_strangers(
    resolve: Callable[..., ResolvedScorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATENTLINE_UNTRUSTED", "1")
    with pytest.raises(EvaluationError, match="LATENTLINE_UNTRUSTED forbids"):
        resolve(SCORER)
