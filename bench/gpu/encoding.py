"""vae_latents on a GPU: the VAE alone, float16 overflow, batch sizes, threads and memory format."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from bench.gpu import bare
from bench.gpu.experiment import Experiment, GpuSide, Pair, Part, Reading, usual_parts
from bench.gpu.models import MODELS
from bench.gpu.rig import Bench, RecordedEncoding, Silent
from bench.gpu.watch import Watch

if TYPE_CHECKING:
    from pipeline.vae_latents.worker.encoder import LatentEncoder

OVERFLOWING_GAIN = 1e5
"""Gain of the first convolution, which exceeds float16's maximum of 65504. The following norms remove it, as
in the published VAE of SDXL."""

SDXL, FLUX = MODELS

DTYPES = {"float32": MODELS, "bfloat16": MODELS, "float16": (SDXL,)}
"""Models whose VAE is measured in each dtype; float32 is the default of both models."""

_RUNS = count()


class Encoder:
    """The encoder of a cache stage in this process, with its model loaded."""

    def __init__(self, bench: Bench, encoding: RecordedEncoding, *, threads: int | None = None) -> None:
        """Load the VAE."""
        from pipeline.encoding.progress import Progress
        from pipeline.vae_latents.worker.encoder import LatentEncoder

        self._bench = bench
        self._jobs = encoding.jobs
        self._folder = bench.fresh_folder(f"encoding-{next(_RUNS)}")
        self._progress = Progress(Silent(), self._folder, jobs=self._jobs, what="latents", rank=1)
        self._encoder: LatentEncoder = LatentEncoder(
            encoding.encoding, bench.device, self._progress, threads=threads
        )

    def __call__(self, watch: Watch, *, without_bytes: int = 0) -> Reading:
        """Read, decode and encode every image, and write it into an empty store."""
        from pipeline.cache.store import Store
        from pipeline.encoding.jobs import ResultsWriter
        from pipeline.encoding.worker.run import write_outcomes

        folder = self._bench.fresh_folder("store")
        store = Store(folder)
        results = ResultsWriter(self._folder / "order.json", 0)
        with results, watch.work(without_bytes=without_bytes):
            outcomes = self._encoder.encoded(self._jobs, store)
            write_outcomes(outcomes, store, results=results, progress=self._progress)
        num_written = sum(1 for _ in folder.rglob("*.safetensors"))
        assert num_written == len(self._jobs), f"{num_written} latents of {len(self._jobs)} images"
        return {}


@contextmanager
def _against_the_vae(bench: Bench, model: Any, dtype: str) -> Generator[Pair]:
    from bench.gpu.watch import held_bytes
    from pipeline.vae_latents.worker.vae_batches import GPU_BATCH_PX

    rig = bench.rig(model, "encoding")
    encoding = rig.encoding().computing(dtype)
    network = bare.vae(rig.family.model.component("vae"), dtype, bench.device)
    size = bench.scale.resolution
    images = bare.pixels(network, max(1, GPU_BATCH_PX // size**2) if bench.scale.full else 2, size)
    bare_bytes = held_bytes(bench.device)
    encoder = Encoder(bench, encoding)
    own_bytes = held_bytes(bench.device) - bare_bytes

    def limit(watch: Watch) -> Reading:
        with watch.work(without_bytes=own_bytes):
            bare.encode(network, images, len(encoding.jobs))
        return {}

    yield Pair(len(encoding.jobs), partial(encoder, without_bytes=bare_bytes), limit)


@contextmanager
def _overflowing(bench: Bench) -> Generator[Pair]:
    rig = bench.rig(SDXL, "encoding")
    folder = bench.folder / "overflowing"
    if not folder.exists():
        network = bare.vae(rig.family.model.component("vae"), "float32", bench.device)
        network.encoder.conv_in.weight.mul_(OVERFLOWING_GAIN)
        network.save_pretrained(folder)
        del network
    encoding = rig.encoding().computing("float16", folder)
    half_vae, float_vae = (bare.vae(folder, dtype, bench.device) for dtype in ("float16", "float32"))
    size, number = bench.scale.resolution, len(encoding.jobs)
    many, one = bare.pixels(half_vae, 2, size), bare.pixels(float_vae, 1, size)

    def limit(watch: Watch) -> Reading:
        with watch.work():
            bare.encode(half_vae, many, number)
            bare.encode(float_vae, one, number)
        return {}

    yield Pair(number, Encoder(bench, encoding), limit)


@contextmanager
def _batch_sizes(bench: Bench) -> Generator[Pair]:
    import torch

    from pipeline.vae_latents.worker.vae_batches import VaeBatches

    rig, size = bench.rig(SDXL, "encoding"), bench.scale.resolution
    rig.prepare()
    passes = VaeBatches(rig.family, dtype="bfloat16", device=bench.device, say=lambda text: None)
    chosen = passes.batch_size(size * size)
    network = bare.vae(rig.family.model.component("vae"), "bfloat16", bench.device)
    number = bench.scale.images
    rates: dict[int, list[float]] = {}

    def seconds(batch: int) -> float:
        watch = Watch(bench.device)
        images = bare.pixels(network, batch, size)
        with watch.work():
            bare.encode(network, images, number)
        rates.setdefault(batch, []).append(round(number / watch.reading["seconds"], 2))
        return watch.reading["seconds"]

    def best(watch: Watch) -> Reading:
        batch_seconds: list[float] = []
        for batch in bench.scale.batches:
            try:
                batch_seconds.append(seconds(batch))
            except torch.OutOfMemoryError:
                break
        return {"seconds": min(batch_seconds)}

    def ours(watch: Watch) -> Reading:
        return {"seconds": seconds(chosen)}

    notes = {"chosen": chosen, "images_per_s": rates}
    yield Pair(number, ours, best, notes)


@contextmanager
def _workers(bench: Bench) -> Generator[Pair]:
    from pipeline.vae_latents.worker.encoder import decode_threads

    rig = bench.rig(SDXL, "encoding")
    encoding = rig.encoding().computing("bfloat16")
    number = len(encoding.jobs)
    rates: dict[int, list[float]] = {}

    def seconds(threads: int) -> float:
        watch = Watch(bench.device)
        Encoder(bench, encoding, threads=threads)(watch)
        rates.setdefault(threads, []).append(round(number / watch.reading["seconds"], 2))
        return watch.reading["seconds"]

    def ours(watch: Watch) -> Reading:
        return {"seconds": seconds(decode_threads())}

    def best(watch: Watch) -> Reading:
        return {"seconds": min(seconds(threads) for threads in bench.scale.workers)}

    yield Pair(number, ours, best, {"chosen": decode_threads(), "images_per_s": rates})


@contextmanager
def _channels_last(bench: Bench) -> Generator[Pair]:
    import torch

    rig, size, number = bench.rig(SDXL, "encoding"), bench.scale.resolution, bench.scale.images
    rig.prepare()
    place = rig.family.model.component("vae")
    last, plain = (bare.vae(place, "bfloat16", bench.device) for _ in range(2))
    plain = plain.to(memory_format=torch.contiguous_format)
    images = bare.pixels(last, 4 if bench.scale.full else 2, size)

    def side(network: Any, pixels: Any) -> GpuSide:
        def run(watch: Watch) -> Reading:
            with watch.work():
                bare.encode(network, pixels, number)
            return {}

        return run

    yield Pair(number, side(last, images), side(plain, images.contiguous()))


def _opening(model: Any, dtype: str) -> Callable[[Bench], AbstractContextManager[Pair]]:
    return partial(_against_the_vae, model=model, dtype=dtype)


_OURS = "images read, decoded, encoded and written, in one process"
_SECONDS = (Part("", "seconds", "images"),)

EXPERIMENTS = [
    *(
        Experiment(
            f"{model.name} VAE, {dtype}",
            _OURS,
            "the VAE's encoder on pixels on the device, as many a pass as ours",
            usual_parts("images", most=1.1),
            30.0,
            _opening(model, dtype),
        )
        for dtype, models in DTYPES.items()
        for model in models
    ),
    Experiment(
        "SDXL VAE, float16 that overflows",
        f"{_OURS}; each again in float32",
        "the encoder in float16, two a pass, and in float32, one a pass",
        _SECONDS,
        45.0,
        _overflowing,
    ),
    Experiment(
        "SDXL VAE, images a pass",
        "the encoder, with as many images a pass as ours takes",
        "the best of those that were tried",
        (Part("", "seconds", "images", most=1.1),),
        40.0,
        _batch_sizes,
    ),
    Experiment(
        "SDXL VAE, decoding threads",
        f"{_OURS}, with as many threads as it chooses",
        "the best of those that were tried",
        (Part("", "seconds", "images", most=1.1),),
        45.0,
        _workers,
    ),
    Experiment(
        "SDXL VAE, channels last",
        "the encoder with weights and pixels channels last, as we run it",
        "the same in torch's usual order",
        _SECONDS,
        20.0,
        _channels_last,
    ),
]
