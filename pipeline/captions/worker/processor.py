"""The processor of a vision-language model: its inputs from images and prompts, and text from its tokens."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from pipeline.captions.examples import example_pixels
from pipeline.errors import ModelError
from pipeline.models.missing_package import install_command

Example: TypeAlias = tuple[Image.Image | None, str]
"""An image, or None, and the caption that it should have."""

# Without an answer in advance, transformers asks on the terminal whether to run code of the folder.
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of `from_pretrained` for a local folder with code that must not run."""


class CaptionProcessor:
    """Image processor, tokenizer and chat template of a model."""

    def __init__(self, folder: Path) -> None:
        """Load them; raises ModelError if the folder has none for images and texts."""
        with explained(folder):
            self._processor = _load_processor(folder)
            # For models of other kinds, transformers returns a tokenizer or an image processor.
            if not isinstance(self._processor, ProcessorMixin):
                raise ValueError("it has no processor of images and texts")
        # Some repositories have the template with the tokenizer alone.
        self._template = self._processor.chat_template or self._processor.tokenizer.chat_template

    @property
    def takes_examples(self) -> bool:
        """Whether the model has a chat template, which examples require."""
        return self._template is not None

    def inputs(self, images: Sequence[Image.Image], prompt: str, examples: Sequence[Example]) -> Any:
        """Return the inputs of the model for images of one size, in CPU tensors."""
        if self._template is None:
            return self._processor(images=list(images), text=[prompt] * len(images), return_tensors="pt")
        # An example is a question that has been answered; an example without an image shows the style alone.
        answered = [
            message
            for image, caption in examples
            for message in (
                _question(image, prompt),
                {"role": "assistant", "content": [{"type": "text", "text": caption}]},
            )
        ]
        chats = [[*answered, _question(image, prompt)] for image in images]
        return self._processor.apply_chat_template(
            chats,
            chat_template=self._template,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )

    def decoded(self, tokens: Tensor) -> list[str]:
        """Return the text of each row of tokens."""
        return self._processor.post_process_image_text_to_text(tokens, skip_special_tokens=True)


def shown_examples(examples: Iterable[Mapping[str, Any]], background: Sequence[int]) -> list[Example]:
    """Return the examples of `examples_of` with decoded images on a background (red, green, blue).

    Raises:
        ImageError: An image has changed, or does not decode.
    """
    red, green, blue = background
    shown: list[Example] = []
    for each in examples:
        image = each["image"]
        if image is not None:
            image = Image.fromarray(example_pixels(image, (red, green, blue)))
        shown.append((image, each["caption"]))
    return shown


@contextmanager
def explained(folder: Path) -> Generator[None]:
    """Raise the errors of transformers while it loads a model as ModelError."""
    try:
        yield
    except (ImportError, OSError, ValueError) as err:
        raise ModelError(
            f"the captioning model cannot be loaded: {str(err).strip().splitlines()[0]}",
            where=str(folder),
            fix=install_command(err)
            or "set captions.model to a model that AutoModelForImageTextToText of transformers loads",
        ) from err


def _question(image: Image.Image | None, prompt: str) -> dict[str, Any]:
    shown = [] if image is None else [{"type": "image", "image": image}]
    return {"role": "user", "content": [*shown, {"type": "text", "text": prompt}]}


def _load_processor(folder: Path) -> Any:
    # Pillow's image processors give the same pixels on all machines; torchvision's resize differs.
    options: dict[str, Any] = {"backend": "pil", **LOCAL}
    try:
        return AutoProcessor.from_pretrained(folder, **options)
    except ImportError:
        # A processor that also reads videos does so with torchvision alone.
        config = AutoConfig.from_pretrained(folder, **LOCAL)
        kind: Any = PROCESSOR_MAPPING.get(type(config), None)
        if kind is None or "video_processor" not in kind.get_attributes():
            raise
        return _load_for_images(kind, folder, options)


def _load_for_images(kind: type[Any], folder: Path, options: Mapping[str, Any]) -> Any:
    # `from_pretrained` of a class with another signature would drop the settings that `kind` accepts.
    stored, _ = kind.get_processor_dict(folder, **LOCAL)
    accepted = inspect.signature(kind).parameters.keys() - {*kind.get_attributes()}
    return _for_images(kind)(
        AutoImageProcessor.from_pretrained(folder, **options),
        AutoTokenizer.from_pretrained(folder, **LOCAL),
        **{name: value for name, value in stored.items() if name in accepted},
    )


def _for_images(kind: type[Any]) -> type[Any]:
    """Return a processor class that uses everything of `kind` but its processor of videos."""

    class ForImages(kind):
        # An override of SmolVLM reads settings of the processor of videos.
        apply_chat_template = ProcessorMixin.apply_chat_template

        # transformers requires the parts that this signature names.
        def __init__(self, image_processor: Any, tokenizer: Any, **settings: Any) -> None:
            super().__init__(
                image_processor=image_processor, tokenizer=tokenizer, video_processor=None, **settings
            )

    return ForImages
