"""Records a run, scores it and replays it with what `pip install leaveout` brings, and compares with a plain loop.

With `--hide` the packages of all extras are treated as missing. It is run by the tests and by `make test-versions`.
"""

import sys
import tempfile

import leaveout as lo
from leaveout._util.extras import _EXTRA_OF


def train(rows, recorder_of=None, weights=None):
    """Train on all rows; ``weights`` scale the losses, whose sum is still divided by the size of the batch."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    recorder = recorder_of and recorder_of(model, optimizer)
    loader = DataLoader(rows, batch_size=4)
    for _ in range(2):
        numbers = iter(range(len(rows)))
        for x, y in recorder.watch(loader) if recorder else loader:
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            kept = [1.0 if weights is None else weights[next(numbers)] for _ in y]
            (losses * torch.tensor(kept, dtype=torch.float64)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, recorder


def refusal_of(name):
    try:
        getattr(lo, name)
    except lo.UnsupportedError as error:
        return str(error)
    return ""


def main():
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(1)
    data = torch.randn(12, 3, dtype=torch.float64, generator=generator), torch.arange(12) % 2
    rows, query = TensorDataset(*data), TensorDataset(data[0].flip(0)[:5], data[1][:5])

    def query_loss(model):
        return nn.functional.cross_entropy(model(query.tensors[0]), query.tensors[1]).item()

    with tempfile.TemporaryDirectory() as folder:
        model, recorder = train(rows, lambda model, optimizer: lo.Recorder(f"{folder}/run", model, optimizer))
        run, task = recorder.finish(), lo.Task(model, nn.CrossEntropyLoss(), rows)
        replayed, derived = (method.score(run, task, query).values[:, 0] for method in (lo.Replay(), lo.SGDIE()))
        lo.Recorder(f"{folder}/again", model, torch.optim.SGD(model.parameters(), 0.1))
    for left_out in range(12):
        weights = [float(i != left_out) for i in range(12)]
        truth = query_loss(train(rows, weights=weights)[0]) - query_loss(model)
        assert abs(replayed[left_out] - truth) < 1e-9, (left_out, replayed[left_out], truth)
        either = []
        for change in (1e-5, -1e-5):
            weights[left_out] = 1 - change
            either.append(query_loss(train(rows, weights=weights)[0]))
        slope = (either[0] - either[1]) / 2e-5
        assert abs(derived[left_out] - slope) < 1e-6, (left_out, derived[left_out], slope)
    for name in ("verify", "report", "Study", "data"):
        assert '"leaveout[data]"' in refusal_of(name), name


if __name__ == "__main__":
    if "--hide" in sys.argv:
        sys.modules.update(dict.fromkeys(_EXTRA_OF))
    main()
