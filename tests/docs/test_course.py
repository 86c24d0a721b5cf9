"""The cells of each lesson print what it says, and its grader tells the solution from the unsolved
exercise.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import jupytext
import pytest
from nbclient import NotebookClient

from tests.docs.pages import matches

pytestmark = pytest.mark.rest


def number(page: Path) -> int:
    return int(page.stem.removeprefix("lesson").partition("-")[0])


COURSE = Path(__file__).parents[2] / "docs" / "course"
LESSONS = sorted(COURSE.glob("lesson*.md"), key=number)
NAMES = [f"lesson{number(page)}" for page in LESSONS]
_PRINTED = re.compile(r"```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# what torch's libraries log, on a slow machine more: "[rank0]:[W1124 12:35:02.7 socket.cpp:67] ..."
_LOG = re.compile(r"^(\[[\d,-]+\] )?(\[rank\d+\]: ?)?\[[IWE]\d{4} .*\n?", re.MULTILINE)
_BY_RANKS = re.compile(r"\[(\d+(?:[-,]\d+)*)\] (.*)")


def of_ranks(line: str) -> tuple[list[int], str] | None:
    """The ranks that have printed it in a notebook, and what: "[0-1] text", "[0,2] text"."""
    if not (found := _BY_RANKS.fullmatch(line)):
        return None
    ranks: list[int] = []
    for part in found[1].split(","):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return ranks, found[2]


def by_rank(text: str) -> list[str]:
    """Its lines. Ranks print in any order, and equal lines appear once. Here each rank has its own
    lines, and they stand rank by rank.
    """
    lines: list[str] = []
    together: list[tuple[int, str]] = []
    for line in [*text.splitlines(), None]:
        if line is not None and (said := of_ranks(line)):
            together += [(rank, said[1]) for rank in said[0]]
            continue
        together.sort(key=lambda each: each[0])
        lines += [f"[{rank}] {words}" for rank, words in together]
        together = []
        if line is not None:
            lines.append(line.rstrip())
    return lines


def fits(page: str, printed: str) -> bool:
    """Whether the page's text stands for what was printed, in whatever order the ranks print."""
    return matches("\n".join(by_rank(page)), "\n".join(by_rank(printed)))


def printed_by(cell: Any, stream: str) -> str:
    """ "stdout" with the value of the last line, or "stderr"."""
    return "".join(
        output.text if output.output_type == "stream" else output.data["text/plain"] + "\n"
        for output in cell.outputs
        if output.get("name", "stdout") == stream and output.output_type != "display_data"
    )


def test_what_fits() -> None:
    assert fits("a ... s\n", "a 0.25 s\n")
    assert not fits("", "a\n")
    assert fits("[0-2] x\n[3] y\n", "[1] x\n[3] y\n[0,2] x\n")
    assert not fits("[0] x\n[1] x\n[1] y\n", "[1] y\n[0-1] x\n")


