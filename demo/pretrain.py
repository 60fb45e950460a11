"""Train the demo's base model and its captioner from scratch, on the CPU.

    torchrun --nproc-per-node 2 -m demo.pretrain outputs/pretraining vae
    torchrun --nproc-per-node 2 -m demo.pretrain outputs/pretraining denoiser
    python -m demo.pretrain outputs/pretraining export
    python -m demo.pretrain outputs/pretraining captioner

Each process uses one thread, because on two cores two processes are faster than two threads. On a busy
machine, start one process with `python` instead. A stage that was stopped resumes from its checkpoint when it
is started again. `export` writes the base model into `model/`, and its scores and the curves of its losses
into `model/provenance.json`. `captioner` needs no other stage, and writes the same files into `captioner/`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from demo.pretraining.autoencoder import concept_through_vae, train_vae
from demo.pretraining.captioner import (
    export_captioner,
    new_captioner,
    train_captioner,
    write_processor,
)
from demo.pretraining.denoiser import EncodedWorld, load_world, train_denoiser
from demo.pretraining.export import export_model, loss_curve
from demo.pretraining.loop import Part, Stage, load_networks, start_processes
from demo.pretraining.networks import new_text_encoder, new_unet, new_vae, write_tokenizer

VAE_STEPS, DENOISER_STEPS, CAPTIONER_STEPS = 1200, 10_000, 1500

MIN_THROUGH_VAE = 0.9
"""Minimum score of real pictures of the concept after the VAE."""

MIN_CAPTIONS = 0.95
"""Minimum fraction of right captions, of known shapes, of doodles and of the concept."""


def main() -> int:
    """Run one stage, and return the exit status: 1 if a stage misses its minimum score."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of checkpoints, logs and the model")
    parser.add_argument("stage", choices=["vae", "denoiser", "export", "captioner"])
    parser.add_argument("--vae-steps", type=int, default=VAE_STEPS)
    parser.add_argument("--denoiser-steps", type=int, default=DENOISER_STEPS)
    parser.add_argument("--captioner-steps", type=int, default=CAPTIONER_STEPS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    vae_stage = Stage("vae", folder, arguments.vae_steps, learning_rate=1.5e-3)
    denoiser_stage = Stage("denoiser", folder, arguments.denoiser_steps, learning_rate=1.2e-3)
    part = start_processes(arguments.seed)
    torch.manual_seed(part.seed)
    if arguments.stage == "captioner":
        return _captioner(Stage("captioner", folder, arguments.captioner_steps, learning_rate=2e-3), part)

    vae = new_vae()
    if arguments.stage == "vae":
        train_vae(vae, vae_stage, part)
        return _check_vae(vae, part)

    load_networks(vae_stage, {"vae": vae})
    if _check_vae(vae, part):
        return 1
    tokenizer = write_tokenizer(folder / "tokenizer")
    networks = {"unet": new_unet(), "text_encoder": new_text_encoder(tokenizer)}
    world = _encoded_world(vae, tokenizer, vae_stage, part)
    if arguments.stage == "denoiser":
        train_denoiser(networks, world, denoiser_stage, part)
        return 0

    load_networks(denoiser_stage, networks)
    vae.register_to_config(scaling_factor=world.scaling_factor)
    record = export_model(
        vae, networks, tokenizer, folder / "model", provenance=_provenance(part, vae_stage, denoiser_stage)
    )
    print(json.dumps(record["scores"], indent=2))
    return 0


def _check_vae(vae: torch.nn.Module, part: Part) -> int:
    """Print how well the VAE preserves the concept; return 1 if that is not well enough."""
    scored, psnr_db = concept_through_vae(vae, seed=part.seed)
    print(f"pictures of the concept after the VAE: score {scored.all_three:.3f}, PSNR {psnr_db:.1f} dB")
    if scored.all_three >= MIN_THROUGH_VAE:
        return 0
    print(f"error: the score must be at least {MIN_THROUGH_VAE}; train the VAE longer", file=sys.stderr)
    return 1


def _encoded_world(vae: Any, tokenizer: Any, stage: Stage, part: Part) -> EncodedWorld:
    """Return the encoded pictures; the first process encodes them, again if the VAE has changed."""
    file = stage.folder / "world.safetensors"
    if part.rank == 0:
        if file.exists() and file.stat().st_mtime_ns < stage.checkpoint.stat().st_mtime_ns:
            file.unlink()
        load_world(vae, tokenizer, file, seed=part.seed)
    part.wait()
    return load_world(vae, tokenizer, file, seed=part.seed)


def _captioner(stage: Stage, part: Part) -> int:
    """Train the captioner, and let the first process export it; return 1 if a score misses its minimum."""
    folder = stage.folder / "captioner"
    ids = write_processor(folder)
    train_captioner(new_captioner(ids), ids, stage, part)
    if part.rank > 0:
        return 0
    record = export_captioner(stage, folder, seed=part.seed, provenance=_provenance(part, stage))
    print(json.dumps(record["scores"], indent=2))
    missed = [name for name, score in record["scores"].items() if score < MIN_CAPTIONS]
    for name in missed:
        print(f"error: {name} must score at least {MIN_CAPTIONS}; train longer", file=sys.stderr)
    return 1 if missed else 0


def _provenance(part: Part, *stages: Stage) -> dict[str, object]:
    """Return the commit, the seed, and the length and loss curve of each stage."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    curves = {stage.name: {"steps": stage.steps, "losses": loss_curve(stage)} for stage in stages}
    return {"commit": commit.stdout.strip(), "seed": part.seed, "pictures": "demo/world.py", **curves}


if __name__ == "__main__":
    sys.exit(main())
