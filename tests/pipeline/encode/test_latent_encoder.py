from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.encode.latent_encoder import LatentEncoder, posterior_noise
from pipeline.encode.order import Job, Order
from pipeline.encode.outcome import Encoded, Failure
from pipeline.encode.progress import Progress
from pipeline.entries import Entries
from pipeline.errors import LaunchError
from pipeline.families import Posterior
from pipeline.store import Store


class Listener:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, done: int, total: int, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def order(cache, tmp_path: Path) -> Order:
    """Five pictures, of which at least two share one shape."""
    return order_of(cache, tmp_path)


def order_of(cache, tmp_path: Path, **settings: str) -> Order:
    entries, jobs = Entries(cache.recipe), list[Job]()
    for scanned in cache.buckets().to_dicts():
        square = {"target_height": 64, "target_width": 64}
        row = scanned | (square if scanned["path"] in ("cat.png", "camera.png") else {})
        work = {**row, "path": str(cache.photos / row["path"]), "flipped": False}
        jobs.append(Job(entries.latent(row), {}, work, row["path"], 4096))
    jobs.sort(key=lambda job: job.spec.tensors["latent"].shape)
    chosen = {"compute_dtype": "float32", "posterior": "mean", "background": [255, 255, 255], **settings}
    return Order("latents", Path(cache.recipe.model.base), tmp_path / "store", chosen, jobs)


@pytest.fixture
def listener() -> Listener:
    return Listener()


def encode(encoder: LatentEncoder, order: Order) -> dict[str, np.ndarray]:
    outcomes = {job.name: outcome for job, outcome in encoder.encoded(order.jobs, Store(order.store_root))}
    assert all(isinstance(outcome, Encoded) for outcome in outcomes.values()), outcomes
    return {name: outcome.tensors["latent"].astype(np.float32) for name, outcome in outcomes.items()}


def encoder_of(order: Order, listener: Listener, device: str = "cpu") -> LatentEncoder:
    progress = Progress(listener, Path(order.store_root).parent, total=5, what="latents", rank=0)
    return LatentEncoder(order, device, progress)


def sizes_of_passes(encoder: LatentEncoder, limit: int = 99) -> list[int]:
    """Record the images of each forward pass; more than `limit` at once run out of memory."""
    sizes: list[int] = []
    inner = encoder._family.posterior

    def posterior(vae, pixels) -> Posterior:
        sizes.append(len(pixels))
        if len(pixels) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return inner(vae, pixels)

    encoder._family.posterior = posterior  # type: ignore[method-assign]
    return sizes


def test_on_the_cpu_each_image_has_a_pass_of_its_own(order: Order, listener: Listener) -> None:
    encoder = encoder_of(order, listener)
    sizes = sizes_of_passes(encoder)
    encode(encoder, order)
    assert sizes == [1] * 5


def test_a_batch_gives_the_latents_of_single_images_to_the_last_digits(
    order: Order, listener: Listener
) -> None:
    single = encode(encoder_of(order, listener), order)
    encoder = encoder_of(order, listener)
    encoder._max_px = 10**9
    sizes = sizes_of_passes(encoder)
    together = encode(encoder, order)
    assert max(sizes) >= 2
    assert sum(sizes) == 5
    for name, latent in single.items():
        assert np.abs(together[name] - latent).max() < 2e-3, name  # stored as float16


def test_L09_out_of_memory_halves_the_batch_and_loses_nothing(order: Order, listener: Listener) -> None:
    single = encode(encoder_of(order, listener), order)
    encoder = encoder_of(order, listener)
    encoder._max_px = 10**9
    sizes = sizes_of_passes(encoder, limit=1)
    together = encode(encoder, order)
    assert together.keys() == single.keys()
    assert all(np.abs(together[name] - single[name]).max() < 2e-3 for name in single)
    assert sizes.count(1) == 5
    assert any("memory ran out" in line for line in listener.lines)


def test_L09_out_of_memory_with_one_image_is_a_clear_error(order: Order, listener: Listener) -> None:
    encoder = encoder_of(order, listener)
    sizes_of_passes(encoder, limit=0)
    with pytest.raises(LaunchError, match=r"(?s)alone \(4,096 pixels\).*buckets\.resolution"):
        encode(encoder, order)


def test_L05_half_precision_that_overflows_is_encoded_again_in_float32(cache, tmp_path, listener) -> None:
    folder = shutil.copytree(cache.recipe.model.base, tmp_path / "loud")
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["quant_conv.weight"][:4] *= 3e4
    save_file(weights, file, {"format": "pt"})
    cache = cache.with_settings(model={"base": str(folder)}, latents={"dtype": "float32"})
    exact = order_of(cache, tmp_path)
    half = order_of(cache, tmp_path, compute_dtype="float16")
    expected = encode(encoder_of(exact, listener), exact)
    assert max(np.abs(latent).max() for latent in expected.values()) / 0.18215 > 65504
    got = encode(encoder_of(half, listener), half)
    assert any("encoded again in float32" in line for line in listener.lines)
    assert sum(np.array_equal(got[name], expected[name]) for name in expected) >= 3


def test_an_entry_that_appeared_meanwhile_is_not_encoded(order: Order, listener: Listener) -> None:
    store, job = Store(order.store_root), order.jobs[0]
    store.write(job.spec, {"latent": np.zeros(job.spec.tensors["latent"].shape, "<f2")}, {})
    encoder = encoder_of(order, listener)
    sizes = sizes_of_passes(encoder)
    outcomes = {made.name: outcome for made, outcome in encoder.encoded(order.jobs, store)}
    assert outcomes[job.name] == "present"
    assert sum(sizes) == 4


def test_I02_any_exception_of_one_image_rejects_it_alone(
    order: Order, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.encode import latent_encoder

    inner = latent_encoder.load_pixels

    def load(path: Path, *args: object, **kwargs: object) -> np.ndarray:
        if path.name == "cat.png":
            raise MemoryError("no room")
        return inner(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(latent_encoder, "load_pixels", load)
    encoded = encoder_of(order, listener).encoded(order.jobs, Store(order.store_root))
    outcomes = {job.name: outcome for job, outcome in encoded}
    assert {name for name, outcome in outcomes.items() if isinstance(outcome, Failure)} == {"cat.png"}
    assert "no room" in outcomes["cat.png"].detail


def test_posterior_noise_is_the_keys_own_and_standard_normal() -> None:
    keys = ("00ffaa11", "00ffaa11", "00ffaa12")
    first, again, other = (posterior_noise(key * 8, (1, 4, 128, 128)) for key in keys)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # 65,536 draws: a mean beyond 0.02 or a deviation off by 0.02 happens less than once in a million keys.
    assert abs(float(first.mean())) < 0.02
    assert abs(float(first.std()) - 1) < 0.02


@pytest.fixture
def gpu() -> str:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    return "cuda:0"


@pytest.mark.gpu
def test_a_gpus_latents_are_the_cpus_within_float16s_steps(
    order: Order, listener: Listener, gpu: str
) -> None:
    cpu = encode(encoder_of(order, listener), order)
    encoder = encoder_of(order, listener, gpu)
    sizes = sizes_of_passes(encoder)
    on_gpu = encode(encoder, order)
    assert max(sizes) > 1
    for name, latent in cpu.items():
        assert np.abs(on_gpu[name] - latent).max() < 5e-3, name
