"""`python -m trainer` is `train`."""

import os
import sys

# `-m` puts the current folder first, where a file that lies there would be taken for an installed
# package, or for a module of Python's own; `core/own_code.py` puts it last, where it may be.
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]

# So does an empty entry of PYTHONPATH, as `$PYTHONPATH:lib` leaves; children inherit the variable.
if "" in (_paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)) and len(_paths) > 1:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))
    sys.path[:] = [path for path in sys.path if path in _paths or path != os.getcwd()]  # noqa: PTH109

import signal

# Ctrl-C ends the process without a traceback until the command line has been read.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from trainer.cli.main import main

if __name__ == "__main__":
    main()
