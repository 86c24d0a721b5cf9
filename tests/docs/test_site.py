"""The site builds without a warning, no link in it is dead, and its reference is complete."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import unescape
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.main import get_command

import lockstep
from lockstep.cli.app import COMMANDS, app
from lockstep.errors import catalog
from lockstep.testing import run_ranks
from lockstep.world.world import World

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_TARGET = re.compile(r'<(a|img|link|script)\b[^>]*?\b(?:href|src)="([^"]*)"')
_ANCHOR = re.compile(r'\b(?:id|name)="([^"]*)"')
_LINK = re.compile(r"\]\(([^()\s]+)\)")


@dataclass
class BuiltPage:
    links: list[str]
    anchors: set[str]
    text: str


@dataclass
class Site:
    folder: Path
    pages: Mapping[str, BuiltPage]
    """By path within the site, such as "guide/data.html"."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Built once, with any warning an error."""
    folder = tmp_path_factory.mktemp("site")
    options = ["-q", "-W", "-j", "2", "-d", folder / "read"]
    command = [sys.executable, "-m", "sphinx", *options, DOCS, folder]
    built = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return Site(folder, {str(file.relative_to(folder)): _read(file) for file in _html(folder)})


def _html(folder: Path) -> Iterator[Path]:
    yield from (file for file in folder.rglob("*.html") if "_static" not in file.parts)


def _read(file: Path) -> BuiltPage:
    text = file.read_text(encoding="utf-8")
    links = [unescape(to) for _, to in _TARGET.findall(text)]
    return BuiltPage(links, set(map(unescape, _ANCHOR.findall(text))), text)


def test_no_link_is_dead(site: Site) -> None:
    assert len(site.pages) > 100
    dead = [
        f"{name}: {link}"
        for name, page in site.pages.items()
        for link in dict.fromkeys(page.links)
        if not _leads_somewhere(site, name, link)
    ]
    assert not dead


def _leads_somewhere(site: Site, name: str, link: str) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True  # of another site
    file = (site.folder / name).parent / unquote(parts.path) if parts.path else site.folder / name
    file = file.resolve()
    if not file.is_file() or not file.is_relative_to(site.folder.resolve()):
        return False
    target = site.pages.get(str(file.relative_to(site.folder.resolve())))
    return target is None or not parts.fragment or unquote(parts.fragment) in target.anchors


def test_no_link_of_a_file_beside_docs_is_dead(site: Site) -> None:
    checked = 0
    for file in ROOT.glob("*.md"):
        for link in _LINK.findall(file.read_text(encoding="utf-8")):
            parts = urlsplit(link)
            if parts.scheme or not parts.path:
                continue
            target = (ROOT / parts.path).resolve()
            assert target.exists(), f"{file.name}: {link}"
            if parts.fragment and target.suffix == ".md" and target.is_relative_to(DOCS):
                page = str(target.relative_to(DOCS).with_suffix(".html"))
                assert parts.fragment in site.pages[page].anchors, f"{file.name}: {link}"
            checked += 1
    assert checked


@pytest.mark.parametrize("section", ["course", "how-to", "guide"])
def test_a_sections_pages_follow_one_another_as_its_readme_lists_them(
    site: Site, section: str
) -> None:
    text = (DOCS / section / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([a-z0-9-]+)\.md\)", text)
    order = ["README", *dict.fromkeys(links)]
    assert set(order) == {page.stem for page in (DOCS / section).glob("*.md")}
    for stem, following in pairwise(order):
        (link,) = re.findall(r'<link rel="next"[^>]*>', site.pages[f"{section}/{stem}.html"].text)
        assert f'href="{following}.html"' in link
    for name, page in site.pages.items():
        if name.startswith(f"{section}/"):
            assert 'rel="next"' in page.text, name
            assert 'rel="prev"' in page.text, name


# -- the reference ------------------------------------------------------------------------------


def test_every_public_name_has_an_entry(site: Site) -> None:
    anchors = {
        anchor
        for name, page in site.pages.items()
        if name.startswith("reference/python/")
        for anchor in page.anchors
    }
    modules = ("backend", "collectives", "errors", "runs", "testing", "timing")
    expected = {f"lockstep.{name}" for name in set(lockstep.__all__) - set(modules)}
    expected |= {f"module-lockstep.{name}" for name in modules}
    for name in lockstep.collectives.__all__:
        part = getattr(lockstep.collectives, name)
        prefix = "module-" if isinstance(part, ModuleType) else ""
        expected.add(f"{prefix}lockstep.collectives.{name}")
    expected |= {f"lockstep.testing.{name}" for name in lockstep.testing.__all__}
    expected |= {
        f"lockstep.errors.{name}"
        for name, found in vars(lockstep.errors).items()
        if isinstance(found, type) and found.__module__ == "lockstep.errors" and name[0] != "_"
    }
    assert not expected - anchors
    entries = {anchor.rpartition(".")[2] for anchor in anchors}
    for file in (ROOT / "src/lockstep/integrations").glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Lockstep"):
                assert node.name in entries


def test_every_parameter_is_documented(site: Site) -> None:
    missing, checked = [], 0
    for name, page in site.pages.items():
        if name.startswith("reference/python/"):
            for entry, parameters, described in _entries(page.text):
                missing += [f"{entry}: {each}" for each in parameters - described]
                checked += len(parameters)
    assert not missing
    assert checked > 300


