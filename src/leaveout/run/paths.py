"""The files beside a run, in its directory: its config, scores, checks, the cleansing curve, the HTML report.

``runs/x/config.toml``                   ``leaveout train --config`` repeats the run from it
``runs/x/training.json``                 the result of ``leaveout train``, and which labels it flipped
``runs/x/scores/<method>.safetensors``   ``Scores``
``runs/x/checks/<method>.json``          the ``Check`` of the scores of the same name
``runs/x/labels.json``                   the labels to check
``runs/x/cleanse.json``                  the cleansing curve
``runs/x/report.html``                   the HTML report

``--results DIR`` puts all but the config into another directory, in the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from leaveout.errors import RunError

CONFIG = "config.toml"


def slug(method: str) -> str:
    """Turn a method's name into a file name.

    >>> slug("ACC(free, outputs readout)"), slug("SGD-IE")
    ('acc-free-outputs-readout', 'sgd-ie')
    """
    return re.sub(r"[^a-z0-9.]+", "-", method.lower()).strip("-.")


@dataclass(frozen=True)
class RunPaths:
    """The paths beside one run; nothing is read or created here.

    A run may come from an untrusted source: folders that are symbolic links are refused.

    >>> RunPaths(Path("runs/x")).scores("SGD-IE").as_posix()
    'runs/x/scores/sgd-ie.safetensors'
    """

    run: Path
    results: Path | None = None
    """Where results are stored, if not in the run's own directory."""

    @property
    def config(self) -> Path:
        """The config that made the run, if ``leaveout train`` did."""
        return self.run / CONFIG

    @property
    def training(self) -> Path:
        """The result of the training, if ``leaveout train`` did it."""
        return self.run / "training.json"

    @property
    def labels(self) -> Path:
        """The labels to check."""
        return self._home / "labels.json"

    @property
    def cleanse(self) -> Path:
        """The cleansing curve."""
        return self._home / "cleanse.json"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self._home / "report.html"

    def scores(self, method: str, variant: str = "") -> Path:
        """Return the path of a method's scores; ``variant`` marks scores of single queries or of groups."""
        return self._folder("scores") / f"{slug(f'{method} {variant}')}.safetensors"

    def check(self, scores: Path) -> Path:
        """Return the path of the check of the scores in this file."""
        return self._folder("checks") / f"{scores.stem}.json"

    def scored(self) -> list[Path]:
        """List the existing score files, sorted by name."""
        return sorted(self._folder("scores").glob("[!.]*.safetensors"))

    def checked(self) -> list[Path]:
        """List the existing checks, sorted by name."""
        return sorted(self._folder("checks").glob("[!.]*.json"))

    @property
    def _home(self) -> Path:
        return self.run if self.results is None else self.results

    def _folder(self, *names: str) -> Path:
        folder = self._home
        for name in names:
            folder = folder / name
            if folder.is_symlink():
                raise RunError(
                    f"{folder} is a link to another place: put a folder there, or take the link away.",
                    code="link-not-followed",
                )
        return folder
