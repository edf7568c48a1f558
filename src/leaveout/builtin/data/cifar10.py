"""CIFAR-10: 50,000 + 10,000 colour images of 32 x 32 pixels, official binary version. Test ids start at 50,000.

CIFAR-10N has human labels of the training images (Wei et al., Learning with Noisy Labels Revisited, ICLR
2022; CC BY-NC 4.0: not for commercial use). They are read from ``cifar10/cifar-10n.npz`` and never downloaded.
"""

import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from leaveout.builtin.data.examples import Table
from leaveout.builtin.data.files import Remote, checked, download, find, members, read, roots, variants
from leaveout.errors import InputError

_ARCHIVE = Remote(
    "cifar10",
    "cifar-10-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
)
# sha256 of the uncompressed files, in the order of their rows
_BATCHES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
# sha256 of the labels as bytes, in the order of the batches
_HUMAN = {
    "aggregate": "2bd5e02e39c9c79772cf4c794f7b74630ac1aaeeac4b807a63c11e9a375f8404",
    "worst": "11a306ed336e3bc81aaac36322ddf12de379d0df1883aa43e10ba562a98f6b2a",
}
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _unpacked() -> list[bytes] | None:
    """Read the six batches, if all of them exist as single files."""
    paths = {name: find("cifar10", *variants(name)) for name in _BATCHES}
    files = {name: path for name, path in paths.items() if path is not None}
    if len(files) < len(_BATCHES):
        return None
    return [checked(read(path), _BATCHES[name], path) for name, path in files.items()]


def _archived(path: Path) -> list[bytes]:
    """Read the six batches from the archive."""
    contents = {name.name: content for name, content in members(path) if name.name in _BATCHES}
    missing = sorted(_BATCHES.keys() - contents.keys())
    if missing:
        raise InputError(
            f"{path} lacks {', '.join(missing)}: replace it with the original, or delete it.", code="data-incomplete"
        )
    return [checked(contents[name], sha256, path / name) for name, sha256 in _BATCHES.items()]


def table() -> Table:
    """Return all ten classes, as images for the network."""
    batches = _unpacked() or _archived(find("cifar10", _ARCHIVE.name) or download(_ARCHIVE))
    # A record is one label byte and 3 x 32 x 32 pixel bytes.
    records = np.concatenate([np.frombuffer(batch, np.uint8).reshape(-1, 3073) for batch in batches])
    return Table(
        x=records[:, 1:].reshape(-1, 3, 32, 32),
        y=records[:, 0].astype(np.int64),
        ids=np.arange(len(records)),
        n_pool=50_000,
        features=(),
        classes=_CLASSES,
        standardise=False,
    )


def human_table() -> Table:
    """Return CIFAR-10N's ``aggregate`` labels, 9% of them wrong, with the original labels as the true ones."""
    return _labelled("aggregate")


def worst_human_table() -> Table:
    """Return CIFAR-10N's ``worst`` labels, 40% of them wrong, with the original labels as the true ones."""
    return _labelled("worst")


def _labelled(kind: str) -> Table:
    original = table()
    given = original.y.copy()
    given[: original.n_pool] = _human(kind)
    return replace(original, y=given, true=original.y)


def _human(kind: str) -> np.ndarray:
    """Read the human labels, and check them."""
    path = find("cifar10", "cifar-10n.npz")
    if path is None:
        raise InputError(
            f"cifar-10n.npz was not found: save the arrays of CIFAR-10N's CIFAR-10_human.pt as uint8, "
            f"{' and '.join(_HUMAN)} by name, with numpy.savez to {roots()[0] / 'cifar10' / 'cifar-10n.npz'}.",
            code="data-not-found",
        )
    try:
        with np.load(path, allow_pickle=False) as arrays:
            labels = np.asarray(arrays[kind], dtype=np.uint8)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} cannot be read ({error}): replace it with the original, or delete it.", code="data-unreadable"
        ) from error
    checked(labels.tobytes(), _HUMAN[kind], path)
    return labels.astype(np.int64)
