"""A tagger of the WD14 family: a ViT of transformers, in the files of the published ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from demo.tiny_models.tagger import EDGE, TAGS, TinyTagger
from pipeline.captions.tags import as_words
from pipeline.captions.worker.tagger import Tagger
from pipeline.errors import ModelError
from pipeline.recipe.captions import TaggerSettings
from tests.pipeline.captions.conftest import picture

pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")


def by_transformers(image: Image.Image) -> list[float]:
    """Return the probabilities of transformers' own forward pass for a wide image."""
    assert image.width > image.height
    top = (image.width - image.height) // 2
    padded = np.full((image.width, image.width, 3), 255, np.uint8)
    padded[top : top + image.height] = np.asarray(image)
    resized = Image.fromarray(padded).resize((EDGE, EDGE), Image.Resampling.BICUBIC)
    blue_first = np.asarray(resized, np.float32)[..., [2, 1, 0]].copy()
    with torch.inference_mode():
        return TinyTagger()(torch.from_numpy(blue_first)[None])[0].tolist()


def test_tags_are_those_of_the_library_by_probability_and_batches_equal_singles(
    captioner: Callable[[str], Path],
) -> None:
    settings = TaggerSettings(threshold=0.3, character_threshold=0.6)
    tagger = Tagger(captioner("tagger"), settings)
    images = [picture(seed, 40 + seed, 30) for seed in range(4)]
    singles = [tagger.captions([image])[0] for image in images]
    assert tagger.captions(images) == singles
    assert len({text for text, _, _ in singles}) > 1, "the model does not look at the image"
    for image, (text, num_tags, cut) in zip(images, singles, strict=True):
        probabilities = by_transformers(image)
        assert tagger.probabilities(image) == pytest.approx(probabilities, abs=1e-5)
        limits = {0: 0.3, 4: 0.6, 9: 2.0}
        expected = sorted(
            (-probability, as_words(name))
            for probability, (name, category) in zip(probabilities, TAGS, strict=True)
            if probability >= limits[category]
        )
        assert text == ", ".join(name for _, name in expected)
        assert (num_tags, cut) == (len(expected), False)


def test_the_tags_must_fit_the_outputs(captioner: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "tagger"
    shutil.copytree(captioner("tagger"), folder)
    with (folder / "selected_tags.csv").open("a", encoding="utf-8") as file:
        file.write("99,another,0,1\n")
    with pytest.raises(ModelError, match="it has 12 outputs for 13 tags"):
        Tagger(folder, TaggerSettings()).captions([picture(0)])


def test_a_model_with_weights_in_another_file_is_refused(
    captioner: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fingerprint would contain the other file, wherever it is."""
    shutil.copy(captioner("tagger") / "selected_tags.csv", tmp_path)
    model = onnx.load(captioner("tagger") / "model.onnx")
    options: dict[str, Any] = {"save_as_external_data": True, "location": "others.bin"}
    onnx.save(model, tmp_path / "model.onnx", **options)
    assert (tmp_path / "others.bin").stat().st_size > 10_000
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="External data path"):
        Tagger(tmp_path, TaggerSettings())


def test_a_file_that_is_no_tagger_is_refused(captioner: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(captioner("tagger") / "selected_tags.csv", tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"\x00\x01 no model")
    with pytest.raises(ModelError, match="the tagger cannot be used") as caught:
        Tagger(tmp_path, TaggerSettings())
    assert caught.value.where == str(tmp_path / "model.onnx")
