"""A run with a built-in data set and model as a TOML file, from which it can be repeated bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import tomlkit
import torch
from tomlkit.exceptions import ParseError, TOMLKitError
from torch import nn

from leaveout._util.files import plain, write_text
from leaveout.builtin import data, models
from leaveout.compute.resources import Resources
from leaveout.errors import InputError, RunError, closest
from leaveout.optim import optimizers
from leaveout.run.manifest import MANIFEST, cut_short
from leaveout.run.paths import RunPaths
from leaveout.run.reader import Run
from leaveout.run.recording.writer import claim
from leaveout.run.train import train
from leaveout.task.task import Task

OPTIMIZERS = {name.lower(): one.torch_class for name, one in optimizers().items() if one.torch_class is not None}
"""By their names in a config."""


MOST_BYTES = 1_000_000
"""The largest config that is read."""


@dataclass(frozen=True)
class DataPart:
    """Which examples: a data set by name, and the fraction of its training labels to flip."""

    name: str = "digits"
    n_train: int | None = None
    n_val: int | None = None
    seed: int = 0
    flip: float = 0.0
    flip_seed: int = 1


@dataclass(frozen=True)
class ModelPart:
    """Which model, by name; None means the model's default."""

    name: str = "mlp"
    seed: int = 0
    hidden: list[int] | None = None
    activation: str | None = None


@dataclass(frozen=True)
class OptimizerPart:
    """Which optimizer, by name; None means PyTorch's default."""

    name: str = "sgd"
    lr: float = 0.2
    momentum: float | None = None
    dampening: float | None = None
    nesterov: bool | None = None
    weight_decay: float | None = None
    betas: list[float] | None = None
    eps: float | None = None


@dataclass(frozen=True)
class TrainPart:
    """How it is trained, and which states are kept."""

    epochs: int = 20
    batch_size: int = 50
    seed: int = 0
    l2: float = 0.0
    keep: str | int = "auto"


@dataclass(frozen=True)
class Config:
    """Everything that a run of ``leaveout train`` depends on."""

    data: DataPart = field(default_factory=DataPart)
    model: ModelPart = field(default_factory=ModelPart)
    optimizer: OptimizerPart = field(default_factory=OptimizerPart)
    train: TrainPart = field(default_factory=TrainPart)


@dataclass(frozen=True)
class Subject:
    """What a run is about: the task that was trained, the queries, and what else is known about the data.

    ``flipped`` are the training examples whose labels were flipped on purpose.
    """

    task: Task
    query: torch.utils.data.Dataset
    test: torch.utils.data.Dataset | None = None
    data: data.Data | None = None
    flipped: tuple[int, ...] = ()


PARTS = {"data": DataPart, "model": ModelPart, "optimizer": OptimizerPart, "train": TrainPart}

# The types in TOML, by the fields' annotations; an integer is accepted as a float.
TYPES: dict[str, tuple[str, Any]] = {
    "str": ("text", lambda v: isinstance(v, str)),
    "int": ("a whole number", lambda v: type(v) is int),
    "float": ("a number", lambda v: type(v) in (int, float)),
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "list[int]": ("a list of whole numbers", lambda v: isinstance(v, list) and all(type(x) is int for x in v)),
    "list[float]": ("a list of numbers", lambda v: isinstance(v, list) and all(type(x) in (int, float) for x in v)),
    "str | int": ("text or a whole number", lambda v: isinstance(v, str) or type(v) is int),
}


def from_dict(raw: Mapping[str, Any], source: str) -> Config:
    """Build a config from nested dictionaries; all problems are reported at once."""
    problems = list(_problems(raw))
    if problems:
        listing = "\n".join(f"  - {problem}" for problem in problems)
        raise InputError(f"{source} is not the config of a run; correct these:\n{listing}", code="config-invalid")
    return Config(**{name: PARTS[name](**part) for name, part in raw.items()})


def _problems(raw: Mapping[str, Any]) -> Iterator[str]:
    for section, part in raw.items():
        if section not in PARTS:
            yield f"there is no section [{section}]{closest(section, PARTS)}; there are {', '.join(PARTS)}"
        elif not isinstance(part, Mapping):
            yield f"{section} is a section of its own: write [{section}] and its keys below it"
        else:
            types = {f.name: str(f.type).removesuffix(" | None") for f in fields(PARTS[section])}
            for key, value in part.items():
                if key not in types:
                    yield f"[{section}] has no key {key!r}{closest(key, types)}; it has {', '.join(types)}"
                elif not TYPES[types[key]][1](value):
                    yield f"[{section}] {key} = {value!r} must be {TYPES[types[key]][0]}"


def read(path: str | Path) -> Config:
    """Read a config from a TOML file."""
    path = Path(path)
    try:
        if plain(path).stat().st_size > MOST_BYTES:
            raise InputError(
                f"{path} has more than {MOST_BYTES:,} bytes: give a run's config, which is much smaller.",
                code="config-too-large",
            )
        raw = tomlkit.parse(path.read_text()).unwrap()
    except InputError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read ({error}): give a TOML file, such as a run's config.toml.", code="config-unreadable"
        ) from None
    except ParseError as error:
        raise InputError(f"{path} is not TOML, line {error.line}: {error}.", code="config-not-toml") from None
    except (TOMLKitError, ValueError, RecursionError) as error:  # a key twice, a number too long, brackets too deep
        raise InputError(f"{path} is not TOML: {error}.", code="config-not-toml") from None
    return from_dict(raw, str(path))


