"""The result of a training: losses and accuracies, and a warning if it failed."""

from __future__ import annotations

from leaveout._util.trees import PARAM
from leaveout.builtin.config import Subject
from leaveout.cli.facts import Outcome
from leaveout.compute.resources import Resources
from leaveout.evaluate.opinions import opinions
from leaveout.run.reader import Run
from leaveout.task import batches


def measured(run: Run, subject: Subject) -> Outcome:
    """Evaluate the trained model on the training labels as they were given, and on the validation examples."""
    task, classes = subject.task, () if subject.data is None else subject.data.classes
    params, resources = run.final()[PARAM], Resources()
    train = opinions(task, params, task.train_set, range(task.size), classes, resources)
    query = opinions(task, params, subject.query, range(batches.size(subject.query)), classes, resources)
    numbers = {"validation_loss": float(query.losses.mean()), "training_loss": float(train.losses.mean())}
    words = f"Loss: {numbers['training_loss']:.4g} in training, {numbers['validation_loss']:.4g} in validation."
    if train.p is not None and query.p is not None:
        numbers |= {"training_accuracy": train.right, "validation_accuracy": query.right}
        words += (
            f" Accuracy: {numbers['training_accuracy']:.1%} of the training labels as given, "
            f"{numbers['validation_accuracy']:.1%} in validation."
        )
    return Outcome({**numbers}, words, train.weakness)
