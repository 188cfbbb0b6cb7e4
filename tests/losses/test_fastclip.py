"""State, loss and gradients of FastCLIP equal those of a float64 reference over many steps, at any number of ranks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from disco_ds.distributed import comm
from disco_ds.losses import Embeddings, build_loss
from disco_ds.losses.fastclip import FastCLIPLoss
from helpers.dist import run_ranks
from helpers.fastclip_oracle import NUM_SAMPLES, PER_SAMPLE, PRESETS, Oracle, as_tensor, make_loss
from helpers.oracle import Answer, features

B, D, STEPS = 36, 24, 20
LIMIT = {torch.float64: 1e-10, torch.float32: 2e-5}


def cosine_options(name: str) -> dict[str, Any]:
    return {} if name in ("sogclr", "isogclr") else {"gamma_epochs": 2}


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features whose similarity varies from step to step, and ids, some of which repeat."""
    generator = torch.Generator().manual_seed(step)
    image, text = features(
        B, D, torch.float64, "repeated" if step % 3 == 0 else "random", seed=step
    )
    return image, text, torch.randint(0, NUM_SAMPLES, (B,), generator=generator)


def run_rank(
    loss: FastCLIPLoss, image: Tensor, text: Tensor, ids: Tensor, scale: Tensor
) -> tuple[float, Tensor, Tensor, Tensor]:
    """Compute the loss on this rank's rows, and average over ranks as an engine would. Collective.

    Returns:
        The loss, and the gradients of image [B, D], text [B, D] and scale.
    """
    N, n = comm.size(), comm.rank()
    own = slice(n * len(image) // N, (n + 1) * len(image) // N)
    I, T = (x[own].clone().requires_grad_() for x in (image, text))  # noqa: E741
    s = scale.detach().clone().requires_grad_()
    out = loss(Embeddings(I, T, s, index=ids[own]))
    out.loss.backward()
    value = comm.all_reduce_sum(out.loss.double()) / N
    ds = torch.zeros_like(s) if s.grad is None else comm.all_reduce_sum(s.grad) / N
    return value.item(), comm.gather(I.grad) / N, comm.gather(T.grad) / N, ds


def whole_state(loss: FastCLIPLoss) -> dict[str, Tensor]:
    """Return the state of all samples, gathered from all ranks: name -> values [num_samples, 2]. Collective."""
    parts = comm.gather_objects(loss.state_dict())
    whole = {
        name: value.new_zeros(NUM_SAMPLES, *value.shape[1:])
        for name, value in parts[0]["values"].items()
    }
    for rank, part in enumerate(parts):
        for name, value in part["values"].items():
            whole[name][rank :: len(parts)] = value
    return whole


def trajectories(names: tuple[str, ...], **options: Any) -> list[str]:
    """Compare twenty steps of each preset with the oracle. AdamW updates a learned global temperature."""
    failures = []
    for name in names:
        loss = make_loss(name, **cosine_options(name), **options)
        oracle = Oracle(name, NUM_SAMPLES)
        learned = {key: as_tensor([1 / 0.07]).log().requires_grad_() for key in ("mine", "true")}
        adam = {
            key: torch.optim.AdamW([value], lr=2e-2, weight_decay=0.0)
            for key, value in learned.items()
        }
        for step in range(STEPS):
            image, text, ids = batch(step)
            scale = learned["mine"].detach().exp()
            value, dI, dT, ds = run_rank(loss, image, text, ids, scale)
            loss.commit()
            tau = 1 / learned["true"].exp().item()
            true = oracle.step(image, text, ids, tau)
            found = {
                "loss": (as_tensor([value]), as_tensor([true[0]])),
                "dI": (dI, true[1]),
                "dT": (dT, true[2]),
            }
            if loss.learns_scale:
                # d tau / d log scale = -tau
                gradients = {"mine": ds * scale, "true": as_tensor([-tau * true[3]])}
                found["dt"] = gradients["mine"], gradients["true"]
                for key, gradient in gradients.items():
                    learned[key].grad = gradient
                    adam[key].step()
                found["t"] = learned["mine"].detach(), learned["true"].detach()
            state = whole_state(loss)
            for side in range(2):
                known = oracle.samples[side]
                u = as_tensor([0.0 if sample.u is None else sample.u for sample in known])
                found[f"log u {side}"] = state["log_u"][:, side][u > 0], u[u > 0].log()
                if not torch.equal(state["log_u"][:, side] == -torch.inf, u == 0):
                    failures.append(
                        f"{name} step {step}: other samples than the oracle's were seen"
                    )
                if name in PER_SAMPLE:
                    found[f"tau {side}"] = (
                        state["tau"][:, side],
                        as_tensor([sample.tau for sample in known]),
                    )
            for what, (mine, truth) in found.items():
                error = (
                    (mine.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-3)
                ).item()
                if not error <= 1e-10:
                    failures.append(f"{name} step {step} {what}: {error}")
        if loss.learns_scale and abs(learned["mine"].item() - 2.659) < 0.05:
            failures.append(f"{name}: the temperature has not moved")
    return failures


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ("fastclip_v2", "fastclip_v3")),
        *(pytest.param(size, PRESETS, marks=pytest.mark.slow) for size in (1, 2, 3)),
    ],
)
def test_twenty_steps_equal_the_oracle(size, names):
    for failures in run_ranks(trajectories, size, names):
        assert not failures, "\n".join(failures[:20])


