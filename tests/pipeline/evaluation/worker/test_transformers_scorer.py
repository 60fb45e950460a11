"""The scorers of Latentline give the features of transformers' own pipelines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.errors import EvaluationError
from pipeline.evaluation.worker.transformers_scorer import TransformersScorer
from tests.pipeline.evaluation.tiny_scorers import WRITERS

TEXTS = ["a red cat", "a blue rocket", "a long caption " * 50, ""]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_sd: Path) -> Callable[[str], Path]:
    """Return a function that returns the folder of a tiny scorer by name."""
    root = tmp_path_factory.mktemp("scorers")

    def of(name: str) -> Path:
        if not (root / name).exists():
            WRITERS[name](root / name, tiny_sd)
        return root / name

    return of


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    sizes_hw = [(64, 64), (48, 96), (31, 33)]
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)) for size in sizes_hw]


def unit(features: Any) -> Any:
    return features / np.linalg.norm(features, axis=-1, keepdims=True)


def test_dino_s_features_are_those_of_the_feature_extraction_pipeline(
    folders: Callable[[str], Path], images: list[Image.Image]
) -> None:
    from transformers import pipeline

    folder = str(folders("dino"))
    extract: Any = pipeline("image-feature-extraction", folder, pool=True)
    expected = np.array([extract(image)[0] for image in images], np.float32)
    features = TransformersScorer("dino", folder, "cpu").picture_features(images)
    assert features.dtype == np.float32
    assert features.shape == (3, 32)
    np.testing.assert_allclose(features, expected, rtol=1e-5, atol=1e-6)
    assert np.ptp(features, axis=0).max() > 0.05, "the pictures have different features"
    assert TransformersScorer("dino", folder, "cpu").text_features(TEXTS) is None


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_similarities_are_those_of_the_zero_shot_pipeline(
    folders: Callable[[str], Path], images: list[Image.Image], name: str
) -> None:
    from transformers import AutoModel, pipeline

    folder = str(folders(name))
    scorer = TransformersScorer(name, folder, "cpu")
    classify: Any = pipeline("zero-shot-image-classification", folder)
    # One label at a time for SigLIP, whose scores are independent; CLIP's are a softmax over the labels.
    outputs = [
        {
            each["label"]: each["score"]
            for each in classify(image, candidate_labels=TEXTS[:2], hypothesis_template="{}")
        }
        for image in images
    ]
    expected = np.array([[output[text] for text in TEXTS[:2]] for output in outputs])

    pictures, texts = unit(scorer.picture_features(images)), unit(scorer.text_features(TEXTS[:2]))
    model: Any = AutoModel.from_pretrained(folder)
    logits = torch.from_numpy(pictures @ texts.T) * model.logit_scale.exp().item()
    scores = logits.softmax(dim=-1) if name == "clip" else (logits + model.logit_bias.item()).sigmoid()
    np.testing.assert_allclose(scores.detach().numpy(), expected, rtol=1e-3, atol=1e-5)
    assert np.ptp(expected) > 1e-3, "the scores differ"


@pytest.mark.parametrize("name", list(WRITERS))
def test_features_do_not_depend_on_the_batch(
    folders: Callable[[str], Path], images: list[Image.Image], name: str
) -> None:
    scorer = TransformersScorer(name, str(folders(name)), "cpu")
    together = scorer.picture_features(images)
    np.testing.assert_allclose(together[1:2], scorer.picture_features(images[1:2]), rtol=1e-4, atol=1e-5)
    if name != "dino":
        np.testing.assert_allclose(
            scorer.text_features(TEXTS)[1:2], scorer.text_features(TEXTS[1:2]), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_configuration_chooses_no_code(
    folders: Callable[[str], Path], tmp_path: Path, images: list[Image.Image], name: str
) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(folders(name), foreign)
    config = json.loads((foreign / "config.json").read_text())
    hub = {"_attn_implementation": "somebody/kernel", "attn_implementation": "somebody/kernel"}
    config |= {**hub, "auto_map": {"AutoModel": "code.Model", "AutoConfig": "code.Config"}}
    for part in ("text_config", "vision_config"):
        if part in config:
            config[part] |= hub
    (foreign / "config.json").write_text(json.dumps(config))
    (foreign / "code.py").write_text("raise SystemExit('code of the folder ran')")
    features = TransformersScorer(name, str(foreign), "cpu").picture_features(images)
    expected = TransformersScorer(name, str(folders(name)), "cpu").picture_features(images)
    np.testing.assert_array_equal(features, expected)


def test_weights_of_another_kind_are_an_error_with_their_folder(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(EvaluationError, match="clip needs a model of images and texts, got Dinov2Model"):
        TransformersScorer("clip", str(folders("dino")), "cpu")
    with pytest.raises(EvaluationError, match="dino needs a model of images alone, got CLIPModel"):
        TransformersScorer("dino", str(folders("clip")), "cpu")
    with pytest.raises(EvaluationError, match="cannot be loaded") as raised:
        TransformersScorer("dino", str(tmp_path), "cpu")
    assert raised.value.where == str(tmp_path)
