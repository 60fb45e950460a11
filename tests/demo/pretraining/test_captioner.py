"""The captioner learns from the inputs of its processor, and is exported as transformers loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from demo.pretraining.autoencoder import as_pixels
from demo.pretraining.captioner import (
    DOODLE,
    captions_of,
    export_captioner,
    new_captioner,
    prompt_tokens,
    spoken,
    train_captioner,
    write_processor,
)
from demo.pretraining.export import loss_curve
from demo.pretraining.loop import Part, Stage
from demo.world import CONCEPT, SHAPES, Scene, draw_scene, scenes


def test_the_training_inputs_are_the_processors(tmp_path: Path) -> None:
    ids = write_processor(tmp_path)
    picture = draw_scene(Scene("star", "red", "pink"), np.random.default_rng(0))
    content = [{"type": "image", "image": Image.fromarray(picture)}, {"type": "text", "text": "What is it?"}]
    inputs: Any = AutoProcessor.from_pretrained(tmp_path, backend="pil").apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    assert inputs["input_ids"][0].tolist() == prompt_tokens(ids)
    torch.testing.assert_close(inputs["pixel_values"][0], as_pixels(picture[None]))


def test_all_captions_have_the_same_number_of_known_words_and_the_concept_is_not_one(tmp_path: Path) -> None:
    ids = write_processor(tmp_path)
    for scene in scenes(*SHAPES, CONCEPT, "nilk"):
        words = spoken(scene).split()
        assert len(words) == 7
        assert ids.keys() >= set(words)
    assert CONCEPT not in ids
    assert spoken(Scene(CONCEPT, "red", "pink")) == f"a red {DOODLE} on a pink background"


@pytest.mark.slow
def test_training_lowers_the_loss_and_the_export_captions_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo.pretraining.captioner.NUM_SCORED", 24)
    torch.manual_seed(0)
    stage = Stage("captioner", tmp_path, 60, 2e-3, log_every=20)
    ids = write_processor(tmp_path / "captioner")
    train_captioner(new_captioner(ids), ids, stage, Part(seed=0))
    losses = [line["loss"] for line in loss_curve(stage)]
    assert losses[-1] < losses[0] / 2

    record = export_captioner(stage, tmp_path / "captioner", seed=0, provenance={"losses": losses})
    assert json.loads((tmp_path / "captioner" / "provenance.json").read_text("utf-8")) == record
    assert set(record["scores"]) == {"known", "doodles", "concept"}

    picture = draw_scene(Scene("star", "red", "pink"), np.random.default_rng(0))
    (caption,) = captions_of(tmp_path / "captioner", [picture])
    assert len(caption.split()) == 7
    assert caption.endswith("background")
