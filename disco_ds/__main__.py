"""Entry point of `python -m disco_ds`; the same as `disco-ds`."""

import sys

from disco_ds.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
