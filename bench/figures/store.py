"""The store: writing entries and reading them in two orders, compared with bare safetensors files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np

from bench.measure import Figure, Sides, Workplace, timed
from pipeline.cache.store import EntrySpec, Store, TensorSpec
from pipeline.trained_lora.plan.inputs import PlanInput, PlanInputs
from pipeline.trained_lora.plan.steps import PlanSettings, TrainingPlan

SHAPE = (4, 128, 128)
"""Shape of the latent of a 1024 px image: 128 KiB in float16."""

NUM_BUCKETS = 12


class _Pile:
    """The same latents in a store and as bare files, in separate folders."""

    def __init__(self, folder: Path, count: int) -> None:
        self._root = folder / "store"
        self.store = Store(self._root)
        self.bare = folder / "bare"
        self.bare.mkdir(parents=True)
        random = np.random.default_rng(0)
        self.specs = [
            EntrySpec("latents", random.bytes(32).hex(), {"latent": TensorSpec("float16", SHAPE)})
            for _ in range(count)
        ]
        self._values = random.standard_normal(SHAPE).astype(np.float16)

    def write(self) -> None:
        for spec in self.specs:
            self.store.write(spec, {"latent": self._values}, {})

    def write_bare(self) -> None:
        """Write bare files as durably as the store does: temporary name, fsync, rename."""
        from safetensors.numpy import save

        for spec in self.specs:
            temp = self.bare / f"{spec.key}.tmp"
            with temp.open("wb") as file:
                file.write(save({"latent": self._values}))
                file.flush()
                os.fsync(file.fileno())
            temp.rename(self._bare_path(spec))

    def empty(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.rmtree(self.bare)
        self.bare.mkdir()

    def read(self, order: Sequence[int]) -> None:
        from pipeline.cache.worker.tensors import read_torch

        for index in order:
            read_torch(self.store, self.specs[index])

    def read_bare(self, order: Sequence[int]) -> None:
        from safetensors.torch import load_file

        for index in order:
            load_file(self._bare_path(self.specs[index]))

    def _bare_path(self, spec: EntrySpec) -> Path:
        return self.bare / f"{spec.key}.safetensors"


def _count(place: Workplace) -> int:
    return 2000 if place.full else 400


@contextmanager
def _write(place: Workplace) -> Generator[Sides]:
    pile = _Pile(place.folder, _count(place))

    def write_from_empty(work: Callable[[], None]) -> float:
        pile.empty()
        return timed(work)()

    yield Sides(
        len(pile.specs), lambda: write_from_empty(pile.write), lambda: write_from_empty(pile.write_bare)
    )


def _read(order_of: Callable[[int], Sequence[int]]) -> Callable[[Workplace], AbstractContextManager[Sides]]:
    @contextmanager
    def opened(place: Workplace) -> Generator[Sides]:
        pile = _Pile(place.folder, _count(place))
        pile.write()
        pile.write_bare()
        order = order_of(len(pile.specs))
        yield Sides(len(order), timed(lambda: pile.read(order)), timed(lambda: pile.read_bare(order)))

    return opened


def random_order(count: int) -> list[int]:
    """Return every entry index once, shuffled."""
    return np.random.default_rng(1).permutation(count).tolist()


def plan_order(count: int) -> list[int]:
    """Return every entry index once, in the order of a training epoch with batches of 4."""
    samples = [PlanInput(f"{index:06}", f"bucket {index % NUM_BUCKETS}") for index in range(count)]
    settings = PlanSettings(
        steps=count,
        batch_size=4,
        gradient_accumulation=1,
        num_processes=1,
        caption_dropout=0.0,
        seed=0,
    )
    plan = TrainingPlan(PlanInputs.of(samples), settings)
    epoch = plan[: plan.steps_per_epoch]
    return [int(slot.variant_id) for step in epoch for slot in step.slots()]


FIGURES = [
    Figure(
        "store write",
        "entries",
        "write latents of 128 KiB",
        "write with safetensors, fsync and rename",
        None,
        _write,
    ),
    Figure(
        "store read random",
        "entries",
        "read latents of 128 KiB in random order",
        "safetensors.torch.load_file",
        None,
        _read(random_order),
    ),
    Figure(
        "store read plan",
        "entries",
        "read latents of 128 KiB in the order of a training plan",
        "safetensors.torch.load_file",
        None,
        _read(plan_order),
    ),
]
