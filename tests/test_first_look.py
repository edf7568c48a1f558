"""The notebook among the examples, executed by a real kernel: what its cells show, and what they do not."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

NOTEBOOK = Path(__file__).parent.parent / "examples/first_look.ipynb"

LONG = """
import time
from leaveout.compute import progress

progress.MOMENT = 0.2
def slowly():
    for number in range(40):
        time.sleep(0.03)
        yield number
"""
ONE_BAR = "sum(lo.Resources().track(slowly(), 40, 'digging <deep>'))"
NO_BAR = "sum(lo.Resources(progress=False).track(slowly(), 40, 'digging'))"
TWICE = """
lo.Recorder("runs/first_look", model, optimizer)
"""


class Kernel:
    """Runs cells of a notebook one by one, in a kernel of its own."""

    def __init__(self, client, folder: Path) -> None:
        self.client, self.folder = client, folder

    def run(self, cell):
        if isinstance(cell, str):
            cell = nbformat.v4.new_code_cell(cell)
            self.client.nb.cells.append(cell)
        return self.client.execute_cell(cell, self.client.nb.cells.index(cell)).outputs

    def cell(self, line: str):
        """The cell of the notebook that has this line."""
        return next(cell for cell in self.client.nb.cells if line in cell.source.splitlines())


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The notebook, all of whose cells were run from first to last."""
    folder = tmp_path_factory.mktemp("first-look")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not kept: run it to see them"
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}})
    client.reset_execution_trackers()
    with client.setup_kernel():
        kernel = Kernel(client, folder)
        for cell in [cell for cell in notebook.cells if cell.cell_type == "code"]:
            kernel.run(cell)
        yield kernel


def html(outputs) -> str:
    return next(
        one.data["text/html"] for one in outputs if "text/html" in one.get("data", {}) and one.data["text/html"]
    )


def test_every_result_shows_itself(kernel):
    for line, words in {
        "run": "300",
        "labels": "labels look wrong",
        "scores": "below zero",
        "check": "exact replays",
        "curve": "the test error falls by 1.7 points",
        "study": "SGD-IE",
    }.items():
        assert words in html(kernel.cell(line).outputs), line
    page = html(kernel.cell('study.report("runs/first_look/report.html", overwrite=True)').outputs)
    assert page.startswith('<iframe sandbox="allow-scripts allow-downloads" srcdoc=')
    assert "labels look wrong" in page
    assert (kernel.folder / "runs/first_look/report.html").exists()


def test_every_plot_is_one_picture(kernel):
    for line in ("labels.plot();", "check.plot();"):
        (output,) = kernel.cell(line).outputs
        assert len(output.data["image/png"]) > 1000


def test_nothing_else_is_shown(kernel):
    for cell in kernel.client.nb.cells:
        shown = [one for one in cell.get("outputs", []) if one.get("data", {}).get("text/html") != ""]
        assert len(shown) <= 1, "a result, a picture or a line, and no rest of a bar"
        assert all(one.get("name") != "stderr" for one in shown), "warnings"
        assert all(len(one.get("text", "")) < 200 for one in shown)
        assert all(len(one.get("data", {}).get("text/plain", "")) < 200 for one in shown), "a repr for terminals"


def test_long_work_shows_one_bar_that_goes_away(kernel, monkeypatch):
    kernel.run(LONG)
    drawn = []
    monkeypatch.setattr(
        kernel.client,
        "process_message",
        lambda message, *rest, old=kernel.client.process_message: (drawn.append(message), old(message, *rest))[1],
    )
    bar, result = kernel.run(ONE_BAR)
    kinds = [message["msg_type"] for message in drawn]
    assert kinds.count("display_data") == 1, "one place, drawn again and again"
    assert 2 <= kinds.count("update_display_data") <= 8, "a few times a second, not once per item"
    shown = [one["content"]["data"]["text/html"] for one in drawn if one["msg_type"].endswith("display_data")]
    assert all("digging &lt;deep&gt; <progress" in text and "/40" in text for text in shown[:-1])
    assert "s left" in shown[-2]
    assert (bar.data["text/html"], result.data["text/plain"]) == ("", "780")
    (result,) = kernel.run(NO_BAR)
    assert result.data["text/plain"] == "780"


def test_the_cells_run_twice(kernel):
    recording = kernel.cell("run")
    kernel.run(recording)
    assert "labels look wrong" in html(kernel.run(kernel.cell("labels")))
    assert html(kernel.run(kernel.cell('study.report("runs/first_look/report.html", overwrite=True)')))
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="overwrite=True"):
        kernel.run(TWICE)
