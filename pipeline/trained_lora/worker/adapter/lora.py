"""The adapter: small weights that peft puts beside the frozen base weights of the denoiser."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.loha import LoHaLayer
from peft.tuners.lokr import LoKrLayer
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from pipeline.errors import TrainingError, counted
from pipeline.trained_lora.plan.seeding import hash_bits
from pipeline.trained_lora.worker.adapter.targets import rank_patterns, target_modules

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin

    from pipeline.recipe import LoraSettings

ADAPTER = "default"
"""peft's name of the adapter that is trained."""

FROZEN_ADAPTER = "at_start"
"""Of one beside it that never changes: what takes off the part of the base weights that it began as."""

_START_PREFIX = f"{FROZEN_ADAPTER}:"

Adapted: TypeAlias = LoraLayer | LoHaLayer | LoKrLayer
"""A module with an adapter."""

AdapterConfig: TypeAlias = LoraConfig | LoHaConfig | LoKrConfig
"""What peft calls the settings of an adapter."""


def add_lora(denoiser: ModelMixin, settings: LoraSettings, *, targets: list[str], seed: int) -> AdapterConfig:
    """Freeze the denoiser and put a fresh adapter on the modules that the settings choose.

    The new weights are float32 whatever the base's dtype (FAILURES R10), drawn from `seed`; the delta weights
    are zero. Global random state is left as it was.

    Args:
        denoiser: A diffusers model; changed in place.
        settings: Size, modules and kind.
        targets: Endings of module names: what the settings mean by the family's modules.
        seed: Of the first weights that are not zero.

    Returns:
        The configuration that was used.

    Raises:
        TrainingError: No module, or none of some pattern, is there.
    """
    denoiser.requires_grad_(False)
    chosen = target_modules(denoiser, settings, targets)
    ranks, alphas = rank_patterns(denoiser, chosen, settings)
    asked = targets if settings.family_modules else chosen
    config = _config(settings, asked, ranks, cast("dict[str, int]", alphas))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash_bits(32, seed, "lora"))
        denoiser.add_adapter(config, adapter_name=ADAPTER)
    have = [name for name, _ in lora_modules(denoiser)]
    assert have == chosen, f"peft adapted {sorted({*have} ^ {*chosen})} differently"
    for weight in trainable_weights(denoiser):
        weight.data = weight.data.float()
    return config


def _config(
    settings: LoraSettings, targets: list[str], ranks: dict[str, int], alphas: dict[str, int]
) -> AdapterConfig:
    alpha = cast("int", settings.alpha)  # peft computes with any number
    if settings.kind != "lora":
        values: dict[str, Any] = {"r": settings.rank, "alpha": alpha, "target_modules": targets}
        values |= {"rank_pattern": ranks, "alpha_pattern": alphas}
        if settings.kind == "loha":
            return LoHaConfig(**values)
        return LoKrConfig(**values, decompose_factor=settings.kronecker_factor)
    return LoraConfig(
        r=settings.rank,
        lora_alpha=alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        use_dora=settings.dora,
        use_rslora=settings.rslora,
        init_lora_weights="gaussian" if settings.init == "gaussian" else True,
    )


def trainable_weights(denoiser: nn.Module) -> list[nn.Parameter]:
    """The adapter's weights, in the model's order; everything else is frozen."""
    return [weight for weight in denoiser.parameters() if weight.requires_grad]


def adapter_state(denoiser: nn.Module) -> dict[str, Tensor]:
    """The adapter's weights by peft's names ("<module>.lora_A.weight"): float32 copies on the CPU.

    Those of the fixed adapter beside it, if there is one, have "at_start:" before their names.
    """
    state = {
        f"{prefix}{name}": weight
        for adapter, prefix in _adapters(denoiser)
        for name, weight in get_peft_model_state_dict(denoiser, adapter_name=adapter).items()
    }
    return {
        name: weight.detach().float().cpu().clone().contiguous() for name, weight in sorted(state.items())
    }


