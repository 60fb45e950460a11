"""Requests and memory of a stage whose cache in S3 has many tiny entries.

`LATENTLINE_LARGE_CACHE=full` runs it with the numbers in docs/scaling.md, which takes about an hour.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.machines import ceph
from tests.machines.counting_proxy import CountingProxy
from tests.machines.filling import fill, foreign_keys
from tests.machines.latents_stage import LatentsStage

NUM_OWN, NUM_FOREIGN = (
    (100_000, 200_000) if os.environ.get("LATENTLINE_LARGE_CACHE") == "full" else (2_000, 25_000)
)

MAX_REQUESTS = 40
"""Maximum number of requests of one new image on top of those of an unchanged dataset."""

MAX_GROWTH_BYTES = 48 * 2**20
"""Maximum memory for the entries of others, however many: that of the concurrent listings."""


class Measured:
    """The stage of one project, which runs through a proxy."""

    def __init__(self, stage: LatentsStage, proxy: CountingProxy) -> None:
        self._stage = stage
        self._proxy = proxy
        self._environment = {**os.environ, **ceph.environment(proxy.url)}
        self._num_added = 0

    def prepare(self, count: int, gateway_url: str) -> None:
        """Fill the cache, and encode one image, so that pictures and statistics of the report exist."""
        self._stage.folder.mkdir()
        self._stage.prepare(count)
        self._stage.fill_cache(gateway_url)
        self.add_and_run()

    def run(self) -> tuple[Counter[str], int]:
        """Run the stage without changes, and return its requests and the peak memory of its process."""
        requests, report = self._run()
        assert (report["encoded"], report["failed"]) == (0, 0)
        return requests, report["peak_bytes"]

    def add_and_run(self) -> Counter[str]:
        """Run the stage with one new image, and return its requests."""
        self._stage.add_image(self._num_added)
        self._num_added += 1
        requests, report = self._run()
        assert (report["encoded"], report["failed"]) == (1, 0)
        return requests

    def _run(self) -> tuple[Counter[str], dict[str, int]]:
        self._proxy.requests.clear()
        report = self._stage.run(self._environment)
        return self._proxy.counts(), report


@pytest.mark.timeout(3 * 3600)
def test_H02_one_new_image_takes_few_requests_and_entries_of_others_take_no_memory(
    gateway: ceph.Gateway, s3: str, proxy: CountingProxy, tiny_sd: Path, tmp_path: Path
) -> None:
    """A recipe whose entries are listed, and one whose few entries are requested one by one."""
    address = f"{s3}/cache"
    small = Measured(LatentsStage(tmp_path / "small", tiny_sd, address), proxy)
    large = Measured(LatentsStage(tmp_path / "large", tiny_sd, address), proxy)
    peaks: dict[str, list[int]] = {"small": [], "large": []}

    def measure(name: str, project: Measured, num_entries: int) -> None:
        unchanged, peak = project.run()
        with_new = project.add_and_run()
        line = (
            f"{name} project, {num_entries:,} entries: unchanged {dict(unchanged)}, one new {dict(with_new)}"
        )
        sys.stdout.write(f"{line}, peak {peak / 2**20:.1f} MiB\n")
        assert with_new.total() - unchanged.total() <= MAX_REQUESTS, line
        peaks[name].append(peak)

    small.prepare(100, gateway.url)
    measure("small", small, 100)
    large.prepare(NUM_OWN, gateway.url)
    measure("large", large, NUM_OWN + 100)
    fill(gateway.url, address.removeprefix("s3://"), foreign_keys(NUM_FOREIGN))
    measure("large", large, NUM_OWN + NUM_FOREIGN + 100)
    measure("small", small, NUM_OWN + NUM_FOREIGN + 100)
    for name, (without, with_foreign) in peaks.items():
        assert with_foreign - without <= MAX_GROWTH_BYTES, name
