"""The least that a command could do: one plain process that encodes a folder, or trains one step.

python -P bench/bare.py encode BASE PHOTOS OUT EDGE    latents and text embeddings, as safetensors
python -P bench/bare.py step BASE CACHE RANK BATCH     one training step on entries of a cache
python -P bench/bare.py train BASE PHOTOS OUT EDGE RANK STEPS    `encode` if OUT is missing, then steps

Imports nothing of Latentline, and only the classes that it needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def command(*arguments: object) -> list[str]:
    """Return the command line of the plain process."""
    # Without -P, bench/ is the first folder of imports, and transformers imports bench/kernels.py with all
    # that it needs of Latentline, in place of the library `kernels`.
    return [sys.executable, "-P", __file__, *map(str, arguments)]


def encode(base: Path, photos: Path, out: Path, edge: int) -> None:
    """Encode all images, scaled and cropped to an area of about `edge` x `edge`, and their captions."""
    import numpy as np
    import torch
    from diffusers import AutoencoderKL
    from PIL import Image
    from safetensors.torch import save_file
    from transformers import CLIPTextModel, CLIPTokenizer

    def pixels(path: Path) -> torch.Tensor:
        with Image.open(path) as image:
            scale = edge / (image.width * image.height) ** 0.5
            wide, high = (max(64, round(side * scale / 64) * 64) for side in image.size)
            resized = image.convert("RGB").resize((wide, high), Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)[None].float() / 127.5 - 1

    paths = sorted(photos.glob("*.jpg"))
    captions = {path: path.with_suffix(".txt").read_text(encoding="utf-8").strip() for path in paths}
    vae: Any = AutoencoderKL.from_pretrained(base / "vae")
    text: Any = CLIPTextModel.from_pretrained(base / "text_encoder")
    tokenizer: Any = CLIPTokenizer.from_pretrained(base / "tokenizer")
    out.mkdir(parents=True)
    with torch.inference_mode(), ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, image in zip(paths, pool.map(pixels, paths), strict=True):
            parameters = vae.encode(image).latent_dist.parameters
            tokens = tokenizer(
                captions[path], padding="max_length", truncation=True, return_tensors="pt"
            ).input_ids
            tensors = {"latent": parameters.contiguous(), "text": text(tokens)[0].contiguous()}
            save_file(tensors, out / f"{path.stem}.safetensors")


def step(base: Path, cache: Path, rank: int, batch_size: int) -> None:
    """List all entries of the cache, and train one step on `batch_size` of them."""
    import torch
    from safetensors.torch import load_file

    latents, texts = ([*(cache / kind).glob("*/*.safetensors")] for kind in ("latents", "text"))
    learn = learner(base, rank)
    latent = torch.stack([first(load_file(path)) for path in latents[:batch_size]])
    text = torch.stack([first(load_file(path)) for path in texts[:batch_size]])
    learn(latent, text)


def train(base: Path, photos: Path, out: Path, edge: int, rank: int, steps: int) -> None:
    """Encode all images and captions unless `out` exists, train with batch size 1, and print each step."""
    from safetensors.torch import load_file

    if not out.exists():
        encode(base, photos, out, edge)
    files = sorted(out.glob("*.safetensors"))
    learn = learner(base, rank)
    for number in range(steps):
        tensors = load_file(files[number % len(files)])
        learn(tensors["latent"], tensors["text"])
        print(f"step {number + 1}", flush=True)


def learner(base: Path, rank: int) -> Callable[[Any, Any], None]:
    """Return a function that trains a LoRA one step on latents and text embeddings."""
    import torch
    from diffusers import DDPMScheduler, UNet2DConditionModel
    from peft import LoraConfig
    from torch.nn.functional import mse_loss

    unet: Any = UNet2DConditionModel.from_pretrained(base / "unet")
    unet.train().requires_grad_(False)
    targets = ["to_k", "to_q", "to_v", "to_out.0"]
    unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets))
    optimizer = torch.optim.AdamW([each for each in unet.parameters() if each.requires_grad], lr=1e-4)
    scheduler: Any = DDPMScheduler.from_pretrained(base / "scheduler")

    def learn(latent: torch.Tensor, text: torch.Tensor) -> None:
        # The entry has mean and standard deviation; the mean alone has the right shape.
        latent, text = latent.float()[:, : unet.config.in_channels], text.float()
        noise, timesteps = torch.randn_like(latent), torch.randint(0, 1000, (len(latent),))
        noisy = scheduler.add_noise(latent, noise, timesteps)
        mse_loss(unet(noisy, timesteps, encoder_hidden_states=text).sample, noise).backward()
        optimizer.step()
        optimizer.zero_grad()

    return learn


def first(entry: dict[str, Any]) -> Any:
    """Return the entry's largest tensor."""
    return max(entry.values(), key=lambda tensor: tensor.numel())


if __name__ == "__main__":
    base, source = Path(sys.argv[2]), Path(sys.argv[3])
    if sys.argv[1] == "encode":
        encode(base, source, Path(sys.argv[4]), int(sys.argv[5]))
    elif sys.argv[1] == "train":
        train(base, source, Path(sys.argv[4]), *map(int, sys.argv[5:8]))
    else:
        step(base, source, int(sys.argv[4]), int(sys.argv[5]))
