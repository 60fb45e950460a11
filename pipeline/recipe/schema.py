"""The recipe as strict, frozen pydantic models, one per section of the YAML file.

Editors (through configs/recipe.schema.json) and docs/recipes.md show the field descriptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from pipeline.recipe import dataset_rules
from pipeline.recipe.buckets import BucketSettings
from pipeline.recipe.captions import CaptionSettings
from pipeline.recipe.check_specs import GATES, WARNINGS
from pipeline.recipe.cron import check_cron
from pipeline.recipe.datasets import DatasetSettings
from pipeline.recipe.diagnosis import DiagnosisSettings
from pipeline.recipe.evaluation import EvaluationSettings
from pipeline.recipe.keys import all_keys_of
from pipeline.recipe.preview_prompts import PreviewPrompt
from pipeline.recipe.settings import MAX_COUNT, Settings, Violation
from pipeline.recipe.sweep import SweepSettings, sweep_violations
from pipeline.recipe.training import NumResidentBlocks, TrainingSettings, shard_violations
from pipeline.recipe.validators import (
    FolderAddress,
    OutputFolder,
    RecipeAddress,
    check_base,
    check_gate,
    check_owner,
    check_path,
    check_timezone,
    check_warning,
)
from pipeline.storage.addresses import Address, Url

Dtype = Literal["float16", "bfloat16", "float32"]
ComputeDtype = Literal["auto", "float16", "bfloat16", "float32"]
ColourLevel = Annotated[int, Field(ge=0, le=255, description="From 0 (dark) to 255 (full).")]
Owner = Annotated[str, AfterValidator(check_owner)]
Gate = Annotated[str, AfterValidator(check_gate), Field(json_schema_extra={"enum": list(GATES)})]
WarningCheck = Annotated[
    str, AfterValidator(check_warning), Field(json_schema_extra={"enum": list(WARNINGS)})
]

# The name becomes part of asset, job and file names.
NAME_PATTERN = r"^[A-Za-z0-9_]+$"
"""Pattern of a recipe's name."""

# With a folder raw_images in the project, source_datasets/raw_images would be the key of two assets, and no
# recipe of the project could be loaded.
RESERVED_NAMES = ("source_datasets", "source_models")
"""First parts of the keys of source assets (assets/sources.py), which cannot be names of recipes."""


PLACEHOLDER_FIX = "write one of these trigger words in the prompt instead"


