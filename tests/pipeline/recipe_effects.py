"""What each key of a recipe decides: keys of latents, keys of text embeddings, the run id, or none of them.

Every key of the schema is either in `EFFECTS` or in `DECIDES_ROWS`, so that a new key cannot be forgotten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pipeline.recipe.schema import all_keys

Values = dict[str, Any]


@dataclass(frozen=True)
class Effect:
    """A change of one key and what it must change.

    Attributes:
        change: Values that a recipe gets in addition to those of `context`.
        latents: Whether the keys of latents must change.
        text: Whether the keys of text embeddings must change.
        run: Whether the run id must change.
        context: Values of other keys that both recipes need, because the key has no effect or is not allowed
            without them.
    """

    change: Values
    latents: bool = False
    text: bool = False
    run: bool = False
    context: Values | None = None


def _latents(section: str, key: str, value: Any, **context: Any) -> Effect:
    return Effect(
        {section: {key: value}}, latents=True, run=True, context={section: context} if context else None
    )


def _run(value: Any, **context: Any) -> Effect:
    """Return a change of keys in `training` that changes the run id alone."""
    return Effect({"training": value}, run=True, context={"training": context} if context else None)


def _nothing(value: Values) -> Effect:
    return Effect(value)


_MASKS: Values = {"datasets": {"mask": {"path": "@folder@/masks"}}}

_PHOTOS: Values = {"name": "photos", "path": "@folder@/photos"}
_CLASS: Values = {"name": "class", "path": "@folder@/class"}
_OTHER: Values = {"name": "other", "path": "@folder@/other"}
_PRIOR: Values = {"datasets": [_PHOTOS, {**_CLASS, "role": "prior"}]}
_SLIDER: Values = {"datasets": [{**_PHOTOS, "slider": 1}, {**_CLASS, "slider": -1}]}

_HOLDOUT: Values = {"datasets": {"validation_fraction": 0.5}}
_SWEPT: Values = {**_HOLDOUT, "sweep": {"grid": {"training.learning_rate": [1e-4, 3e-4]}}}
_DRAWN: Values = {
    **_HOLDOUT,
    "sweep": {"random": {"count": 2, "ranges": {"training.learning_rate": [1e-5, 1e-4]}}},
}

EFFECTS: dict[str, Effect] = {
    "datasets.repeats": Effect({"datasets": {"repeats": 2}}, run=True),
    "datasets.weight": Effect({"datasets": {"weight": 2.0}}, run=True, context={"datasets": {"weight": 1.0}}),
    "datasets.role": Effect(
        {"datasets": [_PHOTOS, {**_CLASS, "role": "prior"}, _OTHER]},
        run=True,
        context={"datasets": [_PHOTOS, {**_CLASS, "role": "prior"}, {**_OTHER, "role": "prior"}]},
    ),
    "training.loss.prior": Effect({"training": {"loss": {"prior": "prediction"}}}, run=True, context=_PRIOR),
    "training.loss.prior_weight": Effect(
        {"training": {"loss": {"prior_weight": 0.5}}}, run=True, context=_PRIOR
    ),
    "datasets.slider": Effect({"datasets": [_PHOTOS, _CLASS]}, run=True, context=_SLIDER),
    "datasets.loss_weight": Effect({"datasets": {"loss_weight": 0.5}}, run=True),
    "datasets.resolution": Effect({"datasets": {"resolution": 96}}, latents=True, run=True),
    "datasets.resolutions": Effect({"datasets": {"resolutions": [64, 96]}}, latents=True, run=True),
    "datasets.flip": Effect({"datasets": {"flip": True}}, latents=True, run=True),
    "datasets.caption_dropout": Effect({"datasets": {"caption_dropout": 0.2}}, run=True),
    "datasets.mask.unmasked_weight": Effect(
        {"datasets": {"mask": {"unmasked_weight": 0.5}}}, run=True, context=_MASKS
    ),
    "datasets.mask.prior_weight": Effect(
        {"datasets": {"mask": {"prior_weight": 0.5}}}, run=True, context=_MASKS
    ),
    "datasets.mask.normalise": Effect({"datasets": {"mask": {"normalise": False}}}, run=True, context=_MASKS),
    "datasets.validation_fraction": Effect({"datasets": {"validation_fraction": 0.5}}, run=True),
    "cache_dir": _nothing({"cache_dir": "@folder@/other_cache"}),
    "output_dir": _nothing({"output_dir": "@folder@/other_output"}),
    "model.base": Effect({"model": {"base": "@other_base@"}}, latents=True, text=True, run=True),
    "model.training_adapter": Effect({"model": {"training_adapter": "@lora_file@"}}, run=True),
    "model.context_lora.path": Effect({"model": {"context_lora": {"path": "@lora_file@"}}}, run=True),
    "model.context_lora.scale": Effect(
        {"model": {"context_lora": {"path": "@lora_file@", "scale": 0.5}}},
        run=True,
        context={"model": {"context_lora": {"path": "@lora_file@"}}},
    ),
    "model.components": Effect({"model": {"components": {"vae": "@other_base@"}}}, latents=True, run=True),
    "buckets.resolution": _latents("buckets", "resolution", 96),
    "buckets.resolutions": _latents("buckets", "resolutions", [64, 96]),
    "buckets.per_image": _latents("buckets", "per_image", "each", resolutions=[64, 96]),
    "buckets.step": _latents("buckets", "step", 16),
    "buckets.max_aspect_ratio": _latents("buckets", "max_aspect_ratio", 1.0),
    "buckets.sizes": _latents("buckets", "sizes", ["64x64"]),
    "buckets.upscale": _latents("buckets", "upscale", "never"),
    "buckets.small_images": _latents("buckets", "small_images", "reject", upscale="never"),
    "buckets.crop": _latents("buckets", "crop", "top"),
    "buckets.crop_seed": _latents("buckets", "crop_seed", 1, crop="random"),
    "buckets.underfilled": Effect({"buckets": {"underfilled": "drop"}}, run=True),
    "buckets.max_crop_loss": _nothing({"buckets": {"max_crop_loss": 0.5}}),
    "latents.dtype": _latents("latents", "dtype", "float32"),
    "latents.compute_dtype": _latents("latents", "compute_dtype", "bfloat16"),
    "latents.posterior": _latents("latents", "posterior", "mean"),
    "latents.flip": _latents("latents", "flip", True),
    "latents.background": _latents("latents", "background", [0, 255, 255]),
    "text.caption_dropout": Effect({"text": {"caption_dropout": 0.2}}, run=True),
    "text.dtype": Effect({"text": {"dtype": "float32"}}, text=True, run=True),
    "text.compute_dtype": Effect({"text": {"compute_dtype": "bfloat16"}}, text=True, run=True),
    "text.offload": _nothing({"text": {"offload": 0}}),
    "training.steps": _run({"steps": 900}, lr_scheduler="cosine"),
    "training.epochs": _nothing({"training": {"steps": None, "epochs": 3}}),
    "training.exhausted": Effect(
        {"training": {"exhausted": "repeat"}}, run=True, context={"datasets": {"weight": 1.0}}
    ),
    "training.batch_size": _run({"batch_size": 3}),
    "training.gradient_accumulation": _run({"gradient_accumulation": 2}),
    "training.learning_rate": _run({"learning_rate": 1e-3}),
    "training.optimizer": _run({"optimizer": "lion"}),
    "training.optimizer_arguments": _run({"optimizer_arguments": {"weight_decay": 0.5}}),
    "training.lr_scheduler": _run({"lr_scheduler": "linear"}),
    "training.lr_cycles": _run({"lr_cycles": 2}, lr_scheduler="cosine_with_restarts"),
    "training.lr_power": _run({"lr_power": 2.0}, lr_scheduler="polynomial"),
    "training.decay_steps": _run({"decay_steps": 9}, lr_scheduler="wsd", decay_steps=8),
    "training.ema_decay": _run({"ema_decay": 0.99}),
    "training.warmup_steps": _run({"warmup_steps": 1}),
    "training.loss.kind": _run({"loss": {"kind": "huber"}}),
    "training.loss.delta": _run({"loss": {"delta": 0.2}}, loss={"kind": "huber"}),
    "training.loss.weighting": _run({"loss": {"weighting": "min_snr"}}),
    "training.loss.gamma": _run({"loss": {"gamma": 4.0}}, loss={"weighting": "min_snr"}),
    "training.noise.offset": _run({"noise": {"offset": 0.1}}),
    "training.noise.input_perturbation": _run({"noise": {"input_perturbation": 0.1}}),
    "training.noise.zero_terminal_snr": _run({"noise": {"zero_terminal_snr": True}}),
    "training.timesteps.density": _run({"timesteps": {"density": "mode"}}),
    "training.timesteps.location": _run(
        {"timesteps": {"location": 0.5}}, timesteps={"density": "logit_normal"}
    ),
    "training.timesteps.scale": _run({"timesteps": {"scale": 0.5}}, timesteps={"density": "logit_normal"}),
    "training.timesteps.mode_scale": _run({"timesteps": {"mode_scale": 0.5}}, timesteps={"density": "mode"}),
    "training.timesteps.min": _run({"timesteps": {"min": 0.1}}),
    "training.timesteps.max": _run({"timesteps": {"max": 0.9}}),
    "training.timesteps.shift": _run({"timesteps": {"shift": 2.0}}),
    "training.guidance": _run({"guidance": 3.5}),
    "training.max_grad_norm": _run({"max_grad_norm": 2.0}),
    "training.seed": _run({"seed": 43}),
    "training.quantize": _run({"quantize": "int8"}),
    "training.compute": _run({"compute": "int8"}),
    "training.gradient_checkpointing": _nothing({"training": {"gradient_checkpointing": True}}),
    "training.offload": _nothing({"training": {"offload": "auto"}}),
    "training.compile": _run({"compile": True}),
    "training.attention_backend": _run({"attention_backend": "_native_math"}),
    "training.checkpoint_every": _nothing({"training": {"checkpoint_every": 9}}),
    "training.keep_checkpoints": _nothing({"training": {"keep_checkpoints": 2}}),
    "training.sample_every": _nothing({"training": {"sample_every": 9}}),
    "training.sample_prompts.prompt": _nothing({"training": {"sample_prompts": ["a rose"]}}),
    **{
        f"training.sample_prompts.{key}": _nothing(
            {"training": {"sample_prompts": [{"prompt": "a rose", **values}]}}
        )
        for key, values in {
            "negative_prompt": {"negative_prompt": "blurry"},
            "height": {"height": 64, "width": 96},
            "width": {"height": 96, "width": 64},
            "steps": {"steps": 3},
            "guidance_scale": {"guidance_scale": 2.0},
            "seed": {"seed": 1},
            "references": {"references": ["before.png"]},
            "lora_scale": {"lora_scale": 0.5},
        }.items()
    },
    "training.validate_every": _nothing({"training": {"validate_every": 9}}),
    "training.trackers": _nothing({"training": {"trackers": []}}),
    "training.tracker_project": _nothing({"training": {"tracker_project": "flowers"}}),
    "training.tracker_arguments": _nothing(
        {"training": {"tracker_arguments": {"tensorboard": {"max_queue": 5}}}}
    ),
    "training.lora.rank": _run({"lora": {"rank": 8}}),
    "training.lora.alpha": _run({"lora": {"alpha": 8.0}}),
    "training.lora.kind": _run({"lora": {"kind": "loha"}}),
    "training.lora.lokr_factor": _run({"lora": {"lokr_factor": 4}}, lora={"kind": "lokr"}),
    "training.lora.oft_block_size": _run({"lora": {"oft_block_size": 4}}, lora={"kind": "oft"}),
    "training.lora.dropout": _run({"lora": {"dropout": 0.1}}),
    "training.lora.rank_dropout": _run({"lora": {"rank_dropout": 0.1}}),
    "training.lora.module_dropout": _run({"lora": {"module_dropout": 0.1}}),
    "training.lora.scale_weight_norms": _run({"lora": {"scale_weight_norms": 1.0}}),
    "training.lora.timestep_ranks.min_rank": _run({"lora": {"timestep_ranks": {"min_rank": 2}}}),
    "training.lora.timestep_ranks.power": _run({"lora": {"timestep_ranks": {"power": 2.0}}}),
    "training.lora.native_file": _run({"lora": {"native_file": True}}, lora={"kind": "loha"}),
    "training.lora.targets": _run({"lora": {"targets": "blocks"}}),
    "training.lora.modules": _run({"lora": {"modules": ["*.attn2.*"]}}),
    "training.lora.conv_rank": _run({"lora": {"conv_rank": 4}}),
    "training.lora.conv_alpha": _run({"lora": {"conv_alpha": 2.0}}, lora={"conv_rank": 4}),
    "training.lora.ranks.modules": _run(
        {"lora": {"ranks": [{"modules": "*.attn2.*", "rank": 4}]}},
        lora={"ranks": [{"modules": "*.attn1.*", "rank": 4}]},
    ),
    "training.lora.ranks.rank": _run(
        {"lora": {"ranks": [{"modules": "*.attn1.*", "rank": 8}]}},
        lora={"ranks": [{"modules": "*.attn1.*", "rank": 4}]},
    ),
    "training.lora.ranks.alpha": _run(
        {"lora": {"ranks": [{"modules": "*.attn1.*", "rank": 4, "alpha": 2.0}]}},
        lora={"ranks": [{"modules": "*.attn1.*", "rank": 4}]},
    ),
    "training.lora.learning_rates.modules": _run(
        {"lora": {"learning_rates": [{"modules": "*.attn2.*", "learning_rate": 1e-5}]}},
        lora={"learning_rates": [{"modules": "*.attn1.*", "learning_rate": 1e-5}]},
    ),
    "training.lora.learning_rates.learning_rate": _run(
        {"lora": {"learning_rates": [{"modules": "*.attn1.*", "learning_rate": 1e-6}]}},
        lora={"learning_rates": [{"modules": "*.attn1.*", "learning_rate": 1e-5}]},
    ),
    "training.lora.loraplus_ratio": _run({"lora": {"loraplus_ratio": 16.0}}),
    "training.lora.dora": _run({"lora": {"dora": True}}),
    "training.lora.rslora": _run({"lora": {"rslora": True}}),
    "training.lora.init": _run({"lora": {"init": "pissa"}}),
    "training.lora.save_dtype": _run({"lora": {"save_dtype": "float16"}}),
    "training.lora.start_from": _run({"lora": {"start_from": "@lora_file@"}}),
    "training.lora.text_encoders.rank": _run(
        {"lora": {"text_encoders": {"rank": 4}}}, lora={"text_encoders": {}}
    ),
    "training.lora.text_encoders.alpha": _run(
        {"lora": {"text_encoders": {"alpha": 4.0}}}, lora={"text_encoders": {}}
    ),
    "training.lora.text_encoders.targets": _run(
        {"lora": {"text_encoders": {"targets": "blocks"}}}, lora={"text_encoders": {}}
    ),
    "training.lora.text_encoders.learning_rate": _run(
        {"lora": {"text_encoders": {"learning_rate": 1e-5}}}, lora={"text_encoders": {}}
    ),
    "accelerate.num_processes": Effect({"accelerate": {"num_processes": 2}}, run=True),
    "accelerate.shard": Effect({"accelerate": {"shard": True}}, context={"accelerate": {"num_processes": 2}}),
    "accelerate.mixed_precision": Effect({"accelerate": {"mixed_precision": "bf16"}}, run=True),
    "accelerate.cpu_threads": _nothing({"accelerate": {"cpu_threads": 3}}),
    "diagnosis.captions": _nothing({"diagnosis": {"captions": True}}),
    "diagnosis.others": _nothing({"diagnosis": {"others": 8}}),
    **{
        f"evaluation.{key}": _nothing({"evaluation": values})
        for key, values in {
            "pictures": {"pictures": 2},
            "steps": {"steps": "last"},
            "strengths": {"strengths": [0.5]},
            "publish": {"publish": "best"},
            "scorers.name": {"scorers": ["siglip"]},
            "scorers.weights": {"scorers": [{"name": "clip", "weights": "openai/clip-vit-base-patch32"}]},
            "scorers.revision": {"scorers": [{"name": "clip", "revision": "main"}]},
            "limits.drift": {"limits": {"drift": 0.5}},
            "limits.copies": {"limits": {"copies": 0.5}},
        }.items()
    },
    **{
        f"evaluation.prompts.{key}": _nothing(
            {"evaluation": {"prompts": [{"prompt": "a rose", "role": "concept", **values}]}}
        )
        for key, values in {
            "prompt": {},
            "role": {"role": "base"},
            "negative_prompt": {"negative_prompt": "blurry"},
            "height": {"height": 64, "width": 96},
            "width": {"height": 96, "width": 64},
            "steps": {"steps": 3},
            "guidance_scale": {"guidance_scale": 2.0},
            "references": {"references": ["before.png"]},
        }.items()
    },
    **{
        f"sweep.{key}": Effect({"sweep": values}, context=_SWEPT)
        for key, values in {
            "grid": {"grid": {"training.seed": [1, 2]}},
            "seeds": {"seeds": 2},
            "judge": {"judge": "validation_loss"},
            "max_variants": {"max_variants": 5},
            "halving.first": {"halving": {"first": 0.5}},
            "halving.keep": {"halving": {"keep": 0.25}},
            "budget.steps": {"budget": {"steps": 5000}},
            "budget.minutes": {"budget": {"minutes": 90.0}},
        }.items()
    },
    **{
        f"sweep.random.{key}": Effect({"sweep": {"random": values}}, context=_DRAWN)
        for key, values in {
            "count": {"count": 3},
            "seed": {"seed": 1},
            "ranges": {"ranges": {"training.learning_rate": [1e-5, 1e-3]}},
            "choices": {"choices": {"training.seed": [1, 2]}},
        }.items()
    },
    "checks.max_rejected_fraction": _nothing({"checks": {"max_rejected_fraction": 0.5}}),
    "checks.allow": _nothing({"checks": {"allow": ["rejected_fraction"]}}),
    "checks.gates": _nothing({"checks": {"gates": ["pictures_sharp"]}}),
    "recache.cron": _nothing({"recache": {"cron": None}}),
    "recache.timezone": _nothing({"recache": {"timezone": "Europe/Berlin"}}),
    "recache.on_change": _nothing({"recache": {"on_change": False}}),
    "recache.settle_s": _nothing({"recache": {"settle_s": 60}}),
    "owners": _nothing({"owners": ["team:art"]}),
    "recache.enabled": _nothing({"recache": {"enabled": True}}),
}
"""Effects by dotted key. `@folder@`, `@other_base@` and `@lora_file@` stand for paths of the test."""

DECIDES_ROWS = {
    *(
        key
        for key in all_keys()
        if re.match(r"datasets\.(captions|filters)\.(?!(shuffle|drop_tags|replace|tagger|examples)$)", key)
    ),
    *(
        f"datasets.{key}"
        for key in ("name", "path", "images", "path_column", "image_column", "focus_columns")
    ),
    *(f"datasets.mask.{key}" for key in ("path", "from", "column", "suffix")),
    *(f"datasets.references.{key}" for key in ("path", "column", "suffix", "resolution")),
    *(f"datasets.{key}" for key in ("exclude", "follow_links", "limit", "duplicates")),
    *(f"checks.{key}" for key in ("max_image_pixels", "max_decode_bytes", "max_file_bytes")),
    "checks.near_duplicate_bits",
    "model.allow_pickle",
    "model.revision",
}
"""Keys that decide which samples, captions and model files there are. Keys and run ids depend on these files
and rows, not on the settings. `references.resolution` decides the size of references, and so their keys, see
tests/pipeline/vae_latents/test_references.py."""


def merged(one: Values, other: Values) -> Values:
    """Return nested values, those of `other` first; a mapping for `datasets` applies to the only dataset."""
    result = dict(one)
    for key, value in other.items():
        before = one.get(key)
        if isinstance(before, list) and isinstance(value, dict):
            result[key] = [merged(before[0], value)]
        else:
            result[key] = (
                merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
            )
    return result
