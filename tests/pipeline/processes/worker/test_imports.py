"""`quick_imports` imports what a process needs, and leaves the garbage collector as it was."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]


def run_python(program: str) -> None:
    """Run a program in a new process, because this one has imported the libraries already."""
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr


LIBRARIES = """
import gc, importlib, sys
from pipeline.processes.worker.imports import import_hidden, quick_imports

with quick_imports():
    assert not gc.isenabled()
    importlib.import_module("pipeline.trained_lora.worker.__main__").import_libraries()
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000
import diffusers, peft, torch
"""


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_without_a_gpu_bitsandbytes_is_imported_only_for_its_optimizers() -> None:
    run_python(f"""{LIBRARIES}
if torch.cuda.device_count() == 0:
    assert sys.modules["bitsandbytes"] is None
    import_hidden("torch.optim")
    assert sys.modules["bitsandbytes"] is None

layer = torch.nn.Linear(128, 64)
optimizer = import_hidden("bitsandbytes.optim").AdamW8bit(layer.parameters(), lr=0.1)
before = layer.weight.detach().clone()
layer(torch.ones(1, 128)).sum().backward()
optimizer.step()
assert not torch.equal(layer.weight, before)
""")


def test_scipys_large_modules_are_imported_when_they_are_used() -> None:
    run_python(f"""{LIBRARIES}
import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler, LMSDiscreteScheduler, StableDiffusionPipeline
from transformers.loss.loss_for_object_detection import linear_sum_assignment

assert not any(name.startswith("scipy.special") for name in sys.modules), "all of them import it"

lms = LMSDiscreteScheduler()
lms.set_timesteps(4)
assert np.isclose(lms.get_lms_coefficient(1, 0, 0), lms.sigmas[1] - lms.sigmas[0], rtol=1e-4), "integrate"

rows, columns = linear_sum_assignment(np.array([[1, 2], [0, 5]]))
assert (rows.tolist(), columns.tolist()) == ([0, 1], [1, 0])

flow = FlowMatchEulerDiscreteScheduler(use_beta_sigmas=True)
flow.set_timesteps(3)
low, high = flow.sigmas[2], flow.sigmas[0]
from scipy.stats import beta
assert np.isclose(flow.sigmas[1], low + beta.ppf(0.5, 0.6, 0.6) * (high - low))
import scipy.optimize
assert scipy.optimize is sys.modules["scipy.optimize"]
assert scipy.optimize.minimize_scalar(lambda x: (x - 3) ** 2).success
""")


def test_imports_that_fail_leave_the_collector_enabled() -> None:
    run_python("""
import gc
from pipeline.processes.worker.imports import quick_imports

try:
    with quick_imports():
        import no_such_module
except ImportError:
    assert gc.isenabled()
else:
    raise AssertionError
""")
