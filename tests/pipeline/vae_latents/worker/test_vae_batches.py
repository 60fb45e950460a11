"""VAE passes: pixels, batches that shrink when memory runs out, tiles, and decoding again in float32."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import avg_pool2d

from pipeline.errors import LaunchError
from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.models.worker.vae import Posterior
from pipeline.recipe import project_root
from pipeline.vae_latents.worker import vae_batches
from pipeline.vae_latents.worker.vae_batches import (
    MAX_SHAPES,
    MIN_BATCHES,
    MIN_OVERLAP,
    CudnnTuning,
    VaeBatches,
    tile_starts,
    tiled_posterior,
)


def batches_on(family: WorkerFamily, device: str = "cpu", dtype: str = "float32") -> VaeBatches:
    return VaeBatches(family, dtype=dtype, device=device, say=lambda text: None)


@pytest.fixture
def family(tiny_sd: Path) -> WorkerFamily:
    return load_family(tiny_sd)


@pytest.fixture
def batches(family: WorkerFamily) -> VaeBatches:
    return batches_on(family)


def images(count: int, height: int = 32, width: int = 64) -> list[tuple[str, np.ndarray]]:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return [(f"{index}.png", each) for index, each in enumerate(pixels)]


Shape = tuple[int, ...]


def failing_above(family: WorkerFamily, max_px: float, error: Exception | None = None) -> list[Shape]:
    """Record the shape (B, H, W) of each pass, and fail above so many pixels in all."""
    shapes: list[Shape] = []
    inner = family.vae.posterior

    def posterior(vae: Any, pixels: Tensor) -> Posterior:
        shapes.append((len(pixels), *pixels.shape[-2:]))
        if len(pixels) * pixels.shape[-1] * pixels.shape[-2] > max_px:
            raise error or torch.OutOfMemoryError("CUDA out of memory.")
        return inner(vae, pixels)

    family.vae.posterior = posterior  # type: ignore[method-assign]
    return shapes


def test_the_vae_sees_black_as_minus_1_and_white_as_1(family: WorkerFamily, batches: VaeBatches) -> None:
    seen: list[Tensor] = []
    inner = family.vae.posterior

    def posterior(vae: Any, pixels: Tensor) -> Posterior:
        seen.append(pixels)
        return inner(vae, pixels)

    family.vae.posterior = posterior  # type: ignore[method-assign]
    pixels = np.zeros((32, 64, 3), dtype=np.uint8)
    pixels[:, :, 1], pixels[:16, :, 2] = 51, 255
    list(batches.encode([("a.png", pixels)]))
    (tensor,) = seen
    assert (tensor.shape, tensor.dtype) == ((1, 3, 32, 64), torch.float32)
    expected = torch.full((1, 3, 32, 64), -1.0)
    expected[:, 1], expected[:, 2, :16] = 51 / 127.5 - 1, 1.0
    torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)


def test_each_image_of_a_batch_has_its_own_posterior(batches: VaeBatches) -> None:
    named = images(3)
    encoded = list(batches.encode(named))
    assert len(encoded) == 3
    for (name, pixels), image in zip(named, encoded, strict=True):
        (alone,) = batches.encode([(name, pixels)])
        for actual, expected in (
            (image.posterior.mean, alone.posterior.mean),
            (image.posterior.std, alone.posterior.std),
        ):
            assert actual.shape == (1, 4, 4, 8)
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
        assert (image.tile_px, alone.tile_px) == (0, 0)


def test_on_a_gpu_a_batch_has_4_megapixels_and_the_next_one_is_started_early(family: WorkerFamily) -> None:
    """The device meta stands for a GPU; it stores no numbers."""
    gpu, cpu = batches_on(family, "meta"), batches_on(family)
    assert (gpu.overlap, cpu.overlap) == (1, 0)
    assert [gpu.batch_size(px) for px in (1, 1024 * 1024, 3 * 1024 * 1024)] == [4 * 1024 * 1024, 4, 1]
    assert [cpu.batch_size(px) for px in (1, 1024 * 1024)] == [1, 1]


def test_batches_stay_as_small_as_the_half_of_one_that_did_not_fit(
    family: WorkerFamily, batches: VaeBatches
) -> None:
    shapes = failing_above(family, 2 * 32 * 64)
    assert len(list(batches.encode(images(5)))) == 5
    assert shapes == [(5, 32, 64), (2, 32, 64), (3, 32, 64), (1, 32, 64), (2, 32, 64)]
    assert batches.batch_size(32 * 64) == 1

    list(batches.encode(images(4)))
    assert [batches.batch_size(px) for px in (32 * 64, 2 * 32 * 64, 1)] == [2, 1, 2 * 32 * 64]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), MemoryError("no memory")], ids=repr)
def test_an_image_that_does_not_fit_is_tiled_and_equally_large_ones_are_not_tried_again(
    family: WorkerFamily, batches: VaeBatches, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(vae_batches, "TILES_PX", (48, 32))
    shapes = failing_above(family, 32 * 32, error)
    (image,) = batches.encode(images(1, 32, 48))
    assert image.tile_px == 32
    assert image.posterior.mean.shape == (1, 4, 4, 6)
    assert shapes == [(1, 32, 48), (1, 32, 32), (1, 32, 32)], "tiles of 48 px would be the whole image"

    # 48 x 32 and 40 x 40 pixels have at least as many pixels.
    for height, width in ((48, 32), (40, 40)):
        shapes.clear()
        list(batches.encode(images(1, height, width)))
        assert (1, height, width) not in shapes
    shapes.clear()
    (small,) = batches.encode(images(1, 32, 32))
    assert (small.tile_px, shapes) == (0, [(1, 32, 32)])


def test_a_wide_image_is_tiled_along_its_longer_edge(
    family: WorkerFamily, batches: VaeBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vae_batches, "TILES_PX", (48,))
    failing_above(family, 48 * 48)
    for height, width in ((32, 80), (80, 32)):
        (image,) = batches.encode(images(1, height, width))
        assert image.tile_px == 48
        assert image.posterior.mean.shape == (1, 4, height // 8, width // 8)


def test_encoding_exactly_tiles_an_image_that_did_not_fit(
    family: WorkerFamily, batches: VaeBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vae_batches, "TILES_PX", (32,))
    ((name, pixels),) = images(1, 32, 48)
    assert batches.encode_exact(name, pixels).tile_px == 0
    shapes = failing_above(family, 32 * 32)
    for tried in ([(1, 32, 48)], []):
        shapes.clear()
        assert batches.encode_exact(name, pixels).tile_px == 32
        assert [shape for shape in shapes if shape == (1, 32, 48)] == tried


def test_an_image_that_does_not_fit_in_tiles_either_is_an_error(
    family: WorkerFamily, batches: VaeBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_above(family, 0)
    with pytest.raises(LaunchError, match=r"0.png alone \(2,048 pixels\)\n"):
        list(batches.encode(images(1)))
    monkeypatch.setattr(vae_batches, "TILES_PX", (48,))
    with pytest.raises(LaunchError, match=r"0.png alone \(2,048 pixels\), in tiles too\n"):
        list(batches.encode(images(1)))


def test_other_errors_of_the_network_are_raised(family: WorkerFamily, batches: VaeBatches) -> None:
    failing_above(family, 0, RuntimeError("the weights have another shape"))
    with pytest.raises(RuntimeError, match="another shape"):
        list(batches.encode(images(1)))


def test_the_memory_of_a_failed_pass_is_free_before_the_next_one(
    family: WorkerFamily, batches: VaeBatches
) -> None:
    class Layer:
        """An object that refers to itself, as a network's may, and is freed by the garbage collector only."""

        def __init__(self) -> None:
            self.itself = self

    layers: list[weakref.ref[Layer]] = []
    alive: list[bool] = []
    inner = family.vae.posterior

    def posterior(vae: Any, pixels: Tensor) -> Posterior:
        alive.extend(layer() is not None for layer in layers)
        if len(pixels) > 1:
            layers.append(weakref.ref(Layer()))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return inner(vae, pixels)

    family.vae.posterior = posterior  # type: ignore[method-assign]
    assert len(list(batches.encode(images(2)))) == 2
    assert alive == [False, False]


