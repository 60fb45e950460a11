"""Values of recipes and deployment files reach other machines unchanged, whatever syntax they contain.

The command of a Slurm job is parsed by real shells, and manifests by real readers of JSON and YAML.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import build_asset_context
from ruamel.yaml import YAML

from launchers import slurm
from launchers.slurm import SlurmLauncher
from pipeline.encoding.shared_encoding import SharedEncoding, publish_encoding
from pipeline.errors import DeploymentError, LaunchError
from pipeline.recipe import AccelerateSettings, Recipe, load_recipe
from pipeline.recipe.deployment import KubernetesSettings, SlurmSettings, read_deployment

HOSTILE = [
    *("$(touch PWNED)", "`touch PWNED`", "${HOME}", "$(SECRET)", "$$(SECRET)", "$$", "$", "'", '"', "\\"),
    *("; touch PWNED;", "| touch PWNED", "&& touch PWNED", "& ", "> PWNED", "< x", "*", "?", "[a]", "~"),
    *(
        "\n#SBATCH --array=0-99\n",
        "\ntouch PWNED\n",
        "\r",
        "\t",
        " ",
        "#",
        "!",
        "%j",
        "%%",
        "%a",
        "-rf",
        "--",
    ),
    *(
        "{{ x }}",
        "{% x %}",
        "&a ",
        "*a",
        "!!python/object:os.system",
        "---",
        "...",
        ": ",
        "- ",
        "<<: *a",
        "|-",
    ),
    *("\u2028", "\u2029", "\x85", "\ufeff", "\u202e", "\x1b[2J", "\x7f", "é", "e\u0301", "😀", "=", ","),
    *("null", "yes", "0x1f", "1e3", "2026-11-27", "\x01", "\udc41".encode("utf-8", "replace").decode()),
]
"""Syntax of shells, Slurm, YAML, templates, Kubernetes and terminals."""

TEXTS = ["x".join(HOSTILE[start::6]) for start in range(6)]
"""Texts that together contain each piece of syntax."""

NAMES = [f"x{text.replace('/', '_')}x" for text in TEXTS]
"""The same as names of files, for which `/` is the only character that they cannot contain."""


def recipe_with(folder: Path, cache: str) -> Recipe:
    """Return the recipe that a file with this cache_dir declares."""
    content = {
        "datasets": [{"name": "photos", "path": str(folder)}],
        "cache_dir": cache,
        "output_dir": str(folder / "out"),
        "model": {"base": "models/none"},
    }
    return load_recipe(yaml_file(folder / "recipe.yaml", content))


def yaml_file(file: Path, content: dict[str, Any]) -> Path:
    # JSON is YAML in double quotes, except for line breaks and marks that JSON does not escape.
    text = json.dumps(content, ensure_ascii=False)
    text = re.sub(r"[\x7f\x85\u2028\u2029\ufeff]", lambda match: f"\\u{ord(match[0]):04x}", text)
    file.write_text(text, encoding="utf-8")
    return file


def published(folder: Path, cache: str) -> SharedEncoding:
    """Publish an encoding without jobs in the cache of such a recipe, as a stage does."""
    (folder / "jobs.jsonl").touch()
    fields = {"kind": "latents", "store_root": str(recipe_with(folder, cache).cache_dir)}
    file = folder / "encoding.json"
    file.write_text(json.dumps(fields), encoding="utf-8")
    return publish_encoding(file, num_shards=2, cpu_threads=1)


@pytest.fixture(scope="module")
def sbatch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a folder with an `sbatch` that accepts each job and records its arguments."""
    folder = tmp_path_factory.mktemp("bin")
    file = folder / "sbatch"
    file.write_text(
        f"#!/bin/sh\nprintf '%s\\0' \"$@\" > '{folder}/arguments'\necho Submitted batch job 7\n",
        encoding="utf-8",
    )
    file.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def step() -> Iterator[Any]:
    """Provide the context of a step, of which launchers use the log."""
    with build_asset_context() as context:
        yield context


