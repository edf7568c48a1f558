"""The slow known answers: dense Jacobians of training steps written out a second time, and plain retraining.

Nothing here uses leaveout's own losses, steps, products or loops; only what a run recorded is read.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn
from torch.func import functional_call


def remembered(method):
    """Keep a method's results by its arguments."""

    def part(given):
        if isinstance(given, Tensor):
            return tuple(given.shape), tuple(given.flatten().tolist())
        return tuple(map(part, given)) if isinstance(given, list) else given

    @functools.wraps(method)
    def remember(self, *args, **named):
        key = (method.__name__, *map(part, args), *((name, part(value)) for name, value in sorted(named.items())))
        if key not in self.results:
            self.results[key] = method(self, *args, **named)
        return self.results[key].clone()

    return remember


def jacobian(function, at: Tensor) -> Tensor:
    """The dense Jacobian, row by row in one backward pass."""
    return torch.autograd.functional.jacobian(function, at, vectorize=True)


def hessian(function, at: Tensor) -> Tensor:
    return torch.autograd.functional.hessian(function, at, vectorize=True)


class Oracle:
    """A recorded run with its steps as functions of one flat state vector and the weights of all training examples."""

    def __init__(self, run, model: nn.Module, loss, inputs: Tensor, targets: Tensor, l2: float = 0.0) -> None:
        self.run, self.model, self.loss, self.inputs, self.targets, self.l2 = run, model, loss, inputs, targets, l2
        self.results: dict[tuple, Tensor] = {}
        self.names = list(run.rule.groups)
        self.shapes = [run.manifest.shapes[name] for name in self.names]
        self.p = sum(math.prod(shape) for shape in self.shapes)

    def flat(self, state: dict) -> Tensor:
        return torch.cat([state[slot][name].flatten() for slot in self.run.rule.slots for name in self.names])

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        sizes = [math.prod(shape) for shape in self.shapes]
        return {n: part.reshape(s) for n, part, s in zip(self.names, vector.split(sizes), self.shapes, strict=True)}

    def per_parameter(self, hypers: list[dict], key: str) -> Tensor:
        """A hyperparameter spread over the flat parameter vector."""
        values = [
            torch.full((math.prod(shape),), hypers[self.run.rule.groups[name]][key], dtype=torch.float64)
            for name, shape in zip(self.names, self.shapes, strict=True)
        ]
        return torch.cat(values)

    def example_loss(self, theta: Tensor, k: int) -> Tensor:
        output = functional_call(self.model, self.named(theta), (self.inputs[k : k + 1],))
        return self.loss(output, self.targets[k : k + 1]) + 0.5 * self.l2 * theta.dot(theta)

    def batch_gradient(self, theta: Tensor, weights: Tensor, ids: list[int]) -> Tensor:
        total = sum(weights[k] * self.example_loss(theta, k) for k in ids) / len(ids)
        return torch.autograd.grad(total, theta, create_graph=True)[0]

    def step(self, i: int, state: Tensor, weights: Tensor) -> Tensor:
        return self.update(i, state, self.batch_gradient(state[: self.p], weights, self.run.record(i).ids.tolist()))

    def update(self, i: int, state: Tensor, gradient: Tensor) -> Tensor:
        record = self.run.record(i)
        theta = state[: self.p]
        get = lambda key: self.per_parameter(record.hypers, key)  # noqa: E731
        lr, decay = get("lr"), get("weight_decay")
        if self.run.rule.kind == "SGD":
            d = gradient + decay * theta
            if "momentum_buffer" not in self.run.rule.slots:
                return theta - lr * d
            mu, started = get("momentum"), get("started")
            m = torch.where(started > 0, mu * state[self.p :] + (1 - get("dampening")) * d, d)
            used = torch.where(get("nesterov") > 0, d + mu * m, m)
            return torch.cat([theta - lr * used, m])
        decoupled = self.run.rule.kind == "AdamW"
        d = gradient if decoupled else gradient + decay * theta
        start = theta * (1 - lr * decay) if decoupled else theta
        b1, b2, t = get("beta1"), get("beta2"), get("step")
        m = b1 * state[self.p : 2 * self.p] + (1 - b1) * d
        v = b2 * state[2 * self.p :] + (1 - b2) * d * d
        moved = start - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + get("eps"))
        return torch.cat([moved, m, v])

    def jacobian(self, i: int, state: Tensor, weights: Tensor) -> Tensor:
        return jacobian(lambda s: self.step(i, s, weights), state)

    @remembered
    def displacements(self, method: str, rows: list[list[int]]) -> Tensor:
        """δ_N of every row (a list of left-out examples), by the recurrences with dense matrices."""
        ones = torch.ones(len(self.inputs), dtype=torch.float64)
        moved = [torch.zeros(self.p * len(self.run.rule.slots), dtype=torch.float64) for _ in rows]
        for i in range(len(self.run)):
            state = self.flat(self.run.state(i)).requires_grad_()
            in_weights = jacobian(lambda w, s=state, i=i: self.step(i, s, w), ones)
            whole = self.jacobian(i, state, ones)
            after = self.step(i, state, ones).detach()
            for r, row in enumerate(rows):
                gamma = -in_weights[:, row].sum(1)
                if method == "tracin":
                    moved[r] = moved[r] + gamma
                elif method == "sgdie":
                    moved[r] = whole @ moved[r] + gamma
                elif method == "acc" and not set(row) & set(self.run.record(i).ids.tolist()):
                    moved[r] = whole @ moved[r]
                elif method == "acc":
                    without = ones.clone()
                    without[row] = 0
                    jump = self.step(i, state, without).detach() - after
                    moved[r] = self.jacobian(i, state, without) @ moved[r] + jump
                else:
                    raise ValueError(method)
        return torch.stack(moved)[:, : self.p].detach()

    def curvature(self, kind: str, theta: Tensor, k: int) -> Tensor:
        """One example's Hessian, Gauss-Newton matrix or gradient outer product, dense."""
        if kind == "hessian":
            return hessian(lambda t: self.example_loss(t, k), theta)

        def outputs(t: Tensor) -> Tensor:
            return functional_call(self.model, self.named(t), (self.inputs[k : k + 1],))

        def loss(z: Tensor) -> Tensor:
            return self.loss(z, self.targets[k : k + 1])

        ridge = self.l2 * torch.eye(self.p, dtype=torch.float64)
        if kind == "fisher":
            g = jacobian(lambda t: loss(outputs(t)), theta)
            return torch.outer(g, g) + ridge
        J = jacobian(outputs, theta).reshape(-1, self.p)
        A = hessian(loss, outputs(theta)).reshape(len(J), len(J))
        return J.T @ A @ J + ridge

    @remembered
    def family(self, rows: list[list[int]], kind: str = "hessian", where=None, path: Tensor | None = None) -> Tensor:
        """δ_N of every row, any curvature; corrected ``where``; ``path`` maps what enters the gradient."""
        ones = torch.ones(len(self.inputs), dtype=torch.float64)
        P = torch.eye(self.p, dtype=torch.float64) if path is None else path
        moved = [torch.zeros(self.p * len(self.run.rule.slots), dtype=torch.float64) for _ in rows]
        for i in range(len(self.run)):
            ids = self.run.record(i).ids.tolist()
            state = self.flat(self.run.state(i))
            theta = state[: self.p]
            whole = self.batch_gradient(theta.clone().requires_grad_(), ones, ids).detach()
            bends = {k: self.curvature(kind, theta, k) for k in set(ids)}
            slopes = {k: jacobian(lambda t, k=k: self.example_loss(t, k), theta) for k in set(ids)}
            mean = sum(bends[k] for k in ids) / len(ids)

            def derivatives(g, state=state, i=i):
                """Of the update, in the state and in the gradient."""
                return jacobian(lambda s: self.update(i, s, g), state), jacobian(lambda h: self.update(i, state, h), g)

            plain = derivatives(whole)
            for r, row in enumerate(rows):
                out = [k for k in ids if k in row]
                gone = P @ sum((slopes[k] for k in out), torch.zeros(self.p).double()) / len(ids)
                change = P @ mean @ moved[r][: self.p]
                corrected = bool(out) and where is not None and where(i, row)
                if corrected:
                    change = change - P @ sum(bends[k] for k in out) @ moved[r][: self.p] / len(ids)
                at = whole - gone if corrected else whole
                carry, enter = derivatives(at) if corrected else plain
                jump = self.update(i, state, at) - self.update(i, state, whole) if corrected else -enter @ gone
                moved[r] = carry @ moved[r] + enter @ change + jump
        return torch.stack(moved)[:, : self.p].detach()

    @remembered
    def freely_corrected(self, query: Tensor, rows: list[list[int]], where=lambda _step, _row: True) -> Tensor:
        """⟨query, δ⟩ for every row with SGD-IE's transport and gradients corrected by a curvature-free displacement."""
        ones = torch.ones(len(self.inputs), dtype=torch.float64)
        size = self.p * len(self.run.rule.slots)
        moved = torch.zeros(len(rows), size, dtype=torch.float64)
        free = torch.zeros(len(rows), size, dtype=torch.float64)
        for i in range(len(self.run)):
            ids = self.run.record(i).ids.tolist()
            state = self.flat(self.run.state(i))
            theta = state[: self.p]
            gradient = self.batch_gradient(theta.clone().requires_grad_(), ones, ids).detach()
            enter = jacobian(lambda g, s=state, i=i: self.update(i, s, g), gradient)
            # The L2 term is the only curvature that the free displacement feels.
            carry = jacobian(lambda s, g=gradient, i=i: self.update(i, s, g), state)
            carry[:, : self.p] += self.l2 * enter
            whole = self.jacobian(i, state.clone().requires_grad_(), ones)
            for r, row in enumerate(rows):
                read, plain = torch.zeros(self.p).double(), torch.zeros(self.p).double()
                for k in ids:
                    if k in row:
                        gk = jacobian(lambda t, k=k: self.example_loss(t, k), theta)
                        hk = hessian(lambda t, k=k: self.example_loss(t, k), theta)
                        plain = plain + gk
                        read = read + gk + (hk @ free[r, : self.p] if where(i, row) else 0)
                moved[r] = whole @ moved[r] - enter @ read / len(ids)
                free[r] = carry @ free[r] - enter @ plain / len(ids)
        return moved[:, : self.p] @ query

    def saturated(self, i: int, jump: Tensor) -> Tensor:
        """A jump of Adam's state after step i, its moments saturated.

        The second moment at which they do comes from derivatives of what the later steps, taken one after the other
        from jumped moments with the recorded gradients, move the parameters by.
        """
        p, ones = self.p, torch.ones(len(self.inputs), dtype=torch.float64)
        change, signed = torch.zeros(2, p, dtype=torch.float64).requires_grad_(), []
        mean, square = self.flat(self.run.state(i + 1))[p:].view(2, p) + change
        for t in range(i + 1, len(self.run)):
            theta = self.flat(self.run.state(t))[:p].requires_grad_()
            gradient = self.batch_gradient(theta, ones, self.run.record(t).ids.tolist()).detach()
            after = self.update(t, torch.cat([theta.detach(), mean, square]), gradient)
            mean, square = after[p:].view(2, p)
            signed.append((after[:p], -torch.sign(mean.detach()) * after[:p]))
        if not signed:
            return jump

        def derivative(moved: Tensor) -> Tensor:
            return torch.autograd.grad(moved.sum(), change, create_graph=True)[0]

        plain, positive = (derivative(sum(parts)) for parts in zip(*signed, strict=True))
        mean_rate = -2 * derivative(plain[0])[1] / plain[0]
        square_rate = -2 / 3 * derivative(positive[1])[1] / positive[1]
        moved, dm, dv = jump.view(3, p)
        x, y = (1 + mean_rate * dv).clamp_min(1 / 16), (1 + square_rate * dv).clamp_min(1 / 16)
        return torch.cat([moved, dm / x.sqrt(), 2 * dv / (y.sqrt() + y)]).detach()

    @remembered
    def jumps(
        self, query: Tensor, rows: list[list[int]], where=lambda _step, _row: True, *, saturated: bool = True
    ) -> Tensor:
        """Σ_i ⟨u_{i+1}, F_i(s_i; w without the row) − F_i(s_i; w)⟩ with u_i = ∂F_iᵀ u_{i+1}; γ where not corrected."""
        ones = torch.ones(len(self.inputs), dtype=torch.float64)
        u = torch.cat([query, torch.zeros(self.p * (len(self.run.rule.slots) - 1), dtype=torch.float64)])
        totals = torch.zeros(len(rows), dtype=torch.float64)
        for i in reversed(range(len(self.run))):
            state = self.flat(self.run.state(i)).requires_grad_()
            after = self.step(i, state, ones).detach()
            in_weights = jacobian(lambda w, s=state, i=i: self.step(i, s, w), ones)
            for r, row in enumerate(rows):
                if not set(row) & set(self.run.record(i).ids.tolist()):
                    continue
                without = ones.clone()
                without[row] = 0
                jump = self.step(i, state, without).detach() - after
                jump = self.saturated(i, jump) if saturated else jump
                totals[r] += u @ (jump if where(i, row) else -in_weights[:, row].sum(1))
            u = self.jacobian(i, state, ones).T @ u
        return totals

    @remembered
    def retrained(self, row: list[int], weight: float = 0.0) -> Tensor:
        """θ'_N: the run again from its start with the row's examples weighted."""
        weights = torch.ones(len(self.inputs), dtype=torch.float64)
        weights[row] = weight
        state = self.flat(self.run.state(0))
        for i in range(len(self.run)):
            state = self.step(i, state.detach().requires_grad_(), weights).detach()
        return state[: self.p]

    def query_losses(self, theta: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """One loss a query, without L2."""
        return torch.stack(
            [
                self.loss(functional_call(self.model, self.named(theta), (inputs[k : k + 1],)), targets[k : k + 1])
                for k in range(len(inputs))
            ]
        )
