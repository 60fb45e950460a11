"""`python -m bench.growth.once STAGE FOLDER`: run a stage once and print its measurements as JSON.

Each stage needs a new process, because the recorded peak memory of a process never falls.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from bench.growth.stages import STAGES, project_in
from bench.measure import timed


def main() -> None:
    """Run the stage that the command line names."""
    name, folder = sys.argv[1:]
    stage = next(stage for stage in STAGES if stage.name == name)
    project = project_in(Path(folder))
    stage.before(project)
    base = peak_bytes()
    seconds = timed(lambda: stage.run(project))()
    print(json.dumps({"seconds": seconds, "base_bytes": base, "peak_bytes": peak_bytes()}))


def peak_bytes() -> int:
    """Return the peak resident memory of this process so far."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    # On Linux, ru_maxrss includes the peak of the parent process; VmHWM does not.
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
