"""Data by name: found or refused, read right, split and damaged by seed."""

import gzip
import hashlib
import http.server
import io
import lzma
import os
import tarfile
import threading
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

from leaveout.builtin import data
from leaveout.builtin.data import adult, cifar10, files, mnist, news
from leaveout.errors import InputError
from refusal import refused

real = pytest.mark.skipif(not os.environ.get("LEAVEOUT_DATA"), reason="LEAVEOUT_DATA names no directory with the data")
load = cache(data.load)  # the tests only read what they share


def hide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data directory, an empty cache and no network: a proxy that nobody answers."""
    monkeypatch.setattr(files, "cache_directory", lambda: tmp_path / "cache" / "leaveout")
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("LEAVEOUT_DATA", str(tmp_path / "data"))
    return tmp_path


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return hide(tmp_path, monkeypatch)


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# Splits and ids


@given(st.integers(2, 60), st.data(), st.integers(0, 2**32 - 1))
def test_a_split_uses_every_row_once(n: int, draw: st.DataObject, seed: int) -> None:
    n_train = draw.draw(st.integers(1, n - 1))
    n_val = draw.draw(st.integers(1, n - n_train))
    train, val, rest = data.split(n, n_train, n_val, seed)
    assert (len(train), len(val)) == (n_train, n_val)
    assert sorted([*train, *val, *rest]) == list(range(n))


def test_a_split_is_repeatable_and_depends_on_the_seed() -> None:
    first, again, other = (np.concatenate(data.split(100, 40, 30, seed)) for seed in (3, 3, 4))
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize(("n_train", "n_val"), [(0, 5), (5, 0), (-1, 5), (6, 5), (True, 3)])
def test_impossible_splits_are_refused(n_train: int, n_val: int) -> None:
    with refused(InputError, "split-too-large", "10"):
        data.split(10, n_train, n_val)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_that_are_none_are_refused(seed: int) -> None:
    with refused(InputError, "seed-not-a-number", "4294967295"):
        data.load("digits", seed=seed)
    with refused(InputError, "seed-not-a-number"):
        data.flip(data.load("digits").train, 0.1, seed=2**64)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with refused(InputError, "data-unknown", "'iris'", "digits"):
        data.load("iris")


@pytest.mark.parametrize("seed", [0, 1])
def test_ids_are_row_numbers_of_the_original(seed: int) -> None:
    x, y = load_digits(return_X_y=True)
    loaded = data.load("digits", n_train=100, n_val=50, seed=seed)
    parts = (loaded.train, loaded.val, loaded.test)
    assert [len(part) for part in parts] == [100, 50, 1647]
    assert torch.cat([part.ids for part in parts]).unique().shape == (1797,)
    for part in parts:
        torch.testing.assert_close(part.x, torch.from_numpy(x[part.ids] / 16).float())
        assert (part.y.numpy() == y[part.ids]).all()


def test_digits_are_ready_for_a_loader() -> None:
    loaded = data.load("digits")
    x, y = next(iter(DataLoader(loaded.train, batch_size=32)))
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((32, 64), torch.float32, (32,), torch.int64)
    assert (len(loaded.features), len(loaded.classes)) == (64, 10)
    assert (loaded.train.x.min(), loaded.train.x.max()) == (0, 1)


# Files


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("adult", "adult/adult.data"),
        ("mnist", "mnist/train-images-idx3-ubyte.gz"),
        ("mnist-1v7", "mnist/train-images-idx3-ubyte.gz"),
        ("cifar10", "cifar10/cifar-10-binary.tar.gz"),
        ("20news", "20news/20news-bydate.tar.gz"),
    ],
)
def test_missing_files_without_a_network_are_named(nowhere: Path, name: str, file: str) -> None:
    with pytest.raises(InputError) as caught:
        data.load(name)
    message = str(caught.value)
    assert f"put it into {(nowhere / 'data' / file).parent}" in message
    assert message.endswith(f"LEAVEOUT_DATA to a directory that has it as {file}.")
    assert "\n" not in message


def test_a_data_directory_that_does_not_exist_is_refused(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAVEOUT_DATA", str(nowhere / "gone"))
    with refused(InputError, "data-directory-missing", "gone"):
        data.load("adult")


@pytest.mark.parametrize(
    ("name", "file", "content", "code"),
    [
        ("adult", "adult/adult.data", b"39, State-gov\n", "data-changed"),
        ("mnist", "mnist/train-images-idx3-ubyte.gz", gzip.compress(b"\0" * 800), "data-changed"),
        ("mnist", "mnist/train-images-idx3-ubyte.gz", gzip.compress(b"\0" * 800)[:-9], "data-unreadable"),
        ("20news", "20news/20news-bydate.tar.gz", b"no archive", "data-unreadable"),
        ("cifar10", "cifar10/cifar-10-binary.tar.gz", b"no archive", "data-unreadable"),
    ],
    ids=["changed", "changed-gz", "cut-gz", "no-tar", "no-tar-either"],
)
def test_changed_and_damaged_files_are_refused(nowhere: Path, name: str, file: str, content: bytes, code: str) -> None:
    path = put(nowhere / "data" / file, content)
    with refused(InputError, code, str(path), "replace it with the original, or delete it"):
        data.load(name)


@pytest.mark.parametrize("wrap", [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_file_may_be_plain_or_compressed(nowhere: Path, wrap: tuple) -> None:
    suffix, compress = wrap
    put(nowhere / "data/set" / f"file{suffix}", compress(b"content"))
    remote = files.Remote("set", "file.gz", "https://localhost/file.gz", "sha256:0")
    assert files.original(remote, hashlib.sha256(b"content").hexdigest()) == b"content"


def test_the_named_directory_comes_before_the_cache(nowhere: Path) -> None:
    cached = put(nowhere / "cache/leaveout/set/file", b"cached")
    (nowhere / "data/set/file").mkdir(parents=True)
    assert files.find("set", "file") == cached  # a directory is not a file
    (nowhere / "data/set/file").rmdir()
    named = put(nowhere / "data/set/file", b"named")
    assert files.find("set", "file") == named


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    put(tmp_path / "www/file", b"content")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path / "www")) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/file"
        running.shutdown()


def test_a_download_is_checked_and_kept(nowhere: Path, server: str) -> None:
    sha256 = hashlib.sha256(b"content").hexdigest()
    remote = files.Remote("set", "file", server, f"sha256:{sha256}")
    assert files.original(remote, sha256) == b"content"
    assert files.find("set", "file") == nowhere / "cache/leaveout/set/file"


def test_a_download_with_a_wrong_checksum_is_refused_and_not_kept(nowhere: Path, server: str) -> None:
    with refused(InputError, "data-not-found", "checksum"):
        files.download(files.Remote("set", "file", server, "sha256:" + "0" * 64))
    assert files.find("set", "file") is None


def test_an_archive_without_its_batches_is_refused(nowhere: Path) -> None:
    put(nowhere / "data/cifar10/cifar-10-binary.tar.gz", archive({"cifar-10-batches-bin/test_batch.bin": b"0"}))
    with refused(InputError, "data-incomplete", "data_batch_1.bin, data_batch_2.bin"):
        data.load("cifar10")


def archive(contents: dict[str, bytes], links: tuple[str, ...] = ()) -> bytes:
    """A tar.gz with the contents, and links that point out of it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=0) as tar:
        for name in links:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
            tar.addfile(link)
        for name, content in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_archives_are_read_without_links_and_without_writing(nowhere: Path) -> None:
    path = put(nowhere / "set.tar.gz", archive({"../outside": b"1", "a/b": b"2"}, links=("a/link",)))
    before = sorted(nowhere.rglob("*"))
    assert {str(name): content for name, content in files.members(path)} == {"../outside": b"1", "a/b": b"2"}
    assert sorted(nowhere.rglob("*")) == before
    assert not (nowhere.parent / "outside").exists()


