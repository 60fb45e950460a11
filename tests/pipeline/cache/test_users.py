"""The registrations that record which output folder needs which cache entries."""

from __future__ import annotations

import errno
import hashlib
import json
import platform
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest

from pipeline.cache.local_folder import LocalFolder
from pipeline.cache.users import (
    CacheUser,
    Registrations,
    access_fix,
    read_users,
    record_speed,
    recorded_speed,
    register_run,
    register_user,
    unregister_kinds,
    unregister_run,
    unregister_user,
)
from pipeline.errors import StoreError
from pipeline.storage.addresses import Address, Url
from pipeline.storage.remote_folder import ACCESS_FIX

KEYS = [hashlib.sha256(bytes([index])).hexdigest() for index in range(5)]


def test_read_users_returns_each_output_folder_with_its_keys_of_all_kinds(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "zwei ü"
    register_user(tmp_path, one, recipe="flowers", kind="latents", keys=KEYS[:2])
    register_user(tmp_path, one, recipe="flowers", kind="text", keys=KEYS[2:3])
    register_user(tmp_path, two, recipe="faces", kind="latents", keys=[])
    users = {user.recipe: user for user in read_users(tmp_path)}
    keys = {"latents": frozenset(KEYS[:2]), "text": frozenset(KEYS[2:3])}
    assert users["flowers"] == CacheUser(one, "flowers", keys, platform.node())
    assert users["flowers"].keys == set(KEYS[:3])
    assert users["faces"] == CacheUser(two, "faces", {"latents": frozenset()}, platform.node())


def test_a_new_registration_replaces_the_previous_one_of_its_kind(tmp_path: Path) -> None:
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=KEYS[:2])
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=[KEYS[4], KEYS[4]])
    (user,) = read_users(tmp_path)
    assert user.keys == {KEYS[4]}


def test_registering_the_same_keys_again_writes_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=KEYS)
        stats = {path: path.stat().st_ino for path in (tmp_path / "outputs").iterdir()}
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=reversed(KEYS))
    assert {path: path.stat().st_ino for path in (tmp_path / "outputs").iterdir()} == stats


def test_an_unregistered_folder_is_not_a_user(tmp_path: Path) -> None:
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=KEYS)
    assert unregister_user(tmp_path, tmp_path / "out")
    assert list(read_users(tmp_path)) == []
    assert not unregister_user(tmp_path, tmp_path / "out")


def test_L13_a_run_is_registered_besides_the_jobs_until_it_is_unregistered(tmp_path: Path) -> None:
    cache, output_dir = tmp_path / "cache", tmp_path / "out"
    run = "0123456789abcdef"
    register_run(cache, output_dir, recipe="flowers", run=run, keys=[KEYS[1], KEYS[0], KEYS[1]])
    register_user(cache, output_dir, recipe="flowers", kind="latents", keys=KEYS[3:])
    (user,) = read_users(cache)
    assert (user.keys, user.run_keys) == (set(KEYS[3:]), {run: set(KEYS[:2])})
    (file,) = (cache / "outputs").glob(f"{user.id}-*{run}.keys")
    assert file.read_bytes() == bytes.fromhex("".join(sorted(KEYS[:2]))), "versions before runs read it too"

    assert not unregister_run(cache, output_dir, "another run")
    assert not unregister_run(cache, tmp_path / "never registered", run)
    assert unregister_run(cache, output_dir, run)
    assert not unregister_run(cache, output_dir, run)
    (user,) = read_users(cache)
    assert (user.keys, user.run_keys) == (set(KEYS[3:]), {})
    assert not (tmp_path / "never registered").exists()


def test_a_forgotten_output_folder_has_no_runs(tmp_path: Path) -> None:
    register_run(tmp_path, tmp_path / "out", recipe="flowers", run="1" * 16, keys=KEYS)
    assert unregister_user(tmp_path, tmp_path / "out")
    assert list((tmp_path / "outputs").iterdir()) == []


def test_a_registration_of_many_keys_is_written_completely(tmp_path: Path) -> None:
    keys = [hashlib.sha256(str(index).encode()).hexdigest() for index in range(70_000)]
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=keys)
    (user,) = read_users(tmp_path)
    assert user.keys == set(keys)


def register_on(machine: str, cache: Path, output_dir: Path, keys: list[str]) -> None:
    """Register keys as a machine with this host name would."""
    with mock.patch("platform.node", return_value=machine):
        register_user(cache, output_dir, recipe="flowers", kind="latents", keys=keys)


def test_L13_two_machines_with_the_same_path_are_two_users(tmp_path: Path) -> None:
    cache, output_dir = tmp_path / "cache", tmp_path / "out"
    register_on("anna", cache, output_dir, KEYS[:2])
    shutil.rmtree(output_dir)  # the other machine has its own disk
    register_on("ben", cache, output_dir, KEYS[2:3])
    users = {user.machine: user for user in read_users(cache)}
    assert users["anna"] == CacheUser(output_dir, "flowers", {"latents": frozenset(KEYS[:2])}, "anna")
    assert users["ben"] == CacheUser(output_dir, "flowers", {"latents": frozenset(KEYS[2:3])}, "ben")

    with mock.patch("platform.node", return_value="ben"):
        assert unregister_user(cache, output_dir)
    assert [user.machine for user in read_users(cache)] == ["anna"]


