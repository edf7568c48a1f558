"""The models by name: shapes, sizes, and that no example sees another."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from leaveout.builtin import models
from leaveout.errors import InputError
from refusal import refused

# name, options, shape of one input, outputs, parameters
CASES = [
    ("logistic", {"features": 62}, (62,), 1, 62 + 1),
    ("mlp", {"features": 62}, (62,), 1, (62 * 8 + 8) + (8 * 8 + 8) + (8 + 1)),
    ("mlp", {"features": 64, "hidden": (16,), "outputs": 10}, (64,), 10, (64 * 16 + 16) + (16 * 10 + 10)),
    ("mnist-cnn", {}, (1, 28, 28), 10, (25 * 20 + 20) + (20 * 25 * 20 + 20) + (320 * 10 + 10)),
    (
        "cifar-cnn",
        {},
        (3, 32, 32),
        10,
        # convolutions with biases, the norm's two vectors after the first of each block, the last layer
        sum(9 * i * o + o for i, o in [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)])
        + 2 * (32 + 64 + 128)
        + (2048 * 10 + 10),
    ),
]
each_model = pytest.mark.parametrize(("name", "options", "shape", "outputs", "size"), CASES)


@each_model
def test_shapes_and_sizes(name: str, options: dict, shape: tuple, outputs: int, size: int) -> None:
    model = models.build(name, seed=0, **options)
    assert model(torch.randn(7, *shape)).shape == ((7,) if outputs == 1 else (7, outputs))
    assert sum(parameter.numel() for parameter in model.parameters()) == size


@each_model
def test_outputs_are_logits_of_both_signs(name: str, options: dict, shape: tuple, outputs: int, size: int) -> None:
    output = models.build(name, seed=0, **options)(5 * torch.randn(50, *shape, generator=torch.manual_seed(0)))
    assert output.min() < 0 < output.max()  # neither a ReLU nor a sigmoid at the end


@each_model
def test_per_example_gradients_are_exact(name: str, options: dict, shape: tuple, outputs: int, size: int) -> None:
    """In training mode, the gradients of the single examples sum to the gradient of the batch."""
    model = models.build(name, seed=0, **options).double().train()
    x = torch.randn(4, *shape, generator=torch.manual_seed(1), dtype=torch.float64)
    parameters = {key: value.detach() for key, value in model.named_parameters()}

    def loss(parameters: dict, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (x,)).square().sum()

    single = vmap(grad(lambda p, row: loss(p, row[None])), in_dims=(None, 0))(parameters, x)
    batch = grad(loss)(parameters, x)
    assert max(value.abs().max() for value in batch.values()) > 1e-3
    for key, value in batch.items():
        torch.testing.assert_close(single[key].sum(0), value)


def test_logistic_is_a_line_with_a_bias() -> None:
    model = models.logistic(3)
    weight, bias = model.parameters()
    x = torch.randn(5, 3)
    torch.testing.assert_close(model(x), (x @ weight.T).squeeze(1) + bias)


def test_networks_are_relu_between_the_layers() -> None:
    model = models.mlp(4)
    w1, b1, w2, b2, w3, b3 = model.parameters()
    x = torch.randn(6, 4)
    hidden = ((x @ w1.T + b1).relu() @ w2.T + b2).relu()
    torch.testing.assert_close(model(x), (hidden @ w3.T + b3)[:, 0])


def test_the_seed_fixes_the_weights_and_leaves_the_global_state_alone() -> None:
    def weights(seed: int | None) -> torch.Tensor:
        return nn.utils.parameters_to_vector(models.build("mlp", seed, features=5).parameters())

    state = torch.random.get_rng_state()
    assert weights(0).equal(weights(0))
    assert not weights(0).equal(weights(1))
    assert torch.random.get_rng_state().equal(state)
    assert not weights(None).equal(weights(None))
    assert not torch.random.get_rng_state().equal(state)


def test_unknown_names_and_options_are_refused() -> None:
    with refused(InputError, "model-unknown", "'resnet'", "mnist-cnn"):
        models.build("resnet")
    with refused(InputError, "model-option-unknown", "missing", "'features'"):
        models.build("logistic")
    with refused(InputError, "model-option-unknown", "unexpected", "'features'"):
        models.build("mnist-cnn", features=784)
    with refused(InputError, "layer-empty", "hidden=[8, 0]"):
        models.build("mlp", features=5, hidden=(8, 0))
    for width in (10**15, 10**30):
        with refused(InputError, "model-too-large", "'hidden'"):
            models.build("mlp", features=5, hidden=(width,))
    with refused(InputError, "seed-not-a-number", "seed=18446744073709551616"):
        models.build("mlp", seed=2**64, features=5)
