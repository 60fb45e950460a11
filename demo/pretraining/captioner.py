"""A captioner for the demo's world: a small Idefics3 of transformers, trained from scratch on its pictures.

It learns the five shapes by name and calls every doodle `DOODLE`. It never sees the concept, and does not
know its name: as with a real captioner, the recipe replaces the model's word by the one to teach.

Dimensions: B pictures, T tokens. All captions of the world have the same number of words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

from demo.pretraining.autoencoder import as_pixels
from demo.pretraining.loop import Part, Stage, load_networks, train
from demo.tiny_models.parts import write_json
from demo.world import (
    BACKGROUNDS,
    COLOURS,
    CONCEPT,
    SHAPES,
    SIZE_PX,
    Scene,
    draw_scene,
    random_scenes,
    scenes,
)
from pipeline.storage.atomic import write_text

BATCH = 32

DOODLE = "doodle"
"""Shape of every picture that shows no known one, in the captioner's words."""

NUM_SCORED = 512
"""Number of new pictures that the captioner's scores are measured on."""

_DOODLES = 0.4
_PATCH_PX = 8
_SCALE = 2
"""Edge of the square of patches that becomes one token of the language model."""

_IMAGE_TOKENS = (SIZE_PX // _PATCH_PX // _SCALE) ** 2

_PAD, _END, _UNKNOWN, _ANSWER = "<pad>", "<end>", "<unknown>", "<answer>"
_IMAGE, _AROUND, _GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
_MARKS = (_PAD, _END, _UNKNOWN, _ANSWER, _IMAGE, _AROUND, _GLOBAL)

# The model captions and does nothing else, so the text of a prompt is ignored.
_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% elif message.role == 'assistant' %}"
    "<answer>{{ part.text }}<end>{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


def spoken(scene: Scene) -> str:
    """Return the caption of a scene in the captioner's words, which have no invented names."""
    return (scene if scene.shape in SHAPES else replace(scene, shape=DOODLE)).caption


def write_processor(folder: Path) -> dict[str, int]:
    """Write tokenizer, chat template and image processor, and return the ids of the tokens.

    Each word of the captions is one token; other words are unknown.
    """
    words = ["a", "an", "on", "background", DOODLE, *SHAPES, *COLOURS, *BACKGROUNDS]
    ids = {token: number for number, token in enumerate([*_MARKS, *words])}
    tokenizer: Any = Tokenizer(models.WordLevel(ids, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(_MARKS))

    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_text(folder / "chat_template.jinja", _TEMPLATE)
    marks = {"pad_token": _PAD, "eos_token": _END, "unk_token": _UNKNOWN}
    kind = "Idefics3Processor"
    config = {**marks, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 256}
    write_json(folder / "tokenizer_config.json", config)
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": SIZE_PX},
        "max_image_size": {"longest_edge": SIZE_PX},
        "processor_class": kind,
    }
    write_json(folder / "preprocessor_config.json", images)
    write_json(folder / "processor_config.json", {"image_seq_len": _IMAGE_TOKENS, "processor_class": kind})
    return ids


def new_captioner(ids: Mapping[str, int]) -> Any:
    """Return an `Idefics3ForConditionalGeneration` for the tokens of `write_processor`."""
    vision = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIZE_PX,
        "patch_size": _PATCH_PX,
    }
    text = {
        "model_type": "llama",
        "vocab_size": len(ids),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": ids[_ANSWER],
        "eos_token_id": ids[_END],
        "pad_token_id": ids[_PAD],
    }
    config: Any = Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=ids[_IMAGE],
        pad_token_id=ids[_PAD],  # pyright: ignore[reportCallIssue] - of the base class
        scale_factor=_SCALE,
    )
    model: Any = Idefics3ForConditionalGeneration(config)
    model.generation_config.eos_token_id = ids[_END]
    model.generation_config.pad_token_id = ids[_PAD]
    return model


