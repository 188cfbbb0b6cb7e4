"""The loader: any numbers of ranks and workers give the same sequence of global batches, also after a resume."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from disco_ds.config.data import Pixels
from disco_ds.data import Loader, Manifest, MicroBatch, merge_states
from disco_ds.data.batches import SharedBatches, count_buffers
from disco_ds.data.samples import InputSpec, declare_arrays
from disco_ds.data.stored import StoredEmbeddings
from helpers.shards import (
    CONTEXT,
    NUM_SAMPLES,
    SIZES,
    SPEC,
    VOCAB,
    color,
    encode,
    make_loader,
    read_global,
    read_rank,
    read_step,
    settings,
    tokenize,
    write_shards,
)
from helpers.waiting import wait_for


@pytest.fixture(scope="module")
def reference(manifest: Manifest) -> Any:
    """Read twelve global batches of 24 samples, nearly two epochs, on one rank without workers.

    Returns:
        The batches, and the loader's state before the first and after each batch.
    """
    loader = make_loader(manifest, settings())
    steps, states = [], [loader.state_dict()]
    for _ in range(12):
        steps += read_rank(loader, 1)
        states.append(loader.state_dict())
    loader.close()
    return steps, states


def test_epochs_hold_every_sample_once(reference: Any) -> None:
    steps, _ = reference
    read = [sample for step in steps for sample in step]
    assert len(set(read)) == len(read) == 288
    first = {index for index, epoch in read if epoch == 0}
    assert first == set(range(NUM_SAMPLES))
    # The 8 slots, of 20 or 21 samples each, take turns. So epoch 0 ends between positions 8 x 20 and 8 x 21.
    assert {epoch for _, epoch in read[: 8 * 20]} == {0}
    assert {epoch for _, epoch in read[8 * 21 : 8 * 41]} == {1}


def test_order_stays_what_it_is(reference: Any) -> None:
    # If these values changed, the data order of every resumed run would change.
    steps, _ = reference
    assert steps[0][:6] == [(2, 0), (59, 0), (114, 0), (153, 0), (26, 0), (43, 0)]
    assert steps[7][:3] == [(51, 1), (72, 1), (12, 1)]


@pytest.mark.parametrize(
    ("size", "workers", "micro_batch"), [(2, 0, 3), (4, 0, 1), (8, 0, 3), (1, 1, 24), (2, 3, 2)]
)
def test_global_batches_do_not_depend_on_ranks_workers_micro_batch(
    manifest: Manifest, reference: Any, size: int, workers: int, micro_batch: int
) -> None:
    batches, state, _ = read_global(
        manifest, settings(workers=workers), size, 12, micro_batch=micro_batch
    )
    assert batches == reference[0]
    assert state == reference[1][12]


@pytest.mark.parametrize(("done", "size", "workers"), [(2, 4, 0), (7, 2, 0), (8, 2, 2), (0, 1, 0)])
def test_resume_at_another_number_of_ranks_is_exact(
    manifest: Manifest, reference: Any, done: int, size: int, workers: int
) -> None:
    _, middle, _ = read_global(manifest, settings(), 4, done)
    assert middle == reference[1][done]
    batches, state, _ = read_global(
        manifest, settings(workers=workers), size, 12 - done, state=middle
    )
    assert batches == reference[0][done:]
    assert state == reference[1][12]


def test_order_continues_with_the_next_sample_at_another_batch(
    manifest: Manifest, reference: Any
) -> None:
    expected = [sample for step in reference[0] for sample in step]
    state, done = None, 0
    # After 12 and after 92 samples, the batch changes in the middle of a turn of the 8 slots.
    for size, batch, steps in ((4, 12, 1), (8, 40, 2), (1, 6, 2), (8, 16, 1), (2, 48, 3)):
        micro_batch = batch // size if size > 1 else 3
        given = {"batch": batch, "micro_batch": micro_batch, "state": state}
        batches, state, _ = read_global(manifest, settings(), size, steps, **given)
        for each in batches:
            assert sorted(each) == sorted(expected[done : done + batch])
            done += batch
    assert state["samples"] == done == 264
    # 11 batches of 24 are as many samples, so every stream must be at the same place.
    assert state["cursor"] == reference[1][11]["cursor"]


def test_batch_smaller_than_the_slots_leaves_workers_empty_parts(manifest: Manifest) -> None:
    data = settings(slots=8, workers=3)
    in_process = read_global(manifest, settings(slots=8), 1, 12, batch=2, micro_batch=2)
    assert read_global(manifest, data, 1, 12, batch=2, micro_batch=2) == in_process
    whole = read_global(manifest, settings(slots=8), 1, 1, batch=24)
    assert [sample for step in in_process[0] for sample in step] == whole[0][0]


def test_another_seed_is_another_order(manifest: Manifest, reference: Any) -> None:
    assert read_global(manifest, settings(), 1, 1, seed=4)[0][0] != reference[0][0]


def test_state_of_another_run_is_refused(manifest: Manifest, tmp_path: Path) -> None:
    ranks = [make_loader(manifest, settings(), rank, 2) for rank in range(2)]
    states = [loader.state_dict() for loader in ranks]
    merged = merge_states(states)
    for loader in ranks:
        loader.close()
    with pytest.raises(ValueError, match=r"slots 8\b.*\b4\b"):
        make_loader(manifest, settings(slots=4), state=merged)
    with pytest.raises(ValueError, match="fingerprint"):
        make_loader(write_shards(tmp_path, SIZES[::-1]), settings(), state=merged)
    with pytest.raises(ValueError, match="4 of 8 streams"):
        merge_states(states[:1])
    with pytest.raises(ValueError, match="steps"):
        merge_states([states[0], {**states[1], "steps": 1}])


def test_ranks_that_do_not_divide_the_slots_are_refused(manifest: Manifest) -> None:
    with pytest.raises(ValueError, match=r"8 slots .* data.slots=6 or data.slots=9"):
        make_loader(manifest, settings(), 0, 3)


def read_ids(manifest: Manifest, steps: int) -> list[torch.Tensor]:
    loader = make_loader(manifest, settings(), micro_batch=24)
    ids = [index for _ in range(steps) for index in read_step(loader).index]
    loader.close()
    return ids


@pytest.mark.parametrize(
    ("prefetch", "K", "kept_on", "workers", "most", "buffers"),
    [
        (None, 1, "device", 2, 99, 1 + 4),
        (None, 32, "device", 2, 99, 1 + 32),
        (None, 32, "device", 2, 10, 1 + 10),
        (None, 32, "device", 2, 0, 1 + 1),
        (None, 32, "host", 2, 99, 32 + 32),
        (7, 32, "device", 2, 3, 1 + 7),
        (None, 32, "host", 0, 99, 32),
    ],
)
def test_buffers_hold_a_step_ahead_within_memory(
    prefetch: int | None, K: int, kept_on: Pixels, workers: int, most: int, buffers: int
) -> None:
    assert count_buffers(prefetch, K, kept_on, workers, most) == buffers


@pytest.mark.parametrize("kept_on", ["device", "host"])
def test_step_that_is_not_read_to_its_end_is_passed_over(
    manifest: Manifest, kept_on: Pixels
) -> None:
    loader = make_loader(manifest, settings(workers=1), micro_batch=3, kept_on=kept_on)
    try:
        for num_read in (0, 3, 8):
            loader.start_step()
            assert len(list(islice(loader.first_pass(), num_read))) == num_read
        ids = torch.cat(read_step(loader).index)
        assert torch.equal(ids, read_ids(manifest, 4)[3])
        assert loader.state_dict()["steps"] == 4
    finally:
        loader.close()


def test_micro_batches_are_read_while_the_step_runs(manifest: Manifest, tmp_path: Path) -> None:
    """The first micro-batch arrives before the others are decoded. Workers prepare the next step without a request."""
    loader = make_loader(
        manifest, settings(workers=1), tokenize=partial(count_and_wait, tmp_path), micro_batch=3
    )
    try:
        data, batches = loader.start_step(), loader.first_pass()
        next(batches)
        assert data.error is None
        (tmp_path / "open").touch()
        assert len(list(batches)) == 7
        wait_for(lambda: (tmp_path / "calls").stat().st_size >= 2 * 24)
    finally:
        loader.close()


def check_whole(batch: MicroBatch) -> None:
    """Check that nothing has overwritten the micro-batch: images, texts and ids still belong together."""
    for image, text, index in zip(batch["image"], batch["text"], batch["index"], strict=True):
        assert image[:, 4, 4].tolist() == list(color(int(index)))
        assert bytes(text[text > 0].tolist()) == b"%d" % index


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        return sample | {"png": sample["png"][:40]} if index % 7 == 3 else sample

    return write_shards(tmp_path_factory.mktemp("damaged"), SIZES, change)


@pytest.mark.parametrize(("workers", "micro_batch"), [(0, 3), (2, 24), (1, 12), (2, 3)])
@pytest.mark.parametrize("kept_on", ["device", "host"])
def test_micro_batches_are_the_same_in_both_passes(
    damaged: Manifest, workers: int, kept_on: Pixels, micro_batch: int
) -> None:
    """Request micro-batches in GradAccum's order. Workers run ahead, but must not overwrite the micro-batch in use."""
    reference = make_loader(damaged, settings(max_broken=1.0), micro_batch=micro_batch)
    data = settings(workers=workers, max_broken=1.0)
    loader = make_loader(damaged, data, micro_batch=micro_batch, kept_on=kept_on)
    K = 24 // micro_batch
    try:
        for step in range(6):
            expected, data = read_step(reference), loader.start_step()
            # A step whose second pass is not finished must not affect the next one.
            given_up = step == 3
            second = islice(loader.second_pass(), 2 if given_up and K > 2 else K - 1)
            passes = chain(enumerate(loader.first_pass()), enumerate(second))
            for k, batch in passes:
                check_whole(batch)
                assert torch.equal(batch["index"], expected.index[k])
                if k == 1:
                    time.sleep(0.02)  # let the workers run ahead
                check_whole(batch)
            assert torch.equal(torch.cat(data.index), torch.cat(expected.index))
            assert loader.state_dict() == reference.state_dict()
        assert loader.position.broken > 0
    finally:
        loader.close()
        reference.close()


