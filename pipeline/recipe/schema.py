"""What a recipe may say: strict, frozen models, one for each section of the YAML file.

A value is never converted into another type: `"False"` is no boolean and `1.0` no count. The descriptions are
what editors show (configs/recipe.schema.json is made from them) and what the reference page is made of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from pipeline.recipe.buckets import BucketSettings
from pipeline.recipe.cron import check_cron
from pipeline.recipe.datasets import DatasetSettings, FolderAddress, FolderPath
from pipeline.recipe.gates import GATES
from pipeline.recipe.rules import (
    broken_focus,
    broken_weights,
    check_gate,
    raise_broken,
    repeated_names,
)
from pipeline.recipe.section import MAX_COUNT, Settings
from pipeline.recipe.training import TrainingSettings

Dtype = Literal["float16", "bfloat16", "float32"]
ColourLevel = Annotated[int, Field(ge=0, le=255, description="0 is dark, 255 is full.")]
Gate = Annotated[str, AfterValidator(check_gate), Field(json_schema_extra={"enum": list(GATES)})]

NAME_PATTERN = r"^[A-Za-z0-9_]+$"
"""Of a recipe: it becomes part of asset, job and file names."""


class ComponentSources(Settings):
    """Any component of the base model, by name; which ones it has is looked at when it is read."""

    model_config = ConfigDict(extra="allow")

    # So pydantic is told of what type unknown keys are.
    __pydantic_extra__: dict[str, Annotated[str, Field(min_length=1)]] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        init=False
    )

    def given(self) -> dict[str, str]:
        """Component to its source, as the recipe has them."""
        return dict(self.__pydantic_extra__)


class ModelSettings(Settings):
    """The base model that the LoRA is trained for."""

    base: str = Field(
        min_length=1,
        description="A Hub id (owner/name) or a local diffusers folder, relative to the project root. "
        "The model family is read from it. A model in one .safetensors file becomes such a folder by "
        "`latentline convert-checkpoint`.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="Branch, tag or commit of a Hub id, and of nothing else; null: its main branch.",
    )
    components: ComponentSources = Field(
        default_factory=ComponentSources,
        description="Parts of the base model that are taken from elsewhere, by their name in it, such as vae "
        "or text_encoder_4: a Hub id (owner/name, or owner/name@revision) or a local folder, which is that "
        "part itself or a model that has one of that name.",
        examples=[{"vae": "madebyollin/sdxl-vae-fp16-fix"}],
    )


class LatentSettings(Settings):
    """How images become latents; each of these is part of a latent's key."""

    dtype: Dtype = Field(default="float16", description="Number format on disk.")
    compute_dtype: Dtype = Field(
        default="float32", description="Number format the VAE computes in; float32 never overflows."
    )
    posterior: Literal["sample", "mean", "moments"] = Field(
        default="sample",
        description="sample: one draw from the VAE's posterior, the same each time. mean: its mean. moments: "
        "its mean and standard deviation, from which training draws anew each epoch; twice the bytes.",
    )
    flip: bool = Field(
        default=False,
        description="Cache each image mirrored left to right as well; training draws one of the two each "
        "epoch. Not for pictures of text or of anything else with a left and a right.",
    )
    background: tuple[ColourLevel, ColourLevel, ColourLevel] = Field(
        default=(255, 255, 255), description="Red, green, blue behind transparent pixels."
    )


class TextSettings(Settings):
    """How captions become text embeddings."""

    caption_dropout: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="Share of training samples that see the empty caption instead.",
    )
    dtype: Dtype = Field(default="float16", description="Number format on disk.")
    compute_dtype: Dtype = Field(default="float32", description="Number format the encoders compute in.")


class AccelerateSettings(Settings):
    """What `accelerate launch` is given."""

    num_processes: int = Field(default=1, ge=1, le=MAX_COUNT, description="Processes, one a GPU.")
    mixed_precision: Literal["no", "fp16", "bf16"] = Field(
        default="no", description="Number format of forward and backward passes; LoRA weights stay float32."
    )
    cpu_threads: int = Field(
        default=2,
        ge=1,
        le=1024,
        description="Threads of each process for what is computed on the CPU; decoding of images uses all "
        "cores anyway. Without a GPU the number of cores is fastest. It is 2 on every machine unless said, "
        "since the number of threads decides the last bits of what a CPU computes. It is no part of any key.",
    )


