"""Every GPU experiment runs on the CPU with tiny models of the same classes."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from bench.gpu.experiment import Experiment, run
from bench.gpu.rig import TINY, Bench
from bench.gpu.session import EXPERIMENTS

NEEDS = {"nf4": "a CUDA GPU", "fp8 products": "a GPU", "int8": "torchao", "adamw8bit": "bitsandbytes"}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("gpu bench"), "cpu", replace(TINY, images=2, steps=1))


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=[each.name for each in EXPERIMENTS])
def test_an_experiment_measures_all_of_its_parts(bench: Bench, experiment: Experiment) -> None:
    ended = run(experiment, bench, rounds=1)
    need = NEEDS.get(experiment.name.rpartition(", ")[2])
    if need and ("GPU" in need or find_spec(need) is None):
        assert need in (ended.missing or "")
        return
    assert ended.missing is None
    expected = {experiment.line(part).name for part in experiment.parts}
    measured = {each.figure.name for each in ended.measured}
    # A launched training reports its memory on a GPU only.
    assert measured == expected - {f"{experiment.name}: training memory"}
    assert [each for each in ended.measured if min(*each.ours, *each.limit) < 0] == []
