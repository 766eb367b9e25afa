"""Images with labels: the same samples from any format, bad ones named, or skipped and counted."""

import io
import json
from importlib import import_module

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from written_formats import example, picture, tfrecord_bytes, write_tar

from shardtrain.data import Batches, ImageFiles
from shardtrain.data.image_decoding import decode_image
from shardtrain.data.sources.format import BadData

NUM, CLASSES = 12, 3


def images():
    """(bytes of a file, label) of each, by label."""
    return [(picture(i, (9, 7)), i * CLASSES // NUM) for i in range(NUM)]


def in_folder(folder):
    for i, (content, label) in enumerate(images()):
        (folder / f"class {label}").mkdir(exist_ok=True)
        (folder / f"class {label}" / f"{i:02}.png").write_bytes(content)


def in_tar(folder):
    write_tar(folder / "a.tar", [{"png": content, "cls": b"%d" % label} for content, label in images()])


def in_parquet(folder):
    """As `datasets` stores images."""
    columns = [{"bytes": content, "path": "x.png"} for content, _ in images()]
    table = pyarrow.table({"image": columns, "label": [label for _, label in images()]})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=5)


def in_examples():
    return [
        example(**{"image/encoded": [content], "image/class/label": np.array([label])})
        for content, label in images()
    ]


def in_tfrecord(folder):
    (folder / "a.tfrecord").write_bytes(tfrecord_bytes(in_examples()))


def in_array_record(folder):
    writer = import_module("array_record.python.array_record_module").ArrayRecordWriter(
        str(folder / "a.array_record"), "group_size:1"
    )
    for each in in_examples():
        writer.write(each)
    writer.close()


@pytest.mark.parametrize("write", [in_folder, in_tar, in_parquet, in_tfrecord, in_array_record])
def test_the_same_images_are_the_same_samples(write, tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data")
    data = ImageFiles(paths=(tmp_path / "data",), classes=CLASSES, size=5, heldout_fraction=0.25)
    heldout = data.heldout(tmp_path / "run")
    assert heldout is not None
    parts = data.train(tmp_path / "run"), heldout
    assert [len(part) for part in parts] == [9, 3]
    found = {int(row): part[i] for part in parts for i, row in enumerate(part.samples)}
    assert sorted(found) == list(range(NUM))
    for row, (content, label) in enumerate(images()):
        np.testing.assert_array_equal(found[row]["image"], decode_image(content, 5))
        assert (found[row]["image"].dtype, found[row]["label"].dtype) == (np.float32, np.int32)
        assert found[row]["label"] == label
    batch = Batches(source=parts[0], batch=4, seed=1).load({"epoch": 1, "index": 4})
    assert batch["image"].shape == (4, 5, 5, 3)
    assert batch["label"].shape == (4,)
    assert f"; {len(parts[0])} to train on, 3 held out" in data.summary(tmp_path / "run")
    again = data.train(tmp_path / "run")
    assert again.fingerprint == parts[0].fingerprint != parts[1].fingerprint
    np.testing.assert_array_equal(again.samples, parts[0].samples)


def test_the_middle_is_cropped_and_grey_becomes_colour():
    file = io.BytesIO()
    pixels = np.zeros((40, 80), np.uint8)
    pixels[:, 30:50] = 255  # the middle is white, and the rest is cut away
    Image.fromarray(pixels).save(file, "PNG")
    decoded = decode_image(file.getvalue(), 16)
    assert decoded.shape == (16, 16, 3)
    assert decoded[:, 6:10].min() == 1.0
    assert decoded.max() == 1.0
    assert decode_image(picture(0, (3, 3)), 16).shape == (16, 16, 3)  # a smaller one is enlarged


def test_bad_images_are_named_or_weigh_nothing(tmp_path):
    (tmp_path / "x").mkdir()
    in_folder(tmp_path / "x")
    victim = tmp_path / "x/class 1/05.png"
    victim.write_bytes(victim.read_bytes()[:60])
    given = {"paths": (tmp_path / "x",), "classes": CLASSES, "size": 5, "heldout_fraction": 0.0}
    source = ImageFiles(**given).train(tmp_path)
    with pytest.raises(
        BadData, match=r"class 1/05\.png, row 5: its image cannot be decoded \(.*--data\.on-error"
    ):
        source[5]
    assert source.num_skipped is None
    source = ImageFiles(**given, on_error="skip").train(tmp_path)
    assert source.num_skipped == 0
    batch = Batches(source=source, batch=NUM, shuffle=False).load({"epoch": 0, "index": 0})
    assert batch["weights"].tolist() == [1.0] * 5 + [0.0] + [1.0] * 6
    # the others are where they were
    np.testing.assert_array_equal(batch["image"][6], decode_image(images()[6][0], 5))
    assert source[5]["weights"] == 0
    assert source.num_skipped == 1
    source = ImageFiles(**{**given, "classes": 2}).train(tmp_path)
    with pytest.raises(BadData, match=r"08\.png, row 8: its label is 2, and classes are 0 to 1; repair it"):
        source[8]


def test_fields_and_files_that_do_not_fit_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "a", "label": label}) + "\n" for label in (0, "x")))
    given = {"paths": (path,), "classes": 2, "heldout_fraction": 0.0}
    with pytest.raises(
        BadData, match=r"row 0: it has none of the fields image, .* \(it has text, label\); name it: "
    ):
        ImageFiles(**given).train(tmp_path)[0]
    with pytest.raises(
        BadData, match=r"row 0: it has no field 'lable' .did you mean 'label'.*name it: --data.label"
    ):
        ImageFiles(**given, label="lable").train(tmp_path)[0]
    with pytest.raises(BadData, match="row 0: its image is str, not the bytes of a file"):
        ImageFiles(**given, image="text").train(tmp_path)[0]
    with pytest.raises(ValueError) as error:
        ImageFiles(paths="a", classes=0, size=0, heldout_fraction=1.0, on_error="no")  # type: ignore[arg-type]
    assert len(str(error.value).splitlines()) == 6
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    both = {**given, "paths": (path, tmp_path / "b.parquet")}
    with pytest.raises(BadData, match=r"b\.parquet: it is no whole Parquet file"):
        ImageFiles(**both).train(tmp_path)
    data = ImageFiles(**both, on_error="skip")
    assert data.train(tmp_path).num_skipped == 1
    assert "skipped files that cannot be read: " in data.summary(tmp_path)
    (tmp_path / "c.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(ValueError, match="is compressed as a whole, and images are read in random order"):
        ImageFiles(**{**given, "paths": (tmp_path / "c.jsonl.gz",)}).train(tmp_path)
