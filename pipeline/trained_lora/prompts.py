"""The prompts that previews and `latentline sample` draw, with their cache entries and settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.aspect_buckets.slider_pairs import slider_scales
from pipeline.cache.store import EntrySpec
from pipeline.images.geometry import Size, placements_of
from pipeline.recipe.preview_prompts import DEFAULT_PREVIEW_STEPS
from pipeline.side_inputs.references import IMAGES
from pipeline.text_embeddings.caption_rows import file_images
from pipeline.trained_lora.inputs import tensors_from_json, tensors_json
from pipeline.trained_lora.previews import number_text, preview_heading

if TYPE_CHECKING:
    from pipeline.cache.recipe_entries import RecipeEntries
    from pipeline.recipe import PreviewPrompt, Recipe
    from pipeline.trained_lora.inputs import TrainingInputs

SLIDER_SCALES = (-1.0, 0.0, 1.0)
"""Scales of a slider's previews: its opposite, the base model, and the trained direction."""


NUM_DEFAULT_PROMPTS = 2
"""Number of captions that are drawn as previews if the recipe has no preview prompts."""


@dataclass(frozen=True)
class CaptionEntry:
    """A caption with its cache entry."""

    caption: str
    text: EntrySpec


@dataclass(frozen=True)
class Prompt:
    """A prompt with its cache entry, and how its picture is drawn.

    Attributes:
        size_hw: Height and width of the picture in pixels.
        has_own_size: Whether the recipe sets the size.
        negative: Negative prompt, which may be empty with references that the text encoder sees; None for
            the empty caption of the job.
        steps: Number of denoising steps.
        guidance_scale: None for the family's.
        seed: Seed of the first noise; None for the job's seed.
        lora_scale: Factor of the LoRA's effect.
        references: Files of the reference images, in order.
    """

    caption: str
    text: EntrySpec
    size_hw: tuple[int, int]
    has_own_size: bool = False
    negative: CaptionEntry | None = None
    steps: int = DEFAULT_PREVIEW_STEPS
    guidance_scale: float | None = None
    seed: int | None = None
    lora_scale: float = 1.0
    references: tuple[Path, ...] = ()

    def settings(self) -> dict[str, str]:
        """Return the settings that differ from the defaults as text, by `previews.SETTING_KEYS`."""
        settings: dict[str, str] = {}
        if self.negative is not None and self.negative.caption:
            settings["negative_prompt"] = self.negative.caption
        if self.has_own_size:
            settings |= {"height": str(self.size_hw[0]), "width": str(self.size_hw[1])}
        if self.steps != DEFAULT_PREVIEW_STEPS:
            settings["steps"] = str(self.steps)
        if self.guidance_scale is not None:
            settings["guidance_scale"] = number_text(self.guidance_scale)
        if self.seed is not None:
            settings["seed"] = str(self.seed)
        if self.lora_scale != 1.0:
            settings["lora_scale"] = number_text(self.lora_scale)
        if self.references:
            settings["references"] = ", ".join(path.name for path in self.references)
        return settings

    @property
    def heading(self) -> str:
        """Heading on sheets: the prompt and the settings that differ from the defaults."""
        return preview_heading(self.caption, self.settings())

    def entries(self) -> tuple[CaptionEntry, ...]:
        """Return the prompt and its negative prompt."""
        own = CaptionEntry(self.caption, self.text)
        return (own,) if self.negative is None else (own, self.negative)


def preview_prompts(
    recipe: Recipe, entries: RecipeEntries, inputs: TrainingInputs, latents: pl.DataFrame
) -> tuple[Prompt, ...]:
    """Return the prompts of the previews: the recipe's, or else the first captions with their references."""
    training = recipe.training
    if training.sample_every == 0:
        return ()

    if training.sample_prompts:
        return recipe_prompts(entries, recipe.preview_prompts)

    trained = [dataset.name for dataset in recipe.datasets if dataset.role == "train"]
    captions = inputs.table.with_row_index("number").filter(pl.col("dataset").is_in(trained))
    # By name, so that they are the pictures that a file manager lists first.
    captions = captions.sort("variant_id").select("number", caption=pl.col("captions").list.first())
    first_uses = captions.unique("caption", keep="first", maintain_order=True)["number"]
    chosen = [inputs[number] for number in first_uses[:NUM_DEFAULT_PROMPTS]]
    references = _reference_files(recipe, latents, [item.sample_id for item in chosen])
    if entries.text_images is not None:
        # The embeddings of captions contain the references, so those at addresses cannot be omitted.
        chosen = [item for item in chosen if not item.views[0].references or item.sample_id in references]
    prompts = (
        Prompt(
            item.variants[0].caption,
            item.variants[0].entry,
            item.target_size_hw,
            negative=None if item.empty_text is None else CaptionEntry("", item.empty_text),
            references=references.get(item.sample_id, ()),
        )
        for item in chosen
    )
    return tuple(scaled for prompt in prompts for scaled in at_slider_scales(recipe, prompt))