# Noise


@pytest.fixture
def clean() -> data.Examples:
    return data.load("digits", n_train=200, n_val=50).train


@pytest.mark.parametrize("damage", [data.gaussian, data.ones, data.flip])
def test_noise_is_seeded_and_leaves_its_input_alone(clean: data.Examples, damage) -> None:
    x, y = clean.x.clone(), clean.y.clone()
    first, again, other = (damage(clean, 0.2, seed=seed).examples for seed in (0, 0, 1))
    assert first.x.equal(again.x)
    assert first.y.equal(again.y)
    assert not (first.x.equal(other.x) and first.y.equal(other.y))
    assert clean.x.equal(x)
    assert clean.y.equal(y)
    assert first.ids.equal(clean.ids)


@pytest.mark.parametrize("damage", [data.gaussian, data.ones, data.flip])
def test_no_noise_touches_nothing(clean: data.Examples, damage) -> None:
    noisy = damage(clean, 0.0)
    assert not noisy.touched.any()
    assert noisy.examples.x.equal(clean.x)
    assert noisy.examples.y.equal(clean.y)


@pytest.mark.parametrize("damage", [data.gaussian, data.ones, data.flip])
@pytest.mark.parametrize("amount", [-0.1, float("nan"), float("inf")])
def test_impossible_amounts_of_noise_are_refused(clean: data.Examples, damage, amount: float) -> None:
    with refused(
        InputError, "sigma-out-of-range" if damage is data.gaussian else "fraction-out-of-range", f"={amount} must"
    ):
        damage(clean, amount)


