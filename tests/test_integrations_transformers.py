"""Runs of the Hugging Face Trainer with its defaults, compared with training again by the Trainer itself."""

from __future__ import annotations

import runpy
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import nn

import leaveout as lo
from problems import mostly_full

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from leaveout.integrations.model_loss import ClassLoss, found_loss  # noqa: E402
from leaveout.integrations.transformers import RecorderCallback  # noqa: E402
from leaveout.run.kept_states import whole  # noqa: E402

LEFT_OUT = [0, 5]
VOCABULARY = 24
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def bert(kind: str, **options) -> nn.Module:
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **SIZES, **options)
    return getattr(transformers, kind)(config)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **SIZES)
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, **sizes)
    )


def bart() -> nn.Module:
    layers = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("attention_heads", "layers")}
    widths = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16}
    tokens = {"pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 3, "decoder_start_token_id": 3}
    config = transformers.BartConfig(vocab_size=VOCABULARY, forced_eos_token_id=None, **layers, **widths, **tokens)
    return transformers.BartForConditionalGeneration(config)


def tokenizer():
    """One word per number; the first four are special."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["[PAD]", "[MASK]", "[UNK]", "[EOS]", *map(str, range(VOCABULARY - 4))]
    fast = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    fast.pre_tokenizer = Whitespace()
    special = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **special)


class Plain(nn.Module):
    """A module that is not of the library: it returns a tuple and knows nothing of items."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.body = nn.Sequential(nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, input_ids, attention_mask, labels=None):
        there = attention_mask[..., None].to(self.table.weight)
        logits = self.body((self.table(input_ids) * there).sum(1) / there.sum(1))
        return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def rows(kind: str, count: int = 20, seed: int = 0):
    """Sentences of several lengths, with the labels that a kind of model needs."""
    order = torch.Generator().manual_seed(seed)
    table = {"input_ids": [], "labels": [], "text": []}
    for number in range(count):
        words = torch.randint(4, VOCABULARY, (4 + number % 3,), generator=order).tolist()
        tokens = torch.randint(4, VOCABULARY, (len(words),), generator=order).tolist()
        labels = {"class": words[0] % 3, "number": words[0] / 10, "causal": words, "copy": tokens}
        labels["tokens"] = [token % 3 if token % 4 else -100 for token in tokens]
        table["input_ids"].append(words)
        table["labels"].append(labels[kind])
        table["text"].append(str(words))
    return datasets.Dataset.from_dict(table)


def padded(examples):
    """Pads sentences and their labels to the longest, as the library's collators do."""
    longest = max(len(example["input_ids"]) for example in examples)

    def pad(values, fill):
        return [*values, *[fill] * (longest - len(values))] if isinstance(values, list) else values

    ids = torch.tensor([pad(example["input_ids"], 0) for example in examples])
    labels = torch.tensor([pad(example["labels"], -100) for example in examples])
    return transformers.BatchEncoding({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels})


GROUPED = (
    {"train_sampling_strategy": "group_by_length"}
    if hasattr(transformers.TrainingArguments, "train_sampling_strategy")
    else {"group_by_length": True}
)

CASES = {
    "GPT-2": (gpt2, "causal", {}),
    "GPT-2, accumulated": (gpt2, "causal", {"gradient_accumulation_steps": 2}),
    "Llama, smoothed labels": (llama, "causal", {"label_smoothing_factor": 0.1}),
    "BERT, classes, accumulated": (
        lambda: bert("BertForSequenceClassification", num_labels=3),
        "class",
        {"gradient_accumulation_steps": 2},
    ),
    "BERT, classes, bf16": (
        lambda: bert("BertForSequenceClassification", num_labels=3),
        "class",
        {"gradient_accumulation_steps": 2, "bf16": True},
    ),
    "GPT-2, noise on embeddings, bf16": (gpt2, "causal", {"neftune_noise_alpha": 5.0, "bf16": True}),
    "BERT, a number": (lambda: bert("BertForSequenceClassification", num_labels=1), "number", {}),
    "BERT, padded by the library, grouped by length, workers": (
        lambda: bert("BertForSequenceClassification", num_labels=3),
        "class",
        {**GROUPED, "dataloader_num_workers": 2, "collator": "DataCollatorWithPadding"},
    ),
    "BERT, tokens": (
        lambda: bert("BertForTokenClassification", num_labels=3),
        "tokens",
        {"collator": "DataCollatorForTokenClassification"},
    ),
    "GPT-2, so many steps, a short last window": (gpt2, "causal", {"max_steps": 5, "gradient_accumulation_steps": 2}),
    "T5": (t5, "copy", {"gradient_accumulation_steps": 3, "collator": "DataCollatorForSeq2Seq"}),
    "BART": (bart, "copy", {"collator": "DataCollatorForSeq2Seq"}),
    "plain module": (Plain, "class", {"gradient_accumulation_steps": 2, "remove_unused_columns": False}),
}


PADDED = "BERT, padded by the library, grouped by length, workers"
ORDINARY = ("GPT-2, accumulated", PADDED, "BERT, tokens", "plain module")
every_case = pytest.mark.parametrize("name", mostly_full(CASES, *ORDINARY))


def trainer_of(name: str, left_out: int | None = None, callbacks=(), **more):
    """The Trainer of a case; with ``left_out``, that example's loss weighs nothing."""
    build, kind, options = CASES[name]
    transformers.set_seed(1)
    model = build()
    data = rows(kind)
    gone = None if left_out is None else torch.tensor(data[left_out]["input_ids"])

    class Weighted(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if gone is None or not model.training:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            inputs = dict(inputs)
            width = min(len(gone), inputs["input_ids"].shape[1])
            row = (inputs["input_ids"][:, :width] == gone[:width]).all(1)
            row &= inputs["attention_mask"].sum(1) == len(gone)
            if inputs["labels"].is_floating_point():  # two losses: the batch, less the example's own share
                both = model(**inputs).logits.flatten()
                return ((both - inputs["labels"]).square() * ~row).mean()
            before = (inputs["labels"] != -100).sum()
            inputs["labels"] = inputs["labels"].masked_fill(row.view(-1, *[1] * (inputs["labels"].ndim - 1)), -100)
            # GPT-2 and Llama divide by the number of items, which stays; BERT and T5 take the mean of what is left.
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return loss if kind == "causal" else loss * (inputs["labels"] != -100).sum() / before

    options = dict(options)
    collator = options.pop("collator", None)
    if collator == "DataCollatorForSeq2Seq":
        collate = transformers.DataCollatorForSeq2Seq(tokenizer(), model=model)
    else:
        collate = getattr(transformers, collator)(tokenizer()) if collator else padded
    own = {"output_dir": tempfile.mkdtemp(), "save_strategy": "no", "num_train_epochs": 2}
    args = transformers.TrainingArguments(
        per_device_train_batch_size=4,
        learning_rate=5e-3,
        warmup_steps=2,
        weight_decay=0.01,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **{**own, **options, **more.pop("args", {})},
    )
    if name == "plain module":
        data = data.remove_columns("text")
    return Weighted(model, args, train_dataset=data, data_collator=collate, callbacks=list(callbacks), **more)


def trained(name: str, left_out: int | None = None) -> nn.Module:
    trainer = trainer_of(name, left_out)  # which seeds the random generators
    trainer.train()
    return trainer.model


@lru_cache
def recorded(name: str):
    recorder = RecorderCallback(f"{tempfile.mkdtemp()}/run", keep="all")
    trainer = trainer_of(name, callbacks=[recorder])
    trainer.train()
    return recorder, trainer.model


def query_loss(name: str, model: nn.Module) -> float:
    """The mean over examples of their own mean losses, by the loss of a new model with these weights, in float32."""
    weights = model.state_dict()
    model = CASES[name][0]().eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        losses = []
        for example in rows(CASES[name][1], 4, seed=9):
            batch = padded([example])
            outputs = model(**batch)
            if smoothing := CASES[name][2].get("label_smoothing_factor"):
                smoother = transformers.trainer_pt_utils.LabelSmoother(smoothing)
                losses.append(smoother(outputs, batch["labels"], shift_labels=True))
            else:
                losses.append(outputs[0] if isinstance(outputs, tuple) else outputs.loss)
    return float(torch.stack(losses).double().mean())


@every_case
def test_recording_changes_no_bit(name: str) -> None:
    _, model = recorded(name)
    both = model.state_dict(), trained(name).state_dict()
    assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])


