"""The model card that lies beside a LoRA: what it is, how to use it, what it was made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CARD_FILE = "README.md"
SHEET_FILE = "samples.jpg"


def model_card(record: Mapping[str, Any], *, steps: int, prompts: Sequence[str], has_pictures: bool) -> str:
    """The card as Markdown, with the front matter that the Hub reads.

    Args:
        record: As `provenance` makes it.
        steps: Optimizer steps done.
        prompts: What the sample pictures show, by column.
        has_pictures: Whether `SHEET_FILE` lies beside it.
    """
    recipe, base = record["recipe"], record["model"]["base"]
    training, name = recipe["training"], recipe["name"]
    lora = training["lora"]
    trained = "" if lora["text_encoders"] is None else "; of the text encoders too"
    rows = [
        ("base model", f"`{base}`"),
        *((f"its {role}", f"`{named}`") for role, named in record["model"].get("components", {}).items()),
        ("images", f"{record['samples']['number']} trained on"),
        (
            "steps",
            f"{steps}, {training['batch_size']} x {training['gradient_accumulation']} samples a process",
        ),
        ("rank, alpha", f"{lora['rank']}, {lora['alpha']}{trained}"),
        ("optimizer", f"{training['optimizer']}, {training['learning_rate']}, {training['lr_scheduler']}"),
        ("resolution", str(recipe["buckets"]["resolution"])),
        ("seed", str(training["seed"])),
    ]
    return "\n".join(
        [
            *(
                "---",
                f"base_model: {_quoted(base)}",
                "library_name: diffusers",
                "pipeline_tag: text-to-image",
            ),
            *("tags: [lora, diffusers, text-to-image]", "---", "", f"# {name}", ""),
            "A LoRA trained by Latentline. In diffusers:",
            "",
            "```python",
            "from diffusers import DiffusionPipeline",
            "",
            f"pipe = DiffusionPipeline.from_pretrained({base!r})",
            'pipe.load_lora_weights("<this folder>")',
            "```",
            "",
            f"`{name}_kohya.safetensors` is for kohya's tools, `{name}_comfyui.safetensors` for ComfyUI.",
            "",
            *(_pictures(prompts) if has_pictures else []),
            "| | |",
            "|---|---|",
            *(f"| {what} | {value} |" for what, value in rows),
            "",
            "`latentline provenance <file>` prints what it was made of: recipe, model fingerprints, and",
            "hashes of all images and captions; `--find <image or text file>` tells if one was among them.",
            "",
        ]
    )


def _pictures(prompts: Sequence[str]) -> list[str]:
    shown = [" ".join(prompt.split()).replace("`", "'") for prompt in prompts]
    listed = [f"{number}. `{prompt}`" for number, prompt in enumerate(shown, start=1)]
    return [f"![samples while it was trained]({SHEET_FILE})", "", "The columns are:", "", *listed, ""]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