@pytest.fixture
def submitted(sbatch: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(slurm, "POLL_S", 0.01)
    monkeypatch.setenv("PATH", f"{sbatch}:{os.environ['PATH']}")
    return lambda: (sbatch / "arguments").read_bytes().decode().split("\0")[:-1]


def words_in(script: str, folder: Path, shell: str) -> list[str]:
    """Return the words of a script with one command, after a real shell has parsed them.

    Any other command in it would create a file.
    """
    file = folder / "script"
    # `sbatch --wrap` writes the text below this line.
    file.write_text(f"#!/bin/sh\nprintf '%s\\0' {script}\n", encoding="utf-8")
    subprocess.run([shell, "-n", file], check=True, cwd=folder)
    words = subprocess.run([shell, file], check=True, cwd=folder, capture_output=True).stdout
    assert not list(folder.rglob("PWNED*"))
    return words.decode().split("\0")[:-1]


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_shell_of_a_slurm_job_passes_the_address_of_an_encoding_unchanged(
    step: Any, submitted: Any, name: str, is_remote: bool
) -> None:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        cache = f"memory://{name}" if is_remote and "::" not in name else str(folder / name)
        encoding = published(folder, cache)
        launcher = SlurmLauncher(scratch=str(folder / "scratch"), options=["--comment=$(touch PWNED)"])
        launcher.encode(step, AccelerateSettings(), encoding, 2)

        arguments = submitted()
        assert arguments[:2] == ["--wait", "--comment=$(touch PWNED)"]
        assert arguments[-2] == "--wrap"
        expected = [
            sys.executable,
            "-m",
            "pipeline.cli",
            "encode",
            f"{cache}/encodings/{encoding.encoding_id}",
        ]
        for shell in ("bash", "dash"):
            assert words_in(arguments[-1], folder, shell) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_shell_of_a_slurm_job_passes_the_folder_of_a_run_unchanged(
    step: Any, submitted: Any, name: str
) -> None:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        job = folder / name / "runs" / "0123abcd" / "order.json"
        launcher = SlurmLauncher(scratch=str(folder / "scratch"), machines=2)
        settings = AccelerateSettings(num_processes=2)
        launcher.train(step, settings, job, None)
        words = words_in(submitted()[-1], folder, "bash")
        command = [sys.executable, "-m", "pipeline.cli", "train", str(job), "--grace", words[-1]]
        assert words[0] == "srun"
        assert words[-7:] == command


@pytest.mark.parametrize(
    ("folder", "expected"), [("100%", "100%%"), ("%j", "%%j"), ("a%5ab", "a%%5ab"), ("$(id)", "$(id)")]
)
def test_slurm_replaces_nothing_in_the_folder_of_its_output(
    step: Any, submitted: Any, tmp_path: Path, folder: str, expected: str
) -> None:
    encoding = published(tmp_path, str(tmp_path / "cache"))
    launcher = SlurmLauncher(scratch=str(tmp_path / folder))
    launcher.encode(step, AccelerateSettings(), encoding, 2)
    (output,) = [each for each in submitted() if each.startswith("--output=")]
    assert output == f"--output={tmp_path}/{expected}/slurm/{encoding.encoding_id}/%a.txt"


@pytest.mark.parametrize("name", ["a\\b", "\\", "%\\%"])
def test_a_folder_with_which_slurm_would_not_number_the_outputs_is_an_error(
    step: Any, tmp_path: Path, name: str
) -> None:
    encoding = published(tmp_path, str(tmp_path / "cache"))
    with pytest.raises(LaunchError, match="must not contain a backslash") as error:
        SlurmLauncher(scratch=str(tmp_path / name)).encode(
            step,
            AccelerateSettings(),
            encoding,
            2,
        )
    assert "scratch" in error.value.fix


def test_an_option_with_a_nul_is_a_mistake_in_the_deployment_file(tmp_path: Path) -> None:
    launcher = {"kind": "slurm", "options": ["--comment=a\0b", "--partition=gpu"]}
    file = yaml_file(tmp_path / "deployment.yaml", {"launcher": launcher})
    with pytest.raises(DeploymentError, match="NUL character") as error:
        read_deployment(file)
    assert "launcher.options[0]" in error.value.where


@pytest.mark.parametrize("option", TEXTS)
def test_the_options_of_a_deployment_file_are_single_arguments_of_sbatch(
    step: Any, submitted: Any, option: str
) -> None:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        options = [f"--comment=x{option}x", "--partition=gpu"]
        content = {"launcher": {"kind": "slurm", "options": options}}
        launcher = read_deployment(yaml_file(folder / "deployment.yaml", content)).launcher
        assert isinstance(launcher, SlurmSettings)
        encoding = published(folder, str(folder / "cache"))
        SlurmLauncher(scratch=str(folder), options=list(launcher.options)).encode(
            step,
            AccelerateSettings(),
            encoding,
            1,
        )
        assert submitted()[1:3] == options


@pytest.mark.parametrize(
    ("name", "image", "value"), list(zip(NAMES, TEXTS[::-1], TEXTS[3:] + TEXTS[:3], strict=True))
)
def test_a_manifest_of_kubernetes_has_the_values_of_recipe_and_deployment_file(
    name: str, image: str, value: str
) -> None:
    pytest.importorskip("kubernetes", reason="needs the extra [k8s]")
    from kubernetes.client import ApiClient

    from launchers.kubernetes import job_manifest
    from tests.launchers.kubernetes_api import expanded, manifest_mistakes

    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        pod = {
            "nodeSelector": {value: value},
            "containers": [{"env": [{"name": "A", "value": value}], "args": [value]}],
        }
        content = {"launcher": {"kind": "kubernetes", "image": image, "namespace": value, "pod": pod}}
        launcher = read_deployment(yaml_file(folder / "deployment.yaml", content)).launcher
        assert isinstance(launcher, KubernetesSettings)
        assert (launcher.image, launcher.namespace, launcher.pod) == (image, value, pod)

        encoding = published(folder, str(folder / name))
        manifest = job_manifest(encoding, 3, image=launcher.image, pod=launcher.pod)
        assert list(manifest_mistakes("V1Job", manifest)) == []

        # What the client sends, and what `kubectl get -o yaml` would show.
        assert json.loads(json.dumps(ApiClient().sanitize_for_serialization(manifest))) == manifest
        shown = yaml.safe_dump(manifest)
        assert yaml.safe_load(shown) == YAML(typ="safe").load(shown) == manifest

        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        assert container["image"] == image
        assert container["env"] == [{"name": "A", "value": value}]
        secrets = {"SECRET": "hunter2", "touch PWNED": "hunter2"}
        command = [expanded(word, secrets) for word in container["command"]]
        address = f"{folder / name}/encodings/{encoding.encoding_id}"
        assert command == ["python", "-m", "pipeline.cli", "encode", address]
