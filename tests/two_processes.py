"""A training in two processes, as a user would write it; run by test_distributed.py.

python two_processes.py <rank> <folder>
"""

import os
import sys

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LEFT_OUT = (-1, 0, 7)


def data() -> TensorDataset:
    order = torch.Generator().manual_seed(0)
    x = torch.randn(22, 5, dtype=torch.float64, generator=order)
    return TensorDataset(x, torch.randint(3, (22,), generator=order), torch.arange(22))


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3)).double()


def train(rank: int, out: int, path: str | None) -> nn.Module:
    """Two epochs of two processes, each with its part of every batch; a short last batch, dropout."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.02, eps=1e-3)
    sampler = DistributedSampler(data(), seed=3)
    loader = DataLoader(data(), 3, sampler=sampler)
    recorder = None
    if path is not None:
        import leaveout as lo

        recorder = lo.Recorder(path, model, optimizer)
        loader = recorder.watch(loader)
    torch.manual_seed(10 + rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y, ids in loader:
            optimizer.zero_grad()
            losses = F.cross_entropy(model(x), y, reduction="none")
            (torch.where(ids == out, 0.0, 1.0).double() * losses).mean().backward()
            optimizer.step()
    if recorder is not None:
        assert len(recorder.finish()) == 8
    return model.module


def refusals(folder: str) -> dict[str, tuple[str, str]]:
    """What is refused in several processes: BatchNorm in training mode, and going on with a run."""
    import leaveout as lo

    x, y, _ = data()[:3]

    def refused(norm: nn.Module, resume: bool = False) -> tuple[str, str]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(5, 6), norm, nn.Linear(6, 3)).double()
        if not isinstance(norm, nn.SyncBatchNorm):  # which DistributedDataParallel takes on GPUs only
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        try:
            with lo.Recorder(f"{folder}/refused", model, optimizer, resume=resume) as recorder:
                recorder.step([0, 1, 2])
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        except lo.UnsupportedError as error:
            return error.code, str(error)
        return "nothing", ""

    return {
        "resume": refused(nn.BatchNorm1d(6), resume=True),
        "BatchNorm": refused(nn.BatchNorm1d(6)),
        "SyncBatchNorm": refused(nn.SyncBatchNorm(6)),
    }


def main(rank: int, folder: str) -> None:
    """Train once recorded, then plainly, with each of the examples left out; try what is refused."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)
    trained = {"recorded": train(rank, -1, f"{folder}/run").state_dict()}
    trained["refused"] = refusals(folder)
    trained |= {str(out): train(rank, out, None).state_dict() for out in LEFT_OUT}
    torch.save(trained, f"{folder}/trained-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
