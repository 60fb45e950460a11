from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cache.store import Store
from pipeline.encoding.jobs import Encoded, Encoding, Failure, Job, write_encoding
from pipeline.encoding.progress import Progress
from pipeline.errors import LaunchError, ModelError
from pipeline.models.worker.family import load_family
from pipeline.models.worker.vae import Posterior
from pipeline.storage.source import LocalSource
from pipeline.vae_latents.worker import encoder as latent_encoder
from pipeline.vae_latents.worker.encoder import LatentEncoder, is_worth_comparing, posterior_noise
from pipeline.vae_latents.worker.vae_batches import VaeBatches
from tests.listener import Listener

SQUARE = ("cat.png", "camera.png", "coffee.png", "rocket.png")
"""Images that get the same target size, enough to form batches beyond the probes, which run one by one."""


@pytest.fixture
def encoding(cache, tmp_path: Path) -> Encoding:
    """Return an encoding for five images, of which four have the same target size."""
    return encoding_of(cache, tmp_path)


def encoding_of(cache, tmp_path: Path, **settings: str | int) -> Encoding:
    entries, jobs = RecipeEntries(cache.recipe), list[Job]()
    for scanned in cache.buckets().to_dicts():
        square = {"target_height": 64, "target_width": 64}
        row = scanned | (square if scanned["path"] in SQUARE else {})
        work = {**row, "root": str(cache.photos), "flipped": False}
        jobs.append(Job(entries.latent_spec(row), {}, work, row["path"], 4096))
    jobs.sort(key=lambda job: next(iter(job.spec.tensors.values())).shape)
    chosen = {"compute_dtype": "float32", "posterior": "mean", "background": [255, 255, 255], **settings}
    return Encoding("latents", Path(cache.recipe.model.base), tmp_path / "store", chosen, jobs)


@pytest.fixture
def listener() -> Listener:
    return Listener()


def encode(encoder: LatentEncoder, encoding: Encoding) -> dict[str, np.ndarray]:
    outcomes = {
        job.name: outcome for job, outcome in encoder.encoded(encoding.jobs, Store(encoding.store_root))
    }
    assert all(isinstance(outcome, Encoded) for outcome in outcomes.values()), outcomes
    return {name: outcome.tensors["latent"].astype(np.float32) for name, outcome in outcomes.items()}


def encoder_of(encoding: Encoding, listener: Listener, device: str = "cpu") -> LatentEncoder:
    progress = Progress(listener, Path(encoding.store_root).parent, jobs=range(5), what="latents", rank=0)
    return LatentEncoder(encoding, device, progress)


def sizes_of_passes(encoder: LatentEncoder, limit: int = 99, limit_px: float = float("inf")) -> list[int]:
    """Record the batch size of each forward pass; fail above `limit` images or `limit_px` pixels."""
    sizes: list[int] = []
    inner = encoder.family.vae.posterior

    def posterior(vae, pixels) -> Posterior:
        sizes.append(len(pixels))
        if len(pixels) > limit or pixels.shape[-1] * pixels.shape[-2] > limit_px:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return inner(vae, pixels)

    encoder.family.vae.posterior = posterior  # type: ignore[method-assign]
    return sizes


def test_the_cpu_encodes_one_image_per_forward_pass(encoding: Encoding, listener: Listener) -> None:
    encoder = encoder_of(encoding, listener)
    sizes = sizes_of_passes(encoder)
    encode(encoder, encoding)
    assert sizes == [1] * 5


def test_a_batch_gives_nearly_the_same_latents_as_single_images(
    encoding: Encoding, listener: Listener
) -> None:
    single = encode(encoder_of(encoding, listener), encoding)
    encoder = encoder_of(encoding, listener)
    encoder.batches.max_px = 10**9
    sizes = sizes_of_passes(encoder)
    together = encode(encoder, encoding)
    assert max(sizes) >= 2
    assert sum(sizes) == 5
    for name, latent in single.items():
        assert np.abs(together[name] - latent).max() < 2e-3, name  # stored as float16


