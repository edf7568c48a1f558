"""The other estimators, and the options of all, against dense matrices and the limits that theory gives; float64."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import leaveout as lo
from leaveout.sweep.free_transport import Layout, sketch
from leaveout.sweep.schedule import schedule_of
from oracle import jacobian
from problems import OPTIMIZERS, flat, mostly_full, recorded, shared, with_least_memory
from refusal import refused
from test_estimators import BATCHES, close

LONG = BATCHES * 2
"""Each state between kept ones lies between two of them."""

OPTIONS = [{"probability": 0.5, "seed": 3}, {"epochs": (1, 2)}, {"epochs": "first"}]
CASES = [("mlp", "nesterov"), ("conv", "sgd"), ("mlp", "adam")]


def score(problem, estimator, **more):
    return estimator.score(problem.run, problem.task, problem.query, **more)


def query_gradients(problem):
    oracle = problem.oracle
    theta = oracle.flat(problem.run.final())[: oracle.p].requires_grad_()
    losses = oracle.query_losses(theta, *problem.query.tensors)
    return torch.stack([torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in losses])


def rows_of(problem):
    return [[k] for k in range(problem.n)]


def everywhere(_step, _row):
    return True


@pytest.mark.parametrize(("model", "optimizer"), mostly_full(CASES, ("mlp", "nesterov"), ("mlp", "adam")))
@pytest.mark.parametrize("curvature", ["ggn", "fisher"])
def test_dvemb_equals_dense_products(tmp_path, model, optimizer, curvature):
    problem = shared(model, optimizer, batches=BATCHES)
    gradients = query_gradients(problem)
    for acc, where in ((False, None), (True, everywhere)):
        method = lo.DVEmb(curvature, acc=acc, transport="exact")
        moved = problem.oracle.family(rows_of(problem), curvature, where)
        close(flat(score(problem, method, displacements=True), problem.oracle.names), moved)
        close(score(problem, method, queries="each").values, moved @ gradients.T)
        close(score(problem, method).values[:, 0], moved @ gradients.mean(0))
    other = problem.oracle.family(rows_of(problem), "hessian")
    assert (other - problem.oracle.family(rows_of(problem), curvature)).norm() > 1e-4 * other.norm()


def test_dvemb_of_groups(tmp_path):
    problem = shared("mlp", "momentum", batches=BATCHES)
    groups = {"ann": [0, 2], "bob": [1, 3, 5]}
    moved = problem.oracle.family(list(groups.values()), "ggn", everywhere)
    scores = score(problem, lo.DVEmb(acc=True, transport="exact"), groups=groups)
    close(scores.values[:, 0], moved @ query_gradients(problem).mean(0))


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
def test_projected_dvemb_equals_dense_products(tmp_path, optimizer):
    problem = shared("mlp", optimizer, batches=BATCHES)
    oracle = problem.oracle
    layout = Layout(problem.run.rule, problem.run.final()["param"])
    unit = torch.eye(oracle.p, dtype=torch.float64)
    named = {n: t.unflatten(1, s) for n, t, s in zip(oracle.names, _columns(oracle, unit), oracle.shapes, strict=True)}
    phi = sketch(layout, 3, unit)(layout.flatten(named)).T  # a column each for the unit vectors, in the oracle's order
    for acc, where in ((False, None), (True, everywhere)):
        moved = oracle.family(rows_of(problem), "fisher", where, phi.T @ phi)
        scores = score(problem, lo.DVEmb("fisher", project=3, acc=acc))
        close(scores.values[:, 0], moved @ query_gradients(problem).mean(0))
    plain = oracle.family(rows_of(problem), "fisher")
    assert (plain - oracle.family(rows_of(problem), "fisher", None, phi.T @ phi)).norm() > 0.1 * plain.norm()


def _columns(oracle, matrix):
    return matrix.split([int(torch.tensor(shape).prod()) for shape in oracle.shapes], dim=1)


@pytest.mark.parametrize(("model", "optimizer"), mostly_full(CASES, ("mlp", "nesterov"), ("mlp", "adam")))
def test_layers_equal_a_dense_restriction(tmp_path, model, optimizer):
    problem = shared(model, optimizer, batches=BATCHES)
    oracle, gradient = problem.oracle, query_gradients(problem).mean(0)
    kept = [name for name in oracle.names if name.startswith("0.")]
    mask = torch.cat([torch.full((len(t.T),), float(n in kept)).double()
                      for n, t in zip(oracle.names, _columns(oracle, torch.eye(oracle.p)), strict=True)])  # fmt: skip
    path = torch.diag(mask)
    sgdie = oracle.family(rows_of(problem), path=path)
    close(score(problem, lo.SGDIE(layers="0.*")).values[:, 0], sgdie @ gradient)
    close(score(problem, lo.SGDIE(layers="0.*", direction="forward", readout="linear")).values[:, 0], sgdie @ gradient)
    acc = oracle.family(rows_of(problem), where=everywhere, path=path)
    close(score(problem, lo.ACC("exact", layers="0.*")).values[:, 0], acc @ gradient)
    dvemb = oracle.family(rows_of(problem), "ggn", path=path)
    close(score(problem, lo.DVEmb(layers=("0.weight", "0.bias"))).values[:, 0], dvemb @ gradient)
    theta = oracle.flat(problem.run.final())[: oracle.p]
    here = oracle.query_losses(theta, *problem.query.tensors)
    exact = torch.stack([oracle.query_losses(theta + d, *problem.query.tensors) - here for d in acc]).mean(1)
    scores = score(problem, lo.ACC("exact", readout="exact", layers="0.*"), displacements=True)
    close(scores.values[:, 0], exact)
    assert set(scores.displacements) == set(kept)
    whole = score(problem, lo.SGDIE()).values[:, 0]
    assert (whole - sgdie @ gradient).norm() > 1e-3 * whole.norm()


@pytest.mark.parametrize("layers", ["2.*", "*.weight", "*.bias"])
def test_cheap_transports_of_layers_are_that_of_the_restricted_model(tmp_path, layers):
    """Weights and biases are groups of the optimizer, of which one may be left out."""
    problem = shared("mlp", "momentum", batches=BATCHES)
    orders = [
        score(problem, lo.ACC("free", layers=layers, direction=direction), queries="each").values
        for direction in ("forward", "backward")
    ]
    close(orders[0], orders[1])
    everything = score(problem, lo.ACC("free", layers="*"), queries="each").values
    close(everything, score(problem, lo.ACC("free"), queries="each").values)
    assert (orders[0] - everything).norm() > 1e-3 * everything.norm()


@pytest.mark.parametrize("optimizer", mostly_full(["momentum", "adamw"], "adamw"))
@pytest.mark.parametrize("options", mostly_full(OPTIONS, OPTIONS[0]))
def test_corrections_where_they_are_asked_for(tmp_path, optimizer, options):
    problem = shared("mlp", optimizer, batches=BATCHES)
    chosen = schedule_of(options.get("probability", 1.0), options.get("epochs"), options.get("seed", 0))

    def where(step, row):
        return bool(chosen.chosen(problem.run.record(step), torch.tensor(row[:1]))[0])

    rows, gradient = rows_of(problem), query_gradients(problem).mean(0)
    hits = [where(i, row) for i in range(len(problem.run)) for row in rows]
    assert any(hits)
    assert not all(hits)
    moved = problem.oracle.family(rows, where=where)
    for direction in ("forward", "backward"):
        scores = score(problem, lo.ACC("exact", direction=direction, **options))
        close(scores.values[:, 0], moved @ gradient)
    tight = with_least_memory(lambda resources: score(problem, lo.ACC("exact", **options), resources=resources))
    close(tight.values[:, 0], moved @ gradient)
    if optimizer == "momentum":
        free = problem.oracle.freely_corrected(gradient, rows, where)
        for direction in ("forward", "backward"):
            close(score(problem, lo.ACC("free", direction=direction, **options)).values[:, 0], free)
        full = lo.Subspace(problem.oracle.p)
        with_subspace = [
            score(shared("mlp", _one_group, batches=BATCHES), method).values for method in (lo.ACC(full, **options),)
        ]
        again = shared("mlp", _one_group, batches=BATCHES)
        close(with_subspace[0], score(again, lo.ACC("exact", **options)).values)


def _one_group(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.full
def test_options_at_their_ends(tmp_path):
    problem = shared("conv", "nesterov", batches=BATCHES)
    sgdie, acc = score(problem, lo.SGDIE()), score(problem, lo.ACC("exact"))
    assert (sgdie.values - acc.values).norm() > 1e-3 * acc.values.norm()
    close(score(problem, lo.ACC("exact", probability=0.0)).values, sgdie.values)
    close(score(problem, lo.ACC("free", probability=0.0)).values, sgdie.values)
    close(score(problem, lo.ACC("exact", probability=1.0)).values, acc.values)
    close(score(problem, lo.ACC("exact", epochs=3)).values, acc.values)
    close(score(problem, lo.ACC("free", epochs=(0, 3))).values, score(problem, lo.ACC("free")).values)
    close(score(problem, lo.DVEmb("hessian", acc=True, transport="exact")).values, acc.values)
    close(score(problem, lo.DVEmb("hessian", acc=True)).values, score(problem, lo.ACC("free")).values)
    close(score(problem, lo.DVEmb("hessian")).values, sgdie.values)


def test_options_cost_what_they_should(tmp_path):
    problem = shared("mlp", "sgd", batches=BATCHES)
    steps = len(problem.run)
    for options in ({}, {"probability": 0.0}, {"epochs": (1, 2)}, {"direction": "backward"}):
        assert score(problem, lo.ACC("exact", **options)).cost.hvps == steps * problem.n
    free = score(problem, lo.ACC("free", direction="forward")).cost
    first = score(problem, lo.ACC("free", direction="forward", epochs=(0, 2))).cost
    assert free.hvps == 2 * steps
    assert first.hvps == steps + 4
    assert first.gradients == steps + 4
    assert score(problem, lo.ACC("free", direction="forward", probability=0.0)).cost.hvps == steps


def test_dvemb_is_sgdie_where_the_model_is_linear(tmp_path):
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    train = torch.utils.data.TensorDataset(x, x.sum(1).square())
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0)).double()
    task = lo.Task(model, torch.nn.MSELoss(), train, l2=0.1)
    run = lo.train(task, OPTIMIZERS["nesterov"](model), epochs=4, batch_size=3, seed=0, out=tmp_path / "run")
    close(lo.DVEmb().score(run, task, train).values, lo.SGDIE().score(run, task, train).values)
    close(lo.DVEmb(acc=True).score(run, task, train).values, lo.ACC().score(run, task, train).values)


def ridge(tmp_path, epochs, l2=0.3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 4, dtype=torch.float64, generator=generator)
    y = x.sum(1) + torch.randn(12, dtype=torch.float64, generator=generator)
    train, query = torch.utils.data.TensorDataset(x, y), torch.utils.data.TensorDataset(x[:5] + 1, y[:5])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1, bias=False), torch.nn.Flatten(0)).double()
    task = lo.Task(model, torch.nn.MSELoss(), train, l2=l2)
    made = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.2)
    run = lo.train(task, made, epochs=epochs, batch_size=12, seed=0, out=tmp_path / f"run{epochs}")
    theta = run.final()["param"]["0.weight"][0]
    hessian = 2 * x.T @ x / 12 + (l2 + 0.2) * torch.eye(4, dtype=torch.float64)
    gradients = 2 * (x @ theta - y)[:, None] * x + l2 * theta
    moved = torch.linalg.solve(hessian, gradients.T).T / 12
    slope = (2 * (query.tensors[0] @ theta - query.tensors[1])[:, None] * query.tensors[0]).mean(0)
    return run, task, query, moved, moved @ slope


def test_influence_functions_on_ridge_regression(tmp_path):
    run, task, query, moved, expected = ridge(tmp_path, 20)
    for solver in ("cg", "direct"):
        method = lo.InfluenceFunction(solver)
        close(method.score(run, task, query).values[:, 0], expected)
        scores = method.score(run, task, query, displacements=True)
        close(scores.displacements["0.weight"][:, 0], moved)
        close(scores.values[:, 0], expected)
        groups = method.score(run, task, query, groups=[[0, 3], [5]]).values[:, 0]
        close(groups, torch.stack([expected[0] + expected[3], expected[5]]))
    loose = lo.InfluenceFunction("lissa", steps=4000).score(run, task, query).values[:, 0]
    close(loose, expected, 0.1)
    damped = lo.InfluenceFunction("direct", damping=0.5).score(run, task, query).values[:, 0]
    assert (damped - expected).norm() > 0.05 * expected.norm()


def test_long_training_leads_to_influence_functions(tmp_path):
    errors = []
    for epochs in (20, 400):
        run, task, query, _, expected = ridge(tmp_path, epochs)
        errors.append(float((lo.SGDIE().score(run, task, query).values[:, 0] - expected).norm() / expected.norm()))
    assert errors[1] < 1e-8 < 0.05 < errors[0]


def test_influence_functions_of_a_network(tmp_path):
    problem = shared("conv", "adam", batches=BATCHES)
    oracle = problem.oracle
    theta = oracle.flat(problem.run.final())[: oracle.p]
    decay = oracle.per_parameter(problem.run.record(len(problem.run) - 1).hypers, "weight_decay")
    mean = sum(oracle.curvature("hessian", theta, k) for k in range(problem.n)) / problem.n
    slopes = torch.stack([jacobian(lambda t, k=k: oracle.example_loss(t, k), theta) for k in range(problem.n)])
    expected = torch.linalg.solve(mean + torch.diag(decay + 2.0), slopes.T).T / problem.n @ query_gradients(problem).T
    for solver in ("cg", "direct"):
        close(score(problem, lo.InfluenceFunction(solver, damping=2.0), queries="each").values, expected)
        with refused(lo.UnsupportedError, "hessian-not-positive", "damping="):
            score(problem, lo.InfluenceFunction(solver, damping=0.0))
    with refused(lo.MismatchError, "solver-not-converged", "steps="):
        score(problem, lo.InfluenceFunction(damping=2.0, steps=2))


def example_gradients(oracle, theta):
    return torch.stack([jacobian(lambda t, k=k: oracle.example_loss(t, k), theta) for k in range(len(oracle.inputs))])


def checkpoints(problem):
    """θ and the record of the last step at the end of every epoch."""
    run = problem.run
    ends = [i for i in range(len(run)) if i == len(run) - 1 or run.record(i + 1).epoch != run.record(i).epoch]
    for i in ends:
        steps = [run.record(j) for j in range(len(run)) if run.record(j).epoch == run.record(i).epoch]
        yield problem.oracle.flat(run.state(i + 1) if i + 1 < len(run) else run.final()), steps


def at(problem, state):
    theta = state[: problem.oracle.p].clone().requires_grad_()
    loss = problem.oracle.query_losses(theta, *problem.query.tensors).mean()
    return theta.detach(), torch.autograd.grad(loss, theta)[0]


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_tracin_of_checkpoints(tmp_path, optimizer):
    problem = shared("mlp", optimizer, batches=BATCHES)
    oracle = problem.oracle
    expected, bare = 0, 0
    for state, steps in checkpoints(problem):
        theta, gradient = at(problem, state)
        share = sum(oracle.per_parameter(step.hypers, "lr") / len(step.ids) for step in steps) / len(steps)
        expected = expected + example_gradients(oracle, theta) @ (share * gradient)
        bare = bare + example_gradients(oracle, theta) @ gradient
    close(score(problem, lo.TracIn("epochs")).values[:, 0], expected)
    without = score(problem, lo.TracIn("epochs", learning_rate=False))
    close(without.values[:, 0], bare)
    assert without.unit != lo.Scores(torch.zeros(1, 1), (0,), (0,), "").unit
    groups = score(problem, lo.TracIn("epochs"), groups=[[0, 1], [4]]).values[:, 0]
    close(groups, torch.stack([expected[0] + expected[1], expected[4]]))


def test_tracin_without_the_learning_rate(tmp_path):
    problem = shared("mlp", "sgd", batches=BATCHES)
    expected = torch.zeros(problem.n, dtype=torch.float64)
    gradient = query_gradients(problem).mean(0)
    for i in range(len(problem.run)):
        slopes = example_gradients(problem.oracle, problem.oracle.flat(problem.run.state(i)))
        for k in problem.run.record(i).ids.tolist():
            expected[k] += slopes[k] @ gradient
    close(score(problem, lo.TracIn(learning_rate=False)).values[:, 0], expected)


@pytest.mark.parametrize("acc", [False, True])
def test_adamie_equals_its_formula(tmp_path, acc):
    problem = shared("mlp", lambda m: torch.optim.Adam(m.parameters(), lr=0.05), batches=BATCHES)
    oracle, p = problem.oracle, problem.oracle.p
    expected = torch.zeros(problem.n, dtype=torch.float64)
    moved = torch.zeros(problem.n, p, dtype=torch.float64)
    for state, steps in checkpoints(problem):
        theta, query = at(problem, state)
        t = steps[-1].hypers[0]["step"] + 1
        rate = sum(step.hypers[0]["lr"] for step in steps) / len(steps)
        share = sum(step.hypers[0]["lr"] / len(step.ids) for step in steps) / len(steps)
        for k, plain in enumerate(example_gradients(oracle, theta)):

            def direction(g, state=state, t=t):
                m = (0.9 * state[p : 2 * p] + 0.1 * g) / (1 - 0.9**t)
                v = (0.999 * state[2 * p :] + 0.001 * g * g) / (1 - 0.999**t)
                return m / (v.sqrt() + 1e-8)

            read = direction(plain + oracle.curvature("hessian", theta, k) @ moved[k] if acc else plain)
            expected[k] += rate * torch.nn.functional.cosine_similarity(read, query, dim=0)
            moved[k] += share * direction(plain)
    close(score(problem, lo.AdamIE(acc)).values[:, 0], expected)
    tight = with_least_memory(lambda resources: score(problem, lo.AdamIE(acc), resources=resources))
    close(tight.values[:, 0], expected)


ALL = [
    lo.TracIn(), lo.TracIn("epochs"), lo.TracIn(learning_rate=False), lo.SGDIE(), lo.ACC("exact"), lo.ACC("free"),
    lo.ACC("free", readout="outputs"), lo.DVEmb(), lo.DVEmb(acc=True), lo.InfluenceFunction(damping=3.0), lo.Replay(),
]  # fmt: skip


@pytest.mark.parametrize("method", mostly_full(ALL, *ALL[3:7], ALL[-1]), ids=lambda method: method.name)
def test_self_influence_is_the_diagonal(tmp_path, method):
    problem = shared("mlp", "momentum", batches=BATCHES)
    whole = method.score(problem.run, problem.task, problem.train, queries="each").values.diagonal()
    own = method.self_influence(problem.run, problem.task)
    close(own.values[:, 0], whole)
    assert own.query_ids == ("self",)
    ask = partial(method.self_influence, problem.run, problem.task, ids=[4, 1])
    some = with_least_memory(lambda resources: ask(resources=resources))
    assert some.train_ids == (4, 1)
    close(some.values[:, 0], whole[[4, 1]])


class Scaled(nn.Module):
    """A BatchNorm, whose number of batches is one value, and a parameter that is one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * self.layers(x)


