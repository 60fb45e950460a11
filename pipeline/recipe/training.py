"""The section `training`: length, optimizer, objective, previews, checkpoints and the adapter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from pipeline.recipe.lora import LoraSettings
from pipeline.recipe.objective import LossSettings, NoiseSettings, TimestepSettings
from pipeline.recipe.optimizer_classes import OPTIMIZERS, argument_violations, check_argument, check_optimizer
from pipeline.recipe.preview_prompts import PreviewPrompts
from pipeline.recipe.settings import MAX_COUNT, Settings, Violation
from pipeline.recipe.trackers import ArgumentsByTracker, TrackerArguments, TrackerName, tracker_violations
from pipeline.recipe.validators import check_num_resident_blocks

OptimizerArgument = Annotated[
    bool | int | float | str | tuple[float | None, ...] | None, BeforeValidator(check_argument)
]

NumResidentBlocks = Annotated[
    Literal["none", "auto"] | Annotated[int, Field(ge=0, le=MAX_COUNT)],
    BeforeValidator(check_num_resident_blocks),
]

DEFAULT_STEPS = 1000
"""Number of steps if the recipe sets neither steps nor epochs."""

POLYNOMIAL_END = 1e-7
"""Final learning rate of the polynomial schedule."""

RISE = (0.1, 100.0)
"""First and last learning rate of the rising schedule, as multiples of the recipe's rate."""


class OptimizerArguments(Settings):
    """Keyword arguments of the optimizer; the names are checked together with `optimizer`."""

    model_config = ConfigDict(extra="allow")

    # Pydantic reads the type of extra keys from this annotation.
    __pydantic_extra__: dict[str, OptimizerArgument] = Field(  # pyright: ignore[reportIncompatibleVariableOverride] - documented by pydantic
        init=False
    )

    def given(self) -> dict[str, OptimizerArgument]:
        """Return the arguments that the recipe sets."""
        return dict(self.__pydantic_extra__)