class CheckSettings(Settings):
    """How strict the gates are."""

    max_rejected_fraction: float = Field(
        default=0.05, ge=0.0, le=1.0, description="A gate closes above this share of rejected samples."
    )
    max_image_pixels: int = Field(
        default=178_956_970,
        ge=1,
        le=MAX_COUNT,
        description="An image with more pixels (height times width, as its header says) is rejected as "
        "`too_large` before any of it is decoded: a guard against files made to fill the memory. Decoding "
        "takes about 4 bytes a pixel, 700 MB at the default.",
    )
    near_duplicate_bits: int = Field(
        default=4,
        ge=0,
        le=16,
        description="Images look alike when their perceptual hashes differ in at most so many of 64 bits. A "
        "warning lists them, and a validation split keeps them together.",
    )
    allow: tuple[Gate, ...] = Field(
        default=(),
        description="Gates opened knowingly, by the check's name, of every asset that has one of that name: "
        "they then warn and do not stop. What is exact of the two caches, vae_latents and text_embeddings, "
        "stays closed all the same: completeness, shapes, bytes and values.",
    )


class RecacheSettings(Settings):
    """When the cache is brought up to date without being asked."""

    cron: Annotated[str, AfterValidator(check_cron)] | None = Field(
        default="0 3 * * *", description="When the schedule runs: five cron fields, or null for no schedule."
    )
    on_change: bool = Field(
        default=True,
        description="Whether a sensor starts the cache job when images or captions have changed.",
    )
    settle_s: int = Field(
        default=30,
        ge=5,
        description="Seconds between two looks of the sensor at the files; a change has settled, and starts "
        "the job, when two looks in a row see the same. Longer for copies that pause, or for many files.",
    )
    enabled: bool = Field(default=False, description="The one switch for the schedule and the sensor.")


class RecipeFile(Settings):
    """A Latentline recipe: from images and captions to a trained LoRA."""

    datasets: Annotated[tuple[DatasetSettings, ...], AfterValidator(repeated_names)] = Field(
        min_length=1, description="Folders or listings of images with captions; they are only ever read."
    )
    cache_dir: FolderAddress = Field(
        default=Path(".cache/latentline"),
        description="Holds latents and text embeddings; recipes may share one. Relative to the project root. "
        "Or an address that fsspec opens for writing, such as s3://bucket/cache, gs:// or sftp://: package "
        "and credentials as for datasets[].path. Training then reads an entry from there each time that it "
        "is drawn.",
    )
    output_dir: FolderPath = Field(
        description="Holds tables, reports, runs and the LoRA of this recipe. Relative to the project root."
    )
    model: ModelSettings = Field(description="The base model that the LoRA is trained for.")
    buckets: BucketSettings = Field(
        default_factory=BucketSettings, description="The sizes that images are scaled and cropped to."
    )
    latents: LatentSettings = Field(default_factory=LatentSettings, description="How images become latents.")
    text: TextSettings = Field(
        default_factory=TextSettings, description="How captions become text embeddings."
    )
    training: TrainingSettings = Field(
        default_factory=TrainingSettings, description="How the LoRA is trained."
    )
    accelerate: AccelerateSettings = Field(
        default_factory=AccelerateSettings, description="What `accelerate launch` is given."
    )
    checks: CheckSettings = Field(default_factory=CheckSettings, description="How strict the gates are.")
    recache: RecacheSettings = Field(
        default_factory=RecacheSettings,
        description="When the cache is brought up to date without being asked.",
    )

    @model_validator(mode="after")
    def _sections_agree(self) -> RecipeFile:
        weights = [dataset.weight for dataset in self.datasets]
        if broken := broken_weights(weights, self.training.exhausted):
            raise_broken(broken, involves=("datasets", "training"))
        has_focus = [dataset.focus_columns is not None for dataset in self.datasets]
        if broken := broken_focus(has_focus, self.buckets.crop):
            raise_broken(broken, involves=("datasets", "buckets"))
        return self


class Recipe(RecipeFile):
    """A recipe as loaded: with its name, its file, and absolute paths.

    Paths are as written, joined to the project root; links and `..` in them are not resolved.
    `Recipe.model_validate_json(recipe.model_dump_json())` gives an equal recipe.
    """

    name: str = Field(pattern=NAME_PATTERN, description="The file's stem.")
    source: Path = Field(description="The YAML file.")