def test_self_influence_of_checkpoints_with_batch_norm(tmp_path):
    order = torch.Generator().manual_seed(0)
    train = TensorDataset(torch.randn(12, 4, generator=order), torch.randint(2, (12,), generator=order))
    torch.manual_seed(0)
    model = Scaled()
    task, loss = lo.Task(model, nn.CrossEntropyLoss(), train), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = lo.Recorder(tmp_path / "run", model, optimizer)
    for epoch in range(2):
        for ids in torch.randperm(12, generator=order).split(6):
            x, y = (tensor[ids] for tensor in train.tensors)
            optimizer.zero_grad()
            loss(model(x), y).backward()
            recorder.step(ids, [x, y], epoch=epoch)
            optimizer.step()
    run = recorder.finish()
    whole = lo.TracIn("epochs").score(run, task, train, queries="each").values.diagonal()
    own = lo.TracIn("epochs").self_influence(run, task).values[:, 0]
    torch.testing.assert_close(own, whole, rtol=1e-4, atol=1e-7)
    assert (own > 0).all()  # both gradients in evaluation mode: a squared length


def test_self_influence_of_adamie(tmp_path):
    problem = shared("mlp", "adamw", batches=BATCHES)
    whole = lo.AdamIE(True).score(problem.run, problem.task, problem.train, queries="each").values.diagonal()
    close(lo.AdamIE(True).self_influence(problem.run, problem.task).values[:, 0], whole)


