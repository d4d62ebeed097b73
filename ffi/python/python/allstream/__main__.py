"""The `allstream` command, for example `python -m allstream run -n 2 -- python program.py`; `python -m allstream --help` names the rest."""

import os
import signal
import sys

if not __package__:
    # This file was started by its path, as the command does when it starts another process of its own (an agent, a guard, a rank of the demo).
    # Python has put this file's folder first in sys.path; `import allstream` needs the parent of that folder.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from allstream import _native


def main():
    # The launcher handles signals itself and passes them to the ranks; Python's handler of SIGINT would raise KeyboardInterrupt, too. Python ignores
    # SIGXFSZ, and the ranks would inherit that.
    for number in (signal.SIGINT, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    sys.exit(_native.run_command([sys.executable, os.path.abspath(__file__)], sys.argv[1:]))


if __name__ == "__main__":
    main()
