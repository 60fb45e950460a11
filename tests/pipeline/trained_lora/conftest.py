"""Settings of torch and Accelerate for tests that train in this process, and a finished run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.in_process_worker import InProcessLaunch, forget_precision
from tests.pipeline.trained_lora.project import PROMPTS, Project, project_in
from tests.pipeline.trained_lora.rank_server import RankServer
from tests.pipeline.trained_lora.runs import run


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because parallel test processes that use all cores slow each other down."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Return the server of training processes, which has imported torch once for all tests."""
    with RankServer(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def any_precision() -> Iterator[None]:
    """Reset Accelerate's state, which otherwise fixes the precision for the lifetime of the process."""
    forget_precision()
    yield
    forget_precision()


@pytest.fixture(scope="session")
def finished_once(
    tmp_path_factory: pytest.TempPathFactory, tiny_bases: dict[str, Path]
) -> Callable[..., Project]:
    """Return a function that trains a project of some settings once, and returns it as it was after that.

    Tests may change its output folder and add others, but not change its cache.
    """
    pristine: dict[str, tuple[Project, Path]] = {}

    def finished(**settings: Any) -> Project:
        key = repr(sorted(settings.items()))
        if key not in pristine:
            project = project_in(tmp_path_factory.mktemp("finished"), tiny_bases, **settings)
            run(project, InProcessLaunch())
            output = project.recipe.output_dir
            pristine[key] = project, shutil.copytree(output, output.with_name("pristine"))

        project, copy = pristine[key]
        kept = {copy, project.recipe.cache_dir}
        for folder in copy.parent.iterdir():
            if folder not in kept:  # the outputs of the last test
                shutil.rmtree(folder)
        shutil.copytree(copy, project.recipe.output_dir)
        return project

    return finished


@pytest.fixture
def trained(finished_once: Callable[..., Project]) -> Project:
    """A project with a finished run of 4 steps and LoRAs of the steps 2 and 4, as `finished_once` returns."""
    return finished_once(steps=4, checkpoint_every=2, gradient_accumulation=1, sample_prompts=PROMPTS)
