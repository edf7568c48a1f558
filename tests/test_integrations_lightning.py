"""Runs of a Lightning Trainer, compared with training again by the Trainer itself."""

from __future__ import annotations

import runpy
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import leaveout as lo

lightning = pytest.importorskip("lightning")

from leaveout.integrations.lightning import RecorderCallback  # noqa: E402
from refusal import refused  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
LEFT_OUT = [0, 7]


def data(count: int = 20, seed: int = 0):
    order = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 5, dtype=torch.float64, generator=order)
    return torch.utils.data.TensorDataset(x, torch.randint(3, (count,), generator=order))


class Net(lightning.LightningModule):
    """With dropout, a schedule and what is logged; with ``left_out``, that example's loss weighs nothing."""

    def __init__(self, left_out: int | None = None, norm: bool = False) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(6)] if norm else []
        self.body = nn.Sequential(nn.Linear(5, 6), *middle, nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).double()
        self.gone = None if left_out is None else data()[left_out][0]

    def forward(self, x):
        return self.body(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.gone is None:
            loss = F.cross_entropy(self.called(x), y)
        else:
            weights = (~(x == self.gone).all(1)).double()
            loss = (F.cross_entropy(self.called(x), y, reduction="none") * weights).mean()
        self.log("loss", loss)
        return loss

    def called(self, x):
        return self(x)

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.05, eps=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Inside(Net):
    """Never calls itself as a whole."""

    def called(self, x):
        return self.body(x)


class Narrow(Inside):
    """In float32, which mixed precision is for; never calls itself as a whole."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.float()

    def forward(self, x):
        return self.body(x.float())

    def called(self, x):
        return self.body(x.float())


class Manual(Net):
    """Does by itself what the Trainer would do."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()


class Skipping(Net):
    """Returns None for some batches, which are not trained on."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        first = batch_idx == 0 and self.trainer.training and self.current_epoch == 0
        return None if batch_idx in (1, 2) or first else loss


GIVEN = {"manual": {"loss": nn.CrossEntropyLoss(), "clip_norm": 0.3}}
"""What the task has to be told."""

CASES = {
    "defaults": (Net, {}),
    "clipped by norm, accumulated, a short last window": (
        Net,
        {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3},
    ),
    "clipped by value": (Inside, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    "not called as a whole, accumulated": (Inside, {"accumulate_grad_batches": 2}),
    "bf16": (Narrow, {"precision": "bf16-mixed", "gradient_clip_val": 1.0}),
    "manual": (Manual, {}),
    "some batches skipped": (Skipping, {"gradient_clip_val": 0.3}),
    "some batches skipped, accumulated": (Skipping, {"accumulate_grad_batches": 2}),
}


def fit(module_class, options, left_out=None, callbacks=(), checkpoint=None, enable_checkpointing=False, **more):
    lightning.seed_everything(4, verbose=False)
    module = module_class(left_out, **more)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=enable_checkpointing,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
    order = torch.Generator().manual_seed(6)
    loader = torch.utils.data.DataLoader(data(), 4, shuffle=True, generator=order)
    trainer.fit(module, loader, torch.utils.data.DataLoader(data(6, 9), 3), ckpt_path=checkpoint)
    return module


@lru_cache
def recorded(name: str):
    recorder = RecorderCallback(f"{tempfile.mkdtemp()}/run", keep="all")
    return recorder, fit(*CASES[name], callbacks=[recorder])


def query_loss(module) -> float:
    module.eval()
    x, y = data(6, 9).tensors
    with torch.no_grad():
        return float(F.cross_entropy(module(x), y))


@pytest.mark.parametrize("name", CASES)
def test_recording_changes_no_bit(name: str) -> None:
    _, module = recorded(name)
    both = module.state_dict(), fit(*CASES[name]).state_dict()
    assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])


@pytest.mark.parametrize("name", CASES)
def test_every_step_follows(name: str) -> None:
    recorder, _ = recorded(name)
    own = lo.SGDIE().score(recorder.run, recorder.task(**GIVEN.get(name, {})), data(6, 9)).values
    assert own.abs().max() > 0
    assert recorder.run.manifest.autocast == ("bfloat16" if name == "bf16" else None)
    if name not in GIVEN:
        given = lo.SGDIE().score(recorder.run, recorder.task(nn.CrossEntropyLoss()), data(6, 9)).values
        assert torch.allclose(own, given, rtol=1e-3 if name == "bf16" else 1e-9, atol=1e-6 if name == "bf16" else 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_replay_is_training_without_the_example(name: str) -> None:
    recorder, module = recorded(name)
    task = recorder.task(**GIVEN.get(name, {}))
    scores = lo.Replay().score(recorder.run, task, data(6, 9), ids=LEFT_OUT).values.flatten()
    base = query_loss(module)
    truth = [query_loss(fit(*CASES[name], left_out)) - base for left_out in LEFT_OUT]
    if name == "bf16":
        assert scores.tolist() == pytest.approx(truth, abs=1e-3 * max(map(abs, truth)))
    else:
        assert scores.tolist() == pytest.approx(truth, rel=1e-8, abs=1e-12)


def test_labels_are_judged_by_what_the_loss_of_the_step_compares(tmp_path) -> None:
    for name in ("defaults", "not called as a whole, accumulated"):
        recorder, module = recorded(name)[:2]
        labels = lo.labels(recorder.run, recorder.task(), folds=None)
        plain = lo.Task(
            module, nn.CrossEntropyLoss(), data(), accumulation=CASES[name][1].get("accumulate_grad_batches", 1)
        )
        assert labels.table.equals(lo.labels(recorder.run, plain, folds=None).table)
        margins = recorder.task(measure="margin")
        expected = lo.SGDIE().score(recorder.run, recorder.task(nn.CrossEntropyLoss(), measure="margin"), data(6, 9))
        torch.testing.assert_close(lo.SGDIE().score(recorder.run, margins, data(6, 9)).values, expected.values)


class TwoLosses(Net):
    """The loss is a sum of two, so that nothing single is compared."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        outputs = self(x)
        return F.cross_entropy(outputs, y) + 0.1 * F.mse_loss(outputs, x[:, :3])


def test_a_sum_of_losses_is_taken_per_example(tmp_path) -> None:
    recorder = RecorderCallback(tmp_path / "run")
    fit(TwoLosses, {}, callbacks=[recorder])
    values = lo.SGDIE().score(recorder.run, recorder.task(), data(6, 9)).values

    def loss(outputs, both):
        x, y = both
        return F.cross_entropy(outputs, y, reduction="none") + 0.1 * (outputs - x[:, :3]).square().mean(1)

    task = recorder.task(loss, forward=lambda module, batch: (module(batch[0]), batch))
    torch.testing.assert_close(values, lo.SGDIE().score(recorder.run, task, data(6, 9)).values)
    with refused(lo.UnsupportedError, "labels-not-classes"):
        lo.labels(recorder.run, recorder.task())


def test_a_manual_loss_has_to_be_given() -> None:
    with pytest.raises(lo.LeaveoutError) as error:
        recorded("manual")[0].task()
    assert error.value.code == "model-loss-unknown"
    assert "manually" in str(error.value)


def test_a_training_that_goes_on_from_a_checkpoint(tmp_path) -> None:
    """Its loader begins anew and random generators go on as they are: what it does then is what is recorded."""

    def train(folder, callbacks=(), fails: int | None = None, ckpt=None):
        class Failing(Net):
            def training_step(self, batch, batch_idx):
                if self.global_step == fails:
                    raise RuntimeError
                return super().training_step(batch, batch_idx)

        saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, "after-{step}", save_top_k=-1)
        return fit(Failing, {}, callbacks=[*callbacks, saving], checkpoint=ckpt, enable_checkpointing=True)

    for fails in (7, None):  # in the second epoch; then with what came after the first thrown away
        recorder = RecorderCallback(tmp_path / "run", keep=4)
        if fails:
            with pytest.raises(RuntimeError):
                train(tmp_path / "saved", [recorder], fails)
            assert len(lo.open_run(tmp_path / "run", partial=True)) == 5
        again = RecorderCallback(tmp_path / "run", keep=4)
        module = train(tmp_path / "saved", [again], ckpt=tmp_path / "saved/after-step=5.ckpt")
        plain = train(tmp_path / "plain", ckpt=tmp_path / "saved/after-step=5.ckpt")
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
        assert len(again.run) == 10
        assert [again.run.record(i).epoch for i in range(10)] == [0] * 5 + [1] * 5
        assert lo.check_run(again.run.path) == []
    lo.SGDIE().score(again.run, again.task(), data(6, 9))


