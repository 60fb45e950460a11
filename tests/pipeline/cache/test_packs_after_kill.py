"""A process that is killed while it seals or collects garbage leaves every entry valid; a rerun completes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator
from pathlib import Path

import fsspec
import pytest

from pipeline.cache.store import Store
from pipeline.maintenance.gc import delete, survey
from pipeline.storage.addresses import address
from tests.pipeline.pack_killer import NUM_ENTRIES, USED, Killer, act, killer
from tests.pipeline.packs_case import single_files, spec_of, write_entries
from tests.pipeline.used_case import OLD_S, lists, make_old, use, used

ALL = range(NUM_ENTRIES)
MIN_CHANGES = {"seal": 2, "gc": 5, "gc of all ages": 1, "use": 2}
"""Number of files that each action writes or deletes; on a local disk, each file takes several changes."""


@pytest.fixture(scope="module")
def local_killer() -> Generator[Killer]:
    with killer() as started:
        yield started


@pytest.fixture(
    params=["folder", pytest.param("s3", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def new_cache(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Return a function that returns the address of a new cache."""
    if request.param == "folder":
        return lambda: str(tmp_path / uuid.uuid4().hex)
    request.getfixturevalue("s3")
    bucket = uuid.uuid4().hex
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    return lambda: f"s3://{bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def killed(new_cache: Callable[[], str], request: pytest.FixtureRequest) -> Generator[Killer]:
    if new_cache().startswith("s3"):
        with killer() as started:  # the variables of the server are those of this test
            yield started
    else:
        yield request.getfixturevalue("local_killer")


def invalid(cache: str, numbers: range) -> list[int]:
    store = Store(address(cache))
    return [number for number in numbers if not store.check(spec_of(number)).valid]


def each_kill(killed: Killer, action: str, prepare: Callable[[], str], check: Callable[[str], None]) -> int:
    """Kill the action before each of its changes, each time in a new cache; return the number of changes."""
    number = 0
    while True:
        number += 1
        cache = prepare()
        was_killed = killed.run(action, cache, number)
        check(cache)
        if not was_killed:
            return number - 1
        act(action, cache)
        check(cache)


def test_a_kill_while_sealing_leaves_all_entries_and_a_rerun_completes(
    new_cache: Callable[[], str], killed: Killer
) -> None:
    singles: dict[str, dict[str, bytes]] = {}

    def prepare() -> str:
        cache = new_cache()
        store = Store(address(cache))
        write_entries(store, NUM_ENTRIES)
        singles[cache] = single_files(store)
        return cache

    def check(cache: str) -> None:
        assert single_files(Store(address(cache))) == singles[cache]
        assert invalid(cache, ALL) == []

    num_changes = each_kill(killed, "seal", prepare, check)
    assert num_changes >= MIN_CHANGES["seal"]
    for cache in singles:
        store = Store(address(cache))
        assert len(store.packed("latents", (spec_of(number).key for number in ALL))) == NUM_ENTRIES


def test_a_kill_while_gc_deletes_single_entries_leaves_all_entries_readable(
    new_cache: Callable[[], str], killed: Killer
) -> None:
    opened_before = {}

    def prepare() -> str:
        cache = new_cache()
        store = Store(address(cache))
        specs = write_entries(store, NUM_ENTRIES)
        use(address(cache), [spec.key for spec in specs])
        act("seal", cache)
        opened_before[cache] = store
        return cache

    def check(cache: str) -> None:
        assert invalid(cache, ALL) == []
        assert all(opened_before[cache].read(spec_of(number)) for number in ALL)

    num_changes = each_kill(killed, "gc", prepare, check)
    assert num_changes >= MIN_CHANGES["gc"]
    assert all(single_files(store) == {} for store in opened_before.values())


def test_a_kill_while_gc_deletes_a_pack_leaves_the_other_packs(
    new_cache: Callable[[], str], killed: Killer
) -> None:
    """The pack with three entries is not used; the other one is."""
    in_order = sorted(ALL, key=lambda number: spec_of(number).key)
    caches: list[str] = []

    def prepare() -> str:
        cache = new_cache()
        caches.append(cache)
        write_entries(Store(address(cache)), NUM_ENTRIES)
        act("seal", cache)
        delete(address(cache), survey(address(cache)))
        return cache

    def check(cache: str) -> None:
        store = Store(address(cache))
        states = {number: store.check(spec_of(number)).status for number in ALL}
        assert all(states[number] == "valid" for number in USED)
        assert len({states[number] for number in in_order[:3]}) == 1
        assert set(states.values()) <= {"valid", "missing"}

    num_changes = each_kill(killed, "gc of all ages", prepare, check)
    assert num_changes >= MIN_CHANGES["gc of all ages"]
    for cache in caches:
        packs = sorted(Store(address(cache)).folder.stats("packs/latents"))
        assert len(packs) == 1
        assert invalid(cache, ALL) == sorted(in_order[:3])


def test_a_kill_while_keys_are_recorded_leaves_earlier_lists_and_a_rerun_completes(
    new_cache: Callable[[], str], killed: Killer
) -> None:
    earlier = "ab" * 32

    def prepare() -> str:
        cache = new_cache()
        write_entries(Store(address(cache)), NUM_ENTRIES)
        use(address(cache), [earlier])
        return cache

    def check(cache: str) -> None:
        assert used(address(cache)) in ({earlier}, {earlier, *(spec_of(number).key for number in ALL)})
        delete(address(cache), survey(address(cache)))
        assert invalid(cache, ALL) == []

    num_changes = each_kill(killed, "use", prepare, check)
    assert num_changes >= MIN_CHANGES["use"]


def test_a_kill_while_gc_deletes_single_entries_and_lists_keeps_used_ones(
    local_killer: Killer, tmp_path: Path
) -> None:
    keys = {number: spec_of(number).key for number in ALL}
    caches: list[Path] = []

    def prepare() -> str:
        cache = tmp_path / uuid.uuid4().hex
        caches.append(cache)
        write_entries(Store(cache), NUM_ENTRIES)
        use(cache, [keys[number] for number in ALL if number not in USED])
        make_old(cache, lists_too=True)
        use(cache, [keys[number] for number in USED])
        return str(cache)

    def check(cache: str) -> None:
        states = {number: Store(Path(cache)).check(spec_of(number)).status for number in ALL}
        assert all(states[number] == "valid" for number in USED)
        assert set(states.values()) <= {"valid", "missing"}
        young = [path for path in lists(Path(cache)) if path.stat().st_mtime > OLD_S]
        assert [path.stat().st_size for path in young] == [32 * len(USED)]

    num_changes = each_kill(local_killer, "gc", prepare, check)
    assert num_changes >= NUM_ENTRIES - len(USED) + 1
    for cache in caches:
        assert invalid(str(cache), ALL) == sorted(set(ALL) - set(USED))
        assert len(lists(cache)) == 1
