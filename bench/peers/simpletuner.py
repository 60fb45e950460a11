"""SimpleTuner: `simpletuner/train.py` with two files in JSON. It caches latents and text embeddings."""

from __future__ import annotations

import json
import os
from pathlib import Path

from bench.peers.trainer import Place, Start, Task, checkout_python, steps_by

NOTE = "its pinning of the memory of cached latents fails without an accelerator, and is turned off there"

STARTER = Path(__file__).with_name("start_simpletuner.py")


def start(checkout: Path, task: Task, place: Place, seed: int) -> Start:
    """Write the configuration and the data backends, and return the command."""
    config, backends = place.folder / f"config{seed}.json", place.folder / "backends.json"
    backends.write_text(json.dumps(_backends(task, place), indent=1), encoding="utf-8")
    config.write_text(json.dumps(_config(task, place, seed, backends), indent=1), encoding="utf-8")
    variables = {
        "CONFIG_PATH": str(config),
        "SIMPLETUNER_CONFIG_BACKEND": "json",
        "PYTHONPATH": str(checkout),
        "SIMPLETUNER_DISABLE_ACCELERATOR_CACHE": "1",
    }
    command = [checkout_python(checkout), str(STARTER), str(checkout)]
    return Start(command, steps_by(r"Steps:\s+\d+%[^\r\n]*?\| (\d+)/\d+ "), place.folder, variables)


def _config(task: Task, place: Place, seed: int, backends: Path) -> dict[str, object]:
    return {
        "model_family": "sd1x",
        "model_type": "lora",
        "pretrained_model_name_or_path": str(task.base),
        "data_backend_config": str(backends),
        "output_dir": str(place.folder / f"out{seed}"),
        "cache_dir": str(place.folder / "cache"),
        "lora_type": "standard",
        "lora_rank": task.rank,
        "lora_alpha": task.rank,
        "lora_dropout": 0.0,
        "optimizer": "torch-adamw",
        "learning_rate": 1e-4,
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "mixed_precision": "no",
        "base_model_precision": "no_change",
        "gradient_checkpointing": False,
        "train_batch_size": 1,
        "vae_batch_size": 1,
        "max_train_steps": 1000,
        "num_train_epochs": 0,
        "resolution": task.edge,
        "resolution_type": "pixel",
        "aspect_bucket_alignment": 64,
        "seed": 42 + seed,
        "report_to": "none",
        "push_to_hub": False,
        "validation_disable": True,
        "disable_benchmark": True,
        "disable_bucket_pruning": True,
        "checkpoint_step_interval": 1000,
        "torch_num_threads": os.cpu_count(),
    }


def _backends(task: Task, place: Place) -> list[dict[str, object]]:
    photos: dict[str, object] = {
        "id": "photos",
        "type": "local",
        "instance_data_dir": str(place.photos),
        "caption_strategy": "textfile",
        "crop": True,
        "crop_style": "center",
        "crop_aspect": "preserve",
        "resolution": task.edge,
        "resolution_type": "pixel_area",
        "minimum_image_size": 0,
        "cache_dir_vae": str(place.folder / "cache" / "vae"),
    }
    text: dict[str, object] = {
        "id": "text",
        "type": "local",
        "dataset_type": "text_embeds",
        "default": True,
        "cache_dir": str(place.folder / "cache" / "text"),
    }
    return [photos, text]