def test_micro_batch_has_only_the_arrays_that_the_run_needs() -> None:
    spec = InputSpec(SPEC, tokenize, CONTEXT, VOCAB)
    usual = {"image", "text", "index", "epoch", "view_key"}
    stored = StoredEmbeddings("img.npy", "txt.npy", None, 6)
    for data, inputs, more in (
        (settings(), spec, set()),
        (settings(group_by="caption"), spec, {"group_id"}),
        (settings(), replace(spec, teacher_tokenize=tokenize, teacher_length=9), {"teacher_text"}),
        (settings(), replace(spec, stored=stored), {"image_embedding", "text_embedding"}),
    ):
        sample = declare_arrays(data, inputs)
        assert set(sample.names) == usual | more
        batches = SharedBatches(3, 5, sample)
        # No two arrays share memory.
        values = list(product(range(3), sample.names))
        for value, (number, name) in enumerate(values):
            batches.buffers[number][name][:] = value
        for value, (number, name) in enumerate(values):
            array, field = batches.buffers[number][name], sample[name]
            shape = (3, *field.shape[:2]) if name == "image" else field.shape
            assert (array.numpy().dtype, array.shape) == (field.base, (5, *shape))
            assert (array == value).all()
        assert batches.buffers[0]["image"].is_contiguous(memory_format=torch.channels_last)
        batches.close()