def no_positive(image: Tensor, text: Tensor, scale: float) -> Answer:
    """InfoNCE in which the positive pair is left out of the denominators."""
    I, T = (x.detach().requires_grad_() for x in (image, text))  # noqa: E741
    s = torch.tensor([scale], dtype=torch.float64, requires_grad=True)
    x = s * I @ T.T
    off = x.masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf)
    value = (off.logsumexp(1) + off.logsumexp(0) - 2 * x.diagonal()).mean() / 2
    dI, dT, ds = torch.autograd.grad(value, (I, T, s))
    return Answer(value.item(), dI, dT, ds.item())


@pytest.mark.parametrize(
    ("name", "factor"), [("fastclip_v0", 1.0), ("fastclip_v1", 0.04), ("sogclr", 0.04)]
)
def test_first_epoch_is_infonce_without_the_pair_in_the_denominator(name, factor):
    image, text = features(B, D, torch.float64)
    loss = make_loss(name, eps=0.0)
    scale = torch.tensor([25.0], dtype=torch.float64)
    for _ in range(2):  # gamma is 1, so the previous state does not matter
        _, dI, dT, ds = run_rank(loss, image, text, torch.arange(B), scale)
        true = no_positive(image, text, 25.0)
        assert torch.allclose(dI, factor * true.dI, atol=1e-13, rtol=1e-10)
        assert torch.allclose(dT, factor * true.dT, atol=1e-13, rtol=1e-10)
        if loss.learns_scale:
            assert ds.item() == pytest.approx(true.ds, rel=1e-10)
        loss.commit()


def extreme(kind: str) -> tuple[Tensor, Tensor]:
    """Return pairs with extreme cosines.

    Args:
        kind: "apart": half of the pairs have a cosine of -1, and their images have 1 with the texts of other pairs.
            "alone": the rows of one pair have -1 with all other rows.
    """
    pole = torch.nn.functional.one_hot(torch.tensor(0), D).double()
    if kind == "apart":
        image, text = features(B, D, torch.float64)
        image[::2], text[::2], text[1::2] = pole, -pole, pole
        return image, text
    image = -pole.repeat(B, 1)
    image[0] = pole
    return image, image.clone()


def no_overflow() -> list[str]:
    """Check the temperature tau = 0.01, at which u ranges from e^-200 to e^200, so exp overflows without care."""
    failures = []
    ids = torch.arange(B)
    cases = [
        (name, kind, dtype) for name in PRESETS for kind in ("apart", "alone") for dtype in LIMIT
    ]
    for name, kind, dtype in cases:
        eps = {"apart": 1e-6, "alone": 0.0}[kind]
        loss, oracle = (
            make_loss(name, eps=eps, **tau_of(name)),
            Oracle(name, NUM_SAMPLES, eps, tau=0.01),
        )
        image, text = (x.to(dtype) for x in extreme(kind))
        for _ in range(2):
            _, *got, _ = run_rank(loss, image, text, ids, torch.tensor([100.0], dtype=dtype))
            loss.commit()
            _, *true, _ = oracle.step(image, text, ids, 0.01)
            for mine, truth in zip(got, true, strict=True):
                error = ((mine.double() - truth).norm() / truth.norm()).item()
                if not error <= LIMIT[dtype]:
                    failures.append(f"{name} {kind} {dtype}: {error}")
        log_u = whole_state(loss)["log_u"][ids]
        if not bool(log_u.isfinite().all()) or log_u.abs().max() < 199:
            failures.append(f"{name} {kind} {dtype}: log u {log_u.min()} to {log_u.max()}")
    return failures


def tau_of(name: str) -> dict[str, float]:
    return {"tau": 0.01} if name in PER_SAMPLE else {}


def test_tau_of_a_hundredth_overflows_nowhere():
    (failures,) = run_ranks(no_overflow, 1)
    assert not failures, "\n".join(failures)


