"""User code named path/to/file.py:name: what is found, and a clear error for each mistake."""

import re
import sys
from pathlib import Path

import pytest

from postlude.user_code import UserCodeError, load_callable

FILE = """
from dataclasses import dataclass
from math import sqrt

@dataclass(frozen=True)
class Shift:
    by: float = 1.0
    def __call__(self, x):
        return x + self.by

def double(x):
    return 2 * x

limit = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def test_defined_and_imported_functions_and_classes_are_found(file: Path) -> None:
    assert load_callable(f"{file}:double")(4) == 8
    assert load_callable(f"{file}:Shift")(by=2.0)(1.0) == 3.0  # a dataclass looks its own module up
    assert load_callable(f"{file}:sqrt")(9.0) == 3.0


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("mine.py", r'"FOLDER/mine.py" names no reward. Write it as path/to/file.py:name.'),
        ("mine:double", r'"FOLDER/mine:double" names no reward. Write it as path/to/file.py:name.'),
        ("mime.py:double", "there is no file FOLDER/mime.py; did you mean FOLDER/mine.py?"),
        ("other.py:double", "there is no file FOLDER/other.py; the current directory is HERE."),
        ("mine.py:duoble", "FOLDER/mine.py has no duoble; did you mean double?"),
        ("mine.py:zzz", "FOLDER/mine.py has no zzz; it has Shift, double."),
        ("empty.py:zzz", "FOLDER/empty.py has no zzz; it defines nothing that can be called."),
        ("mine.py:limit", "limit in FOLDER/mine.py is of type int, which cannot be called. Name a reward."),
        ("divides.py:f", "FOLDER/divides.py cannot be run: ZeroDivisionError: division by zero (divides.py, line 2)"),
        ("imports.py:f", "FOLDER/imports.py cannot be run: ModuleNotFoundError: No module named 'nowhere_at_all' (imports.py, line 3)"),  # noqa: E501
        ("decodes.py:f", "FOLDER/decodes.py cannot be run: JSONDecodeError: Expecting value: line 1 column 1 (char 0) (decodes.py, line 2)"),  # noqa: E501
        ("colon.py:f", "FOLDER/colon.py cannot be run: SyntaxError: expected ':' (colon.py, line 2)"),
        ("leaves.py:f", "FOLDER/leaves.py cannot be run: SystemExit: 3 (leaves.py, line 1)"),
    ],
)  # fmt: skip
def test_code_or_weights_that_cannot_be_loaded_are_refused(file: Path, named: str, sentence: str) -> None:
    folder = file.parent
    for name, text in {
        "empty": "import math\n",
        "divides": "\n1 / 0",
        "imports": "import json\n\nfrom nowhere_at_all import f\n",
        "decodes": "import json\njson.loads('')\n",  # raised deep inside another file
        "colon": "\ndef f()\n    pass\n",
        "leaves": "raise SystemExit(3)",
    }.items():
        (folder / f"{name}.py").write_text(text)
    before = set(sys.modules)
    expected = re.escape(sentence.replace("FOLDER", str(folder)).replace("HERE", str(Path.cwd())))
    with pytest.raises(UserCodeError, match=f"^{expected}$"):
        load_callable(f"{folder}/{named}", kind="reward")
    remaining = {name for name in set(sys.modules) - before if name.startswith("postlude_user_code")}
    assert not remaining or named.startswith(("mine", "empty"))  # a file that failed is not kept as if it had run
