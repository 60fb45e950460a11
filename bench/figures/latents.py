"""Cold caches: vae_latents compared with decoding and the VAE alone, and text_embeddings with the encoder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.measure import Figure, Side, Sides, Workplace, side_in_process, timed
from bench.peers.base import make_base
from bench.workload import Project, photographs
from demo.tiny_models import make_tiny
from pipeline.cache.entry_format import KINDS
from pipeline.models.worker.family import load_family
from pipeline.processes.launch import CPU_THREADS_PER_PROCESS
from pipeline.text_embeddings.stage import needed_captions


def bare_pixels(path: Path, row: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the image as uint8 (H, W, 3), decoded, resized and cropped by Pillow only."""
    with Image.open(path) as image:
        size = (row["resized_width"], row["resized_height"])
        resized = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        left, top = row["crop_left"], row["crop_top"]
        box = (left, top, left + row["target_width"], top + row["target_height"])
        return np.array(resized.crop(box))


@contextmanager
def _cold(place: Workplace, *, make: Callable[[Path], object] = make_tiny) -> Generator[Sides]:
    base, dataset = place.folder / "base", place.folder / "photos"
    make(base)
    paths = photographs(dataset, 200 if place.full else 60, max_px=4_000_000)
    project = Project.at(place.folder / "project", dataset, base=base, resolution=256)
    project.scan()
    project.validate()
    project.buckets()

    def ours() -> float:
        _empty(project)
        return project.latents().report["seconds"]

    def limit() -> float:
        # In a new process, as ours: the first pass of each shape takes longer.
        with side_in_process(_bare_latents, place.folder, variables={}) as bare:
            return bare()

    yield Sides(len(paths), ours, limit)


@contextmanager
def _bare_latents(folder: Path) -> Generator[Side]:
    import torch

    base, dataset = folder / "base", folder / "photos"
    rows = Project.at(folder / "project", dataset).tables.read("aspect_buckets").to_dicts()
    family = load_family(base)
    vae = family.vae.load("float32", "cpu")

    def encode() -> None:
        # Decoding and the VAE in turns: at the same time, each would wait for the other's cores.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            images = list(pool.map(lambda row: bare_pixels(dataset / row["path"], row), rows))
        for each in images:
            pixels = torch.from_numpy(each).permute(2, 0, 1)[None].float() / 127.5 - 1
            family.vae.posterior(vae, pixels)

    yield timed(encode)


@contextmanager
def _text(place: Workplace, *, count: int = 100, larger: bool = False) -> Generator[Sides]:
    import torch

    base, dataset = place.folder / "tiny", place.folder / "photos"
    make_tiny(base)
    if larger:
        _enlarge_text_encoder(base)
    photographs(dataset, 4 * count if place.full else count, max_px=300_000)
    project = Project.at(place.folder / "project", dataset, base=base, resolution=64)
    project.scan()
    project.validate()
    captions = project.tables.read("validated_dataset")["caption"].to_list()
    family = load_family(base)
    encoders = family.text.load("float32", "cpu")
    tokens = [
        encoders.tokenizer(text, padding="max_length", truncation=True, return_tensors="pt")
        for text in needed_captions(project.recipe, captions)
    ]
    torch.set_num_threads(CPU_THREADS_PER_PROCESS)

    def ours() -> float:
        _empty(project)
        return project.text().report["seconds"]

    def limit() -> None:
        with torch.inference_mode():
            for each in tokens:
                encoders.text_encoder(each["input_ids"])

    yield Sides(len(tokens), ours, timed(limit))


def _empty(project: Project) -> None:
    """Remove all entries, but not the hash of the model's weights, which is computed once per model."""
    for kind in KINDS:
        shutil.rmtree(Path(str(project.recipe.cache_dir)) / kind, ignore_errors=True)


def _enlarge_text_encoder(base: Path) -> None:
    """Replace the text encoder by random weights of CLIP-L's size; the tiny tokenizer stays."""
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    folder = base / "text_encoder"
    config = CLIPTextConfig.from_pretrained(folder)
    for name, value in CLIP_L.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    CLIPTextModel(config).save_pretrained(folder)


CLIP_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
"""Values from the `text_encoder/config.json` of Stable Diffusion 1.5."""


FIGURES = [
    Figure(
        "latents cold",
        "images",
        "a launched process fills an empty cache",
        "decode and resize with Pillow on all cores, then the VAE on tensors in memory, in a plain process",
        1.1,
        _cold,
    ),
    Figure(
        "latents cold, SD 1.5",
        "images",
        "a launched process fills an empty cache, with the VAE of Stable Diffusion 1.5 at a quarter of its "
        "channels instead of a tiny one",
        "decode and resize with Pillow on all cores, then the VAE on tensors in memory, in a plain process",
        1.0,
        partial(_cold, make=make_base),
    ),
    Figure(
        "text cold",
        "captions",
        "a launched process fills an empty cache",
        "text encoder only, token ids already in memory",
        None,
        _text,
    ),
    Figure(
        "text cold, CLIP-L",
        "captions",
        "a launched process fills an empty cache, with an encoder of CLIP-L's size instead of a tiny one",
        "text encoder only, token ids already in memory",
        1.1,
        partial(_text, count=30, larger=True),
    ),
]
