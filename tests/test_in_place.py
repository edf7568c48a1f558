"""Operations of a trace that write over their operands: the same bits, and nothing that is still needed is lost."""

import pytest
import torch
from torch.func import grad, jvp
from torch.fx.experimental.proxy_tensor import make_fx

from leaveout.task.trace.in_place import SMALLEST, observe, write_in_place
from leaveout.task.trace.simplify import call_directly, simplify
from leaveout.task.trace.tracer import WARM_UP, Tracer


def both(function, *inputs):
    """Return a function's results, those in place, and how many operations write; inputs must stay as they were."""
    module = make_fx(function)(*inputs)
    simplify(module)
    values, observed = observe(module, list(inputs))
    written = write_in_place(module, observed)
    if written is None:
        return values, values, 0
    count = sum(any(arg.is_out for arg in _arguments(node) if arg.name in node.kwargs) for node in written.graph.nodes)
    call_directly(written)
    before = [leaf.clone() for leaf in inputs]
    results = written(*inputs)
    assert all(map(torch.equal, inputs, before))
    return values, results, count


def _arguments(node):
    return node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else []


def pair(size=SMALLEST):
    torch.manual_seed(0)
    return torch.randn(size), torch.randn(size)


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda a, b: [(a * b).exp()], 1),
        (lambda a, b: [(a + b) * 2.0 + b], 2),
        (lambda a, b: [(a.exp()).mul(b).sub(1).where(a > 0, b)], 3),
        (lambda a, b: [a.add(b)], 0),  # the inputs are not the trace's own
        (lambda a, b: [(c := a * b), c.exp()], 0),  # a result must stay
        (lambda a, b: [(c := a * b).exp() + c], 1),  # the product is read again; the exponential is not
        (lambda a, b: [(c := a * b).view(64, -1).exp().flatten() + c], 1),  # ... also by a view
        (lambda a, b: [(a * b).view(64, -1).exp().flatten() * b], 2),  # ... and here it is not
        (lambda a, b: [(c := (a * b).view(64, 64)) + c.T], 0),  # it would write what it has yet to read
        (lambda a, b: [(c := a * b) * c], 1),  # one operand, twice
        (lambda a, b: [(a * b).view(64, 64).T.exp()], 1),
        (lambda a, b: [(a * b).double() + 1, (a > b).float() * a], 2),  # another type has another size
        (lambda a, b: [(a[:1] * b[:1]).expand(SMALLEST) + b], 0),  # one number cannot hold them all
        (lambda a, b: [(a * b)[: SMALLEST // 2].exp()], 0),  # small: no gain
        (lambda a, b: [torch.nn.functional.gelu(a * b) + b], 2),
        (lambda a, b: [(a * b).conj_physical() + b], 1),  # of real numbers it returns what it was given
    ],
)
def test_what_nothing_needs_any_more_is_written_over(function, count):
    values, results, written = both(function, *pair())
    assert written == count
    assert all(map(torch.equal, results, values))


def test_a_chain_of_operations_stays_in_one_piece_of_memory():
    module = make_fx(lambda a, b: [((a * b).exp() + b).tanh() / 2])(*pair())
    simplify(module)
    written = write_in_place(module, observe(module, list(pair()))[1])
    _, observed = observe(written, list(pair()))
    made = [observed[node].blocks for node in written.graph.nodes if node.op == "call_function"]
    assert len(made) == 5
    assert len(set(made)) == 1


def test_second_derivatives_of_a_network_have_the_same_bits():
    def product(w, v, x):
        def loss(q):
            return torch.nn.functional.gelu(x.tanh() @ q).softmax(-1).log().square().sum()

        return list(jvp(grad(loss), (w,), (v,)))

    torch.manual_seed(0)
    inputs = [torch.randn(64, 64), torch.randn(64, 64), torch.randn(128, 64)]
    values, results, count = both(product, *inputs)
    assert count > 5
    assert all(map(torch.equal, results, values))


def test_the_call_that_makes_a_trace_returns_what_the_next_ones_do():
    """Also where two results are one tensor: whoever gets them writes to both."""
    tracer, (a, b) = Tracer(), pair()

    def function(a, b):
        total = (a * b).exp() + b
        return {"one": total, "same": total, "input": a}

    for call in range(WARM_UP + 3):
        made = tracer("function", function, a, b)
        assert torch.equal(made["one"], function(a, b)["one"]), call
        if call >= WARM_UP:
            made["one"].zero_()
            assert made["same"].abs().sum() > 0
            made["input"].zero_()
            assert a.abs().sum() > 0
