"""How far to trust the scores: a plain sentence, what to do instead if the verdict is bad, and the figures."""

from __future__ import annotations

from leaveout.evaluate.ceiling import Ceiling
from leaveout.evaluate.check import MINIMUM, Check
from leaveout.evaluate.verdict import Verdict
from leaveout.reporting.content import Trust
from leaveout.scores import Scores

TITLES = {
    Verdict.GOOD: "The ranking can be trusted",
    Verdict.COARSE: "The ranking is right overall, not in detail",
    Verdict.HINT: "The ranking is only a hint",
    Verdict.NONE: "The ranking cannot be trusted",
    Verdict.FEW: "Too few replays to tell",
}
PLAIN = {
    Verdict.GOOD: "their order is that of the scores",
    Verdict.COARSE: "trust the top and the bottom of the list, and ignore neighbouring ranks",
    Verdict.HINT: "their order is that of the scores only in part",
    Verdict.NONE: "their order is not that of the scores",
    Verdict.FEW: "that is too few to tell",
}
LOOK_ELSEWHERE = "Look at the labels, or at groups of examples: do not act on single scores."
REFINE = "Go by the examples that were retrained without, and make more of them so: study.refine(), or leaveout refine."
MORE = "Verify with more replays before you go by them: study.verify(replays=...), or leaveout verify --replays."


def trusted(scores: Scores, check: Check | None, failed: str = "") -> Trust:
    """Say how far the scores can be trusted; ``failed`` says why the training taught the model nothing."""
    figures = "" if check is None else check.sentence
    if failed:
        title, _, words = failed.partition(": ")
        return Trust(
            "none",
            title,
            figures,
            f"{words[:1].upper()}{words[1:]}",
            "Train again first.",
            act="",
        )
    if check is not None and check.void:
        return verdict_of(check)
    if scores.all_exact:
        what = "example" if scores.groups is None else "group"
        return _exact(None if check is None else check.ceiling, what, figures, len(scores.train_ids) < 2 * MINIMUM)
    if check is None:
        few = len(scores.train_ids) < 2 * MINIMUM  # too few for verify to compare rankings
        find_out = "Score them with lo.Replay() to be sure." if few else "Run study.verify(), or leaveout verify."
        words = "These scores have not been compared with retrained models: how far to trust them is not known."
        return Trust("unchecked", "Not verified", "", f"{words} {find_out}")
    return verdict_of(check, "example" if scores.groups is None else "group")


def verdict_of(check: Check, what: str = "example") -> Trust:
    """Say what a comparison with retrained models allows."""
    figures, count = check.sentence, len(check.table)
    if check.void:
        words = f"The model was retrained without {count} {what}s, one at a time, and nothing changed."
        return Trust("none", f"No {what} has any effect", "", words, "Train with a learning rate above zero.", act="")
    plain = f"The model was retrained without {count} {what}s, one at a time: {PLAIN[check.verdict]}."
    instead, title = _instead(check), TITLES[check.verdict]
    ceiling = check.ceiling
    if check.too_few:
        title, plain = "Too few replays to tell", f"The model was retrained without {count} {what}s only."
    elif check.bad and ceiling is not None and ceiling.reproducible:
        title = "The scores are wrong" if check.verdict is Verdict.NONE else f"{title}: the scores are off"
    elif check.bad and ceiling is not None:
        title = "Only the largest effects are reproducible" if ceiling.largest else ceiling.nothing.capitalize()
        plain = "Trainings from slightly moved starts disagree about what single examples do"
        plain += ", except for the largest effects." if ceiling.largest else ", so that no score can rank them."
    return Trust(check.verdict.level, title, figures, plain, instead, act=_act(check))


def _exact(ceiling: Ceiling | None, what: str, figures: str, few: bool) -> Trust:
    """Say that every score is exact for this run and, if that was measured, whether the effects are reproducible."""
    words = f"Each score comes from retraining exactly without its {what}."
    if ceiling is None:
        ask = "" if few else ": study.verify(), or leaveout verify, does that"
        ask = f" Whether a slightly different training would show the same effects was not measured{ask}."
        return Trust("unchecked", "Exact for this run; whether it repeats is not known", figures, words + ask)
    if ceiling.reproducible:
        words += " Trainings from slightly moved starts show the same effects."
        return Trust("exact", "Every score is exact, and reproducible", figures, words)
    if ceiling.largest:
        words = "Trust the top and the bottom of the list: smaller effects change with the last digits of the start."
        return Trust("coarse", "Exact, but only the largest effects are reproducible", figures, words)
    words += " But trainings from slightly moved starts show other effects."
    return Trust("none", ceiling.nothing.capitalize(), figures, words, LOOK_ELSEWHERE, act="")


def _instead(check: Check) -> str:
    """Say what to do if a verdict is bad; else nothing."""
    if not check.bad and not check.too_few:
        return ""
    if check.ceiling is not None and not check.ceiling.largest:
        return LOOK_ELSEWHERE
    if check.too_few:
        return MORE
    return REFINE


def _act(check: Check) -> str:
    """Return which rows may be decided on: ``"all"``, those that are ``"exact"``, or none."""
    if not check.bad:
        return "all"
    return "" if check.ceiling is not None and not check.ceiling.largest else "exact"
