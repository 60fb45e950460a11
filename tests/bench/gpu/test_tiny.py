"""Each GPU experiment's own code, with tiny models of the same classes on the CPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from bench.gpu.experiment import Experiment, run
from bench.gpu.rig import TINY, Bench
from bench.gpu.session import EXPERIMENTS

BOUNDED = ("SDXL VAE, images a pass", "SDXL LoRA step, bf16")
NEEDS = {"nf4": "a GPU", "int8": "a GPU", "int8_torchao": "torchao", "adamw8bit": "bitsandbytes"}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("gpu bench"), "cpu", replace(TINY, images=2, steps=1))


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(each, id=each.name, marks=[] if each.name in BOUNDED else [pytest.mark.slow])
        for each in EXPERIMENTS
    ],
)
def test_an_experiment_measures_what_it_says(bench: Bench, experiment: Experiment) -> None:
    ended = run(experiment, bench, rounds=1)
    need = NEEDS.get(experiment.name.rpartition(", ")[2])
    if need and (need == "a GPU" or find_spec(need) is None):
        assert need in (ended.missing or "")
        return
    assert ended.missing is None
    expected = {experiment.line(part).name for part in experiment.parts}
    found = {each.figure.name for each in ended.measured}
    # A launched training says what it holds of a GPU, and of a CPU nothing.
    assert found == expected - {f"{experiment.name}: training memory"}
    assert all(value >= 0 for each in ended.measured for value in (*each.ours, *each.limit))
