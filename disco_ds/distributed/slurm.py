"""srun as a launcher, whose tasks are the ranks."""

from __future__ import annotations

import os
import re


def adopt_slurm() -> None:
    """Set RANK and the other variables of a launcher from those of srun; variables that are set already stay.

    The lead host is the first of the job step, where rank 0 is. The port is derived from the job, so that two jobs on a
    host differ, and is below the ephemeral ports.
    """
    known = os.environ
    # Slurm sets SLURM_PROCID in a batch script too, which is not a task of a job step.
    if "RANK" in known or "SLURM_STEP_ID" not in known or "SLURM_PROCID" not in known:
        return
    nodes = known.get("SLURM_STEP_NODELIST") or known.get("SLURM_NODELIST") or ""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    lead = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else "")  # node[003-006,010] -> node003
    job = 100 * int(known.get("SLURM_JOB_ID", "0")) + int(known["SLURM_STEP_ID"])
    known.setdefault("MASTER_ADDR", lead or known.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
    known.setdefault("MASTER_PORT", str(12_000 + job % 20_000))
    known.setdefault("WORLD_SIZE", known.get("SLURM_STEP_NUM_TASKS") or known["SLURM_NTASKS"])
    # With --gpus-per-task each task sees its own GPUs only.
    seen = known.get("CUDA_VISIBLE_DEVICES", "")
    local = int(known.get("SLURM_LOCALID", "0"))
    known.setdefault("LOCAL_RANK", str(local % (seen.count(",") + 1) if seen else local))
    known["RANK"] = known["SLURM_PROCID"]