class TrainingSettings(Settings):
    """How the LoRA is trained. Keys that affect the weights are part of the run's fingerprint."""

    requirements = (
        ("lr_cycles", "lr_scheduler", "cosine_with_restarts"),
        ("lr_power", "lr_scheduler", "polynomial"),
        ("decay_steps", "lr_scheduler", "wsd"),
    )

    steps: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        examples=[DEFAULT_STEPS],
        description=f"Number of optimizer steps; null uses `epochs`, or {DEFAULT_STEPS} steps without them.",
    )
    epochs: int | None = Field(
        default=None,
        ge=1,
        le=MAX_COUNT,
        description="Number of passes over the datasets, instead of `steps`. Every epoch ends with a "
        "complete optimizer step.",
    )
    exhausted: Literal["leave", "end_epoch", "repeat"] | None = Field(
        default=None,
        description="With dataset weights: what happens when an epoch has used all images of a dataset. "
        "repeat: start the dataset again, until all datasets have been used up. end_epoch: end the epoch. "
        "leave: continue with the other datasets, so that in the long run their sizes decide the shares and "
        "weights only the order. null repeats.",
    )
    batch_size: int = Field(
        default=1, ge=1, le=MAX_COUNT, description="Number of samples per process and forward pass."
    )
    gradient_accumulation: int = Field(
        default=1, ge=1, le=MAX_COUNT, description="Number of forward passes per optimizer step."
    )
    learning_rate: float = Field(
        default=1e-4, gt=0.0, description="Learning rate after warm-up and before any decay."
    )
    optimizer: Annotated[str, AfterValidator(check_optimizer)] = Field(
        default="adamw",
        description="adamw, adamw8bit (bitsandbytes, needs a GPU), adafactor, prodigy (use learning_rate: "
        "1.0), lion (use a third of AdamW's learning rate), schedule_free, or the import path of a torch "
        "optimizer.",
    )
    optimizer_arguments: OptimizerArguments = Field(
        default_factory=OptimizerArguments,
        description="Other arguments of the optimizer, such as weight_decay or betas.",
    )
    lr_scheduler: Literal[
        "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "wsd", "rising"
    ] = Field(
        default="constant",
        description="Learning rate after warm-up. constant: unchanged. linear, cosine, "
        "cosine_with_restarts (`lr_cycles`) and polynomial (`lr_power`): decays over the run. wsd "
        "(warmup-stable-decay): constant, then decays to zero in the last `decay_steps`. rising: for a "
        "range test, rises exponentially from a tenth of `learning_rate` to a hundred times it.",
    )
    lr_cycles: int = Field(
        default=1,
        ge=1,
        le=MAX_COUNT,
        description="Number of cycles of `lr_scheduler: cosine_with_restarts`.",
    )
    lr_power: float = Field(default=1.0, gt=0.0, description="Exponent of `lr_scheduler: polynomial`.")
    decay_steps: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="Number of steps at the end in which `lr_scheduler: wsd` decays to zero.",
    )
    ema_decay: float | None = Field(
        default=None,
        gt=0.0,
        lt=1.0,
        description="Decay of an exponential moving average (EMA) of the weights, such as 0.99. The exported "
        "LoRA is then the average. null exports the weights themselves.",
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="Number of steps in which the learning rate rises from zero; at most `steps`.",
    )
    loss: LossSettings = Field(default_factory=LossSettings, description="Loss function and its weighting.")
    noise: NoiseSettings = Field(
        default_factory=NoiseSettings, description="Changes to the noise that is added to a latent."
    )
    timesteps: TimestepSettings = Field(
        default_factory=TimestepSettings, description="Distribution of noise levels."
    )
    guidance: float = Field(
        default=1.0,
        ge=0.0,
        description="Guidance scale that the transformer gets in training. For FLUX.1 dev, FLUX.1 Kontext "
        "and FLUX.2 dev, whose distilled guidance is an input. At 1 the LoRA does not learn guidance; set it "
        "to the scale of a LoRA in `lora.start_from` that was trained at another, such as 3.5. Previews have "
        "their own `sample_prompts[].guidance_scale`.",
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0.0, description="Norm to which larger gradients are clipped."
    )
    seed: int = Field(
        default=42, ge=0, lt=2**63, description="Seed of noise, sample order and initial LoRA weights."
    )
    quantize: Literal["none", "nf4", "int8", "int8_torchao", "fp8_torchao"] = Field(
        default="none",
        description="Quantization of the frozen base weights, to save memory. nf4 (4 bits) uses bitsandbytes "
        "and needs a GPU; int8 and fp8_torchao use torchao and work on any device. int8_torchao is another "
        "name of int8. Use it with `gradient_checkpointing`. Requires `kind: lora` without `dora` and with "
        "`init: kaiming` or `gaussian`. Text encoders are not quantized.",
    )
    compute: Literal["none", "int8", "fp8"] = Field(
        default="none",
        description="Matrix products of the frozen base weights in 8 bits, to save memory: "
        "weights and inputs of the layers in blocks are rounded, gradients are not. Uses torchao. int8 works "
        "on any device; fp8 needs an NVIDIA GPU of compute capability 8.9 or higher. Requires `kind: lora` "
        "without `dora` and with `init: kaiming` or `gaussian`, and `quantize: none` or the same format. "
        "none multiplies in the dtype of `accelerate.mixed_precision`.",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description="Recompute activations in the backward pass instead of storing them. Saves much memory, "
        "takes about a third more time, and gives the same gradients.",
    )
    offload: NumResidentBlocks = Field(
        default="none",
        description="Number of the denoiser's repeated blocks that stay on the GPU. The weights of "
        "other blocks are on the host and copied to the GPU for each use, which takes time and gives the "
        "same LoRA. 0 saves the most memory; none keeps all blocks on the GPU; auto keeps as many as the "
        "memory forecast allows on the GPU of the run, and all of them on a CPU. "
        "With `quantize: nf4` it requires `gradient_checkpointing`.",
    )
    compile: bool | Literal["auto"] = Field(
        default=False,
        description="Compile the repeated blocks with torch.compile. The first steps of each bucket size "
        "take longer, later steps less. Needs a C++ compiler. auto compiles on a GPU if this machine and the "
        "recipe's other settings allow it, and not on a CPU; the log has the reason.",
    )
    attention_backend: Literal["native", "_native_cudnn", "_native_efficient", "_native_math"] = Field(
        default="native",
        description="Kernels of the denoiser's attention, by diffusers' name of the backend. native lets "
        "torch choose, without cuDNN. The others need a model that uses diffusers' backends, and all but "
        "_native_math a GPU; see [gpus.md](gpus.md#attention).",
    )
    checkpoint_every: int = Field(
        default=250, ge=1, le=MAX_COUNT, description="Number of steps between two checkpoints."
    )
    keep_checkpoints: int | None = Field(
        default=2,
        ge=1,
        le=MAX_COUNT,
        description="Number of checkpoints that keep their optimizer state; null keeps it in all. An "
        "interrupted run resumes from the newest valid checkpoint, so keep at least 2. The LoRA files of all "
        "checkpoints stay.",
    )
    sample_every: int = Field(
        default=250,
        ge=0,
        le=MAX_COUNT,
        description="Number of steps between previews; the first ones are drawn before the first step. 0 "
        "disables previews.",
    )
    sample_prompts: PreviewPrompts = Field(
        default=(),
        description="Prompts of the previews, as text or with their own settings; an empty list uses the "
        "first captions, with the references of their images.",
    )
    validate_every: int = Field(
        default=250,
        ge=0,
        le=MAX_COUNT,
        description="Number of steps between measurements of the validation loss, which uses the holdout of "
        "`datasets[].validation_fraction`; the first is before the first step. 0 disables it.",
    )
    trackers: tuple[TrackerName, ...] = Field(
        default=("tensorboard",),
        description="Experiment trackers that receive metrics, settings and previews, in addition to the "
        "run's own logs. tensorboard writes to runs/<run>/logs; all others need their packages, see "
        "[outputs.md](outputs.md#experiment-trackers).",
    )
    tracker_project: str = Field(
        default="latentline",
        min_length=1,
        description="Project, or experiment, of the runs in trackers other than tensorboard.",
    )
    tracker_arguments: TrackerArguments = Field(
        default_factory=ArgumentsByTracker,
        examples=[{"mlflow": {"tracking_uri": "http://localhost:5000"}}],
        description="Arguments of each tracker's own start function. Credentials are refused; trackers read "
        "them from environment variables.",
    )
    lora: LoraSettings = Field(default_factory=LoraSettings, description="The adapter that is trained.")

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps; valid if the recipe does not use epochs, or they have been converted."""
        return DEFAULT_STEPS if self.steps is None else self.steps

    @property
    def packing(self) -> str:
        """`quantize` as run ids name it: one name for each kind, and a new one if its values change."""
        if self.compute != "none":
            return f"{self.compute}_products"

        # int8 is torchao's: the int8 layers of bitsandbytes keep every input until the backward pass, so
        # gradient checkpointing saves nothing with them. Before it was called nf4_double, nf4 packed all
        # layers, with scales of 32 bits.
        return {"int8": "int8_torchao", "nf4": "nf4_double"}.get(self.quantize, self.quantize)

    @property
    def weight_format(self) -> str:
        """Format of the packed base weights as a value of `quantize`, whichever key asks for it."""
        return {"none": self.quantize, "int8": "int8", "fp8": "fp8_torchao"}[self.compute]

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        if self.steps is not None and self.epochs is not None:
            what = f"training.steps ({self.steps}) and training.epochs ({self.epochs})"
            what += " cannot be used together"
            yield Violation("epochs", what, "remove one of the two", involves=("steps", "epochs"))
        for violation in argument_violations(self.optimizer, self.optimizer_arguments.given()):
            yield replace(violation, involves=("optimizer", "optimizer_arguments"))
        yield from self._adapter_violations()
        yield from self._compute_violations()
        yield from self._offload_violations()
        yield from self._schedule_violations()
        yield from tracker_violations(self.trackers, self.tracker_arguments)

    def _adapter_violations(self) -> Iterator[Violation]:
        text = self.lora.text_encoders
        own_rates = (
            ("text_encoders.learning_rate", text is not None and text.learning_rate is not None),
            ("learning_rates", bool(self.lora.learning_rates)),
            ("loraplus_ratio", self.lora.loraplus_ratio is not None),
        )
        for key, is_set in own_rates:
            if self.optimizer == "prodigy" and is_set:
                what = "prodigy estimates one step size for all weights, so lora."
                what += f"{key} cannot give some of them another learning rate"
                fix = "remove it, or use another training.optimizer"
                yield Violation(f"lora.{key}", what, fix, involves=("optimizer", "lora"))

        if self.lora.scale_weight_norms is not None:
            yield from self._norm_limit_violations()
        optimizer = OPTIMIZERS.get(self.optimizer)
        if self.lora.kind == "oft" and optimizer is not None and optimizer.own_schedule:
            what = f"lora.kind: oft cannot be combined with optimizer: {self.optimizer}, which exports an "
            what += "average of weights from before the limit of rotations"
            fix = "use another training.optimizer"
            yield Violation("optimizer", what, fix, involves=("lora", "optimizer"))

        conflicts = (
            (self.lora.dora, "lora.dora: true", "training.lora.dora: false"),
            (
                self.lora.starts_from_base_weights,
                f"lora.init: {self.lora.init}",
                "training.lora.init: kaiming",
            ),
            (self.lora.kind != "lora", f"lora.kind: {self.lora.kind}", "training.lora.kind: lora"),
        )
        for is_conflict, setting, alternative in conflicts:
            for key, value in (("quantize", self.quantize), ("compute", self.compute)):
                if value != "none" and is_conflict:
                    what = f"{key}: {value} cannot be combined with {setting}"
                    fix = f"set {key}: none, or {alternative}"
                    yield Violation(key, what, fix, involves=(key, "lora"))

    def _norm_limit_violations(self) -> Iterator[Violation]:
        # The limit holds for the trained weights, and the product of two averaged matrices may exceed it.
        optimizer = OPTIMIZERS.get(self.optimizer)
        averages = (
            ("ema_decay", self.ema_decay, self.ema_decay is not None),
            ("optimizer", self.optimizer, optimizer is not None and optimizer.own_schedule),
        )
        for key, value, is_averaged in averages:
            if is_averaged:
                what = f"lora.scale_weight_norms cannot be combined with {key}: {value}, which exports an "
                what += "average of the weights"
                fix = f"remove training.lora.scale_weight_norms, or use another training.{key}"
                fix = fix if key == "optimizer" else "remove one of the two"
                yield Violation("lora.scale_weight_norms", what, fix, involves=("lora", key))

    def _compute_violations(self) -> Iterator[Violation]:
        if self.compile is True and self.lora.timestep_ranks is not None:
            what = "compile: true cannot be combined with lora.timestep_ranks"
            yield Violation("compile", what, "remove one of the two", involves=("compile", "lora"))
        same = {"int8": ("int8", "int8_torchao"), "fp8": ("fp8_torchao",)}
        if self.compute != "none" and self.quantize not in ("none", *same[self.compute]):
            what = f"compute: {self.compute} cannot be combined with quantize: {self.quantize}, because the "
            what += "weights are stored in the format of the products"
            fix = "set training.quantize: none, or training.compute: none"
            yield Violation("compute", what, fix, involves=("compute", "quantize"))

    def _offload_violations(self) -> Iterator[Violation]:
        if self.offload == "none":
            return
        if self.quantize == "nf4" and not self.gradient_checkpointing:
            # The layers of bitsandbytes keep their weights for the backward pass out of autograd's sight.
            what = f"offload: {self.offload} with quantize: nf4 needs gradient_checkpointing: true"
            fix = "set training.gradient_checkpointing: true"
            involves = ("offload", "quantize", "gradient_checkpointing")
            yield Violation("offload", what, fix, involves=involves)

    def _schedule_violations(self) -> Iterator[Violation]:
        kind, optimizer = self.lr_scheduler, OPTIMIZERS.get(self.optimizer)
        if optimizer is not None and optimizer.own_schedule and kind != "constant":
            what = f"{self.optimizer} averages its steps and needs lr_scheduler: constant, got {kind}"
            fix = "set lr_scheduler: constant; warmup_steps is still used"
            yield Violation("lr_scheduler", what, fix, involves=("optimizer", "lr_scheduler"))
        if kind == "polynomial" and self.learning_rate <= POLYNOMIAL_END:
            what = f"training.learning_rate must be greater than {POLYNOMIAL_END}, the final rate of "
            what += f"lr_scheduler: polynomial, got {self.learning_rate}"
            fix, involves = "raise it, or use another lr_scheduler", ("learning_rate", "lr_scheduler")
            yield Violation("learning_rate", what, fix, involves)
        if kind == "rising" and self.warmup_steps:
            what = f"lr_scheduler: rising has no warm-up, got warmup_steps: {self.warmup_steps}"
            yield Violation("warmup_steps", what, "remove it", ("warmup_steps", "lr_scheduler"))
        if kind == "wsd" and self.decay_steps == 0:
            what = "lr_scheduler: wsd needs decay_steps, the number of steps in which the rate decays to zero"
            fix, involves = "set it, for example to a fifth of the steps", ("decay_steps", "lr_scheduler")
            yield Violation("decay_steps", what, fix, involves)

        # The number of steps of a recipe with epochs is known only when the dataset has been counted.
        if self.epochs is not None:
            return
        involves = ("decay_steps", "warmup_steps", "steps", "epochs", "lr_scheduler")
        most = self.num_steps - self.warmup_steps
        if most < 0:
            what = f"training.warmup_steps must be at most steps ({self.num_steps}), got {self.warmup_steps}"
            fix = f"use at most {self.num_steps}, or raise training.steps"
            yield Violation("warmup_steps", what, fix, involves)
        elif kind == "wsd" and self.decay_steps > most:
            what = f"training.decay_steps must be at most the {most} steps after warm-up"
            what += f", got {self.decay_steps}"
            yield Violation("decay_steps", what, f"use at most {most}", involves)


def shard_violations(num_processes: int, training: TrainingSettings) -> Iterator[Violation]:
    """Yield the settings that a sharded base model does not work with."""
    if num_processes < 2:
        what = f"shard: true requires num_processes of at least 2, got {num_processes}"
        fix = "set accelerate.num_processes to the number of GPUs, or remove shard"
        yield Violation("accelerate.shard", what, fix, ("accelerate",))

    lora = training.lora
    conflicts = (
        (training.offload != "none", f"training.offload: {training.offload}", "offload: none"),
        (training.quantize != "none", f"training.quantize: {training.quantize}", "quantize: none"),
        (training.compute != "none", f"training.compute: {training.compute}", "compute: none"),
        (training.compile is True, "training.compile: true", "compile: false"),
        (lora.dora, "training.lora.dora: true", "lora.dora: false"),
        (lora.starts_from_base_weights, f"training.lora.init: {lora.init}", "lora.init: kaiming"),
        (lora.text_encoders is not None, "training.lora.text_encoders", "lora.text_encoders: null"),
    )
    for is_conflict, setting, alternative in conflicts:
        if is_conflict:
            what = f"shard: true cannot be combined with {setting}"
            fix = f"remove accelerate.shard, or set training.{alternative}"
            yield Violation("accelerate.shard", what, fix, ("accelerate", "training"))
