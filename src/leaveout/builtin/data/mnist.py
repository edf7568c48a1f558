"""MNIST: 60,000 + 10,000 images of 28 x 28 pixels, all ten digits or 1 against 7. Test ids start at 60,000."""

import numpy as np
from jaxtyping import Int64, UInt8

from leaveout.builtin.data.examples import Table
from leaveout.builtin.data.files import Remote, original

_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
# file: (sha256 of the .gz as distributed, sha256 of its content)
_FILES = {
    "train-images-idx3-ubyte": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    "train-labels-idx1-ubyte": (
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    "t10k-images-idx3-ubyte": (
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    "t10k-labels-idx1-ubyte": (
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}
_N_TRAIN = 60_000


def _bytes(name: str, header: int) -> UInt8[np.ndarray, " size"]:
    """Read an idx file after its header, whose sizes are known to be right from the checksum."""
    archive_sha256, sha256 = _FILES[name]
    remote = Remote("mnist", f"{name}.gz", f"{_MIRROR}{name}.gz", f"sha256:{archive_sha256}")
    return np.frombuffer(original(remote, sha256), np.uint8, offset=header)


def _read() -> tuple[UInt8[np.ndarray, "n 784"], Int64[np.ndarray, " n"]]:
    """Read all 70,000 images as flat rows with their digits, the training file first."""
    pixels = np.concatenate([_bytes(f"{part}-images-idx3-ubyte", 16) for part in ("train", "t10k")])
    digits = np.concatenate([_bytes(f"{part}-labels-idx1-ubyte", 8) for part in ("train", "t10k")])
    return pixels.reshape(-1, 784), digits.astype(np.int64)


def table() -> Table:
    """Return all ten digits, as images for the network."""
    x, y = _read()
    return Table(
        x=x.reshape(-1, 1, 28, 28),
        y=y,
        ids=np.arange(len(y)),
        n_pool=_N_TRAIN,
        features=(),
        classes=tuple("0123456789"),
        standardise=False,
    )


def one_against_seven() -> Table:
    """Return digit 1 (class 0) against 7 (class 1), flat and standardised."""
    x, y = _read()
    ids = np.flatnonzero((y == 1) | (y == 7))
    return Table(
        # Scaled to [0, 1] first: the standardiser leaves pixels that are constant in the training rows as they are.
        x=x[ids] / 255,
        y=(y[ids] == 7).astype(np.int64),
        ids=ids,
        n_pool=int((ids < _N_TRAIN).sum()),
        features=tuple(f"pixel_{row}_{column}" for row in range(28) for column in range(28)),
        classes=("1", "7"),
        standardise=True,
    )
