"""Read a diffusers folder without torch: configurations, and the weight files that a load would use."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import Any, cast

from pipeline.errors import ModelError

WEIGHT_VARIANTS = ("fp32", "fp16", "bf16")
"""Variants in names of weight files, in order of preference; used if a component has no other weights."""

# File names, without suffix, under which diffusers and transformers store a component's weights.
_WEIGHT_NAMES = ("diffusion_pytorch_model", "model", "pytorch_model")

INDEX_NAMES = ("model_index.json", "modular_model_index.json")
"""Names of a model's index, in order of preference. Models of modular pipelines have only the second one."""

MAX_JSON_BYTES = 25_000_000
"""Maximum size of a configuration, a weight index or a safetensors header. Parsed JSON takes up to 24 times
its size in memory. The headers of the largest models have about 1 MB."""

# Tokenizers without a limit have 1e30, which transformers writes.
_NUMBERS = {
    "num_train_timesteps": (1, 100_000),
    "model_max_length": (1, 1e30),
    "scaling_factor": (-1e12, 1e12),
    "shift_factor": (-1e12, 1e12),
}
"""Numbers in configurations, with the least and the largest value that can be used."""

# Size of the header length at the start of a safetensors file; the number is little-endian.
_LENGTH_BYTES = 8

# Dtypes of weights, by their names in safetensors files.
_FLOAT_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}