def mistakes() -> None:
    """Check that each mistake is reported on every rank before any state changes."""
    N, n = comm.size(), comm.rank()
    image, text = (x[: B // N] for x in features(B, D, torch.float32))
    scale = torch.tensor([10.0])
    loss = make_loss("fastclip_v2")
    with pytest.raises(ValueError, match="FastCLIPv2Loss needs sample ids"):
        loss(Embeddings(image, text, scale))
    for wrong in (NUM_SAMPLES, -1):
        index = torch.arange(len(image))
        index[3] = wrong if n == 1 else 3
        with pytest.raises(
            comm.AgreedError, match=rf"sample id {wrong} of rank 1 is not in \[0, {NUM_SAMPLES}\)"
        ):
            loss(Embeddings(image, text, scale, index=index))
    with pytest.raises(ValueError, match="call set_num_samples first"):
        build_loss("fastclip_v2")(Embeddings(image, text, scale, index=torch.arange(len(image))))
    with pytest.raises(ValueError, match=r"save the loss\.state_dict\(\) of every rank"):
        torch.nn.ModuleDict({"loss": loss}).state_dict()
    with pytest.raises(KeyError, match="tau"):
        loss.load_state_parts([make_loss("fastclip_v1").state_dict()] * N)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "sogclr",
            {"rho": 1.0},
            "loss 'sogclr' has no option rho; its options: gamma, .*tau, .*comm_dtype",
        ),
        (
            "fastclip_v3",
            {"tau_lr": 1e-3, "tau_max": 1.0},
            "'fastclip_v3' has no option tau_lr, tau_max; its options: rho, gamma, ",
        ),
        (
            "fastclip_v1",
            {"gamma": "linear"},
            "gamma='linear': .*'constant', 'cosine' or 'fractional'",
        ),
        ("fastclip_v1", {"gamma_min": 0.0}, "gamma_min=0.0: .* greater than 0"),
        ("sogclr", {"memory": "disk"}, "memory='disk': .*'device' or 'host'"),
        ("fastclip_v2", {"tau": 0.005}, "0 < tau_min <= tau <= tau_max"),
        ("fastclip_v2", {"tau_lr": -1.0}, "tau_lr >= 0"),
        ("fastclip_v1", {"tau": "abc"}, r"loss.options.tau='abc': .*number"),
        ("fastclip_v1", {"tau": float("nan")}, r"loss.options.tau=nan: .*finite"),
        ("fastclip_v1", {"gamma_epochs": True}, r"loss.options.gamma_epochs=True: .*integer"),
    ],
)
def test_options_that_mean_nothing_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_loss(name, **options)


def test_gamma_by_hand():
    def gammas(name: str, **options: Any) -> list[float]:
        loss, values = make_loss(name, 8, gamma_min=0.2, **options), []
        assert loss.state is not None
        for samples in (0, 4, 8, 12, 16, 40):
            loss.state.samples = samples
            values.append(loss.current_gamma())
        return values

    assert gammas("sogclr") == [1.0, 1.0, 0.2, 0.2, 0.2, 0.2]
    assert gammas("fastclip_v1", gamma_epochs=2) == pytest.approx([1.0, 1.0, 0.6, 0.6, 0.2, 0.2])
    half = build_loss("fastclip_v1", gamma_min=0.2)
    half.set_num_samples(8, 7 * 8)
    assert isinstance(half, FastCLIPLoss)
    assert half.gamma_epochs == 3, "the default must be half the epochs of the run"
    quarter = 0.2 + 0.8 * (1 + 0.5**0.5) / 2
    fractional = gammas("fastclip_v3", gamma="fractional", gamma_epochs=2)
    assert fractional == pytest.approx([1.0, quarter, 0.6, 1.2 - quarter, 0.2, 0.2])


@pytest.mark.parametrize(
    ("name", "options", "epochs", "gamma_min", "gamma_epochs"),
    [
        ("fastclip_v3", {}, 1, 1.0, 1),
        ("fastclip_v3", {}, 10, 0.7841, 10),
        ("fastclip_v0", {}, 30, 0.3530, 30),
        ("fastclip_v1", {}, 32.5, 0.3330, 32.5),
        ("fastclip_v3", {"gamma_min": 0.8}, 30, 0.8, 15),
        ("fastclip_v3", {"gamma_epochs": 18}, 37, 0.2, 18),
        ("fastclip_v3", {"gamma": "constant"}, 30, 0.2, None),
        ("isogclr", {}, 30, 0.2, None),
    ],
)
def test_default_gamma_follows_the_epochs_of_the_run(
    name: str, options: dict[str, Any], epochs: float, gamma_min: float, gamma_epochs: float | None
) -> None:
    loss: Any = build_loss(name, **options)
    loss.set_num_samples(8, int(epochs * 8))
    assert loss.gamma_min == pytest.approx(gamma_min, abs=1e-4)
    assert loss.gamma_epochs == gamma_epochs
    loss.state.samples = int(epochs * 8)
    # The cosine schedule changes gamma once per epoch, so it may end in the middle of an epoch.
    assert loss.current_gamma() == pytest.approx(gamma_min, abs=2e-3)


