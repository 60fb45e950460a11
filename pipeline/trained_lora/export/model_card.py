"""The model card published with a LoRA: how to use it, and its training data and settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.escaping import markdown_text, printable
from pipeline.models.families.family import FORCES_ZEROS, LOSES_ZERO_SNR, MODULAR
from pipeline.models.families.parts.noise import ZERO_SNR_DRAWING
from pipeline.recipe.lora import DEFAULT_OFT_BLOCK_SIZE
from pipeline.trained_lora.export.lora_files import SHEET_FILE, native_file_name

PLACE = '"<this folder>"'
"""Argument of `load_lora_weights` in the card, for a reader to replace."""

_ZERO_SNR_LINES = [
    "pipe.scheduler = DDIMScheduler.from_config(",
    f"    pipe.scheduler.config, {', '.join(f'{key}={value!r}' for key, value in ZERO_SNR_DRAWING.items())}",
    ")",
]
"""Lines that draw on a schedule of zero terminal SNR, as previews do."""

_ROTATION_LINES = [
    'file = "pytorch_lora_weights.safetensors"',
    'with safe_open(f"{folder}/{file}", "pt") as opened:',
    '    settings = json.loads(opened.metadata()["lora_adapter_metadata"])',
    '    weights = {key.partition(".")[2]: opened.get_tensor(key) for key in opened.keys()}',
    'config = get_peft_config({key.partition(".")[2]: value for key, value in settings.items()})',
    "denoiser.add_adapter(config)",
    "set_peft_model_state_dict(denoiser, weights)",
]
"""Lines that load an OFT with peft; diffusers has no loader for it."""

_EMPTY_PROMPT = [
    'Pass `negative_prompt=""` if you have no other. Without it, the pipeline of this base model uses zeros',
    "instead of the empty prompt, which training and previews use.",
    "",
]


def model_card(
    record: Mapping[str, Any], *, steps: int, headings: Sequence[str], has_sheet: bool, why: str = ""
) -> str:
    """Return the card as Markdown.

    Args:
        record: Provenance of the LoRA.
        steps: Number of steps that trained the LoRA.
        headings: Prompts of the columns of `SHEET_FILE`.
        has_sheet: Whether the card shows `SHEET_FILE`.
        why: Reason for which an evaluation chose the step, if it did.
    """
    is_rotation = record["recipe"]["training"]["lora"].get("kind") == "oft"
    base, name = printable(record["model"]["base"]), record["recipe"]["name"]
    is_modular = bool(record["model"].get(MODULAR))
    load = _load_lines(base, is_modular=is_modular, has_zero_snr=_needs_zero_snr(record))

    # The Hub reads the front matter between the two lines of dashes.
    lines = [
        "---",
        f"base_model: {json.dumps(base, ensure_ascii=False)}",
        "library_name: diffusers",
        "pipeline_tag: text-to-image",
        f"tags: [{'oft' if is_rotation else 'lora'}, diffusers, text-to-image]",
        *_hub_lines(record["recipe"]),
        "---",
        "",
        f"# {markdown_text(name)}",
        "",
        *(_rotation_usage if is_rotation else _usage)(load),
        "",
        *(_EMPTY_PROMPT if record["model"].get(FORCES_ZEROS) else []),
        *(_rotation_programs(name) if is_rotation else _programs(name, native=_native_kind(record))),
        "",
        *(_previews(headings) if has_sheet else []),
        "| | |",
        "|---|---|",
        *(f"| {label} | {markdown_text(value)} |" for label, value in training_rows(record, steps)),
        *([f"| chosen by its evaluation | {markdown_text(why)} |"] if why else []),
        "",
        "`latentline provenance <file>` prints its provenance: the recipe, model fingerprints",
        "and hashes of all images and captions. `--find <image or text file>` reports whether one was used.",
        "",
    ]
    return "\n".join(lines)


def _load_lines(base: str, *, is_modular: bool, has_zero_snr: bool) -> tuple[str, list[str]]:
    """Return the import of a pipeline, and the lines that load the base model into `pipe`."""
    if is_modular:
        lines = [f"pipe = ModularPipeline.from_pretrained({base!r})", "pipe.load_components()"]
        return "from diffusers import ModularPipeline", lines
    lines = [
        f"pipe = DiffusionPipeline.from_pretrained({base!r})",
        *(_ZERO_SNR_LINES if has_zero_snr else []),
    ]
    return f"from diffusers import {'DDIMScheduler, ' if has_zero_snr else ''}DiffusionPipeline", lines


def _usage(load: tuple[str, list[str]]) -> list[str]:
    imports, lines = load
    return [
        "A LoRA trained with Latentline. To use it in diffusers:",
        "",
        "```python",
        imports,
        "",
        *lines,
        f"pipe.load_lora_weights({PLACE})",
        "```",
    ]


def _programs(name: str, *, native: str = "") -> list[str]:
    lines = [
        f"Use {markdown_text(f'{name}_kohya.safetensors')} with kohya's tools and "
        f"{markdown_text(f'{name}_comfyui.safetensors')} with ComfyUI."
    ]
    if native:
        file = markdown_text(native_file_name(name))
        lines.append(f"{file} has the same {native} in its own format, which ComfyUI reads too.")
    return lines


def _native_kind(record: Mapping[str, Any]) -> str:
    lora = record["recipe"]["training"]["lora"]
    return {"loha": "LoHa", "lokr": "LoKr"}[lora["kind"]] if lora.get("native_file") else ""


def _rotation_usage(load: tuple[str, list[str]]) -> list[str]:
    imports, lines = load
    return [
        "An OFT trained with Latentline. To use it in diffusers, from a local copy of this folder:",
        "",
        "```python",
        "import json",
        "",
        imports,
        "from peft import get_peft_config, set_peft_model_state_dict",
        "from safetensors import safe_open",
        "",
        f"folder = {PLACE}",
        *lines,
        'denoiser = pipe.components.get("unet") or pipe.transformer',
        *_ROTATION_LINES,
        "```",
    ]


def _rotation_programs(name: str) -> list[str]:
    return [
        f"Use {markdown_text(f'{name}_comfyui.safetensors')} with ComfyUI and its extension",
        "https://github.com/Koratahiu/ComfyUI-OFTv2.",
    ]


def _hub_lines(recipe: Mapping[str, Any]) -> list[str]:
    """Return the lines from which the Hub's page fills its prompt: the trigger word, and prompts to try."""
    triggers = [dataset["captions"].get("trigger") for dataset in recipe["datasets"]]
    prompts = [each["prompt"] for each in recipe["training"]["sample_prompts"]]
    lines = [
        ("instance_prompt", next((printable(trigger) for trigger in triggers if trigger), None)),
        ("widget", [{"text": printable(prompt)} for prompt in prompts]),
    ]
    # JSON is YAML, and quotes what a caption may contain.
    return [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in lines if value]


