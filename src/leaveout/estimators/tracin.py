"""TracIn: what each occurrence did to the parameters, ignoring how later steps change that effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from jaxtyping import Float
from torch import Tensor

from leaveout._util.trees import PARAM, Params, add_rows, height
from leaveout.compute.cost import Cost
from leaveout.compute.resources import Resources
from leaveout.diff.hessian import Flat
from leaveout.diff.operator import example_gradients, reads
from leaveout.errors import InputError
from leaveout.estimators.base import Estimator, titled
from leaveout.estimators.checkpoints import Checkpoint, checkpoints, example_blocks
from leaveout.estimators.choice import Choice
from leaveout.estimators.readout import Linear
from leaveout.estimators.request import Request
from leaveout.scores import UNIT
from leaveout.sweep import budget
from leaveout.task.counted import per_count
from leaveout.task.execution import Chunks
from leaveout.task.task import Task
from leaveout.trajectory.left_out import LeftOut
from leaveout.trajectory.trajectory import Trajectory


@dataclass(frozen=True)
class TracIn(Estimator):
    """δ ← δ + γ: no transport.

    All steps, plain SGD, linear readout: ``score_k = Σ_{i: k∈Z_i} (α_i/|Z_i|) ⟨∇L(query, θ_N), g(z_k, θ_i)⟩``:
    the query gradient is taken at the final parameters, as in every estimator here.

    ``checkpoints="epochs"`` is TracInCP (Pruthi et al. 2020), ``Σ_c η_c ⟨∇L(query, θ_c), g(z_k, θ_c)⟩`` over the
    states at the ends of epochs, with both gradients at the checkpoint and the epoch's mean ``η_c = α/|Z|``; g is that
    of the loss times what the example counts in training (class weight, unmasked tokens), relative to the mean count.

    Cost: one gradient per step, whatever the number of examples; with checkpoints, one gradient per example and
    checkpoint.

    Args:
        checkpoints: ``"all"`` steps at their own batches, or the ends of ``"epochs"`` at all examples.
        learning_rate: whether the terms are weighted by α/|Z|; if not, they are plain inner products of gradients.
        readout: ``"linear"``; with all steps and the learning rate also ``"outputs"`` and ``"exact"``.
        direction: ``"forward"``, ``"backward"``, or the cheaper one.
        layers: only these parameters count: names or patterns such as ``"head.*"``.
    """

    checkpoints: str = "all"
    learning_rate: bool = True
    readout: str = "linear"
    direction: str = "auto"
    layers: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choice()
        if self.checkpoints not in ("all", "epochs"):
            raise InputError(
                f"checkpoints={self.checkpoints!r} is unknown: use 'all' or 'epochs'.", code="checkpoints-unknown"
            )
        if not self._swept and self.readout != "linear":
            raise InputError(
                "TracIn of checkpoints, or without the learning rate, has the linear readout only.",
                code="readout-linear-only",
            )

    @property
    def name(self) -> str:
        """The method's name."""
        rate = None if self.learning_rate else "without learning rate"
        points = None if self.checkpoints == "all" else self.checkpoints
        return titled("TracIn", {"checkpoints": points, "rate": rate, "readout": self.readout, "layers": self.layers})

    @property
    def unit(self) -> str:
        """The unit of the scores."""
        return UNIT if self.learning_rate else "inner product of gradients"

    @property
    def _swept(self) -> bool:
        return self.checkpoints == "all" and self.learning_rate

    def _choice(self) -> Choice:
        return Choice(Flat, self.readout, self.direction)

    def values(self, request: Request) -> tuple[Tensor, Params | None]:
        """Return the scores, and the displacements if requested."""
        if self._swept:
            return self._choice().values(request)
        if request.displacements:
            raise InputError(
                f"{self.name} has no displacements: its terms are read one by one; use TracIn().",
                code="displacements-not-available",
            )
        values = self._of_checkpoints(request) if self.checkpoints == "epochs" else self._of_steps(request)
        return values, None

    def _of_checkpoints(self, request: Request) -> Float[Tensor, "rows queries"]:
        """Compute Σ_c η_c ⟨∇L(query, θ_c), g(z_k, θ_c)⟩."""
        count = len(request.query.ids)
        like = next(iter(request.trajectory.final()[PARAM].values()))
        total = like.new_zeros((len(request.left_out), count))
        chunks = Chunks(budget.chunk(request.resources, request.trajectory, count))
        objective = _counted(request).objective.chunked(chunks)
        for checkpoint in checkpoints(request):
            for start, vectors in checkpoint.vectors():
                vectors = {name: tensor * self._factor(checkpoint, name) for name, tensor in vectors.items()}
                columns = total[:, start : start + height(vectors)]
                for ids, block in example_blocks(request):
                    products = reads(objective, checkpoint.params, block, vectors)[0] * len(ids)
                    row, position = request.left_out.pairs(ids)
                    add_rows(columns, row, products[:, position].T)
                    request.cost.gradients += 1
        return total

    def _diagonal(self, request: Request) -> Float[Tensor, " rows"]:
        """Read each example's own query only: n inner products of two gradients, where all pairs would be n²."""
        if self.checkpoints != "epochs":
            return super()._diagonal(request)
        task, examples = _counted(request), request.left_out.examples
        chunks = Chunks(examples=budget.examples(request.resources, request.trajectory))
        objective = task.objective.chunked(chunks)
        total = next(iter(request.trajectory.final()[PARAM].values())).new_zeros(len(examples))
        for checkpoint in checkpoints(request):
            for start, vectors in checkpoint.vectors():
                ids = examples[start : start + height(vectors)]
                gradients = example_gradients(objective, checkpoint.params, task.read(ids.tolist()))
                for name, own in gradients.items():
                    products = (vectors[name] * own).reshape(len(ids), -1).sum(1)
                    total[start : start + len(ids)] += self._factor(checkpoint, name) * products
                request.cost.gradients += 1
        return total

    def _factor(self, checkpoint: Checkpoint, name: str) -> float:
        """Return the weight of a parameter's inner product: zero for buffers, which no optimizer moves."""
        share = checkpoint.share.get(name)
        if share is None:
            return 0.0
        return share if self.learning_rate else 1.0

    def _of_steps(self, request: Request) -> Float[Tensor, "rows queries"]:
        """Compute Σ_{i: k∈Z_i} ⟨∇L(query, θ_N), g(z_k, θ_i)⟩."""
        return request.columns(partial(_inner_products, request.trajectory), Linear())["products"]


def _counted(request: Request) -> Task:
    """Return the task whose losses are times what they count in training."""
    trajectory = request.trajectory
    return per_count(trajectory.task, request.query.params, len(trajectory.run.record(0).ids))


def _inner_products(
    trajectory: Trajectory, left_out: LeftOut, vectors: Params, resources: Resources, cost: Cost
) -> Float[Tensor, "rows vectors"]:
    trajectory.check_steps()
    total = next(iter(vectors.values())).new_zeros((len(left_out), height(vectors)))
    chunks = Chunks(budget.chunk(resources, trajectory, height(vectors)))
    for recorded in resources.track(trajectory.forward(), len(trajectory), "forward"):
        row, position = left_out.pairs(recorded.record.ids)
        moving = trajectory.rule.received(vectors, recorded.record.hypers)
        products = reads(recorded.objective.chunked(chunks), recorded.params, recorded.batch, moving)[0]
        add_rows(total, row, products[:, position].T, alpha=len(recorded.record.ids))
        cost.gradients += 1
    return total