def test_a_copy_of_an_output_folder_is_a_user_of_its_own(tmp_path: Path) -> None:
    cache, output_dir = tmp_path / "cache", tmp_path / "out"
    register_user(cache, output_dir, recipe="flowers", kind="latents", keys=KEYS[:2])
    shutil.copytree(output_dir, tmp_path / "copy")
    register_user(cache, tmp_path / "copy", recipe="copied", kind="latents", keys=KEYS[2:])
    assert {user.recipe: user.keys for user in read_users(cache)} == {
        "flowers": set(KEYS[:2]),
        "copied": set(KEYS[2:]),
    }


def test_a_registration_of_an_earlier_version_gets_a_new_id_and_keeps_its_keys(tmp_path: Path) -> None:
    output_dir, folder = tmp_path / "out", tmp_path / "outputs"
    folder.mkdir()
    old_id = hashlib.sha256(str(output_dir).encode()).hexdigest()[:16]
    (folder / f"{old_id}.json").write_text(json.dumps({"output_dir": str(output_dir), "recipe": "flowers"}))
    (folder / f"{old_id}-text.keys").write_bytes(bytes.fromhex(KEYS[4]))
    assert [user.machine for user in read_users(tmp_path)] == [""]

    register_user(tmp_path, output_dir, recipe="flowers", kind="latents", keys=KEYS[:2])
    (user,) = read_users(tmp_path)
    keys = {"latents": frozenset(KEYS[:2]), "text": frozenset([KEYS[4]])}
    assert user == CacheUser(output_dir, "flowers", keys, platform.node())
    assert not list(folder.glob(f"{old_id}*"))


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".json", b"{"),
        (".json", b"[]"),
        (".json", b"{}"),
        (".json", b'{"output_dir": "/out"}'),
        (".json", None),
        ("-latents.keys", b"short"),
        ("-latents.keys", None),
    ],
)
def test_L13_a_damaged_registration_is_an_error_and_not_an_empty_key_set(
    tmp_path: Path, suffix: str, content: bytes | None
) -> None:
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=KEYS)
    (path,) = (tmp_path / "outputs").glob(f"*{suffix}")
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(StoreError, match="registration") as excinfo:
        list(read_users(tmp_path))
    assert "run the cache job" in excinfo.value.fix


def test_a_cache_without_registrations_has_no_users(tmp_path: Path) -> None:
    assert list(read_users(tmp_path / "none")) == []


def test_speed_is_recorded_per_kind_and_a_damaged_record_is_ignored(tmp_path: Path) -> None:
    assert recorded_speed(tmp_path, "latents") is None
    record_speed(tmp_path, "latents", 0.5)
    record_speed(tmp_path, "text", 0.25)
    assert (recorded_speed(tmp_path, "latents"), recorded_speed(tmp_path, "text")) == (0.5, 0.25)
    for damaged in ("nonsense", "5", "[1]", ""):
        (tmp_path / "speed.json").write_text(damaged)
        assert recorded_speed(tmp_path, "text") is None
    record_speed(tmp_path / "speed.json", "text", 0.5)  # a folder that cannot be written
    assert recorded_speed(tmp_path / "speed.json", "text") is None


def test_registrations_are_read_again_only_where_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, names_read = LocalFolder.read, list[str]()

    def record(folder: LocalFolder, name: str) -> bytes:
        names_read.append(name)
        return read(folder, name)

    monkeypatch.setattr(LocalFolder, "read", record)

    def keys_files_read() -> set[str]:
        kinds = {
            name.removesuffix(".keys").rpartition("-")[2] for name in names_read if name.endswith(".keys")
        }
        names_read.clear()
        return kinds

    def users(registrations: Registrations) -> dict[str, frozenset[str]]:
        names_read.clear()
        (user,) = registrations.read()
        return dict(user.job_keys)

    registrations, out = Registrations(tmp_path), tmp_path / "out"
    register_user(tmp_path, out, recipe="flowers", kind="latents", keys=KEYS[:2])
    register_user(tmp_path, out, recipe="flowers", kind="text", keys=KEYS[2:3])
    expected = {"latents": frozenset(KEYS[:2]), "text": frozenset(KEYS[2:3])}
    assert users(registrations) == expected
    assert keys_files_read() == {"latents", "text"}
    assert users(registrations) == expected
    assert keys_files_read() == set()

    register_user(tmp_path, out, recipe="flowers", kind="text", keys=KEYS[3:])
    assert users(registrations) == {**expected, "text": frozenset(KEYS[3:])}
    assert keys_files_read() == {"text"}

    assert unregister_kinds(tmp_path, out, ["latents", "masks"])
    assert not unregister_kinds(tmp_path, out, ["latents", "masks"])
    assert users(registrations) == {"text": frozenset(KEYS[3:])}