def test_gaussian_noise_has_its_variance_and_touches_every_row(clean: data.Examples) -> None:
    noisy = data.gaussian(clean, 0.5)
    added = noisy.examples.x - clean.x
    assert noisy.touched.all()
    assert noisy.examples.y.equal(clean.y)
    assert abs(added.mean()) < 0.02  # 12,800 draws: four standard errors
    assert abs(added.std() - 0.5) < 0.02


def test_ones_sets_that_fraction_of_each_row(clean: data.Examples) -> None:
    blank = data.Examples(torch.zeros(50, 1, 10, 10), clean.y[:50], clean.ids[:50])
    noisy = data.ones(blank, 0.07)
    assert noisy.examples.x.shape == blank.x.shape
    assert (noisy.examples.x.flatten(1).sum(1) == 7).all()
    assert noisy.touched.all()
    full = data.Examples(torch.ones(50, 8), clean.y[:50], clean.ids[:50])
    assert not data.ones(full, 0.5).touched.any()  # a one that was a one already is no change


@pytest.mark.parametrize("binary", [True, False])
def test_flip_changes_exactly_that_fraction_of_the_labels(clean: data.Examples, binary: bool) -> None:
    y = (clean.y > 4).float() if binary else clean.y
    examples = data.Examples(clean.x, y, clean.ids)
    noisy = data.flip(examples, 0.3)
    assert noisy.touched.sum() == 60
    assert noisy.touched.equal(noisy.examples.y != y)
    assert set(noisy.examples.y.tolist()) == set(y.tolist())
    assert noisy.examples.y.dtype == y.dtype
    if not binary:  # not always the next class
        assert ((noisy.examples.y - y) % 10)[noisy.touched].unique().numel() == 9


def test_flip_needs_two_classes(clean: data.Examples) -> None:
    same = data.Examples(clean.x, torch.zeros(200), clean.ids)
    with refused(InputError, "one-class-only"):
        data.flip(same, 0.5)


# The real data


@real
@pytest.mark.parametrize(
    ("name", "shape", "sizes", "counts"),
    [
        ("adult", (62,), (400, 400, 48042), (37155, 11687)),
        ("20news", (4752,), (400, 400, 1145), (982, 963)),
        ("mnist-1v7", (784,), (400, 400, 2163), None),
    ],
)
def test_two_class_sets_follow_the_protocol(name: str, shape: tuple, sizes: tuple, counts: tuple | None) -> None:
    loaded = load(name, seed=0)
    parts = (loaded.train, loaded.val, loaded.test)
    assert tuple(len(part) for part in parts) == sizes
    assert all(part.x.shape[1:] == shape and part.x.isfinite().all() for part in parts)
    assert all(part.x.dtype == part.y.dtype == torch.float32 for part in parts)
    assert (len(loaded.features), len(set(loaded.features)), len(loaded.classes)) == (*shape, *shape, 2)
    assert torch.cat([part.ids for part in parts]).unique().numel() == sum(sizes)
    if counts:
        assert tuple(torch.cat([part.y for part in parts]).long().bincount().tolist()) == counts
    # Standardised by the training rows: there, and only there, the columns have mean 0 and deviation 1 (or 0).
    deviation = loaded.train.x.double().std(0, correction=0)
    assert loaded.train.x.double().mean(0).abs().max() < 1e-5
    assert ((deviation - 1).abs() < 1e-4).sum() + (deviation < 1e-6).sum() == shape[0]
    assert loaded.val.x.double().mean(0).abs().max() > 0.05
    # Repeatable, and different for another seed.
    assert data.load(name, 400, 400, seed=0).train.x.equal(loaded.train.x)
    assert not data.load(name, seed=1).train.ids.equal(loaded.train.ids)