@pytest.mark.parametrize("module", [Net, Inside])
def test_buffers_that_move_in_the_first_window(tmp_path, module) -> None:
    """The last micro-batch runs inside the optimizer's closure, after others have moved the statistics."""
    recorder = RecorderCallback(tmp_path / "run", keep="all")
    fit(module, {"accumulate_grad_batches": 2}, callbacks=[recorder], norm=True)
    assert "body.1.running_mean" in recorder.run.manifest.buffers
    assert not recorder.run.state(0)["param"]["body.1.running_mean"].any()
    lo.SGDIE().score(recorder.run, recorder.task(nn.CrossEntropyLoss()), data(6, 9))


def test_skipped_batches_are_not_part_of_the_run() -> None:
    alone, in_windows = (
        recorded(name)[0].run for name in ("some batches skipped", "some batches skipped, accumulated")
    )
    assert [len(alone.record(i).ids) for i in range(len(alone))] == [4] * 5
    assert [len(in_windows.record(i).ids) for i in range(len(in_windows))] == [4] * 5


def test_a_skipped_batch_that_moves_buffers_is_refused(tmp_path) -> None:
    with refused(lo.UnsupportedError, "skipped-batch-moves-buffers", "running_mean"):
        fit(Skipping, {}, callbacks=[RecorderCallback(tmp_path / "run")], norm=True)


