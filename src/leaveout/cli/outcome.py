"""The result of a training: losses and accuracies, and a warning if it failed."""

from __future__ import annotations

from collections import Counter

from leaveout._util.trees import PARAM
from leaveout.builtin.config import Subject
from leaveout.cli.facts import Outcome
from leaveout.compute.resources import Resources
from leaveout.evaluate.opinions import Opinions, opinions
from leaveout.run.reader import Run
from leaveout.task import batches

GUESSED = 0.02
"""How much better than the most frequent class a model must be on the training labels to have learned something."""
LITTLE = 0.6
"""The share of its training labels that a model should predict before its mistakes are worth examining."""


def measured(run: Run, subject: Subject) -> Outcome:
    """Evaluate the trained model on the training labels as they were given, and on the validation examples."""
    task, classes = subject.task, () if subject.data is None else subject.data.classes
    params, resources = run.final()[PARAM], Resources()
    train = opinions(task, params, task.train_set, range(task.size), classes, resources)
    query = opinions(task, params, subject.query, range(batches.size(subject.query)), classes, resources)
    numbers = {"validation_loss": float(query.losses.mean()), "training_loss": float(train.losses.mean())}
    words = f"Loss: {numbers['training_loss']:.4g} in training, {numbers['validation_loss']:.4g} in validation."
    if train.p is not None and query.p is not None:
        numbers |= {"training_accuracy": _right(train), "validation_accuracy": _right(query)}
        words += (
            f" Accuracy: {numbers['training_accuracy']:.1%} of the training labels as given, "
            f"{numbers['validation_accuracy']:.1%} in validation."
        )
    return Outcome({**numbers}, words, _warning(train, numbers))


def _warning(train: Opinions, numbers: dict[str, float]) -> str:
    if train.p is None:
        return ""
    most = Counter(train.labels).most_common(1)[0][1] / len(train.labels)
    right = numbers["training_accuracy"]
    if right >= max(LITTLE, most + GUESSED):
        return ""
    if right >= most + GUESSED:
        return (
            f"The model is right for only {right:.1%} of its training labels. Labels and scores will be about this "
            "model: train longer (--epochs), or with another learning rate (--lr), first."
        )
    return (
        f"The training failed: guessing the most frequent class is right for {most:.1%} of the labels. Scores would "
        "explain a model that has learned nothing: try another learning rate, or more epochs."
    )


def _right(answers: Opinions) -> float:
    return sum(a == b for a, b in zip(answers.labels, answers.says, strict=True)) / len(answers.labels)