class Tuning:
    """Records the batches before which a GPU's algorithms are chosen."""

    def __init__(self) -> None:
        self.shapes: list[Shape] = []

    def before_batch(self, shape: Shape) -> None:
        self.shapes.append(shape)


def test_algorithms_are_tuned_for_the_number_and_size_of_images(batches: Any) -> None:
    tuning = Tuning()
    batches.tuning = tuning
    list(batches.encode(images(2)))
    list(batches.encode(images(1, 40, 24)))
    assert tuning.shapes == [(2, 32, 64), (1, 40, 24)]


def decoding(family: WorkerFamily, picture: Callable[[torch.dtype], float]) -> list[torch.dtype]:
    """Replace the decoder by one whose pictures have one value, and return the dtypes of its passes."""
    dtypes: list[torch.dtype] = []

    def decode(vae: Any, latent: Tensor) -> Tensor:
        dtypes.append(next(vae.parameters()).dtype)
        return torch.full((len(latent), 3, 8, 8), picture(dtypes[-1]))

    family.vae.decode = decode  # type: ignore[method-assign]
    return dtypes


def test_a_latent_is_decoded_to_one_picture(family: WorkerFamily, batches: VaeBatches) -> None:
    latent = torch.randn(1, 4, 4, 8, generator=torch.Generator().manual_seed(0))
    picture = batches.decode(latent)
    assert picture is not None
    assert picture.shape == (3, 32, 64)
    torch.testing.assert_close(picture[None], family.vae.decode(family.vae.load("float32", "cpu"), latent))


