# SPDX-License-Identifier: Apache-2.0
"""A difference is divided into hunks that can be left out."""

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.jobs import hunks

LINES = st.lists(st.sampled_from(["a = 1\n", "b = 2\n", "\n", "# c\n", "d\x0c = 4\n"]), max_size=12)


def source(text):
    """A file, from an indented text."""
    return textwrap.dedent(text).lstrip("\n")


def grouped(good, bad):
    """The added lines of the groups of hunks of one file."""
    good, bad = {"a.py": source(good)}, {"a.py": source(bad)}
    splices = hunks.difference(good, bad)
    return [
        [line.strip() for number in group for line in splices[number].added]
        for group in hunks.groups(splices, good, bad)
    ]


@given(LINES, LINES, st.booleans())
def test_all_hunks_make_the_bad_file_and_none_the_good_one(old, new, ends):
    """Whatever the lines are; each hunk removes and adds what it says."""
    good, bad = "".join(old), "".join(new)[: None if ends else -1]
    splices = hunks.difference({"a.py": good}, {"a.py": bad})
    assert hunks.applied({"a.py": good}, splices).get("a.py", good) == bad
    old_lines, new_lines = good.split("\n"), bad.split("\n")
    for splice in splices:
        assert splice.removed or splice.added
        end = splice.start + len(splice.removed)
        assert "".join(splice.removed).split("\n")[0] in (*old_lines[splice.start : end], "")
        assert "".join(splice.added).split("\n")[0] in (*new_lines[splice.line - 1 :][:1], "")


def test_files_that_one_version_lacks():
    """Each is a hunk, which adds or removes it."""
    good, bad = {"old.py": "a = 1\n"}, {"new.py": "b = 1\n"}
    new, old = hunks.difference(good, bad)
    assert (new.file, new.is_whole, old.file, old.is_whole) == ("new.py", True, "old.py", True)
    assert hunks.applied(good, [new, old]) == {"new.py": "b = 1\n", "old.py": None}


def test_a_hunk_has_its_function_and_line():
    """Of the new file where lines were added, else of the old one; one hunk for each line."""
    good = source("""
        import a

        class C:
            def f(self):
                x = 1
                y = 2
                return x

        def g():
            z = 1
            return z
    """)
    bad = good.replace("x = 1", "x = 3").replace("y = 2", "y = 4").replace("    z = 1\n", "")
    splices = hunks.difference({"a.py": good}, {"a.py": bad})
    assert [(splice.function, splice.line) for splice in splices] == [
        ("C.f", 5),
        ("C.f", 6),
        ("g", 10),
    ]
    assert splices[0].removed == ("        x = 1\n",)
    assert splices[0].added == ("        x = 3\n",)


@pytest.mark.parametrize(
    ("bad", "is_code"),
    [
        ("def f():\n    # why\n    return '''\n\n'''\n", False),
        ("def f():\n\n\n    return '''\n\n'''\n", False),
        ("def f():\n    return '''\n\n\n'''\n", True),
        ("def f():\n    g()\n    return '''\n\n'''\n", True),
    ],
)
def test_comments_are_no_code(bad, is_code):
    """Neither are blank lines, except in texts."""
    good = "def f():\n    return '''\n\n'''\n"
    assert {splice.is_code for splice in hunks.difference({"a": good}, {"a": bad})} == {is_code}


FUNCTION = """
    def f(x, y):
        a = x + 1
        b = y * 2
        c = a - b
        return c
"""