@pytest.mark.parametrize("page", LESSONS, ids=NAMES)
def test_cells_print_what_the_lesson_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notebook that the site offers, in a kernel. Its commands are those of this Python."""
    monkeypatch.setenv("PATH", os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    notebook = jupytext.reads(page.read_text(encoding="utf-8"), fmt="md")
    options: dict[str, Any] = {"resources": {"metadata": {"path": str(tmp_path)}}}
    NotebookClient(notebook, timeout=300, startup_timeout=300, **options).execute()
    cells = notebook.cells
    assert any(cell.cell_type == "code" for cell in cells)
    for cell, below in zip(cells, [*cells[1:], None], strict=True):
        if cell.cell_type != "code":
            continue
        text = below.source if below is not None and below.cell_type == "markdown" else ""
        said = _PRINTED.match(text)
        page_says, printed = said[1] if said else "", printed_by(cell, "stdout")
        if not cell.source.startswith("%%bash"):  # a command's own warnings depend on the machine
            printed += _LOG.sub("", printed_by(cell, "stderr"))
        assert fits(page_says, printed), (
            f"{page.name}: under the cell\n{cell.source}\nthe page says\n{page_says}"
            f"\nand the cell printed\n{printed}"
        )


STAGES = [
    f"trainer_{stage}"
    for stage in ("naive", "buckets", "overlap", "resumable", "sharded", "local_steps")
]


@pytest.mark.parametrize("name", [*NAMES, "capstone", *STAGES])
def test_the_grader_tells_the_solution_from_the_exercise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(COURSE))
    from grading import Wrong, grade  # type: ignore[import-not-found]

    grade("solutions", name)
    with pytest.raises(Wrong, match="is not solved yet"):
        grade("exercises", name)


WRONG: dict[str, tuple[str, dict[str, str], str]] = {
    "no zero_grad": ("lesson1", {"    model.zero_grad()\n": ""}, "gradient of an earlier step"),
    "no zero_grad, and by the parts": (
        "lesson1",
        {
            "    model.zero_grad()\n": "",
            ', reduction="sum"': "",
            "/ len(inputs)": "/ -(-len(inputs) // micro_batch)",
        },
        "gradient of an earlier step",
    ),
    "its own address": (
        "lesson2",
        {"init_method=init_method,": 'init_method=f"{init_method}-own",'},
        "not at init_method=",
    ),
    "variables overwritten": (
        "lesson2",
        {"os.environ.setdefault(name, value)": "os.environ[name] = value"},
        "overwrote it with",
    ),
    "global rank": (
        "lesson2",
        {'int(os.environ["LOCAL_RANK"])': 'int(os.environ["RANK"])'},
        "the global rank",
    ),
    "group before device": (
        "lesson2",
        {
            "        torch.cuda.set_device(device)\n": "",
            "timeout=timeout)\n": """timeout=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
