"""A recipe's job that is machine 0 of a training, and `latentline train` on machine 1."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import time
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_job_of_a_recipe_trains_with_another_machine_whose_command_is_in_its_log(
    cached, tmp_path: Path
) -> None:
    cached.recipe(accelerate={"num_processes": 2, "mixed_precision": "no"})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    config = cached.root / "run.yaml"
    launcher = {"machines": 2, "master": master, "wait_s": 300}
    config.write_text(json.dumps({"resources": {"launcher": {"config": launcher}}}), encoding="utf-8")
    arguments = ("job", "execute", "-m", "assets.definitions", "-j", "small_train", "-c", str(config))

    log = cached.root / "job.log"
    with log.open("wb") as file:
        job = subprocess.Popen(
            cached.command(*arguments),
            env=cached.environment(),
            cwd=cached.root,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        command = _command_in(log, job)
        assert command[0] == "latentline"
        other = cached.latentline(*command[1:])
        assert job.wait(300) == 0, log.read_text(encoding="utf-8")[-3000:]
    finally:
        job.kill()
        job.wait()
    assert other.returncode == 0, other.stderr
    assert "machine 1 of 2" in other.stderr
    report = cached.report("trained_lora")
    assert (report["steps"], report["launched"]) == (4, True)
    assert (cached.out / "lora" / "pytorch_lora_weights.safetensors").is_file()


def _command_in(log: Path, job: subprocess.Popen[bytes]) -> list[str]:
    """Wait for the command for machine 1 in a log, and return its words."""
    end_s = time.monotonic() + 300
    while time.monotonic() < end_s:
        text = log.read_text(encoding="utf-8", errors="replace")
        if found := re.search(
            r"on machine 1: (latentline train \S+ --machines 2 --rank 1 --master \S+)", text
        ):
            return shlex.split(found[1])
        assert job.poll() is None, text[-3000:]
        time.sleep(0.2)
    raise AssertionError("the log has no command for machine 1")
