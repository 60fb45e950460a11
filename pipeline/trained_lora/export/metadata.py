"""Header metadata of LoRA files: the `ss_*` keys of kohya's tools and the keys of ModelSpec.

ModelSpec: https://github.com/Stability-AI/ModelSpec.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.recipe import shareable_path
from pipeline.trained_lora.export.lora_files import PROVENANCE_KEY, RUN_KEY, Layout, LoraModule

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.models.families.parts.lora_keys import LoraKeys
    from pipeline.recipe import LoraSettings, Recipe
    from pipeline.trained_lora.job import TrainingJob

MAX_TAGS = 500
"""Largest number of tags per dataset in a file."""

READERS_KEY = "latentline.readers"
"""Key in a file's metadata with the programs that apply the file with another strength."""


ROTATION_READERS: dict[Layout, str] = {
    "diffusers": "peft loads it, see the model card; diffusers' load_lora_weights does not.",
    "comfyui": "ComfyUI loads it with the extension https://github.com/Koratahiu/ComfyUI-OFTv2 only.",
}
"""Programs that read the files of an OFT, by layout."""


def header_metadata(job: TrainingJob, family: Family) -> dict[str, str]:
    """Return the metadata of the exported files of a complete run, without anything volatile."""
    recipe = job.recipe
    training, lora = recipe.training, recipe.training.lora
    prediction, resolution = family.prediction_type(), max(recipe.budgets)
    # Other programs hide a LoRA, or take it for another kind, if these keys are missing (FAILURES R15).
    values: dict[str, object] = {
        "ss_network_module": "peft.oft" if lora.kind == "oft" else "networks.lora",
        "ss_network_dim": lora.usual_file_rank,
        "ss_network_alpha": lora.scale_of("", conv=False) * lora.usual_file_rank,
        "ss_output_name": recipe.name,
        "ss_sd_model_name": shareable_path(recipe.model.base),
        "ss_num_train_images": int(job.inputs.trained.table["repeats"].sum()),
        "ss_steps": training.num_steps,
        "ss_max_train_steps": training.num_steps,
        "ss_batch_size_per_device": training.batch_size,
        "ss_gradient_accumulation_steps": training.gradient_accumulation,
        "ss_learning_rate": training.learning_rate,
        "ss_lr_scheduler": training.lr_scheduler,
        "ss_lr_warmup_steps": training.warmup_steps,
        "ss_optimizer": training.optimizer,
        "ss_max_grad_norm": training.max_grad_norm,
        "ss_mixed_precision": family.mixed_precision(recipe.accelerate.mixed_precision),
        "ss_resolution": f"({resolution}, {resolution})",
        "ss_enable_bucket": True,
        "ss_seed": training.seed,
        "modelspec.title": recipe.name,
        "modelspec.resolution": f"{resolution}x{resolution}",
        RUN_KEY: job.run,
    }

    # Other programs know one rate for all datasets; the recipe in the provenance has the rate of each.
    if len(dropouts := {*recipe.caption_dropouts.values()}) == 1:
        values["ss_caption_dropout_rate"] = dropouts.pop()

    if triggers := _trigger_words(recipe):
        values["modelspec.trigger_phrase"] = ", ".join(triggers)
    values["ss_tag_frequency"] = json.dumps(_tag_frequencies(job), ensure_ascii=False)
    if job.provenance:
        values[PROVENANCE_KEY] = json.dumps(job.provenance, sort_keys=True, ensure_ascii=False)
    if lora.scale_weight_norms is not None:
        values["ss_scale_weight_norms"] = lora.scale_weight_norms
    if arguments := _network_arguments(lora):
        values["ss_network_args"] = json.dumps(arguments, sort_keys=True)
    if (text := lora.text_encoders) is not None:
        rate = training.learning_rate if text.learning_rate is None else text.learning_rate
        values |= {"ss_unet_lr": training.learning_rate, "ss_text_encoder_lr": rate}
    if prediction != "flow":  # ModelSpec does not define it
        values["modelspec.prediction_type"] = "v" if prediction == "v_prediction" else "epsilon"

    # The safetensors format requires string values.
    return {**base_model_metadata(family), **{name: str(value) for name, value in values.items()}}


def native_metadata(lora: LoraSettings) -> dict[str, str] | None:
    """Return the metadata that the file of a LoHa or LoKr in its own format has instead; None without one."""
    if not lora.native_file:
        return None
    arguments = {name: value for name, value in _network_arguments(lora).items() if name != "trained_as"}
    factor = {"factor": lora.kronecker_factor} if lora.kind == "lokr" else {}
    values = {
        "ss_network_module": "lycoris.kohya",
        "ss_network_dim": lora.rank,
        "ss_network_alpha": lora.alpha,
        "ss_network_args": json.dumps({"algo": lora.kind, **factor, **arguments}, sort_keys=True),
    }
    return {name: str(value) for name, value in values.items()}