""",
        },
        "before it chose the device",
    ),
    "no set_device": (
        "lesson2",
        {"        torch.cuda.set_device(device)\n": ""},
        "did not call torch.cuda.set_device",
    ),
    "no CPU": ("lesson2", {"torch.cuda.is_available()": "True"}, "There is no GPU"),
    "no timeout": (
        "lesson2",
        {"(backend, timeout=timeout)": "(backend)"},
        "opened the group with None",
    ),
    "no all-gather": (
        "lesson3",
        {"range(size - 1):  # all-gather": "range(0):  # all-gather"},
        "sent 1 messages",
    ),
    "a round too many": (
        "lesson3",
        {"range(size - 1):  # all-gather": "range(size):  # all-gather"},
        "sent 1 messages. A ring sends .* = 0",
    ),
    "mean of means": (
        "lesson5",
        {"each.flatten() for": "each.flatten() / max(weight, 1) for", "float(weight)": "1.0"},
        "the mean of the ranks' means",
    ),
    "no gradient, no call": (
        "lesson6",
        {
            "parameter.grad = torch.zeros_like(parameter)": "parameter.grad = None",
            "    for parameter in model.parameters():\n        dist": """
    for parameter in (p for p in model.parameters() if p.grad is not None):
        dist""",
        },
        "calls all_reduce of 48 numbers, and rank 2 has returned",
    ),
    "4(N - 1)": ("lesson7", {"2 * (ranks - 1)": "4 * (ranks - 1)"}, "what it receives"),
    "whole tensors": ("lesson7", {"rounds / ranks * size": "rounds * size"}, "has one cell"),
    "the tensor once": ("lesson7", {"rounds / ranks * size": "size"}, "not the tensor once"),
    "no overlap": (
        "lesson7",
        {"max(link_free, forward + backward)": "forward + backward + sum(buckets)"},
        "without overlap",
    ),
    "base 1": (
        "lesson7",
        {"base = min(rates)\n    found": "base = 1\n    found"},
        "Nobody measured",
    ),
    "no warm-up": ("lesson7", {"range(warm_up)": "range(0)"}, "The warm-up is in your time"),
    "warm-up timed": (
        "lesson7",
        {
            "    start = time.perf_counter()\n": "",
            "    for _ in range(warm_up)": "    start = time.perf_counter()\n    for _ in range(warm_up)",
        },
        "The warm-up is in your time",
    ),
    "time of rank 0": (
        "lesson7",
        {"    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)\n": ""},
        "The slowest rank counts",
    ),
    "samples of rank 0": ("lesson7", {"    dist.all_reduce(samples)\n": ""}, "of rank 0 alone"),
    "step after the group": (
        "lesson7",
        {
            "return timed(build(), warm_up, steps)": "step = build(); return timed(step, warm_up, steps)"
        },
        "still holds the step",
    ),
    "a point too few": (
        "lesson7",
        {"parts.append(f'<circle": "workers == base or parts.append(f'<circle"},
        "drew 2 circles",
    ),
    "line to 1": ("lesson7", {"place(most, most / base)": "place(most, most)"}, "No line shows"),
    "closed without finally": (
        "capstone",
        {
            "        return losses\n    finally:": """        dist.destroy_process_group()
        return losses
    finally:""",
            "    finally:\n        dist.destroy_process_group()": "    finally:\n        pass",
        },
        "left the process group open after an exception",
    ),
    "one order": ("capstone", {"len(dataset), epoch)": "len(dataset), 0)"}, "the same order"),
    "no broadcast": (
        "capstone",
        {"dist.broadcast(tensor, src=0)": "pass"},
        "weights of rank 1 differ",
    ),
    "no division": ("capstone", {"parameter.grad /= len(step)": "pass"}, "did not divide"),
    "by the ranks": ("capstone", {"/= len(step)": "/= world_size"}, "the number of ranks"),
    "means of ranks": (
        "capstone",
        {
            'reduction="sum")\n    loss.backward()': """reduction="sum")
    (loss / len(indices)).backward()""",
            "/= len(step)": "/= world_size",
        },
        "averaged the means of the ranks",
    ),
    "no split": (
        "capstone",
        {"step[rank::world_size]": "step"},
        "every rank trained on all samples",
    ),
    "own loss": ("capstone", {"dist.all_reduce(total)": "pass"}, "losses of all ranks"),
    "on rank 0 only": (
        "capstone",
        {"dist.all_reduce(total)": "rank or dist.all_reduce(total)"},
        "one would wait for the other",
    ),
    "last step dropped": (
        "capstone",
        {"range(0, len(indices), global_batch)": "range(0, len(indices) - global_batch + 1, 8)"},
        "short last step",
    ),
    "last loss": (
        "capstone",
        {"total += backward": "total = backward"},
        "The means over all samples",
    ),
    "trainer: no broadcast": (
        "trainer_naive",
        {"dist.broadcast(tensor, src=0)": "pass"},
        "Are all of them broadcast",
    ),
    "trainer: no buffers": (
        "trainer_naive",
        {"self.model.state_dict().values()": "[p.data for p in self.model.parameters()]"},
        "weights or buffers of rank 1 differ",
    ),
    "trainer: no zeros": (
        "trainer_naive",
        {
            "                parameter.grad = torch.zeros_like(parameter)\n            dist": """
                continue
            dist""",
            "            parameter.grad /= total": """
            if parameter.grad is not None:
                parameter.grad /= total""",
        },
        "calls all_reduce of 18 numbers, and rank 1 calls all_reduce of 24 numbers",
    ),
    "trainer: no division": (
        "trainer_naive",
        {"parameter.grad /= total": "pass"},
        "did not divide",
    ),
    "trainer: by the ranks": (
        "trainer_naive",
        {"/= total": "/= dist.get_world_size()"},
        "the number of ranks",
    ),
    "trainer: own samples": (
        "trainer_naive",
        {"dist.all_reduce(total)": "dist.broadcast(total, src=0)"},
        "the samples of rank 0",
    ),
    "trainer: first to last": (
        "trainer_buckets",
        {"reversed(self.parameters)": "self.parameters"},
        "From the last parameter to the first",
    ),
    "trainer: full buckets only": (
        "trainer_buckets",
        {
            "            room -= parameter.nbytes\n": """            room -= parameter.nbytes
        if room > 0:
            self.buckets.pop()
