"""Load the demo's LoRA as any user of diffusers would, and show that it changes a picture.

    python -m demo.show models/tiny-sd outputs/demo/lora outputs/demo

Nothing of Latentline is imported: diffusers alone reads what was written. Exit status 1 when the picture is
the same with and without the LoRA.
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
    """One picture, float array (64, 64, 3) in [0, 1], from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    result = pipe(PROMPT, height=64, width=64, num_inference_steps=8, generator=generator, output_type="np")
    return result.images[0]


def main(base: Path, lora: Path, output: Path) -> int:
    """Draw without and with the LoRA, save both, and say how far they are apart.

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
    print(f"demo LoRA: loaded by diffusers alone; the picture changed by {difference:.4f} of 1 on average")
    print(f"  {output / 'before.png'}, {output / 'after.png'}")
    return 0 if difference > 0 else 1


if __name__ == "__main__":
    sys.exit(main(*(Path(argument) for argument in sys.argv[1:4])))
