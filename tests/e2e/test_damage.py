"""L06, L07: damage to each kind of file that a finished job leaves, and what the next job makes of it.

The kinds are the ones of a real listing, so that a new kind of file fails the test until it is classified.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from dagster import DagsterInstance, ExecuteInProcessResult
from PIL import Image
from safetensors.numpy import load

from pipeline.cache.used_keys import UsedKeys
from pipeline.cli.main import latentline
from pipeline.errors import StoreError, TrainingError
from pipeline.maintenance.gc import KEEP_S, survey
from pipeline.storage.tables import read_rows
from resources.failures import failure_problem
from tests.damage import DAMAGES
from tests.e2e.daemon import make_home
from tests.e2e.workspace import Workspace, write_photographs

if TYPE_CHECKING:
    from click.testing import Result

TRAINING = {
    "steps": 4,
    "batch_size": 2,
    "checkpoint_every": 2,
    "keep_checkpoints": 1,
    "sample_every": 4,
    "sample_prompts": [{"prompt": "a", "steps": 1}],
    "lora": {"rank": 2, "alpha": 2.0, "modules": ["mid_block.*.to_q"]},
}

Outcome: TypeAlias = Literal[
    "restored", "written again", "trained again", "reported", "refused", "shown", "unused"
]
"""What happens to a damaged file.