class BusyFolder(LocalFolder):
    """A cache in which another process acts between the listing and the first reading of keys."""

    actions: ClassVar[list[Callable[[], object]]] = []

    def read(self, name: str) -> bytes:
        if name.endswith(".keys") and self.actions:
            self.actions.pop()()
        return super().read(name)


def test_L13_keys_that_a_job_unregisters_while_they_are_read_are_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, out = tmp_path / "cache", tmp_path / "out"
    for kind, keys in (("latents", KEYS[:1]), ("latents-earlier", KEYS[1:2])):
        register_user(cache, out, recipe="flowers", kind=kind, keys=keys)
    register_run(cache, out, recipe="flowers", run="1" * 16, keys=KEYS[2:3])

    def end_jobs() -> None:
        assert unregister_kinds(cache, out, ["latents-earlier"])
        assert unregister_run(cache, out, "1" * 16)

    monkeypatch.setattr(BusyFolder, "actions", [end_jobs])
    monkeypatch.setattr("pipeline.cache.users.cache_folder", BusyFolder)
    (user,) = read_users(cache)
    assert (user.job_keys, user.run_keys) == ({"latents": set(KEYS[:1])}, {})
    assert BusyFolder.actions == []


def test_L13_keys_that_get_another_name_while_they_are_read_are_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job converts the registration of an earlier version."""
    output_dir, folder = tmp_path / "out", tmp_path / "outputs"
    folder.mkdir()
    old_id = hashlib.sha256(str(output_dir).encode()).hexdigest()[:16]
    (folder / f"{old_id}.json").write_text(json.dumps({"output_dir": str(output_dir), "recipe": "flowers"}))
    (folder / f"{old_id}-text.keys").write_bytes(bytes.fromhex(KEYS[4]))

    def convert() -> None:
        register_user(tmp_path, output_dir, recipe="flowers", kind="latents", keys=KEYS[:2])

    monkeypatch.setattr(BusyFolder, "actions", [convert])
    monkeypatch.setattr("pipeline.cache.users.cache_folder", BusyFolder)
    (user,) = read_users(tmp_path)
    assert user.keys == {*KEYS[:2], KEYS[4]}


def test_all_machines_that_use_an_address_are_one_user_and_each_may_unregister_it() -> None:
    name = uuid.uuid4().hex
    cache, output_dir = Url(f"memory://{name}/cache"), Url(f"memory://{name}/out")
    for machine, keys in (("anna", KEYS[:2]), ("ben", KEYS[2:3])):
        with mock.patch("platform.node", return_value=machine):
            register_user(cache, output_dir, recipe="flowers", kind="latents", keys=keys)
    (user,) = read_users(cache)
    assert user == CacheUser(output_dir, "flowers", {"latents": frozenset(KEYS[2:3])}, "")
    assert user.is_here
    assert unregister_user(cache, output_dir)
    assert list(read_users(cache)) == []


def test_a_user_is_here_if_it_is_registered_by_this_machine_or_by_none(tmp_path: Path) -> None:
    users = {
        machine: CacheUser(tmp_path, "flowers", {}, machine)
        for machine in ("", platform.node(), "other host")
    }
    assert [user.is_here for user in users.values()] == [True, True, False]


def test_an_output_folder_that_cannot_exist_has_no_registrations(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert not unregister_run(tmp_path, tmp_path / "file" / "out", "1" * 16)


ACTIONS: dict[str, Callable[[Address, Path], object]] = {
    "cannot be written": lambda cache, out: register_user(cache, out, recipe="r", kind="text", keys=KEYS),
    "cannot be registered": lambda cache, out: register_run(cache, out, recipe="r", run="1" * 16, keys=KEYS),
    "cannot be listed": lambda cache, _: list(read_users(cache)),
}


@pytest.mark.parametrize("message", ACTIONS)
def test_a_cache_that_refuses_access_is_an_error_with_its_location_and_a_fix(
    tmp_path: Path, message: str
) -> None:
    (tmp_path / "outputs").write_text("not a folder")
    with pytest.raises(StoreError, match=message) as excinfo:
        ACTIONS[message](tmp_path, tmp_path / "out")
    assert excinfo.value.where == f"{tmp_path}/outputs"
    assert excinfo.value.fix


def test_a_registration_that_cannot_be_deleted_is_an_error_with_its_location(tmp_path: Path) -> None:
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="text", keys=KEYS)
    (file,) = (tmp_path / "outputs").glob("*-text.keys")
    file.unlink()
    file.mkdir()
    with pytest.raises(StoreError, match="cannot be deleted") as excinfo:
        unregister_kinds(tmp_path, tmp_path / "out", ["text"])
    assert excinfo.value.where == str(file)


def test_the_fix_of_a_refused_access_follows_from_the_kind_of_cache_and_the_error(tmp_path: Path) -> None:
    assert access_fix(Url("memory://cache"), OSError("refused")) == ACCESS_FIX
    assert access_fix(tmp_path, OSError("refused")) == "make sure that cache_dir is on a working disk"
    assert "free space" in access_fix(tmp_path, OSError(errno.ENOSPC, "No space left on device"))
