"""Names that other trainers use for the settings of a recipe, for messages and docs/coming_from.md.

The names are those of sd-scripts' arguments and dataset files, SimpleTuner's config.json and data backends,
ai-toolkit's job files, OneTrainer's presets and diffusion-pipe's TOML files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_DETECTED = "the model family is detected from model_index.json"
_CACHED = "latents and text embeddings are always cached in cache_dir"
_BUCKETS = "images are always sorted into buckets by aspect ratio"
_NAME = "files are named after the recipe"
_DEVICE = "each process uses one of the GPUs that torch sees; choose them with CUDA_VISIBLE_DEVICES"
_STEPS = "counted in steps"
_BASE = "a Hub id or a diffusers folder; `latentline convert-checkpoint` converts a single file"


@dataclass(frozen=True)
class Term:
    """A setting of another trainer.

    Attributes:
        trainer: Name of the trainer.
        theirs: Name of the setting there.
        ours: Full name of the recipe key, as in `schema.all_keys`; None if Latentline lacks one.
        note: Differences between the two, or why there is no key; may be empty if there is one.
    """

    trainer: str
    theirs: str
    ours: str | None
    note: str = ""

    @property
    def shown(self) -> str | None:
        """The recipe key as messages show it, such as `datasets[].path`."""
        return None if self.ours is None else self.ours.replace("datasets.", "datasets[].")

    @property
    def fix(self) -> str:
        """The fix for a recipe that uses the setting's name as a key."""
        if self.ours is None:
            return f"remove it; {self.note}"
        note = f" ({self.note})" if self.note else ""
        return f"write {self.shown}, the equivalent of {self.theirs} in {self.trainer}{note}"


def _terms(trainer: str, *rows: tuple[str, str | None] | tuple[str, str | None, str]) -> tuple[Term, ...]:
    return tuple(Term(trainer, row[0], row[1], row[2] if len(row) == 3 else "") for row in rows)


SD_SCRIPTS = _terms(
    "sd-scripts",
    ("pretrained_model_name_or_path", "model.base", _BASE),
    ("vae", "model.components", "{vae: a folder or a Hub id}"),
    ("train_data_dir", "datasets.path", "the folder itself; each of its subfolders is a dataset"),
    ("image_dir", "datasets.path"),
    ("num_repeats", "datasets.repeats"),
    ("class_tokens", "datasets.captions.text", "with from: fixed"),
    ("caption_extension", "datasets.captions.suffix", "with from: sidecar"),
    ("shuffle_caption", "datasets.captions.shuffle", "{variants: 4}; every variant is cached"),
    ("keep_tokens", "datasets.captions.shuffle.keep"),
    ("caption_separator", "datasets.captions.shuffle.separator"),
    ("caption_prefix", "datasets.captions.prefix"),
    ("caption_suffix", "datasets.captions.postfix"),
    ("enable_wildcard", "datasets.captions.lines", "with the value each"),
    ("caption_dropout_rate", "text.caption_dropout"),
    ("flip_aug", "latents.flip"),
    ("random_crop", "buckets.crop", "with the value random"),
    ("enable_bucket", None, _BUCKETS),
    ("bucket_reso_steps", "buckets.step"),
    ("bucket_no_upscale", "buckets.upscale", "with the value never"),
    (
        "min_bucket_reso",
        "buckets.max_aspect_ratio",
        "buckets are limited by aspect ratio instead of by edge length",
    ),
    (
        "max_bucket_reso",
        "buckets.max_aspect_ratio",
        "buckets are limited by aspect ratio instead of by edge length",
    ),
    ("cache_latents", None, _CACHED),
    ("cache_latents_to_disk", None, _CACHED),
    ("cache_text_encoder_outputs", None, _CACHED),
    ("cache_text_encoder_outputs_to_disk", None, _CACHED),
    ("output_name", None, _NAME),
    ("max_train_steps", "training.steps"),
    ("max_train_epochs", "training.epochs"),
    ("train_batch_size", "training.batch_size"),
    ("gradient_accumulation_steps", "training.gradient_accumulation"),
    ("unet_lr", "training.learning_rate"),
    ("text_encoder_lr", "training.lora.text_encoders.learning_rate"),
    ("optimizer_type", "training.optimizer"),
    ("optimizer_args", "training.optimizer_arguments", "as keys and values"),
    ("lr_warmup_steps", "training.warmup_steps"),
    ("lr_scheduler_num_cycles", "training.lr_cycles"),
    ("lr_scheduler_power", "training.lr_power"),
    ("network_dim", "training.lora.rank"),
    ("network_alpha", "training.lora.alpha"),
    ("network_dropout", "training.lora.dropout"),
    ("network_weights", "training.lora.start_from"),
    ("network_module", "training.lora.kind"),
    ("conv_dim", "training.lora.conv_rank"),
    ("min_snr_gamma", "training.loss.gamma", "with weighting: min_snr"),
    ("loss_type", "training.loss.kind"),
    ("huber_c", "training.loss.delta"),
    ("noise_offset", "training.noise.offset"),
    ("ip_noise_gamma", "training.noise.input_perturbation"),
    ("discrete_flow_shift", "training.timesteps.shift"),
    ("timestep_sampling", "training.timesteps.density"),
    ("fp8_base", "training.quantize", "with the value fp8_torchao"),
    ("save_every_n_steps", "training.checkpoint_every"),
    ("save_every_n_epochs", "training.checkpoint_every", _STEPS),
    ("sample_every_n_steps", "training.sample_every"),
    ("sample_every_n_epochs", "training.sample_every", _STEPS),
    ("log_with", "training.trackers"),
)

