"""``python -m fp8fs``: the same as the ``fp8fs`` command."""

import sys

from fp8fs.cli import main

if __name__ == "__main__":
    sys.exit(main())
