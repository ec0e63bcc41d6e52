"""`python -m strandline …` and the console script: become the command that lies in this package.

Must not know: the command's verbs.
Invariant: the command replaces this process, so signals and exit codes are its own.
"""

import os
import sys
from typing import Optional


def command() -> Optional[str]:
    """The path of the command: in the wheel, or built in the source tree that this package lies in."""
    here = os.path.dirname(os.path.abspath(__file__))
    places = (
        os.path.join(here, "_native", "strandline"),
        os.path.join(here, "..", "..", "target", "release", "strandline"),
    )
    return next((path for path in places if os.access(path, os.X_OK) and os.path.isfile(path)), None)


def main() -> int:
    """Never returns if the command is there."""
    path = command()
    if path is None:
        sys.stderr.write(
            "strandline: this package has no command in it; install the wheel (pip install strandline), or build "
            "it in the source tree (cargo build --release)\n"
        )
        return 2
    try:
        os.execv(path, ["strandline", *sys.argv[1:]])
    except OSError as error:
        sys.stderr.write(f"strandline: {path} cannot be started: {error}; it was built for another machine\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
