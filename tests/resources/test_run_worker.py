"""A process that a code server started receives SIGTERM when that server dies, even if it is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]

SERVER = """
import multiprocessing, os, pathlib, signal, sys, time

folder = pathlib.Path(sys.argv[1])

def run():
    from resources.run_worker import end_with_code_server

    def stop(*_):
        (folder / "checkpoint").touch()
        sys.exit(143)

    signal.signal(signal.SIGTERM, stop)
    end_with_code_server()
    end_with_code_server()
    (folder / "pid.new").write_text(str(os.getpid()))
    (folder / "pid.new").rename(folder / "pid")
    time.sleep(60)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=run)
    child.start()
    child.join()
"""


def test_O08_a_run_stops_after_a_checkpoint_when_its_code_server_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "server.py"
    file.write_text(SERVER, encoding="utf-8")
    server = subprocess.Popen([sys.executable, str(file), str(tmp_path)], env={"PYTHONPATH": str(ROOT)})
    until((tmp_path / "pid").is_file)
    run = psutil.Process(int((tmp_path / "pid").read_text()))
    server.kill()
    server.wait()
    until(lambda: not run.is_running() or run.status() == psutil.STATUS_ZOMBIE)
    assert (tmp_path / "checkpoint").is_file()


def test_a_process_without_a_code_server_is_not_watched() -> None:
    code = (
        "import threading; from resources.run_worker import end_with_code_server; end_with_code_server(); "
        "print(threading.active_count())"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert process.stdout == "1\n"
