"""The registrations that record which output folder needs which cache entries."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pipeline.cache.users import (
    CacheUser,
    read_users,
    record_speed,
    recorded_speed,
    register_user,
    unregister_user,
)
from pipeline.errors import StoreError

KEYS = [hashlib.sha256(bytes([index])).hexdigest() for index in range(5)]


def test_read_users_returns_each_output_folder_with_its_keys_of_all_kinds(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "zwei ü"
    register_user(tmp_path, one, recipe="flowers", kind="latents", keys=KEYS[:2])
    register_user(tmp_path, one, recipe="flowers", kind="text", keys=KEYS[2:3])
    register_user(tmp_path, two, recipe="faces", kind="latents", keys=[])
    users = {user.recipe: user for user in read_users(tmp_path)}
    assert users["flowers"] == CacheUser(one, "flowers", frozenset(KEYS[:3]))
    assert users["faces"] == CacheUser(two, "faces", frozenset())


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


@pytest.mark.parametrize(
    ("suffix", "content"), [(".json", b"{"), (".json", b"[]"), ("-latents.keys", b"short")]
)
def test_L13_a_damaged_registration_is_an_error_and_not_an_empty_key_set(
    tmp_path: Path, suffix: str, content: bytes
) -> None:
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=KEYS)
    (path,) = (tmp_path / "outputs").glob(f"*{suffix}")
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
    (tmp_path / "speed.json").write_text("nonsense")
    assert recorded_speed(tmp_path, "text") is None
