"""Products that are added, in one pass: the same up to rounding, and nothing that decides on a kink."""

import torch
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx

from leaveout.task.trace.fusing import SMALLEST, fuse
from leaveout.task.trace.simplify import simplify

aten = torch.ops.aten


def traced(function, *inputs):
    module = make_fx(function)(*inputs)
    simplify(module)
    return module


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def inputs(count, *shape):
    torch.manual_seed(0)
    return torch.randn(count, *shape, dtype=torch.float64).unbind()


def test_a_product_that_is_added_takes_one_operation():
    a, b, c = inputs(3, SMALLEST)
    module = traced(lambda a, b, c: c + a * b, a, b, c)
    fuse(module)
    assert targets(module) == [aten.addcmul.default]
    torch.testing.assert_close(module(a, b, c), c + a * b, rtol=1e-15, atol=1e-15)


def test_of_two_products_one_is_added_to_the_other_and_channels_spread():
    x, y = inputs(2, 4, 8, 32, 32)
    s, t = inputs(2, 8, 1, 1)
    module = traced(lambda x, y, s, t: x * s + y * t, x, y, s, t)
    fuse(module)
    assert targets(module) == [aten.mul.Tensor, aten.addcmul.default]
    torch.testing.assert_close(module(x, y, s, t), x * s + y * t, rtol=1e-14, atol=1e-14)


def test_a_sum_of_many_terms_takes_a_pass_for_each_product():
    x, y = inputs(2, 4, 8, 32, 32)
    s, t = inputs(2, 8, 1, 1)

    def total(x, y, s, t):
        return ((x * s + y * t) + (2 * (x * y) + s)) + y

    module = traced(total, x, y, s, t)
    fuse(module)
    assert targets(module) == [aten.add.Tensor] + 3 * [aten.addcmul.default]
    torch.testing.assert_close(module(x, y, s, t), total(x, y, s, t), rtol=1e-13, atol=1e-13)


def test_a_sum_that_is_used_elsewhere_is_computed_once():
    a, b, c = inputs(3, SMALLEST)

    def twice(a, b, c):
        inner = a * b + c
        return inner, inner + a * c, inner + inner

    module = traced(twice, a, b, c)
    fuse(module)
    assert targets(module) == [aten.addcmul.default, aten.addcmul.default, aten.add.Tensor]
    for found, wanted in zip(module(a, b, c), twice(a, b, c), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)


def test_small_ones_scaled_sums_and_products_used_twice_stay():
    small, large = inputs(3, 16), inputs(3, SMALLEST)
    for function, given in (
        (lambda a, b, c: a * b + c, small),
        (lambda a, b, c: torch.add(c, a * b, alpha=2), large),
        (lambda a, b, c: (a * b + c, a * b), large),
    ):
        module = traced(function, *given)
        before = targets(module)
        fuse(module)
        assert targets(module) == before
        assert aten.mul.Tensor in before


def test_what_decides_on_which_side_of_a_kink_a_value_is_keeps_every_bit():
    a, b, c = inputs(3, SMALLEST)
    module = traced(grad(lambda a, b, c: ((a * b + c).relu() * a + b).sum()), a, b, c)
    fuse(module)
    found = targets(module)
    assert found.index(aten.mul.Tensor) < found.index(aten.add.Tensor) < found.index(aten.relu.default)
    assert aten.addcmul.default in found


def test_multiplying_by_ones_is_nothing():
    (x,) = inputs(1, 8)
    module = traced(lambda x: x * torch.ones_like(x) + x.pow(0) * x, x)
    assert targets(module) == [aten.add.Tensor]
    assert torch.equal(module(x), x + x)
