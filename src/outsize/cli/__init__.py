"""The commands, one small file each: a command reads options, calls what does the work, and prints.

``--help`` imports no torch; each command imports what it needs when it runs.
"""

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line ``arguments``, those of the process by default, and exit with its status.

    Status 0: done; 1: `verify` found a difference; 2: a mistake that the message names; 3: a step stalled and
    could not be given up; 130: interrupted before anything was saved, or twice.
    """
    from outsize.cli.app import app

    # Several lanes compute at once. Threads that spin long while they wait for their like take the cores from the
    # others: a resident microbatch beside other work took five times as long. Threads that do not spin sleep thousands
    # of times a step (`outsize.runtime.device.openmp`). Read by OpenMP when torch is loaded; a turn of GNU's takes 10
    # to 50 ns.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    try:
        app(arguments, prog_name="outsize")
    except BrokenPipeError:
        # Whoever read our output has gone (`outsize … | head`): the interpreter must not flush into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
