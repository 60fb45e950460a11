"""Memory of one training step: base weights, adapter, gradients, optimizer, and the step's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from pipeline.images.geometry import Size
from pipeline.models.training_adapter import local_training_adapter
from pipeline.models.worker.offload.streamed_blocks import NUM_SLOTS, repeated_blocks, streamed_names
from pipeline.side_inputs.references import reference_geometry
from pipeline.trained_lora.context_file import refused_context
from pipeline.trained_lora.worker.adapter.lora import add_lora, trainable_weights
from pipeline.trained_lora.worker.adapter.shared_casts import share_casts
from pipeline.trained_lora.worker.base_model import BASE_DTYPES
from pipeline.trained_lora.worker.frozen_lora import num_values
from pipeline.trained_lora.worker.loss import sample_losses
from pipeline.trained_lora.worker.memory.cuda_rules import CudaRules, Packing, compute_positions_on_cpu
from pipeline.trained_lora.worker.memory.live_memory import LiveMemory
from pipeline.trained_lora.worker.memory.skeletons import num_bytes, skeleton, tensors_of
from pipeline.trained_lora.worker.memory.trained_text import text_loss, trained_skeletons
from pipeline.trained_lora.worker.nf4 import layers_outside_blocks
from pipeline.trained_lora.worker.optimizers import make_optimizer
from pipeline.trained_lora.worker.training_adapter import refused_adapter

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

    from pipeline.models.worker.family import WorkerFamily
    from pipeline.recipe import DatasetSettings, Recipe, TrainingSettings

_NF4_BYTES = 0.5 + (1 + 4 / 256) / 64
"""Bytes per weight: 4 bits, a scale of 8 bits per block of 64 weights, and a float32 per 256 scales."""

_GRADIENT_BYTES = 4
"""Bytes per trained weight for its gradient; adapters are float32."""

PROBE_EDGE = 256
"""Edge of the matrix that an optimizer is run on to measure the size of its state."""

_EIGHT_BIT_STATE_BYTES = 2 + 8 / 256
"""Bytes per weight of bitsandbytes' 8-bit optimizers: two values, and two float32 scales per 256 weights."""


_LARGE_IMAGE = Size(2048, 2048)
"""Size of a reference image that is at least as large as the pipelines of all families use it."""


_NUM_GATHERED = 3
"""Number of blocks of a sharded base model that are gathered at a time: one in use, and the next one with the
buffer that it is received in."""


