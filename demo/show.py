"""Load the demo's LoRA with diffusers alone, and show that it changes a picture.

    python -m demo.show models/tiny-sd outputs/demo/lora outputs/demo

This module imports nothing of Latentline. The exit status is 1 if the LoRA does not change the picture.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils.logging import disable_progress_bar as disable_diffusers_bar
from transformers.utils.logging import disable_progress_bar as disable_transformers_bar

PROMPT = "a cup of espresso with a spoon on a red saucer"


def draw(pipe: Any) -> "np.ndarray[Any, Any]":
    """Draw one picture from a fixed seed: a float array (64, 64, 3) in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    result = pipe(PROMPT, height=64, width=64, num_inference_steps=8, generator=generator, output_type="np")
    return result.images[0]


def main(base: Path, lora: Path, output: Path) -> int:
    """Draw a picture without and with the LoRA, save both, and print their difference.

    Returns:
        The exit status.
    """
    disable_diffusers_bar()
    disable_transformers_bar()
    pipe = StableDiffusionPipeline.from_pretrained(base, safety_checker=None, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    before = draw(pipe)
    pipe.load_lora_weights(str(lora))
    after = draw(pipe)
    for name, picture in (("before", before), ("after", after)):
        pipe.image_processor.numpy_to_pil(picture[None])[0].save(output / f"{name}.png")
    difference = float(np.abs(after - before).mean())
    print(f"demo LoRA: loaded by diffusers; pixels in [0, 1] change by {difference:.4f} on average")
    print(f"  {output / 'before.png'}, {output / 'after.png'}")
    return 0 if difference > 0 else 1


if __name__ == "__main__":
    sys.exit(main(*(Path(argument) for argument in sys.argv[1:4])))