def _needs_zero_snr(record: Mapping[str, Any]) -> bool:
    """Return the condition of `load_drawing_pipeline` for its replacement of the base model's scheduler."""
    return record["recipe"]["training"]["noise"]["zero_terminal_snr"] or record["model"].get(
        LOSES_ZERO_SNR, False
    )


def training_rows(record: Mapping[str, Any], steps: int) -> list[tuple[str, str]]:
    """Return label and value of each setting of a provenance record that people ask for."""
    recipe, model = record["recipe"], record["model"]
    training, lora = recipe["training"], recipe["training"]["lora"]
    text_encoders = "" if lora["text_encoders"] is None else "; text encoders trained too"
    planned_steps = training["steps"] or steps
    steps_text = str(steps) if steps == planned_steps else f"{steps} of {planned_steps}"
    batch = f"{training['batch_size']} x {training['gradient_accumulation']} samples per process"
    return [
        ("base model", model["base"]),
        *((f"its {role}", path) for role, path in model.get("components", {}).items()),
        *_context_rows(model),
        ("images", f"{record['samples']['number']} in training"),
        *_caption_rows(record),
        ("steps", f"{steps_text}, {batch}"),
        *_continued_rows(record),
        *_slider_rows(recipe),
        _size_row(lora, text_encoders),
        *([("noise schedule", "zero terminal SNR")] if _needs_zero_snr(record) else []),
        ("optimizer", f"{training['optimizer']}, {training['learning_rate']}, {training['lr_scheduler']}"),
        ("resolution", _resolution_text(recipe["buckets"])),
        *_dataset_rows(recipe),
        ("seed", str(training["seed"])),
    ]


def _caption_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return one row for each captioning model; no other run has them."""
    labels = {"model": "by {}", "files": "from files", "edits": "edited by a person"}
    rows: list[tuple[str, str]] = []
    for each in record.get("captions", ()):
        parts = [
            f"{each['images'][name]} {label.format(each['model'])}"
            for name, label in labels.items()
            if each["images"][name]
        ]
        rows += [(f"captions of {', '.join(each['datasets'])}", ", ".join(parts))] if parts else []
    return rows


def _context_rows(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    context = model.get("context_lora")
    if context is None:
        return []
    return [
        ("trained together with", f"{context['name']} at strength {context['scale']:g}, not in this file")
    ]


def _size_row(lora: Mapping[str, Any], text_encoders: str) -> tuple[str, str]:
    if lora.get("kind") == "oft":
        return "OFT", f"blocks of {lora['oft_block_size'] or DEFAULT_OFT_BLOCK_SIZE} inputs"
    return "rank, alpha", f"{lora['rank']}, {lora['alpha']}{text_encoders}"


def _continued_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    earlier = record.get("continues")
    if earlier is None:
        return []
    images = f"{earlier['samples']['number']} images"
    return [("continues", f"run {earlier['run']} from step {earlier['step']}, trained on {images}")]


def _resolution_text(section: Mapping[str, Any]) -> str:
    return ", ".join(map(str, section.get("resolutions") or [section["resolution"]]))


def _dataset_rows(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return one row for each dataset with settings of its own, such as a resolution."""
    rows: list[tuple[str, str]] = []
    # Records of earlier releases lack these keys.
    for dataset in recipe["datasets"]:
        parts: list[str] = []
        if dataset.get("resolution") or dataset.get("resolutions"):
            parts.append(f"resolution {_resolution_text(dataset)}")
        if dataset.get("flip") is not None:
            parts.append("mirrored" if dataset["flip"] else "not mirrored")
        if dataset.get("caption_dropout") is not None:
            parts.append(f"caption dropout {dataset['caption_dropout']}")
        if tags := dataset["captions"].get("drop_tags"):
            parts.append(f"tag dropout {tags['rate']}")
        rows += [(f"dataset {dataset['name']}", ", ".join(parts))] if parts else []
    return rows


def _slider_rows(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    sides = {
        scale: [each["name"] for each in recipe["datasets"] if each.get("slider") == scale]
        for scale in (1, -1)
    }
    return [(f"at scale {scale}", ", ".join(names)) for scale, names in sides.items() if names]


def _previews(headings: Sequence[str]) -> list[str]:
    numbered = [f"{number}. {markdown_text(heading)}" for number, heading in enumerate(headings, start=1)]
    return [f"![previews during training]({SHEET_FILE})", "", "Prompts of the columns:", "", *numbered, ""]
