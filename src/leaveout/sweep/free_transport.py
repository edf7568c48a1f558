"""Vectors carried without curvature: many rows, each moved only when it is needed.

If the gradient enters the step linearly, a step without curvature is the same small matrix for every parameter of a
group: (θ, m) ↦ C·(θ, m), and a gradient g adds b·g. So a row can stay as it was when it was last touched, stored with
the number of that step, and the steps since then are one product of small matrices, shared by all rows that were last
touched at the same step. The cost of a step does not depend on the number of rows.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leaveout._util.trees import PARAM, Params, add_rows, flat_rows, sum_of
from leaveout.errors import RunError
from leaveout.optim import IDLE, STILL, Hyper, Rule, values

FORGET = 256


@dataclass(frozen=True)
class Drift:
    """One step without curvature, for each parameter group: s ↦ C·s + b·g over the slots of the state."""

    carry: Float[Tensor, "groups slots slots"]
    enter: Float[Tensor, "groups slots"]


def drift(rule: Rule, hypers: Sequence[Hyper], l2: float, like: Tensor) -> Drift:
    """Apply the optimizer's own step to unit vectors; a per-example L2 term is known curvature, and is kept.

    >>> hyper = {"lr": 0.1, "momentum": 0, "dampening": 0, "weight_decay": 1.0, "nesterov": 0, "started": 1}
    >>> step = drift(Rule("SGD", {"w": 0}, ("param",)), [hyper], 2.0, torch.zeros(()))
    >>> step.carry.tolist(), step.enter.tolist()  # 1 - 0.1 * (1 + 2), and -0.1
    ([[[0.699999988079071]]], [[-0.10000000149011612]])
    """
    count = len(rule.slots)
    unit = torch.eye(count, dtype=torch.float64)
    carry, enter = [], []
    for hyper in map(values, hypers):
        units = {slot: unit[i] for i, slot in enumerate(rule.slots)}
        stopped = bool(hyper.get(STILL) or hyper.get(IDLE))
        moved = rule.step_parameter(rule.definition.step, units, (0.0 if stopped else l2) * units[PARAM], hyper)
        carry.append(torch.stack([moved[slot] for slot in rule.slots]))
        nothing = {slot: torch.zeros(1, dtype=torch.float64) for slot in rule.slots}
        one = torch.full((1,), 0.0 if stopped else 1.0, dtype=torch.float64)
        pushed = rule.step_parameter(rule.definition.step, nothing, one, hyper)
        enter.append(torch.cat([pushed[slot] for slot in rule.slots]))
    return Drift(torch.stack(carry).to(like), torch.stack(enter).to(like))


class Layout:
    """Parameters as one flat vector in which those of a group are contiguous."""

    def __init__(self, rule: Rule, params: Params) -> None:
        self.order = list(params)
        self.groups = max(rule.groups.values()) + 1
        self.names = sorted(rule.groups, key=lambda name: rule.groups[name])
        self.shapes = {name: params[name].shape for name in self.names}
        self.sizes = [params[name].numel() for name in self.names]
        self.width = sum(self.sizes)
        group = [rule.groups[name] for name, size in zip(self.names, self.sizes, strict=True) for _ in range(size)]
        self.group = torch.tensor(group, device=next(iter(params.values())).device)

    def spread(self, values: Mapping[str, float], like: Tensor) -> Float[Tensor, " width"]:
        """Spread one number per parameter tensor to all of its coordinates."""
        parts = zip(self.names, self.sizes, strict=True)
        return torch.cat([like.new_full((size,), values[name]) for name, size in parts])

    def flatten(self, stack: Params) -> Float[Tensor, "rows width"]:
        """Flatten a stack of parameter vectors to a matrix."""
        return torch.cat([flat_rows(stack[name]) for name in self.names], dim=1)

    def unflatten(self, matrix: Float[Tensor, "rows width"]) -> Params:
        """Unflatten the matrix to a stack of parameter vectors."""
        parts = dict(zip(self.names, matrix.split(self.sizes, dim=1), strict=True))
        # In the parameters' own order, which torch.func compares.
        return {name: parts[name].reshape(len(matrix), *self.shapes[name]) for name in self.order}


@dataclass(frozen=True)
class Sketch:
    """A sparse random projection that preserves inner products: every coordinate is added to one bucket, with a sign.

    Coordinates of different groups never share a bucket, so that what is the same for a group's parameters is the
    same for its buckets. E⟨Φx, Φy⟩ = ⟨x, y⟩, with a standard deviation of at most √(2/width)·‖x‖‖y‖ per group.
    """

    bucket: Int[Tensor, " coordinates"]
    sign: Float[Tensor, " coordinates"]
    group: Int[Tensor, " buckets"]

    def __call__(self, matrix: Float[Tensor, "rows coordinates"]) -> Float[Tensor, "rows buckets"]:
        """Apply Φ to every row."""
        return matrix.new_zeros((len(matrix), len(self.group))).index_add_(1, self.bucket, matrix * self.sign)

    def back(self, matrix: Float[Tensor, "rows buckets"]) -> Float[Tensor, "rows coordinates"]:
        """Apply Φᵀ to every row."""
        return matrix[:, self.bucket] * self.sign


def sketch(layout: Layout, width: int, like: Tensor, seed: int = 0) -> Sketch:
    """Draw a seeded sketch of ``width`` buckets per group."""
    generator = torch.Generator().manual_seed(seed)
    bucket = torch.randint(width, (layout.width,), generator=generator)
    sign = torch.randint(2, (layout.width,), generator=generator) * 2 - 1
    group = torch.arange(layout.groups).repeat_interleave(width)
    return Sketch(bucket.to(like.device) + layout.group * width, sign.to(like), group.to(like.device))


class RowFile:
    """A stack of zero rows in a temporary file, read and written row by row: none of it counts as memory."""

    def __init__(self, shape: tuple[int, int, int], like: Tensor) -> None:
        self._shape, self._like = shape[1:], like
        self._bytes = shape[1] * shape[2] * like.element_size()
        with _no_room():
            self._file = tempfile.TemporaryFile(prefix="leaveout-")  # noqa: SIM115 - lives as long as the rows
            os.truncate(self._file.fileno(), shape[0] * self._bytes)

    def __getitem__(self, rows: Int[Tensor, " chosen"]) -> Float[Tensor, "chosen slots width"]:
        with _no_room():
            data = bytearray().join(self._read(row * self._bytes) for row in rows.tolist())
        flat = torch.frombuffer(data, dtype=self._like.dtype) if data else torch.zeros(0, dtype=self._like.dtype)
        return flat.reshape(len(rows), *self._shape).to(self._like.device)

    def __setitem__(self, rows: Int[Tensor, " chosen"], values: Float[Tensor, "chosen slots width"]) -> None:
        with _no_room():
            for row, value in zip(rows.tolist(), values.cpu().contiguous(), strict=True):
                self._write(value.numpy().tobytes(), row * self._bytes)

    # The system may read or write less than requested: when the disk is almost full, or if it is more than 2 GB.

    def _read(self, place: int) -> bytes:
        content = b""
        while len(content) < self._bytes:
            part = os.pread(self._file.fileno(), self._bytes - len(content), place + len(content))
            if not part:
                raise OSError("it ends before its last row")
            content += part
        return content

    def _write(self, data: bytes, place: int) -> None:
        left = memoryview(data)
        while left:
            count = os.pwrite(self._file.fileno(), left, place)
            left, place = left[count:], place + count


@contextmanager
def _no_room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(
            f"A temporary file for what does not fit into memory cannot be used ({error}): make room, set TMPDIR to "
            "another directory, or allow more memory.",
            code="temporary-file-failed",
        ) from None


class LazyVectors:
    """A vector of the state's slots for every row, moved only when it is needed: until then it coasts.

    ``now(rows)`` returns chosen rows as they are at the current step, ``put`` replaces them, ``advance`` lets one step
    pass for all. Rows are zero until they are put. On disk, they are in a file that is deleted with them.
    """

    def __init__(self, rows: int, slots: int, group: Int[Tensor, " width"], like: Tensor, *, disk: bool) -> None:
        self.group, self._groups, self.disk = group, int(group.max()) + 1, disk
        self._sizes = group.bincount().tolist()  # a group's coordinates are contiguous
        shape = (rows, slots, len(group))
        self._rows: Tensor | RowFile = RowFile(shape, like) if disk else like.new_zeros(shape)
        self._touched = torch.full((rows,), -1)
        self._step = 0
        # since[j]: what has happened to a row that was last put at step first + j.
        self._first = 0
        self._still = torch.eye(slots, dtype=like.dtype, device=like.device).expand(1, self._groups, slots, slots)
        self._since = self._still
        self._moving = False

    def packed(self) -> dict[str, Tensor]:
        """Return everything, to be saved; only for rows that are in memory."""
        assert isinstance(self._rows, Tensor)  # noqa: S101 - asked before
        clock = torch.tensor([self._step, self._first, int(self._moving)])
        return {"held": self._rows, "touched": self._touched, "since": self._since, "clock": clock}

    def unpack(self, packed: dict[str, Tensor]) -> None:
        """Restore everything as it was when it was packed."""
        self._rows, self._touched, self._since = packed["held"], packed["touched"], packed["since"]
        self._step, self._first, moving = packed["clock"].tolist()
        self._moving = bool(moving)

    def now(self, rows: Int[Tensor, " chosen"]) -> Float[Tensor, "chosen slots width"]:
        """Return the chosen rows as they are now."""
        vectors = self._rows.index_select(0, rows) if isinstance(self._rows, Tensor) else self._rows[rows]
        if not self._moving:
            return vectors
        # A row that was never put is zero, whatever matrix it is multiplied by.
        moves = self._since[(self._touched[rows] - self._first).clamp(min=0)]
        if self._groups == 1:
            return moves[:, 0] @ vectors
        return torch.einsum("rwst,rtw->rsw", moves[:, self.group], vectors)

    def read(
        self,
        rows: Int[Tensor, " chosen"],
        enter: Float[Tensor, "groups slots"],
        gradients: Float[Tensor, "chosen width"],
    ) -> Float[Tensor, " chosen"]:
        """Compute ⟨bᵀ s, g⟩ for chosen rows s as they are now, each with a gradient of its own."""
        now = self.now(rows)
        parts = zip(now.split(self._sizes, dim=2), gradients.split(self._sizes, dim=1), enter, strict=False)
        return sum_of(torch.linalg.vecdot(part, own[:, None]) @ b for part, own, b in parts)

    def put(self, rows: Int[Tensor, " chosen"], values: Float[Tensor, "chosen slots width"]) -> None:
        """Replace rows, as of now; each may be named once."""
        self._rows[rows] = values
        self._touched[rows] = self._step

    def add(self, rows: Int[Tensor, " terms"], terms: Float[Tensor, "terms some width"], alpha: float = 1) -> None:
        """Add multiples of terms to the first slots of rows, as of now; a row may be named several times."""
        some = terms.shape[1]
        if not self._moving and isinstance(self._rows, Tensor):
            add_rows(self._rows[:, :some], rows, terms, alpha=alpha)
            self._touched[rows] = self._step
            return
        chosen, place = torch.unique(rows, return_inverse=True)
        values = self.now(chosen)
        add_rows(values[:, :some], place, terms, alpha=alpha)
        self.put(chosen, values)

    def advance(self, carry: Float[Tensor, "groups slots slots"]) -> None:
        """Let one step pass for every row."""
        carry = carry[: self._groups]  # the last groups may have no coordinates
        self._step += 1
        self._moving |= not torch.equal(carry, self._still[0])
        if not self._moving:  # then it does not matter when a row was put
            self._first = self._step
            return
        # Thousands of small matrices: a broadcast product is much faster than a batched matmul.
        moved = (carry[..., None] * self._since[:, :, None]).sum(3)
        self._since = torch.cat([moved, self._still])
        if self._step % FORGET == 0:  # forget steps at which no row was last put
            oldest = max(self._first, int(torch.where(self._touched < 0, self._step, self._touched).min()))
            self._since, self._first = self._since[oldest - self._first :], oldest