def test_L09_out_of_memory_halves_the_batch_and_loses_no_image(
    encoding: Encoding, listener: Listener
) -> None:
    single = encode(encoder_of(encoding, listener), encoding)
    encoder = encoder_of(encoding, listener)
    encoder.batches.max_px = 10**9
    sizes = sizes_of_passes(encoder, limit=1)
    together = encode(encoder, encoding)
    assert together.keys() == single.keys()
    errors = {name: np.abs(together[name] - single[name]).max() for name in single}
    assert errors == pytest.approx(dict.fromkeys(single, 0), abs=2e-3), "largest difference, by image"
    assert sizes.count(1) == 5
    assert "memory ran out" in "\n".join(listener.lines)


def test_with_overlap_a_pass_starts_before_the_previous_one_has_finished(
    encoding: Encoding, listener: Listener
) -> None:
    """Overlap is used on GPUs; it changes neither the latents nor their order."""
    plain = encode(encoder_of(encoding, listener), encoding)
    encoder = encoder_of(encoding, listener)
    encoder.batches.overlap = 1
    sizes = sizes_of_passes(encoder)
    started_passes: list[int] = []
    latents: dict[str, np.ndarray] = {}
    for job, outcome in encoder.encoded(encoding.jobs, Store(encoding.store_root)):
        assert isinstance(outcome, Encoded)
        started_passes.append(len(sizes))
        latents[job.name] = outcome.tensors["latent"]
    assert started_passes == [3, 3, 3, 5, 5], "the probes finish together, then one pass runs ahead"
    assert list(latents) == list(plain)
    for name in plain:
        np.testing.assert_array_equal(latents[name].astype(np.float32), plain[name], name)


def test_L09_images_encoded_before_memory_ran_out_are_not_lost(
    encoding: Encoding, listener: Listener
) -> None:
    encoder = encoder_of(encoding, listener)
    encoder.batches.overlap = 1
    inner = encoder.family.vae.posterior
    passes: list[int] = []

    def until_the_last(vae, pixels) -> Posterior:
        passes.append(len(pixels))
        if len(passes) >= 5:
            torch.empty(2**60, dtype=torch.uint8)
        return inner(vae, pixels)

    encoder.family.vae.posterior = until_the_last  # type: ignore[method-assign]
    ended: list[str] = []
    with pytest.raises(LaunchError, match="memory ran out"):
        ended += (job.name for job, _ in encoder.encoded(encoding.jobs, Store(encoding.store_root)))
    assert len(passes) == 5, "the last pass must start before the previous one finishes"
    assert ended == [job.name for job in encoding.jobs][:4]


def test_L09_out_of_memory_on_a_single_image_is_an_error_with_a_fix(
    encoding: Encoding, listener: Listener
) -> None:
    encoder = encoder_of(encoding, listener)
    sizes_of_passes(encoder, limit=0)
    with pytest.raises(LaunchError, match=r"(?s)astronaut.png alone \(3,840 pixels\)\n.*resolution"):
        encode(encoder, encoding)


