"""Caption images with a vision-language model of transformers, on one device, greedily.

On a CPU each image has forward passes of its own, so that a caption depends on its key alone. On a GPU,
images that the model gets in one size are captioned together: their inputs need no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, TorchAoConfig

from pipeline.cache.entry_format import CAPTION
from pipeline.cache.store import Store
from pipeline.captions.entries import CUT, FAILED, NUM_TOKENS, as_tensor
from pipeline.captions.examples import EXAMPLES
from pipeline.captions.worker.processor import LOCAL, CaptionProcessor, Example, explained, shown_examples
from pipeline.captions.worker.tagger import Tagger
from pipeline.encoding.jobs import Encoded, Encoding, Failure, Job, Outcome
from pipeline.encoding.progress import Progress
from pipeline.errors import LaunchError, ModelError
from pipeline.images.decode import load_pixels
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Crop, Geometry, Size
from pipeline.processes.worker.devices import out_of_memory_as
from pipeline.recipe.captions import CaptionSettings
from pipeline.storage.addresses import address
from pipeline.storage.remote_source import source_at
from pipeline.storage.source import MAX_TEXT_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.storage.source import Source

CaptionWriter: TypeAlias = Callable[[Sequence[Image.Image]], list[tuple[str, int, bool]]]
"""Returns for each image the text, its length, and whether it was cut off."""

GPU_BATCH = 8
"""Number of images of one size that are captioned together on a GPU."""


class Captioner:
    """A vision-language model with its processor on one device."""

    def __init__(self, folder: Path, dtype: str, device: str, *, quantize: str | None = None) -> None:
        """Load the model; raises ModelError if the folder has none that captions images.

        `quantize` is int8 or None.
        """
        self._device = device
        self._processor = CaptionProcessor(folder)
        with explained(folder):
            options = {"dtype": getattr(torch, dtype), **_quantization(quantize, device)}
            model = _load_model(folder, options)
        self._model = model.to(device).eval()
        ends = model.generation_config.eos_token_id
        ends = model.config.get_text_config().eos_token_id if ends is None else ends
        self._ends = {ends} if isinstance(ends, int) else set(ends or ())

    @property
    def takes_examples(self) -> bool:
        """See `CaptionProcessor.takes_examples`."""
        return self._processor.takes_examples

    def captions(
        self,
        images: Sequence[Image.Image],
        prompt: str,
        max_tokens: int,
        examples: Sequence[Example] = (),
    ) -> list[tuple[str, int, bool]]:
        """Return for each image the text, its number of tokens, and whether it was cut off.

        The images have one size. Prompt and text are separated as by transformers' pipeline for this task.
        `examples` require a chat template.
        """
        inputs = self._processor.inputs(images, prompt, examples).to(self._device, self._model.dtype)
        with torch.inference_mode():
            output: Tensor = self._model.generate(
                **inputs, do_sample=False, num_beams=1, max_new_tokens=max_tokens
            )
        texts = self._processor.decoded(output)
        prompts = self._processor.decoded(inputs["input_ids"])
        written = _written_tokens(output, inputs["input_ids"])
        return [
            (_without_prompt(text, before), *self._length(tokens))
            for text, before, tokens in zip(texts, prompts, written, strict=True)
        ]

    def _length(self, tokens: list[int]) -> tuple[int, bool]:
        """Return the number of tokens before the end, and whether there is none."""
        # A row that ends before the longest one is padded behind its end.
        length = next((index for index, token in enumerate(tokens) if token in self._ends), len(tokens))
        return length, length == len(tokens)


def _quantization(quantize: str | None, device: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that quantize linear layers while their weights are read."""
    if quantize is None:
        return {}
    from torchao.quantization import Int8WeightOnlyConfig

    return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig()), "device_map": device}


def _load_model(folder: Path, options: Mapping[str, Any]) -> Any:
    def load(attention: str) -> Any:
        # A configuration may name any attention implementation, also code in a repository on the Hub.
        # The argument replaces it only if the configuration is given apart.
        return AutoModelForImageTextToText.from_pretrained(
            folder,
            config=AutoConfig.from_pretrained(folder, **LOCAL),
            attn_implementation=attention,
            use_safetensors=True,
            **options,
            **LOCAL,
        )

    try:
        return load("sdpa")
    except ValueError as err:
        # Some classes, such as BLIP's, have no other implementation than their own.
        if "scaled_dot_product_attention" not in str(err):
            raise
        return load("eager")


def _written_tokens(output: Tensor, input_ids: Tensor) -> list[list[int]]:
    """Return the tokens that the model wrote for each image."""
    prompt = output[:, : input_ids.shape[1]]
    if torch.equal(prompt, input_ids):
        return output[:, input_ids.shape[1] :].tolist()
    # BLIP replaces the prompt's first token, and leaves out the one at its end.
    num_prompt = input_ids.shape[1] - 1
    if torch.equal(output[:, 1:num_prompt], input_ids[:, 1:num_prompt]):
        return output[:, max(1, num_prompt) :].tolist()
    # An encoder reads the prompt, and the decoder begins with a token that may be the one for the end.
    return output[:, 1:].tolist()


