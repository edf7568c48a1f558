"""dattri: influence functions and data value embeddings (DVEmb)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from dattri.algorithm.dvemb import DVEmbAttributor
from dattri.algorithm.influence_function import IFAttributorCG, IFAttributorDataInf, IFAttributorExplicit
from dattri.task import AttributionTask
from estimate import Estimate, timed
from subjects import DECAY, Subject
from torch import Tensor
from torch.utils.data import DataLoader


def estimates(subject: Subject) -> Iterator[Estimate]:
    """Each attributor at its defaults; the Hessian's with the weight decay, and DVEmb along the recorded steps."""
    model, n = subject.copied(), len(subject.train)
    last = {key: value.clone() for key, value in subject.checkpoints()[-1].items()}

    def loss(params: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        x, y = data
        outputs = torch.func.functional_call(model, params, x.unsqueeze(0) if single(x, subject) else x)
        return subject.losses(outputs, y.unsqueeze(0) if y.ndim < subject.train.tensors[1].ndim else y).mean()

    query = DataLoader(subject.query, batch_size=100)

    def influence(kind: type, cached: int = n, batch: int = 100, **options: float) -> Tensor:
        tool = kind(AttributionTask(loss, model, last), device="cpu", **options)
        tool.cache(DataLoader(subject.train, batch_size=cached))
        return tool.attribute(DataLoader(subject.train, batch_size=batch), query).mean(1) / n

    if subject.settings["model"] in ("logistic", "mlp"):
        yield timed("IFAttributorCG", "default", lambda: influence(IFAttributorCG))
        small = sum(p.numel() for p in model.parameters()) < 3000
        if small:
            decay = {"regularization": DECAY}
            yield timed(
                "IFAttributorExplicit",
                "regularised by the weight decay",
                lambda: influence(IFAttributorExplicit, **decay),
            )
    else:
        # Every example's own gradient, not those of batches; queries are transformed once per batch that is scored.
        decay = {"cached": 1, "batch": n, "regularization": DECAY}
        yield timed("IFAttributorDataInf", f"damping {DECAY:g}", lambda: influence(IFAttributorDataInf, **decay))
    yield timed("DVEmbAttributor", "every recorded step", lambda: _dvemb(subject, loss))


def single(x: Tensor, subject: Subject) -> bool:
    """Tell whether ``x`` is one example without its batch dimension."""
    return x.ndim < subject.train.tensors[0].ndim


def _dvemb(subject: Subject, loss: object) -> Tensor:
    model, run = subject.copied(), subject.run
    size = sum(p.numel() for p in model.parameters())
    options = {} if size < 7000 else {"proj_dim": 2048}
    tool = DVEmbAttributor(AttributionTask(loss, model, model.state_dict()), **options)
    for step in range(len(run)):
        record = run.record(step)
        model.load_state_dict(run.state(step)["param"])
        ids = torch.as_tensor(record.ids)
        tool.cache_gradients(record.epoch, subject.train[ids], ids, subject.settings["lr"])
    model.load_state_dict(run.final()["param"])
    tool.cache()
    return tool.attribute(DataLoader(subject.query, batch_size=100)).mean(1)
