"""The section `training`: how long, with what, and what is kept of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from pipeline.recipe.lora import LoraSettings
from pipeline.recipe.objective import LossSettings, NoiseSettings, TimestepSettings
from pipeline.recipe.optimizers import broken_schedule, check_optimizer, unknown_arguments
from pipeline.recipe.rules import Broken, raise_broken
from pipeline.recipe.section import MAX_COUNT, Settings

OptimizerArgument = bool | int | float | str | tuple[float, ...] | None

DEFAULT_STEPS = 1000
"""Of a training whose length the recipe does not say."""


class OptimizerArguments(Settings):
    """Any arguments, by name; which ones an optimizer takes is looked at beside its name."""

    model_config = ConfigDict(extra="allow")

    # So pydantic is told of what type unknown keys are.
    __pydantic_extra__: dict[str, OptimizerArgument] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        init=False
    )

    def given(self) -> dict[str, OptimizerArgument]:
        """The arguments as the recipe has them."""
        return dict(self.__pydantic_extra__)


class TrainingSettings(Settings):
    """How the LoRA is trained; what of it decides the weights is part of the run's fingerprint."""

    steps: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        examples=[DEFAULT_STEPS],
        description=f"Optimizer steps; null: as many as `epochs` ask for, or {DEFAULT_STEPS}.",
    )
    epochs: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Passes over the datasets, in place of `steps`; each ends with a whole optimizer step.",
    )
    exhausted: Literal["leave", "end_epoch", "repeat"] = Field(
        default="leave",
        description="With weights, what happens when each image of a dataset has been seen in an epoch. "
        "leave: the others go on without it. end_epoch: the epoch ends. repeat: it starts again, until the "
        "last dataset has been seen.",
    )
    batch_size: int = Field(
        default=1, ge=1, le=MAX_COUNT, description="Samples a process takes in one forward pass."
    )
    gradient_accumulation: int = Field(
        default=1, ge=1, le=MAX_COUNT, description="Forward passes in one optimizer step."
    )
    learning_rate: float = Field(default=1e-4, gt=0.0, description="After warm-up, before any decay.")
    optimizer: Annotated[str, AfterValidator(check_optimizer)] = Field(
        default="adamw",
        description="adamw, adamw8bit (bitsandbytes, on a GPU), adafactor, prodigy (learning_rate: 1.0), "
        "lion (with a third of AdamW's rate), schedule_free, or the import path of a torch optimizer.",
    )
    optimizer_arguments: OptimizerArguments = Field(
        default_factory=OptimizerArguments,
        description="Arguments of the optimizer beside the learning rate, such as weight_decay or betas.",
    )
    lr_scheduler: Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "wsd"] = (
        Field(
            default="constant",
            description="What the learning rate does after warm-up: stay, or go down to zero in a line, half "
            "a cosine, several (lr_cycles), or a power (lr_power); wsd stays, then goes down in the "
            "last decay_steps.",
        )
    )
    lr_cycles: int = Field(
        default=1, ge=1, le=MAX_COUNT, description="Cosines of `lr_scheduler: cosine_with_restarts`."
    )
    lr_power: float = Field(default=1.0, gt=0.0, description="Of `lr_scheduler: polynomial`.")
    decay_steps: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="Last steps, in which wsd goes down to zero.",
    )
    ema_decay: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="The LoRA is an exponential moving average of the trained weights with this decay, such "
        "as 0.99; null: the weights as they are.",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="Steps in which the learning rate rises from zero; at most steps.",
    )
    loss: LossSettings = Field(default_factory=LossSettings, description="What is minimised.")
    noise: NoiseSettings = Field(
        default_factory=NoiseSettings, description="What is mixed into a latent beside plain noise."
    )
    timesteps: TimestepSettings = Field(
        default_factory=TimestepSettings, description="Which noise levels are drawn."
    )
    max_grad_norm: float = Field(default=1.0, gt=0.0, description="Longer gradients are cut to this norm.")
    seed: int = Field(default=42, ge=0, lt=2**63, description="Decides noise, order and initial weights.")
    quantize: Literal["none", "nf4", "int8", "int8_torchao", "fp8_torchao"] = Field(
        default="none",
        description="Pack the frozen base weights, so that they take less memory: to 4 bits (nf4) or 8 "
        "(int8) by bitsandbytes, on a GPU; or to 8 bits by torchao, anywhere. none: not at all. Only for a "
        "plain LoRA: without `dora`, of `kind: lora`, and `init` kaiming or gaussian. Text encoders are not "
        "packed.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Compute activations a second time instead of keeping them: much less memory, about a "
        "third more time, the same gradients.",
    )
    compile: bool = Field(
        default=False,
        description="Compile the repeated blocks with torch.compile: the first steps of each size take "
        "longer, those after them less. Needs a C++ compiler.",
    )
    checkpoint_every: int = Field(
        default=250, ge=1, le=MAX_COUNT, description="Steps between two checkpoints."
    )
    keep_checkpoints: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="How many of the last checkpoints are kept; null: all. A run goes on from the newest "
        "that is sound, so keep 2 at least.",
    )
    sample_every: int = Field(
        default=250,
        ge=0,
        le=MAX_COUNT,
        description="Steps between two sets of preview pictures, the first before the first step; 0: none.",
    )
    sample_prompts: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="Prompts of the preview pictures; empty: the first captions are used."
    )
    validate_every: int = Field(
        default=250,
        ge=0,
        le=MAX_COUNT,
        description="Steps between two measurements of the loss on images held out by "
        "`datasets.validation_fraction`, the first before the first step; 0: none.",
    )
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = Field(
        default=("tensorboard",),
        description="Where numbers and pictures go while it trains, beside the run's own logs: tensorboard "
        "reads runs/<run>/logs; wandb needs that package and an account.",
    )
    lora: LoraSettings = Field(default_factory=LoraSettings, description="The adapter that is trained.")

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a recipe that does not count epochs, or whose epochs have been counted."""
        return DEFAULT_STEPS if self.steps is None else self.steps

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> TrainingSettings:
        if self.steps is not None and self.epochs is not None:
            what = f"steps {self.steps} and epochs {self.epochs} both say how long training is"
            raise_broken([Broken("epochs", what, "remove one of the two")], involves=("steps", "epochs"))
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> TrainingSettings:
        if self.epochs is None and self.warmup_steps > self.num_steps:
            what = f"warmup_steps {self.warmup_steps} is more than steps {self.num_steps}"
            fix = f"use at most {self.num_steps}, or raise training.steps"
            raise_broken([Broken("warmup_steps", what, fix)], involves=("warmup_steps", "steps", "epochs"))
        return self

    @model_validator(mode="after")
    def _optimizer_takes_its_arguments(self) -> TrainingSettings:
        if broken := unknown_arguments(self.optimizer, self.optimizer_arguments.given()):
            raise_broken(broken, involves=("optimizer", "optimizer_arguments"))
        return self

    @model_validator(mode="after")
    def _one_rate_where_it_is_found(self) -> TrainingSettings:
        text = self.lora.text_encoders
        if self.optimizer == "prodigy" and text is not None and text.learning_rate is not None:
            what = f"prodigy finds one step size for all weights, and not another of {text.learning_rate}"
            broken = Broken(
                "lora.text_encoders.learning_rate", what, "remove it, or use another training.optimizer"
            )
            raise_broken([broken], involves=("optimizer", "lora"))
        return self

    @model_validator(mode="after")
    def _packed_weights_suit_the_adapter(self) -> TrainingSettings:
        if self.quantize != "none" and self.lora.dora:
            what = f"dora measures the base weights, which quantize: {self.quantize} packs"
            broken = Broken("quantize", what, "set quantize: none, or training.lora.dora: false")
            raise_broken([broken], involves=("quantize", "lora"))
        if self.quantize != "none" and self.lora.begins_as_part:
            what = (
                f"init: {self.lora.init} takes the base weights apart, which quantize: {self.quantize} packs"
            )
            broken = Broken("quantize", what, "set quantize: none, or training.lora.init: kaiming")
            raise_broken([broken], involves=("quantize", "lora"))
        if self.quantize != "none" and self.lora.kind != "lora":
            what = f"peft puts no {self.lora.kind} on weights that quantize: {self.quantize} packs"
            broken = Broken("quantize", what, "set quantize: none, or training.lora.kind: lora")
            raise_broken([broken], involves=("quantize", "lora"))
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainingSettings:
        keys = (
            "optimizer",
            "lr_scheduler",
            "lr_cycles",
            "lr_power",
            "decay_steps",
            "warmup_steps",
            "steps",
            "epochs",
        )
        if broken := broken_schedule(self):
            raise_broken(broken, involves=keys)
        return self