def load_adapter_state(denoiser: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put back what `adapter_state` gave.

    Raises:
        TrainingError: A weight is missing, unknown, or of another shape.
    """
    have = {name: tuple(weight.shape) for name, weight in adapter_state(denoiser).items()}
    given = {name: tuple(weight.shape) for name, weight in state.items()}
    if have != given:
        names = sorted(name for name in {*have, *given} if have.get(name) != given.get(name))
        fix = "delete the checkpoint; if it comes back, report it as a defect"
        weights = counted(len(names), "weight is", "weights are")
        what = f"{weights} not as this adapter has them, the first is {names[0]}"
        raise TrainingError(what, where="the saved adapter", fix=fix)
    for adapter, prefix in _adapters(denoiser):
        own = {
            name.removeprefix(prefix): weight
            for name, weight in state.items()
            if name.startswith(_START_PREFIX) == bool(prefix)
        }
        set_peft_model_state_dict(denoiser, own, adapter_name=adapter)


def _adapters(denoiser: nn.Module) -> list[tuple[str, str]]:
    """(peft's name, what stands before the names of its weights in `adapter_state`) of each adapter."""
    have = cast("Any", denoiser).peft_config
    return [(ADAPTER, ""), (FROZEN_ADAPTER, _START_PREFIX)] if FROZEN_ADAPTER in have else [(ADAPTER, "")]


def lora_modules(denoiser: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """(name, module) of each module with an adapter, in the model's order."""
    for name, module in denoiser.named_modules():
        if isinstance(module, LoraLayer | LoHaLayer | LoKrLayer):
            yield name, module


def delta_weights(denoiser: nn.Module, adapter: str = ADAPTER) -> dict[str, Callable[[], Tensor]]:
    """What computes each of `delta_weights`, of the adapter as it will be by then."""
    return {
        name: partial(_delta, module, adapter)
        for name, module in lora_modules(denoiser)
        if adapter in module.r
    }


def frozen_delta_sizes(denoiser: nn.Module) -> dict[str, float]:
    """The largest delta weight that a fixed adapter takes off, by module; empty where there is none."""
    with torch.no_grad():
        return {
            name: float(_added(module, FROZEN_ADAPTER).abs().max())
            for name, module in lora_modules(denoiser)
            if FROZEN_ADAPTER in module.r
        }


def has_magnitude(module: Adapted, adapter: str = ADAPTER) -> bool:
    """Whether the module is adapted with DoRA."""
    return isinstance(module, LoraLayer) and adapter in module.lora_magnitude_vector


def magnitudes(denoiser: nn.Module, adapter: str = ADAPTER) -> dict[str, Tensor]:
    """DoRA's lengths of the rows of each adapted weight, (rows,) float32 on the CPU; empty without DoRA."""
    return {
        name: cast("Any", module).lora_magnitude_vector[adapter].weight.detach().float().cpu().flatten()
        for name, module in lora_modules(denoiser)
        if has_magnitude(module, adapter)
    }


def row_lengths(denoiser: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Euclidean lengths of the rows of each module's weight, without and with `delta_weights` added.

    Quantised weights are unpacked for it. Each is (rows,), float32 on the CPU.
    """
    lengths: dict[str, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for name, module in lora_modules(denoiser):
            weight = dequantize_module_weight(cast("Any", module).get_base_layer()).float().flatten(1).cpu()
            adapted = weight + _delta(module, ADAPTER).flatten(1)
            lengths[name] = (weight.norm(dim=1), adapted.norm(dim=1))
    return lengths


@torch.no_grad()
def _delta(module: Adapted, adapter: str) -> Tensor:
    delta = _added(module, adapter)
    if adapter == ADAPTER and FROZEN_ADAPTER in module.r:
        delta = delta + _added(module, FROZEN_ADAPTER)
    return delta


def _added(module: Adapted, adapter: str) -> Tensor:
    """What one adapter adds to the module's weight.

    A LoRA's product is that of `lora_files`, and not peft's, which of a convolution is one itself: a
    GPU computes that with 10 bits of each factor.
    """
    adapted = cast("Any", module)  # peft's base class does not declare it; each of its layers has it.
    if not isinstance(module, LoraLayer):
        return adapted.get_delta_weight(adapter).float().cpu()
    down, up = (side[adapter].weight.float().cpu() for side in (adapted.lora_A, adapted.lora_B))
    return (adapted.scaling[adapter] * (up.flatten(1) @ down.flatten(1))).reshape(len(up), *down.shape[1:])


T = TypeVar("T")

Networks: TypeAlias = Mapping[str, nn.Module]
"""By what stands before the paths of their modules: nothing for the denoiser, which comes first, and the
component's name and a dot for a text encoder."""


def adapted_networks(denoiser: nn.Module, text_encoders: Mapping[str, nn.Module]) -> Networks:
    """The denoiser and the text encoders, these by component."""
    return {"": denoiser, **{f"{role}.": encoder for role, encoder in text_encoders.items()}}


def collect(networks: Networks, ask: Callable[[nn.Module], Mapping[str, T]]) -> dict[str, T]:
    """What `ask` says of each network, by names that say which; a name begins with that of a module."""
    return {
        f"{prefix}{name}": value
        for prefix, network in networks.items()
        for name, value in ask(network).items()
    }


def load_networks_state(networks: Networks, state: Mapping[str, Tensor]) -> None:
    """Put back what `collect` gave of `adapter_state`.

    Raises:
        TrainingError: A weight is missing, unknown, or of another shape.
    """
    others = tuple(prefix for prefix in networks if prefix)
    for prefix, network in networks.items():
        own = {
            name.removeprefix(prefix): weight
            for name, weight in state.items()
            if (name.startswith(prefix) if prefix else not name.startswith(others))
        }
        load_adapter_state(network, own)
