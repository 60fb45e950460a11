"""The section `captions` of a dataset: where its captions come from, and how they are changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from pipeline.recipe.settings import Settings, Violation
from pipeline.recipe.validators import check_encoding, check_fallback, check_suffixes

Encoding = Annotated[str, AfterValidator(check_encoding)]
Suffixes = Annotated[str | Annotated[tuple[str, ...], Field(min_length=1)], BeforeValidator(check_suffixes)]
Fallback = Annotated[str | None, AfterValidator(check_fallback)]

JSON_KEY = "caption"
"""Default key of the caption in a JSON sidecar file."""

JSON_SUFFIX = ".json"
"""Suffix of sidecar files that hold a JSON object with the caption."""

FILENAME = "filename"
"""Value of `captions.fallback` that makes the file name the caption."""

DEFAULT_PROMPT = "Describe this image in one or two sentences."
"""Default of `captions.prompt`."""

MAX_EXAMPLES = 16
"""Maximum number of captions that a model gets as examples."""

# Each order is a cache entry.
MAX_VARIANTS = 64
"""Maximum number of cached tag orders per caption."""


class ShuffleSettings(Settings):
    """Shuffling of captions that are lists of tags."""

    variants: int = Field(
        default=4,
        ge=2,
        le=MAX_VARIANTS,
        description="Number of tag orders cached per caption, including the original one. Training picks one "
        "every epoch. A caption has the same orders in every run.",
    )
    separator: str = Field(default=",", min_length=1, description="Separator between tags.")
    keep: int = Field(default=1, ge=0, description="Number of tags at the start that are not shuffled.")


class DropTagsSettings(ShuffleSettings):
    """Dropping of tags from captions that are lists of tags."""

    rate: float = Field(
        gt=0.0,
        le=1.0,
        description="Fraction of tags that each variant but the first lacks. A tag with the trigger word or "
        "its placeholder is never dropped, and neither is the last tag that is left.",
    )
    variants: int = Field(
        default=4,
        ge=2,
        le=MAX_VARIANTS,
        description="Number of texts cached per caption, including the complete one. Training picks one "
        "every epoch. With `shuffle`, `shuffle.variants` counts.",
    )
    separator: str = Field(
        default=",", min_length=1, description="Separator between tags. With `shuffle`, as in `shuffle`."
    )
    keep: int = Field(
        default=1,
        ge=0,
        description="Number of tags at the start that are never dropped. With `shuffle`, as in `shuffle`.",
    )


class ReplaceSettings(Settings):
    """A text that is replaced in captions. Caption files and manifests stay as they are."""

    find: str = Field(min_length=1, description="Text to replace, in any of an image's captions.")
    with_: str = Field(
        default="",
        alias="with",
        description="Text that replaces it. The default removes it, and with it a comma next to it.",
    )
    whole_words: bool = Field(
        default=True,
        description="Whether a match must not be part of a longer word, as cat is of category. If false, "
        "spaces around `find` count.",
    )
    ignore_case: bool = Field(default=False, description="Whether a and A are the same.")


class TaggerSettings(Settings):
    """Tags in place of sentences: the model is a tagger of the WD14 family."""

    threshold: float = Field(
        default=0.35,
        gt=0.0,
        le=1.0,
        description="Smallest probability of a tag in the caption.",
    )
    character_threshold: float = Field(
        default=0.85,
        gt=0.0,
        le=1.0,
        description="Smallest probability of a tag that names a character, in place of `threshold`.",
    )
    ratings: bool = Field(
        default=False,
        description="Whether the caption also has the most probable one of the model's ratings, such as "
        "general or sensitive.",
    )
    vocabulary: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="The only tags that captions may have; null allows all tags of the model. Spaces and "
        "underscores are the same, and so are A and a.",
        examples=[["1girl", "long hair", "outdoors"]],
    )
    exclude: tuple[str, ...] = Field(
        default=(),
        description="Tags that no caption has, written as in `vocabulary`.",
        examples=[["virtual youtuber", "commentary"]],
    )


class ExampleSettings(Settings):
    """An image, or none, with the caption that it should have."""

    image: str | None = Field(
        default=None,
        min_length=1,
        description="Image that the model sees before each image of the dataset, relative to the project "
        "root; null for an example of the style alone.",
        examples=["data/examples/rose.jpg"],
    )
    caption: str = Field(min_length=1, description="Caption in the wanted style.")


_OF_FILES = ("suffix", "json_key", "encoding", "fallback_encoding")
DECIDES_TEXT = (
    "model",
    "revision",
    "prompt",
    "max_tokens",
    "resolution",
    "dtype",
    "quantize",
    "examples",
    "tagger",
)
"""Keys that decide what a model writes of an image."""

_OF_MODELS = (*DECIDES_TEXT, "when", "as_")
_OF_LANGUAGE_MODELS = ("prompt", "max_tokens", "dtype", "quantize", "examples")


def _model_key(default: Any, **options: Any) -> Any:
    """Return a field that only `from: model` uses, and that dumps omit while it has its default."""
    # Code versions and caption rules are hashes of dumps, and those of other recipes must not change.
    return Field(default=default, exclude_if=partial(_is, default), **options)


def _is(default: Any, value: Any) -> bool:
    return value == default


class CaptionSettings(Settings):
    """Source and processing of a dataset's captions."""

    requirements = (
        ("text", "from_", "fixed"),
        ("columns", "from_", "column"),
        *((key, "from_", "sidecar", "model") for key in _OF_FILES),
        *((key, "from_", "model") for key in _OF_MODELS),
        ("fallback", "from_", "sidecar", "column"),
    )

    from_: Literal["sidecar", "filename", "fixed", "column", "model"] = Field(
        default="sidecar",
        alias="from",
        description="sidecar: a text file next to each image, with the image's name and `suffix`. filename: "
        "the image's file name without its suffix. fixed: `text` for every image. column: `columns` of the "
        "manifest. model: written by the vision-language model `model`, see docs/captions.md.",
    )
    model: str | None = _model_key(
        None,
        min_length=1,
        description="Vision-language model that writes the captions with `from: model`: a Hub id "
        "(owner/name), or a folder relative to the project root, of a model that transformers' "
        "`AutoModelForImageTextToText` loads. With `tagger`, a tagger.",
        examples=["HuggingFaceTB/SmolVLM-500M-Instruct"],
    )
    revision: str | None = _model_key(
        None,
        min_length=1,
        description="Branch, tag or commit of the Hub id in `model`; null means the main branch.",
    )
    prompt: str = _model_key(
        DEFAULT_PROMPT,
        description="What the model is asked about each image. It may be empty for models that caption "
        "without a prompt.",
    )
    when: Literal["missing", "always"] = _model_key(
        "missing",
        description="missing: the model captions images without a caption file (`suffix`), or with an empty "
        "one. always: it captions all images, and caption files are not read.",
    )
    as_: Literal["caption", "column"] = _model_key(
        "caption",
        alias="as",
        description="caption: the model's text is the caption of the images that `when` leaves to it. "
        "column: the model captions all images, and its text is one more caption of an image next to the "
        "ones of its caption file. Training picks one every epoch.",
    )
    max_tokens: int = _model_key(
        200,
        ge=1,
        le=4096,
        description="Maximum number of tokens of a caption. The check captions_complete names captions that "
        "were cut off.",
    )
    resolution: int = _model_key(
        1024,
        ge=16,
        le=8192,
        description="Images with more pixels than its square are scaled down before the model sees them.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _model_key(
        "auto",
        description="Dtype in which the model runs. auto: the dtype that its configuration states, otherwise "
        "float32.",
    )
    quantize: Literal["int8"] | None = _model_key(
        None,
        description="int8: weights of linear layers in 8 bits by torchao, to save memory, on any device. "
        "They are rounded, so captions can differ. null means in `dtype`.",
    )
    examples: tuple[ExampleSettings, ...] = _model_key(
        (),
        max_length=MAX_EXAMPLES,
        description="Captions in the wanted style, which the model gets before each image as earlier "
        "messages of a chat: `prompt` with an image, and the caption as its answer. Only for models with a "
        "chat template. Each example takes memory and time for every image.",
    )
    tagger: TaggerSettings | None = _model_key(
        None,
        description="The model is a tagger of the WD14 family, with the files model.onnx and "
        "selected_tags.csv, and captions are lists of tags. `tagger: {}` means the defaults below; null "
        "means a vision-language model. Needs the package onnxruntime.",
    )
    suffix: Suffixes = Field(
        default=".txt",
        description="Suffix of sidecar files, with the dot: the caption of photo.jpg is in photo.txt. With "
        ".json, the file holds a JSON object, and `json_key` names the caption in it. A list such as "
        "[.txt, .caption] is tried in order: the first file with a text is the caption. If another listed "
        "file has a different text, the check captions_agree warns.",
    )
    fallback: Fallback = Field(
        default=None,
        description="Caption of images with a missing or empty caption: a text that they all get, or "
        "filename for the image's file name without its suffix. With null, such images close the gate "
        "captions_present. The report counts them as fallback in captions_from.",
    )
    json_key: str = Field(
        default=JSON_KEY,
        min_length=1,
        description="Key of the caption in a JSON sidecar file (`suffix: .json`). If its value is a list of "
        "texts, each is a caption, and training picks one every epoch.",
    )
    text: str | None = Field(
        default=None, min_length=1, description="Caption of every image; only with `from: fixed`."
    )
    columns: tuple[str, ...] = Field(
        default=("caption",),
        min_length=1,
        description="Columns of the manifest with captions, for `from: column`; text, or lists of texts. If "
        "an image has several captions, from several columns, lists or rows, training picks one every epoch.",
    )
    lines: Literal["one", "each"] = Field(
        default="one",
        description="one: all lines of the file are one caption. each: every line is a caption, and training "
        "picks one every epoch.",
    )
    encoding: Encoding = Field(
        default="utf-8", description="Encoding of sidecar files; a byte order mark takes precedence."
    )
    fallback_encoding: Encoding | None = Field(
        default=None,
        description="Encoding for sidecar files that `encoding` cannot decode, such as cp1252. With null, "
        "such files close the gate captions_decodable.",
    )
    replace: tuple[ReplaceSettings, ...] = Field(
        default=(),
        description="Texts to replace in the captions before trigger word, prefix, postfix and shuffling, in "
        "this order. reports/validated_dataset/replaced.csv shows each changed caption before and after.",
    )
    trigger: str | None = Field(
        default=None,
        min_length=1,
        description="Trigger word of the trained concept, added in front of captions that do not contain it.",
    )
    placeholder: str | None = Field(
        default=None,
        min_length=1,
        description="Text in captions that the trigger word replaces, such as [trigger]. Requires `trigger`.",
    )
    class_words: str | None = Field(
        default=None,
        min_length=1,
        description="Words that replace the trigger word in the captions of a dataset with `role: prior`, "
        "such as dog for the trigger word sks dog. Requires `trigger`.",
    )
    prefix: str = Field(
        default="", description="Text added verbatim before each caption, after the trigger word."
    )
    postfix: str = Field(default="", description="Text added verbatim after each caption.")
    shuffle: ShuffleSettings | None = Field(
        default=None,
        description="Cache several orders of captions that are lists of tags; null disables shuffling.",
    )
    drop_tags: DropTagsSettings | None = Field(
        default=None,
        description="Cache further texts of captions that are lists of tags, in which some tags are missing; "
        "null disables it. With `shuffle`, each further order also lacks some tags.",
    )

    @property
    def tags(self) -> ShuffleSettings | None:
        """Number of variants and what a tag is, for `shuffle` and `drop_tags`; None without both."""
        return self.shuffle or self.drop_tags

    def with_trigger(self, text: str) -> str:
        """Return the text with the trigger word in place of `placeholder`."""
        return text if self.placeholder is None else text.replace(self.placeholder, self.trigger or "")

    def names_trigger(self, text: str) -> bool:
        """Return whether the text contains the trigger word as a whole word; False without a trigger word."""
        trigger = self.trigger
        return trigger is not None and bool(re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text))

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of sidecar files, in the order in which they are tried."""
        return (self.suffix,) if isinstance(self.suffix, str) else self.suffix

    @property
    def reads_files(self) -> bool:
        """Whether an image may have a caption file."""
        return self.from_ == "sidecar" or (self.from_ == "model" and self.when == "missing")

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        yield from self._model_violations()
        if self.from_ == "fixed" and self.text is None:
            what = "captions.text is required with from: fixed"
            yield Violation("text", what, "set text to the caption", involves=("text", "from"))
        if self.placeholder is not None and self.trigger is None:
            what = f"placeholder requires a trigger word that replaces it, got placeholder {self.placeholder}"
            fix = "set trigger, or remove placeholder"
            yield Violation("placeholder", what, fix, involves=("placeholder", "trigger"))
        if self.class_words is not None and self.trigger is None:
            what = f"class_words require a trigger word that they replace, got {self.class_words}"
            fix = "set trigger, or remove class_words"
            yield Violation("class_words", what, fix, involves=("class_words", "trigger"))
        if self.shuffle is not None and self.drop_tags is not None:
            for key in ShuffleSettings.model_fields:
                if (value := getattr(self.drop_tags, key)) != DropTagsSettings.model_fields[key].default:
                    what = f"drop_tags.{key} must not be set next to shuffle, which decides it, got {value}"
                    fix = f"set shuffle.{key}, and remove drop_tags.{key}"
                    yield Violation(f"drop_tags.{key}", what, fix, involves=("drop_tags", "shuffle"))
        has_json = any(suffix.lower() == JSON_SUFFIX for suffix in self.suffixes)
        if self.reads_files and self.json_key != JSON_KEY and not has_json:
            what = f"json_key requires suffix: .json, got suffix: {', '.join(self.suffixes)}"
            fix = "set suffix: .json, or remove json_key"
            yield Violation("json_key", what, fix, involves=("json_key", "suffix", "from"))

    def _model_violations(self) -> Iterator[Violation]:
        if self.from_ == "model" and self.model is None:
            what, fix = "captions.model is required with from: model", "set model to a Hub id or a folder"
            yield Violation("model", what, fix, involves=("model", "from"))
        if self.revision is not None and self.model is None:
            what, fix = "captions.revision requires captions.model", "set model, or remove revision"
            yield Violation("revision", what, fix, involves=("model", "revision"))
        for key in _OF_LANGUAGE_MODELS:
            if self.tagger is not None and getattr(self, key) != _default(key):
                what = f"{key} requires a vision-language model, and captions.tagger states a tagger"
                yield Violation(key, what, f"remove {key}, or remove tagger", involves=(key, "tagger"))
        if self.as_ == "column" and self.when != _default("when"):
            what = f"when must not be set next to as: column, which captions all images, got {self.when}"
            fix = "remove when, or remove as, with which caption files are not read"
            yield Violation("when", what, fix, involves=("when", "as"))
        for key in _OF_FILES:
            if self.from_ == "model" and not self.reads_files and getattr(self, key) != _default(key):
                what = f"{key} requires when: missing, got when: {self.when}, which reads no caption files"
                yield Violation(key, what, f"set when: missing, or remove {key}", involves=(key, "when"))


def _default(key: str) -> Any:
    return CaptionSettings.model_fields[key].default
