"""The race with trainers that only write lines, as the output of a real trainer looks."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.peers.__main__ import peer
from bench.peers.base import CHANNELS
from bench.peers.race import race
from bench.peers.table import table
from bench.peers.trainer import Task

TRAINER = """\
import sys, time
from library.original_unet import BLOCK_OUT_CHANNELS, TIME_EMBED_DIM
options = dict(argument[2:].partition("=")[::2] for argument in sys.argv[1:])
assert BLOCK_OUT_CHANNELS == {channels} and TIME_EMBED_DIM == 4 * {channels}[0], BLOCK_OUT_CHANNELS
assert 'image_dir' in open(options["dataset_config"]).read()
print("caching latents: 100%|##########| 4/4 [00:00<00:00]")
for step in range(1001):
    sys.stderr.write(f"\\rsteps:  {{step // 10}}%|          | {{step}}/1000 [00:01<00:20,  1.00s/it]")
    sys.stderr.flush()
    time.sleep(0.3)
"""


def _checkout(folder: Path, script: str, text: str) -> Path:
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "python").symlink_to(sys.executable)
    (folder / script).parent.mkdir(parents=True, exist_ok=True)
    (folder / script).write_text(text, encoding="utf-8")
    return folder


def test_a_trainer_is_measured_and_a_failing_one_has_its_last_lines(tmp_path: Path) -> None:
    working = _checkout(tmp_path / "kohya", "train_network.py", TRAINER.format(channels=CHANNELS))
    constants = "BLOCK_OUT_CHANNELS = (320, 640, 1280, 1280)\nTIME_EMBED_DIM = 1280\n"
    _checkout(tmp_path / "kohya" / "library", "original_unet.py", constants)
    failing = _checkout(tmp_path / "one", "scripts/train.py", "raise SystemExit('no such preset')")
    base = tmp_path / "base"
    for file, text in {
        "unet/config.json": f'{{"block_out_channels": {list(CHANNELS)}}}',
        "tokenizer/x": "",
    }.items():
        (base / file).parent.mkdir(parents=True)
        (base / file).write_text(text, encoding="utf-8")
    task = Task(base, num_photographs=2, edge=256, rank=4, steps=4)
    trainers = [peer("sd-scripts", working), peer("OneTrainer", failing)]

    measured = race(trainers, task, tmp_path / "race", rounds=1, num_cached=3)

    (cold,), (warm,) = measured["sd-scripts"]["cold"], measured["sd-scripts"]["warm"]
    assert 0.3 <= cold["first_s"] < cold["last_s"] < 20
    (cached,) = measured["sd-scripts"]["cached"]
    assert cached["first_s"] > 0.3
    assert 0.25 <= warm["step_s"] < 2
    assert cold["peak_bytes"] > 2e6
    assert "no such preset" in measured["OneTrainer"]["failed"]
    lines = "\n".join(
        table({"steps": 4, "cached": 3, "trainers": {"bare process": measured["sd-scripts"], **measured}})
    )
    assert "| sd-scripts unknown | " in lines
    assert " | 1.00 | " in lines
    assert "| OneTrainer unknown | failed |" in lines
    assert "OneTrainer failed:\n\n```\nexit status 1\nno such preset\n```" in lines
