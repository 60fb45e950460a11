"""What the demo's LoRA has learned: scores and pictures before and after, drawn by diffusers alone.

The concept's prompts and prompts of known shapes are drawn without and with the LoRA, from the same noise.
This module imports nothing of Latentline.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from demo.concept_pictures import concept_scenes
from demo.score import score
from demo.world import SHAPES, Array, Scene, scenes

MAX_BEFORE = 0.1
"""Maximum score of the concept without the LoRA."""

# Seven seeds gave 0.46 to 0.79; shuffled captions give 0.
MIN_AFTER = 0.4
"""Minimum score of the concept with the LoRA."""

MAX_LOST = 0.1
"""Maximum decrease of the score of known shapes."""

SHEET_FILE = "before_after.png"
SCORES_FILE = "learned.json"

_SEED = 0
_SHOWN = (
    "a red zorp on a white background",
    "an orange zorp on a gray background",
    "a yellow zorp on a black background",
    "a green zorp on a pink background",
    "a purple zorp on a white background",
    "a blue star on a black background",
)
"""Prompts of the sheet, with a known shape at the end."""

_PICTURE_PX = 192
_MARGIN_PX = 12
_TEXT_PX = 20


@dataclass(frozen=True)
class Learned:
    """Fractions of prompts that are drawn with the right shape, colour and background."""

    concept_before: float
    concept_after: float
    known_before: float
    known_after: float

    @property
    def lost(self) -> float:
        """Decrease of the score of known shapes, as two decimals: 0.8 - 0.7 is more than 0.1 in binary."""
        return round(self.known_before - self.known_after, 2)

    def missed_targets(self) -> list[str]:
        """Return a sentence for each target that was missed."""
        targets = (
            (
                self.concept_before <= MAX_BEFORE,
                f"the base model draws the concept: {self.concept_before:.2f}",
            ),
            (
                self.concept_after >= MIN_AFTER,
                f"the concept scores {self.concept_after:.2f}, not {MIN_AFTER}",
            ),
            (self.lost <= MAX_LOST, f"known shapes lost {self.lost:.2f}, more than {MAX_LOST}"),
        )
        return [sentence for reached, sentence in targets if not reached]

    def summary(self) -> str:
        """Return the scores in one line."""
        return (
            f"concept {self.concept_before:.2f} before, {self.concept_after:.2f} after; "
            f"known shapes {self.known_before:.2f} before, {self.known_after:.2f} after"
        )


def known_prompts() -> list[Scene]:
    """Return scenes of every known shape, a third of all."""
    return scenes(*SHAPES)[::3]


def measure(pipeline: Any, lora: Path, output: Path) -> Learned:
    """Draw without and with the LoRA, write the sheet and the scores into `output`, and return the scores.

    Args:
        pipeline: Stable Diffusion pipeline of diffusers, without a LoRA.
        lora: Folder or file of the LoRA, in diffusers layout.
        output: Existing folder.
    """
    from demo.drawing import draw_prompts

    concept, known = concept_scenes(), known_prompts()
    prompts = [scene.caption for scene in (*concept, *known)]
    before = draw_prompts(pipeline, prompts, seed=_SEED)
    load_adapter(pipeline, lora)
    after = draw_prompts(pipeline, prompts, seed=_SEED)

    number = len(concept)
    learned = Learned(
        concept_before=score(before[:number], concept).all_three,
        concept_after=score(after[:number], concept).all_three,
        known_before=score(before[number:], known).all_three,
        known_after=score(after[number:], known).all_three,
    )
    (output / SCORES_FILE).write_text(json.dumps(asdict(learned), indent=2) + "\n", encoding="utf-8")
    shown = [prompts.index(prompt) for prompt in _SHOWN]
    sheet = before_after_sheet(_SHOWN, [before[index] for index in shown], [after[index] for index in shown])
    sheet.save(output / SHEET_FILE)
    return learned


def load_adapter(pipeline: Any, lora: Path) -> None:
    """Load a LoRA with diffusers, or an OFT with peft, from its folder or file in diffusers layout."""
    from peft import get_peft_config, set_peft_model_state_dict
    from safetensors import safe_open

    file = lora / "pytorch_lora_weights.safetensors" if lora.is_dir() else lora
    with safe_open(file, "pt") as opened:
        weights = {key.removeprefix("unet."): opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        settings = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
    if not all(key.endswith(".oft_R.weight") for key in weights):
        pipeline.load_lora_weights(str(lora))
        return
    config = {key.removeprefix("unet."): value for key, value in settings.items()}
    pipeline.unet.add_adapter(get_peft_config(config))
    set_peft_model_state_dict(pipeline.unet, weights)


def before_after_sheet(
    captions: Sequence[str], before: Sequence[Array], after: Sequence[Array]
) -> Image.Image:
    """Return a sheet with one column per caption: the enlarged pictures without and with the LoRA."""
    font = ImageFont.load_default(_TEXT_PX)
    column_px = _PICTURE_PX + _MARGIN_PX
    row_px = _TEXT_PX + 2 * _MARGIN_PX + _PICTURE_PX
    caption_px = 2 * (_TEXT_PX + 4)
    size = (len(captions) * column_px + _MARGIN_PX, 2 * row_px + caption_px + 2 * _MARGIN_PX)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)

    for row, (label, pictures) in enumerate((("without the LoRA", before), ("with the LoRA", after))):
        top_px = row * row_px + _MARGIN_PX
        draw.text((_MARGIN_PX, top_px), label, fill="black", font=font)
        for column, picture in enumerate(pictures):
            enlarged = Image.fromarray(picture).resize((_PICTURE_PX, _PICTURE_PX), Image.Resampling.NEAREST)
            sheet.paste(enlarged, (column * column_px + _MARGIN_PX, top_px + _TEXT_PX + _MARGIN_PX))

    for column, caption in enumerate(captions):
        subject, _, background = caption.partition(" on ")
        text = f"{subject}\non {background.removesuffix(' background')}"
        draw.text((column * column_px + _MARGIN_PX, 2 * row_px + _MARGIN_PX), text, fill="black", font=font)
    return sheet


def load_pipeline(base: Path) -> Any:
    """Return the base model's pipeline, without progress bars."""
    import torch
    from diffusers import StableDiffusionPipeline
    from diffusers.utils.logging import disable_progress_bar as disable_diffusers_bar
    from transformers.utils.logging import disable_progress_bar as disable_transformers_bar

    disable_diffusers_bar()
    disable_transformers_bar()
    options: dict[str, Any] = {"safety_checker": None, "requires_safety_checker": False}
    return StableDiffusionPipeline.from_pretrained(base, dtype=torch.float32, **options)