def test_only_what_waits_on_the_device_is_kept_there(manifest: Manifest) -> None:
    places: list[tuple[Pixels, int]] = [("device", 8), ("host", 2)]
    for kept_on, num in places:
        loader = make_loader(manifest, settings(), micro_batch=3, kept_on=kept_on)
        loader.start_step()
        images = [batch["image"] for batch in loader.first_pass()]
        assert len({image.data_ptr() for image in images}) == num
        # The copies have the layout of the buffers on the host.
        assert all(image.is_contiguous(memory_format=torch.channels_last) for image in images)
        loader.close()


def count_and_wait(folder: Path, texts: list[str]) -> torch.Tensor:
    """Tokenize, and count the calls in a file. After three calls (a micro-batch), wait for the file `open`."""
    with (folder / "calls").open("ab") as file:
        file.write(b".")
    while (folder / "calls").stat().st_size > 3 and not (folder / "open").exists():
        time.sleep(0.01)
    return tokenize(texts)


def read_pixels(
    loader: Loader, steps: int
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    for _ in range(steps):
        data = read_step(loader)
        assert data.error is None
        for b in data.micro_batches:
            yield from zip(
                b["index"].tolist(),
                b["epoch"].tolist(),
                b["image"].clone(),
                b["text"].clone(),
                strict=True,
            )


def test_synthetic_source_is_a_function_of_the_id() -> None:
    data = settings(source="synthetic", shards=None, num_samples=100, slots=4)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    orders = []
    for size in (1, 2):
        for rank in range(size):
            loader = make_loader(None, data, rank, size, batch=20)
            read = list(read_pixels(loader, 10))
            loader.close()
            orders.append([(index, epoch) for index, epoch, _, _ in read])
            for index, _, image, text in read:
                known = seen.setdefault(index, (image, text))
                assert torch.equal(image, known[0])
                assert torch.equal(text, known[1])
    assert orders[0][::2] == orders[1]
    assert orders[0][1::2] == orders[2]
    assert sorted(orders[0][:100]) == [(index, 0) for index in range(100)]
    assert sorted(seen) == list(range(100))
    texts = torch.stack([text for _, text in seen.values()])
    assert texts.shape == (100, CONTEXT)
    assert texts.min() >= 0
    assert (texts.argmax(dim=1) == CONTEXT - 1).all()
    assert texts.max() == VOCAB - 1
    assert len({image.flatten().float().mean().item() for image, _ in seen.values()}) > 90


def test_pixels_do_not_depend_on_ranks_but_on_the_epoch(tmp_path: Path) -> None:
    """The images have a color gradient, so different crops have different pixels."""

    def change(index: int, sample: dict[str, bytes]) -> dict[str, bytes]:
        picture = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
        return {**sample, "png": encode(picture)}

    manifest = write_shards(tmp_path, [12, 12], change)
    data = settings(crop_scale=(0.3, 0.8))

    def pixels(size: int, workers: int, data: Any = data) -> dict[tuple[int, int], bytes]:
        found = {}
        for rank in range(size):
            loader = make_loader(
                manifest, data.model_copy(update={"workers": workers}), rank, size, batch=12
            )
            found |= {(i, e): image.numpy().tobytes() for i, e, image, _ in read_pixels(loader, 4)}
            loader.close()
        return found

    one = pixels(1, 0)
    assert pixels(2, 0) == one
    assert pixels(1, 1) == one
    assert len(set(one.values())) > 30
    plain = pixels(1, 0, settings(crop_scale=None))
    assert len(set(plain.values())) == 1


def test_more_buffers_than_messages_fit_into_a_connection(manifest: Manifest) -> None:
    """The trainer hands out all buffers at once, while the worker already reports on the first ones."""
    data = settings(workers=1, prefetch=2000)
    assert read_global(manifest, data, 1, 1)[0] == read_global(manifest, settings(), 1, 1)[0]
