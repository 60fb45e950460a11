"""Run generated recipes as recipes of strangers, and report what they touch outside of their project.

The script runs in a copy of the project, and imports nothing else of the repository. Every process that it
starts imports it as `sitecustomize`, so that each of them is watched.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import struct
import sys
import sysconfig
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("LATENTLINE_FUZZ_FOLDER", "/nonexistent"))
"""Folder with `project`, `outside`, `home` and `temp`; processes may use only `project` and `temp`."""

VIOLATIONS = FOLDER / "violations.txt"

_LIBRARIES = tuple(
    os.path.realpath(path)
    for path in (
        *("/usr", "/lib", "/lib64", "/proc", "/sys", "/dev", "/etc/ssl", "/etc/localtime", "/etc/mime.types"),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "data")),
        *(sys.prefix, sys.base_prefix, sys.executable),
        *(path for path in sys.path if path),
    )
)
_READABLE = (f"{FOLDER}/project", f"{FOLDER}/temp", f"{FOLDER}/violations.txt", *_LIBRARIES)
_WRITABLE = tuple(f"{FOLDER}/{name}" for name in ("project/outputs", "project/.cache", "temp"))

_FILE_EVENTS = frozenset(["open", "os.listdir", "os.scandir"])
_WRITE_EVENTS = frozenset(
    f"os.{name}" for name in ("mkdir", "rename", "remove", "rmdir", "link", "symlink", "chmod", "truncate")
)
_NETWORK_EVENTS = frozenset(
    f"socket.{name}" for name in ("connect", "getaddrinfo", "gethostbyname", "sendto", "sendmsg", "bind")
)
_CODE_EVENTS = frozenset(["os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"])
_EVENTS = _FILE_EVENTS | _WRITE_EVENTS | _NETWORK_EVENTS | _CODE_EVENTS

_reports: list[str] = []
"""Not empty while an event is reported, so that the report is no event itself."""


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Write a line for each event that a stranger's recipe must not cause; an audit hook."""
    if event not in _EVENTS or _reports:
        return
    if (problem := _problem(event, arguments)) is not None:
        _reports.append(f"{event} {problem}\n")
        with VIOLATIONS.open("a") as file:
            file.writelines(_reports)
        _reports.clear()


def _problem(event: str, arguments: tuple[Any, ...]) -> str | None:
    if event in _NETWORK_EVENTS:
        # Unix sockets connect processes of this machine.
        address = arguments[-1]
        return None if isinstance(address, str | bytes) and event == "socket.connect" else repr(arguments)
    if event == "subprocess.Popen":
        command = [str(each) for each in arguments[1]]
        is_own = command[:3] == [sys.executable, "-P", "-m"] and command[3].startswith("pipeline.")
        return None if is_own else repr(command)
    if event in _CODE_EVENTS:
        return repr(arguments)

    # The second argument of `open` is a mode, and its first one may be a descriptor.
    named = arguments[:1] if event == "open" else arguments[:2]
    paths = [os.fsdecode(each) for each in named if isinstance(each, str | bytes | os.PathLike)]
    flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
    is_write = event in _WRITE_EVENTS or bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    allowed = (*_WRITABLE, "/dev", f"{FOLDER}/violations.txt") if is_write else _READABLE
    for path in paths:
        real = os.path.realpath(path)
        if not any(real == each or real.startswith(f"{each}/") for each in allowed):
            return f"{path} {'(written)' if is_write else ''}"
    return None