def valid_name(text: str) -> str:
    """Return a valid name of a recipe that resembles `text`."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_") or "flowers"
    return f"my_{name}" if name in RESERVED_NAMES else name


def name_mistake(name: str) -> str | None:
    """Return why no recipe can have this name; None for a valid one."""
    if not re.fullmatch(NAME_PATTERN, name):
        return f"the name of a recipe must contain only letters, digits and _, got {name!r}"
    if name in RESERVED_NAMES:
        return f"the name of a recipe must not be {' or '.join(RESERVED_NAMES)}, got {name!r}"
    return None


class ComponentSources(Settings):
    """Sources of base model components by component name; names are checked when the model is read."""

    model_config = ConfigDict(extra="allow")

    # Pydantic reads the type of extra keys from this annotation.
    __pydantic_extra__: dict[str, Annotated[str, Field(min_length=1)]] = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - documented by pydantic
        init=False
    )

    def given(self) -> dict[str, str]:
        """Return the source of each component that the recipe names."""
        return dict(self.__pydantic_extra__)


class ContextLoraSettings(Settings):
    """A frozen LoRA that is part of the base model."""

    path: Annotated[Path, BeforeValidator(check_path)] = Field(
        description="LoRA file of the denoiser alone, in a layout that diffusers can load. Relative to the "
        "project root."
    )
    scale: float = Field(
        default=1.0, gt=0.0, description="Factor of its effect, as the strength in other programs."
    )


class ModelSettings(Settings):
    """Base model that the LoRA is trained for."""

    base: Annotated[str, AfterValidator(check_base)] = Field(
        min_length=1,
        description="Hub id (owner/name), or a local diffusers folder relative to the project root. The "
        "model family is detected from it. `latentline convert-checkpoint` converts a single .safetensors "
        "file into such a folder.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="Branch, tag or commit of the Hub id; null means the main branch. Not allowed for a "
        "local folder.",
    )
    components: ComponentSources = Field(
        default_factory=ComponentSources,
        description="Components of the base model to load from another source, by their name in the model, "
        "such as vae or text_encoder_4. A source is a Hub id (owner/name or owner/name@revision) or a local "
        "folder. It holds either the component itself or a model with a component of that name.",
        examples=[{"vae": "madebyollin/sdxl-vae-fp16-fix"}],
    )
    training_adapter: str | None = Field(
        default=None,
        min_length=1,
        description="For distilled base models: a LoRA that is active in training steps and in nothing else, "
        "so that the trained LoRA keeps the distillation. A .safetensors file relative to the project root, "
        "or a Hub id, followed by the file's name if the repository has several.",
        examples=["ostris/zimage_turbo_training_adapter/zimage_turbo_training_adapter_v2.safetensors"],
    )
    context_lora: ContextLoraSettings | None = Field(
        default=None,
        description="A frozen LoRA that stays active next to the trained one: in training, validation, "
        "previews, `latentline sample` and evaluations. So a character can be trained to fit a style. "
        "Exported files do not contain it; load both. Excludes `training.lora.dora` and `kind: oft`, whose "
        "effect depends on the weights below them.",
    )
    allow_pickle: bool = Field(
        default=False,
        description="Also accept weights that are pickles (`*.bin`). Only tensors are read from them "
        "(`weights_only`), but a flaw in that filter could run code of the file's author. "
        "`LATENTLINE_UNTRUSTED=1` refuses them whatever this key is.",
    )


class LatentSettings(Settings):
    """How images are encoded into latents. Every key here is part of a latent's cache key."""

    dtype: Dtype = Field(default="float16", description="Dtype of stored latents.")
    compute_dtype: ComputeDtype = Field(
        default="auto",
        description="Dtype in which the VAE runs. auto: float32, which never overflows, or float16 if the "
        "VAE's configuration declares it safe (`force_upcast: false`). It depends on the VAE alone and never "
        "on the machine. On an NVIDIA GPU, float32 uses TF32 for matrix products and convolutions.",
    )
    posterior: Literal["sample", "mean", "moments"] = Field(
        default="sample",
        description="sample: one draw from the VAE's posterior, the same in every run. mean: the "
        "posterior's mean. moments: mean and standard deviation, from which training draws a new sample "
        "every epoch; this doubles the size of an entry.",
    )
    flip: bool = Field(
        default=False,
        description="Also cache each image mirrored left to right; training picks one of the two every "
        "epoch. Do not use it for text or other images where left and right matter.",
    )
    background: tuple[ColourLevel, ColourLevel, ColourLevel] = Field(
        default=(255, 255, 255), description="Red, green and blue behind transparent pixels."
    )


class TextSettings(Settings):
    """How captions are encoded into text embeddings."""

    caption_dropout: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="Fraction of training samples that get the empty caption instead of their own.",
    )
    dtype: Dtype = Field(default="float16", description="Dtype of stored text embeddings.")
    compute_dtype: ComputeDtype = Field(
        default="auto",
        description="Dtype in which the text encoders run. auto: bfloat16 for language models and T5, and "
        "float32 for CLIP. It depends on the encoders alone and never on the machine.",
    )
    offload: NumResidentBlocks = Field(
        default="auto",
        description="Number of each text encoder's layers that stay on the GPU while captions are encoded. "
        "Other layers are on the host and copied to the GPU for every four captions, which takes time and "
        "gives the same values. auto keeps as many as fit, and all of them on a CPU; none keeps all. It is "
        "not part of any key.",
    )


class AccelerateSettings(Settings):
    """Arguments of `accelerate launch`."""

    num_processes: int = Field(default=1, ge=1, le=MAX_COUNT, description="Number of processes, one per GPU.")
    shard: bool = Field(
        default=False,
        description="Divide the frozen base weights among the GPUs in training, for base models that one GPU "
        "cannot hold. Each block is gathered for its use, which takes time; the LoRA is the same. Requires "
        "`num_processes` of at least 2, and excludes `offload`, `quantize`, `compute`, `compile`, "
        "`lora.dora`, `lora.text_encoders` and `lora.init` from base weights.",
    )
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = Field(
        default="auto",
        description="Dtype of the frozen base weights and of the forward and backward passes; no means "
        "float32. auto: bf16 for transformers, which are published in it, and no for UNets. It depends on "
        "the base model alone and never on the machine. LoRA weights always stay in float32.",
    )
    cpu_threads: int = Field(
        default=2,
        ge=1,
        le=1024,
        description="CPU threads per process. Image decoding always uses all cores. Without a GPU, the "
        "number of cores is fastest. The default does not depend on the machine, because the number of "
        "threads changes the last bits of CPU results. It is not part of any cache key.",
    )