@dataclass(frozen=True)
class Variant:
    """The settings of a training that decide its memory.

    Attributes:
        quantize: Format of the packed base weights, a value of `training.quantize`.
        mixed_precision: "no", "fp16" or "bf16".
        offload: Resolved value of `training.offload`.
    """

    quantize: str
    checkpointing: bool
    batch_size: int
    mixed_precision: str
    offload: Literal["none"] | int
    compute: str = "none"

    @property
    def dtype(self) -> str:
        """Dtype of the unpacked base weights."""
        return BASE_DTYPES[self.mixed_precision]

    @property
    def packing(self) -> Packing | None:
        """How packed weights are used; None if they are not packed."""
        if self.quantize == "none":
            return None
        if self.compute != "none":
            return "multiplied"
        return "dequantized_again" if self.quantize == "nf4" else "dequantized_once"


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of a training, by purpose.

    Attributes:
        base: Frozen base weights on the GPU, packed if the recipe packs them, and frozen LoRAs.
        trained: Adapter weights, their gradients, the optimizer's state, and moving averages.
        step: Peak of everything that a step creates and frees.
        host: Base weights that the host holds while they are loaded, and streamed ones.
    """

    base: int
    trained: int
    step: int
    host: int

    @property
    def device(self) -> int:
        """Peak bytes on the GPU."""
        return self.base + self.trained + self.step


class TrainingForecast:
    """Memory of a recipe's training, for its own settings and for others."""

    def __init__(
        self, family: WorkerFamily, recipe: Recipe, size: Size, *, shares_casts: bool = True
    ) -> None:
        """Prepare to forecast steps with images of the given size; see `share_casts`."""
        self._shares_casts = shares_casts
        self._family = family
        self._recipe = recipe
        self._size = size

        # Caches of the instance: as a decorator, `lru_cache` would keep every forecast and its models alive.
        self.step_bytes = lru_cache(self._step_bytes)
        self._adapted = lru_cache(self._make_adapted)
        self._text = lru_cache(partial(trained_skeletons, family, recipe))

    @property
    def variant(self) -> Variant:
        """The recipe's own settings; `training.offload: auto` counts as none."""
        training = self._recipe.training
        return Variant(
            training.weight_format,
            training.gradient_checkpointing,
            training.batch_size,
            self._family.mixed_precision(self._recipe.accelerate.mixed_precision),
            "none" if training.offload == "auto" else training.offload,
            training.compute,
        )

    @property
    def num_blocks(self) -> int:
        """Number of repeated blocks of the denoiser."""
        variant = self.variant
        return len(repeated_blocks(self._adapted(variant.dtype, checkpointing=variant.checkpointing)))

    def memory(self, variant: Variant) -> TrainingMemory:
        """Return the memory of a training with these settings."""
        denoiser = self._adapted(variant.dtype, checkpointing=variant.checkpointing)
        base = [weight for weight in tensors_of(denoiser) if not weight.requires_grad]
        packed = _packable(denoiser, variant) if variant.packing else {}
        packed_bytes = sum(_packed_bytes(weight, variant.quantize) for weight in packed.values())
        largest = max((weight.nbytes for weight in packed.values()), default=0)
        plain_bytes = num_bytes(weight for weight in base if id(weight) not in packed)

        blocks = _streamed_bytes(denoiser, variant, packed)
        slots = NUM_SLOTS * max(blocks, default=0) if len(blocks) > NUM_SLOTS else sum(blocks)

        # Weights that are packed on the GPU move there one at a time, all other weights together.
        one_at_a_time = packed and (not blocks or variant.quantize == "nf4")
        host = max(weight.nbytes for weight in base) + sum(blocks) if one_at_a_time else num_bytes(base)
        on_device = packed_bytes + plain_bytes - sum(blocks) + slots
        if self._recipe.accelerate.shard:
            on_device = _sharded_bytes(denoiser, base, self._recipe.accelerate.num_processes)
        text = self._text(variant.dtype)
        return TrainingMemory(
            base=on_device + sum(map(_frozen_bytes, text)) + self._frozen_adapter_bytes(variant.dtype),
            trained=sum(map(self._trained_bytes, [denoiser, *text])),
            step=self._step(variant, largest=largest),
            host=host,
        )

    def _frozen_adapter_bytes(self, dtype: str) -> int:
        """Return the bytes of the context LoRA and of the training adapter, if their files are here."""
        return self._num_frozen_values * getattr(torch, dtype).itemsize

    @cached_property
    def _num_frozen_values(self) -> int:
        # Alphas, and tensors of networks that are not used, are so few that they may count.
        context, adapter = self._recipe.model.context_lora, local_training_adapter(self._recipe)
        number = 0 if adapter is None else num_values(adapter, refused_adapter)
        # A missing file is an error of the job, which names it.
        if context is not None and context.path.is_file():
            number += num_values(context.path, refused_context)
        return number

    def _step(self, variant: Variant, *, largest: int) -> int:
        """Return the peak bytes of a step's tensors; `largest` are the bytes of the largest packed weight."""
        # A step creates the same tensors wherever the weights of blocks are between their uses.
        own, variant = (replace(each, offload="none") for each in (self.variant, variant))
        is_added = variant.packing not in (None, "multiplied") and variant.checkpointing
        if variant == own or not is_added:
            return self.step_bytes(variant)

        # The largest packed weight is unpacked while it is used. Adding it to the peak of the unpacked model
        # saves a run of the model for each format. 8-bit products create other tensors and are always run.
        return self.step_bytes(replace(variant, quantize="none")) + largest

    @cached_property
    def _optimizer_bytes(self) -> float:
        return optimizer_bytes_per_weight(self._recipe.training)

    def _make_adapted(self, dtype: str, *, checkpointing: bool) -> nn.Module:
        denoiser = skeleton(self._family, self._family.spec.denoiser_name, dtype)
        targets, lora = self._family.lora_targets(), self._recipe.training.lora
        with torch.device("meta"):
            add_lora(cast("ModelMixin", denoiser), lora, targets=targets, seed=self._recipe.training.seed)
        if self._shares_casts and dtype != BASE_DTYPES["no"]:
            share_casts(denoiser, getattr(torch, dtype))
        if checkpointing:
            self._family.denoiser.recompute_activations(denoiser)
        compute_positions_on_cpu(denoiser)
        return denoiser.train()

    def _trained_bytes(self, network: nn.Module) -> int:
        weights = trainable_weights(network)
        num_weights = sum(weight.numel() for weight in weights)
        per_weight = _GRADIENT_BYTES + self._optimizer_bytes
        per_weight += 4 if self._recipe.training.ema_decay is not None else 0
        return num_bytes(weights) + int(num_weights * per_weight)

    def _step_bytes(self, variant: Variant) -> int:
        """Return the peak bytes of a step's tensors, without gradients of the trained weights."""
        denoiser = self._adapted(variant.dtype, checkpointing=variant.checkpointing)
        packing = variant.packing
        packed: dict[int, Packing] = {}
        if packing is not None:
            packed = dict.fromkeys(_packable(denoiser, variant), packing)
        autocast = None if variant.mixed_precision == "no" else getattr(torch, variant.dtype)

        # The gradients of trained weights are counted with these weights.
        networks = [denoiser, *self._text(variant.dtype)]
        weights = [weight for network in networks for weight in trainable_weights(network)]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        memory = LiveMemory(without=[*chain.from_iterable(map(tensors_of, networks)), *gradients])

        @contextmanager
        def modes() -> Generator[None]:
            with memory, CudaRules(autocast, packed, memory.count):
                yield

        with modes(), memory.counting_saved():
            loss = self._loss(denoiser, networks[1:], variant.batch_size)
        memory.backward(loss, denoiser, modes)
        return memory.peak_bytes

    def inference_bytes(self, variant: Variant, size: Size, batch_size: int) -> int:
        """Return the peak bytes of a pass without gradients over images of the given size."""
        denoiser = self._adapted(variant.dtype, checkpointing=variant.checkpointing)
        packing = variant.packing
        packed: dict[int, Packing] = {}
        if packing is not None:
            packed = dict.fromkeys(_packable(denoiser, variant), packing)
        autocast = None if variant.mixed_precision == "no" else getattr(torch, variant.dtype)
        memory = LiveMemory(without=tensors_of(denoiser))
        denoiser.eval()
        try:
            with torch.no_grad(), memory, CudaRules(autocast, packed, memory.count):
                self._prediction(denoiser, batch_size, size, self.conditions(batch_size))
        finally:
            denoiser.train()
        return memory.peak_bytes

    def run_step(
        self,
        variant: Variant,
        *,
        all_passes: AbstractContextManager[Any],
        forward: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Run the passes of a step within `all_passes`, and its forward passes within `forward`.

        Base weights are not packed.
        """
        text = self._text(variant.dtype)
        denoiser = self._adapted(variant.dtype, checkpointing=variant.checkpointing)
        autocast = None if variant.mixed_precision == "no" else getattr(torch, variant.dtype)

        # As after the optimizer's last step. Adding to gradients of an earlier run would be work too.
        for network in (denoiser, *text):
            network.zero_grad()

        @contextmanager
        def modes() -> Generator[None]:
            with CudaRules(autocast), forward():
                yield

        with all_passes:
            with modes():
                loss = self._loss(denoiser, text, variant.batch_size)
            LiveMemory().backward(loss, denoiser, modes)

    def _loss(self, denoiser: nn.Module, text: list[nn.Module], batch_size: int) -> Tensor:
        conditions = self.conditions(batch_size)
        text_term = text_loss(text, batch_size)
        for name in self._family.text_shapes() if text else ():
            conditions[name].requires_grad_()
        target = torch.empty((batch_size, *self._family.latent_shape(self._size)), device="meta")
        prediction = self._prediction(denoiser, batch_size, self._size, conditions)
        return sample_losses(prediction, target, self._recipe.training.loss).mean() + text_term

    def _prediction(
        self, denoiser: nn.Module, batch_size: int, size: Size, conditions: Mapping[str, Any]
    ) -> Tensor:
        noisy = torch.empty((batch_size, *self._family.latent_shape(size)), device="meta")
        timesteps = torch.empty(batch_size, device="meta")
        return self._family.denoiser.predict(denoiser, noisy, timesteps, conditions)

    def conditions(self, batch_size: int) -> dict[str, Any]:
        """Return conditions of the longest captions; lengths and masks have values, which decide shapes."""
        shapes = self._family.text_shapes()
        conditions: dict[str, Any] = {
            name: torch.empty(batch_size, *shape, device="meta") for name, shape in shapes.items()
        }
        for name in ("original_size_hw", "crop_top_left", "target_size_hw"):
            conditions[name] = torch.empty(batch_size, 2, dtype=torch.long, device="meta")
        if self._family.spec.text.padding == "masked":
            length = shapes["text_embedding"][0]
            conditions["text_mask"] = torch.ones(batch_size, length)
            conditions["text_lengths"] = (length,) * batch_size
        if references := max(map(self._references, self._recipe.datasets), key=_num_values):
            conditions["references"] = tuple(
                torch.empty(batch_size, *shape, device="meta") for shape in references
            )
        return conditions

    def _references(self, dataset: DatasetSettings) -> list[tuple[int, int, int]]:
        # The sizes of the references are not known here; a large image needs the most memory.
        geometries = (
            reference_geometry(self._family, _LARGE_IMAGE, reference.resolution)
            for reference in dataset.references
        )
        return [self._family.latent_shape(geometry.target_size) for geometry in geometries]


def _frozen_bytes(network: nn.Module) -> int:
    return num_bytes(tensor for tensor in tensors_of(network) if not tensor.requires_grad)


def _num_values(shapes: list[tuple[int, int, int]]) -> int:
    return sum(map(prod, shapes))


def _packable(denoiser: nn.Module, variant: Variant) -> dict[int, Tensor]:
    """Return the base weights of the linear layers that a variant packs, by id."""
    only_blocks = variant.quantize == "nf4" or variant.compute != "none"
    unpacked = set(layers_outside_blocks(denoiser)) if only_blocks else set[str]()
    return {
        id(module.weight): module.weight
        for name, module in denoiser.named_modules()
        if isinstance(module, nn.Linear) and not module.weight.requires_grad and name not in unpacked
    }


def _streamed_bytes(denoiser: nn.Module, variant: Variant, packed: Container[int]) -> list[int]:
    if variant.offload == "none":
        return []
    blocks = [denoiser.get_submodule(name) for name in streamed_names(denoiser, variant.offload)]
    return [
        sum(
            _packed_bytes(weight, variant.quantize) if id(weight) in packed else weight.nbytes
            for weight in block.parameters()
            if not weight.requires_grad
        )
        for block in blocks
    ]


def _sharded_bytes(denoiser: nn.Module, base: Sequence[Tensor], num_processes: int) -> int:
    """Return the bytes of a share of the base weights, and of the blocks that are gathered at a time."""
    blocks = [
        num_bytes(weight for weight in block.parameters() if not weight.requires_grad)
        for block in repeated_blocks(denoiser).values()
    ]
    total = num_bytes(base)

    # Weights outside of blocks stay gathered for the complete pass.
    return total // num_processes + total - sum(blocks) + _NUM_GATHERED * max(blocks, default=0)


def _packed_bytes(weight: Tensor, kind: str) -> int:
    """Return the bytes of a packed weight: 4 bits with scales per block, or 8 bits with a scale per row."""
    if kind == "nf4":
        return int(weight.numel() * _NF4_BYTES)
    return weight.numel() + weight.shape[0] * weight.element_size()


def optimizer_bytes_per_weight(settings: TrainingSettings) -> float:
    """Return the size of an optimizer's state per trained weight, measured on a small matrix."""
    if settings.optimizer.endswith("8bit"):
        return _EIGHT_BIT_STATE_BYTES
    weight = nn.Parameter(torch.ones(PROBE_EDGE, PROBE_EDGE))
    weight.grad = torch.ones_like(weight)
    optimizer = make_optimizer([weight], settings)
    optimizer.step()
    state = [value for value in optimizer.state[weight].values() if isinstance(value, Tensor)]
    return num_bytes(state) / weight.numel()