@pytest.mark.slow
def test_L09_an_image_that_does_not_fit_in_memory_is_encoded_in_tiles_with_a_log_line(
    encoding: Encoding, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 48 x 48 pixels fit into one forward pass."""
    whole = encode(encoder_of(encoding, listener), encoding)
    monkeypatch.setattr("pipeline.vae_latents.worker.vae_batches.TILES_PX", (56, 48))
    encoder = encoder_of(encoding, listener)
    sizes_of_passes(encoder, limit_px=48 * 48)
    outcomes = {
        job.name: outcome for job, outcome in encoder.encoded(encoding.jobs, Store(encoding.store_root))
    }
    for name, outcome in outcomes.items():
        assert isinstance(outcome, Encoded)
        assert outcome.facts == {"tile_px": 48}
        tiled = outcome.tensors["latent"].astype(np.float32)
        assert tiled.shape == whole[name].shape
        # Group norms and attention see the tile instead of the image, so values are close but not equal.
        assert np.corrcoef(tiled.ravel(), whole[name].ravel())[0, 1] > 0.6, name
    again = encoder_of(encoding, listener)
    sizes_of_passes(again, limit_px=48 * 48)
    for job, outcome in again.encoded(encoding.jobs, Store(encoding.store_root)):
        assert isinstance(outcome, Encoded)
        expected = outcomes[job.name].tensors["latent"]
        np.testing.assert_array_equal(outcome.tensors["latent"], expected, job.name)
    assert "tiles of 48 px" in "\n".join(listener.lines)


@pytest.mark.slow
def test_L09_a_cpu_process_that_runs_out_of_memory_continues_in_tiles(cache, tmp_path: Path) -> None:
    """The kernel allows 320 MB above a small pass; a full image of 1,024 px needs more."""
    for path in cache.photos.glob("*.png"):
        if path.name != "cat.png":
            path.unlink()
    with Image.open(cache.photos / "cat.png") as image:
        image.resize((1024, 1024)).save(cache.photos / "cat.png")
    large = cache.with_settings(buckets={"resolution": 1024, "step": 64})
    (row,) = large.buckets().to_dicts()
    entries = RecipeEntries(large.recipe)
    work = {**row, "root": str(large.photos), "flipped": False}
    job = Job(entries.latent_spec(row), {}, work, row["path"], row["target_height"] * row["target_width"])
    settings = {"compute_dtype": "float32", "posterior": "mean", "background": [255, 255, 255]}
    encoding = Encoding("latents", Path(large.recipe.model.base), tmp_path / "store", settings, [job])
    command = [sys.executable, "-m", "tests.pipeline.encoding.limited_memory"]
    command += [str(write_encoding(encoding, tmp_path)), str(320 * 2**20)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert "cat.png does not fit into memory, encoding it in tiles of 512 px" in completed.stdout
    state = Store(encoding.store_root).check(job.spec)
    assert state.valid
    assert state.metadata is not None
    assert state.metadata["tile_px"] in (512, 256)


def test_L16_an_image_that_blocks_when_read_is_rejected_by_name_and_the_others_are_encoded(
    encoding: Encoding, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening the file blocks, as on a failing disk."""

    class FailingDisk(LocalSource):
        def open(self, path: str, num_bytes: int = 0) -> io.BufferedReader:
            if path.endswith("coffee.png"):
                threading.Event().wait(60)
            return super().open(path, num_bytes)

    monkeypatch.setattr(latent_encoder, "TIMEOUT_S", 2.0)
    monkeypatch.setattr(latent_encoder, "source_at", FailingDisk)
    encoded = encoder_of(encoding, listener).encoded(encoding.jobs, Store(encoding.store_root))
    outcomes = {job.name: outcome for job, outcome in encoded}
    failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failure)}
    assert {name: failure.reason for name, failure in failed.items()} == {"coffee.png": "stalled"}
    assert len(outcomes) == 5


def test_L05_probes_detect_a_damaged_vae_before_the_other_images_are_encoded(
    cache, tmp_path, listener
) -> None:
    encoding = with_weights(cache, tmp_path, "encoder.conv_in.weight", float("inf"))
    encoder = encoder_of(encoding, listener)
    sizes = sizes_of_passes(encoder)
    with pytest.raises(ModelError, match=r"(?s)not even for a grey image: .*NaN.*\(first: .*download"):
        encode(encoder, encoding)
    assert len(sizes) <= 4, "three probes and the grey image"


def test_L05_an_image_outside_the_range_of_the_stored_dtype_is_rejected_alone(
    cache, tmp_path, listener
) -> None:
    """The VAE's scaling factor makes only the largest latent values exceed float16."""
    exact = encoding_of(cache, tmp_path)
    latents = encode(encoder_of(exact, listener), exact)
    quieter, loudest = sorted((float(np.abs(latent).max()), name) for name, latent in latents.items())[-2:]
    folder = shutil.copytree(cache.recipe.model.base, tmp_path / "loud")
    file = folder / "vae" / "config.json"
    scale = 0.18215 * 65504 / ((quieter[0] + loudest[0]) / 2)
    file.write_text(json.dumps({**json.loads(file.read_text()), "scaling_factor": scale}))
    loud = encoding_of(cache.with_settings(model={"base": str(folder)}), tmp_path)
    encoded = encoder_of(loud, listener).encoded(loud.jobs, Store(loud.store_root))
    outcomes = {job.name: outcome for job, outcome in encoded}
    assert outcomes.keys() == latents.keys()
    failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failure)}
    assert {name: failure.reason for name, failure in failed.items()} == {loudest[1]: "latent_overflow"}


