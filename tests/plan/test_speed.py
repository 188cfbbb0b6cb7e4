"""Communication that a plan hides behind computation."""

from __future__ import annotations

import pytest

from disco_ds.models.gpus import find_gpu
from disco_ds.plan.assumptions import Assumptions
from disco_ds.plan.speed import Speed, plan_speed
from disco_ds.plan.towers import Towers
from helpers.towers import tiny_config, write_tiny

M, T = 10**6, 10**12
TOWERS = Towers(
    0,
    0,
    0,
    0,
    replay_flops=T,
    flops=4 * T,
    trained=100 * M,
    frozen=0,
    largest=M,
    width=512,
    sample=1,
)


@pytest.fixture
def plan(tmp_path):
    def plan(micro_batch: int, loss: str, stage: int = 1, bandwidth: float = 1.0) -> Speed:
        config = tiny_config(
            write_tiny(tmp_path), {"zero_optimization": {"stage": stage}}, global_batch=16_384, micro_batch=micro_batch,
            loss__name=loss,
        )  # fmt: skip
        assumed = Assumptions(efficiency=1.0, between_hosts=bandwidth)
        found = plan_speed(config, 16, TOWERS, find_gpu("A100-80G"), assumed)
        assert found is not None
        return found

    return plan


def test_gradients_travel_beside_the_only_backward(plan):
    one, two = plan(1024, "disco_fused"), plan(512, "disco_fused")
    backward_s = 3 * T / (19.5 * T)
    assert one.comm_s - one.exposed_s == pytest.approx(
        min(backward_s, 2 / 3 * (15 / 16 * 12 * 100 * M / 1e9))
    )
    assert two.exposed_s == two.comm_s
    assert two.step_s == pytest.approx(two.towers_s + two.loss_s + two.comm_s)


def test_parameters_gathered_after_the_update_are_never_hidden(plan):
    fast = plan(1024, "disco_fused", bandwidth=1000.0)
    of_gradients, of_parameters = (15 / 16 * n * 4 * 100 * M / 300e9 for n in (2, 1))
    assert fast.comm_s - fast.exposed_s == pytest.approx(of_gradients)
    assert fast.exposed_s > of_parameters


def test_ring_receives_while_the_loss_computes(plan):
    ring = plan(512, "inf_cl", bandwidth=1000.0)
    received_s = 16_384 * 512 * (2 * 2 + 4) / 300e9
    assert ring.comm_s - ring.exposed_s == pytest.approx(min(ring.loss_s, received_s))


def test_at_zero_0_nothing_is_hidden(plan):
    assert plan(1024, "disco_fused", stage=0).exposed_s == plan(1024, "disco_fused", stage=0).comm_s