INFINITE = float("inf")


@pytest.mark.parametrize(
    ("dtype", "values", "dtypes", "value"),
    [
        ("bfloat16", {torch.bfloat16: 0.5}, [torch.bfloat16], 0.5),
        ("bfloat16", {torch.bfloat16: INFINITE, torch.float32: 0.25}, [torch.bfloat16, torch.float32], 0.25),
        ("float32", {torch.float32: 0.5}, [torch.float32], 0.5),
        ("float32", {torch.float32: INFINITE}, [torch.float32], INFINITE),
    ],
    ids=["half", "half overflows", "exact", "exact overflows"],
)
def test_a_picture_that_overflows_in_half_precision_is_decoded_again_in_float32(
    family: WorkerFamily,
    dtype: str,
    values: dict[torch.dtype, float],
    dtypes: list[torch.dtype],
    value: float,
) -> None:
    batches = batches_on(family, dtype=dtype)
    used = decoding(family, values.__getitem__)
    picture = batches.decode(torch.zeros(1, 4, 1, 1))
    assert picture is not None
    assert float(picture.max()) == value
    assert used == dtypes


def test_a_latent_that_cannot_be_decoded_for_lack_of_memory_has_no_picture(
    family: WorkerFamily, batches: VaeBatches
) -> None:
    def decode(dtype: torch.dtype) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    decoding(family, decode)
    assert batches.decode(torch.zeros(1, 4, 1, 1)) is None


FACTOR = 8


