"""Train, evaluate and export the quickstart (`make demo`).

The quickstart runs on up to 8 GPUs, or on two CPU ranks if there is no GPU. All output is written to runs/demo.log. The
terminal does not show the log lines of the launcher and of the libraries.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import IO

LOG = Path("runs/demo.log")
NOISE = re.compile(
    r"^(\[\d{4}-\d\d-\d\d |\[rank\d+\]:\[|\[Gloo\]|\[W\d|[\d:]+ \[|Warning: |\s*$)|NCCL INFO|cpu_count"
)
"""Matches log lines of DeepSpeed and torch, which the terminal does not show."""
FOLDER = re.compile(r"^(.+): global batch [\d,]+ = ")
MISSING = "{} is not installed for this Python ({}): run `make demo`, which installs what it needs"


def main() -> int:
    os.chdir(Path(__file__).resolve().parents[2])
    for needed in ("torch", "deepspeed", "open_clip", "disco_ds"):
        if find_spec(needed) is None:
            print(MISSING.format(needed, sys.executable), file=sys.stderr)
            return 1
    import torch

    gpus = torch.cuda.device_count()
    ranks = next(count for count in (8, 4, 2, 1) if count <= gpus) if gpus else 2
    environment = dict(os.environ)
    if not gpus:
        # Divide the cores between the ranks. Otherwise, each rank would start one thread per core.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // ranks)))
        environment.setdefault("DS_ACCELERATOR", "cpu")
    arguments = trainer_arguments(ranks, sys.argv[1:])
    launch = front_end(arguments, gpus, ranks)
    # Print the command as a person would type it.
    command = [*launch[3:-1], *arguments]
    print(f"deepspeed {shlex.join(command)}\n(full output: {LOG})", flush=True)
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("w", encoding="utf-8") as log:
        code, folder = follow(launch, environment, log)
    if code or folder is None or not (folder / "finished.json").exists():
        print(
            f"\nthe run did not finish; the end of {LOG}:\n" + "".join(tail(LOG, 30)),
            file=sys.stderr,
        )
        return code or 1
    return finish(folder)


def trainer_arguments(ranks: int, given: list[str]) -> list[str]:
    """Return the arguments of the trainer: the quickstart, a micro-batch, and the arguments of this program.

    If `given` does not set micro_batch, the quickstart's batch of 128 is divided equally between the ranks.
    """
    own = (
        []
        if any(word.startswith("micro_batch=") for word in given)
        else [f"micro_batch={128 // ranks}"]
    )
    return ["--config", "quickstart", *own, *given]


def front_end(arguments: list[str], gpus: int, ranks: int) -> list[str]:
    from disco_ds.launch.packing import pack

    # Run the launcher as a module, because the #! line of the `deepspeed` script fails if Python's path has a space.
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    command += [
        "--num_gpus" if gpus else "--num_accelerators",
        str(ranks),
        "--master_port",
        str(free_port()),
    ]
    return [*command, "--module", "disco_ds.train", pack(arguments)]


def follow(
    command: list[str], environment: dict[str, str], log: IO[str]
) -> tuple[int, Path | None]:
    """Run a command, log all of its output, and show the lines that NOISE does not match.

    Returns:
        The exit code and the run folder. The run folder is None if the command has not printed it.
    """
    folder = None
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.write(line)
                log.flush()
                if not NOISE.search(line):
                    print(line, end="", flush=True)
                if found := FOLDER.match(line):
                    folder = Path(found[1])
        except KeyboardInterrupt:
            process.terminate()  # the launcher ends its ranks
    return process.returncode, folder


def finish(folder: Path) -> int:
    """Export the trained model."""
    from disco_ds.checkpoints.export import export_run

    export = export_run(folder, folder / "export")
    print(f"exported for open_clip: {export}; to load it, see {export / 'README.md'}")
    return 0


def free_port() -> int:
    """Return a free port, because another run may use the launcher's default port, 29500."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(path: Path, count: int) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)[-count:]


if __name__ == "__main__":
    sys.exit(main())
