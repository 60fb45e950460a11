"""Load the demo's LoRA with diffusers alone, and show that it changes a picture.

    python -m demo.show models/tiny-sd outputs/demo/lora outputs/demo

It writes before.png and after.png as the model draws them, and both enlarged next to one another as
before_after.png. This module imports nothing of Latentline. The exit status is 1 if the LoRA does not change
the picture.
"""

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.utils.logging import disable_progress_bar as disable_diffusers_bar
from PIL import Image, ImageDraw, ImageFont
from transformers.utils.logging import disable_progress_bar as disable_transformers_bar

PROMPT = "a cup of espresso with a spoon on a red saucer"


def draw(pipe: Any) -> "np.ndarray[Any, Any]":
    """Draw one picture from a fixed seed: a float array (64, 64, 3) in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    result = pipe(PROMPT, height=64, width=64, num_inference_steps=8, generator=generator, output_type="np")
    return result.images[0]


ENLARGED_PX = 512
"""Edge of each picture on the sheet."""

_TEXT_PX = 22
_MARGIN_PX = 12


def before_after_sheet(before: Image.Image, after: Image.Image) -> Image.Image:
    """Return both pictures enlarged to `ENLARGED_PX`, labelled and next to one another, below the prompt."""
    row_px = _TEXT_PX + _MARGIN_PX
    top_px = 2 * row_px + _MARGIN_PX
    width_px = 2 * ENLARGED_PX + 3 * _MARGIN_PX
    sheet = Image.new("RGB", (width_px, top_px + ENLARGED_PX + _MARGIN_PX), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(_TEXT_PX)
    draw.text((_MARGIN_PX, _MARGIN_PX), PROMPT, fill="black", font=font)

    for column, (label, picture) in enumerate((("without the LoRA", before), ("with the LoRA", after))):
        left_px = _MARGIN_PX + column * (ENLARGED_PX + _MARGIN_PX)
        draw.text((left_px, _MARGIN_PX + row_px), label, fill="black", font=font)
        enlarged = picture.convert("RGB").resize((ENLARGED_PX, ENLARGED_PX), Image.Resampling.NEAREST)
        sheet.paste(enlarged, (left_px, top_px))
    return sheet


def main(base: Path, lora: Path, output: Path) -> int:
    """Draw a picture without and with the LoRA, save both and a sheet, and print their difference.

    Returns:
        The exit status.
    """
    logging.disable(logging.WARNING)  # packages that the pipeline imports print hints
    disable_diffusers_bar()
    disable_transformers_bar()
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(base, safety_checker=None, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    before = draw(pipe)
    pipe.load_lora_weights(str(lora))
    after = draw(pipe)

    pictures = [pipe.image_processor.numpy_to_pil(picture[None])[0] for picture in (before, after)]
    for name, picture in zip(("before", "after"), pictures, strict=True):
        picture.save(output / f"{name}.png")
    sheet = output / "before_after.png"
    before_after_sheet(*pictures).save(sheet)

    difference = float(np.abs(after - before).mean())
    print(f"demo LoRA: loaded by diffusers; pixels in [0, 1] change by {difference:.4f} on average")
    print(f"  before and after, enlarged: {sheet}")
    return 0 if difference > 0 else 1


if __name__ == "__main__":
    sys.exit(main(*(Path(argument) for argument in sys.argv[1:4])))