def _without_prompt(text: str, prompt: str) -> str:
    # As `ImageTextToTextPipeline.postprocess`: a decoder's output begins with its input, or a space and it.
    start = text.find(prompt)
    return text[start + len(prompt) :] if 0 <= start <= 2 else text


def _writer(captions: CaptionSettings, encoding: Encoding, device: str) -> CaptionWriter:
    """Load the model of the settings, and return its function for the captions of images."""
    if captions.tagger is not None:
        return Tagger(encoding.model_folder, captions.tagger).captions
    model = Captioner(encoding.model_folder, encoding.settings["dtype"], device, quantize=captions.quantize)
    examples = shown_examples(encoding.settings[EXAMPLES], encoding.settings["background"])
    if examples and not model.takes_examples:
        raise ModelError(
            "captions.examples require a model with a chat template, which this one lacks",
            where=str(encoding.model_folder),
            fix="remove captions.examples, or use a model that was trained for chats",
        )
    return lambda images: model.captions(images, captions.prompt, captions.max_tokens, examples)


class CaptionEncoder:
    """Captions the images of an encoding."""

    def __init__(self, encoding: Encoding, device: str, progress: Progress) -> None:
        self._settings, self._device, self._progress = encoding.settings, device, progress
        self._batch = 1 if device == "cpu" else GPU_BATCH
        self._sources: dict[str, Source] = {}
        captions = CaptionSettings.model_validate_json(encoding.settings["captions"])
        with out_of_memory_as(self._memory_error):
            self._captions = _writer(captions, encoding, device)

    def encoded(self, jobs: Iterable[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
        """Yield each job with its caption.

        Raises:
            LaunchError: Memory ran out.
        """
        waiting: list[tuple[Job, Image.Image]] = []
        for job in jobs:
            self._progress.working_on(job.name)
            # Another process may have captioned the image since the stage checked.
            if store.check(job.spec).valid:
                yield job, "present"
                continue
            image = self._image(job)
            if isinstance(image, Failure):
                yield job, image
                continue
            if waiting and (len(waiting) == self._batch or waiting[0][1].size != image.size):
                yield from self._captioned(waiting)
                waiting = []
            waiting.append((job, image))
        if waiting:
            yield from self._captioned(waiting)

    def _captioned(self, waiting: Sequence[tuple[Job, Image.Image]]) -> Iterator[tuple[Job, Outcome]]:
        jobs, images = zip(*waiting, strict=True)
        try:
            with out_of_memory_as(self._memory_error):
                captions = self._captions(images)
        except ValueError as err:
            # Processors refuse some sizes; a refused image fails alone.
            if len(waiting) > 1:
                for each in waiting:
                    yield from self._captioned([each])
                return
            reason = str(err).strip().splitlines()[0][:300]
            yield (
                jobs[0],
                Failure(FAILED, reason, "crop the image, or write its caption"),
            )
            return
        for job, (text, num_tokens, cut) in zip(jobs, captions, strict=True):
            tensor = as_tensor(text)
            # A tokenizer may have tokens of any length.
            if tensor.nbytes > MAX_TEXT_BYTES:
                detail = f"the model wrote more than {MAX_TEXT_BYTES:,} bytes"
                yield job, Failure(FAILED, detail, "lower captions.max_tokens, or use another model")
            else:
                yield job, Encoded({CAPTION: tensor}, {NUM_TOKENS: num_tokens, CUT: int(cut)})

    def _image(self, job: Job) -> Image.Image | Failure:
        work = job.work
        size = Size(work["given_height"], work["given_width"])
        geometry = Geometry(Size(work["height"], work["width"]), size, Crop(0, 0, *size))
        red, green, blue = self._settings["background"]
        if work["root"] not in self._sources:
            limit = self._settings["max_file_bytes"]
            self._sources[work["root"]] = source_at(address(work["root"]), max_file_bytes=limit)
        try:
            pixels = load_pixels(
                self._sources[work["root"]].file(work["path"]),
                geometry,
                (red, green, blue),
                content_hash=work["content_hash"],
            )
        except ImageError as err:
            return Failure(err.reason, err.detail, err.fix)
        return Image.fromarray(pixels)

    def _memory_error(self, usage: str) -> LaunchError:
        return LaunchError(
            "memory ran out while images were captioned" + (f" ({usage})" if usage else ""),
            where=f"captions on {self._device}",
            fix="free the device, set captions.dtype: bfloat16 or captions.quantize: int8, lower "
            "captions.resolution, or use a smaller model",
        )
