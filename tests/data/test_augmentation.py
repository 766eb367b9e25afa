"""Random changes of images: what each does, and that they depend on seed, epoch and sample alone."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from written_formats import picture

from shardtrain.data import Augment, Batches, ImageFiles, TokenBatches
from shardtrain.data.augmentation import Mixing, change_colours, crop_box, draw_mixing, mix_images
from shardtrain.data.image_decoding import decode_image, decode_part
from shardtrain.data.sources.format import BadData

NUM, CLASSES = 12, 3
ALL = Augment(
    crop=(0.2, 1.0), flip=True, brightness=0.4, contrast=0.4, saturation=0.4, mixup=0.8, cutmix=1.0,
    mixed=0.7, smoothing=0.1,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images") / "data"
    for i in range(NUM):
        (root / f"class {i * CLASSES // NUM}").mkdir(parents=True, exist_ok=True)
        (root / f"class {i * CLASSES // NUM}" / f"{i:02}.png").write_bytes(picture(i, (9, 7)))
    return root


def files(folder, **options):
    given = {"paths": (folder,), "classes": CLASSES, "size": 8, "heldout_fraction": 0.25}
    return ImageFiles(**{**given, **options})


def loaded(batches, positions):
    return [batches.load({"epoch": epoch, "index": index}) for epoch, index in positions]


def same(left, right):
    return all(left[name].tobytes() == right[name].tobytes() for name in left)


def test_changes_depend_on_seed_epoch_and_sample_alone(folder, tmp_path):
    source = files(folder, augment=ALL).train(tmp_path)
    whole = Batches(source=source, batch=8, seed=5)
    first, again, later = loaded(whole, [(0, 0), (0, 0), (1, 0)])
    assert same(first, again)
    # any rows of a batch, with any number of threads, after a restart
    part = Batches(source=source, batch=8, seed=5, rows=[6, 1], prefetch=3)
    batch, _ = next(part.iterate({"epoch": 0, "index": 0}))
    assert same(batch, {name: array[[6, 1]] for name, array in first.items()})
    # and in batches of another size
    half = Batches(source=source, batch=4, seed=5).load({"epoch": 0, "index": 4})
    assert same(half, {name: array[4:] for name, array in first.items()})
    # each epoch and each seed has draws of its own, also where a sample comes at the same place
    plain = replace(source, options=replace(source.options, augment=Augment()))
    for seed, epoch in ((5, 1), (6, 0)):
        other = Batches(source=source, batch=9, seed=seed, shuffle=False).load({"epoch": epoch, "index": 0})
        base = Batches(source=source, batch=9, seed=5, shuffle=False).load({"epoch": 0, "index": 0})
        assert not any(np.array_equal(a, b) for a, b in zip(other["image"], base["image"], strict=True))
    assert later["image"].shape == first["image"].shape == (8, 8, 8, 3)
    np.testing.assert_allclose(first["label"].sum(-1), 1, rtol=1e-6)
    assert Batches(source=plain, batch=8, seed=5).load({"epoch": 0, "index": 0})["label"].dtype == np.int32


def test_batches_of_tokens_give_the_epoch_too():
    class Drawn:
        lengths = np.array([2, 2, 2])

        def __len__(self):
            return 3

        def __getitem__(self, index):
            raise AssertionError("training reads the changed sample")

        def augmented(self, index, epoch, random):
            return {"tokens": np.array([index, epoch * 100 + random.integers(100)])}

    rows = TokenBatches(source=Drawn(), batch=8, seed=3, shuffle=False).load({"epoch": 1, "index": 0})[
        "tokens"
    ]
    expected = [[i, 100 + np.random.default_rng((3, 1, i)).integers(100)] for i in range(3)]
    assert rows[:3].tolist() == expected


def test_heldout_images_are_never_changed(folder, tmp_path):
    data = files(folder, augment=ALL)
    heldout, plain = data.heldout(tmp_path), files(folder).heldout(tmp_path)
    assert heldout is not None
    assert plain is not None
    changed, expected = (
        Batches(source=source, batch=3, shuffle=False).load({"epoch": 0, "index": 0})
        for source in (heldout, plain)
    )
    assert same(changed, expected)
    assert changed["label"].dtype == np.int32


def test_options_leave_the_position_as_it_is(folder, tmp_path):
    """The fingerprint is that of the version before there were changes: its checkpoints resume."""
    plain = files(folder, size=5).train(tmp_path)
    assert plain.fingerprint == "0ebb92e375876f1d"
    options = {"augment": ALL, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    assert files(folder, size=5, **options).train(tmp_path).fingerprint == plain.fingerprint


def test_crops_have_the_areas_and_shapes_that_were_asked_for():
    random = np.random.default_rng(0)
    found = [crop_box((60, 40), (0.25, 0.5), random) for _ in range(300)]
    for left, top, right, bottom in found:
        assert 0 <= left < right <= 60
        assert 0 <= top < bottom <= 40
        assert 0.24 < (right - left) * (bottom - top) / 2400 < 0.52
        assert 0.7 < (right - left) / (bottom - top) < 1.4
    assert min(left for left, *_ in found) == 0
    assert max(right for *_, right, _ in found) == 60
    # of a strip nothing of that shape can be cut but its middle
    assert crop_box((100, 3), (0.9, 1.0), random) == (48, 0, 52, 3)


def test_a_part_is_decoded_where_it_is():
    pixels = np.zeros((256, 384, 3), np.uint8)
    pixels[128:, 192:] = (255, 128, 0)
    for kind in ("PNG", "JPEG"):
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, kind, quality=95)
        found = decode_part(
            file.getvalue(), 4, lambda width, height: (width // 2 + 16, height // 2 + 16, width, height)
        )
        np.testing.assert_allclose(found, np.broadcast_to([1, 128 / 255, 0], (4, 4, 3)), atol=0.05)
        assert found.dtype == np.float32
        # the upper left is black, and a JPEG that is decoded at a part of its size keeps its places
        assert decode_part(file.getvalue(), 4, lambda *_: (0, 0, 176, 112)).max() < 0.05


def test_colours_change_by_their_formulas():
    image = np.random.default_rng(1).random((4, 5, 3), np.float32)
    mirrored = {
        change_colours(image, Augment(flip=True), np.random.default_rng(i)).tobytes() for i in range(9)
    }
    assert mirrored == {image.tobytes(), np.ascontiguousarray(image[:, ::-1]).tobytes()}
    factor = np.random.default_rng(7).uniform(0.5, 1.5)
    grey = image @ np.array([0.299, 0.587, 0.114])
    expected = (
        (Augment(brightness=0.5), image * factor),
        (Augment(contrast=0.5), grey.mean() + factor * (image - grey.mean())),
        (Augment(saturation=0.5), grey[..., None] + factor * (image - grey[..., None])),
    )
    for options, values in expected:
        found = change_colours(image, options, np.random.default_rng(7))
        np.testing.assert_allclose(found, np.clip(values, 0, 1), rtol=1e-5, atol=1e-6, err_msg=str(options))


def test_two_images_are_mixed_as_their_labels_are(folder, tmp_path):
    source = files(folder, augment=Augment(cutmix=1.0), heldout_fraction=0.0).train(tmp_path)
    originals = np.stack([source[i]["image"] for i in range(NUM)])
    for index in range(NUM):
        sample = source.augmented(index, 0, np.random.default_rng(index))
        # each pixel is of the image or of one other, as many as the label says
        own = (sample["image"] == originals[index]).all(-1)
        others = [(own | (sample["image"] == each).all(-1)).all() for each in originals]
        assert any(others)
        kept = own.mean()
        label = index * CLASSES // NUM
        assert sample["label"][label] >= kept - 0.05
    options = Augment(mixup=0.5, mixed=0.25)
    draws = [draw_mixing(options, np.random.default_rng(i)) for i in range(800)]
    assert 150 < sum(each is not None for each in draws) < 250
    both = [draw_mixing(Augment(mixup=1.0, cutmix=1.0), np.random.default_rng(i)) for i in range(400)]
    assert 150 < sum(each is not None and each.box is not None for each in both) < 250
    image, kept = mix_images(np.full((2, 2, 1), 4.0), np.zeros((2, 2, 1)), Mixing(0.25, None))
    assert (image.min(), image.max(), kept) == (1.0, 1.0, 0.25)


def test_pixels_are_normalised_for_training_and_evaluation(folder, tmp_path):
    mean, std = (0.5, 0.25, 0.0), (0.5, 0.25, 2.0)
    plain, scaled = (files(folder, **more).train(tmp_path) for more in ({}, {"mean": mean, "std": std}))
    np.testing.assert_allclose(scaled[3]["image"], (plain[3]["image"] - mean) / std, rtol=1e-5, atol=1e-6)
    assert scaled[3]["image"].dtype == np.float32


def test_bad_images_are_named_or_skipped_where_images_are_mixed(folder, tmp_path):
    bad = tmp_path / "bad"
    for i in range(4):
        (bad / f"c{i % 2}").mkdir(parents=True, exist_ok=True)
        (bad / f"c{i % 2}" / f"{i}.png").write_bytes(picture(i, (9, 7)) if i != 1 else b"no image")
    options = {"classes": 2, "size": 8, "heldout_fraction": 0.0, "augment": ALL}
    source = ImageFiles(paths=(bad,), **options).train(tmp_path)
    with pytest.raises(BadData, match=r"c1/1\.png, row 2: its image cannot be decoded"):
        source.augmented(2, 0, np.random.default_rng(0))
    source = ImageFiles(paths=(bad,), on_error="skip", **options).train(tmp_path)
    batch = Batches(source=source, batch=4, shuffle=False).load({"epoch": 0, "index": 0})
    assert batch["weights"].tolist() == [1, 1, 0, 1]
    assert not batch["image"][2].any()
    np.testing.assert_allclose(batch["label"].sum(-1), 1, rtol=1e-6)
    # an image that was to be mixed with a bad one stays as it is
    never = replace(source, options=replace(source.options, augment=replace(ALL, mixup=0.0, cutmix=0.0)))
    alone = [
        np.array_equal(
            source.augmented(0, 0, np.random.default_rng(i))["image"],
            never.augmented(0, 0, np.random.default_rng(i))["image"],
        )
        for i in range(40)
    ]
    assert 10 <= sum(alone) < 36  # 0.3 are not mixed at all, and a quarter of the others meet the bad one
    assert source.num_skipped == 1


def test_numbers_out_of_range_are_named_at_once():
    with pytest.raises(ValueError) as error:
        Augment(crop=(0.5, 0.2), brightness=2.0, mixup=-1.0, smoothing=1.0)
    text = str(error.value)
    for problem in (
        "crop is 0.5 to 0.2; use parts above 0, at most 1, such as 0.08 1",
        "brightness is 2; use 0 to 1",
        "mixup is -1; use 0 or more",
        "smoothing is 1; use 0 or more, below 1",
    ):
        assert problem in text
    with pytest.raises(ValueError, match="std is 1, 0, 1; use numbers above 0"):
        ImageFiles(classes=2, std=(1.0, 0.0, 1.0))
    assert decode_image(picture(0, (9, 7)), 4).dtype == np.float32