def test_L05_if_a_plain_image_encodes_correctly_the_failing_images_are_rejected(
    encoding: Encoding, listener: Listener
) -> None:
    """This happens on the second run of a dataset when only rejected images are missing."""
    encoder = encoder_of(encoding, listener)
    inner = encoder.family.vae.posterior

    def only_plain(vae, pixels) -> Posterior:
        answer = inner(vae, pixels)
        return answer if pixels.std() == 0 else Posterior(answer.mean * float("nan"), answer.std)

    encoder.family.vae.posterior = only_plain  # type: ignore[method-assign]
    outcomes = [outcome for _, outcome in encoder.encoded(encoding.jobs, Store(encoding.store_root))]
    assert [outcome.reason for outcome in outcomes if isinstance(outcome, Failure)] == [
        "latent_not_finite"
    ] * 5


def test_L03_a_vae_output_that_contradicts_its_configuration_is_an_immediate_error(
    encoding: Encoding, listener: Listener
) -> None:
    encoder = encoder_of(encoding, listener)
    inner = encoder.family.vae.posterior

    def halved(vae, pixels) -> Posterior:
        answer = inner(vae, pixels)
        return Posterior(answer.mean[..., ::2], answer.std[..., ::2])

    encoder.family.vae.posterior = halved  # type: ignore[method-assign]
    with pytest.raises(
        ModelError, match=r"latent of \S+\.png must have the shape \(4, \d+, \d+\), got \(4, "
    ):
        encode(encoder, encoding)


def with_weights(cache, tmp_path: Path, name: str, factor: float) -> Encoding:
    folder = shutil.copytree(cache.recipe.model.base, tmp_path / "damaged")
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights[name] = weights[name] * factor
    save_file(weights, file, {"format": "pt"})
    return encoding_of(cache.with_settings(model={"base": str(folder)}), tmp_path)


def test_L05_an_overflow_in_half_precision_is_encoded_again_in_float32(cache, tmp_path, listener) -> None:
    folder = shutil.copytree(cache.recipe.model.base, tmp_path / "loud")
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["quant_conv.weight"][:4] *= 3e4
    save_file(weights, file, {"format": "pt"})
    cache = cache.with_settings(model={"base": str(folder)}, latents={"dtype": "float32"})
    exact = encoding_of(cache, tmp_path)
    half = encoding_of(cache, tmp_path, compute_dtype="float16")
    expected = encode(encoder_of(exact, listener), exact)
    assert max(np.abs(latent).max() for latent in expected.values()) / 0.18215 > 65504
    actual = encode(encoder_of(half, listener), half)
    assert "encoding again in float32" in "\n".join(listener.lines)
    different = [name for name in expected if not np.array_equal(actual[name], expected[name])]
    assert len(different) <= len(expected) - 3


def test_an_entry_written_by_another_job_in_the_meantime_is_not_encoded(
    encoding: Encoding, listener: Listener
) -> None:
    store, job = Store(encoding.store_root), encoding.jobs[0]
    store.write(job.spec, {"latent": np.zeros(job.spec.tensors["latent"].shape, "<f2")}, {})
    encoder = encoder_of(encoding, listener)
    sizes = sizes_of_passes(encoder)
    outcomes = {encoded_job.name: outcome for encoded_job, outcome in encoder.encoded(encoding.jobs, store)}
    assert outcomes[job.name] == "present"
    assert sum(sizes) == 4