def local(pixels: torch.Tensor) -> Posterior:
    """Encode 8x8 pixels to one value each, so that tiling cannot change the output."""
    mean = avg_pool2d(pixels, FACTOR)
    return Posterior(mean, mean.abs() + 1)


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([32, 64, 128]))
def test_L09_tiling_does_not_change_the_output_of_a_local_encoder(
    rows: int, columns: int, tile_px: int
) -> None:
    pixels = torch.rand((1, 3, rows * FACTOR, columns * FACTOR), generator=torch.manual_seed(0))
    whole = local(pixels)
    tiled = tiled_posterior(local, pixels, tile_px=tile_px, multiple=FACTOR)
    torch.testing.assert_close(tiled.mean, whole.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(tiled.std, whole.std, rtol=0, atol=1e-5)


@given(st.integers(1, 500), st.sampled_from([8, 16, 32]), st.sampled_from([256, 512]))
def test_tiles_cover_the_edge_start_at_multiples_and_overlap(steps: int, multiple: int, tile_px: int) -> None:
    edge_px = steps * multiple
    starts = tile_starts(edge_px, tile_px, multiple)
    assert starts[0] == 0
    assert [start for start in starts if start % multiple] == [], f"not multiples of {multiple}"
    if edge_px <= tile_px:
        assert starts == [0]
        return
    assert starts[-1] == edge_px - tile_px
    strides = [after - before for before, after in pairwise(starts)]
    longest = tile_px * (1 - MIN_OVERLAP) + multiple
    assert [stride for stride in strides if not 0 < stride <= longest] == [], f"the limit is {longest}"


def test_no_tile_exceeds_the_requested_size_and_a_short_edge_is_one_tile() -> None:
    sizes: list[tuple[int, ...]] = []

    def record_size(pixels: torch.Tensor) -> Posterior:
        sizes.append(tuple(pixels.shape[-2:]))
        return local(pixels)

    tiled_posterior(record_size, torch.zeros((1, 3, 64, 320)), tile_px=128, multiple=FACTOR)
    assert set(sizes) == {(64, 128)}
    assert len(sizes) == 3


def test_overlapping_tiles_are_blended_linearly_in_both_directions() -> None:
    """Four tiles of 4 x 4 latent values on 6 x 6: weights rise as 1, 2 and fall as 2, 1 along each edge."""
    values = iter([1.0, 10.0, 100.0, 1000.0])

    def constant(pixels: torch.Tensor) -> Posterior:
        value = torch.full((1, 1, 4, 4), next(values))
        return Posterior(value, 2 * value)

    tiled = tiled_posterior(constant, torch.zeros((1, 3, 48, 48)), tile_px=32, multiple=FACTOR)
    # Share of the second tile at each of the six values of an edge.
    share = torch.tensor([0, 0, 1 / 3, 2 / 3, 1, 1])
    rows, columns = share[:, None], share[None]
    upper = 1.0 * (1 - columns) + 10.0 * columns
    lower = 100.0 * (1 - columns) + 1000.0 * columns
    expected = (upper * (1 - rows) + lower * rows)[None, None]
    torch.testing.assert_close(tiled.mean, expected)
    torch.testing.assert_close(tiled.std, 2 * expected)


@pytest.fixture(autouse=True)
def restored_mode() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


def modes(tuning: CudnnTuning, shape: tuple[int, ...], num_batches: int) -> list[bool]:
    """Return cuDNN's mode in each of some batches of one shape."""
    found = []
    for _ in range(num_batches):
        tuning.before_batch(shape)
        found.append(torch.backends.cudnn.benchmark)
    return found


def test_algorithms_are_timed_for_shapes_of_many_batches_alone() -> None:
    tuning = CudnnTuning()
    assert modes(tuning, (4, 64, 64), MIN_BATCHES + 2) == [False] * MIN_BATCHES + [True] * 2
    assert modes(tuning, (1, 64, 64), 1) == [False]
    assert modes(tuning, (4, 64, 64), 1) == [True]


def test_the_number_of_timed_shapes_is_bounded() -> None:
    tuning = CudnnTuning()
    last = [modes(tuning, (1, 64, 8 * number), MIN_BATCHES + 1)[-1] for number in range(MAX_SHAPES + 3)]
    assert last == [True] * MAX_SHAPES + [False] * 3
    assert modes(tuning, (1, 64, 0), 1) == [True]


def test_bfloat16_is_compared_with_float32_on_the_same_images() -> None:
    """The VAE of the demo is trained, so its latents have the spread of a real model's."""
    batches = batches_on(load_family(project_root() / "demo" / "base"))
    pixels = [each for _, each in images(2)]
    compared = batches.compare_bfloat16(pixels)
    assert compared is not None
    exact, rounded = (
        batches.family.vae.posterior(
            batches.family.vae.load(dtype, "cpu"),
            torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 127.5 - 1.0,
        ).mean
        for dtype in ("float32", "bfloat16")
    )
    expected = float((rounded - exact).double().square().mean().sqrt() / exact.double().std())
    assert compared.difference == pytest.approx(expected, rel=0.1)
    assert 1e-4 < compared.difference < 0.05
    assert compared.speedup > 0


def test_a_comparison_that_runs_out_of_memory_gives_nothing(family: WorkerFamily) -> None:
    failing_above(family, 0)
    assert batches_on(family).compare_bfloat16([each for _, each in images(2)]) is None