class Zeroing(Skipping):
    """Leaves gradients of zero, by which momentum still moves the parameters."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


def test_a_skipped_batch_with_gradients_of_zero_is_refused(tmp_path) -> None:
    with refused(lo.UnsupportedError, "step-without-loss", "set_to_none"):
        fit(Zeroing, {}, callbacks=[RecorderCallback(tmp_path / "run")])


def test_random_data_is_kept(tmp_path) -> None:
    class Noisy(torch.utils.data.TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + 0.1 * torch.randn(5, dtype=torch.float64), y

    recorder = RecorderCallback(tmp_path / "run")
    lightning.seed_everything(4, verbose=False)
    module = Net()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[recorder], **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(Noisy(*data().tensors), 4))
    assert recorder.run.batches(0)
    lo.SGDIE().score(recorder.run, recorder.task(), data(6, 9))


class Interrupting(lightning.Callback):
    """Ctrl-C, or an error, after three steps."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            raise self.error


def test_an_interrupted_training_has_the_run_of_its_steps(tmp_path) -> None:
    recorder = RecorderCallback(tmp_path / "run")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(Net, {}, callbacks=[Interrupting(KeyboardInterrupt()), recorder])
    assert len(recorder.run) == 3
    assert torch.isfinite(lo.SGDIE().score(recorder.run, recorder.task(), data(4, 9)).values).all()
    failed = RecorderCallback(tmp_path / "run", overwrite=True)
    with pytest.raises(ValueError, match="mine"):
        fit(Net, {}, callbacks=[Interrupting(ValueError("mine")), failed])
    with pytest.raises(lo.LeaveoutError, match="partial") as error:
        _ = failed.run
    assert error.value.code == "training-not-ended"
    assert len(lo.open_run(tmp_path / "run", partial=True)) == 3


class Wide(Net):
    """Made in float32, which the Trainer turns into float64, its batches too."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.float()


def test_batches_have_the_type_that_the_trainer_gives_them(tmp_path) -> None:
    recorder = RecorderCallback(tmp_path / "run")
    given, query = (torch.utils.data.TensorDataset(d.tensors[0].float(), d.tensors[1]) for d in (data(), data(4, 9)))
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", precision="64-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[recorder],
    )  # fmt: skip
    trainer.fit(Wide(), torch.utils.data.DataLoader(given, 4))
    scores = lo.SGDIE().score(recorder.run, recorder.task(), query)
    assert scores.values.abs().max() > 0
    assert next(iter(recorder.run.final()["param"].values())).dtype == torch.float64


def test_another_sampler_of_the_trainers_own_is_refused(tmp_path) -> None:
    with pytest.raises(lo.LeaveoutError, match="limit_train_batches") as error:
        fit(Net, {"overfit_batches": 2}, callbacks=[RecorderCallback(tmp_path / "run")])
    assert error.value.code == "training-not-supported"


def test_two_optimizers_are_refused(tmp_path) -> None:
    class Two(Net):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]

        automatic_optimization = False

    with pytest.raises(lo.LeaveoutError) as error:
        fit(Two, {}, callbacks=[RecorderCallback(tmp_path / "run")])
    assert error.value.code == "training-not-supported"
    assert "2 optimizers" in str(error.value)


def test_a_loss_that_is_no_mean_is_refused(tmp_path) -> None:
    class Weighted(Net):
        def training_step(self, batch, batch_idx):
            weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
            return F.cross_entropy(self(batch[0]), batch[1], weight)

    recorder = RecorderCallback(tmp_path / "run")
    fit(Weighted, {}, callbacks=[recorder])
    with pytest.raises(lo.LeaveoutError) as error:
        recorder.task()
    assert error.value.code == "model-loss-unknown"
    weight = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    lo.SGDIE().score(recorder.run, recorder.task(nn.CrossEntropyLoss(weight)), data(6, 9))


class Penalised(Net):
    """With a penalty on the parameters in its step, which stays when an example leaves."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.01 * sum(p.square().sum() for p in self.parameters())