@real
def test_adult_rows_are_read_from_both_files() -> None:
    table = adult.table()
    assert table.x.shape == (48842, 62)
    assert (table.x[:, 6:].sum(1) == 8).all()  # one level of each of the eight categories
    assert table.y[:32561].sum() == 7841  # adult.data
    assert table.y[32561:].sum() == 3846  # adult.test

    def row(i: int) -> dict[str, float]:
        return {name: value for name, value in zip(table.features, table.x[i], strict=True) if value}

    categories = {
        *("workclass:State-gov", "education:Bachelors", "marital-status:Never-married", "occupation:Adm-clerical"),
        *("relationship:Not-in-family", "race:White", "sex:Male", "native-country:us"),
    }
    numbers = {"age": 39, "fnlwgt": np.log1p(77516), "education-num": 13, "capital-gain": 2174, "hours-per-week": 40}
    assert row(0) == pytest.approx(numbers | dict.fromkeys(categories, 1.0))
    assert {"education:1st-12th", "race:Black", "workclass:Private"} < row(32561).keys()
    assert row(32561)["age"] == 25
    levels = [name.split(":")[0] for name in table.features[6:]]
    assert {name: levels.count(name) for name in levels} == {
        "workclass": 8,
        "education": 10,
        "marital-status": 6,
        "occupation": 14,
        "relationship": 6,
        "race": 5,
        "sex": 2,
        "native-country": 5,
    }
    # Counted in the raw files: who is merged with whom.
    people = dict(zip(table.features, table.x.sum(0), strict=True))
    merged = {
        "workclass:?": 2799,
        "workclass:Never-worked": 31,
        "education:1st-12th": 6325,
        "marital-status:Married-civ-spouse": 22416,
        "occupation:?": 2824,
        "native-country:us": 44827,
        "native-country:west": 1002,
        "native-country:east": 570,
        "native-country:other": 354,
    }
    assert {name: people[name] for name in merged} == merged


@real
def test_news_has_the_words_and_not_the_headers() -> None:
    table = news.table()
    assert np.bincount(table.y[:1168]).tolist() == [590, 578]
    assert np.bincount(table.y[1168:]).tolist() == [392, 385]
    norms = np.linalg.norm(table.x, axis=1)
    assert (np.isclose(norms, 1) | (norms == 0)).all()
    assert {"centris", "scsi", "ide"} < set(table.features)
    assert "the" not in table.features
    column = table.features.index("centris")  # a Macintosh: its group's word
    assert (table.x[table.y == 1, column] > 0).sum() > 10 * (table.x[table.y == 0, column] > 0).sum()


