"""The package on a simulated GPU: no tensor is on the wrong device, and the host waits only where it must."""

import re
from collections import Counter
from pathlib import Path

import pytest

from helpers.simulated_cuda import Outcome, find_problem, run
from helpers.simulated_cuda.cases import CASES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_problem() is not None, reason=f"no GPU can be simulated: {find_problem()}"
    ),
]

STRAY = [name for name in CASES if name.startswith("stray")]
CLEAN = [name for name in CASES if name not in STRAY]
FAST, SLOW = ([name for name in CLEAN if CASES[name].slow == slow] for slow in (False, True))

OURS = {
    ("cudaEventSynchronize", "losses/blocks.py read"): 1,
    ("copies to host", "distributed/comm.py largest_of"): 1,
}
"""What the host waits for in functions of this package, and how often, in a step that is not logged.

read waits for whether the loss may subtract the same number from all logits. largest_of waits for a value on which
all ranks agree. The host also waits once for the gradient norm; see NORM.
"""
IN_PATCH = {("copies to host", "distributed/deepspeed_quirks.py compute_norm"): 1}
NORM = {
    0: {("copies to host", "training/engine.py backward_and_step"): 1},
    1: IN_PATCH,
    2: IN_PATCH,
    3: {("reads", "training/step.py run_step"): 1},
}
"""ZeRO stage -> where the host waits for the gradient norm in a step, and how often."""
Outcomes = dict[str, Outcome]


def run_cases(names: list[str], folder: Path, timeout_s: float) -> Outcomes:
    groups: dict[tuple[str, int, int], list[str]] = {}
    for name in names:
        kind = "steps" if name.startswith("step") else "parts"
        groups.setdefault((kind, 1, 4), []).append(name)
    return run(groups, folder, timeout_s)


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_cases(STRAY + FAST, tmp_path_factory.mktemp("fast"), timeout_s=600)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_cases(SLOW, tmp_path_factory.mktemp("slow"), timeout_s=800)


@pytest.mark.parametrize("name", FAST)
def test_runs_on_the_device(name, fast):
    assert fast[name].error is None, fast[name].error


@pytest.mark.parametrize("name", SLOW)
def test_runs_on_the_device_slow(name, slow):
    assert slow[name].error is None, slow[name].error


@pytest.mark.parametrize("name", STRAY)
def test_a_tensor_of_the_cpu_is_refused(name, fast):
    wanted = {
        "stray in a collective": "NCCL does not accept a tensor on the CPU",
        "stray in a step": "two (different )?devices",
    }
    error = fast[name].error
    assert error is not None
    assert re.search(wanted[name], error.splitlines()[-1])


def ours(outcome: Outcome) -> Counter[tuple[str, str]]:
    return Counter(
        {
            wait: count
            for wait, count in outcome.waits.items()
            if not wait[1].startswith("deepspeed")
        }
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("K", [1, 3])
def test_a_step_waits_on_few_of_our_lines_whatever_its_micro_batches(stage, K, fast):
    assert ours(fast[f"step ZeRO {stage} autocast K={K}"]) == OURS | NORM[stage]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "step with image_staging=device",
            "step with augmentation",
            "step of two views",
        ),
        *("step with clipping", "step with image tower locked"),
    ],
)
def test_no_setting_adds_a_wait_to_a_step(name, fast):
    assert ours(fast[name]) == OURS | NORM[1]


def test_deepspeed_waits_no_more_for_several_micro_batches_or_buckets(fast):
    def theirs(name: str) -> int:
        return sum(n for wait, n in fast[name].waits.items() if wait[1].startswith("deepspeed"))

    one = theirs("step ZeRO 1 autocast K=1")
    assert theirs("step ZeRO 1 in many buckets") == one
    assert theirs("step ZeRO 1 autocast K=3") <= one