class CheckSettings(Settings):
    """Thresholds of the checks, and gates that are allowed to fail."""

    max_rejected_fraction: float = Field(
        default=0.05,
        ge=0.0,
        le=1.0,
        description="Largest fraction of samples rejected for a defect; the gate rejected_fraction closes "
        "above it. Samples that filters, limit or duplicates exclude do not count.",
    )
    max_image_pixels: int = Field(
        default=178_956_970,
        ge=1,
        le=MAX_COUNT,
        description="Largest number of pixels (height times width in the image header). A larger image is "
        "rejected as `too_large` before it is decoded, which protects against decompression bombs.",
    )
    max_decode_bytes: int = Field(
        default=1_000_000_000,
        ge=1,
        le=10**15,
        description="Largest memory in bytes that decoding one image may need, estimated from its header. An "
        "upright RGB image needs 4 bytes per pixel; one that is rotated, transparent or not 8-bit RGB needs "
        "5 to 8, a progressive JPEG 10, a TIFF 12, WebP and AVIF 16, and JPEG 2000 20. An image that needs "
        "more is rejected as `too_much_memory`. All images that a process decodes at a time share 1 GB.",
    )
    max_file_bytes: int = Field(
        default=1_000_000_000,
        ge=1,
        le=10**15,
        description="Largest size in bytes of a file of a dataset: an image, a caption file or a manifest. A "
        "larger image is rejected as `file_too_large` without reading it.",
    )
    near_duplicate_bits: int = Field(
        default=4,
        ge=0,
        le=16,
        description="Largest difference of two 64-bit perceptual hashes, in bits, for images to count as "
        "near duplicates. A warning lists them, and the holdout never separates them.",
    )
    allow: tuple[Gate, ...] = Field(
        default=(),
        description="Gates that may fail, by name of the check; the name applies to all assets. A failure is "
        "then a warning and does not stop the job. The completeness, shape, size and value checks of "
        "vae_latents and text_embeddings cannot be allowed.",
    )
    gates: tuple[WarningCheck, ...] = Field(
        default=(),
        description="Warnings that stop the job, by name of the check; the name applies to all assets.",
        examples=[["pictures_sharp", "captions_repeated"]],
    )


class RecacheSettings(Settings):
    """When the cache job starts automatically."""

    cron: Annotated[str, AfterValidator(check_cron)] | None = Field(
        default="H 3 * * *",
        description="Cron schedule of five fields, or null for no schedule. The minute H is a number that "
        "depends on the name of the recipe, so that not all recipes start at once.",
    )
    timezone: Annotated[str, AfterValidator(check_timezone)] = Field(
        default="UTC",
        description="Time zone of `cron`, such as Europe/Berlin. A time that the clock skips in spring runs "
        "at the next one.",
    )
    on_change: bool = Field(
        default=True, description="Start the cache job when images or captions have changed."
    )
    settle_s: int = Field(
        default=30,
        ge=5,
        description="Seconds between two scans of the dataset by the sensor. A change counts as complete, "
        "and starts the job, when two scans in a row find the same files. Increase it for slow copies and "
        "for large datasets.",
    )
    enabled: bool = Field(default=False, description="Switch for both the schedule and the sensor.")


