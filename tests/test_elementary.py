"""Functions from elementary operations, and closed forms: the same values and derivatives as PyTorch's own."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.func import grad, jvp, vjp
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout._util.trees import PARAM
from leaveout.diff.forms import Form
from leaveout.diff.hessian import Hessian
from leaveout.diff.operator import example_gradients, reads
from leaveout.optim.adam import Adam
from leaveout.optim.adamw import AdamW
from leaveout.task.rewrites.elementary import Elementary
from leaveout.trajectory.trajectory import Trajectory

x = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ALL = torch.tensor([[1, 0, 3, 2, 1], [0, 0, 1, 3, 3], [2, 1, 0, 3, 1]])
SOME = ALL.where(ALL != 3, -100)

HIDDEN = torch.tensor([[0, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
"""The keys of each row that a mask hides: all of the second's, as of an empty text."""

torch.manual_seed(0)
ATTENTION = nn.MultiheadAttention(5, 1, batch_first=True, dtype=torch.float64).requires_grad_(False)

FUNCTIONS = {
    "layer norm": lambda t: F.layer_norm(t, (4, 5), x[0] + 1, x[1]),
    "layer norm without weights": lambda t: F.layer_norm(t, (5,), eps=1e-3),
    "module": nn.LayerNorm(5, dtype=torch.float64).requires_grad_(False),
    "softmax": lambda t: t.softmax(1),
    "cross-entropy": lambda t: F.cross_entropy(t, ALL, reduction="none"),
    "cross-entropy, some ignored": lambda t: F.cross_entropy(t, SOME, reduction="none"),
    "cross-entropy, rows": lambda t: F.cross_entropy(t[:, 0], ALL[0, :3], reduction="none"),
    "cross-entropy, smoothed": lambda t: F.cross_entropy(t, ALL, reduction="none", label_smoothing=0.1),
    "norm": lambda t: t.norm(dim=1),
    "norm of all": lambda t: torch.linalg.vector_norm(t, keepdim=True),
    "norm of zeros": lambda t: (t * (torch.arange(5) > 9)).norm(dim=-1, keepdim=True),
    "normalised": lambda t: F.normalize(t, dim=-1),
    "cosine": lambda t: F.cosine_similarity(t, x.cos(), dim=2),
    "attention": lambda t: F.scaled_dot_product_attention(t, t.sin(), t.cos()),
    "causal attention": lambda t: F.scaled_dot_product_attention(t, t.sin(), t.cos(), is_causal=True, scale=0.3),
    "masked attention": lambda t: F.scaled_dot_product_attention(t, t.sin(), t, attn_mask=x[0] @ x[1].T > 0),
    "attention of an empty text": lambda t: F.scaled_dot_product_attention(t, t.sin(), t, ~HIDDEN[:, None]),
    "attention of an empty text, added": lambda t: F.scaled_dot_product_attention(
        t, t.sin(), t, torch.zeros(3, 1, 4, dtype=t.dtype).masked_fill(HIDDEN[:, None], -torch.inf)
    ),
    "attention in groups": lambda t: F.scaled_dot_product_attention(
        t.expand(2, 3, 4, 5).transpose(0, 1), t[:, None].sin(), t[:, None], enable_gqa=True
    ),
    "attention module with an empty text": lambda t: ATTENTION(
        t, t.sin(), t, key_padding_mask=HIDDEN, need_weights=False
    )[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_derivatives_are_those_of_the_function(name):
    """The reverse derivative of the forward one against differences of PyTorch's own gradient."""
    function, u = FUNCTIONS[name], x.flip(0)
    weights = torch.randn(function(x).shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def loss(t: Tensor) -> Tensor:
        return (weights * function(t)).sum()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        step = 1e-5
        difference = (grad(loss)(x + step * u) - grad(loss)(x - step * u)) / (2 * step)
        with Elementary():
            torch.testing.assert_close(function(x), function(x.clone()), rtol=0, atol=0)
            written, product = function(x), grad(lambda t: jvp(loss, (t,), (u,))[1])(x)
            transposed = vjp(lambda v: jvp(grad(loss), (x,), (v,))[1], torch.zeros_like(x))[1](u)[0]
        torch.testing.assert_close(written, function(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(product, difference, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(transposed, difference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("definition", [Adam(), AdamW()], ids=lambda d: d.name)
@pytest.mark.parametrize("options", [{}, {"maximize": 1.0}], ids=["", "maximize"])
def test_adam_pulled_back_in_closed_form(definition, options):
    """Against torch.func, with a coordinate whose moments are zero; and the gradient read off the moments."""
    generator = torch.Generator().manual_seed(0)
    slots = {s: torch.randn(6, dtype=torch.float64, generator=generator) for s in (PARAM, "exp_avg", "exp_avg_sq")}
    slots["exp_avg_sq"] = slots["exp_avg_sq"].square()
    gradient = torch.randn(6, dtype=torch.float64, generator=generator)
    for tensor in (slots["exp_avg"], slots["exp_avg_sq"], gradient):
        tensor[0] = 0
    if definition.name == "Adam":
        slots[PARAM][0] = 0  # with weight decay in the gradient
    u = {s: torch.randn(6, dtype=torch.float64, generator=generator) for s in slots}
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.05, "step": 3.0, **options}
    wanted, pull = torch.func.vjp(partial(definition.step, hyper=hyper), slots, gradient)
    old, along = definition.pulled(slots, gradient, u, hyper)
    state, into = pull(u)
    torch.testing.assert_close(along, into)
    torch.testing.assert_close(old, state)
    torch.testing.assert_close(definition.consumed(slots, wanted, hyper), gradient, rtol=1e-12, atol=1e-13)


def test_the_gradient_of_a_recorded_step_is_read_off_its_states(tmp_path):
    run, task = _adam_run(tmp_path)
    for recorded in Trajectory(run, task).forward():
        used = run.rule.consumed(recorded.before, recorded.after, recorded.record.hypers)
        wanted = lo.diff.operator.gradient(task.objective, recorded.params, recorded.batch)
        torch.testing.assert_close(used, wanted, rtol=1e-10, atol=1e-12)
    assert run.rule.extended(lo.optim.clip.clip_of(1.0, None), ()).consumed(recorded.before, recorded.after, []) is None


def test_a_step_whose_slope_is_another_is_refused(tmp_path):
    """The check along one vector sees a gradient that was used and is not the batch's, at a step of the middle."""
    run, task = _adam_run(tmp_path)
    trajectory = Trajectory(run, task)
    recorded = trajectory.recorded_step(1)
    vector = {name: torch.randn_like(tensor) for name, tensor in recorded.params.items()}
    used = run.rule.consumed(recorded.before, recorded.after, recorded.record.hypers)
    slope = sum(float((vector[name] * used[name]).sum()) for name in used)
    trajectory.check.slope(recorded, vector, used, slope)
    with pytest.raises(lo.MismatchError) as raised:
        trajectory.check.slope(recorded, vector, used, 1.5 * slope)
    assert raised.value.code == "derivatives-do-not-add-up"


def _adam_run(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 4)).double()
    task = lo.Task(model, nn.CrossEntropyLoss(), TensorDataset(x[0], ALL[:, :4].T[:, 0]))
    return lo.train(task, torch.optim.AdamW(model.parameters(), lr=0.05), 3, 2, 0, folder / "run", keep="all"), task


def test_losses_along_a_vector_are_the_gradients_inner_products(tmp_path):
    run, task = _adam_run(tmp_path)
    assert task.objective.abilities.slopes
    recorded = Trajectory(run, task).recorded_step(2)
    vectors = {name: torch.randn(3, *tensor.shape, dtype=torch.float64) for name, tensor in recorded.params.items()}
    products, value = reads(task.objective, recorded.params, recorded.batch, vectors)
    own = example_gradients(task.objective, recorded.params, recorded.batch)
    wanted = sum(torch.einsum("v...,z...->vz", vectors[n].flatten(1), own[n].flatten(1)) for n in own) / 2
    assert value is None
    torch.testing.assert_close(products, wanted)


@pytest.mark.parametrize("statistics", ["leave", "stay"])
def test_one_vector_through_batch_norm(tmp_path, statistics):
    """The quick form against the pull-back: parameters, running statistics and the examples' weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)).double()
    task = lo.Task(
        model, nn.CrossEntropyLoss(), TensorDataset(x.flatten(0, 1), ALL.flatten()[:12]), statistics=statistics
    )
    run = lo.train(task, torch.optim.SGD(model.parameters(), lr=0.1), 1, 6, 0, tmp_path / "run")
    trajectory = Trajectory(run, task).compared()
    seen, recorded = trajectory.objective, trajectory.recorded_step(1)
    assert seen.coupled
    assert seen.abilities.vector is Form.REVERSE_FORWARD
    vector = {name: torch.randn_like(tensor)[None] for name, tensor in seen.variables(recorded.params).items()}
    quick = Hessian(seen, recorded.params, recorded.batch).pull(vector)[:2]
    other = seen.able(seen.abilities._replace(vector=Form.REVERSE_REVERSE))
    slow = Hessian(other, recorded.params, recorded.batch).pull(vector)[:2]
    torch.testing.assert_close(quick, slow)