@every_case
def test_every_step_follows(name: str) -> None:
    recorder, _ = recorded(name)
    task = recorder.task()
    scores = lo.SGDIE().score(recorder.run, task, rows(CASES[name][1], 4, seed=9))
    assert torch.isfinite(scores.values).all()
    assert scores.values.abs().max() > 0


@every_case
def test_replay_is_training_without_the_example(name: str) -> None:
    recorder, model = recorded(name)
    scores = lo.Replay().score(recorder.run, recorder.task(check=False), rows(CASES[name][1], 4, seed=9), ids=LEFT_OUT)
    base = query_loss(name, model)
    truth = torch.tensor([query_loss(name, trained(name, left_out)) - base for left_out in LEFT_OUT])
    assert truth.abs().max() > 5e-4
    assert torch.allclose(scores.values.flatten().float(), truth, rtol=0, atol=1e-3 * float(truth.abs().max()))


def test_best_model_evaluation_and_checkpoints(tmp_path) -> None:
    """The best model is put back before training ends; the run is that of the training all the same."""
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}

    def train(callbacks=(), **args):
        query = rows("causal", 4, seed=9)
        trainer = trainer_of("GPT-2", callbacks=callbacks, eval_dataset=query, args={**often, **args})
        trainer.train()
        return trainer.model

    recorder = RecorderCallback(tmp_path / "run", keep=4)
    best = train([recorder], load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)
    final, last = recorder.run.final()["param"], dict(train().named_parameters())
    assert all(torch.equal(final[name], last[name]) for name in final)
    assert not all(torch.equal(final[name], param) for name, param in best.named_parameters())


