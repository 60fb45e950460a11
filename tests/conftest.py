"""Fixtures and settings that several test files share."""

import gc
import os
import re
import reprlib
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from enum import Enum
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from pipeline.processes.launch import Meanwhile
from tests.in_process_worker import InProcessLaunch
from tests.remote_folders import S3_ENVIRONMENT, s3_server

# Set before torch is imported: spinning OpenMP threads lose all progress on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A job in the background of a shell ignores SIGINT, one of nohup SIGHUP, and so would all processes of tests.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No deadline, because the duration of an example depends on the load of the machine.
settings.register_profile("latentline", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("latentline")

pytest_plugins = [
    "tests.pipeline.bind_mounts",
    "tests.pipeline.cache_case",
    "tests.pipeline.trained_lora.project",
    "tests.tiny_models",
]
"""Modules of fixtures that tests in several folders use."""

CROPS = {
    "astronaut": ("astronaut.png", (100, 0, 340, 180), "portrait of a smiling astronaut"),
    "cat": ("chelsea.png", (120, 60, 330, 230), "a cat that looks at the camera"),
    "coffee": ("coffee.png", (150, 60, 480, 300), "a cup of coffee on a wooden table"),
    "rocket": ("rocket.jpg", (250, 40, 400, 420), "a rocket on its launch pad at dusk"),
    "camera": ("camera.png", (90, 60, 330, 300), "a man behind a camera, black and white"),
}
"""Photograph of scikit-image, box (left, upper, right, lower) and caption, by file name."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without collecting garbage, and exempt all that exists then from later searches.

    The modules and tests are a million objects, which stay until the end. Each full search of them takes a
    second, also the searches with which a test or a training frees its memory.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


SHORT = reprlib.Repr()  # it sorts sets, so that ids are the same in all xdist workers
SHORT.maxstring, SHORT.maxother = 40, 60
LONGEST_STRING_IN_PYTEST_IDS = 100


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a parameter that pytest would only number, as in `rule0`, by its shortened representation."""
    if isinstance(val, str | bytes):
        return SHORT.repr(val) if len(val) > LONGEST_STRING_IN_PYTEST_IDS else None
    if isinstance(val, int | float | complex | Enum | re.Pattern | None) or hasattr(val, "__name__"):
        return None
    if " at 0x" in repr(val):  # an address, which differs between xdist workers
        return None
    text = " ".join((str(val) if isinstance(val, Path) else SHORT.repr(val)).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


Build = Callable[[Path], object]


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[[str, Build], Path]:
    """Return a function that builds a folder once per session for all xdist workers; tests only read it."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent

    def build_once(name: str, build: Build) -> Path:
        folder, complete = shared / name, shared / f"{name}.complete"
        with FileLock(shared / f"{name}.lock"):
            if not complete.exists():
                # A worker that failed has left a part of the folder.
                shutil.rmtree(folder, ignore_errors=True)
                build(folder)
                complete.touch()
        return folder

    return build_once


def write_photos(folder: Path) -> None:
    """Write five photographs with edges of 150 to 380 pixels, as PNG with captions, to a new folder."""
    import skimage
    from PIL import Image

    folder.mkdir()
    for name, (source, box, caption) in CROPS.items():
        with Image.open(Path(skimage.__file__).parent / "data" / source) as image:
            image.convert("RGB").crop(box).save(folder / f"{name}.png", compress_level=1, icc_profile=None)
        (folder / f"{name}.txt").write_text(caption + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def photos_once(shared_folder: Callable[[str, Build], Path]) -> Path:
    """The folder from which `photos` copies; tests only read it."""
    return shared_folder("photos", write_photos)


@pytest.fixture
def photos(tmp_path: Path, photos_once: Path) -> Path:
    """Five photographs as PNG with captions; the test may change them."""
    return shutil.copytree(photos_once, tmp_path / "photos")


@pytest.fixture
def in_process_launch() -> InProcessLaunch:
    """A launch of the real encoder in this process, which saves the seconds of starting a process."""
    return InProcessLaunch()


@pytest.fixture
def forbidden_launch() -> Callable[[str, Path], None]:
    """A launch that fails the test."""

    def launch(module: str, order: Path, meanwhile: Meanwhile | None = None) -> None:
        pytest.fail(f"{module} was launched for {order.read_text(encoding='utf-8')[:300]}")

    return launch


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """Start a local S3 server, and provide its URL."""
    with s3_server() as url:
        yield url


@pytest.fixture
def s3(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the environment of this process and its children to a local S3 server, and return its URL."""
    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL_S3": s3_url}.items():
        monkeypatch.setenv(name, value)
    return s3_url
