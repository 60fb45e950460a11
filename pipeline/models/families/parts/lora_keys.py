"""Names of LoRA layers in the files of diffusers, kohya's tools and ComfyUI, and the modules to adapt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import FamilyError
from pipeline.models.diffusers_folder import ModelFolder

_CLIP_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
_CLIP_FEED_FORWARD = ("mlp.fc1", "mlp.fc2")
# Prefix of layer paths in every LoRA file; not all of transformers' CLIP classes have it.
_CLIP_PREFIX = "text_model."

TextTargets = Literal["attention", "blocks"]


@dataclass(frozen=True)
class Layer:
    """A linear layer of a LoRA file's layout, which corresponds to one or more modules of the denoiser.

    Attributes:
        key: Key in the file, without `.lora_down.weight` and the like.
        modules: Dotted paths in the diffusers denoiser. The layer's output is the concatenation of their
            outputs, for example query, key and value of one attention. All take the same input.
    """

    key: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class ClipLora:
    """Names of an adapter on a CLIP text encoder.

    Attributes:
        kohya: Prefix of its keys in kohya's layout (`LoRANetwork` in networks/lora.py of
            github.com/kohya-ss/sd-scripts).
        comfyui: Name of the encoder in ComfyUI (`model_lora_keys_clip` in comfy/lora.py of
            github.com/comfyanonymous/ComfyUI, its "generic" keys).
        num_layers: Number of layers that the embeddings depend on; later layers would get no gradient.
    """

    kohya: str
    comfyui: str
    num_layers: int

    def targets(self, which: TextTargets) -> list[str]:
        """Return suffixes of the modules to adapt, for `peft.LoraConfig.target_modules`."""
        layers = _CLIP_ATTENTION if which == "attention" else (*_CLIP_ATTENTION, *_CLIP_FEED_FORWARD)
        return [f"encoder.layers.{number}.{layer}" for number in range(self.num_layers) for layer in layers]

    def keys(self, role: str, module: str) -> tuple[str, str, str]:
        """Return the module's keys for diffusers, kohya and ComfyUI, without `.lora_down.weight` etc.

        `module` is a dotted path in transformers' model.

        Raises:
            FamilyError: The module is not part of an encoder layer.
        """
        path = module.removeprefix(_CLIP_PREFIX)
        if not path.startswith("encoder.layers."):
            raise FamilyError(
                f"LoRA files cannot name the module {module} of {role}",
                where=role,
                fix="report this as a defect: only encoder layers get adapters",
            )
        full_path = _CLIP_PREFIX + path
        kohya = f"{self.kohya}_{full_path.replace('.', '_')}"
        return f"{role}.{full_path}", kohya, f"text_encoders.{self.comfyui}.transformer.{full_path}"


@dataclass(frozen=True)
class LoraKeys:
    """Layers that keep their diffusers paths: kohya's rule for any code, and ComfyUI's own translation.

    Attributes:
        target_modules: Suffixes of the modules that get an adapter by default.
        comfyui_prefix: Prefix of the path in ComfyUI's layout. With `transformer.`, ComfyUI translates
            diffusers' names itself; with `diffusion_model.`, its model has the same names.
        kohya_readable: Whether diffusers' loader of the family reads kohya's layout of this denoiser.
        kohya_note: Metadata of files in kohya's layout that names programs that read them only in part.
        diffusers_reads_comfyui: Whether diffusers applies files in ComfyUI's layout. Of other families it
            applies nothing, in part without a warning, or refuses the file.
    """

    target_modules: Sequence[str] | Callable[[ModelFolder], Sequence[str]]
    comfyui_prefix: str = "transformer."
    kohya_readable: bool | Callable[[ModelFolder], bool] = False
    kohya_note: str = ""
    diffusers_reads_comfyui: bool = False

    @property
    def max_parts(self) -> int:
        """Maximum number of modules that a layer of kohya's or ComfyUI's layout combines."""
        return 1

    def targets(self, model: ModelFolder) -> list[str]:
        """Return suffixes of the modules that get an adapter, for `peft.LoraConfig.target_modules`."""
        return list(self.target_modules(model) if callable(self.target_modules) else self.target_modules)

    def reads_kohya(self, model: ModelFolder) -> bool:
        """Return `kohya_readable` for this model."""
        return self.kohya_readable(model) if callable(self.kohya_readable) else self.kohya_readable

    def kohya_layer(self, model: ModelFolder, module: str) -> Layer:
        """Return the layer of kohya's LoRA files that corresponds to the module or contains it.

        `module` is a dotted path in the diffusers denoiser, such as `mid_block.attentions.0.proj_in`.

        Raises:
            FamilyError: Kohya's layout does not include the module.
        """
        return Layer(underscored(module), (module,))

    def comfyui_key(self, model: ModelFolder, module: str) -> str:
        """Return the module's key in ComfyUI's layout, without `.lora_down.weight` and the like.

        Raises:
            FamilyError: ComfyUI's layout does not include the module.
        """
        return self.comfyui_prefix + module


@dataclass(frozen=True)
class BlockNames:
    """Names of the layers in one kind of transformer block.

    Attributes:
        blocks: Regular expression of a block's path in the diffusers denoiser, without its number.
        layers: The original code's layers, each with the modules of diffusers' block it is stacked from.
        original: Name of this kind of block in kohya's layout; None if it is the same as in diffusers.
    """

    blocks: str
    layers: Mapping[str, tuple[str, ...]]
    original: str | None = None

    @property
    def modules(self) -> list[str]:
        """Paths of all modules in `layers`, within a block."""
        return [module for modules in self.layers.values() for module in modules]

    def layer(self, module: str) -> Layer | None:
        """Return the layer that contains the module, or None."""
        match = re.fullmatch(rf"({self.blocks})\.(\d+)\.(.+)", module)
        if match is None:
            return None

        block, number, path = match.groups()
        for name, modules in self.layers.items():
            if path in modules:
                key = underscored(f"{self.original or block}.{number}.{name}")
                return Layer(key, tuple(f"{block}.{number}.{each}" for each in modules))
        return None


@dataclass(frozen=True)
class StackedKeys(LoraKeys):
    """Layers that the original code stacks, such as query, key and value in one matrix.

    Attributes:
        blocks: Every kind of block with layers that have a name.
        comfyui_as_kohya: Whether ComfyUI's layout uses kohya's keys because its model has stacked layers.
    """

    blocks: tuple[BlockNames, ...] = ()
    comfyui_as_kohya: bool = False

    @property
    def max_parts(self) -> int:
        return max(len(modules) for names in self.blocks for modules in names.layers.values())

    def kohya_layer(self, model: ModelFolder, module: str) -> Layer:
        for names in self.blocks:
            if layer := names.layer(module):
                return layer
        raise FamilyError(
            f"kohya's layout does not include the module {module}",
            where=str(model.config_file("transformer")),
            fix="adapt only attention and feed-forward layers of transformer blocks, not their modulations",
        )

    def comfyui_key(self, model: ModelFolder, module: str) -> str:
        if self.comfyui_as_kohya:
            return self.kohya_layer(model, module).key
        return super().comfyui_key(model, module)


@dataclass(frozen=True, kw_only=True)
class RenamedKeys(LoraKeys):
    """Layers under their names in the original code, which ComfyUI and kohya's tools have too.

    Attributes:
        blocks: Folder of the blocks, in diffusers and in the original code, such as "transformer_blocks".
        in_blocks: Names of the original code by path below a block.
        outside: Names of the original code by path outside of blocks.
    """

    blocks: tuple[str, str]
    in_blocks: Mapping[str, str]
    outside: Mapping[str, str]

    def kohya_layer(self, model: ModelFolder, module: str) -> Layer:
        return Layer(underscored(self._original_path(model, module)), (module,))

    def comfyui_key(self, model: ModelFolder, module: str) -> str:
        return f"diffusion_model.{self._original_path(model, module)}"

    def _original_path(self, model: ModelFolder, module: str) -> str:
        own, original = self.blocks
        match = re.fullmatch(rf"{own}\.(\d+)\.(.+)", module)
        if match and match[2] in self.in_blocks:
            return f"{original}.{match[1]}.{self.in_blocks[match[2]]}"
        if module in self.outside:
            return self.outside[module]
        raise FamilyError(
            f"the original code's layout does not include the module {module}",
            where=str(model.config_file("transformer")),
            fix="adapt only linear layers of the transformer",
        )


def underscored(path: str) -> str:
    """Return kohya's key of a module path."""
    return "lora_unet_" + path.replace(".", "_")