def masked(path, seed: int | None, callbacks=()):
    """Train on words masked at random, by torch's generator or by one of the collator's own."""
    collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.4, seed=seed)
    transformers.set_seed(3)
    args = transformers.TrainingArguments(
        path,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
    )
    data = rows("causal").remove_columns("labels")
    model = bert("BertForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    transformers.Trainer(model, args, train_dataset=data, data_collator=collator, callbacks=list(callbacks)).train()
    return model


@pytest.mark.parametrize("seed", [None, 5])
def test_random_masking_is_kept_with_the_run_and_drawn_once_for_queries(tmp_path, seed: int | None) -> None:
    recorder = RecorderCallback(tmp_path / "run")
    first, plain = masked(tmp_path / "out", seed, [recorder]), masked(tmp_path / "out", seed)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), plain.parameters(), strict=True))
    assert recorder.run.batches(0)
    task, query = recorder.task(), rows("causal", 70, seed=9).remove_columns("labels")
    before = torch.get_rng_state()
    task.read(range(len(query)), query)
    assert torch.equal(torch.get_rng_state(), before)
    scores = lo.SGDIE().score(recorder.run, task, query).values
    assert torch.equal(scores, lo.SGDIE().score(recorder.run, task, query).values)
    assert torch.equal(scores, lo.SGDIE().score(recorder.run, recorder.task(), query).values)  # drawn anew
    each = lo.SGDIE().score(recorder.run, task, query, queries="each").values
    assert torch.allclose(each.mean(1), scores.flatten(), atol=1e-2 * float(scores.abs().max()))

    replay, again = (lo.Replay().score(recorder.run, task, query, ids=[0]).values for _ in range(2))
    assert torch.equal(replay, again)
    start, end = (loss_of_queries(task, first, recorder.run.state(n)["param"], query) for n in (0, len(recorder.run)))
    assert end < start


def loss_of_queries(task, model: nn.Module, params, query) -> float:
    """The mean over queries by the model's own loss, one query at a time."""
    model.load_state_dict({**model.state_dict(), **params})
    with torch.no_grad():
        batches = [task.read([number], query) for number in range(len(query))]
        labelled = [model.eval()(**batch).loss for batch in batches if (batch["labels"] != -100).any()]
    return float(torch.stack(labelled).double().sum()) / len(query)


def test_the_run_is_there_once_training_has_ended(tmp_path) -> None:
    with pytest.raises(lo.LeaveoutError) as error:
        _ = RecorderCallback(tmp_path / "run").run
    assert error.value.code == "training-not-ended"


