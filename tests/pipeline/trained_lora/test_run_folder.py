from __future__ import annotations

from pathlib import Path

from pipeline.trained_lora.run_folder import RunLayout, checkpoint_list


def checkpoint(layout: RunLayout, name: str, *, complete: bool = True) -> None:
    folder = layout.checkpoints / name
    folder.mkdir(parents=True)
    (folder / "adapter.safetensors").write_bytes(b"x" * 100)
    if complete:
        (folder / "COMPLETE").write_bytes(b"{}")


def test_finished_checkpoints_are_listed_the_newest_first(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    assert checkpoint_list(layout) == []
    checkpoint(layout, "step-00000250")
    checkpoint(layout, "step-00001000")
    checkpoint(layout, "step-00000500", complete=False)
    checkpoint(layout, ".step-00000750-1-ab.tmp")
    assert checkpoint_list(layout) == [{"step": 1000, "bytes": 102}, {"step": 250, "bytes": 102}]
