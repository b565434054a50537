"""The commands, one small file each: a command reads options, calls what does the work, and prints.

``--help`` imports no torch; each command imports what it needs when it runs.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line ``arguments``, those of the process by default, and exit with its status.

    Status 0: done; 1: `verify` found a difference, or the result could not be written to stdout; 2: a mistake that the
    message names; 3: a step stalled and could not be given up; 130: interrupted before anything was saved, or twice.
    """
    from outsize.cli.app import app
    from outsize.cli.text.console import told
    from outsize.runtime.device.heap import own_process

    own_process()  # before a command starts its first thread
    with told():
        app(arguments, prog_name="outsize")
