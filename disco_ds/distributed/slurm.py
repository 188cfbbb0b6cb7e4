"""Check the launcher's environment variables. Under srun, where each task is a rank, derive them from Slurm's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets for each rank."""


def adopt_slurm() -> None:
    """Check the launcher's variables. Set them from srun's variables if srun is the launcher.

    MASTER_ADDR is the first host of the job step, where rank 0 runs. MASTER_PORT is derived from the
    IDs of the job and the step, so that two jobs on one host use different ports. It is below the
    range of ephemeral ports, which the kernel gives to other connections.

    Raises:
        ValueError: If some of the variables of the launcher or of srun are missing or invalid.
    """
    env = os.environ
    _check_variables(env)
    # SLURM_PROCID alone is not enough: a batch script also has it, but is not a task of a job step.
    if "RANK" in env or "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        return
    required = ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    if missing := [name for name in required if name not in env]:
        raise ValueError(
            f"SLURM_STEP_ID and SLURM_PROCID are set but not {', '.join(missing)}: start with srun, which sets all of "
            "them, or unset SLURM_PROCID to run a single rank"
        )
    # Take the first entry of the list. Its brackets may contain commas: node[003-006,010] -> node003.
    first = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", env["SLURM_STEP_NODELIST"])[0]
    env.setdefault("MASTER_ADDR", re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first))
    job = 100 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])
    env.setdefault("MASTER_PORT", str(12_000 + job % 20_000))
    env.setdefault("WORLD_SIZE", env["SLURM_STEP_NUM_TASKS"])
    # With --gpus-per-task, each task sees only its own GPUs, so the local ID may exceed their number.
    local = int(env["SLURM_LOCALID"])
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible:
        local %= visible.count(",") + 1
    env.setdefault("LOCAL_RANK", str(local))
    env["RANK"] = env["SLURM_PROCID"]


def _check_variables(env: Mapping[str, str]) -> None:
    remedy = "start the ranks with deepspeed, torchrun or srun, which set the variables of a rank"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if name in env and not re.fullmatch("[0-9]{1,9}", env[name]):
            raise ValueError(f"{name} is {env[name]!r}, but must be a number; {remedy}")
    if "RANK" not in env:
        return
    if missing := [name for name in REQUIRED if name not in env]:
        raise ValueError(f"RANK is set but not {', '.join(missing)}; {remedy}")
    if not int(env["RANK"]) < int(env["WORLD_SIZE"]):
        raise ValueError(
            f"RANK is {env['RANK']}, but must be below WORLD_SIZE, which is {env['WORLD_SIZE']}; {remedy}"
        )
    if not 0 < int(env["MASTER_PORT"]) < 2**16:
        raise ValueError(
            f"MASTER_PORT is {env['MASTER_PORT']}, but must be from 1 to 65535; {remedy}"
        )
