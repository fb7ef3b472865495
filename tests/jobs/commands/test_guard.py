# SPDX-License-Identifier: Apache-2.0
"""The filter of the kernel, behind which scripts are read."""

import re
import struct
from pathlib import Path

import pytest

from megatron_ttrace.jobs.commands import guard

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_the_numbers_of_system_calls(machine):
    """Are the kernel's, on both processors; a call that one lacks is not allowed there."""
    if not HEADERS[machine].is_file():
        pytest.skip("the kernel's headers are not installed")
    lines = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    numbers = {name: int(number) for name, number in lines}
    # The generic table has the name that 32-bit machines use.
    numbers.setdefault("newfstatat", numbers.get("fstatat", ""))
    column = guard._MACHINES[machine][1]
    for name, row in guard._CALLS.items():
        assert row[column] == numbers.get(name), name


@pytest.mark.parametrize("machine", HEADERS)
@pytest.mark.parametrize(
    ("call", "arguments", "verdict"),
    [
        ("read", (), "allow"),
        ("openat", (), "notify"),
        ("execve", (), "notify"),
        ("kill", (), 0),
        ("fcntl", (0, 1), "allow"),
        ("fcntl", (0, 8), 22),
        ("clone", (0x01200011,), "allow"),
        ("clone", (0x10000011,), 1),
        ("prlimit64", (1,), 1),
        ("another", (), 38),
    ],
)
def test_the_verdict_on_a_system_call(machine, call, arguments, verdict):
    """The filter, interpreted as the kernel does; what it does not list is an error."""
    audit, column = guard._MACHINES[machine]
    number = guard._CALLS[call][column] if call in guard._CALLS else 425
    values = [*arguments, *[0] * (6 - len(arguments))]
    answer = interpret(guard._filter(machine), struct.pack("=iIQ6Q", number, audit, 0, *values))
    names = {guard._ALLOW: "allow", guard._NOTIFY: "notify"}
    assert names.get(answer, answer ^ guard._ERROR) == verdict
    assert interpret(guard._filter(machine), struct.pack("=iIQ6Q", 0, 3, 0, *values)) == guard._KILL


def interpret(program, data):
    """The four instructions of classic BPF that the filter has."""
    code = list(struct.iter_unpack("=HBBI", program))
    at, value = 0, 0
    while True:
        kind, yes, no, number = code[at]
        at += 1
        if kind == guard._RETURN:
            return number
        if kind == guard._LOAD:
            (value,) = struct.unpack_from("=I", data, number)
        elif kind == guard._EQUAL:
            at += yes if value == number else no
        else:
            at += yes if value & number else no