def recipes(schema: dict[str, Any], rng: random.Random, base: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield recipes: a valid one in which some keys have values that the schema or an attacker chooses."""
    keys = list(_keys(schema, schema, ()))
    dangerous = [key for key in keys if key[0][-1] in {*PATH_KEYS, *CODE_KEYS}]
    while True:
        recipe = deepcopy(base)
        for _ in range(rng.randint(1, 2)):
            path, part = rng.choice(dangerous if rng.random() < 0.7 else keys)
            texts = _expressions() if path[-1] in CODE_KEYS else _paths()
            _set(recipe, path, _value(part, schema, rng, texts))
        yield recipe


PATH_KEYS = frozenset(
    [
        *("path", "images", "start_from", "base", "components", "training_adapter"),
        *("cache_dir", "output_dir", "follow_links", "references"),
    ]
)
CODE_KEYS = frozenset(["where", "optimizer", "trackers"])
"""Last names of the keys that get most of the changes."""


def _keys(
    part: dict[str, Any], schema: dict[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    if path:
        yield path, part
    for option in _options(part, schema):
        inner = option.get("items", option) if option.get("type") == "array" else option
        for each in _options(inner, schema) if inner is not option else [option]:
            for name, child in each.get("properties", {}).items():
                yield from _keys(child, schema, (*path, name))


def _options(part: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in part:
        target: Any = schema
        for name in part["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        return _options(target, schema)
    choices = part.get("anyOf") or part.get("oneOf")
    return [option for each in choices for option in _options(each, schema)] if choices else [part]


def _value(
    part: dict[str, Any], schema: dict[str, Any], rng: random.Random, texts: list[str], depth: int = 0
) -> Any:
    option = rng.choice(_options(part, schema))
    if "enum" in option or "const" in option:
        return rng.choice(option.get("enum") or [option["const"]])

    def number() -> int:
        low = int(option.get("minimum", option.get("exclusiveMinimum", 0)))
        return rng.choice([low, low + 1, low + rng.randint(1, 20), -1, 10**9])

    def items() -> list[Any]:
        parts = option.get("prefixItems") or [option.get("items", {})] * rng.randint(1, 2)
        return [_value(each, schema, rng, texts, depth + 1) for each in parts]

    def section() -> dict[str, Any]:
        chosen = {
            name: _value(child, schema, rng, texts, depth + 1)
            for name, child in option.get("properties", {}).items()
            if depth < 4 and (name in option.get("required", ()) or rng.random() < 0.3)
        }
        return chosen or {rng.choice(["vae", "unet"]): rng.choice(texts)}

    values = {
        "boolean": lambda: rng.random() < 0.5,
        "integer": number,
        "number": lambda: float(number()),
        "array": items,
        "object": section,
        "null": lambda: None,
    }
    return values.get(option.get("type", ""), lambda: rng.choice(texts))()


def _set(holder: Any, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        inner = holder.setdefault(name, {})
        if isinstance(inner, list):
            if not inner or not isinstance(inner[0], dict):
                inner[:] = [{}]
            inner = inner[0]
        if not isinstance(inner, dict):
            inner = holder[name] = {}
        holder = inner
    holder[path[-1]] = value


def _paths() -> list[str]:
    outside = FOLDER / "outside"
    paths = [
        *(f"{outside}/{name}" for name in ("photos", "list.csv", "model", "lora.safetensors", "new")),
        *(f"../outside/{name}" for name in ("photos", "list.jsonl", "new")),
        *("~/photos", "~", "/", "/etc/passwd", "../..", ".", "..", "data/../../outside/photos"),
        *("data/photos", "data/list.csv", "data/rows_outside.csv", "linked", "linked/link", "list.csv"),
        *("outputs/small", "outputs/x/y", "outputs/linked", "outputs", ".cache/latentline", ".cache/linked"),
        *(
            ".git/hooks",
            ".github/workflows",
            ".venv/lib",
            "pipeline",
            "configs",
            ".dagster",
            "sitecustomize.py",
        ),
        *("models/tiny", "models/linked", "owner/name", "owner/name@main"),
    ]
    addresses = [
        f"reference://{outside}/refs.json",
        *(f"{name}{outside}/photos" for name in ("file://", "local://", "simplecache::", "dir://x::")),
        f"zip://x::{outside}/a.zip",
        f"s3://key:se/cr?et@host{outside}",
        *("http://127.0.0.1:9/photos", "https://example.org/x", "s3://bucket/x", "sftp://h/x", "memory://x"),
        *("reference::http://127.0.0.1:9/r.json", "data:text/csv,path", "generic://file:///etc/passwd"),
    ]
    return [*paths, *paths, *addresses]


def _expressions() -> list[str]:
    return [
        *(
            "score > 1",
            "caption LIKE 'a%'",
            "array_length(caption) > 1",
            "replace(caption, '', caption) = ''",
        ),
        f"path in (select path from read_csv('{FOLDER}/outside/list.csv'))",
        "path in (select path from read_csv('http://127.0.0.1:9/x.csv'))",
        "rpad(caption, 20000000000, 'y') = ''",
        *("os.abort", "canary.Run", "subprocess.Popen", "__import__('os').abort()", "torch.optim.NAdam"),
        *("${HOME}", "$(touch canary)", "{0.__class__}", "adamw", "tensorboard", "wandb", "\u202e"),
    ]


class Inotify:
    """Events on folders, also those of libraries that Python's audit hooks do not see."""

    def __init__(self, folders: list[Path]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK)
        watched = (
            self._libc.inotify_add_watch(self._descriptor, os.fsencode(each), 0xFFF) for each in folders
        )
        if min(watched) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")

    def events(self) -> list[str]:
        """Return the names of the files with events since the last call."""
        names: list[str] = []
        while True:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return names
            while data:
                _, mask, _, length = struct.unpack("iIII", data[:16])
                names.append(f"{data[16 : 16 + length].rstrip(bytes(1)).decode()} ({mask:#x})")
                data = data[16 + length :]


def main() -> None:
    """Run recipes number `first` to `first + count`, and print the counts of outcomes as JSON."""
    first, count = map(int, sys.argv[1:])
    folders = [each for each in (FOLDER / "outside").rglob("*") if each.is_dir()]
    outside = Inotify([FOLDER / "outside", *folders])
    VIOLATIONS.unlink(missing_ok=True)  # the search for these folders

    from pipeline.cli.validate import check_settings
    from pipeline.errors import LatentlineError
    from pipeline.raw_images.stage import scan
    from pipeline.recipe import load_recipe, project_root
    from pipeline.storage.tables import Tables
    from pipeline.validated_dataset.stage import validate

    root = project_root()
    assert root == FOLDER / "project"
    schema = json.loads((root / "configs/recipe.schema.json").read_text(encoding="utf-8"))
    base = json.loads((root / "configs/base.json").read_text(encoding="utf-8"))
    counts = {"refused": 0, "loaded": 0, "scanned": 0, "validated": 0}
    file = root / "outputs" / "recipe.yaml"
    for number in range(first, first + count):
        recipe_of = recipes(schema, random.Random(number), base)
        file.write_text(json.dumps(next(recipe_of)), encoding="utf-8")
        try:
            recipe = load_recipe(file)
            counts["loaded"] += 1
            check_settings(recipe)
            tables = Tables(recipe.output_dir)
            table = scan(recipe, tables, log=str).table
            counts["scanned"] += 1
            if counts["scanned"] % 10 == 0:
                validate(recipe, table, tables, log=str)
                counts["validated"] += 1
        except LatentlineError:
            counts["refused"] += 1
        if events := outside.events():
            with VIOLATIONS.open("a") as log:
                log.write(f"inotify {events}\n")
        if VIOLATIONS.exists() and VIOLATIONS.stat().st_size:
            sys.exit(f"recipe {number}: {VIOLATIONS.read_text()}\n{file.read_text()}")
    sys.stdout.write(json.dumps(counts))


if FOLDER.is_dir():
    sys.addaudithook(watch)
