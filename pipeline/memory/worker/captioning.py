"""Memory of a captioning model: its weights, and a pass over a batch of images with long captions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForImageTextToText

from pipeline.captions.worker.captioner import GPU_BATCH
from pipeline.captions.worker.processor import LOCAL, CaptionProcessor, explained, shown_examples
from pipeline.trained_lora.worker.memory.cuda_rules import CudaRules
from pipeline.trained_lora.worker.memory.live_memory import LiveMemory
from pipeline.trained_lora.worker.memory.skeletons import num_bytes, tensors_of

if TYPE_CHECKING:
    from pipeline.memory.job import CaptionerJob

_SCALE_BYTES = 4
"""Bytes of the scale that torchao stores for each row of an 8-bit weight."""


@dataclass(frozen=True)
class CaptionMemory:
    """Memory while images are captioned.

    Attributes:
        device: Peak bytes on the GPU.
        host: Bytes of the weights as their files have them, through which they are read.
        note: Why `device` are the bytes of the weights alone; empty if they are not.
    """

    device: int
    host: int
    note: str = ""


def caption_memory(job: CaptionerJob, *, quantize: str | None) -> CaptionMemory:
    """Return the memory of a captioning model for images of `captions.resolution` squared.

    `quantize` replaces `captions.quantize`.

    Raises:
        ModelError: transformers cannot load the processor or the configuration.
    """
    model = _skeleton(job.folder, job.dtype)
    packed = [] if quantize is None else _packable(model)
    host = num_bytes(tensors_of(model))
    packed_bytes = sum(each.numel() + each.shape[0] * _SCALE_BYTES for each in packed)
    weights = host - num_bytes(packed) + packed_bytes

    inputs = _longest_inputs(job)
    try:
        # The images of a batch take the same memory each. A packed weight is unpacked while it is used.
        passes = GPU_BATCH * _pass_bytes(model, inputs) + max((each.nbytes for each in packed), default=0)
    # The code of a model may do anything that the meta device does not support.
    except Exception as err:
        reason = f"{type(err).__name__}: {str(err).partition(chr(10))[0][:100]}"
        return CaptionMemory(weights, host, f"weights alone: passes of {type(model).__name__} give {reason}")
    return CaptionMemory(weights + passes, host)


def _skeleton(folder: Path, dtype: str) -> nn.Module:
    """Return the model on the meta device, in evaluation mode."""

    def create(attention: str) -> nn.Module:
        config = AutoConfig.from_pretrained(folder, **LOCAL)
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(
                config,
                attn_implementation=attention,
                dtype=getattr(torch, dtype),
                trust_remote_code=False,
            )

    with explained(folder):
        try:
            model = create("sdpa")
        except ValueError as err:
            # As for the captioner: some classes have no other implementation than their own.
            if "scaled_dot_product_attention" not in str(err):
                raise
            model = create("eager")
    return model.requires_grad_(False).eval()


def _packable(model: Any) -> list[Tensor]:
    """Return the weights that transformers quantizes: of all linear layers but the one for the logits."""
    logits = model.get_output_embeddings()
    return [
        module.weight for module in model.modules() if isinstance(module, nn.Linear) and module is not logits
    ]


def _longest_inputs(job: CaptionerJob) -> dict[str, Tensor]:
    """Return the inputs for one image and its longest caption."""
    captions = job.captions
    image = Image.new("RGB", (captions.resolution, captions.resolution), "gray")
    examples = shown_examples(job.examples, (0, 0, 0))
    inputs = CaptionProcessor(job.folder).inputs([image], captions.prompt, examples)
    longer: dict[str, Tensor] = {}
    for name, tensor in inputs.items():
        value: Tensor = tensor
        if value.is_floating_point():
            value = value.to(getattr(torch, job.dtype))
        elif value.shape == inputs["input_ids"].shape:
            # Tokens of a caption are text: they have the last token's kind, and are attended to.
            value = torch.cat([value, value[:, -1:].expand(-1, captions.max_tokens)], dim=1)
        longer[name] = value
    return longer


def _pass_bytes(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Return the peak bytes of a pass over all tokens, with the keys and values that it keeps."""
    memory = LiveMemory(without=tensors_of(model))
    with memory, CudaRules(None, count=memory.count), _NoPadding(), torch.inference_mode():
        model(**inputs, use_cache=True, logits_to_keep=1)
    # The images are on the CPU in this pass, where their values decide shapes.
    return memory.peak_bytes + num_bytes(inputs.values())


class _NoPadding(TorchFunctionMode):
    """Gives masks the values that they have for images of one size without padding: all true."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given, name = kwargs or {}, func.__name__
        first = args[0] if args else None
        if name == "__bool__" and _is_meta(first):
            return True
        if (
            name == "to"
            and isinstance(first, Tensor)
            and not first.is_floating_point()
            and not _is_meta(first)
        ):
            # Ids of tokens and the masks made of them stay where they have values.
            return first
        if name == "__getitem__" and _is_meta(args[1]) and args[1].dtype == torch.bool:
            return args[0].reshape(-1, *args[0].shape[args[1].ndim :])
        return func(*args, **given)


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"