class Interrupting(transformers.TrainerCallback):
    """Ctrl-C between the micro-batches of a step."""

    def on_substep_end(self, args, state, control, **_):
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_an_interrupted_training_has_the_run_of_its_steps(tmp_path) -> None:
    name, query = "GPT-2, accumulated", rows("causal", 4, seed=9)
    recorder = RecorderCallback(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        trainer_of(name, callbacks=[recorder, Interrupting()]).train()
    with pytest.raises(lo.LeaveoutError, match="finish") as error:
        _ = recorder.run
    assert error.value.code == "training-not-ended"
    assert len(recorder.finish()) == 3
    scores = lo.SGDIE().score(recorder.run, recorder.task(), query)
    whole = lo.SGDIE().score(recorded(name)[0].run, recorded(name)[0].task(), query, at=3)
    assert torch.allclose(scores.values, whole.values, rtol=1e-4, atol=1e-9)
    again = RecorderCallback(tmp_path / "run", overwrite=True)  # the cell is run once more
    trainer_of(name, callbacks=[again]).train()
    assert len(again.run) == len(recorded(name)[0].run)


def test_a_word_with_the_number_of_padding(tmp_path) -> None:
    """Its row of the embeddings has no gradient; scores are those of the training, in float64."""
    data, query = ([{**row, "input_ids": [0, *row["input_ids"]][:4]} for row in rows("class", n, n)] for n in (12, 4))

    def train(example: int = 0, change: float = 0.0, callbacks=()) -> nn.Module:
        gone = torch.tensor(data[example]["input_ids"])

        class Weighted(transformers.Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                if not change:
                    return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
                weights = 1 + change * (inputs["input_ids"] == gone).all(1)
                outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
                return (
                    nn.functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none") * weights
                ).mean()

        transformers.set_seed(2)
        model = bert("BertForSequenceClassification", num_labels=3).double()
        own = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-3, "adam_epsilon": 1e-2}
        quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
        args = transformers.TrainingArguments(tmp_path / "out", weight_decay=0.01, **own, **quiet)
        Weighted(model, args, train_dataset=data, callbacks=list(callbacks)).train()
        return model.eval()

    def loss(model: nn.Module) -> float:
        batch = transformers.default_data_collator(query)
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(batch["input_ids"]).logits, batch["labels"]))

    recorder = RecorderCallback(tmp_path / "run")
    base, task = loss(train(callbacks=[recorder])), recorder.task()
    truth = torch.tensor([loss(train(k, -1.0)) - base for k in LEFT_OUT], dtype=torch.float64)
    exact = lo.Replay().score(recorder.run, task, query, ids=LEFT_OUT).mean()
    assert torch.allclose(exact, truth, rtol=1e-7, atol=1e-12)
    slopes = [(loss(train(k, -1e-3)) - loss(train(k, 1e-3))) / 2e-3 for k in LEFT_OUT]
    scores = lo.SGDIE().score(recorder.run, task, query, ids=LEFT_OUT).mean()
    assert torch.allclose(scores, torch.tensor(slopes, dtype=torch.float64), rtol=1e-4, atol=1e-10)


def test_what_cannot_be_followed_is_refused(tmp_path) -> None:
    trainer = trainer_of("GPT-2", callbacks=[RecorderCallback(tmp_path / "run")])
    trainer.args._n_gpu = 2
    with pytest.raises(lo.LeaveoutError) as error:
        trainer.train()
    assert error.value.code == "training-not-supported"
    assert "several devices" in str(error.value)


def test_precision_is_as_it_was_in_training() -> None:
    assert recorded("GPT-2")[0].run.manifest.autocast is None
    assert recorded("BERT, classes, bf16")[0].run.manifest.autocast == "bfloat16"


def test_torchs_fused_kernel_is_followed() -> None:
    """Trainer's default, whose states are kept as gradients too: what follows from them has the same bits."""
    if "fused" not in transformers.TrainingArguments.default_optim:
        pytest.skip("it is not the default before torch 2.8")
    run = recorded("GPT-2")[0].run
    assert run.manifest.rule.extras == ("fused",)
    assert len(whole(run._shard(0))) < len(run) - 2


