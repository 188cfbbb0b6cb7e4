"""`make demo`: train and evaluate the quickstart on the bundled data, on the GPUs there are, else two CPU ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> int:
    import torch

    deepspeed = shutil.which("deepspeed", path=str(Path(sys.executable).parent)) or shutil.which("deepspeed")
    if deepspeed is None:
        print("deepspeed is not installed beside this Python: run `make demo`", file=sys.stderr)
        return 1
    gpus = torch.cuda.device_count()
    ranks = next(count for count in (8, 4, 2, 1) if count <= gpus) if gpus else 2
    where = ["--num_gpus", str(ranks)] if gpus else ["--num_accelerators", str(ranks)]
    environment = dict(os.environ)
    if not gpus:
        # One thread per rank: two ranks share the cores, and OpenMP's threads would fight over them.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // ranks)))
        environment.setdefault("DS_ACCELERATOR", "cpu")
    command = [deepspeed, *where, "--module", "disco_ds.train", "--config", "quickstart"]
    command += [f"micro_batch={128 // ranks}", *sys.argv[1:]]
    print(" ".join(command), flush=True)
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
