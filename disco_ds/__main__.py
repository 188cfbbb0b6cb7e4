"""`python -m disco_ds`, the same as `disco-ds`; the commands are in cli/."""

import sys

from disco_ds.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
