"""In which resolution a base model draws, as far as it is known without the network."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pipeline.errors import LatentlineError
from pipeline.models.diffusers_folder import read_json
from pipeline.models.families import detect
from pipeline.recipe import in_project

USUAL = 1024
"""Of all models but Stable Diffusion 1 and 2."""

_VAE_FACTOR = 8

_BY_NAME = {
    "stable-diffusion-2-1-base": 512,
    "stable-diffusion-2-base": 512,
    "stable-diffusion-2": 768,
    "stable-diffusion-v1": 512,
    "sd-v1": 512,
    "v1-5": 512,
    "v1-4": 512,
    "sd15": 512,
    "sd1.5": 512,
}


class Size(NamedTuple):
    """A budget's edge in pixels, the step of its sizes, and where it is known from."""

    resolution: int
    step: int
    source: str


def size_of(base: str) -> Size:
    """What the model was trained in: of a local folder, or of a Hub id by what of it is on this machine."""
    folder = in_project(base)
    if (folder / "model_index.json").is_file():
        return _of_folder(folder)
    snapshot = _unet_config(base)
    if snapshot is not None and (edge := read_json(snapshot).get("sample_size")):
        return _size(int(edge) * _VAE_FACTOR, "its UNet's")
    name = base.lower()
    found = next((edge for part, edge in _BY_NAME.items() if part in name), USUAL)
    return _size(found, "usual for such models; change it if yours is another")


def _of_folder(folder: Path) -> Size:
    try:
        family = detect(folder)
        edge = family.denoiser_config.get("sample_size") if family.denoiser_name == "unet" else None
        multiple = family.size_multiple()
    except LatentlineError:  # whoever reads the recipe is told what is wrong with the model
        return _size(USUAL, "usual")
    resolution = int(edge) * family.factor if edge else USUAL
    return _size(resolution, "its UNet's" if edge else "usual for such models", multiple)


def _size(resolution: int, source: str, multiple: int = 8) -> Size:
    step = 64 if resolution % 64 == 0 and resolution >= 256 else multiple
    return Size(resolution, step, source)


def _unet_config(base: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(base, "unet/config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
