"""Audio in folders of classes: windows with labels, of any format, and what cannot be read."""

import numpy as np
import pytest
import soundfile
from scipy.signal import resample_poly

from shardtrain.data import AudioFiles, Batches

RATE, WINDOW = 8000, 100


def write(folder, name, num_frames, channels=1):
    """A file of audio that rises from 0 on, as whole numbers of 16 bits."""
    frames = np.arange(num_frames, dtype=np.int16)[:, None] * np.array([[1, 3]], np.int16)[:, :channels]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, frames, RATE, subtype="PCM_16")
    return path


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "rain/a.wav", 250)
    write(tmp_path, "rain/deep/b.flac", 300, channels=2)
    write(tmp_path, "wind/c.wav", 40)
    (tmp_path / "wind/README.txt").write_text("no audio")
    return tmp_path


def audio(folder, **options):
    return AudioFiles(
        **{"paths": (folder,), "window": WINDOW, "rate": RATE, "heldout_fraction": 0, **options}
    )


def test_windows_of_files_with_their_classes(folder):
    source = audio(folder).train(folder)
    assert [int(source[i]["label"]) for i in range(len(source))] == [0, 0, 0, 0, 0, 1]
    rising = np.arange(300, dtype=np.float32) / 2**15
    expected = [rising[:100], rising[100:200], *2 * rising.reshape(3, 100), [*rising[:40], *np.zeros(60)]]
    np.testing.assert_allclose([source[i]["audio"] for i in range(len(source))], expected, atol=1e-7)
    assert source[0].keys() == {"audio", "label"}
    with pytest.raises(IndexError):
        source[6]
    batch = Batches(source=source, batch=3, workers=1).load({"epoch": 0, "index": 3})
    assert batch["audio"].shape == (3, WINDOW)
    assert batch["audio"].dtype == np.float32


def test_whole_files_are_held_out(folder):
    data = audio(folder, heldout_fraction=0.4)
    train, heldout = data.train(folder), data.heldout(folder)
    assert heldout is not None
    names = [{file.path.name for file in part.files} for part in (train, heldout)]
    assert names[0] | names[1] == {"a.wav", "b.flac", "c.wav"}
    assert not names[0] & names[1]
    assert len(train) + len(heldout) == 6
    assert train.fingerprint != heldout.fingerprint
    assert data.summary(folder).startswith("audio: ")


def test_what_cannot_be_read_is_named_or_weighs_nothing(folder):
    whole = folder / "rain/a.wav"
    skipping = audio(folder, on_error="skip").train(folder)
    source = audio(folder).train(folder)
    whole.write_bytes(whole.read_bytes()[:300])  # cut off after it was opened
    with pytest.raises(ValueError, match=r"a\.wav: it was cut off: it ends in window 1 of 2"):
        source[1]
    assert float(skipping[1]["weights"]) == 0
    assert not skipping[1]["audio"].any()
    assert float(skipping[5]["weights"]) == 1
    assert skipping.num_skipped == 1
    whole.write_bytes(b"no audio")
    with pytest.raises(ValueError, match=r"a\.wav: it is no audio file"):
        audio(folder).train(folder)
    left = audio(folder, on_error="skip").train(folder)
    assert (len(left), left.num_skipped) == (4, 1)
    whole.unlink()
    with pytest.raises(ValueError, match=r"8000, and 16000 is asked for; convert it, or use resample=True"):
        audio(folder, rate=16_000).train(folder)


@pytest.mark.parametrize("rate", [4000, 11_025, 16_000, RATE])
def test_files_of_another_rate_are_resampled_window_by_window(folder, rate):
    """Each window is that of the whole file resampled at once."""
    random = np.random.default_rng(0)
    soundfile.write(folder / "rain/a.wav", random.uniform(-1, 1, 1250), RATE, subtype="FLOAT")
    source = audio(folder, rate=rate, resample=True).train(folder)
    whole, _ = soundfile.read(folder / "rain/a.wav", dtype="float32")
    common = np.gcd(rate, RATE)
    expected = resample_poly(whole, rate // common, RATE // common)
    num_windows = len(expected) // WINDOW
    assert source.files[0].num_windows == num_windows > 3
    found = np.concatenate([source[i]["audio"] for i in range(num_windows)])
    np.testing.assert_allclose(found, expected[: len(found)], atol=1e-6)
    # a file that is shorter than a window is filled with zeros
    short = source[len(source) - 1]["audio"]
    assert not short[-(-40 * rate // RATE) :].any()
    assert short.any()


def test_the_option_changes_nothing_of_files_of_the_rate(folder):
    plain, other = audio(folder).train(folder), audio(folder, resample=True).train(folder)
    assert plain.fingerprint == other.fingerprint
    np.testing.assert_array_equal(plain[1]["audio"], other[1]["audio"])


def test_a_tone_keeps_its_pitch(tmp_path):
    times = np.arange(16_000) / 16_000
    (tmp_path / "a").mkdir()
    soundfile.write(tmp_path / "a/tone.wav", 0.5 * np.sin(2 * np.pi * 440 * times), 16_000)
    data = AudioFiles(paths=(tmp_path,), window=8000, rate=8000, resample=True, heldout_fraction=0)
    found = data.train(tmp_path)[0]["audio"]
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(8000) / 8000)
    np.testing.assert_allclose(found[100:-100], expected[100:-100], atol=2e-3)


def test_a_header_with_an_absurd_rate_makes_no_filter_as_long(folder):
    path = folder / "rain/a.wav"
    header = bytearray(path.read_bytes())
    header[24:28] = (1_999_999_973).to_bytes(4, "little")
    path.write_bytes(header)
    with pytest.raises(
        ValueError, match=r"a\.wav: its rate is 1999999973, and at most 768000 can be resampled"
    ):
        audio(folder, resample=True).train(folder)
    left = audio(folder, resample=True, on_error="skip").train(folder)
    assert left.num_skipped == 1


def test_options_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="window is 0; use 1 or more"):
        audio(tmp_path, window=0)
    with pytest.raises(
        ValueError, match=r"there are 0 audio files in .* give a folder with one folder for each"
    ):
        audio(tmp_path).train(tmp_path)