@pytest.mark.full
def test_interpolated_checkpoints_serve_everyone(tmp_path):
    """Between two kept states the line between them is taken: near the run's own scores, and not equal to them."""
    whole = shared("mlp", "adam", batches=LONG)
    sparse = recorded(tmp_path / "sparse", "mlp", "adam", batches=LONG, keep=3)
    assert len(sparse.run.kept) < len(whole.run.kept)
    line = sparse.run.interpolated()
    for method in (lo.SGDIE(), lo.ACC("exact"), lo.DVEmb(), lo.TracIn(), lo.AdamIE()):
        exact = score(whole, method).values
        close(method.score(whole.run.interpolated(), whole.task, whole.query).values, exact)  # every state is kept
        off = (method.score(line, whole.task, whole.query).values - exact).norm() / exact.norm()
        assert 1e-6 < off < 0.5, (method.name, float(off))


REFUSED = [
    ("layers-match-nothing", "layers='9.*'", lambda p: score(p, lo.SGDIE(layers="9.*"))),
    ("probability-out-of-range", "probability=1.5", lambda p: lo.ACC(probability=1.5)),
    ("epochs-not-a-choice", "epochs=(2, 1)", lambda p: lo.ACC(epochs=(2, 1))),
    ("curvature-unknown", "curvature='kfac'", lambda p: lo.DVEmb("kfac")),
    ("project-needs-exact", "project=", lambda p: lo.DVEmb(project=4, acc=True, transport="free")),
    ("project-not-a-width", "project=0", lambda p: score(p, lo.DVEmb(project=0))),
    ("solver-unknown", "solver='lu'", lambda p: lo.InfluenceFunction("lu")),
    ("solver-option-out-of-range", "damping=-1.0", lambda p: lo.InfluenceFunction(damping=-1.0)),
    ("checkpoints-unknown", "checkpoints='some'", lambda p: lo.TracIn("some")),
    ("readout-linear-only", "TracIn", lambda p: lo.TracIn("epochs", readout="exact")),
    ("displacements-not-available", "TracIn(epochs)", lambda p: score(p, lo.TracIn("epochs"), displacements=True)),
    ("adam-moments-missing", "Adam-IE", lambda p: score(p, lo.AdamIE())),
]


@pytest.mark.parametrize(("code", "named", "ask"), REFUSED, ids=[code for code, _, _ in REFUSED])
def test_refusals(code, named, ask):
    with pytest.raises(lo.LeaveoutError) as caught:
        ask(shared("mlp", "sgd", batches=BATCHES))
    assert caught.value.code == code
    assert named in str(caught.value)


def test_refusals_of_adamie_and_of_unknown_epochs(tmp_path):
    problem = shared("mlp", "adam", batches=BATCHES)
    with refused(lo.InputError, "groups-not-additive", "Adam-IE"):
        score(problem, lo.AdamIE(), groups=[[0, 1]])
    with refused(lo.InputError, "displacements-not-available", "Adam-IE"):
        score(problem, lo.AdamIE(), displacements=True)
    short = shared("mlp", "sgd", batches=BATCHES[:2])
    with refused(lo.InputError, "epochs-not-recorded", "epochs="):
        score(short, lo.ACC("exact", epochs=1))
