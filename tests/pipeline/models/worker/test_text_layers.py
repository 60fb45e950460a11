from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from demo.tiny_models import TINY
from pipeline.images.geometry import Size
from pipeline.models.diffusers_folder import is_tokenizer
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.offload import streamed_blocks as module
from pipeline.models.worker.offload.in_step import run_in_step
from pipeline.models.worker.offload.streamed_blocks import repeated_blocks, streamed_blocks
from pipeline.models.worker.text import SeenImage
from pipeline.models.worker.text_layers import MARGIN_BYTES, EncoderSize, LayerOffload, resident_layers
from tests.pipeline.models.worker.offload.streamed import PoisoningStore
from tests.tensor_differences import differing_tensors

KINDS = [
    "FLUX.2 dev",  # Mistral 3
    "Qwen-Image",  # Qwen2.5-VL
    "FLUX.1 dev",  # CLIP and T5
    "Z-Image",  # Qwen3
    "Anima",  # a Qwen3 and a text conditioner
    "HiDream",  # two CLIPs, T5 and Llama
    pytest.param("Sana", marks=pytest.mark.slow),  # Gemma 2
    pytest.param("AuraFlow", marks=pytest.mark.slow),  # UMT5
    pytest.param("Kolors", marks=pytest.mark.slow),  # ChatGLM
    pytest.param("CogView4", marks=pytest.mark.slow),  # GLM
    pytest.param("Ideogram 4", marks=pytest.mark.slow),  # Qwen3-VL
    pytest.param("Bria FIBO", marks=pytest.mark.slow),  # SmolLM3
]