@real
def test_news_reads_any_archive_with_the_two_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full by-date archive has other groups, and may have another order and a leading directory."""
    expected = news.table()
    contents = {
        f"./{news._PARTS[part]}/{news._GROUPS[group]}/{name}": content
        for (part, group, name), content in news._messages().items()
    }
    others = {"./20news-bydate-train/sci.space/1": b"Subject: x\n\nmoon", "../../outside": b"", "readme": b""}
    path = hide(tmp_path, monkeypatch) / "data/20news/20news-bydate.tar.gz"
    put(path, archive(others | dict(reversed(contents.items()))))
    assert (news.table().x == expected.x).all()
    contents.popitem()
    put(path, archive(contents))
    with refused(InputError, "data-changed", "comp.sys.ibm.pc.hardware"):
        news.table()


@real
def test_mnist_images_and_digits() -> None:
    loaded = load("mnist", n_train=50_000, n_val=10_000, seed=0)
    assert loaded.train.x.shape == (50_000, 1, 28, 28)
    assert loaded.val.x.shape == loaded.test.x.shape == (10_000, 1, 28, 28)
    assert (loaded.train.x.min(), loaded.train.x.max(), loaded.train.y.dtype) == (0, 1, torch.int64)
    assert loaded.test.ids.equal(torch.arange(60_000, 70_000))
    assert loaded.test.y[:5].tolist() == [7, 2, 1, 0, 4]
    together = torch.cat([loaded.train.y, loaded.val.y])
    assert together.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    ids = torch.cat([loaded.train.ids, loaded.val.ids])
    assert together[ids.argsort()][:5].tolist() == [5, 0, 4, 1, 9]
    # The digit 1 is a thin stroke in the middle, 0 is empty there.
    ones, zeros = loaded.train.x[loaded.train.y == 1].mean(0), loaded.train.x[loaded.train.y == 0].mean(0)
    assert ones[0, 14, 14] > 0.7
    assert zeros[0, 14, 14] < 0.1


@real
def test_one_against_seven_is_taken_from_mnist_with_its_ids() -> None:
    table, everything = mnist.one_against_seven(), mnist.table()
    assert np.bincount(table.y[: table.n_pool]).tolist() == [6742, 6265]
    assert np.bincount(table.y[table.n_pool :]).tolist() == [1135, 1028]
    assert (everything.y[table.ids] == np.where(table.y == 1, 7, 1)).all()
    assert (everything.x[table.ids[::1000]].reshape(-1, 784) / 255 == table.x[::1000]).all()
    loaded = load("mnist-1v7", seed=0)
    assert (loaded.train.ids < 60_000).all()
    assert (loaded.val.ids < 60_000).all()
    assert (loaded.test.ids >= 60_000).all()


@pytest.fixture(scope="module")
def batches() -> list[bytes]:
    """The files of CIFAR-10, read once: they take ten seconds to decompress."""
    found = cifar10._unpacked()
    assert found, "this test needs the six batches as single files"
    return found


@real
@pytest.mark.full
def test_cifar10_images_and_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: list[bytes]) -> None:
    with monkeypatch.context() as read:
        read.setattr(cifar10, "_unpacked", lambda: batches)
        loaded = data.load("cifar10", seed=0)
    assert loaded.train.x.shape == (40_000, 3, 32, 32)
    assert loaded.val.x.shape == loaded.test.x.shape == (10_000, 3, 32, 32)
    together = torch.cat([loaded.train.y, loaded.val.y])
    assert together.bincount().tolist() == [5000] * 10
    assert loaded.test.y.bincount().tolist() == [1000] * 10
    ids = torch.cat([loaded.train.ids, loaded.val.ids])
    assert together[ids.argsort()][:5].tolist() == [6, 9, 9, 4, 1]
    assert [loaded.classes[i] for i in loaded.test.y[:3]] == ["cat", "ship", "ship"]
    # Red, green, blue in this order, in [0, 1]: the well-known means of the training images.
    means = (40_000 * loaded.train.x.mean((0, 2, 3)) + 10_000 * loaded.val.x.mean((0, 2, 3))) / 50_000
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=1e-4, rtol=0)

    # The archive as it is distributed holds the same.
    contents = {f"cifar-10-batches-bin/{name}": batch for name, batch in zip(cifar10._BATCHES, batches, strict=True)}
    put(hide(tmp_path, monkeypatch) / "data/cifar10/cifar-10-binary.tar.gz", archive(contents))
    assert data.load("cifar10", n_train=100, n_val=100).test.x.equal(loaded.test.x)


@real
def test_cifar10n_has_the_labels_that_people_gave() -> None:
    assert data.is_here("cifar10n")
    counts = np.bincount(cifar10._human("aggregate"))
    assert len(counts) == 10
    assert counts.sum() == 50_000
    assert cifar10._human("aggregate")[:5].tolist() == [6, 9, 9, 4, 1]


@real
@pytest.mark.full
@pytest.mark.parametrize(("name", "share"), [("cifar10n", 0.090), ("cifar10n-worst", 0.402)])
def test_only_training_labels_of_cifar10n_are_wrong(
    name: str, share: float, monkeypatch: pytest.MonkeyPatch, batches: list[bytes]
) -> None:
    monkeypatch.setattr(cifar10, "_unpacked", lambda: batches)
    noisy, clean = data.load(name, 2000, 1000, seed=0), data.load("cifar10", 2000, 1000, seed=0)
    assert noisy.train.true is not None
    assert noisy.train.true.equal(clean.train.y)
    assert float((noisy.train.y != clean.train.y).double().mean()) == pytest.approx(share, abs=0.03)
    assert noisy.val.y.equal(clean.val.y)
    assert noisy.test.y.equal(clean.test.y)
    assert noisy.val.true is None


def test_cifar10n_that_is_missing_or_not_the_original_is_refused(nowhere: Path) -> None:
    assert not data.is_here("cifar10n")
    with refused(InputError, "data-not-found", "cifar-10n.npz"):
        cifar10._human("aggregate")
    path = put(nowhere / "data/cifar10/cifar-10n.npz", b"no archive")
    with refused(InputError, "data-unreadable", "cifar-10n.npz"):
        cifar10._human("aggregate")
    np.savez(path, aggregate=np.zeros(50_000, np.uint8))
    with refused(InputError, "data-changed", "cifar-10n.npz"):
        cifar10._human("aggregate")
    with refused(InputError, "data-unreadable", "cifar-10n.npz"):
        cifar10._human("worst")


def test_flipped_labels_come_with_the_true_ones() -> None:
    clean = load("digits", 100, 50).train
    noisy = data.flip(clean, 0.2, seed=1)
    assert noisy.examples.true is not None
    assert noisy.examples.true.equal(clean.y)
    assert (noisy.examples.y != noisy.examples.true).equal(noisy.touched)
    twice = data.flip(data.gaussian(noisy.examples, 0.1).examples, 0.2, seed=2)
    assert twice.examples.true is not None
    assert twice.examples.true.equal(clean.y)