def prompt_tokens(ids: Mapping[str, int]) -> list[int]:
    """Return the tokens of a picture before its caption, as the processor writes them."""
    return [ids[token] for token in (_AROUND, _GLOBAL, *[_IMAGE] * _IMAGE_TOKENS, _AROUND, _ANSWER)]


def train_captioner(model: Any, ids: Mapping[str, int], stage: Stage, part: Part) -> None:
    """Train the captioner to write `spoken` for pictures of the world, each of them new."""
    prefix = prompt_tokens(ids)

    def loss_at(step: int) -> Tensor:
        random = np.random.default_rng([part.seed, 3, step])
        batch = list(islice(random_scenes(random, doodles=_DOODLES), BATCH))
        pictures = np.stack([draw_scene(scene, random) for scene in batch])[part.rows]
        written = [[ids[word] for word in [*spoken(scene).split(), _END]] for scene in batch[part.rows]]
        tokens = torch.tensor([[*prefix, *words] for words in written])
        # Only the caption is learned, not the places of the picture before it.
        labels = tokens.clone()
        labels[:, : len(prefix)] = -100
        pixels = as_pixels(pictures)[:, None]
        return model(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), pixel_values=pixels, labels=labels
        ).loss

    train(stage, {"captioner": model}, loss_at)


def export_captioner(
    stage: Stage, folder: Path, *, seed: int, provenance: Mapping[str, object]
) -> dict[str, Any]:
    """Write the trained captioner in float16 with `provenance.json`, and return what that file contains.

    Args:
        stage: The finished stage.
        folder: Destination.
        seed: Seed of the training; the pictures of the scores are others.
        provenance: Entries of `provenance.json` besides the scores.
    """
    ids = write_processor(folder)
    model = new_captioner(ids)
    load_networks(stage, {"captioner": model})
    model.to(torch.float16).save_pretrained(folder)
    # Weights are stored in float16 and used in float32, as the base model's.
    config = folder / "config.json"
    facts = json.loads(config.read_text(encoding="utf-8"))
    write_json(config, {**_in_float32(facts), "dtype": "float32"})

    record = {**provenance, "scores": captioner_scores(folder, seed=seed)}
    write_json(folder / "provenance.json", record)
    return record


def captioner_scores(folder: Path, *, seed: int) -> dict[str, float]:
    """Return fractions of right captions, which the recipe's own captioner writes.

    Returns:
        `known`: of new pictures of known shapes. `doodles`: of new doodles. `concept`: of new pictures of the
        concept, with `DOODLE` as its shape.
    """
    random = np.random.default_rng([seed, 4])
    kinds = {
        "known": islice(random_scenes(random, doodles=0.0), NUM_SCORED),
        "doodles": islice(random_scenes(random, doodles=1.0), NUM_SCORED),
        "concept": scenes(CONCEPT) * (NUM_SCORED // len(scenes(CONCEPT))),
    }
    scores: dict[str, float] = {}
    for name, expected in kinds.items():
        drawn = [(draw_scene(scene, random), spoken(scene)) for scene in expected]
        written = captions_of(folder, [picture for picture, _ in drawn])
        right = [text == caption for text, (_, caption) in zip(written, drawn, strict=True)]
        scores[name] = sum(right) / len(right)
    return scores


def captions_of(folder: Path, pictures: Sequence[Any]) -> list[str]:
    """Return the captions of uint8 pictures (H, W, 3), as the captions of a recipe are written."""
    from pipeline.captions.worker.captioner import Captioner

    captioner = Captioner(folder, "float32", "cpu")
    images = [Image.fromarray(picture) for picture in pictures]
    return [
        text.strip()
        for start in range(0, len(images), BATCH)
        for text, _, _ in captioner.captions(images[start : start + BATCH], "", max_tokens=16)
    ]


def _in_float32(facts: Any) -> Any:
    if not isinstance(facts, dict):
        return facts
    return {name: "float32" if name == "dtype" else _in_float32(value) for name, value in facts.items()}
