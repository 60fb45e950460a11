"""Encode captions to text embeddings on one device.

Each caption has a forward pass of its own. CLIP on a GPU has batches instead, and captions of encoders with
streamed layers (`text.offload`) compute each layer in turn before the next one is copied.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeline.cache.store import Store
from pipeline.cache.worker.tensors import as_stored
from pipeline.encoding.jobs import Encoded, Encoding, Failure, Job, Outcome
from pipeline.encoding.progress import Progress
from pipeline.errors import LaunchError, ModelError
from pipeline.images.decode import decoded, limits_of_accepted, open_content
from pipeline.images.failures import image_errors
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Size
from pipeline.models.families.compute_dtype import dtypes_text
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.offload.in_step import run_in_step
from pipeline.models.worker.offload.streamed_blocks import streamed_blocks
from pipeline.models.worker.text import EncodedCaption, SeenImage
from pipeline.models.worker.text_layers import CAPTIONS_IN_STEP, LayerOffload
from pipeline.processes.worker.devices import bf16_text, emulates_bf16, free_bytes, out_of_memory_as
from pipeline.storage.addresses import address
from pipeline.storage.remote_source import source_at

if TYPE_CHECKING:
    from pipeline.storage.source import Source


# With one caption per pass, a GPU would be idle most of the time.
GPU_BATCH = 16
"""Number of captions per forward pass of CLIP on a GPU."""


def captions_per_pass(family: WorkerFamily, device: str) -> int:
    """Return how many captions share a forward pass."""
    # On the CPU it is one, so that an embedding's bytes depend on its key alone. On a GPU it is more for
    # CLIP, which pads all captions to one length and computes in float32: values differ by the arithmetic of
    # a larger batch. Other encoders are large enough to keep a GPU busy with one caption. In bfloat16, a
    # padded batch would change an embedding as much as bfloat16 rounds it, by which other captions are new.
    return GPU_BATCH if family.text.is_clip and device != "cpu" else 1


class TextEncoder:
    """All text encoders of a model on one device."""

    def __init__(self, encoding: Encoding, device: str, progress: Progress) -> None:
        self.family = load_family(encoding.model_folder, encoding.component_folders)
        self._device = device
        self._captions_per_pass = self._num_waiting = captions_per_pass(self.family, device)
        self._progress = progress
        self._settings = encoding.settings
        self._sources: dict[str, Source] = {}
        dtype: str = encoding.settings["compute_dtype"]
        self._dtypes = self.family.text_compute_dtypes(dtype)
        self._is_exact = set(self._dtypes.values()) == {"float32"}
        if "bfloat16" in self._dtypes.values() and emulates_bf16(device):
            progress.say(f"warning: {bf16_text(device)}. text.compute_dtype: float32 avoids it if it fits")
        with out_of_memory_as(self._memory_error):
            self._encoders = self._load(dtype)
        self._exact_encoders: Any = self._encoders if self._is_exact else None
        networks = [each for each in self._encoders.components.values() if isinstance(each, nn.Module)]
        if self._captions_per_pass == 1 and any(streamed_blocks(each) is not None for each in networks):
            self._num_waiting = CAPTIONS_IN_STEP

    def encoded(self, jobs: Iterable[Job], store: Store) -> Iterator[tuple[Job, Outcome]]:
        """Yield each job with its embeddings.

        Raises:
            ModelError: An encoder returns values that are not finite or do not fit the stored dtype.
            LaunchError: Memory ran out.
        """
        waiting: list[tuple[Job, Sequence[SeenImage]]] = []
        for job in jobs:
            self._progress.working_on(job.name)
            # Another job may have written the entry since the stage checked.
            if store.check(job.spec).valid:
                yield job, "present"
                continue

            images = self._seen_images(job)
            if isinstance(images, Failure):
                yield job, images
                continue

            waiting.append((job, images))
            if len(waiting) == self._num_waiting:
                yield from self._encode_waiting(waiting)
                waiting = []
        if waiting:
            yield from self._encode_waiting(waiting)

    def _encode_waiting(
        self, waiting: Sequence[tuple[Job, Sequence[SeenImage]]]
    ) -> Iterator[tuple[Job, Outcome]]:
        with out_of_memory_as(self._memory_error), self._tokenizer_panics(waiting):
            # Only a pass for one caption takes images, and repeats an overflow in float32.
            if len(waiting) == 1:
                encoded = [self._encode(*waiting[0])]
            elif self._captions_per_pass == 1:
                encoded = run_in_step([partial(self._encode, *each) for each in waiting])
            else:
                captions = [job.work["caption"] for job, _ in waiting]
                encoded = self.family.text.encode_captions(self._encoders, captions)
                encoded = [
                    caption if _all_finite(caption.tensors) else self._encode(job, images)
                    for caption, (job, images) in zip(encoded, waiting, strict=True)
                ]

        for caption, (job, _) in zip(encoded, waiting, strict=True):
            facts = {
                "num_tokens": caption.num_tokens,
                "num_cut": caption.num_cut,
                "cut_from": caption.cut_from,
            }
            tensors = {name: as_stored(tensor) for name, tensor in self._stored(job, caption).items()}
            yield job, Encoded(tensors, facts)

    @contextmanager
    def _tokenizer_panics(self, waiting: Sequence[tuple[Job, Sequence[SeenImage]]]) -> Generator[None]:
        try:
            yield
        except BaseException as err:
            # The class for panics of libraries in Rust is no Exception, and cannot be imported.
            if type(err).__name__ != "PanicException":
                raise
            captions = " or ".join(json.dumps(job.name[:100], ensure_ascii=False) for job, _ in waiting)
            folders = [self.family.model.component(role) for role in self.family.token_limits]
            raise ModelError(
                f"a tokenizer failed on the caption {captions}: {err}",
                where="\n".join(str(folder / "tokenizer.json") for folder in folders),
                fix="change the caption, or use another base model: a regular expression in tokenizer.json "
                "takes too many steps for it",
            ) from err

    def _encode(self, job: Job, images: Sequence[SeenImage]) -> EncodedCaption:
        encoded = self.family.text.encode_caption(self._encoders, job.work["caption"], images)
        if _all_finite(encoded.tensors) or self._is_exact:
            return encoded
        self._progress.say(
            f"{job.name}: not finite in {dtypes_text(self._dtypes)}, encoding again in float32"
        )

        # Loaded on demand: both copies together may take more memory than the device has.
        if self._exact_encoders is None:
            self._exact_encoders = self._load("float32")
        return self.family.text.encode_caption(self._exact_encoders, job.work["caption"], images)

    def _load(self, dtype: str) -> Any:
        setting = self._settings["offload"]
        offload = LayerOffload(setting, free_bytes(self._device), self._progress.say)
        return self.family.text.load(dtype, self._device, offload)

    def _seen_images(self, job: Job) -> list[SeenImage] | Failure:
        images: list[SeenImage] = []
        for number, work in enumerate(job.work.get("images", ())):
            try:
                images.append(self._seen_image(work))
            except ImageError as err:
                detail = f"references[{number}], {work['path']}: {err.detail}"
                return Failure(f"reference_{err.reason}", detail, err.fix)
        return images

    def _seen_image(self, work: Mapping[str, Any]) -> SeenImage:
        root, original = work["root"], Size(*work["original_size"])
        if root not in self._sources:
            limit = self._settings["max_file_bytes"]
            self._sources[root] = source_at(address(root), max_file_bytes=limit)
        file = self._sources[root].file(work["path"])
        red, green, blue = self._settings["background"]
        with (
            image_errors(str(file)),
            open_content(file, work["content_hash"]) as content,
            decoded(content, (red, green, blue), limits=limits_of_accepted(original)) as image,
        ):
            return SeenImage(image.copy(), Size(*work["size"]))

    def _memory_error(self, detail: str) -> LaunchError:
        fix = "free the device, or encode captions on the CPU (see docs/gpus.md)"
        if "float32" in self._dtypes.values():
            fix = f"set text.compute_dtype: bfloat16, which takes half of it; {fix}"
        if self._settings["offload"] != 0:
            fix = f"set text.offload: 0, which copies every layer from the host for every few captions; {fix}"
        what = f"memory ran out with the text encoders in {dtypes_text(self._dtypes)}"
        what += f" ({detail})" if detail else ""
        return LaunchError(what, where=f"text_embeddings on {self._device}", fix=fix)

    def _stored(self, job: Job, caption: EncodedCaption) -> dict[str, Tensor]:
        stored = {
            name: caption.tensors[name].to(getattr(torch, spec.dtype))
            for name, spec in job.spec.tensors.items()
        }

        # The value may be finite in the encoder and infinite in the entry: float16 ends at 65,504.
        if not _all_finite(stored):
            largest = max(float(tensor.abs().max()) for tensor in caption.tensors.values())
            raise ModelError(
                f"the text embedding of {job.name} is not finite (largest value {largest:.4g})",
                where=str(self.family.model.path),
                fix="set text.dtype to bfloat16 or float32; if that does not help, the encoder's weights are "
                "damaged",
            )
        return stored


def _all_finite(tensors: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