class RecipeFile(Settings):
    """A Latentline recipe: from images and captions to a trained LoRA."""

    datasets: tuple[DatasetSettings, ...] = Field(
        min_length=1, description="Folders or manifests of images with captions. They are never modified."
    )
    cache_dir: FolderAddress = Field(
        default=Path(".cache/latentline"),
        description="Folder of the cache for latents and text embeddings; several recipes can share one. "
        "Relative to the project root, or a writable fsspec address such as s3://bucket/cache, gs:// or "
        "sftp:// (packages and credentials as for datasets[].path). With a remote cache, training downloads "
        "an entry every time it is used.",
    )
    output_dir: OutputFolder = Field(
        description="Folder of this recipe's tables, reports, runs and LoRA. Relative to the project root, "
        "or a writable fsspec address such as s3://bucket/flowers (packages and credentials as for "
        "datasets[].path). Jobs then work on a local copy, and several machines may share the folder."
    )
    model: ModelSettings = Field(description="Base model that the LoRA is trained for.")
    buckets: BucketSettings = Field(
        default_factory=BucketSettings, description="Sizes that images are scaled and cropped to."
    )
    latents: LatentSettings = Field(
        default_factory=LatentSettings, description="How images are encoded into latents."
    )
    text: TextSettings = Field(
        default_factory=TextSettings, description="How captions are encoded into text embeddings."
    )
    training: TrainingSettings = Field(
        default_factory=TrainingSettings, description="How the LoRA is trained."
    )
    accelerate: AccelerateSettings = Field(
        default_factory=AccelerateSettings, description="Arguments of `accelerate launch`."
    )
    diagnosis: DiagnosisSettings | None = Field(
        default=None,
        description="What is measured on the dataset with the base model before training. A recipe with this "
        "section has an asset `diagnosis` between the caches and `trained_lora`. It does not change the "
        "training.",
    )
    evaluation: EvaluationSettings | None = Field(
        default=None,
        description="Pictures that are drawn with each step of a run, and how they are scored. A recipe with "
        "this section has an asset `evaluation` after `trained_lora`. It does not change the training.",
    )
    sweep: SweepSettings | None = Field(
        default=None,
        description="Variants of the recipe with other settings, of which the best one is found. A recipe "
        "with this section has an asset `sweep` after `trained_lora`. It does not change the training.",
    )
    checks: CheckSettings = Field(
        default_factory=CheckSettings,
        description="Thresholds of the checks, and gates that are allowed to fail.",
    )
    recache: RecacheSettings = Field(
        default_factory=RecacheSettings, description="When the cache job starts automatically."
    )
    owners: tuple[Owner, ...] = Field(
        default=(),
        description="People and teams that are responsible for the recipe: email addresses, and team names "
        "after `team:`. Dagster's UI shows them and filters by them. They are not written into LoRA files.",
        examples=[["team:art", "ada@example.com"]],
    )

    def buckets_of(self, dataset: DatasetSettings) -> BucketSettings:
        """Return the section `buckets`, with the dataset's own resolutions in place of its sizes."""
        return self.buckets.with_resolutions(dataset.resolution, dataset.resolutions)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Resolutions of all datasets, in ascending order."""
        return tuple(sorted({each for dataset in self.datasets for each in self.buckets_of(dataset).budgets}))

    @property
    def mirrored_datasets(self) -> list[str]:
        """Names of the datasets whose images are also cached mirrored."""
        common = self.latents.flip
        return [each.name for each in self.datasets if (common if each.flip is None else each.flip)]

    @property
    def caption_dropouts(self) -> dict[str, float]:
        """Fraction of training samples with the empty caption, by dataset."""
        common = self.text.caption_dropout
        own = {each.name: each.caption_dropout for each in self.datasets}
        return {name: common if dropout is None else dropout for name, dropout in own.items()}

    @property
    def has_model_captions(self) -> bool:
        """Whether a model captions images of a dataset."""
        return any(each.captions.from_ == "model" for each in self.datasets)

    @property
    def optional_assets(self) -> tuple[str, ...]:
        """Assets that the recipe has in addition to those of every recipe."""
        present = {
            "captions": self.has_model_captions,
            "diagnosis": self.diagnosis is not None and self.diagnosis.captions,
            "evaluation": self.evaluation is not None,
            "sweep": self.sweep is not None,
        }
        return tuple(name for name, is_present in present.items() if is_present)

    @property
    def trained_triggers(self) -> tuple[CaptionSettings, ...]:
        """Caption settings with a trigger word, of datasets of what the LoRA learns."""
        trained = (each.captions for each in self.datasets if each.role == "train")
        return tuple(captions for captions in trained if captions.trigger is not None)

    @property
    def preview_prompts(self) -> tuple[PreviewPrompt, ...]:
        """`training.sample_prompts` with the trigger word in place of each `captions.placeholder`."""
        return tuple(
            prompt.model_copy(
                update={
                    "prompt": self.with_triggers(prompt.prompt),
                    "negative_prompt": prompt.negative_prompt and self.with_triggers(prompt.negative_prompt),
                }
            )
            for prompt in self.training.sample_prompts
        )

    @property
    def preview_captions(self) -> list[str]:
        """Prompts and negative prompts of the previews, which need text embeddings, without duplicates."""
        texts = [text for each in self.preview_prompts for text in (each.prompt, each.negative_prompt)]
        return list(dict.fromkeys(text for text in texts if text is not None))

    def placeholder_mistake(self, prompt: str) -> str:
        """Return what is wrong with a placeholder that stands for several trigger words, otherwise ""."""
        triggers: dict[str, set[str]] = {}
        for captions in self.trained_triggers:
            if captions.placeholder is not None and captions.placeholder in prompt:
                triggers.setdefault(captions.placeholder, set()).add(captions.trigger or "")
        for placeholder, words in triggers.items():
            if len(words) > 1:
                return f"the placeholder {placeholder} in a prompt stands for {' and '.join(sorted(words))}"
        return ""

    def with_triggers(self, prompt: str) -> str:
        """Return a prompt with the trigger word in place of the placeholders, as in captions."""
        for captions in dict.fromkeys(self.trained_triggers):
            prompt = captions.with_trigger(prompt)
        return prompt

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        datasets = self.datasets
        yield from dataset_rules.name_violations(datasets)
        yield from dataset_rules.weight_violations(datasets, self.training)
        yield from dataset_rules.resolution_violations(datasets, self.buckets)
        yield from dataset_rules.focus_violations(datasets, self.buckets)
        yield from dataset_rules.prior_violations(datasets, self.training)
        yield from dataset_rules.slider_violations(datasets, self.training)
        yield from dataset_rules.slider_differences(
            datasets,
            [
                {
                    "resolution": self.buckets_of(each).budgets,
                    "flip": each.name in self.mirrored_datasets,
                    "caption_dropout": self.caption_dropouts[each.name],
                }
                for each in datasets
            ],
        )
        if self.model.context_lora is not None:
            yield from self._context_violations()
        if self.accelerate.shard:
            yield from shard_violations(self.accelerate.num_processes, self.training)
            if self.diagnosis is not None and self.diagnosis.captions:
                what = "shard: true cannot be combined with diagnosis.captions, whose processes measure alone"
                fix = "remove accelerate.shard, or the section diagnosis"
                yield Violation("accelerate.shard", what, fix, ("accelerate", "diagnosis"))
        if self.sweep is not None:
            yield from sweep_violations(self.sweep, [each.name for each in datasets], RecipeFile)
            yield from self._unmeasured_sweep()

    def _context_violations(self) -> Iterator[Violation]:
        # Programs that load both files apply them one after the other, and the result depends on the order.
        lora = self.training.lora
        for setting, value in (("lora.dora: true", lora.dora), ("lora.kind: oft", lora.kind == "oft")):
            if value:
                what = f"model.context_lora cannot be combined with training.{setting}"
                fix = "remove model.context_lora, or train a plain LoRA"
                yield Violation("model.context_lora", what, fix, involves=("model", "training"))

    def _unmeasured_sweep(self) -> Iterator[Violation]:
        if self.sweep is None:
            return
        involves = ("sweep", "datasets", "training")
        if self.sweep.judge == "validation_loss" and self.training.validate_every == 0:
            what = "judge: validation_loss requires training.validate_every above 0, got 0"
            yield Violation("sweep.judge", what, "set training.validate_every", involves)
        if isinstance(self.output_dir, Url):
            # A part of a run would have to be fetched before it is known what is left to train.
            what = f"sweep requires a local output_dir, got {self.output_dir}"
            fix = "set output_dir to a folder; it may be on a disk that several machines mount"
            yield Violation("sweep", what, fix, ("sweep", "output_dir"))
        if not any(each.validation_fraction for each in self.datasets):
            what = "sweep requires held-out images, but no dataset has a validation_fraction"
            yield Violation("sweep", what, "set datasets[].validation_fraction, such as 0.1", involves)


class Recipe(RecipeFile):
    """A loaded recipe: the file's values plus its name and path, with absolute paths.

    Paths are joined to the project root; symbolic links and `..` are not resolved.
    `Recipe.model_validate_json(recipe.model_dump_json())` returns an equal recipe.
    """

    name: str = Field(pattern=NAME_PATTERN, description="Stem of the file name.")
    source: Path = Field(description="Path of the YAML file.")
    output_address: FolderAddress = Field(
        # Recipes that older versions stored in the folders of runs lack this key.
        default_factory=lambda values: values["output_dir"],
        description="The file's output_dir. If it is an address, output_dir is the path of the working copy.",
    )
    packed_paths: tuple[tuple[str, RecipeAddress], ...] = Field(
        default=(),
        description="Name and the file's path of each dataset with images in shards. Its path in `datasets` "
        "is the folder or manifest to which raw_images unpacks them.",
    )

    @property
    def packed(self) -> dict[str, Address]:
        """Paths of the datasets with images in shards, as the file names them, by the dataset's name."""
        return dict(self.packed_paths)

    def written_path(self, dataset: DatasetSettings) -> Address:
        """Return the path of a dataset as the recipe's file names it, for messages."""
        return self.packed.get(dataset.name, dataset.path)

    @property
    def registered_output(self) -> Address:
        """Address of the outputs, or their folder if they are local."""
        return self.output_address if isinstance(self.output_address, Url) else self.output_dir

    @property
    def publishes_best(self) -> bool:
        """Whether a job publishes the step that its evaluation chooses, and not the last one."""
        return self.evaluation is not None and self.evaluation.publish == "best"


def all_keys() -> Iterator[str]:
    """Yield the dotted name of every key of a recipe, each section before its own keys."""
    return all_keys_of(RecipeFile)
