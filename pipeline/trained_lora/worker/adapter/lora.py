"""The adapter that peft adds to a network: its creation, its saved state and its delta weights.

A network is the denoiser or a text encoder. Weights are named as by peft: "<module>.lora_A.weight".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from peft import (
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.loha import LoHaLayer
from peft.tuners.lokr import LoKrLayer
from peft.tuners.lora import Linear, LoraLayer
from peft.tuners.oft import OFTLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipeline.errors import TrainingError, counted
from pipeline.models.worker.offload.streamed_blocks import streamed_blocks, weights_loaded
from pipeline.trained_lora.plan.random_streams import hash_bits
from pipeline.trained_lora.worker.adapter.rank_dropout import add_dropouts
from pipeline.trained_lora.worker.adapter.targets import rank_patterns, require_rotatable, target_modules

if TYPE_CHECKING:
    from diffusers.models.modeling_utils import ModelMixin
    from transformers import PreTrainedModel

    from pipeline.recipe import LoraSettings

T = TypeVar("T")

ADAPTER = "default"
"""peft's name of the trained adapter."""

FROZEN_ADAPTER = "at_start"
"""peft's name of the frozen adapter of PiSSA and OLoRA, see `svd_init`."""

_FROZEN_PREFIX = f"{FROZEN_ADAPTER}:"

Adapted: TypeAlias = LoraLayer | LoHaLayer | LoKrLayer | OFTLayer
"""A module with an adapter."""

AdapterConfig: TypeAlias = LoraConfig | LoHaConfig | LoKrConfig | OFTConfig
"""peft's configuration of an adapter."""

Networks: TypeAlias = Mapping[str, nn.Module]
"""Networks with adapters by their prefix, which their weights' names have in a checkpoint.

The prefix is "" for the denoiser, which comes first, and "<component>." for a text encoder.
"""


def add_lora(
    network: ModelMixin | PreTrainedModel, settings: LoraSettings, *, targets: list[str], seed: int
) -> AdapterConfig:
    """Freeze the network and add a fresh adapter to the modules that the settings select.

    The new weights are float32 for any base dtype and depend only on `seed`; the delta weights are zero.
    `targets` are the endings of module paths that `targets: family` selects. Returns peft's configuration.

    Raises:
        TrainingError: No module is selected, a pattern matches none, or the kind cannot adapt a module.
    """
    network.requires_grad_(False)
    selected = target_modules(network, settings, targets)
    if settings.kind == "oft":
        require_rotatable(network, selected, settings)
    ranks, alphas = rank_patterns(network, selected, settings)
    config_targets = targets if settings.family_modules else selected
    config = _config(settings, config_targets, ranks, cast("dict[str, int]", alphas))
    if isinstance(config, LoraConfig) and getattr(network, "is_loaded_in_4bit", False):
        _avoid_clones(config)

    # The weights depend on the seed alone, whatever has drawn from torch's generator before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash_bits(32, seed, "lora"))
        add_adapter(network, config)

    _leave_casts_to_autocast(network)

    # peft matches the targets by its own rules, so its choice is compared.
    adapted = [name for name, _ in lora_modules(network)]
    assert adapted == selected, f"peft adapted other modules: {sorted({*adapted} ^ {*selected})}"
    if settings.dora and streamed_blocks(network) is not None:
        _init_streamed_magnitudes(network)
    if settings.rank_dropout or settings.module_dropout:
        for _, module in lora_modules(network):
            add_dropouts(module, ADAPTER, settings)
    for weight in trainable_weights(network):
        # peft creates the adapter in the base weights' dtype. Small updates would vanish in half precision,
        # and fp16's gradient scaler refuses such weights (FAILURES R10).
        weight.data = weight.data.float()
    return config


class _LoraOn4Bits(Linear):
    """peft's layer for unpacked weights, on a layer of bitsandbytes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        # As peft's layer for 4 bits under autocast, which casts inputs itself.
        self.cast_input_dtype_enabled = False


def _avoid_clones(config: LoraConfig) -> None:
    from bitsandbytes.nn import Linear4bit

    # peft's layer for 4 bits clones each output, in case that it is changed in place. The LoRA's output is
    # added out of place, by the same operators as on unpacked weights. Only DoRA has another dtype there.
    if not config.use_dora:
        config._register_custom_module({Linear4bit: _LoraOn4Bits})  # pyright: ignore[reportPrivateUsage] - peft documents it


def _leave_casts_to_autocast(network: nn.Module) -> None:
    """Pass inputs of half precision to LoRA layers as they are; adapted networks run under autocast."""
    # peft casts them to the LoRA's float32, and autocast casts them back: the same numbers, with two copies
    # of each input. Dropout would draw another mask for another dtype, and DoRA uses the cast input.
    for _, module in lora_modules(network):
        if isinstance(module, LoraLayer) and not module.lora_variant:
            dropouts = module.lora_dropout.values()
            if all(isinstance(dropout, nn.Identity) for dropout in dropouts):
                module.cast_input_dtype_enabled = False


def add_adapter(network: nn.Module, config: AdapterConfig) -> None:
    """Add peft's adapter of this configuration to the network of diffusers or transformers."""
    with warnings.catch_warnings():
        # peft warns for each layer with inputs that OFT's block size does not divide, which is usual.
        warnings.filterwarnings("ignore", "Invalid `oft_block_size`", UserWarning)
        cast("Any", network).add_adapter(config, adapter_name=ADAPTER)