CAPTIONS = ["a red cat", "", "two dogs on a green hill " * 5]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite every evicted copy with NaN, and allow a single slot so that each layer is evicted."""
    monkeypatch.setattr(module, "host_store", PoisoningStore)
    monkeypatch.setattr(module, "NUM_SLOTS", 1)


def family_of(kind: str, folder: Path) -> WorkerFamily:
    TINY[kind](folder)
    return load_family(folder)


def networks(family: WorkerFamily, encoders: Any) -> dict[str, nn.Module]:
    return {role: getattr(encoders, role) for role in family.text_roles() if not is_tokenizer(role)}


def encoded(family: WorkerFamily, encoders: Any, images: tuple[SeenImage, ...] = ()) -> list[Tensor]:
    texts = [family.text.encode_caption(encoders, caption, images) for caption in CAPTIONS]
    return [tensor for text in texts for tensor in text.tensors.values()]


def assert_streamed_equal(
    family: WorkerFamily, images: tuple[SeenImage, ...] = (), dtype: str = "auto"
) -> None:
    resident = encoded(family, family.text.load(dtype, "cpu"), images)
    encoders = family.text.load(dtype, "cpu", LayerOffload(0))
    streamed = encoded(family, encoders, images)
    assert differing_tensors(resident, streamed) == []
    assert [number for number, tensor in enumerate(streamed) if not tensor.isfinite().all()] == []

    for network in networks(family, encoders).values():
        layers = streamed_blocks(network)
        assert layers is not None
        assert isinstance(layers.store, PoisoningStore)
        assert list(layers.names) == list(repeated_blocks(network))
        assert layers.store.most_on_device == 1
        # Each layer is copied once per caption, except that the last one of a pass may still be loaded.
        assert layers.store.num_copies > (len(CAPTIONS) - 1) * len(layers.names)

    before = num_copies(family, encoders)
    passes = [partial(family.text.encode_caption, encoders, caption, images) for caption in CAPTIONS]
    in_step = [tensor for text in run_in_step(passes) for tensor in text.tensors.values()]
    assert differing_tensors(resident, in_step) == []
    assert num_copies(family, encoders) - before < before * 2 // len(CAPTIONS)


def num_copies(family: WorkerFamily, encoders: Any) -> int:
    layers = [streamed_blocks(network) for network in networks(family, encoders).values()]
    return sum(each.store.num_copies for each in layers if each and isinstance(each.store, PoisoningStore))


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_layers_give_the_same_embeddings_bit_for_bit(tmp_path: Path, kind: str) -> None:
    # ChatGLM's rotary embeddings are float32, which its attention on a CPU does not mix with bfloat16.
    assert_streamed_equal(family_of(kind, tmp_path / "tiny"), dtype="float32" if kind == "Kolors" else "auto")


def test_the_streamed_vision_layers_of_an_encoder_that_sees_images_give_the_same_embeddings(
    tmp_path: Path,
) -> None:
    family = family_of("Qwen-Image-Edit", tmp_path / "tiny")
    encoders = family.text.load("auto", "cpu")
    blocks = list(repeated_blocks(encoders.text_encoder))
    assert [name for name in blocks if "visual" in name], blocks
    image = SeenImage(Image.effect_noise((64, 48), 50).convert("RGB"), Size(48, 64))
    assert_streamed_equal(family, (image,))


def test_some_layers_may_stay_on_the_device(tmp_path: Path) -> None:
    family = family_of("FLUX.1 dev", tmp_path / "tiny")
    lines: list[str] = []
    encoders = family.text.load("auto", "cpu", LayerOffload(1, say=lines.append))
    assert [line.partition(":")[2].partition(":")[0] for line in lines] == [
        " 1 streams 1 of 2 layers of text_encoder",
        " 1 streams 1 of 2 layers of text_encoder_2",
    ]
    resident = encoded(family, family.text.load("auto", "cpu"))
    streamed = encoded(family, encoders)
    assert differing_tensors(resident, streamed) == []


def test_auto_streams_no_layers_on_a_cpu_or_if_all_encoders_fit(tmp_path: Path) -> None:
    family = family_of("FLUX.1 dev", tmp_path / "tiny")
    lines: list[str] = []
    for free_bytes in (None, MARGIN_BYTES + 2**30):
        encoders = family.text.load("auto", "cpu", LayerOffload("auto", free_bytes, lines.append))
        streamed = {name: streamed_blocks(network) for name, network in networks(family, encoders).items()}
        assert {name: layers for name, layers in streamed.items() if layers is not None} == {}
    assert lines == []


def test_auto_streams_layers_of_an_encoder_that_does_not_fit_and_says_how_many(tmp_path: Path) -> None:
    family = family_of("FLUX.2 dev", tmp_path / "tiny")
    network = family.text.load("auto", "cpu").text_encoder
    size = EncoderSize(network)
    lines: list[str] = []
    free_bytes = MARGIN_BYTES + size.on_device(20)
    encoders = family.text.load("auto", "cpu", LayerOffload("auto", free_bytes, lines.append))
    layers = streamed_blocks(encoders.text_encoder)
    assert layers is not None
    assert len(layers.names) == 10
    (line,) = lines
    assert line.startswith(
        "text.offload: auto streams 10 of 30 layers of text_encoder: its weights take 0.0 GiB"
    )


class Layer(nn.Module):
    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_bytes, dtype=torch.uint8, device="meta"), False)


class Encoder(nn.Module):
    """Weights of 10 bytes besides layers of `num_bytes` each."""

    _no_split_modules = ("Layer",)

    def __init__(self, num_layers: int, num_bytes: int) -> None:
        super().__init__()
        self.embedding = Layer(10)
        self.layers = nn.ModuleList(Layer(num_bytes) for _ in range(num_layers))


def test_two_slots_are_on_the_device_besides_the_layers_that_stay() -> None:
    size = EncoderSize(Encoder(10, 100))
    assert size.total == 1010
    assert [size.on_device(number) for number in (10, 9, 5, 0)] == [1010, 1010, 10 + 500 + 200, 210]
    assert [size.streamed(number) for number in (10, 9, 5, 0)] == [0, 100, 500, 1000]


def test_auto_keeps_as_many_layers_as_fit_and_streams_the_largest_encoder_first() -> None:
    sizes = {"small": EncoderSize(Encoder(5, 20)), "large": EncoderSize(Encoder(10, 100))}
    everything = 110 + 1010
    assert resident_layers(sizes, "auto", everything) == {}
    assert resident_layers(sizes, "auto", everything - 1) == {"large": 7}
    assert resident_layers(sizes, "auto", 110 + 210) == {"large": 0}
    assert resident_layers(sizes, "auto", 110 + 210 - 1) == {"large": 0, "small": 2}
    assert resident_layers(sizes, "auto", 0) == {"large": 0, "small": 0}


def test_a_number_of_layers_that_no_encoder_exceeds_streams_nothing() -> None:
    sizes = {"small": EncoderSize(Encoder(5, 20)), "large": EncoderSize(Encoder(10, 100))}
    assert resident_layers(sizes, "none", 0) == {}
    assert resident_layers(sizes, 10, None) == {}
    assert resident_layers(sizes, 5, None) == {"large": 5}
    assert resident_layers(sizes, 0, None) == {"small": 0, "large": 0}


def test_sizes_are_those_of_the_dtype_that_the_encoder_computes_in() -> None:
    network = nn.Linear(8, 8, bias=False, dtype=torch.float32, device="meta")
    assert EncoderSize(network).total == 256
    assert EncoderSize(network, torch.bfloat16).total == 128
