"""The `allstream` command: `python -m allstream run -n 2 -- python program.py`, and all that `python -m allstream --help` names."""

import os
import signal
import sys

if not __package__:
    # The command starts itself again by this file's path: agents, guards and the demo's ranks. The package lies in the folder above this one's.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from allstream import _native


def main():
    # The launcher handles signals itself, and hands them to the ranks: Python's own handlers would raise KeyboardInterrupt besides. Python
    # also ignores SIGXFSZ, which the ranks would inherit.
    for number in (signal.SIGINT, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.exit(_native.run_command([sys.executable, os.path.abspath(__file__)], sys.argv[1:]))


if __name__ == "__main__":
    main()
