"""sd-scripts: `train_network.py` with a data set in TOML. It caches latents, not text embeddings."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench.peers.trainer import Place, Start, Task, checkout_python, steps_by

NOTE = (
    "encodes the captions again in each step; its LoRA also has the linear layers outside of attention. Its "
    "UNet has constant channel numbers, which the benchmark sets for the small base model before "
    "`train_network.py` starts"
)

STARTER = Path(__file__).with_name("start_sd_scripts.py")

TOKENIZER = "openai_clip-vit-large-patch14"
"""Folder below `--tokenizer_cache_dir` from which the tokenizer is loaded without the Hub."""

DATASET = """\
[general]
caption_extension = ".txt"

[[datasets]]
resolution = {edge}
batch_size = 1
enable_bucket = true
bucket_reso_steps = 64
min_bucket_reso = 64

[[datasets.subsets]]
image_dir = "{photos}"
num_repeats = 1
"""


def start(checkout: Path, task: Task, place: Place, seed: int) -> Start:
    """Write the data set and the tokenizer, and return the command."""
    dataset = place.folder / "dataset.toml"
    dataset.write_text(DATASET.format(edge=task.edge, photos=place.photos), encoding="utf-8")
    tokenizers = place.folder / "tokenizers"
    shutil.copytree(task.base / "tokenizer", tokenizers / TOKENIZER, dirs_exist_ok=True)
    options = {
        "pretrained_model_name_or_path": task.base,
        "tokenizer_cache_dir": tokenizers,
        "dataset_config": dataset,
        "output_dir": place.folder / f"out{seed}",
        "network_module": "networks.lora",
        "network_dim": task.rank,
        "network_alpha": task.rank,
        "optimizer_type": "AdamW",
        "learning_rate": 1e-4,
        "mixed_precision": "no",
        "max_train_steps": 1000,
        "seed": seed,
    }
    flags = ["--network_train_unet_only", "--cache_latents", "--cache_latents_to_disk", "--sdpa"]
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [checkout_python(checkout), str(STARTER), str(task.base), *arguments, *flags]
    return Start(command, steps_by(r"steps:\s+\d+%[^\r\n]*?\| (\d+)/\d+ "), checkout)