def to_toml(config: Config) -> str:
    """Return the config as text; defaults (None) are left out."""
    parts = {
        name: {key: value for key, value in part.items() if value is not None} for name, part in asdict(config).items()
    }
    return "# `leaveout train --config` with this file repeats the run.\n\n" + tomlkit.dumps(parts)


def prepare(config: Config) -> Subject:
    """Load the data, and build the model as it was before training."""
    dataset = data.load(config.data.name, config.data.n_train, config.data.n_val, config.data.seed)
    noisy = data.flip(dataset.train, config.data.flip, config.data.flip_seed)
    task = Task(_model(config.model, dataset), _loss(dataset), noisy.examples, l2=config.train.l2)
    flipped = tuple(noisy.touched.nonzero().flatten().tolist())
    return Subject(task, dataset.val, dataset.test, dataset, flipped)


def run_config(config: Config, out: Path, resources: Resources | None = None) -> tuple[Run, Subject]:
    """Train and record what a config describes; the config is beside the run from the first step on.

    A run of the same config that was cut short is resumed.
    """
    subject = prepare(config)
    optimizer = _optimizer(config.optimizer, subject.task.model)
    resume = _leave(config, out)
    how = config.train
    size, seed = how.batch_size, how.seed
    run = train(subject.task, optimizer, how.epochs, size, seed, out, keep=how.keep, resume=resume, resources=resources)
    return run, subject


def _leave(config: Config, out: Path) -> bool:
    """Write the config into the new directory; say whether a run that it describes was cut short there.

    This holds the directory's lock: of two trainings at once, the second finds the config of the first.
    """
    file = RunPaths(out).config
    lock = claim(out, resume=True)
    try:
        unfinished = cut_short(out) and file.exists()
        if (out / MANIFEST).exists() and not unfinished:
            raise RunError(
                f"{out} already holds a run: choose another directory with --out, or delete it first.",
                code="run-exists",
            )
        if not file.exists():
            write_text(file, to_toml(config))
    except OSError as error:
        raise RunError(
            f"{file} cannot be written ({error}): make room, or choose another directory.", code="file-not-writable"
        ) from None
    finally:
        lock.release()
    if read(file) != config:
        raise InputError(
            f"{file} describes another run: choose another directory, or give this file as the config.",
            code="config-of-another-run",
        )
    return unfinished


def _model(part: ModelPart, dataset: data.Data) -> nn.Module:
    outputs = 1 if len(dataset.classes) == 2 else len(dataset.classes)
    options: dict[str, Any] = {
        name: value for name in ("hidden", "activation") if (value := getattr(part, name)) is not None
    }
    flat = part.name in ("logistic", "mlp")
    if flat:
        options["features"] = dataset.train.x[0].numel()
    if part.name == "mlp":
        options["outputs"] = outputs
    model = models.build(part.name, part.seed, **options)
    if flat and dataset.train.x.ndim > 2:
        model = nn.Sequential(nn.Flatten(), model)
    with torch.no_grad():
        try:
            shape = tuple(model(dataset.train.x[:2]).shape[1:])
        except RuntimeError as error:
            raise InputError(
                f"The model {part.name} does not take {dataset.name}'s examples: {error}.", code="model-rejects-data"
            ) from None
    if shape != (() if outputs == 1 else (outputs,)):
        raise InputError(
            f"The model {part.name} has outputs of shape {list(shape)}, but {dataset.name} has {len(dataset.classes)} "
            "classes: take the model mlp, which has as many outputs as there are classes.",
            code="model-outputs-not-classes",
        )
    return model


def _loss(dataset: data.Data) -> nn.Module:
    return nn.BCEWithLogitsLoss() if len(dataset.classes) == 2 else nn.CrossEntropyLoss()


def _optimizer(part: OptimizerPart, model: nn.Module) -> torch.optim.Optimizer:
    if part.name not in OPTIMIZERS:
        raise InputError(
            f"there is no optimizer {part.name!r}{closest(part.name, OPTIMIZERS)}; "
            f"choose one of {', '.join(OPTIMIZERS)}.",
            code="optimizer-unknown",
        )
    kind = OPTIMIZERS[part.name]
    names = [one.name for one in fields(part) if one.name in inspect.signature(kind).parameters]
    options = {key: value for key, value in asdict(part).items() if key != "name" and value is not None}
    if foreign := sorted(set(options) - set(names)):
        raise InputError(
            f"{part.name} takes {', '.join(names)}, but not {', '.join(foreign)}: leave that out.",
            code="optimizer-option-unknown",
        )
    if part.betas is not None and len(part.betas) != 2:
        raise InputError(f"betas={part.betas} must be two numbers, such as [0.9, 0.999].", code="betas-not-two-numbers")
    try:
        return kind(model.parameters(), **options)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{part.name} cannot be made with {options}: {error}.", code="optimizer-rejects-options"
        ) from None