def _entries(page: str) -> Iterator[tuple[str, set[str], set[str]]]:
    """Of a page's signatures: name, parameters, and those that the text below describes: in a
    list, or for a method at least in words.
    """
    for piece in page.split('<dl class="py ')[1:]:
        kind = piece[: piece.index('"')]
        signature, _, below = piece.partition("</dt>")
        anchor = re.search(r'id="([^"]+)"', signature)
        assert anchor is not None
        parameters = {
            each[1]
            for part in re.findall(r'<em class="sig-param">(.*?)</em>', signature, re.DOTALL)
            if (each := re.search(r'<span class="n"><span class="pre">(\w+)</span>', part))
        }
        listed = " ".join(re.findall(r"<strong>(.*?)</strong>", below))
        words = re.sub(r"<[^>]*>", " ", below) if kind == "method" else listed
        yield anchor[1], parameters, set(re.findall(r"\w+", words))


def commands() -> Iterator[tuple[str, Any]]:
    frame: Any = get_command(app)
    context = frame.make_context("lockstep", [], resilient_parsing=True)
    for name in COMMANDS:
        _, found, _ = frame.resolve_command(context, [name])
        yield f"lockstep {name}", found
        for below, each in getattr(found, "commands", {}).items():
            yield f"lockstep {name} {below}", each


def test_every_command_and_option_has_an_entry(site: Site) -> None:
    every = dict(commands())
    assert {"lockstep train", "lockstep show ring", "lockstep bench collectives"} <= every.keys()
    for name, command in every.items():
        page = site.pages[f"reference/commands/{name.split()[1]}.html"]
        assert name in page.text
        _, _, examples = (command.help or "").partition("\b")
        for line in examples.splitlines()[2:]:
            assert f"{line.strip()}\n" in unescape(page.text)
        for each in command.params:
            if each.param_type_name == "argument":
                assert (each.metavar or each.name.upper()) in unescape(page.text)
            elif each.name not in ("help", "help_all"):
                for flag in (*each.opts, *each.secondary_opts):
                    anchor = f"cmdoption-{name.replace(' ', '-')}-{flag.lstrip('-')}"
                    assert anchor in page.anchors


def test_every_error_code_has_an_anchor(site: Site) -> None:
    assert set(catalog()) <= site.pages["reference/errors.html"].anchors


def test_every_option_of_train_is_on_the_page_of_options(site: Site) -> None:
    page = site.pages["reference/options.html"].text
    for command_parameter in dict(commands())["lockstep train"].params:
        if command_parameter.param_type_name != "argument":
            for flag in command_parameter.opts:
                assert command_parameter.name in ("help", "help_all") or flag in page, flag


def test_the_reference_links_the_pages_that_a_build_writes(site: Site) -> None:
    links = site.pages["reference/README.html"].links
    assert {"options.html", "errors.html", "python/index.html", "commands/index.html"} <= set(links)


# -- the examples in docstrings -----------------------------------------------------------------

_ELSEWHERE = {  # what its example needs: run by another test
    "launch": "a function that new processes can import",
    "run_ranks": "a function that new processes can import",
    "benchmark_scaling": "half a minute",
    "rebuilt": "a run",
    "LockstepStrategy": "Lightning",
    "Batches": "a module of Lightning's",
    "LockstepTrainer": "transformers",
    "LockstepConfig": "a cluster",
}


def examples() -> Iterator[tuple[str, str]]:
    """Every example in a docstring of the package, by the name of what it belongs to."""
    for file in (ROOT / "src/lockstep").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "Example::" in text else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                told = f"{ast.get_docstring(node)}\n"
                for code in re.findall(r"^Example::\n\n((?:    .*\n|\n)+)", told, re.MULTILINE):
                    yield node.name, textwrap.dedent(code)


def test_examples_run(tmp_path: Path) -> None:
    found = dict(examples())
    assert {"Stepper", "Loader", "Task", "train", "init", "all_reduce"} <= found.keys()
    for name, code in found.items():
        compile(code, name, "exec")
    assert found.keys() >= _ELSEWHERE.keys()
    here = {name: code for name, code in found.items() if name not in _ELSEWHERE}
    assert run_ranks(_run, 1, (here, str(tmp_path))) == [{}]


def _run(world: World, codes: Mapping[str, str], folder: str) -> dict[str, str]:
    """What went wrong, by name."""
    os.chdir(folder)
    wrong = {}
    for name, code in codes.items():
        try:
            exec(compile(code, name, "exec"), _around(world))
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
        finally:
            lockstep.testing.no_faults()
    return wrong


def _around(world: World) -> dict[str, Any]:
    """The names that examples take for granted."""
    lockstep.seed(0)
    dataset = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    model = nn.Linear(4, 2)
    x, y = dataset[:8]
    loader = lockstep.Loader(dataset, global_batch=32, micro_batch=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_sum(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y, reduction="sum")

    task = lockstep.Task(
        model=lambda: nn.Linear(4, 2),
        train_data=dataset,
        loss=lambda output, batch: (
            F.cross_entropy(output, batch[1], reduction="sum"),
            len(output),
        ),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        global_batch=32,
        micro_batch=8,
    )
    names: dict[str, Any] = {"lockstep": lockstep, "torch": torch, "F": F, "DataLoader": DataLoader}
    names |= {"world": world, "Net": lambda: nn.Linear(4, 2), "model": model, "dataset": dataset}
    names |= {"test_data": dataset, "x": x, "y": y, "loader": loader, "optimizer": optimizer}
    names |= {"loss_sum": loss_sum, "task": task, "epoch": 0, "image": x}
    names |= {"augment": lambda image: image + torch.randn(4), "prepare": lambda download: "."}
    return {**names, "stepper": lockstep.Stepper(model, optimizer)}