SIMPLETUNER = _terms(
    "SimpleTuner",
    ("model_family", None, _DETECTED),
    ("model_type", None, "Latentline always trains a LoRA"),
    ("instance_data_dir", "datasets.path"),
    ("metadata_backend", None, "the tables in output_dir hold the metadata of each image"),
    (
        "caption_strategy",
        "datasets.captions.from",
        "textfile is called sidecar, instanceprompt is called fixed",
    ),
    ("instance_prompt", "datasets.captions.text", "with from: fixed"),
    ("cache_dir_vae", "cache_dir", "one cache for everything; entries are never stale"),
    ("cache_dir_text", "cache_dir", "one cache for everything; entries are never stale"),
    ("crop_style", "buckets.crop", "one of centre, top, random and focus"),
    ("minimum_image_size", "datasets.filters.min_width", "also set min_height"),
    ("num_train_epochs", "training.epochs"),
    ("base_model_precision", "training.quantize"),
    ("lora_rank", "training.lora.rank"),
    ("lora_alpha", "training.lora.alpha"),
    ("lora_dropout", "training.lora.dropout"),
    ("init_lora", "training.lora.start_from"),
    ("caption_dropout_probability", "text.caption_dropout"),
    ("snr_gamma", "training.loss.gamma", "with weighting: min_snr"),
    ("flow_schedule_shift", "training.timesteps.shift"),
    ("checkpointing_steps", "training.checkpoint_every"),
    ("checkpoint_step_interval", "training.checkpoint_every"),
    ("checkpoints_total_limit", "training.keep_checkpoints"),
    ("validation_prompt", "training.sample_prompts", "a list"),
    ("validation_steps", "training.sample_every"),
    ("validation_step_interval", "training.sample_every"),
    ("resume_from_checkpoint", None, "a run always resumes from its newest valid checkpoint"),
    ("report_to", "training.trackers"),
    ("use_ema", "training.ema_decay", "such as 0.999"),
)

AI_TOOLKIT = _terms(
    "ai-toolkit",
    ("name_or_path", "model.base"),
    ("is_flux", None, _DETECTED),
    ("arch", None, _DETECTED),
    ("folder_path", "datasets.path"),
    ("caption_ext", "datasets.captions.suffix", "with a dot: .txt"),
    ("trigger_word", "datasets.captions.trigger"),
    ("shuffle_tokens", "datasets.captions.shuffle", "{variants: 4}; every variant is cached"),
    ("flip_x", "latents.flip"),
    ("training_folder", "output_dir"),
    ("device", None, _DEVICE),
    ("network", "training.lora"),
    ("linear", "training.lora.rank"),
    ("linear_alpha", "training.lora.alpha"),
    ("conv", "training.lora.conv_rank"),
    ("lr", "training.learning_rate"),
    ("optimizer_params", "training.optimizer_arguments"),
    ("timestep_type", "training.timesteps.density"),
    ("ema_config", "training.ema_decay", "such as 0.999"),
    ("save_every", "training.checkpoint_every"),
    ("max_step_saves_to_keep", "training.keep_checkpoints"),
    ("prompts", "training.sample_prompts"),
)

ONETRAINER = _terms(
    "OneTrainer",
    ("base_model_name", "model.base", _BASE),
    ("concepts", "datasets"),
    ("workspace_dir", "output_dir"),
    ("output_model_destination", "output_dir"),
    ("aspect_ratio_bucketing", None, _BUCKETS),
    ("latent_caching", None, _CACHED),
    ("learning_rate_scheduler", "training.lr_scheduler"),
    ("learning_rate_warmup_steps", "training.warmup_steps"),
    ("train_dtype", "accelerate.mixed_precision"),
    ("offset_noise_weight", "training.noise.offset"),
    ("timestep_distribution", "training.timesteps.density"),
    ("backup_after", "training.checkpoint_every", _STEPS),
)

DIFFUSION_PIPE = _terms(
    "diffusion-pipe",
    ("directory", "datasets"),
    ("enable_ar_bucket", None, _BUCKETS),
    ("ar_buckets", "buckets.sizes", "each as HEIGHTxWIDTH; `latentline fit-buckets` can find them"),
    ("num_ar_buckets", "buckets.step", "or `latentline fit-buckets` with the number of sizes"),
    ("min_ar", "buckets.max_aspect_ratio"),
    ("max_ar", "buckets.max_aspect_ratio"),
    ("shuffle_tags", "datasets.captions.shuffle", "{variants: 4}; every variant is cached"),
    ("micro_batch_size_per_gpu", "training.batch_size"),
    ("gradient_clipping", "training.max_grad_norm"),
    ("activation_checkpointing", "training.gradient_checkpointing"),
    ("adapter", "training.lora"),
    ("init_from_existing", "training.lora.start_from"),
    ("eval_every_n_steps", "training.validate_every"),
    ("checkpoint_every_n_minutes", "training.checkpoint_every", _STEPS),
)

ALL: Mapping[str, tuple[Term, ...]] = MappingProxyType(
    {terms[0].trainer: terms for terms in (SD_SCRIPTS, SIMPLETUNER, AI_TOOLKIT, ONETRAINER, DIFFUSION_PIPE)}
)
"""All settings by trainer."""

_BY_NAME: dict[str, Term] = {}
for _term in (each for terms in ALL.values() for each in terms):
    _BY_NAME.setdefault(_term.theirs, _term)


def term_of(name: str) -> Term | None:
    """Return the setting that another trainer calls `name`, or None."""
    return _BY_NAME.get(name)
