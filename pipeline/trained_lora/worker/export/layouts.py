"""The adapter in the layouts of kohya and ComfyUI, in both directions; `lora_files` draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline.errors import TrainingError, counted
from pipeline.trained_lora.export.lora_files import Layout, LoraModule, factors, stored_magnitudes
from pipeline.trained_lora.worker.adapter.lora import ADAPTER, Adapted, Networks, has_magnitude, lora_modules
from pipeline.trained_lora.worker.adapter.to_lora import lora_shapes

if TYPE_CHECKING:
    from pipeline.models.families import Family

Effects: TypeAlias = Mapping[str, Callable[[], Tensor]]
"""What an adapter does, by module: its delta weight; and with DoRA, as "<module> rows", what each row of the
sum of base and delta weight is multiplied by."""

Lengths: TypeAlias = Mapping[str, tuple[Tensor, Tensor]]
"""Of rows, without and with the delta weight, by module, as `row_lengths` gives them; empty without DoRA."""

DEFECT = "report this as a defect, with the versions of diffusers and peft; the last checkpoint is kept"


def describe_all(family: Family, networks: Networks) -> list[LoraModule]:
    """`describe_modules` of the denoiser, and the modules of the text encoders that have an adapter.

    Raises:
        FamilyError: One has no name in a layout.
        TrainingError: As `describe_modules`.
    """
    # Where none is trained, the base model's text encoders need not be there.
    clips = family.trainable_text_encoders() if len(networks) > 1 else {}
    described: list[LoraModule] = []
    for prefix, network in networks.items():
        if not prefix:
            described += describe_modules(family, network)
            continue
        role = prefix.removesuffix(".")
        for name, module in lora_modules(network):
            diffusers, kohya, comfyui = clips[role].keys(role, name)
            keys = {"diffusers": diffusers, "kohya": kohya, "comfyui": comfyui}
            described.append(_described(f"{prefix}{name}", module, **keys))
    return described


def describe_modules(family: Family, denoiser: nn.Module) -> list[LoraModule]:
    """The modules of the denoiser that have an adapter, with their names in each layout.

    Raises:
        FamilyError: One has no name in a layout.
        TrainingError: Parts of one layer of kohya's have adapters that it cannot hold together.
    """
    described: list[LoraModule] = []
    for name, module in lora_modules(denoiser):
        layer = family.kohya_layer(name)
        outs = tuple(_out_features(denoiser, part) for part in layer.modules)
        diffusers = f"{family.denoiser_name}.{name}"
        keys = {"diffusers": diffusers, "kohya": layer.key, "comfyui": family.comfyui_key(name)}
        part = layer.modules.index(name)
        described.append(
            replace(
                _described(name, module, **keys),
                kohya_part=part,
                kohya_outs=outs if len(outs) > 1 else (),
            )
        )
    _require_layers_that_fit(described)
    return described


def _described(name: str, module: Adapted, *, diffusers: str, kohya: str, comfyui: str) -> LoraModule:
    """The module, as a layer of its own in kohya's layout."""
    down, up = lora_shapes(module)
    return LoraModule(
        name=name,
        diffusers=diffusers,
        kohya=kohya,
        comfyui=comfyui,
        in_features=down[1],
        out_features=up[0],
        rank=down[0],
        alpha=float(cast("Any", module).scaling[ADAPTER]) * down[0],
        kernel=down[2:],
        magnitude=has_magnitude(module),
    )


def _out_features(denoiser: nn.Module, module: str) -> int:
    """Rows of the module's weight; the shape of one that bitsandbytes has packed says nothing of them."""
    layer = denoiser.get_submodule(module)
    base = cast("Any", layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer)
    return int(base.out_channels if isinstance(base, nn.Conv2d) else base.out_features)