@pytest.mark.parametrize(
    ("edits", "together"),
    [
        # Independent lines.
        ([("x + 1", "x + 2"), ("a - b", "a + b")], [["a = x + 2"], ["c = a + b"]]),
        # A renamed variable.
        ([("a =", "first ="), ("a - b", "first - b")], [["first = x + 1", "c = first - b"]]),
        # A moved statement: the other one is added before it, and removed after it.
        (
            [("        a = x + 1\n", ""), ("b = y * 2\n", "b = y * 2\n        a = x + 1\n")],
            [["b = y * 2"]],
        ),
        # A new function and its use.
        (
            [("def f", "def g(x):\n        return x\n\n    def f"), ("return c", "return g(c)")],
            [["def g(x):", "return x", "", "return g(c)"]],
        ),
        # A new parameter and what uses it; the other line has nothing to do with it.
        (
            [("f(x, y)", "f(x, y, z=1)"), ("y * 2", "y * z"), ("a - b", "b - a")],
            [["def f(x, y, z=1):", "b = y * z"], ["c = b - a"]],
        ),
    ],
)
def test_hunks_that_depend_on_each_other(edits, together):
    """They are in one group."""
    bad = FUNCTION
    for before, after in edits:
        assert before in bad
        bad = bad.replace(before, after, 1)
    assert grouped(FUNCTION, bad) == together


def test_a_statement_on_several_lines_is_not_divided():
    """Nor is the header of a compound statement."""
    good = "f(\n    1,\n    2,\n    3,\n)\nif (\n    a\n    and b\n):\n    c()\n"
    bad = good.replace("1", "4").replace("3", "5").replace("a\n", "d\n").replace("and b", "or b")
    groups = grouped(good, bad)
    assert groups == [["4,", "5,"], ["d", "or b"]]


def test_names_across_files():
    """A new module, its import and its use are one group; other changes are not part of it."""
    good = {"a.py": "x = 1\ny = 2\n", "b.py": "z = 3\n"}
    bad = {
        "a.py": "import new\n\nx = new.f()\ny = 5\n",
        "new.py": "def f(): ...\n",
        "b.py": "z = 4\n",
    }
    splices = hunks.difference(good, bad)
    sets = [{splices[n].file for n in group} for group in hunks.groups(splices, good, bad)]
    assert {"a.py", "new.py"} in sets
    assert {"b.py"} in sets


@pytest.mark.parametrize("text", ["if x:\n", "x = '\0'\n"])
def test_what_is_no_program(text):
    """Is recognised without running it."""
    assert hunks.broken({"a.py": text}, {"a.py": ""}, {"a.py": text}) == "a.py would not compile"


def test_names_that_are_not_there():
    """A new function or file is needed where it is used; what was unknown before does not count."""
    good = {"m/a.py": "def f(x):\n    y = x\n    return y + odd\n"}
    bad = {
        "m/a.py": "from m.new import g, h\n\n\ndef f(x):\n    y = g(k(x))\n    return y + odd\n"
        "\n\ndef k(x):\n    return x\n",
        "m/new.py": "def g(x):\n    return x\n\n\ndef h(x):\n    return x\n",
    }
    splices = hunks.difference(good, bad)
    numbers = range(len(splices))
    (imports,) = (n for n in numbers if "import g" in "".join(splices[n].added))
    (defines,) = (n for n in numbers if "def k" in "".join(splices[n].added))
    (new,) = (n for n in numbers if splices[n].file == "m/new.py")

    def why(*left_out):
        some = hunks.applied(good, (splices[n] for n in numbers if n not in left_out))
        return hunks.broken(some, good, bad)

    assert why() == why(*numbers) == ""
    assert why(imports) == "m/a.py would use g, which is not defined"
    assert why(defines) == "m/a.py would use k, which is not defined"
    assert why(new) == "m/a.py would import g from m/new.py, which lacks it"
    assert why(*({*numbers} - {new})) == why(*({*numbers} - {defines})) == ""


def test_names_that_may_be_there():
    """From a module that is imported as a whole, or by other means: nothing is known of them."""
    good = {"a.py": "", "m/__init__.py": "x = 1\n"}
    bad = {
        "a.py": "from os import *\nfrom m import sub, x\nprint(path, __file__)\n"
        "def f():\n    global late\n    late = [x for x in ()]\n    return late, x\n",
        "m/__init__.py": "x = 2\n",
    }
    some = {"a.py": bad["a.py"]}
    assert hunks.broken(some, good, bad) == ""
