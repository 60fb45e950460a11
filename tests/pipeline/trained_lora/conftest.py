"""Settings of torch and Accelerate for tests that train in this process, and a finished run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

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
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_bases: dict[str, Path]) -> tuple[Project, Path]:
    """Train 4 steps with LoRAs of the steps 2 and 4; return the project and a copy of its output folder."""
    project = project_in(
        tmp_path_factory.mktemp("finished"),
        tiny_bases,
        steps=4,
        checkpoint_every=2,
        gradient_accumulation=1,
        sample_prompts=PROMPTS,
    )
    run(project, InProcessLaunch())
    output = project.recipe.output_dir
    return project, shutil.copytree(output, output.with_name("pristine"))


@pytest.fixture
def trained(finished: tuple[Project, Path]) -> Project:
    """A project with a finished run of 4 steps; tests may change its output folder, but not its cache."""
    project, pristine = finished
    shutil.rmtree(project.recipe.output_dir)
    shutil.copytree(pristine, project.recipe.output_dir)
    return project
