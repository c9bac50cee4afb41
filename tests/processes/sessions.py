"""Process of a run that reports where it runs: ``-m tests.processes.sessions FOLDER``. Imports nothing heavy."""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    numbers = os.getsid(0), os.getpgid(0), os.getpid(), os.environ["MASTER_PORT"]
    Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(map(str, numbers)))
