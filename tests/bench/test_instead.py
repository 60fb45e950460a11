"""The reference diffusers loop performs all of its steps, encodings and image processing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.optim.optimizer import register_optimizer_step_post_hook

from bench.instead import DiffusersLoop, LoopSettings, centre_square

SETTINGS = LoopSettings(resolution=64, batch_size=2, epochs=3, learning_rate=1e-3, rank=2, targets=["to_q"])


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    random = np.random.default_rng(0)
    image_paths = [tmp_path / f"{number}.png" for number in range(4)]
    for path in image_paths:
        Image.fromarray(random.integers(0, 256, (80, 100, 3), dtype=np.uint8)).save(path)
        path.with_suffix(".txt").write_text(f"caption of {path.stem}\n", encoding="utf-8")
    return image_paths


def test_centre_square_scales_by_the_shorter_edge_and_crops_the_centre(tmp_path: Path) -> None:
    pixels = np.zeros((64, 128, 3), dtype=np.uint8)
    pixels[:, 32:96] = 255
    Image.fromarray(pixels).save(tmp_path / "middle.png")
    same_size = centre_square(tmp_path / "middle.png", 64)
    assert same_size.shape == (3, 64, 64)
    assert torch.equal(same_size, torch.ones(3, 64, 64))
    assert centre_square(tmp_path / "middle.png", 32).shape == (3, 32, 32)


@pytest.mark.slow
@pytest.mark.parametrize(("in_memory", "images_encoded"), [(False, 3 * 4), (True, 4)])
def test_the_loop_uses_each_sample_once_per_epoch_and_caching_in_memory_saves_encodings(
    tiny_sd: Path, paths: list[Path], in_memory: bool, images_encoded: int
) -> None:
    loop = DiffusersLoop(tiny_sd, paths, SETTINGS)
    batches, steps = [], []

    def count_images(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        batches.append(len(inputs[0]))

    def count_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        grads = [weight.grad for group in optimizer.param_groups for weight in group["params"]]
        steps.append(sum(float(grad.abs().sum()) for grad in grads))

    hooks = [
        loop.vae.encoder.register_forward_hook(count_images),
        register_optimizer_step_post_hook(count_step),
    ]
    try:
        assert loop.seconds(in_memory=in_memory) > 0
    finally:
        for hook in hooks:
            hook.remove()
    assert sum(batches) == images_encoded
    assert len(steps) == 3 * 4 // 2
    assert min(steps) > 0, "every step has a gradient"