def parts_after(path: Path, name: str, steps: int, load: Path | None) -> None:
    """Load the state, if given, and take steps. Write every rank's part of the state, and the whole state."""
    loss = make_loss(name, memory="host")
    if load:
        loss.load_state_parts(torch.load(load)["parts"])
    for step in range(steps):
        run_rank(loss, *batch(step), torch.tensor([20.0], dtype=torch.float64))
        loss.commit()
    state = {"parts": comm.gather_objects(loss.state_dict()), "whole": whole_state(loss)}
    if comm.rank() == 0:
        torch.save(state, path)


@pytest.mark.slow
def test_state_goes_on_at_any_number_of_ranks(tmp_path):
    def after(label: str, size: int, steps: int, load: str | None) -> dict[str, Any]:
        run_ranks(
            parts_after,
            size,
            tmp_path / label,
            "fastclip_v2",
            steps,
            tmp_path / load if load else None,
        )
        return torch.load(tmp_path / label)

    written = after("three", 3, 3, None)
    read = after("one", 1, 0, "three")
    assert len(written["parts"]) == 3
    for name, value in read["whole"].items():
        assert torch.equal(value, written["whole"][name])
    straight, turned = after("straight", 1, 4, "three"), after("turned", 2, 4, "one")
    for name, value in straight["whole"].items():
        assert torch.allclose(value, turned["whole"][name], rtol=1e-10)


def no_trace_of_a_forward() -> None:
    """Check that a forward without a commit leaves no trace, and that a commit applies the last forward."""
    losses = [make_loss("fastclip_v2") for _ in range(2)]
    scale = torch.tensor([20.0], dtype=torch.float64)
    before = copy.deepcopy(losses[0].state_dict())
    image, text, ids = batch(1)
    run_rank(losses[0], image * float("nan"), text, ids.flip(0), scale)
    for name, value in losses[0].state_dict()["values"].items():
        assert torch.equal(value, before["values"][name])
    for loss in losses:
        run_rank(loss, image, text, ids, scale)
        loss.commit()
    mine, other = (loss.state_dict() for loss in losses)
    assert mine["samples"] == other["samples"] == B
    for name, value in mine["values"].items():
        assert torch.equal(value, other["values"][name])


def test_temperatures_do_not_depend_on_the_weight_of_the_loss():
    """A weight or a loss scale multiplies the gradient of the features, but not that of the temperature per sample."""
    found = []
    generator = torch.Generator().manual_seed(0)
    image, text = torch.nn.functional.normalize(torch.randn(2, 8, 16, generator=generator), dim=-1)
    for weight in (1.0, 1024.0):
        loss = build_loss("isogclr")
        loss.set_num_samples(8, 80)
        for _ in range(3):
            leaf = image.clone().requires_grad_()
            scale = torch.tensor([loss.initial_scale])
            out = loss(Embeddings(leaf, text, scale, None, torch.arange(8)))
            (weight * out.loss).backward()
            loss.commit()
        found.append(loss.state_dict()["values"]["exp_avg"])
    assert found[0].any()
    torch.testing.assert_close(found[1], found[0])


def one_sided() -> list[str]:
    """Check that locking one tower changes neither the other gradients nor the state."""
    failures = []
    N, n = comm.size(), comm.rank()
    own = slice(n * B // N, (n + 1) * B // N)
    image, text, ids = (x[own] for x in batch(4))
    scale = torch.tensor([20.0], dtype=torch.float64)
    for name in ("fastclip_v2", "fastclip_v3"):
        found: dict[str, dict[str, Tensor]] = {}
        for trains in ("both", "image", "text"):
            loss, s = make_loss(name), scale.clone().requires_grad_()
            sides = {"image": image.clone(), "text": text.clone()}
            for side, value in sides.items():
                value.requires_grad_(trains in (side, "both"))
            loss(Embeddings(**sides, scale=s, index=ids)).loss.backward()
            loss.commit()
            found[trains] = {
                side: value.grad for side, value in sides.items() if value.grad is not None
            }
            found[trains] |= loss.state_dict()["values"]
            if s.grad is not None:
                found[trains]["scale"] = comm.all_reduce_sum(s.grad)
        for trains in ("image", "text"):
            for what, value in found[trains].items():
                if not torch.allclose(value, found["both"][what], rtol=1e-10, atol=1e-13):
                    failures.append(f"{name}, only {trains} trains: {what}")
    return failures


def other_cases() -> list[str]:
    mistakes()
    no_trace_of_a_forward()
    return one_sided()


def test_mistakes_forwards_without_a_commit_and_one_sided_gradients():
    for failures in run_ranks(other_cases, 2):
        assert not failures, "\n".join(failures)
