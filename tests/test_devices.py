"""What stays on the device that it is on, shown with fake tensors of a second device: no values, but its rules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import leaveout as lo
from leaveout._util.trees import PARAM, add_rows, gather_sums, replace_rows
from leaveout.compute.resources import Resources, free_memory
from leaveout.optim.adamw import AdamW
from leaveout.sweep import budget
from leaveout.task.rewrites.elementary import Elementary


def test_rows_are_added_by_an_index_that_is_elsewhere():
    """Ids and rows are counted on the processor, totals are where the model is."""
    with FakeTensorMode():
        total, terms = (torch.zeros(count, 2, device="cuda") for count in (3, 2))
        index = torch.tensor([0, 2])
        with pytest.raises(RuntimeError, match="same device"):
            total.index_add_(0, index, terms)
        assert add_rows(total, index, terms).device.type == "cuda"
        assert gather_sums({"w": terms}, index, 3)["w"].device.type == "cuda"
        state = {PARAM: {"w": total}}
        assert replace_rows(state, index, {PARAM: {"w": terms}})[PARAM]["w"].device.type == "cuda"


def test_vectors_elsewhere_go_one_after_the_other():
    """Threads share out a processor's cores; another device has its own."""
    assert [budget.cores(torch.device(kind)) for kind in ("cuda", "meta")] == [1, 1]
    assert budget.cores(torch.device("cpu")) == torch.get_num_threads()


def test_closed_forms_and_elementary_functions_stay_where_they_are():
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.05, "step": 3.0}
    with FakeTensorMode():
        slots = {slot: torch.zeros(4, device="cuda") for slot in (PARAM, "exp_avg", "exp_avg_sq")}
        old, along = AdamW().pulled(slots, slots[PARAM], slots, hyper)
        assert {tensor.device.type for tensor in (*old.values(), along)} == {"cuda"}
        x = torch.zeros(2, 3, 4, device="cuda")
        with Elementary():
            for made in (
                torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True),
                torch.nn.functional.layer_norm(x, (4,)),
                torch.nn.functional.cross_entropy(
                    x, torch.zeros(2, 4, dtype=torch.int64, device="cuda"), reduction="none"
                ),
            ):
                assert made.device.type == "cuda"


def trained(tmp_path, device="cpu"):
    data = torch.utils.data.TensorDataset(torch.randn(12, 3, device=device), torch.randn(12, 2, device=device))
    task = lo.Task(nn.Linear(3, 2, device=device), nn.MSELoss(), data)
    return lo.train(task, torch.optim.SGD(task.model.parameters(), lr=0.1), 2, 4, 0, tmp_path / "run"), task, data


def test_memory_is_that_of_the_device(tmp_path):
    """A model on the processor has the machine's memory, and its peak is the process's, whatever GPU there is."""
    run, task, query = trained(tmp_path)
    assert abs(Resources().on(task.device).bytes - free_memory() // 2) < 0.1 * free_memory()
    assert lo.SGDIE().score(run, task, query).cost.peak_memory > 50e6, "no process with PyTorch is smaller"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_is_that_of_the_gpu(tmp_path):
    run, task, query = trained(tmp_path, device="cuda")
    total = torch.cuda.get_device_properties(task.device).total_memory
    assert Resources().on(task.device).bytes <= total // 2
    assert lo.SGDIE().score(run, task, query).cost.peak_memory <= total
