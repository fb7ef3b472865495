# SPDX-License-Identifier: Apache-2.0
"""The rules for imports between rooms; each with a sample that breaks it.

The rooms and what belongs in them: docs/architecture.md.
"""

import ast
import functools
import graphlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import megatron_ttrace
from megatron_ttrace.mcore.sources import megatron_folder

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_ttrace"

ROOMS = (
    "placement",
    "trace",
    "cpu",
    "mcore",
    "jobs",
    "capture",
    "compare",
    "diagnose",
    "report",
    "saved",
    "run",
    "evaluation",
    "cli",
    *(DOORS := ("bridge", "__main__")),
)
"""A room imports from rooms above it in this list; the last are no rooms: users come in there."""

NEUTRAL = ("placement", "trace", "compare", "diagnose", "report")
"""Rooms that neither import Megatron nor know what its classes and modules are called."""

Modules = Mapping[str, str]
"""Dotted module name without the package -> source; ``""`` is the package's ``__init__``."""


parse = functools.cache(ast.parse)


@functools.cache
def modules() -> dict[str, str]:
    """The package as it is committed."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        words = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        found[".".join(words).removesuffix("__init__").rstrip(".")] = path.read_text()
    return found


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a source."""
    return tuple(ast.walk(parse(source)))


def room_of(module: str) -> str:
    """The first part of a module's name; the package itself has none."""
    return module.split(".")[0]


def imported(source: str) -> Iterator[str]:
    """Dotted names of everything that a source imports, in functions too."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(source: str, known: Modules) -> Iterator[str]:
    """Our modules among these."""
    for name in imported(source):
        top, _, rest = name.partition(".")
        if top == PACKAGE:
            yield rest if rest in known else rest.rpartition(".")[0]


def arrows(known: Modules) -> set[tuple[str, str]]:
    """(importing module, imported module)."""
    return {(name, target) for name, text in known.items() for target in imports_of(text, known)}


def unknown_rooms(known: Modules) -> list[str]:
    return [name for name in known if name and room_of(name) not in ROOMS]


def upwards(known: Modules) -> list[str]:
    """Rooms import only from rooms above them in the list."""
    return [
        f"{name} -> {target}"
        for name, target in sorted(arrows(known))
        if name and target and ROOMS.index(room_of(target)) > ROOMS.index(room_of(name))
    ]


FEW = {
    "report": {"trace"},
    "compare": {"placement", "trace", "mcore.roles"},
    "bridge": {"run"},
    "__main__": {"cli"},
}


def few_imports(known: Modules) -> list[str]:
    """Renderers get records, ``compare`` asks what names mean, and doors lead to one room."""
    return [
        f"{name} -> {target}"
        for name, target in sorted(arrows(known))
        if (few := FEW.get(room_of(name))) and {target, room_of(target)}.isdisjoint(few)
        if room_of(target) != room_of(name)
    ]


def circles(known: Modules) -> list[str]:
    """There are no import cycles; the first is named."""
    graph: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for name, target in arrows(known):
        # A package's own __init__ is imported with whatever is in it.
        if target in known and target != name and name:
            graph.add(name, target)
    try:
        graph.prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def commands_in_one_room(known: Modules) -> list[str]:
    """Modules of commands, with ``configure``, are in ``cli/``."""
    return [
        name
        for name, text in known.items()
        if room_of(name) != "cli"
        and any(
            isinstance(node, ast.FunctionDef) and node.name == "configure"
            for node in parse(text).body
        )
    ]


FOREIGN = {"megatron", "transformer_engine", "transformer_engine_torch", "apex"}


def neutral_imports(known: Modules) -> list[str]:
    """A neutral room imports neither Megatron nor TransformerEngine or Apex."""
    return [
        f"{name} imports {other}"
        for name, text in known.items()
        if room_of(name) in NEUTRAL
        for other in imported(text)
        if other.split(".")[0] in FOREIGN
    ]


MODULE_NAMES = re.compile(
    r"(?<!\w)(linear_(?:fc[12]|qkv|proj|q|kv)|(?:core|self|cross)_attention|\w*layernorm"
    r"|word_embeddings|output_layer|local_experts|token_dispatcher|megatron[./](?:core|training))"
    r"(?!\w)|(?<=[.|(])(experts|mlp|router|decoder)(?=\\?\.)|^(decoder|embedding)(?=\\?\.)"
)
"""What Megatron calls the parts of its models, and where its files are."""


def megatron_classes() -> frozenset[str]:
    """Names of Megatron's classes that are unambiguous."""
    root = Path(megatron_folder(), "core")
    pattern = re.compile(r"^class (\w+)", re.MULTILINE)
    return frozenset(
        name
        for path in root.rglob("*.py")
        for name in pattern.findall(path.read_text(encoding="utf-8"))
        if sum(letter.isupper() for letter in name) >= 3
    )