def base_model_metadata(family: Family) -> dict[str, str]:
    """Return the metadata that names the kind of base model that a LoRA is for."""
    values = {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"{family.modelspec_architecture()}/lora",
        "modelspec.implementation": "diffusers",
    }
    # The web UIs show a LoRA only beside base models of the version that these keys name.
    if version := family.kohya_version():
        values |= {"ss_base_model_version": version, "ss_v2": str(version.startswith("sd_v2"))}
    return values


def at_step(metadata: Mapping[str, str], step: int) -> dict[str, str]:
    """Return the metadata with the number of optimizer steps after which the weights were exported."""
    values = {**metadata, "ss_steps": str(step), "latentline.step": str(step)}
    if PROVENANCE_KEY in metadata:
        record = {**json.loads(metadata[PROVENANCE_KEY]), "step": step}
        values[PROVENANCE_KEY] = json.dumps(record, sort_keys=True, ensure_ascii=False)
    return values


def readers_note(layout: Layout, modules: Sequence[LoraModule], keys: LoraKeys) -> dict[str, str]:
    """Return metadata that names the programs that misread these modules in this layout."""
    if any(module.rotation for module in modules):
        note = "This is an OFT. " + ROTATION_READERS[layout]
        return {READERS_KEY: note}
    if layout == "kohya" and any(module.magnitude for module in modules):
        note = (
            "ComfyUI divides DoRA magnitudes by other norms than kohya's tools, so it applies this file with "
            "another strength. Load the file whose name ends in _comfyui."
        )
        return {READERS_KEY: note}
    if layout == "kohya" and keys.kohya_note:
        return {READERS_KEY: keys.kohya_note}
    if layout == "comfyui" and not keys.diffusers_reads_comfyui:
        note = "diffusers does not apply this file. It reads pytorch_lora_weights.safetensors."
        return {READERS_KEY: note}
    if layout == "diffusers" and any(module.alpha != module.rank for module in modules):
        note = (
            "The scale, alpha / rank, is in lora_adapter_metadata. Programs that do not read it, such as "
            "ComfyUI, apply this file with a scale of 1. ComfyUI reads the file whose name ends in _comfyui."
        )
        return {READERS_KEY: note}
    return {}


def _trigger_words(recipe: Recipe) -> list[str]:
    words = [dataset.captions.trigger for dataset in recipe.datasets if dataset.role != "prior"]
    return list(dict.fromkeys(word for word in words if word is not None))


def _tag_frequencies(job: TrainingJob) -> dict[str, dict[str, int]]:
    """Return the number of images with each tag of several images, per dataset, the most frequent first."""
    # Tags are in lower case and end at commas, as in `set_tag_frequency` of sd-scripts.
    frequencies: dict[str, dict[str, int]] = {}
    samples = job.inputs.trained.table.unique("sample_id", maintain_order=True)
    for dataset in job.recipe.datasets:
        if dataset.role == "prior":
            continue
        captions = samples.filter(pl.col("dataset") == dataset.name).select("sample_id", "captions")
        # The captions of one image may be orders of the same tags, so an image counts each tag once.
        tags = captions.explode("captions").select(
            "sample_id", tag=pl.col("captions").str.to_lowercase().str.split(",")
        )
        tags = tags.explode("tag").with_columns(pl.col("tag").str.strip_chars()).filter(pl.col("tag") != "")
        counts = tags.unique().group_by("tag").len().sort(["len", "tag"], descending=[True, False])
        # Parts of single captions, such as sentences, say nothing about the concept and may be private.
        counts = counts.filter(pl.col("len") > 1)
        frequencies[dataset.name] = dict(counts.head(MAX_TAGS).iter_rows())
    return frequencies


def _network_arguments(lora: LoraSettings) -> dict[str, object]:
    # Named as in LyCORIS where it has a name for the setting.
    arguments: dict[str, Any] = {}
    if lora.kind == "oft":
        arguments["trained_as"] = {"algo": "oft", "block_size": lora.rotation_block}
    elif lora.kind != "lora":
        arguments["trained_as"] = {"algo": lora.kind, "dim": lora.rank, "alpha": lora.alpha}
    if lora.kind == "lokr":
        arguments["trained_as"] = {**arguments["trained_as"], "factor": lora.kronecker_factor}
    if lora.conv_rank is not None:
        arguments["conv_dim"], arguments["conv_alpha"] = lora.size_of("", conv=True)
    if lora.dropout:
        arguments["dropout"] = lora.dropout
    if lora.rank_dropout:
        arguments["rank_dropout"] = lora.rank_dropout
    if lora.module_dropout:
        arguments["module_dropout"] = lora.module_dropout
    if lora.timestep_ranks is not None:
        arguments["timestep_ranks"] = lora.timestep_ranks.model_dump(mode="json")
    if lora.starts_from_base_weights:
        arguments["init"] = lora.init
    if lora.dora:
        arguments["dora_wd"] = True
    if lora.rslora:
        arguments["rs_lora"] = True
    if text := lora.of_text_encoders:
        arguments["text_encoders"] = {"dim": text.rank, "alpha": text.alpha}
    return arguments