@pytest.mark.parametrize("settings", [{}, {"gradient_clip_val": 0.5}, {"accumulate_grad_batches": 3}])
@pytest.mark.parametrize("norm", [False, True])
def test_a_penalty_in_the_step_belongs_to_nobody(tmp_path, settings, norm) -> None:
    recorder = RecorderCallback(tmp_path / "run", on_problem="stop")
    module = fit(Penalised, settings, callbacks=[recorder], norm=norm)
    task = recorder.task(statistics="stay")
    base = query_loss(module)
    truth = [query_loss(fit(Penalised, settings, i, norm=norm)) - base for i in LEFT_OUT]
    scores = lo.Replay().score(recorder.run, task, data(6, 9), ids=LEFT_OUT)
    assert scores.mean().tolist() == pytest.approx(truth, rel=1e-6, abs=1e-10)
    given = lo.Task(
        module, nn.CrossEntropyLoss(), data(), penalty=lambda p: 0.01 * sum(one.square().sum() for one in p.values()),
        clip_norm=settings.get("gradient_clip_val"), statistics="stay",
        accumulation=settings.get("accumulate_grad_batches", 1),
    )  # fmt: skip
    for method in (lo.SGDIE(), lo.ACC()):
        one, other = (method.score(recorder.run, t, data(6, 9)).mean() for t in (task, given))
        assert one.tolist() == pytest.approx(other.tolist(), rel=1e-9, abs=1e-13)
    assert recorder.task(statistics="stay").objective.penalty is not None
    assert lo.labels(recorder.run, task) is not None


def test_a_penalty_on_activations_is_said_after_the_first_step(tmp_path) -> None:
    class Active(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 1e-3 * self.body[0](batch[0]).square().mean()

    with pytest.warns(lo.LeaveoutWarning, match="depends on them"):
        fit(Active, {}, callbacks=[RecorderCallback(tmp_path / "run")])
    with refused(lo.UnsupportedError, "model-loss-unknown", "depends on them", "penalty="):
        fit(Active, {}, callbacks=[RecorderCallback(tmp_path / "again", on_problem="stop")])


def test_two_losses_and_a_penalty_are_said_after_the_first_step(tmp_path) -> None:
    class Two(Penalised):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + F.mse_loss(self(batch[0]).sum(1), batch[1].double())

    with refused(lo.UnsupportedError, "model-loss-unknown", "penalty="):
        fit(Two, {}, callbacks=[RecorderCallback(tmp_path / "again", on_problem="stop")])


@pytest.mark.parametrize("norm", [False, True])
def test_averages_at_the_end_are_no_part_of_the_run(tmp_path, norm: bool) -> None:
    """With BatchNorm, ``StochasticWeightAveraging`` adds an epoch that only moves statistics."""

    class Plain(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.05)

    def averaging():
        return lightning.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)

    recorder = RecorderCallback(tmp_path / "run")
    module = fit(Plain, {}, callbacks=[averaging(), recorder], norm=norm)
    plain = fit(Plain, {}, callbacks=[averaging()], norm=norm)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))
    assert len(recorder.run) == 10
    task = lo.Task(Plain(norm=norm), nn.CrossEntropyLoss(), data())
    assert lo.Replay().score(recorder.run, task, data(6, 9), ids=LEFT_OUT).values.abs().max() > 0


@pytest.mark.parametrize("training", [False, True])
def test_frozen_batch_norm(tmp_path, training: bool) -> None:
    """As ``BaseFinetuning.freeze`` leaves it: frozen, and without following the running statistics."""

    class Frozen(Net):
        def on_train_epoch_start(self):
            self.body[1].requires_grad_(False).train(training)
            self.body[1].track_running_stats = False

    recorder = RecorderCallback(tmp_path / "run")
    module = fit(Frozen, {}, callbacks=[recorder], norm=True)
    scores = lo.Replay().score(recorder.run, recorder.task(nn.CrossEntropyLoss()), data(6, 9), ids=LEFT_OUT)
    if not training:  # its statistics are then constants
        truth = [query_loss(fit(Frozen, {}, i, norm=True)) - query_loss(module) for i in LEFT_OUT]
        assert scores.mean().tolist() == pytest.approx(truth, rel=1e-6, abs=1e-10)


def test_a_loss_that_is_there_in_training_only_is_refused(tmp_path) -> None:
    class Silent(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if self.trainer.training else None

    recorder = RecorderCallback(tmp_path / "run")
    fit(Silent, {}, callbacks=[recorder])
    with refused(lo.UnsupportedError, "model-loss-unknown", "Silent"):
        recorder.task()


def test_the_example(tmp_path) -> None:
    main = runpy.run_path(str(Path(__file__).parents[1] / "examples/lightning_trainer.py"))["main"]
    assert main(tmp_path, epochs=1).values.abs().max() > 0
