"""H05: a planted secret is in no output of a complete run; hostile file names do not act on a terminal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.planted_texts import files_with
from tests.remote_folders import published_in_archive, web_server

URL_SECRET = "s3cr3tOfTheUrl"
PLANTED = {
    "HF_TOKEN": "hf_s3cr3tOfTheEnvironment",
    "AWS_SECRET_ACCESS_KEY": "s3cr3tOfTheCloud",
    "WANDB_API_KEY": "s3cr3tOfTheTracker",
}
NETRC_SECRET = "s3cr3tOfTheNetrc"
SECRETS = [*PLANTED.values(), URL_SECRET, NETRC_SECRET]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_H05_a_planted_secret_is_in_no_output_of_a_complete_run(cached: Any, tmp_path: Path) -> None:
    web, home, instance = tmp_path / "web", tmp_path / "home", tmp_path / "instance"
    for folder in (web, home, instance):
        folder.mkdir()
    (home / ".netrc").write_text(f"machine 127.0.0.1 login me password {NETRC_SECRET}\n")
    (home / ".netrc").chmod(0o600)
    published_in_archive(cached.data, web / "photos.zip")
    shutil.rmtree(cached.data)

    variables = {**PLANTED, "HOME": str(home), "NETRC": str(home / ".netrc"), "DAGSTER_HOME": str(instance)}
    job = cached.command("job", "execute", "-m", "assets.definitions", "-j")
    with web_server(web) as url:
        address = f"zip://photos::simplecache::{url}/photos.zip?token={URL_SECRET}"
        training = {"steps": 2, "batch_size": 2, "checkpoint_every": 1, "sample_every": 1}
        training |= {"sample_prompts": ["a photograph"], "trackers": ["tensorboard"], "lora": {"rank": 2}}
        cached.recipe(datasets=[{"name": "photos", "path": address}], training=training)
        finished = cached.run([*job, "small_train"], **variables)
    assert finished.returncode == 0, finished.stderr[-3000:]

    # The server has ended; messages about that must not contain the query either.
    failed = cached.run([*job, "small_cache"], **variables)
    assert failed.returncode == 1

    assert list((cached.out / "lora").glob("*.safetensors"))
    assert list(instance.rglob("*.db"))
    for folder in (cached.out, cached.cache, instance):
        assert list(files_with(folder, SECRETS)) == []
    for run in (finished, failed):
        assert [secret for secret in SECRETS if secret in run.stdout + run.stderr] == []


SITE_EXECUTOR = """
from dagster import Field, Permissive, StringSource, executor, in_process_executor

RETRIES = Field(Permissive(), default_value={"enabled": {}})

@executor(name="site", config_schema={"token": StringSource, "retries": RETRIES})
def site(context):
    assert context.executor_config["token"].startswith("s3cr3t")
    return in_process_executor.executor_creation_fn(context)
"""

DEPLOYMENT = """
executor: {import: site_executor.site, config: {token: {env: SITE_TOKEN}}}
launcher: {kind: local}
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_H05_a_secret_to_which_the_deployment_refers_is_in_no_output(fresh: Any, tmp_path: Path) -> None:
    """The executor's configuration refers to a variable; its value stays in the process."""
    secret, instance, modules = "s3cr3tOfTheSite", tmp_path / "instance", tmp_path / "modules"
    for folder in (instance, modules):
        folder.mkdir()
    (modules / "site_executor.py").write_text(SITE_EXECUTOR)
    (tmp_path / "site.yaml").write_text(DEPLOYMENT)

    variables = {"SITE_TOKEN": secret, "PYTHONPATH": str(modules), "DAGSTER_HOME": str(instance)}
    variables["LATENTLINE_DEPLOYMENT"] = str(tmp_path / "site.yaml")
    command = fresh.command(
        "asset", "materialize", "-m", "assets.definitions", "--select", "small/raw_images"
    )
    finished = fresh.run(command, **variables)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "small: done after" in finished.stdout

    assert list(instance.rglob("*.db"))
    assert (fresh.out / "reports" / "raw_images.json").is_file()
    for folder in (fresh.out, instance):
        assert list(files_with(folder, [secret])) == []
    assert secret not in finished.stdout + finished.stderr


HOSTILE = "x\x1b]0;owned\x07\u202egnp.[a](http:__evil)"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_I18_hostile_names_are_shown_with_escapes_in_every_output(cached: Any) -> None:
    """The image cannot be decoded, so that messages and checks name it."""
    (cached.data / f"{HOSTILE}.png").write_bytes(b"\x89PNG\r\n\x1a\nnot an image")
    (cached.data / f"{HOSTILE}.txt").write_text("a caption", encoding="utf-8")
    cached.recipe()
    job = cached.dagster("job", "execute", "-m", "assets.definitions", "-j", "small_cache")
    shown = cached.latentline("plan", "small", "--no-memory")
    assert job.returncode == 1
    for output in (job, shown):
        text = output.stdout + output.stderr
        assert "\\x1b]0;owned" in text, text[-2000:]
        assert [part for part in ("\x1b]", "\x07", "\u202e") if part in text] == []

    pages = list((cached.out / "reports").rglob("*.html"))
    assert pages
    for page in pages:
        content = page.read_text(encoding="utf-8")
        assert [part for part in ("\x1b", "\x07", "\u202e") if part in content] == []