def _reference_files(
    recipe: Recipe, latents: pl.DataFrame, sample_ids: Sequence[str]
) -> dict[str, tuple[Path, ...]]:
    if IMAGES not in latents.columns:
        return {}
    roots = {dataset.name: dataset.side_input_roots("references") for dataset in recipe.datasets}
    rows = latents.filter(pl.col("sample_id").is_in(list(sample_ids))).drop_nulls(IMAGES)
    files: dict[str, tuple[Path, ...]] = {}
    for sample_id, dataset, images in rows.select("sample_id", "dataset", IMAGES).iter_rows():
        paths = zip(roots[dataset], json.loads(images), strict=True)
        # Previews open references as local files.
        local = [root / image["path"] for root, image in paths if isinstance(root, Path)]
        if len(local) == len(roots[dataset]):
            files[sample_id] = tuple(local)
    return files


def square_prompts(entries: RecipeEntries, captions: Iterable[str]) -> tuple[Prompt, ...]:
    """Return the captions as prompts, drawn in the squarest bucket of the recipe's largest resolution."""
    size = _squarest_bucket(entries)
    return tuple(Prompt(caption, entries.text_spec(caption), size) for caption in captions)


def recipe_prompts(entries: RecipeEntries, previews: Iterable[PreviewPrompt]) -> tuple[Prompt, ...]:
    """Return the preview prompts of a recipe; in a recipe with sliders, a prompt may stand for several."""
    # A prompt without a size is drawn in the squarest bucket of the largest resolution.
    default_size = _squarest_bucket(entries)
    prompts: list[Prompt] = []
    for preview in previews:
        own_size = None
        if preview.height is not None and preview.width is not None:
            own_size = Size(preview.height, preview.width)

        images, _ = file_images(entries, preview.references)
        negative = preview.negative_prompt
        negative_images = images if entries.sees_images_in_negative else None
        if negative_images is not None:
            # The job's empty caption was encoded without images, so this prompt has an empty caption of its
            # own.
            negative = negative or ""

        prompt = Prompt(
            caption=preview.prompt,
            text=entries.text_spec(preview.prompt, images=images),
            size_hw=own_size or default_size,
            has_own_size=own_size is not None,
            negative=None
            if negative is None
            else CaptionEntry(negative, entries.text_spec(negative, images=negative_images)),
            steps=preview.steps,
            guidance_scale=preview.guidance_scale,
            seed=preview.seed,
            references=preview.references,
        )

        # A slider is judged by its opposite directions, so a prompt without a scale is drawn at each of them.
        if preview.lora_scale is not None:
            prompts.append(replace(prompt, lora_scale=preview.lora_scale))
        else:
            prompts += at_slider_scales(entries.recipe, prompt)
    return tuple(prompts)


def at_slider_scales(recipe: Recipe, prompt: Prompt) -> list[Prompt]:
    """Return the prompt at each of `SLIDER_SCALES`, or alone if the recipe has no sliders."""
    if not slider_scales(recipe):
        return [prompt]
    return [replace(prompt, lora_scale=scale) for scale in SLIDER_SCALES]


def _squarest_bucket(entries: RecipeEntries) -> Size:
    largest = [placement.sets[-1].sizes for placement, _ in placements_of(entries.recipe)]
    sizes = max(largest, key=lambda sizes: max(size.height * size.width for size in sizes))

    # Of buckets that are equally square, such as 64x32 and 32x64, the taller one.
    return min(sizes, key=lambda size: (max(size) / min(size), -size.height))


def prompts_to_json(prompts: Iterable[Prompt]) -> list[dict[str, Any]]:
    """Return JSON values for `prompts_from_json`."""
    return [
        {
            **vars(prompt),
            "text": entry_to_json(prompt.text),
            "negative": prompt.negative
            and {"caption": prompt.negative.caption, "text": entry_to_json(prompt.negative.text)},
            "references": [str(path) for path in prompt.references],
        }
        for prompt in prompts
    ]


def prompts_from_json(values: Iterable[Mapping[str, Any]]) -> tuple[Prompt, ...]:
    """Return the prompts of `prompts_to_json`."""
    prompts: list[Prompt] = []
    for value in values:
        settings = dict(value)
        settings["text"] = entry_from_json(settings["text"])
        settings["size_hw"] = Size(*settings["size_hw"])
        settings["references"] = tuple(Path(path) for path in settings["references"])
        if (negative := settings["negative"]) is not None:
            settings["negative"] = CaptionEntry(negative["caption"], entry_from_json(negative["text"]))
        prompts.append(Prompt(**settings))
    return tuple(prompts)


def entry_to_json(entry: EntrySpec) -> dict[str, Any]:
    """Return JSON values for `entry_from_json`."""
    return {"kind": entry.kind, "key": entry.key, "tensors": json.loads(tensors_json(entry.tensors))}


def entry_from_json(value: Mapping[str, Any]) -> EntrySpec:
    """Return the entry of `entry_to_json`."""
    return EntrySpec(value["kind"], value["key"], tensors_from_json(value["tensors"]))