_TOKENIZER_CONFIGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)
_TOKENIZER_CONTENTS = ("tokenizer.json", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model")
_CHAT_TEMPLATE = "chat_template.jinja"
_PROCESSOR_CONFIGS = ("processor_config.json", "preprocessor_config.json")
_CLASS_NAMES = ("image_processor_type", "processor_class", "feature_extractor_type", "auto_map")


def is_tokenizer(role: str) -> bool:
    """Return whether a component is a tokenizer, or a processor that is used for its tokenizer only."""
    return "tokenizer" in role or role.startswith("processor")


def is_text_encoder(role: str) -> bool:
    """Return whether a component is a network that text embeddings depend on."""
    return role.startswith(("text_encoder", "text_conditioner"))


def index_file(folder: Path) -> Path:
    """Return the index of the model in a folder, which need not exist; see `INDEX_NAMES`."""
    paths = [folder / name for name in INDEX_NAMES]
    return next((path for path in paths if path.is_file()), paths[0])


class ModelFolder:
    """The components and configuration files of a base model in a local diffusers folder, read when used.

    Attributes:
        path: Folder that holds the model's index and a subfolder for each component.
        replaced: Folders of the components that replace the ones in `path`, by component.
    """

    def __init__(self, path: Path, replaced: Mapping[str, Path] | None = None) -> None:
        self.path = path
        self.replaced = dict(replaced or {})
        self._configs: dict[str, dict[str, Any]] = {}

    def component(self, role: str) -> Path:
        """Return the folder of a component, which need not exist."""
        return self.replaced.get(role, self.path / role)

    def config_file(self, role: str) -> Path:
        name = "config.json"
        if role == "scheduler":
            name = "scheduler_config.json"
        elif is_tokenizer(role):
            name = "tokenizer_config.json"
        return self.component(role) / name

    def config(self, role: str) -> dict[str, Any]:
        """Return a component's configuration; each file is read once.

        Raises:
            ModelError: The file is missing or unreadable, or a number in it cannot be used.
        """
        if role not in self._configs:
            path = self.config_file(role)
            config = read_json(path)
            _require_usable_numbers(role, config, path)
            self._configs[role] = config
        return self._configs[role]

    @cached_property
    def index(self) -> dict[str, Any]:
        """Contents of the index, with [library, class] for each component; [None, None] if it is absent."""
        index = read_json(index_file(self.path))
        return {name: _component_entry(value) for name, value in index.items()}

    def has(self, role: str) -> bool:
        """Return whether the model has the component; the index lists an absent optional one as null."""
        return role in self.replaced or (self.index.get(role) or [None])[0] is not None


def _component_entry(value: Any) -> Any:
    match value:
        # An entry of a modular index. Library and class are null if it was saved before the component was
        # loaded; the class to load is always the hint.
        case [_, _, {"type_hint": [library, name]}]:
            return [library, name]
        case _:
            return value


def _require_usable_numbers(role: str, config: Mapping[str, Any], path: Path) -> None:
    """Raise ModelError for numbers that would train NaN or use up memory."""
    fix = "correct the number in that file, or download the model again from a source that you trust"
    for name, (least, most) in _NUMBERS.items():
        value = config.get(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most
        ):
            what = f"{name} must be a number from {least:,} to {most:,}, got {value!r:.40}"
            raise ModelError(what, where=str(path), fix=fix)

    # Infinity may be the absence of a limit: in text encoders, and in Sana's `lambda_min_clipped`.
    if role in {"vae", "scheduler"}:
        limited = {name: value for name, value in config.items() if name != "lambda_min_clipped"}
        bad = next((each for each in _floats(limited) if not math.isfinite(each)), None)
        if bad is not None:
            raise ModelError(f"its numbers must be finite, got {bad}", where=str(path), fix=fix)


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _floats(each)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or raise ModelError."""
    fix = (
        "set model.base to a complete diffusers folder or a Hub id; download the model again if it is damaged"
    )
    try:
        value = json.loads(read_bounded(path).decode("utf-8"))
    except FileNotFoundError as err:
        raise ModelError(f"the base model lacks {path.name}", where=str(path), fix=fix) from err
    except (OSError, ValueError, RecursionError) as err:
        raise ModelError(f"a file of the base model is unreadable: {err}", where=str(path), fix=fix) from err
    if not isinstance(value, dict):
        what = f"{path.name} must hold a JSON object, got {type(value).__name__}"
        raise ModelError(what, where=str(path), fix=fix)
    return cast("dict[str, Any]", value)


def read_bounded(path: Path) -> bytes:
    """Return the bytes of a regular file of at most `MAX_JSON_BYTES`.

    Raises:
        OSError: The file cannot be read, is not a regular file, or is too large.
    """
    # A model's folder may contain a link to a device, which would never end.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path.name} is not a regular file")
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise OSError(f"{path.name} has more than {MAX_JSON_BYTES:,} bytes")
    return content


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files that loading the component reads, sorted; shards follow their index.

    As in diffusers and transformers, `*.safetensors` wins over `*.bin`. Files with a variant in their name
    (see `weight_variant`) are used only if there are no others.

    Raises:
        ModelError: The weights are missing, or a shard that the index names is missing.
    """
    return _find_weights(folder)[1]


def weight_variant(folder: Path) -> str | None:
    """Return the `variant` argument of `from_pretrained` that loads `weight_files`, or None.

    Raises:
        ModelError: See `weight_files`.
    """
    return _find_weights(folder)[0]


def _find_weights(folder: Path) -> tuple[str | None, tuple[Path, ...]]:
    # transformers would add its weights, also pickled ones, and no fingerprint would contain them.
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        raise ModelError(
            "a component of the base model must have its own weights only, got an adapter",
            where=str(adapter),
            fix="merge the adapter into the weights (peft's merge_and_unload), or delete this file to use "
            "the component without it",
        )
    for variant in (None, *WEIGHT_VARIANTS):
        for suffix in ("safetensors", "bin"):
            for name in _WEIGHT_NAMES:
                single = folder / _with_variant(f"{name}.{suffix}", variant)
                if single.is_file():
                    _require_safetensors(single)
                    return variant, (single,)
                index = folder / _with_variant(f"{name}.{suffix}.index.json", variant)
                if index.is_file():
                    _require_safetensors(index)
                    return variant, (index, *_shards(index))
    plain = ", ".join(f"{name}.safetensors" for name in _WEIGHT_NAMES)
    variants = ", ".join(_with_variant("*.safetensors", variant) for variant in WEIGHT_VARIANTS)
    raise ModelError(
        "a component of the base model lacks weights",
        where=str(folder),
        fix=f"add one of {plain} (or .bin, or shards with their index), or of {variants}; rename files that "
        "have another variant in their name",
    )


def _require_safetensors(path: Path) -> None:
    if ".bin" not in path.suffixes:
        return

    # Imported here, because encoding processes need nothing else of the recipes, which import pydantic.
    from pipeline.recipe.untrusted import UNTRUSTED_VARIABLE, is_untrusted

    # Recipes may come from strangers. diffusers and transformers unpickle only tensors, which protects only
    # as well as torch does.
    if is_untrusted():
        raise ModelError(
            f"weights must be *.safetensors because {UNTRUSTED_VARIABLE} is set, got a pickle",
            where=str(path),
            fix="save the model with save_pretrained(..., safe_serialization=True)",
        )


def _with_variant(name: str, variant: str | None) -> str:
    # diffusers and transformers expect the variant before the last suffix.
    start, end = name.rsplit(".", 1)
    return name if variant is None else f"{start}.{variant}.{end}"


def require_whole(path: Path) -> None:
    """Raise ModelError unless a safetensors file has the size that its header implies; reads no tensor."""
    size = path.stat().st_size
    length, header = _read_header(path)
    try:
        tensors = cast("dict[str, Any]", json.loads(header))
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
        expected = _LENGTH_BYTES + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        expected = None
    if expected != size:
        actual = f"{size:,} bytes" if expected is None else f"{size:,} of {expected:,} bytes"
        what = f"a weight file of the base model is truncated or damaged: it has {actual}"
        raise ModelError(what, where=str(path), fix="download the model again")


def _read_header(path: Path) -> tuple[int, bytes]:
    """Return the length of a safetensors header, and its JSON, which is empty if the length is invalid."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        return length, file.read(length) if length < min(size, MAX_JSON_BYTES) else b""


def stored_dtype(files: Iterable[Path]) -> str | None:
    """Return the dtype of all tensors in a component's `weight_files`.

    None means that there are several, that a header is invalid, or that the weights are not safetensors.
    """
    weights = [path for path in files if path.suffix == ".safetensors"]
    try:
        headers = [cast("dict[str, Any]", json.loads(_read_header(path)[1])) for path in weights]
        dtypes = {
            tensor["dtype"] for header in headers for name, tensor in header.items() if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return _FLOAT_DTYPES.get(dtypes.pop()) if len(dtypes) == 1 else None


def stored_shapes(files: Iterable[Path]) -> dict[str, list[int]]:
    """Return the shape of each tensor in the safetensors files among a component's `weight_files`.

    A file with an invalid header counts as empty.
    """
    shapes: dict[str, list[int]] = {}
    for path in (path for path in files if path.suffix == ".safetensors"):
        try:
            header = cast("dict[str, Any]", json.loads(_read_header(path)[1]))
            shapes |= {name: value["shape"] for name, value in header.items() if name != "__metadata__"}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    return shapes


def tokenizer_files(folder: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the existing (configurations, vocabularies) of the tokenizer in `folder`.

    Raises:
        ModelError: The vocabulary is missing.
    """
    configs = tuple(folder / name for name in _TOKENIZER_CONFIGS if (folder / name).is_file())
    contents = tuple(folder / name for name in _TOKENIZER_CONTENTS if (folder / name).is_file())
    template = folder / _CHAT_TEMPLATE
    if not contents:
        raise ModelError(
            "the base model's tokenizer lacks a vocabulary",
            where=str(folder),
            fix=f"add at least one of {', '.join(_TOKENIZER_CONTENTS)}",
        )
    return configs, (*contents, template) if template.is_file() else contents


def image_processor_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the image processor in a processor's folder, without the names of classes.

    Raises:
        ModelError: The folder has no settings of an image processor.
    """
    own, separate = (folder / name for name in _PROCESSOR_CONFIGS)

    # The folder may contain the settings twice. As in transformers, the processor's own configuration takes
    # precedence over the separate file of the image processor.
    settings = read_json(own).get("image_processor") if own.is_file() else None
    settings = read_json(separate) if settings is None else settings
    return {name: value for name, value in settings.items() if name not in _CLASS_NAMES}


def _shards(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map", {})
    values = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set[str]()
    names = sorted(values)

    # The index comes from a download, and must not make a load read files in other folders.
    outside = [name for name in names if name in {".", ".."} or "/" in name or "\\" in name or "\0" in name]
    if outside:
        raise ModelError(
            f"the weight index must name files in its own folder, got {outside[0]}",
            where=str(index),
            fix="download the model again from a source that you trust",
        )
    shards = tuple(index.parent / name for name in names)
    missing = [str(shard) for shard in shards if not shard.is_file()]
    if missing or not shards:
        raise ModelError(
            f"the weight index names missing files: {', '.join(missing) or '(the index is empty)'}",
            where=str(index),
            fix="download the model again",
        )
    return shards