def _init_streamed_magnitudes(network: nn.Module) -> None:
    # peft reads the base weights when it creates a DoRA, and streamed weights are not readable then.
    for name, module in lora_modules(network):
        layer = cast("Any", module)
        with weights_loaded(network, name):
            layer.lora_magnitude_vector[ADAPTER].update_layer(
                base_layer=layer.get_base_layer(),
                lora_A=layer.lora_A[ADAPTER].weight,
                lora_B=layer.lora_B[ADAPTER].weight,
                scaling=layer.scaling[ADAPTER],
            )


def _config(
    settings: LoraSettings, targets: list[str], ranks: dict[str, int], alphas: dict[str, int]
) -> AdapterConfig:
    if settings.kind == "oft":
        return OFTConfig(oft_block_size=settings.rotation_block, target_modules=targets)
    alpha = cast("int", settings.alpha)  # peft declares int, but accepts any number
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


def trainable_weights(network: nn.Module) -> list[nn.Parameter]:
    """Return the adapter's weights in the model's order; all other weights are frozen."""
    return [weight for weight in network.parameters() if weight.requires_grad]


def lora_modules(network: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """Yield (path, module) of each adapted module, in the model's order."""
    for name, module in network.named_modules():
        if isinstance(module, Adapted):
            yield name, module


def adapter_state(network: nn.Module) -> dict[str, Tensor]:
    """Return copies of the adapter's weights under peft's names, sorted: float32 on the CPU.

    Names of a frozen adapter's weights begin with "at_start:".
    """
    state = {
        f"{prefix}{name}": weight
        for adapter, prefix in _adapters(network)
        for name, weight in get_peft_model_state_dict(network, adapter_name=adapter).items()
    }
    return {
        name: weight.detach().float().cpu().clone().contiguous() for name, weight in sorted(state.items())
    }


def load_adapter_state(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what `adapter_state` returned.

    Raises:
        TrainingError: A weight is missing, unknown, or has another shape.
    """
    # peft ignores missing and unknown names, so they are compared first.
    expected = {name: tuple(weight.shape) for name, weight in adapter_state(network).items()}
    given = {name: tuple(weight.shape) for name, weight in state.items()}
    if expected != given:
        names = sorted(name for name in {*expected, *given} if expected.get(name) != given.get(name))
        raise TrainingError(
            f"{counted(len(names), 'saved weight does', 'saved weights do')} not match the adapter, "
            f"the first is {names[0]}",
            where="the saved adapter",
            fix="delete the checkpoint; if the error returns, report a defect",
        )
    for adapter, prefix in _adapters(network):
        adapter_weights = {
            name.removeprefix(prefix): weight
            for name, weight in state.items()
            if name.startswith(_FROZEN_PREFIX) == bool(prefix)
        }
        set_peft_model_state_dict(network, adapter_weights, adapter_name=adapter)


def _adapters(network: nn.Module) -> list[tuple[str, str]]:
    """Return (peft's name, prefix of its weights in `adapter_state`) of each adapter."""
    names = cast("Any", network).peft_config
    trained = [(ADAPTER, "")]
    return [*trained, (FROZEN_ADAPTER, _FROZEN_PREFIX)] if FROZEN_ADAPTER in names else trained


def adapted_networks(denoiser: nn.Module, text_encoders: Mapping[str, nn.Module]) -> Networks:
    """Return the denoiser and the text encoders, which are given by component, by their prefixes."""
    return {"": denoiser, **{f"{role}.": encoder for role, encoder in text_encoders.items()}}


def collect(networks: Networks, read: Callable[[nn.Module], Mapping[str, T]]) -> dict[str, T]:
    """Merge `read` of all networks into one dict; the networks' prefixes make the names unique."""
    return {
        f"{prefix}{name}": value
        for prefix, network in networks.items()
        for name, value in read(network).items()
    }


def load_networks_state(networks: Networks, state: Mapping[str, Tensor]) -> None:
    """Load `collect(networks, adapter_state)`."""
    # The denoiser has an empty prefix, so its weights are the ones without the prefix of a text encoder.
    text_prefixes = tuple(prefix for prefix in networks if prefix)
    for prefix, network in networks.items():
        network_state = {
            name.removeprefix(prefix): weight
            for name, weight in state.items()
            if (name.startswith(prefix) if prefix else not name.startswith(text_prefixes))
        }
        load_adapter_state(network, network_state)


@contextmanager
def scaled_adapters(networks: Networks, factor: float) -> Generator[None]:
    """Multiply the effect of all adapters by `factor` within the context; 0 disables them."""
    modules = [layer for network in networks.values() for _, layer in lora_modules(network)]
    layers = [layer for layer in modules if not isinstance(layer, OFTLayer)]
    scales = [dict(layer.scaling) for layer in layers]

    # A factor of 0 would keep DoRA's magnitudes. Enabling a frozen adapter again would make it trainable.
    disabled = [
        cast("Any", network)
        for network in networks.values()
        if factor == 0.0 and len(_adapters(network)) == 1
    ]
    for network in disabled:
        network.disable_adapters()
    for layer, scale in zip(layers, scales, strict=True):
        # The frozen adapter of PiSSA and OLoRA is scaled too, because it subtracts the initial weights.
        layer.scaling.update({name: factor * own for name, own in scale.items()})
    with ExitStack() as rotations:
        for layer in modules:
            if isinstance(layer, OFTLayer) and factor != 1.0:
                rotations.callback(scale_rotation(layer, factor).remove)
        try:
            yield
        finally:
            for layer, scale in zip(layers, scales, strict=True):
                layer.scaling.update(scale)
            for network in disabled:
                network.enable_adapters()


def scale_rotation(layer: OFTLayer, factor: float) -> RemovableHandle:
    """Multiply the effect of a layer's rotation by `factor` until the handle is removed.

    With the rotation R of the inputs x, the layer gets x + factor * (x R - x). peft has no scale of its own
    for it, and this is what the extension of ComfyUI computes (https://github.com/Koratahiu/ComfyUI-OFTv2).
    """

    def scaled(_module: nn.Module, inputs: tuple[Tensor, ...], rotated: Tensor) -> Tensor:
        return torch.lerp(inputs[0], rotated, factor)

    return layer.oft_R[ADAPTER].register_forward_hook(scaled)


def delta_weights(network: nn.Module, adapter: str = ADAPTER) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute the adapter's delta of each module's weight, by module.

    A delta weight includes the scale, and the frozen adapter's part if there is one: float32 on the CPU.
    """
    # Functions, because all delta weights of a large model together are larger than the model.
    return {
        name: partial(_delta, module, adapter)
        for name, module in lora_modules(network)
        if adapter in module.r
    }


def frozen_delta_sizes(network: nn.Module) -> dict[str, float]:
    """Return the largest absolute delta weight of the frozen adapter by module; empty without one."""
    with torch.no_grad():
        return {
            name: float(_adapter_delta(module, FROZEN_ADAPTER).abs().max())
            for name, module in lora_modules(network)
            if FROZEN_ADAPTER in module.r
        }


def has_magnitude(module: Adapted, adapter: str = ADAPTER) -> bool:
    """Return whether the module's adapter has a magnitude vector, which makes it a DoRA."""
    return isinstance(module, LoraLayer) and adapter in module.lora_magnitude_vector


def row_norms(network: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the Euclidean norms of each weight's rows, without and with its delta weight, by module.

    Each is (rows,), float32 on the CPU. Quantised weights are dequantised.
    """
    norms: dict[str, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for name, module in lora_modules(network):
            with weights_loaded(network, name):
                # Streamed weights are readable within this context only.
                base = dequantize_module_weight(cast("Any", module).get_base_layer())
                weight = base.float().flatten(1).cpu()
                adapted = weight + _delta(module, ADAPTER).flatten(1)
                norms[name] = (weight.norm(dim=1), adapted.norm(dim=1))
    return norms


@torch.no_grad()
def _delta(module: Adapted, adapter: str) -> Tensor:
    delta = _adapter_delta(module, adapter)
    if adapter == ADAPTER and FROZEN_ADAPTER in module.r:
        delta = delta + _adapter_delta(module, FROZEN_ADAPTER)
    return delta


def _adapter_delta(module: Adapted, adapter: str) -> Tensor:
    layer = cast("Any", module)  # peft's layers have `get_delta_weight`, their base class does not declare it
    assert not isinstance(module, OFTLayer), "a rotation multiplies the base weight, and adds nothing to it"
    if not isinstance(module, LoraLayer):
        return layer.get_delta_weight(adapter).float().cpu()

    # peft computes the product of a convolution's factors as a convolution, which a GPU does with 10 bits per
    # factor (TF32). A matrix product on the CPU is exact to float32.
    down, up = (side[adapter].weight.float().cpu() for side in (layer.lora_A, layer.lora_B))
    return (layer.scaling[adapter] * (up.flatten(1) @ down.flatten(1))).reshape(len(up), *down.shape[1:])