"""
        },
        "the sizes of `buckets`",
    ),
    "trainer: waits in the hook": (
        "trainer_overlap",
        {
            "self.sent.append((dist.all_reduce(flat, async_op=True), flat))": """
        dist.all_reduce(flat)
        self.sent.append((None, flat))""",
            "            handle.wait()": "            pass",
        },
        "the backward pass waits for a sum",
    ),
    "trainer: after the backward": (
        "trainer_overlap",
        {"parameter.register_post_accumulate_grad_hook(partial(self.arrived, number))": "pass"},
        "0 of 3 buckets were sent",
    ),
    "trainer: the first step only": (
        "trainer_overlap",
        {
            """        self.missing = [len(bucket) for bucket in self.buckets]
        return""": "        return"
        },
        "of 3 buckets were sent when the second",
    ),
    "trainer: as they arrive": (
        "trainer_overlap",
        {
            """        while len(self.sent) < len(self.buckets) and self.missing[len(self.sent)] == 0:
            self.send()""": """        if self.missing[number] == 0:
            flat = take_gradients(self.buckets[number])
            self.sent.append((dist.all_reduce(flat, async_op=True), flat))"""
        },
        "one would wait for the other",
    ),
    "trainer: samples before what is left": (
        "trainer_overlap",
        {
            "        self.sum_gradients()\n        total = ": "        total = ",
            "        dist.all_reduce(total)\n": """        dist.all_reduce(total)
        self.sum_gradients()
""",
        },
        "in the same order",
    ),
    "trainer: no momentum in the file": (
        "trainer_resumable",
        {
            '        self.optimizer.load_state_dict(state["optimizer"])\n\n    def save': "\n    def save"
        },
        "optimizer's state",
    ),
    "trainer: straight to its name": (
        "trainer_resumable",
        {'path.with_name(path.name + ".new")': "path"},
        "gone or damaged",
    ),
    "trainer: one rank gathers": (
        "trainer_sharded",
        {
            '        state = {"step": step, **self.state()}\n': "",
            "            new = path.with": """            state = {"step": step, **self.state()}
            new = path.with""",
        },
        "Rank 0 calls all_gather of .* numbers, and rank 1 calls barrier",
    ),
    "trainer: a file too many": (
        "trainer_resumable",
        {
            "            new.replace(path)": """
            path.write_bytes(new.read_bytes())"""
        },
        "folder of the checkpoint holds",
    ),
    "trainer: all states": (
        "trainer_sharded",
        {
            "            parameter.grad = part\n": """            parameter.grad = part
            self.optimizer.state[parameter]["kept"] = torch.zeros(99)