def strings(source: str) -> Iterator[str]:
    """The string constants of a source, without docstrings."""
    prose = {
        id(node.value)
        for node in nodes(source)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in nodes(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def neutral_names(known: Modules, classes: frozenset[str]) -> dict[str, set[str]]:
    """Megatron's names in strings of neutral rooms."""
    found: dict[str, set[str]] = {}
    for name, text in known.items():
        if room_of(name) not in NEUTRAL:
            continue
        for constant in strings(text):
            hits = {match[0] for match in MODULE_NAMES.finditer(constant)}
            hits |= classes.intersection(re.findall(r"\w+", constant))
            if hits:
                found.setdefault(name, set()).update(hits)
    return found


def front_door_is_for_users(known: Modules) -> list[str]:
    """No room imports the public names from the package: that would bypass the order of rooms."""
    found = []
    for name, text in known.items():
        asked: set[str] = set()
        for node in nodes(text):
            if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
                asked |= {alias.name for alias in node.names} - known.keys()
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == PACKAGE:
                asked.add(node.attr)
        found += [f"{name} asks for {one}" for one in sorted(asked)]
    return found


_CHANGES = frozenset(
    {
        *("rmtree", "unlink", "rmdir", "removedirs", "rename", "renames", "move", "ftruncate"),
        *("truncate", "symlink", "symlink_to", "hardlink_to", "mkstemp", "copytree", "copyfile"),
        *("write_text", "write_bytes", "touch"),
    }
)
_BY_OS = frozenset({"remove", "replace", "link"})
"""Functions of ``os``; other classes have methods of these names."""
_TEMPORARY = {"evaluation.recipes.collect": {"symlink_to"}}
"""In a directory of ``tempfile.TemporaryDirectory``."""


def files_change_in_one_module(known: Modules) -> list[str]:
    """Only ``trace/owned.py`` creates, replaces and removes files: it knows whose they are."""
    found = []
    for name, text in known.items():
        # What a shell script would write goes to temporary files (jobs/commands/shell_script.py).
        if name in ("trace.owned", "trace.manifests", "jobs.commands.shell_script"):
            continue
        for node in nodes(text):
            if isinstance(node, ast.Attribute):
                own = ast.unparse(node.value)
                changes = node.attr in _CHANGES - _TEMPORARY.get(name, set()) and own != "owned"
                if changes or (own == "os" and node.attr in {*_BY_OS, "O_TRUNC", "O_CREAT"}):
                    found.append(f"{name}: {own}.{node.attr}")
            if isinstance(node, ast.Call) and _opens_for_writing(node):
                found.append(f"{name}: {ast.unparse(node)[:60]}")
    return found


def _opens_for_writing(call: ast.Call) -> bool:
    """``path.open("w")``, and ``open(path, "w")`` unless of a descriptor that was opened before."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "open":
        modes = call.args[:1]
    elif isinstance(call.func, ast.Name) and call.func.id == "open":
        first = call.args[0]
        descriptor = isinstance(first, ast.Call) or isinstance(getattr(first, "value", 0), int)
        modes = [] if descriptor and not isinstance(first, ast.Name) else call.args[1:2]
    else:
        return False
    modes += [word.value for word in call.keywords if word.arg == "mode"]
    return any(
        isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+") for mode in modes
    )


def namespaces_are_of_commands(known: Modules) -> list[str]:
    """``argparse.Namespace`` is for commands: what a user asked for is a ``Settings``."""
    return [
        name
        for name, text in known.items()
        if room_of(name) not in ("cli", "__main__")
        and any(
            getattr(node, "attr", getattr(node, "name", "")) == "Namespace" for node in nodes(text)
        )
    ]


ARROWS = 48
"""Pairs of rooms of which one imports the other. It only falls."""


def room_arrows(known: Modules) -> set[tuple[str, str]]:
    """(importing room, imported room); the package's ``__init__`` only imports."""
    pairs = {(room_of(name), room_of(target)) for name, target in arrows(known) if target}
    return {pair for pair in pairs if len(set(pair)) == 2 and pair[0] != "bridge"}


LONG_CALLS = 23
"""Calls with more than 5 unnamed arguments; ``cpu/`` has others' signatures. It only falls."""


def long_calls(known: Modules) -> list[str]:
    """Calls with more positional arguments than a reader can tell apart."""
    return [
        f"{name}:{node.lineno}: {ast.unparse(node.func)} has {len(node.args)}"
        for name, text in known.items()
        if room_of(name) != "cpu"
        for node in nodes(text)
        if isinstance(node, ast.Call) and len(node.args) > 5
    ]


def test_room_arrows() -> None:
    """Rooms stay as independent as they are."""
    assert len(room_arrows(modules())) == ARROWS, "no more; of fewer, note the number"


def test_long_calls() -> None:
    """Name the arguments of a call that has many; lower ``LONG_CALLS`` when there are fewer."""
    assert len(long_calls({"a": "f(1, 2, 3, 4, 5)\ng(1, 2, 3, 4, 5, 6)\n"})) == 1
    assert len(long_calls(modules())) <= LONG_CALLS, "\n".join(long_calls(modules()))


RULES = [
    namespaces_are_of_commands,
    files_change_in_one_module,
    front_door_is_for_users,
    unknown_rooms,
    upwards,
    few_imports,
    circles,
    commands_in_one_room,
    neutral_imports,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule) -> None:
    """The package keeps the rule."""
    known = modules()
    assert len(known) > 100
    assert not rule(known)


BROKEN = [
    (namespaces_are_of_commands, {"mcore.a": "import argparse\nargparse.Namespace(ttrace=1)\n"}),
    (namespaces_are_of_commands, {"run.a": "from argparse import Namespace\n"}),
    (files_change_in_one_module, {"trace.a": "import shutil\nshutil.rmtree('a')\n"}),
    (files_change_in_one_module, {"trace.a": "def f(path):\n    path.unlink()\n"}),
    (files_change_in_one_module, {"trace.a": "import os\nos.replace('a', 'b')\n"}),
    (files_change_in_one_module, {"trace.a": "open('a', 'w')\n"}),
    (files_change_in_one_module, {"trace.a": "def f(path):\n    path.open('ab')\n"}),
    (front_door_is_for_users, {"trace.a": "def f():\n    from megatron_ttrace import check\n"}),
    (front_door_is_for_users, {"trace.a": "import megatron_ttrace\nmegatron_ttrace.check('a')\n"}),
    (unknown_rooms, {"attic.box": ""}),
    (upwards, {"trace.a": "from megatron_ttrace.compare import b\n", "compare.b": ""}),
    (upwards, {"trace.a": "def f():\n    import megatron_ttrace.cli.b\n", "cli.b": ""}),
    (upwards, {"trace.a": "from megatron_ttrace.run.b import c\n", "run.b": ""}),
    (upwards, {"run.a": "import megatron_ttrace.evaluation.b\n", "evaluation.b": ""}),
    (few_imports, {"compare.a": "from megatron_ttrace.mcore.b import c\n", "mcore.b": ""}),
    (few_imports, {"report.a": "from megatron_ttrace.placement import b\n", "placement.b": ""}),
    (
        circles,
        {
            "trace.a": "from megatron_ttrace.trace.b import x\n",
            "trace.b": "from megatron_ttrace.trace import c\n",
            "trace.c": "def f():\n    from megatron_ttrace.trace.a import y\n",
        },
    ),
    (commands_in_one_room, {"report.a": "def configure(parser):\n    pass\n"}),
    (neutral_imports, {"diagnose.a": "def f():\n    from megatron.core import b\n"}),
    (neutral_imports, {"compare.a": "import transformer_engine.pytorch as te\n"}),
]


@pytest.mark.parametrize(("rule", "sample"), BROKEN)
def test_rule_finds(rule, sample) -> None:
    """The rule can fail."""
    assert rule(sample)


def front_door(source: str) -> dict[str, set[str]]:
    """Our modules that the package imports: by function, by condition, and (``""``) at once."""
    known = {**modules(), "": source}
    found: dict[str, set[str]] = defaultdict(set)
    for node in parse(source).body:
        where = node.name if isinstance(node, ast.FunctionDef) else ""
        where = ast.unparse(node.test) if isinstance(node, ast.If) else where
        found[where].update(filter(None, imports_of(ast.unparse(node), known)))
    return {where: targets for where, targets in found.items() if targets}


def test_the_front_door() -> None:
    """The package imports what ``enable()`` needs, and its public names when they are used."""
    found = front_door(modules()[""])
    assert set(map(room_of, found.pop("enable"))) == {"run"}
    homes = {home.partition(".")[2] for home in megatron_ttrace._HOMES}
    assert found == {"TYPE_CHECKING": homes}
    assert {room_of(home) for home in homes} == {"trace", "saved", "run"}


def test_the_front_door_finds() -> None:
    source = "from megatron_ttrace.saved import api\ndef f():\n    import megatron_ttrace.cli.b\n"
    assert front_door(source) == {"": {"saved.api"}, "f": {"cli"}}


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def absent_files(text: str) -> list[str]:
    """Files that a text names but that do not exist."""
    named = re.findall(r"`((?:\w+/)*[\w.]+\.(?:py|j2|js|css))`", text)
    assert named
    return [one for one in named if not any((at / one).is_file() for at in (ROOT, ROOT / PACKAGE))]


def test_the_architecture_names_files_that_exist() -> None:
    """Each step of the paths names an existing file."""
    assert not absent_files(ARCHITECTURE)
    for way in ("A tensor, from", "An argument, from"):
        [section] = re.findall(rf"^## {way}.*?(?=^## )", ARCHITECTURE, re.MULTILINE | re.DOTALL)
        steps = re.findall(r"^\d\..*?(?=^\d\.|\Z)", section, re.MULTILINE | re.DOTALL)
        assert len(steps) >= 6
        assert not [step for step in steps if not re.search(r"`[\w/.]+\.py`", step)]


def test_the_architecture_lists_the_rooms() -> None:
    """Rooms are listed in the order of the rule."""
    rows = re.findall(r"^\| ((?:`[\w./]+`(?:, )?)+) \|", ARCHITECTURE, re.MULTILINE)
    listed = [
        name.rstrip("/").removesuffix(".py") for row in rows for name in row[1:-1].split("`, `")
    ]
    assert tuple(listed) == tuple(name for name in ROOMS if name not in DOORS)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CHANGELOG.md"])
def test_files_and_links_of_the_guides(name: str) -> None:
    """The files that they name and link to exist."""
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`((?:[\w-]+/)+[\w.-]*)`", text)
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert links
    at = (ROOT, ROOT / PACKAGE)
    assert not [one for one in [*named, *links] if not any((here / one).exists() for here in at)]


def test_absent_files_finds() -> None:
    """The rule can fail."""
    assert absent_files("`trace/attic.py` and `trace/store.py`") == ["trace/attic.py"]


def test_neutral_names() -> None:
    """No neutral room has names of Megatron's."""
    assert not neutral_names(modules(), megatron_classes())


@pytest.mark.parametrize(
    "sample",
    [
        'x = name.endswith("linear_fc1")\n',
        'x = re.compile(r"\\.experts\\.linear_fc1")\n',
        'x = type(m).__name__ == "TEColumnParallelLinear"\n',
        'x = "look at megatron/core/optimizer"\n',
        'x = f"{name}.self_attention"\n',
    ],
)
def test_neutral_names_finds(sample: str) -> None:
    """The rule can fail."""
    assert neutral_names({"compare.a": sample}, megatron_classes())
