"""OneTrainer: `scripts/train.py` with a configuration in JSON. It caches latents and text embeddings."""

from __future__ import annotations

import json
from pathlib import Path

from bench.peers.trainer import Place, Start, Task, checkout_python, steps_by


def start(checkout: Path, task: Task, place: Place, seed: int) -> Start:
    """Write the configuration, and return the command."""
    config = place.folder / f"config{seed}.json"
    config.write_text(json.dumps(_config(task, place, seed), indent=1), encoding="utf-8")
    command = [checkout_python(checkout), "scripts/train.py", "--config-path", str(config)]
    return Start(command, steps_by(r"step:\s+\d+%[^\r\n]*?\| (\d+)/\d+ "), checkout)


def _config(task: Task, place: Place, seed: int) -> dict[str, object]:
    frozen = {"train": False, "weight_dtype": "FLOAT_32", "gradient_checkpointing": False}
    concept = {
        "name": "photos",
        "path": str(place.photos),
        "seed": 0,
        "image": {"enable_crop_jitter": False},
        "text": {"prompt_source": "sample"},
    }
    return {
        "__version": 11,
        "training_method": "LORA",
        "model_type": "STABLE_DIFFUSION_15",
        "base_model_name": str(task.base),
        "workspace_dir": str(place.folder / f"workspace{seed}"),
        "cache_dir": str(place.folder / "cache"),
        "clear_cache_before_training": False,
        "output_model_destination": str(place.folder / f"lora{seed}.safetensors"),
        "tensorboard": False,
        "concepts": [concept],
        "samples": [],
        "sample_after_unit": "NEVER",
        "backup_after_unit": "NEVER",
        "backup_before_save": False,
        "epochs": 100,
        "batch_size": 1,
        "resolution": str(task.edge),
        "learning_rate": 1e-4,
        "learning_rate_warmup_steps": 0,
        "train_dtype": "FLOAT_32",
        "output_dtype": "FLOAT_32",
        "optimizer": {"optimizer": "ADAMW"},
        "lora_rank": task.rank,
        "lora_alpha": float(task.rank),
        "layer_filter": "to_q,to_k,to_v,to_out.0",
        "layer_filter_preset": "custom",
        "unet": {**frozen, "train": True},
        "text_encoder": frozen,
        "vae": frozen,
    }