"""
        },
        "its own parts only",
    ),
    "trainer: an average a step": (
        "trainer_local_steps",
        {"self.steps % self.every == 0": "True"},
        "had 3 messages",
    ),
    "trainer: sum of weights": (
        "trainer_local_steps",
        {"mean = flat / dist.get_world_size()": "mean = flat"},
        "has other weights",
    ),
}
"""Wrong attempts: the lesson, what differs from its solution, and what the grader says."""


@pytest.mark.parametrize("attempt", WRONG)
def test_the_grader_names_the_mistake(
    attempt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(COURSE))
    monkeypatch.syspath_prepend(str(tmp_path))
    from grading import Wrong, grade

    lesson, changes, sentence = WRONG[attempt]
    file = f"{lesson.partition('_')[0]}.py"
    text = (COURSE / "solutions" / file).read_text()
    for right, wrong in changes.items():
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    folder = f"attempt_{[*WRONG].index(attempt)}"
    (tmp_path / folder).mkdir()
    (tmp_path / folder / file).write_text(text)
    with pytest.raises(Wrong, match=sentence):
        grade(folder, lesson)


_MEASURED = re.compile(
    r"^\$ python docs/course/measure\.py (.*--solutions.*)\n((?:.+\n)*?)```", re.MULTILINE
)


def counts(table: str) -> list[list[str]]:
    """Stage, messages and bytes of each row: what does not depend on the machine."""
    return [line.split()[:3] for line in table.splitlines()[1:]]


def test_the_measured_tables_of_the_trainer(tmp_path: Path) -> None:
    """In a copy, because the table is kept beside the lessons."""
    copied = shutil.copytree(COURSE, tmp_path / "course", ignore=shutil.ignore_patterns("*.json"))
    text = "".join(page.read_text(encoding="utf-8") for page in LESSONS)
    commands = _MEASURED.findall(text)
    assert len(commands) == 3
    for arguments, printed in commands:
        command = [sys.executable, str(copied / "measure.py"), *arguments.split()]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        assert counts(found.stdout) == counts(printed)
        assert len(found.stdout.splitlines()[1].split()) == 7


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, "docs/course/exercises/trainer.py, stage naive, is not solved yet."),
        ({"dist.all_reduce(parameter.grad)": "pass"}, "the weights of the two ranks differ"),
    ],
    ids=["not solved", "wrong"],
)
def test_what_cannot_be_measured(tmp_path: Path, change: dict[str, str], sentence: str) -> None:
    copied = shutil.copytree(COURSE, tmp_path / "course", ignore=shutil.ignore_patterns("*.json"))
    for right, wrong in change.items():
        solution = (COURSE / "solutions" / "trainer.py").read_text()
        assert solution.count(right) == 1
        (copied / "exercises" / "trainer.py").write_text(solution.replace(right, wrong))
    command = [sys.executable, str(copied / "measure.py"), "naive", "--task", "digits"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr


BUGS = {
    "bug1": "weights are not those that one process trains",
    "bug2": "ends with other weights than rank 0",
    "bug3": "have the same order",
    "bug4": "have the same order",
    "bug5": "fails on 3 ranks|unequal numbers of steps|samples",
    "bug6": "fails on 3 ranks",
    "bug7": "fails on 3 ranks",
    "bug8": "lint. still names a mistake",
    "bug9": "reports the loss",
    "bug10": "ends with other weights than rank 0",
    "bug11": "lint. still names a mistake",
    "bug12": "fails on 3 ranks",
}
"""What the grader says of each script of the bug hunt."""


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_hunt_tells_a_mended_script_from_the_wrong_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(COURSE))
    from grading import Wrong, grade

    grade("solutions", name)
    with pytest.raises(Wrong, match=BUGS[name]):
        grade("exercises", name)


def test_the_page_says_what_lint_finds() -> None:
    page = (COURSE / "bugs.md").read_text(encoding="utf-8")
    for name in BUGS:
        found = re.search(rf"^\| {name} \| (.*?) \|", page, re.MULTILINE)
        assert found
        script = str(COURSE / "exercises" / "bugs" / f"{name}.py")
        linted = subprocess.run(
            [sys.executable, "-m", "lockstep", "lint", script], capture_output=True, text=True
        )
        codes = re.findall(r"^\S+: ([\w-]+):", linted.stdout, re.MULTILINE)
        assert codes == re.findall(r"`(.*?)`", found[1]), name


def test_a_student_grades_one_lesson() -> None:
    """As the pages say. Lesson 1 is not lesson 10 too."""
    command = [sys.executable, "-m", "pytest", str(COURSE), "-q", "-k", "lesson1"]
    running = [
        subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        for options in (["--solutions"], [])
    ]
    solved, unsolved = (each.communicate()[0] for each in running)
    assert "1 passed" in solved, solved
    assert "1 failed" in unsolved, unsolved
    assert "docs/course/exercises/lesson1.py is not solved yet." in unsolved
    assert [each.returncode for each in running] == [0, 1]
