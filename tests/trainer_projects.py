"""Projects of other trainers, laid out as their documentation describes, with photographs of scikit-image.

Each function writes a project below a folder and returns the path that `latentline new --images` gets. The
names contain umlauts and spaces, captions come in the forms of the trainer, and its caches, masks and samples
are next to the images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from demo.photographs import SHOTS

_SHOTS = {shot.name: shot for shot in SHOTS}

CATS = ("cat_face", "cat_wide", "cat_eyes", "cat_fur")
COFFEE = ("coffee_cup", "coffee_table", "coffee_handle", "coffee_crema")
SPACE = ("astronaut_portrait", "rocket_pad", "hubble_left")
OTHERS = ("motorcycle", "coins_rows", "grass_blades")


def write_images(folder: Path, shots: Iterable[str], *suffixes: str, caption: str = "{}") -> Path:
    """Write photographs, each with the caption file of the next suffix in turn.

    `caption` is a template for the text; without suffixes there are no caption files.
    """
    import skimage

    folder.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(shots):
        shot = _SHOTS[name]
        box = (shot.left, shot.top, shot.left + shot.width, shot.top + shot.height)
        with Image.open(Path(skimage.__file__).parent / "data" / shot.photograph) as photograph:
            photograph.convert("RGB").crop(box).save(folder / f"{name}.jpg", quality=92)
        if suffixes:
            file = folder / f"{name}{suffixes[index % len(suffixes)]}"
            file.write_text(caption.format(shot.caption), encoding="utf-8")
    return folder


def write_masks(folder: Path, shots: Iterable[str], ending: str = ".png") -> None:
    """Write a mask for each photograph, in which the middle is white."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in shots:
        shot = _SHOTS[name]
        mask = Image.new("L", (shot.width, shot.height))
        mask.paste(255, (shot.width // 4, shot.height // 4, shot.width * 3 // 4, shot.height * 3 // 4))
        mask.save(folder / f"{name}{ending}")


def _write_cache(folder: Path, names: Iterable[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"cache of another trainer")


def kohya_folders(root: Path) -> Path:
    """sd-scripts' folders with repeats, in the project layout of kohya's GUI; returns the project."""
    cats = write_images(root / "img" / "10_sks Kätzchen", CATS, ".txt")
    _write_cache(cats, [f"{name}_0256x0256_sd.npz" for name in CATS])
    write_images(root / "img" / "3_Küche & Kaffee", COFFEE, ".txt", ".caption")
    write_images(root / "img" / "Weltraum", SPACE, ".txt")
    write_images(root / "reg" / "1_Katze", OTHERS)
    write_images(root / "model" / "sample", ["cat_wide"])
    (root / "log").mkdir()
    return root


def sd_scripts_toml(root: Path) -> Path:
    """The TOML file of sd-scripts' `--dataset_config`."""
    cats = write_images(root / "Bilder" / "Kätzchen grau", CATS, ".txt", ".caption", caption="sks, cat, {}")
    _write_cache(cats, [f"{name}_0256x0256_sd.npz" for name in CATS])
    write_masks(cats / "masks", CATS)
    write_images(root / "Bilder" / "Küche", COFFEE, ".txt")
    write_images(root / "Regularisierung", OTHERS)
    file = root / "dataset.toml"
    file.write_text(
        """\
[general]
shuffle_caption = true
caption_extension = '.txt'
flip_aug = true
caption_dropout_rate = 0.1

[[datasets]]
resolution = [64, 64]
batch_size = 2
enable_bucket = true
min_bucket_reso = 32
max_bucket_reso = 128
bucket_reso_steps = 8

  [[datasets.subsets]]
  image_dir = 'Bilder/Kätzchen grau'
  class_tokens = 'sks Kätzchen'
  num_repeats = 10
  keep_tokens = 1
  caption_prefix = 'foto,'
  secondary_separator = ';;;'

  [[datasets.subsets]]
  image_dir = 'Bilder/Küche'
  num_repeats = 2

  [[datasets.subsets]]
  is_reg = true
  image_dir = 'Regularisierung'
  class_tokens = 'Foto'
""",
        encoding="utf-8",
    )
    return file


def _concept(name: str, path: Path, **settings: Any) -> dict[str, Any]:
    """Return a concept as OneTrainer writes it, with all its settings."""
    switches = ("random_rotate", "random_brightness", "random_contrast", "random_saturation", "random_hue")
    image: dict[str, Any] = {
        "enable_crop_jitter": True,
        "enable_random_flip": True,
        "enable_fixed_flip": False,
        "enable_resolution_override": False,
        "resolution_override": "512",
        "enable_random_circular_mask_shrink": False,
        "enable_random_mask_rotate_crop": False,
        "random_rotate_max_angle": 0.0,
    }
    image |= {f"enable_{switch}": False for switch in switches}
    image |= {f"enable_{switch.replace('random', 'fixed')}": False for switch in switches}
    text = {
        "prompt_source": "sample",
        "prompt_path": "",
        "enable_tag_shuffling": False,
        "tag_delimiter": ",",
        "keep_tags_count": 1,
        "tag_dropout_enable": False,
        "tag_dropout_mode": "FULL",
        "tag_dropout_probability": 0.0,
        "caps_randomize_enable": False,
        "caps_randomize_mode": "capslock, title, first, random",
        "caps_randomize_probability": 0.0,
    }
    concept = {
        "__version": 2,
        "name": name,
        "path": str(path),
        "seed": 42,
        "enabled": True,
        "type": "STANDARD",
        "include_subdirectories": False,
        "image_variations": 1,
        "text_variations": 1,
        "balancing": 1.0,
        "balancing_strategy": "REPEATS",
        "loss_weight": 1.0,
        "concept_stats": {},
    }
    sections = {"image": {**image, **settings.pop("image", {})}, "text": {**text, **settings.pop("text", {})}}
    return {**concept, **sections, **settings}


def onetrainer_concepts(root: Path) -> Path:
    """OneTrainer's configuration, which names its file of concepts; returns the configuration."""
    cats = write_images(root / "Bilder" / "Kätzchen grau", CATS, ".txt", caption="{}\nsks Kätzchen\n")
    write_masks(cats, CATS, "-masklabel.png")
    write_images(cats / "aussortiert", ["coffee_cup"])
    coffee = write_images(root / "Bilder" / "Küche", COFFEE)
    others = write_images(root / "Bilder" / "Sonstiges", OTHERS)
    (root / "prompts.txt").write_text("ein Foto\n", encoding="utf-8")
    concept_source = {"prompt_source": "concept", "prompt_path": str(root / "prompts.txt")}
    concepts = [
        _concept("Kätzchen", cats, balancing=3.0, loss_weight=0.5),
        _concept("Küche", coffee, text={"prompt_source": "filename"}),
        _concept("", others, text=concept_source, image={"enable_fixed_hue": True}),
        _concept("aus", others, enabled=False),
    ]
    folder = root / "training_concepts"
    folder.mkdir()
    (folder / "concepts.json").write_text(json.dumps(concepts), encoding="utf-8")
    config = {
        "training_method": "LORA",
        "model_type": "STABLE_DIFFUSION_15",
        "base_model_name": "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "concept_file_name": "training_concepts/concepts.json",
        "resolution": "64",
        "aspect_ratio_bucketing": True,
        "masked_training": True,
        "learning_rate": 0.0003,
        "epochs": 20,
        "batch_size": 2,
        "learning_rate_scheduler": "COSINE",
        "lora_rank": 16,
    }
    (root / "training_presets").mkdir()
    file = root / "training_presets" / "Kätzchen.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


def ai_toolkit_yaml(root: Path) -> Path:
    """The YAML file of an ai-toolkit job."""
    cats = write_images(root / "datasets" / "Kätzchen grau", CATS, ".txt", caption="a photo of [trigger], {}")
    (cats / "cat_eyes.txt").write_text("green eyes\n", encoding="utf-8")
    (cats / "cat_fur.txt").unlink()
    _write_cache(cats / "_latent_cache", [f"{name}_1a2b3c.safetensors" for name in CATS])
    write_images(cats / "_controls", ["cat_wide"])
    write_images(root / "datasets" / "Küche", COFFEE, ".caption")
    write_images(root / "datasets" / "reg", OTHERS, ".txt")
    file = root / "config" / "Kätzchen.yaml"
    file.parent.mkdir()
    file.write_text(
        """\
---
job: extension
config:
  name: "Kätzchen_v1"
  process:
    - type: 'sd_trainer'
      training_folder: "output"
      device: cuda:0
      trigger_word: "k4tz"
      network:
        type: "lora"
        linear: 16
        linear_alpha: 16
      save:
        dtype: float16
        save_every: 250
        max_step_saves_to_keep: 4
      datasets:
        - folder_path: "datasets/Kätzchen grau"
          caption_ext: "txt"
          default_caption: "a photo of [trigger]"
          caption_dropout_rate: 0.05
          shuffle_tokens: false
          cache_latents_to_disk: true
          resolution: [64, 96]
          num_repeats: 2
          network_weight: 1.0
          mask_path: null
        - folder_path: "datasets/Küche"
          caption_ext: "caption"
          caption_dropout_rate: 0.05
          resolution: [64, 96]
          augments: ["ColorJitter"]
        - folder_path: "datasets/reg"
          is_reg: true
          caption_dropout_rate: 0.05
          resolution: [64, 96]
      train:
        batch_size: 1
        steps: 2000
        gradient_checkpointing: true
        noise_scheduler: "flowmatch"
        optimizer: "adamw8bit"
        lr: 1e-4
        ema_config:
          use_ema: true
          ema_decay: 0.99
      model:
        name_or_path: "black-forest-labs/FLUX.1-dev"
        is_flux: true
        quantize: true
      sample:
        sample_every: 250
        prompts:
          - "[trigger] on a sofa"
meta:
  name: "[name]"
  version: '1.0'
""",
        encoding="utf-8",
    )
    return file


def simpletuner_backends(root: Path) -> Path:
    """SimpleTuner's `config.json`, which names `multidatabackend.json`; returns the former."""
    cats = write_images(root / "datasets" / "Kätzchen grau", CATS, ".txt", caption="{}\nsks Kätzchen\n")
    (cats / "aspect_ratio_bucket_indices_katze.json").write_text("{}", encoding="utf-8")
    _write_cache(root / "cache" / "vae", [f"{name}.pt" for name in CATS])
    write_images(root / "datasets" / "Küche", COFFEE, ".txt")
    write_images(root / "datasets" / "Sonstiges", OTHERS)
    local = {"type": "local", "crop": False, "metadata_backend": "discovery", "resolution_type": "pixel_area"}
    cats_backend = {
        **local,
        "instance_data_dir": "datasets/Kätzchen grau",
        "caption_strategy": "textfile",
        "crop_style": "center",
        "repeats": 4,
        "minimum_image_size": 64,
    }
    kitchen = {
        **local,
        "instance_data_dir": "datasets/Küche",
        "caption_strategy": "textfile",
        "instance_prompt": "Küche",
        "prepend_instance_prompt": True,
    }
    others = {
        **local,
        "instance_data_dir": "datasets/Sonstiges",
        "caption_strategy": "instanceprompt",
        "instance_prompt": "ein Foto",
        "max_num_samples": 100,
    }
    backends: list[dict[str, Any]] = []
    for edge in (64, 96):
        backends += [
            {
                "id": f"{name}-{edge}",
                **backend,
                "resolution": edge,
                "cache_dir_vae": f"cache/vae/{name}-{edge}",
            }
            for name, backend in (("kätzchen", cats_backend), ("küche", kitchen), ("sonst", others))
        ]
    backends.append(
        {
            "id": "text-embed-cache",
            "dataset_type": "text_embeds",
            "default": True,
            "type": "local",
            "cache_dir": "cache/text",
        }
    )
    config = {
        "--data_backend_config": "config/multidatabackend.json",
        "--model_type": "lora",
        "--model_family": "sd1x",
        "--pretrained_model_name_or_path": "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "--resolution": 64,
        "--resolution_type": "pixel_area",
        "--train_batch_size": 1,
        "--caption_dropout_probability": 0.1,
        "--max_train_steps": 10000,
        "--learning_rate": "1e-4",
        "--checkpoint_step_interval": 500,
    }
    (root / "config").mkdir()
    (root / "config" / "multidatabackend.json").write_text(json.dumps(backends), encoding="utf-8")
    file = root / "config" / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


def diffusion_pipe_toml(root: Path) -> Path:
    """The dataset's TOML file of diffusion-pipe."""
    cats = write_images(root / "Bilder" / "Kätzchen grau", CATS, ".txt", caption="cat, fur, {}")
    write_masks(cats / "masks", CATS)
    _write_cache(cats / "cache" / "sdxl" / "metadata", ["metadata.arrow"])
    write_images(root / "Bilder" / "Küche", COFFEE, ".txt")
    file = root / "dataset.toml"
    file.write_text(
        f"""\
resolutions = [64]
enable_ar_bucket = true
min_ar = 0.5
max_ar = 2.0
num_ar_buckets = 7
frame_buckets = [1, 33]
cache_shuffle_num = 3
cache_shuffle_delimiter = ", "

[[directory]]
path = '{cats}'
mask_path = '{cats / "masks"}'
num_repeats = 5
caption_prefix = 'sks Kätzchen, '

[[directory]]
path = '{root / "Bilder" / "Küche"}'
num_repeats = 1
""",
        encoding="utf-8",
    )
    return file


PROJECTS: dict[str, Callable[[Path], Path]] = {
    "kohya_folders": kohya_folders,
    "sd_scripts": sd_scripts_toml,
    "onetrainer": onetrainer_concepts,
    "ai_toolkit": ai_toolkit_yaml,
    "simpletuner": simpletuner_backends,
    "diffusion_pipe": diffusion_pipe_toml,
}
"""Name of each form, and the function that writes a project of that form."""
