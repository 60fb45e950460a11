"""Experiments alternate their sides, respect their budget, and do not affect each other when they fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import session
from bench.gpu.experiment import Experiment, Pair, Part, Reading, run, usual_parts
from bench.gpu.models import MODELS
from bench.gpu.rig import TINY, Bench
from bench.gpu.session import EXPERIMENTS, measured_into
from bench.gpu.watch import Watch
from bench.results import as_json, load, save

SECONDS = Part("", "seconds", "images")
LOADER = Part("loader", "loader", "batches", most=1.0)
IDLE = Part("idle", "share", "share", "share")


def experiment_of(
    calls: list[str],
    *,
    parts: tuple[Part, ...] = (SECONDS, LOADER),
    budget_s: float = 60.0,
    warm: bool = True,
    seconds: float = 0.5,
) -> Experiment:
    @contextmanager
    def opened(bench: Bench) -> Iterator[Pair]:
        def side(name: str) -> object:
            def work(watch: Watch) -> Reading:
                calls.append(name)
                watch.reading = {"seconds": seconds, "bytes": 1.0} | (
                    {"share": 0.25} if watch.recorded else {}
                )
                return {"loader": float(len(calls))}

            return work

        yield Pair(4, side("ours"), side("limit"), {"chosen": 4})

    return Experiment("it", "ours", "limit", parts, budget_s, opened, warm)


def bench_in(folder: Path) -> Bench:
    return Bench(folder, "cpu", TINY)


def test_sides_alternate_and_the_first_round_is_discarded(tmp_path: Path) -> None:
    calls: list[str] = []
    ended = run(experiment_of(calls), bench_in(tmp_path), rounds=3)
    assert [set(calls[at : at + 2]) for at in range(0, 8, 2)] == [{"ours", "limit"}] * 4
    seconds, loader = ended.measured
    assert len(seconds.ours) == len(seconds.limit) == 3
    assert loader.figure.name == "it: loader"
    assert sorted(loader.ours + loader.limit) == [3, 4, 5, 6, 7, 8]
    assert ended.notes == {"chosen": 4}


def test_no_round_starts_after_the_budget_except_the_first(tmp_path: Path) -> None:
    calls: list[str] = []
    ended = run(experiment_of(calls, budget_s=0.0, warm=False), bench_in(tmp_path), rounds=5)
    assert len(calls) == 2
    assert len(ended.measured[0].ours) == 1


def test_the_idle_share_is_measured_in_separate_rounds(tmp_path: Path) -> None:
    calls: list[str] = []
    ended = run(experiment_of(calls, parts=(SECONDS, IDLE)), bench_in(tmp_path), rounds=3)
    seconds, idle = ended.measured
    assert len(seconds.ours) == 3
    assert len(idle.ours) == 2
    assert len(calls) == 2 * (1 + 3 + 2)


@pytest.mark.parametrize(("seconds", "most"), [(0.396, 1.10), (0.4, 1.05), (2.0, 1.05)])
def test_the_bound_is_looser_if_a_unit_of_the_limit_takes_less_than_100_ms(
    tmp_path: Path, seconds: float, most: float
) -> None:
    parts = usual_parts("steps", most=1.05, most_if_short=1.10)
    ended = run(experiment_of([], parts=parts, seconds=seconds), bench_in(tmp_path), rounds=2)
    assert [(each.figure.name, each.figure.most) for each in ended.measured] == [
        ("it", most),
        ("it: memory", None),
        ("it: idle", None),
    ]
    stored = as_json(ended.measured, full=False)["figures"]["it"]
    assert stored["most"] == most


def test_only_training_steps_against_the_bare_loop_have_the_looser_bound() -> None:
    looser = {each.name: part for each in EXPERIMENTS for part in each.parts if part.most_if_short}
    names = [*(model.name for model in MODELS), "SDXL batch 1"]
    assert set(looser) == {f"{name} LoRA step, bf16" for name in names}
    assert {(part.key, part.most, part.most_if_short) for part in looser.values()} == {
        ("seconds", 1.05, 1.10)
    }


def test_a_failure_is_reported_and_other_results_are_stored(tmp_path: Path) -> None:
    @contextmanager
    def broken(bench: Bench) -> Iterator[Pair]:
        raise ValueError("no such thing")
        yield

    failing = Experiment("broken", "ours", "limit", (SECONDS,), 1.0, broken)
    out = tmp_path / "run.json"
    failed = measured_into(out, [failing, experiment_of([])], bench_in(tmp_path), rounds=1)
    assert failed == {"broken": "ValueError: no such thing"}
    stored = load(out)
    assert stored["missing"] == failed
    assert set(stored["figures"]) == {"it", "it: loader"}
    stored["machine"]["memory_gib"] += 1
    save(stored, out)
    assert measured_into(out, [failing], bench_in(tmp_path), rounds=1) == failed
    assert set(load(out)["figures"]) == {"it", "it: loader"}, "results of the same commit are merged"


@pytest.mark.slow
def test_models_in_a_given_folder_are_written_once_and_only_when_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def interrupted_once(folder: Path) -> None:
        written.append(folder)
        folder.mkdir()
        if len(written) == 1:
            raise KeyboardInterrupt

    @contextmanager
    def opened(bench: Bench) -> Iterator[Pair]:
        bench.base(replace(MODELS[0], tiny=interrupted_once))
        with experiment_of([]).open(bench) as pair:
            yield pair

    monkeypatch.setattr(session, "EXPERIMENTS", [replace(experiment_of([]), open=opened)])
    out, kept = tmp_path / "run.json", tmp_path / "kept"
    with pytest.raises(KeyboardInterrupt):
        session.measure_all([], tiny=True, rounds=1, out=out, folder=kept)
    for _ in range(2):
        assert session.measure_all([], tiny=True, rounds=1, out=out, folder=kept) == 0
    assert len(written) == 2
    assert (kept / "tiny" / MODELS[0].name).is_dir()


def test_flux_is_measured_with_settings_for_large_models_under_gradient_checkpointing() -> None:
    parts = {each.name: {part.key for part in each.parts} for each in EXPERIMENTS if "FLUX" in each.name}
    for kind in ("int8", "nf4", "int8 products", "fp8 products", "offload", "compiled"):
        assert parts[f"FLUX.1 LoRA step, checkpointed, {kind}"] == {"seconds", "bytes"}


def test_defaults_of_the_vae_small_batches_and_previews_are_measured_each_as_a_part() -> None:
    parts = {each.name: {part.key for part in each.parts} for each in EXPERIMENTS}
    usual = {"seconds", "bytes", "share"}
    assert parts["SDXL VAE, float32"] == parts["FLUX.1 VAE, float32"] == usual
    assert parts["SDXL batch 1 LoRA step, bf16"] == {*usual, "loader"}
    assert parts["SDXL preview"] == parts["FLUX.1 preview"] == usual
    assert parts["SDXL LoRA step, compiled"] == {"seconds", "bytes"}


def test_figure_names_of_experiments_are_unique() -> None:
    names = [each.line(part).name for each in EXPERIMENTS for part in each.parts]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert len(names) > 20


def test_all_budgets_together_are_at_most_twenty_minutes() -> None:
    assert sum(each.budget_s for each in EXPERIMENTS) <= 20 * 60
