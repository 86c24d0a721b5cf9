"""The runner of a page's code blocks: what it runs, and what its errors say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs.pages import PageFailed, blocks, not_run, run_page

pytestmark = pytest.mark.rest

GOOD = """# A page

```python
# src/mine.py
VALUE = 41
```

```ini
; mine.cfg
[a]
b = 1
```

```python
import sys; sys.path.insert(0, "src")
from mine import VALUE
print("in Python", VALUE)
```

```text
in Python ...
```

Words between.

```text
a drawing, which is no output
```

```python
print(VALUE + 1)
import os; os.system("echo of a child")
```

```text
42
of a child
```

```sh
test $(grep -c b mine.cfg) = 1
echo not shown
```

```diff
- a
+ b
```

```console
$ echo one; echo two >&2
one
two
$ printf '%s\\n' a 12.5 \\
  b c d
a
...5
...
d
$ false
$ echo $?
1
```

<!-- not run: it needs a cluster -->

```sh
false
```

```console
$ true
```
"""


def written(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_each_kind_of_block(tmp_path: Path) -> None:
    page, folder = written(tmp_path, GOOD), tmp_path / "empty"
    folder.mkdir()
    run_page(page, folder)
    assert sorted(os.listdir(folder)) == ["mine.cfg", "src"]
    assert not_run(page) == [("page.md", "it needs a cluster")]
    assert [block.line for block in blocks(page)][:3] == [3, 8, 14]


ERRORS = [
    ("```console\n$ echo 1\n2\n```", ["page.md:2: $ echo 1", "- 2\n", "+ 1"]),
    ("```console\n$ true\n$ exit 3\n$ true\n```", ["page.md:3: $ exit 3", "exit code 3"]),
    ("```console\n$ exit 3\n$ echo $?\n4\n```", ["page.md:3", "- 4\n", "+ 3"]),
    ("```console\n$ printf 'a\\nb\\nc\\n'\na\n...\nd\n```", ["page.md:2", "- d"]),
    ("```console\necho 1\n```", ["page.md:1", "begins with"]),
    ("\n```sh\necho a\nfalse\necho b\n```", ["page.md:2: exit code 1\na\n"]),
    ("```python\n\n1 / 0\n```", ["page.md:1: it failed", "page.md", "line 3", "1 / 0"]),
    ("```python\n1\n```\n```text\n2\n```", ["page.md:4: the block before", "- 2"]),
    ("```python\nprint(1)\n```\n\n```text\n2\n```", ["page.md:5: the block before", "+ 1"]),
    ("```yaml\na: 1\n```", ["page.md:1", "yaml"]),
    ("```sh\ntrue\n", ["page.md:1: the block has no end"]),
]


def test_what_an_error_says(tmp_path: Path) -> None:
    for number, (text, expected) in enumerate(ERRORS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(PageFailed) as failed:
            run_page(written(tmp_path, text), folder)
        assert [words for words in expected if words not in str(failed.value)] == [], text


def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    page = written(tmp_path, "```console\n$ echo begun; sleep infinity\n```")
    with pytest.raises(PageFailed, match=r"page.md:2: not ended after 0.5 s\nbegun"):
        run_page(page, folder, seconds=0.5)