restored: The next job writes the same bytes again.
written again: The next job writes the same content with other times.
trained again: As restored, by continuing the run from its last checkpoint.
reported: The next job warns; nothing but a training could write the file again.
refused: What reads the file ends with an error, and its fix works.
shown: For people. A report that is damaged at the same time would be drawn from it.
unused: No result is computed from it; see the reason.
"""

RUN = r"out/runs/[0-9a-f]+"

KINDS: dict[str, tuple[Outcome, str]] = {
    r"out/lora/.*": ("restored", ""),
    r"out/tables/(aspect_buckets|trained_lora)\.parquet": ("restored", ""),
    r"out/tables/rejected(/\w+)?\.parquet": ("restored", ""),
    r"out/tables/(known/\w+|raw_images|validated_dataset|vae_latents|text_embeddings)\.parquet": (
        "written again",
        "",
    ),
    r"out/reports/\w+\.json|out/reports/index\.html": ("written again", ""),
    r"out/reports/(aspect_buckets|text_embeddings|validated_dataset|dataset)/.*": ("restored", ""),
    r"out/reports/trained_lora/.*": ("restored", ""),
    r"out/reports/vae_latents/statistics\.json": ("restored", ""),
    r"out/reports/vae_latents/[0-9a-f]{16}\.(jpg|json)": ("unused", "drawn while encoding, for people"),
    rf"{RUN}/lora/(README\.md|provenance\.json|samples\.(jpg|parquet))": ("restored", ""),
    rf"{RUN}/(inputs\.parquet|samples\.parquet|run\.json|report/.*)": ("restored", ""),
    rf"{RUN}/order\.json": ("written again", ""),
    rf"{RUN}/(finished\.json|lora/.*\.safetensors)": ("trained again", ""),
    rf"{RUN}/logs/(metrics|sample_losses|validation)\.jsonl": ("reported", ""),
    rf"{RUN}/checkpoints/step-\d+/(lora\.json|(pytorch|small).*\.safetensors)": ("refused", ""),
    rf"{RUN}/checkpoints/step-\d+/(COMPLETE|adapter\.safetensors|optimizer\.pt)": (
        "unused",
        "a finished run resumes from none; R07 in test_checkpoint.py damages them",
    ),
    rf"{RUN}/result\.json": ("unused", "read after the training that wrote it"),
    rf"{RUN}/samples/.*\.png": ("shown", "PNG has checksums"),
    rf"{RUN}/logs/events\.out\..*": ("unused", "TensorBoard's, with checksums"),
    rf"out/\.publish\.lock|{RUN}/(training\.)?lock|cache/used/(lock|clock|since)": (
        "unused",
        "nobody reads their bytes",
    ),
    r"cache/(latents|text|masks)/../[0-9a-f]{64}\.safetensors": ("restored", ""),
    r"cache/fingerprints\.json": ("written again", ""),
    r"cache/packs/.*": ("unused", "single files precede; test_store_packs.py damages packs"),
    r"cache/speed\.json": ("unused", "a time in plan, for people"),
    r"cache/used/[0-9a-f]{64}\.keys": ("refused", ""),
    r"home/dagster\.yaml|home/(history/(runs|runs/index)|schedules/schedules)\.db": (
        "unused",
        "no job computes anything from them; test_problems.py damages them and follows the fixes",
    ),
    r"home/(history/runs/[0-9a-f-]*\.db|storage/.*|history/.*-(shm|wal))": ("unused", "events of ended runs"),
}


@dataclass(frozen=True)
class Finished:
    """A workspace after a job, the same files as they were then, and the kind of each file."""

    workspace: Workspace
    sound: dict[str, bytes]

    @property
    def root(self) -> Path:
        return self.workspace.root

    def files(self) -> dict[str, bytes]:
        paths = [path for top in ("out", "cache", "home") for path in (self.root / top).rglob("*")]
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in paths if path.is_file()}

    def restore(self) -> None:
        """Write what differs, so that the stats of all other files stay as tables recorded them."""
        current = self.files()
        for name in current.keys() - self.sound.keys():
            (self.root / name).unlink()
        for name, data in self.sound.items():
            if current.get(name) != data:
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                (self.root / name).write_bytes(data)

    def run(self) -> ExecuteInProcessResult:
        with DagsterInstance.from_config(str(self.root / "home")) as instance:
            return self.workspace.execute("train", instance)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_sd: Path) -> Finished:
    """A workspace with masks, a rejected image, previews and packs, after its job has run twice."""
    workspace = Workspace(tmp_path_factory.mktemp("damage"), tiny_sd)
    write_photographs(workspace.data)
    (workspace.data / "bad.png").write_bytes(b"not an image")
    masks = workspace.root / "masks"
    masks.mkdir()
    for path in workspace.data.glob("photo*.png"):
        with Image.open(path) as image:
            image.convert("L").save(masks / path.name)
    dataset = {"name": "photos", "path": str(workspace.data), "mask": {"path": str(masks)}}
    workspace.recipe(training=TRAINING, datasets=[dataset], checks={"max_rejected_fraction": 0.5})
    make_home(workspace.root / "home")

    made = Finished(workspace, {})
    assert made.run().success
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LATENTLINE_CONFIGS", str(workspace.file.parent))
        assert CliRunner().invoke(latentline, ["pack", "small"]).exit_code == 0
    # A file that was young when it was read is read again by the second job.
    assert made.run().success
    return Finished(workspace, made.files())


def kind_of(name: str) -> str:
    (kind,) = (pattern for pattern in KINDS if re.fullmatch(pattern, name))
    return kind


def one_of_each(names: Iterable[str]) -> dict[str, str]:
    """Return for each name without hashes and numbers one of its files, and the kind of it."""
    chosen: dict[str, str] = {}
    for name in sorted(names):
        general = re.sub(r"[0-9a-f-]{16,}|(?<=/)[0-9a-f]{2}(?=/)|\d{2,}|[a-z]{8}(?=\.\w+$)", "*", name)
        chosen.setdefault(general, name)
    return {name: kind_of(name) for name in chosen.values()}


def follow(result: ExecuteInProcessResult) -> None:
    """Do what the fixes of the failed steps say, before the job that they end with."""
    for event in result.all_events:
        if event.is_step_failure:
            failure = event.step_failure_data.user_failure_data
            assert failure is not None, event.step_failure_data.error.to_string()
            problem = failure_problem(str(failure.description), failure.metadata)
            assert problem is not None
            where, fix = problem.where, problem.fix
            named = re.search(r"delete (the file|/\S+)", fix)
            if named is not None:
                path = Path(where.splitlines()[0] if named[1] == "the file" else named[1])
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            else:
                assert re.search(r"(start|run) the (cache )?job again|materialize \w+ again", fix), fix


def without_times(path: Path) -> pl.DataFrame:
    """Return a table without the columns that differ after each reading of a file."""
    table = read_rows(path)
    return table.select(pl.exclude(r"^(.*_ns|.*_?inode)$"))


def is_same(finished: Finished, name: str) -> bool:
    """Return whether the file is as before, LoRA files by their tensors."""
    after, before = (finished.root / name).read_bytes(), finished.sound[name]
    if not name.endswith(".safetensors"):
        return after == before
    # The metadata of a run that is trained again names the step that it resumed from.
    tensors = load(after), load(before)
    return tensors[0].keys() == tensors[1].keys() and all(
        np.array_equal(tensors[0][key], tensors[1][key]) for key in tensors[0]
    )


def problems_of(finished: Finished, damaged: Iterable[str], printed: str) -> list[str]:
    """Return the damaged files without the outcome of their kind, and all other files that changed."""
    sound, after = finished.sound, finished.files()
    # A key or run id that changes would be computed again under another name.
    names = r"cache/(latents|text|masks)/.*|out/runs/[0-9a-f]+/run\.json"
    before, now = ({name for name in files if re.fullmatch(names, name)} for files in (sound, after))
    problems = [f"{name} is new or gone" for name in before ^ now]
    files = [name for name in sound if re.fullmatch(r"out/lora/.*\.(safetensors|jpg|parquet)", name)]
    problems += [f"{name} is published and differs" for name in files if not is_same(finished, name)]

    run = next(name.split("/")[2] for name in sound if name.startswith("out/runs/"))
    for name in damaged:
        outcome, _ = KINDS[kind_of(name)]
        if outcome == "restored" and after.get(name) != sound[name]:
            problems.append(f"{name} is not restored")
        elif outcome == "trained again" and not name.endswith(".json") and not is_same(finished, name):
            problems.append(f"{name} is not trained again")
        elif outcome == "written again" and name.endswith(".parquet"):
            # No earlier table of validated_dataset is read: it is computed from the indexes.
            is_named = f"({finished.root / name}); the file counts as missing" in printed
            if not is_named and not name.endswith("validated_dataset.parquet"):
                problems.append(f"{name} is computed again without a line")
            (finished.root / "before.parquet").write_bytes(sound[name])
            if not without_times(finished.root / name).equals(
                without_times(finished.root / "before.parquet")
            ):
                problems.append(f"{name} has other rows")
        elif outcome == "reported":
            if not re.search(rf"warning: .*{re.escape(Path(name).name)}.* changed after the run", printed):
                problems.append(f"{name} is not reported")
        elif outcome == "refused" and name.startswith("cache/used/"):
            problems += problems_of_refused_list(finished, finished.root / name)
        elif outcome == "refused":
            problems += problems_of_refused_step(finished, run, int(name.split("step-")[1][:8]))
    return problems


def problems_of_refused_list(finished: Finished, path: Path) -> list[str]:
    """Return what is wrong after the fix of a damaged list of used entries, and restore the list."""
    cache = finished.workspace.cache
    lists = sorted(path.parent.glob("*.keys"))
    refusal = UsedKeys(cache, KEEP_S)
    with pytest.raises(StoreError, match="list of used entries is damaged") as raised:
        refusal.read()
    assert raised.value.where == str(path)
    assert (
        raised.value.fix == "delete the file, and run the jobs that use the cache again before latentline gc"
    )
    path.unlink()
    assert finished.run().success

    # Without its lists, an old entry would not be kept.
    with aged(file for file in cache.rglob("*") if file.is_file() and file.suffix != ".keys"):
        surveyed = survey(cache, keep_s=KEEP_S)
        listing = CliRunner().invoke(latentline, ["gc", "--cache-dir", str(cache)])
    problems = [] if sorted(path.parent.glob("*.keys")) == lists else ["the lists are not as before"]
    if surveyed.orphans or not surveyed.is_use_known or surveyed.num_used != surveyed.entries:
        problems.append(f"gc would delete {sorted(surveyed.orphans)}")
    if listing.exit_code or "        0 not used" not in listing.output:
        problems.append(f"gc: {listing.output} {listing.exception}")
    return problems


@contextmanager
def aged(files: Iterable[Path]) -> Generator[None]:
    """Set the modification times to twice `KEEP_S` ago during the body."""
    stats = {path: path.stat() for path in files}
    for path, stat in stats.items():
        os.utime(path, (stat.st_atime, stat.st_mtime - 2 * KEEP_S))
    yield
    for path, stat in stats.items():
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def problems_of_refused_step(finished: Finished, run: str, step: int) -> list[str]:
    """Return what is wrong after the fix of a damaged LoRA of a checkpoint, and publish the last step."""

    def export(*arguments: str) -> Result:
        return CliRunner().invoke(latentline, ["export", str(finished.workspace.file), *arguments])

    refused = export("--step", str(step)).exception
    assert isinstance(refused, TrainingError)
    assert f"the LoRA of step {step} is damaged" in refused.what
    other = re.fullmatch(r"choose one of its 1 step: (\d+)", refused.fix)
    assert other is not None

    chosen, out = export("--step", other[1]), finished.workspace.out
    saved = (out / "runs" / run / "checkpoints" / f"step-{int(other[1]):08}").glob("*.safetensors")
    problems = [
        f"{path.name} of step {other[1]} is not published: {chosen.output}"
        for path in saved
        if path.name.startswith(("pytorch", "small"))
        if path.read_bytes() != (out / "lora" / path.name).read_bytes()
    ]
    return problems if export("--latest").exit_code == 0 else [*problems, "the last step is not published"]


def damage_and_run(
    finished: Finished, files: Iterable[str], ways: Sequence[str], capfd: pytest.CaptureFixture[str]
) -> list[str]:
    """Damage the files in turn in these ways, run the job and follow each fix until it succeeds.

    Returns:
        What `problems_of` finds.
    """
    damaged: list[str] = []
    for number, name in enumerate(files):
        DAMAGES[ways[number % len(ways)]](finished.root / name)
        if (finished.root / name).read_bytes() != finished.sound[name]:
            damaged.append(name)
    try:
        for _ in range(1 + len(damaged)):
            result = finished.run()
            if result.success:
                break
            follow(result)
        assert result.success
        return problems_of(finished, damaged, "".join(capfd.readouterr()))
    finally:
        finished.restore()


@pytest.mark.timeout(600)
def test_L06_L07_damage_to_each_kind_of_file_is_repaired_reported_or_harmless(
    finished: Finished, capfd: pytest.CaptureFixture[str]
) -> None:
    """The kinds that a training repairs or would repair are damaged apart from the others."""
    new = [name for name in finished.sound if not any(re.fullmatch(kind, name) for kind in KINDS)]
    assert new == [], "new kinds of files: decide what happens if they are damaged"
    assert {kind_of(name) for name in finished.sound} == set(KINDS), "a kind is left that no job writes"
    files = {name: KINDS[kind][0] for name, kind in one_of_each(finished.sound).items()}
    problems: list[str] = []
    for outcomes in (
        ("restored", "written again", "refused", "unused"),
        ("reported", "shown"),
        ("trained again",),
    ):
        # Damage to Dagster's own databases stops each command.
        names = [name for name, each in files.items() if each in outcomes and not name.startswith("home/")]
        problems += damage_and_run(finished, names, [*DAMAGES], capfd)
    assert problems == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("damage", DAMAGES)
def test_L06_L07_damage_to_each_file_alone_is_repaired_reported_or_harmless(
    finished: Finished, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    problems: list[str] = []
    for name in one_of_each(finished.sound):
        if re.match(r"home/(dagster|history/(runs\.db|runs/index)|schedules)", name):
            continue
        problems += damage_and_run(finished, [name], [damage], capfd)
    assert problems == []
