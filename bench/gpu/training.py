"""trained_lora on a GPU: its steps and loader compared with a bare loop, and the cost of memory settings."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from bench.gpu.bare import BareTraining
from bench.gpu.experiment import Experiment, Pair, Part, Reading, usual_parts
from bench.gpu.models import MODELS, BaseModel
from bench.gpu.rig import Bench, Rig
from bench.gpu.watch import Watch, held_bytes

if TYPE_CHECKING:
    from pipeline.trained_lora.worker.micro_input import MicroInput

FASTER = 5
"""Minimum speed of the loader, as a multiple of the speed of training."""


class Steps:
    """Latentline's training steps in this process, with the model loaded."""

    def __init__(self, rig: Rig, **training: Any) -> None:
        """Load the model."""
        from pipeline.trained_lora.worker.engine import Engine
        from pipeline.trained_lora.worker.loader import MicroBatchMaker

        before_bytes = held_bytes(rig.bench.device)
        job = rig.training_job(**training)
        self.plan = job.plan()
        self._engine = Engine(job, rig.family)
        self._maker = MicroBatchMaker(job, rig.family, self._engine.noise_scheduler)
        self._pin = self._engine.accelerator.device.type == "cuda"
        self.own_bytes = held_bytes(rig.bench.device) - before_bytes

    def __call__(self, watch: Watch, *, without_bytes: int = 0) -> Reading:
        """Read and train, then only read. Return the seconds of reading as `loader`."""
        with watch.work(without_bytes=without_bytes):
            self._read(train=True)
        alone = Watch(watch.device)
        with alone.work():
            self._read(train=False)
        return {"loader": alone.reading["seconds"]}

    def _read(self, *, train: bool) -> None:
        from pipeline.trained_lora.worker.loader import micro_inputs

        inputs = micro_inputs(self.plan, self._maker, rank=0, start=0, pin=self._pin)
        if not train:
            for _ in inputs:
                pass
            return
        for _, batch in self.plan.iterate():
            self._engine.step(batch, inputs, stop=False)
        inputs.close()


def inputs_of(rig: Rig) -> list[MicroInput]:
    """Return the inputs of every step of the rig's plan."""
    from pipeline.trained_lora.worker.loader import MicroBatchMaker
    from pipeline.trained_lora.worker.noise import make_noise_scheduler

    job = rig.training_job()
    maker = MicroBatchMaker(job, rig.family, make_noise_scheduler(rig.family, job.recipe.training))
    return [maker.make(step, batch.micro_batches[0][0]) for step, batch in job.plan().iterate()]


@contextmanager
def one_accelerator() -> Generator[None]:
    """Reset Accelerate's process-wide state before and after the block."""
    from accelerate.state import AcceleratorState

    state: Any = AcceleratorState
    state._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        state._reset_state(reset_partial_state=True)


@contextmanager
def _against_the_bare_loop(bench: Bench, model: BaseModel, training: Mapping[str, Any]) -> Generator[Pair]:
    rig = bench.rig(model, "cached", **training)
    with one_accelerator():
        ours = Steps(rig)
        before_bytes = held_bytes(bench.device)
        bare = BareTraining(rig, inputs_of(rig), bench.device)
        bare_bytes = held_bytes(bench.device) - before_bytes

        def limit(watch: Watch) -> Reading:
            with watch.work(without_bytes=ours.own_bytes):
                bare.steps()
            return {"loader": watch.reading["seconds"] / FASTER}

        notes = {"batch_size": rig.recipe.training.batch_size, "resolution": bench.scale.resolution}
        yield Pair(len(ours.plan), partial(ours, without_bytes=bare_bytes), limit, notes)


@contextmanager
def _against_itself(bench: Bench, model: BaseModel, training: Mapping[str, Any]) -> Generator[Pair]:
    rig = bench.rig(model, "cached")
    with one_accelerator():
        plain = Steps(rig)
        changed = Steps(rig, **training)
        limit = partial(plain, without_bytes=changed.own_bytes)
        notes = {"held_bytes": {"ours": changed.own_bytes, "limit": plain.own_bytes}}
        yield Pair(len(plain.plan), partial(changed, without_bytes=plain.own_bytes), limit, notes)


def _opening(
    function: Callable[..., AbstractContextManager[Pair]], **arguments: Any
) -> Callable[[Bench], AbstractContextManager[Pair]]:
    return partial(function, **arguments)


_LOADER = Part("loader", "loader", "batches", most=1.0)

CHANGES: dict[str, dict[str, Any]] = {
    "gradient checkpointing": {"gradient_checkpointing": True},
    "nf4": {"quantize": "nf4"},
    "int8": {"quantize": "int8"},
    "adamw8bit": {"optimizer": "adamw8bit"},
    "AdamW without fusing": {"optimizer": "torch.optim.AdamW", "optimizer_arguments": {"fused": False}},
    "compiled": {"compile": True},
}
"""Settings that reduce memory or time, measured one at a time."""

CHECKPOINTED: dict[str, dict[str, Any]] = {
    "int8": {"quantize": "int8"},
    "nf4": {"quantize": "nf4"},
    "int8 products": {"compute": "int8"},
    "fp8 products": {"compute": "fp8"},
    "offload": {"offload": 0},
    "compiled": {"compile": True},
}
"""Settings that are compared with bf16 weights on FLUX.1, all with gradient checkpointing."""

_SECONDS_AND_MEMORY = (Part("", "seconds", "steps"), Part("memory", "bytes", "peak", "bytes"))


def _bare_loop(name: str, model: BaseModel, **training: Any) -> Experiment:
    return Experiment(
        f"{name} LoRA step, bf16",
        "reading, noise, forward, backward, AdamW"
        + ("; activations computed again" if model.training else ""),
        "the same denoiser and adapter: forward, backward, AdamW on tensors on the device",
        (*usual_parts("steps", most=1.05, most_if_short=1.10), _LOADER),
        80.0,
        _opening(_against_the_bare_loop, model=model, training=training),
    )


def _text(change: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in change.items())


EXPERIMENTS = [
    *(_bare_loop(model.name, model) for model in MODELS),
    # With this batch size, a step waits for the CPU to start kernels.
    _bare_loop("SDXL batch 1", MODELS[0], batch_size=1),
    *(
        Experiment(
            f"SDXL LoRA step, {name}",
            f"our steps with {_text(change)}",
            "our steps without it",
            _SECONDS_AND_MEMORY,
            45.0,
            _opening(_against_itself, model=MODELS[0], training=change),
        )
        for name, change in CHANGES.items()
    ),
    *(
        Experiment(
            f"FLUX.1 LoRA step, checkpointed, {name}",
            f"our steps with {_text(change)} and gradient checkpointing",
            "our steps with bf16 weights and gradient checkpointing",
            _SECONDS_AND_MEMORY,
            45.0,
            _opening(_against_itself, model=MODELS[1], training={**change, "gradient_checkpointing": True}),
        )
        for name, change in CHECKPOINTED.items()
    ),
]