def _require_layers_that_fit(modules: list[LoraModule]) -> None:
    trained = Counter(module.kohya for module in modules)
    sizes: dict[str, tuple[int, float]] = {}
    for module in modules:
        size = (module.rank, module.alpha)
        if sizes.setdefault(module.kohya, size) != size:
            what = f"parts of kohya's layer {module.kohya} have several ranks or alphas"
            fix = f"give all of them one entry of training.lora.ranks; {module.name} is one of them"
            raise TrainingError(what, where="training.lora.ranks", fix=fix)
        if module.magnitude and module.kohya_outs and trained[module.kohya] < len(module.kohya_outs):
            what = f"DoRA needs every part of kohya's layer {module.kohya}, and not {module.name} alone"
            fix = "let training.lora.modules fit query, key and value together, or set dora: false"
            raise TrainingError(what, where="training.lora.modules", fix=fix)


def layout_tensors(
    layout: Layout, modules: list[LoraModule], state: Mapping[str, Tensor], lengths: Lengths
) -> dict[str, Tensor]:
    """The tensors of a file in kohya's or ComfyUI's layout.

    Args:
        layout: Not that of diffusers, which peft and diffusers make.
        modules: All that have an adapter.
        state: Its weights, or those of the LoRA that it equals, by peft's names.
        lengths: Of the same adapter.
    """
    tensors: dict[str, Tensor] = {}
    for module in modules:
        for key, shape in module.shapes(layout).items():
            tensors.setdefault(key, torch.zeros(shape))
        down, up = factors(tensors, module, layout)
        down.copy_(state[f"{module.name}.lora_A.weight"])
        up.copy_(state[f"{module.name}.lora_B.weight"])
        down_key, _, alpha_key = module.keys(layout)
        assert alpha_key is not None
        num_parts = tensors[down_key].shape[0] // module.rank
        tensors[alpha_key] = torch.tensor(module.alpha * num_parts)
        if module.magnitude:
            trained = state[f"{module.name}.lora_magnitude_vector"].flatten()
            before, after = lengths[module.name]
            stored = trained * (before / after) if layout == "comfyui" else trained
            stored_magnitudes(tensors, module, layout).copy_(stored)
    return tensors


def effects(
    deltas: Mapping[str, Callable[[], Tensor]], trained: Mapping[str, Tensor], lengths: Lengths
) -> Effects:
    """What delta weights and DoRA's trained lengths come to, the two as `lora` gives them."""
    rows = {f"{name} rows": partial(torch.div, each, lengths[name][1]) for name, each in trained.items()}
    return {**deltas, **rows}


def effects_by_rule(path: Path, modules: list[LoraModule], layout: Layout, lengths: Lengths) -> Effects:
    """What a reader of a file in kohya's or ComfyUI's layout makes of it.

    Raises:
        TrainingError: Keys are missing or unknown.
    """
    tensors = load_file(path)
    expected = {key for module in modules for key in module.shapes(layout)}
    if set(tensors) != expected:
        odd = sorted(set(tensors) ^ expected)
        what = f"{counted(len(odd), 'key is', 'keys are')} missing or unknown, the first is {odd[0]}"
        raise TrainingError(what, where=str(path), fix=DEFECT)
    found: dict[str, Callable[[], Tensor]] = {}
    for module in modules:
        found[module.name] = partial(_delta_by_rule, tensors, module, layout)
        if module.magnitude:
            before, after = lengths[module.name]
            divided_by = before if layout == "comfyui" else after
            stored = stored_magnitudes(tensors, module, layout)
            found[f"{module.name} rows"] = partial(torch.div, stored, divided_by)
    return found


def _delta_by_rule(tensors: Mapping[str, Tensor], module: LoraModule, layout: Layout) -> Tensor:
    down, up = factors(tensors, module, layout)
    down_key, _, alpha_key = module.keys(layout)
    assert alpha_key is not None
    scale = float(tensors[alpha_key]) / tensors[down_key].shape[0]
    return scale * (up.flatten(1) @ down.flatten(1))
