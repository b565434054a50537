"""The commands, one small file each: a command reads options, calls what does the work, and prints.

``--help`` imports no torch; each command imports what it needs when it runs.
"""

import os
from collections.abc import Sequence

# How many turns threads of OpenMP spin before they sleep, for GOMP_SPINCOUNT. Several lanes compute at once: threads
# that spin long take the cores from the others (a resident microbatch beside other work took five times as long), and
# those that do not spin sleep thousands of times a step (`outsize.runtime.device.openmp`). A turn takes 10 to 50 ns.
SPIN_TURNS = "5000"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line ``arguments``, those of the process by default, and exit with its status.

    Status 0: done; 1: `verify` found a difference, or the result could not be written to stdout; 2: a mistake that the
    message names; 3: a step stalled and could not be given up; 130: interrupted before anything was saved, or twice.
    """
    from outsize.cli.app import app
    from outsize.cli.text.streams import told
    from outsize.runtime.device.heap import use_one_arena

    use_one_arena()  # before a command starts its first thread
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_TURNS)  # read by OpenMP when torch is loaded
    with told():
        app(arguments, prog_name="outsize")
