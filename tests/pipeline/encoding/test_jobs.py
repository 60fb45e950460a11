from __future__ import annotations

import json
import random
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cache.store import EntrySpec, TensorSpec
from pipeline.encoding.fill import encoding_order
from pipeline.encoding.jobs import (
    NUM_PROBES,
    Encoding,
    Failure,
    Job,
    ResultsWriter,
    read_encoding,
    read_results,
    share,
    write_encoding,
    write_jobs,
)
from pipeline.encoding.progress import Progress
from tests.listener import Listener


def job(number: int, cost: int = 1) -> Job:
    spec = EntrySpec("latents", f"{number:064x}", {"latent": TensorSpec("float16", (4, cost, 1))})
    return Job(spec, {"inputs": {"n": number}}, {"path": f"/x/{number} 日\n.png"}, f"photos/{number}", cost)


def in_encoding_order(jobs: list[Job]) -> list[Job]:
    """Return the jobs in encoding, computed from rows as the stages do."""
    rows = [
        {
            "key": j.spec.key,
            "name": j.name,
            "cost": j.cost,
            "latent_height": j.spec.tensors["latent"].shape[1],
        }
        for j in jobs
    ]
    schema = {"key": pl.String, "name": pl.String, "cost": pl.Int64, "latent_height": pl.Int32}
    by_key = {j.spec.key: j for j in jobs}
    return [by_key[key] for key in encoding_order(pl.DataFrame(rows, schema=schema))["key"]]


def test_an_order_reads_back_exactly_as_written(tmp_path: Path) -> None:
    jobs = [job(1), job(2, 5)]
    encoding = Encoding("latents", Path("/model"), Path("/store"), {"compute_dtype": "float32"}, jobs)
    read = read_encoding(write_encoding(encoding, tmp_path))
    assert replace(read, jobs=[]) == replace(encoding, jobs=[])
    assert list(read.jobs) == list(read.jobs) == jobs
    assert len(read.jobs) == 2


def test_reading_jobs_waits_until_all_of_them_are_written(tmp_path: Path) -> None:
    jobs = [job(number) for number in range(3)]
    encoding = Encoding("latents", Path("/model"), Path("/store"), {}, [])
    read = read_encoding(write_encoding(encoding, tmp_path, jobs_follow=True))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: (len(read.jobs), list(read.jobs)))
        with pytest.raises(TimeoutError):
            future.result(timeout=0.05)
        write_jobs(jobs, tmp_path)
        assert future.result(timeout=20) == (3, jobs)


def test_L12_only_the_current_job_is_in_memory_for_any_number_of_jobs(tmp_path: Path) -> None:
    jobs = [job(number, 1 + number % 3) for number in range(300)]
    encoding = read_encoding(write_encoding(Encoding("latents", Path("/m"), Path("/s"), {}, jobs), tmp_path))
    del jobs
    references: list[weakref.ref[Job]] = []
    for current in share(encoding.jobs, 1, 2):
        references.append(weakref.ref(current))
        del current
        in_memory = [number for number, each in enumerate(references) if each() is not None]
        assert len(in_memory) <= 1, "jobs that are still in memory"
    assert len(references) > 100


def test_the_most_and_least_expensive_jobs_and_the_first_by_name_are_encoded_first() -> None:
    jobs = [job(number, cost) for number, cost in ((5, 4), (6, 9), (3, 4), (4, 4), (7, 1), (8, 9))]
    for seed in range(5):
        mixed = random.Random(seed).sample(jobs, len(jobs))
        assert [each.name for each in in_encoding_order(mixed)] == [f"photos/{n}" for n in (6, 7, 3, 8, 4, 5)]
    assert in_encoding_order([]) == []
    assert in_encoding_order(jobs[:1]) == jobs[:1]


@given(costs=st.lists(st.integers(1, 50), max_size=40), num_ranks=st.integers(1, 9))
def test_each_job_goes_to_exactly_one_rank_and_the_ranks_have_balanced_costs(
    costs: list[int], num_ranks: int
) -> None:
    jobs = [job(number, cost) for number, cost in enumerate(costs)]
    shares = [list(share(in_encoding_order(jobs), rank, num_ranks)) for rank in range(num_ranks)]
    assert Counter(j.spec.key for part in shares for j in part) == Counter(j.spec.key for j in jobs)
    loads = [sum(j.cost for j in part) for part in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)
    assert shares == [
        list(share(in_encoding_order(jobs[::-1]), rank, num_ranks)) for rank in range(num_ranks)
    ]
    for part in shares:
        shapes = [j.spec.tensors["latent"].shape for j in part]
        changes = [pair for pair in pairwise(shapes) if pair[0] != pair[1]]
        assert len(changes) <= len(set(shapes)) + NUM_PROBES


def test_results_of_all_ranks_are_combined_and_a_partial_last_line_is_ignored(tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "encoding.json", 0) as first:
        first.ended("a", "made")
        first.ended("b", "present")
        first.finish(1.5)
    with ResultsWriter(tmp_path / "encoding.json", 1) as second:
        second.ended("c", Failure("changed", "it has", "mend it"))
    with (tmp_path / "results-1.jsonl").open("a") as file:
        file.write('{"key": "d", "outc')
    results = read_results(tmp_path)
    assert (results.made, results.present, results.work_s) == ({"a"}, {"b"}, 1.5)
    assert results.failed == {"c": Failure("changed", "it has", "mend it")}


def test_T05_only_rank_0_logs_progress_with_one_line_for_all_ranks(tmp_path: Path) -> None:
    listener, other = Listener(), Listener()
    with (
        ResultsWriter(tmp_path / "encoding.json", 1) as writer,
        Progress(other, tmp_path, jobs=range(3), what="latents", rank=1),
    ):
        writer.ended("a", "made")
        writer.ended("b", Failure("x", "y", "z"))
    with Progress(listener, tmp_path, jobs=range(3), what="latents", rank=0):
        pass
    assert listener.lines == ["2/3 latents 1 failed"]
    assert other.lines == []


def test_L16_the_heartbeat_names_the_file_that_is_taking_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.encoding.progress.SLOW_JOB_S", 0.01)
    listener = Listener()
    with Progress(listener, tmp_path, jobs=range(1), what="latents", rank=0) as progress:
        progress.working_on("photos/huge.tif")
        deadline = time.monotonic() + 60
        while len(listener.lines) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert listener.lines[0] == "0/1 latents"
    assert listener.lines[1].startswith("0/1 latents working on photos/huge.tif for ")


def test_progress_counts_each_result_once(tmp_path: Path) -> None:
    listener = Listener()
    progress = Progress(listener, tmp_path, jobs=range(4), what="latents", rank=0)
    path = tmp_path / "results-0.jsonl"
    lines = [json.dumps({"key": str(i), "outcome": "made", "failure": None}) + "\n" for i in range(4)]
    text = "".join(lines)
    for end in range(0, len(text) + 1, 7):
        path.write_text(text[:end])
        progress._count_and_report()
    path.write_text(text)
    progress._count_and_report()
    counts = [int(line.split("/")[0]) for line in listener.lines]
    assert counts == sorted(counts)
    assert counts[-1] == 4
