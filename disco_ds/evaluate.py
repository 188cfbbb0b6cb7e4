"""Evaluation as `deepspeed --module disco_ds.evaluate` names it; the sets are in eval/."""

import sys

from disco_ds.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