def test_I02_an_exception_for_one_image_rejects_only_that_image(
    encoding: Encoding, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = latent_encoder.load_pixels

    def load(path: Path, *args: object, **kwargs: object) -> np.ndarray:
        if str(path).endswith("cat.png"):
            raise MemoryError("no room")
        return inner(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(latent_encoder, "load_pixels", load)
    encoded = encoder_of(encoding, listener).encoded(encoding.jobs, Store(encoding.store_root))
    outcomes = {job.name: outcome for job, outcome in encoded}
    assert {name for name, outcome in outcomes.items() if isinstance(outcome, Failure)} == {"cat.png"}
    assert "no room" in outcomes["cat.png"].detail


def test_a_file_above_the_recipes_limit_is_rejected_when_it_is_encoded(
    cache, tmp_path: Path, listener: Listener
) -> None:
    sizes = {path.name: path.stat().st_size for path in cache.photos.glob("*.png")}
    largest = max(sizes, key=sizes.__getitem__)
    encoding = encoding_of(cache, tmp_path, max_file_bytes=sizes[largest] - 1)
    encoded = encoder_of(encoding, listener).encoded(encoding.jobs, Store(encoding.store_root))
    failed = {job.name: outcome.reason for job, outcome in encoded if isinstance(outcome, Failure)}
    assert failed == {largest: "file_too_large"}


def test_posterior_noise_depends_on_the_key_and_is_standard_normal() -> None:
    keys = ("00ffaa11", "00ffaa11", "00ffaa12")
    first, again, other = (posterior_noise(key * 8, (1, 4, 128, 128)) for key in keys)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # 65,536 draws: a mean beyond 0.02 or a deviation off by 0.02 happens less than once in a million keys.
    assert abs(float(first.mean())) < 0.02
    assert abs(float(first.std()) - 1) < 0.02


def test_posterior_noise_is_that_of_the_first_60_bits_of_the_key_as_seed() -> None:
    """Entries in existing caches were made with it."""
    key = "fedcba9876543210" * 4
    expected = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(0xFEDCBA987654321))
    assert torch.equal(posterior_noise(key, (1, 4, 8, 8)), expected)


def test_a_sample_of_the_posterior_is_its_mean_plus_its_deviation_times_the_noise(
    cache, tmp_path: Path, listener: Listener
) -> None:
    """`posterior: moments` stores mean and deviation, from which `sample` and `mean` can be computed."""
    stored: dict[str, dict[str, Encoded]] = {}
    keys: dict[str, str] = {}
    for posterior in ("moments", "mean", "sample"):
        settings = {"dtype": "float32", "posterior": posterior}
        encoding = encoding_of(cache.with_settings(latents=settings), tmp_path, posterior=posterior)
        encoded = list(encoder_of(encoding, listener).encoded(encoding.jobs, Store(encoding.store_root)))
        stored[posterior] = {job.name: outcome for job, outcome in encoded if isinstance(outcome, Encoded)}
        keys = {job.name: job.spec.key for job in encoding.jobs}

    assert len(keys) == 5
    for name, key in keys.items():
        moments = stored["moments"][name].tensors
        mean, sample = (stored[each][name].tensors["latent"] for each in ("mean", "sample"))
        noise = posterior_noise(key, (1, *mean.shape))[0].numpy()
        np.testing.assert_allclose(moments["mean"], mean, rtol=0, atol=1e-6)
        np.testing.assert_allclose(sample, mean + moments["std"] * noise, rtol=0, atol=1e-5)
        assert np.abs(sample - mean).max() > 1e-3


@pytest.fixture
def gpu() -> str:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    return "cuda:0"


@pytest.mark.gpu
def test_gpu_latents_equal_cpu_latents_within_float16_precision(
    encoding: Encoding, listener: Listener, gpu: str
) -> None:
    cpu = encode(encoder_of(encoding, listener), encoding)
    encoder = encoder_of(encoding, listener, gpu)
    sizes = sizes_of_passes(encoder)
    on_gpu = encode(encoder, encoding)
    assert max(sizes) > 1
    for name, latent in cpu.items():
        assert np.abs(on_gpu[name] - latent).max() < 5e-3, name


def test_a_batch_has_at_least_one_image_of_any_size(tiny_sd: Path) -> None:
    batches = VaeBatches(load_family(tiny_sd), dtype="float32", device="cpu", say=print)
    assert [batches.batch_size(image_px) for image_px in (1, 64 * 64, 10**9)] == [1, 1, 1]


def test_one_batch_is_compared_with_bfloat16_and_the_latents_stay_the_same(
    encoding: Encoding, listener: Listener
) -> None:
    expected = encode(encoder_of(encoding, listener), encoding)
    assert not [line for line in listener.lines if "bfloat16" in line]

    encoder = encoder_of(encoding, listener)
    encoder.compares = True  # as for many images on a GPU
    latents = encode(encoder, encoding)
    assert all(np.array_equal(latents[name], latent) for name, latent in expected.items())
    (line,) = (line for line in listener.lines if "bfloat16" in line)
    assert re.search(r"change latents by \d\.\d\d% of their standard deviation \(measured on 1 image\)", line)


def test_few_images_and_a_cpu_are_not_worth_a_comparison() -> None:
    assert not is_worth_comparing("cpu", 10_000)
    assert not is_worth_comparing("cuda:0", 999)
