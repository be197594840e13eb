"""What `import anyformer` adds to `import torch`: all of the public names, best of five fresh processes each.

python benchmarks/imports.py
"""

from __future__ import annotations

import subprocess
import sys

TIMED = "import time; t = time.perf_counter()\n{code}\nprint(time.perf_counter() - t)"
CASES = {
    "import torch": "import torch",
    "import torch, anyformer": "import torch, anyformer",
    "import torch, anyformer, and every public name": (
        "import torch, anyformer; [getattr(anyformer, name) for name in anyformer.__all__]"
    ),
    "anyformer --help": (
        "import contextlib, io; from anyformer.cli.commands import cli\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): cli(['--help'])\n"
    ),
}


def seconds(code: str) -> float:
    """Best of five."""
    program = TIMED.format(code=code)
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in range(5)
    ]
    return min(float(run.stdout) for run in runs)


def main() -> None:
    base = 0.0
    for name, code in CASES.items():
        taken = seconds(code)
        base = base or taken
        added = f", {taken - base:+.2f} s" if name.startswith("import torch,") else ""
        print(f"{taken:5.2f} s  {name}{added}")


if __name__ == "__main__":
    main()
