"""What a LoRA file says of itself: the `ss_*` keys that kohya's tools read, and the ModelSpec ones.

ModelSpec: https://github.com/Stability-AI/ModelSpec. Nothing volatile is in it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.trained_lora.export.lora_files import PROVENANCE_KEY

if TYPE_CHECKING:
    from pipeline.models.families import Family
    from pipeline.recipe import LoraSettings
    from pipeline.trained_lora.job import TrainingJob


def header_metadata(order: TrainingJob, family: Family) -> dict[str, str]:
    """The metadata of each exported file, all strings, as the safetensors format asks."""
    recipe = order.recipe
    training, lora = recipe.training, recipe.training.lora
    prediction = family.prediction_type()
    numbers: dict[str, object] = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": lora.usual_file_rank,
        "ss_network_alpha": lora.scale_of("", conv=False) * lora.usual_file_rank,
        "ss_output_name": recipe.name,
        "ss_sd_model_name": recipe.model.base,
        "ss_num_train_images": int(order.inputs.trained.table["repeats"].sum()),
        "ss_steps": training.num_steps,
        "ss_max_train_steps": training.num_steps,
        "ss_batch_size_per_device": training.batch_size,
        "ss_gradient_accumulation_steps": training.gradient_accumulation,
        "ss_learning_rate": training.learning_rate,
        "ss_lr_scheduler": training.lr_scheduler,
        "ss_lr_warmup_steps": training.warmup_steps,
        "ss_optimizer": training.optimizer,
        "ss_max_grad_norm": training.max_grad_norm,
        "ss_caption_dropout_rate": recipe.text.caption_dropout,
        "ss_mixed_precision": recipe.accelerate.mixed_precision,
        "ss_resolution": f"({recipe.buckets.resolution}, {recipe.buckets.resolution})",
        "ss_enable_bucket": True,
        "ss_seed": training.seed,
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"{family.modelspec_architecture()}/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": recipe.name,
        "modelspec.resolution": f"{recipe.buckets.resolution}x{recipe.buckets.resolution}",
        "latentline.run": order.run,
    }
    if order.provenance:
        numbers[PROVENANCE_KEY] = json.dumps(order.provenance, sort_keys=True, ensure_ascii=False)
    if kinds := _network_arguments(lora):
        numbers["ss_network_args"] = json.dumps(kinds, sort_keys=True)
    if (text := lora.text_encoders) is not None:
        rate = training.learning_rate if text.learning_rate is None else text.learning_rate
        numbers |= {"ss_unet_lr": training.learning_rate, "ss_text_encoder_lr": rate}
    if prediction != "flow":  # ModelSpec has no word for it
        numbers["modelspec.prediction_type"] = "v" if prediction == "v_prediction" else "epsilon"
    return {name: str(value) for name, value in numbers.items()}


def _network_arguments(lora: LoraSettings) -> dict[str, object]:
    """What is special about the adapter, under LyCORIS's names where it has them."""
    kinds: dict[str, Any] = {}
    if lora.kind != "lora":
        kinds["trained_as"] = {"algo": lora.kind, "dim": lora.rank, "alpha": lora.alpha}
    if lora.kind == "lokr":
        kinds["trained_as"] = {**kinds["trained_as"], "factor": lora.kronecker_factor}
    if lora.conv_rank is not None:
        kinds["conv_dim"], kinds["conv_alpha"] = lora.size_of("", conv=True)
    if lora.dropout:
        kinds["dropout"] = lora.dropout
    if lora.begins_as_part:
        kinds["init"] = lora.init
    if lora.dora:
        kinds["dora_wd"] = True
    if lora.rslora:
        kinds["rs_lora"] = True
    if text := lora.of_text_encoders:
        kinds["text_encoders"] = {"dim": text.rank, "alpha": text.alpha}
    return kinds