def test_micro_batches_of_a_short_last_window() -> None:
    run = recorded("GPT-2, so many steps, a short last window")[0].run
    assert [len(run.record(i).parts) for i in range(len(run))] == [2, 2, 1, 2, 2]


def test_an_unknown_loss_is_refused(tmp_path) -> None:
    class Own(Plain):
        def forward(self, input_ids, attention_mask, labels=None):
            outputs = super().forward(input_ids, attention_mask, labels)
            return outputs if labels is None else (outputs[0] * 2, outputs[1])

    recorder = RecorderCallback(tmp_path / "run")
    trainer = trainer_of("plain module", callbacks=[recorder])
    trainer.model.__class__ = Own
    with pytest.warns(lo.LeaveoutWarning, match="The loss that Own computes"):
        trainer.train()
    with pytest.raises(lo.LeaveoutError) as error:
        recorder.task()
    assert error.value.code == "model-loss-unknown"
    task = recorder.task(loss=lambda logits, y: 2 * nn.functional.cross_entropy(logits, y, reduction="none"))
    lo.SGDIE().score(recorder.run, task, rows("class", 4))


def test_the_losses_of_models_in_bfloat16_are_recognised() -> None:
    """Some compute their loss in float32, others in bfloat16, in which other losses are not far."""
    cases = ((llama, "causal", True), (lambda: bert("BertForTokenClassification", num_labels=3), "tokens", False))
    for build, kind, shift in cases:
        transformers.set_seed(1)
        model = build().bfloat16()
        assert found_loss(model, padded(rows(kind, 16).to_list())) == ClassLoss(shift=shift)


def test_a_model_without_logits_is_refused_and_scored_with_a_loss_of_its_own(tmp_path) -> None:
    """Answers to questions: a first and a last word, so two outputs and two targets."""
    model = bert("BertForQuestionAnswering")
    ends = {"start_positions": [0, 1, 2, 3] * 3, "end_positions": [2, 3] * 6}
    words = torch.randint(4, VOCABULARY, (12, 4), generator=torch.Generator().manual_seed(0)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": words, **ends})
    recorder = RecorderCallback(tmp_path / "run")
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": 3}
    args = transformers.TrainingArguments(str(tmp_path), **quiet)
    with pytest.warns(lo.LeaveoutWarning, match="forward="):
        transformers.Trainer(model, args, train_dataset=data, callbacks=[recorder]).train()
    with pytest.raises(lo.LeaveoutError, match="forward=") as error:
        recorder.task()
    assert error.value.code == "model-loss-unknown"

    def forward(model, batch):
        outputs = model(input_ids=batch["input_ids"])
        return (outputs.start_logits, outputs.end_logits), (batch["start_positions"], batch["end_positions"])

    def loss(outputs, targets):
        both = (nn.functional.cross_entropy(*pair, reduction="none") for pair in zip(outputs, targets, strict=True))
        return sum(both) / 2

    task = recorder.task(forward=forward, loss=loss)
    scores = lo.Replay().score(recorder.run, task, data, ids=[0, 5])  # every step is computed again and compared
    assert scores.values.abs().max() > 0


def test_a_data_set_with_a_transform(tmp_path) -> None:
    """As the library's scripts for images and sound set it: what it gives has other names than its columns."""

    def transform(rows):
        return {"input_ids": rows["words"], "labels": rows["kind"]}

    words = rows("class", 12)
    data = datasets.Dataset.from_dict({"words": [row[:4] for row in words["input_ids"]], "kind": words["labels"]})
    recorder, quiet = RecorderCallback(tmp_path / "run"), {"use_cpu": True, "report_to": [], "save_strategy": "no"}
    args = transformers.TrainingArguments(str(tmp_path), max_steps=3, remove_unused_columns=False, **quiet)
    model = bert("BertForSequenceClassification", num_labels=3)
    given = data.with_transform(transform)
    transformers.Trainer(model, args, train_dataset=given, callbacks=[recorder]).train()
    assert lo.SGDIE().score(recorder.run, recorder.task(), given).values.abs().max() > 0


def test_the_example(tmp_path) -> None:
    main = runpy.run_path(str(Path(__file__).parents[1] / "examples/hugging_face_trainer.py"))["main"]
    harmful = main(tmp_path)
    assert len(set(harmful) & {3, 11, 27, 42}) >= 2
