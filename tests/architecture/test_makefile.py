"""The Makefile requires only GNU make 3.81 and POSIX tools, which macOS has: no newer functions, options or escapes."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Allowed options, from POSIX.1-2024; tools without a row are not in POSIX. For find, see FIND.
OPTIONS = {
    "awk": "Ffv", "cat": "u", "cd": "LP", "chmod": "R", "command": "vVp", "cp": "fipPRHL", "cut": "bcdfns", "date": "u",
    "dirname": "", "echo": "", "env": "iu", "exec": "", "exit": "", "expand": "t", "export": "p", "false": "",
    "find": "HL", "grep": "EFclqefinsvx", "head": "cn", "kill": "ls", "ln": "fsLP", "ls": "aldtr1", "mkdir": "mp",
    "mv": "fi", "printf": "", "pwd": "LP", "readlink": "n", "realpath": "eE", "rm": "dfiRrv", "rmdir": "p",
    "sed": "Enef", "set": "euvxn",
    "shift": "", "sleep": "", "sort": "bcdfikmnortu", "tail": "cfnr", "tee": "ai", "test": None, "touch": "acdhmrt",
    "tr": "cCds", "trap": "", "true": "", "umask": "S", "uname": "amnrsv", "unset": "fv", "wait": "", "wc": "cmlw",
    "xargs": "0EILnpstx", ":": "", "[": None,
}  # fmt: skip
OTHERS = {"git", "npm"}  # tools with the same options on all systems
FIND = {"type", "name", "path", "o", "a", "print", "print0", "exec", "prune", "newer", "perm", "size", "user", "depth"}
WORDS = {"if", "then", "else", "elif", "fi", "while", "do", "done", "{", "}", "!"}  # shell keywords around commands
PLACEHOLDER = "made-elsewhere"  # replaces variables and functions of make

NEWER_MAKE = {
    r"(?m)^[\w-]+\s*!=": "!=", "::=": "::=", r"\$\((file|guile|let|intcmp) ": "a function",
    r"(?m)^\.ONESHELL": ".ONESHELL",
    r"(?m)^(undefine|load|private) ": "a directive", r"(?m)^define .*=": "define with =", r"(?m)^[^\t#\n]*&:": "&:",
    r"(?m)^\.(EXTRA_PREREQS|NOTINTERMEDIATE)": "a special target", r"\$\(\.SHELLSTATUS\)": ".SHELLSTATUS",
}  # fmt: skip
NOT_OF_SH = {r"<\(": "<(", r"\$'": "$'", "&>": "&>", r"\bsource ": "source", r"<<<": "<<<"}


def scripts(makefile: str) -> Iterator[str]:
    """Yield the shell scripts of a Makefile: recipe lines and arguments of $(shell)."""
    joined = re.sub(r"\\\n\s*", " ", makefile)
    for line in joined.splitlines():
        if line.startswith("\t"):
            yield expanded(line.lstrip("\t@-+"))
        yield from map(expanded, re.findall(r"\$\(shell (.*)\)", line))


def expanded(text: str) -> str:
    """Return a script as the shell receives it, with a placeholder for each variable and function of make."""
    text = text.replace("$$", "\0")
    while (shorter := re.sub(r"\$\((?:[^()$]|\([^()]*\))*\)|\$[@<^*]", PLACEHOLDER, text)) != text:
        text = shorter
    return text.replace("\0", "$")


def commands(script: str) -> Iterator[list[str]]:
    """Yield the commands of a script with their arguments, including those in $(...)."""
    for inner in re.findall(r"\$\(([^()]*)\)", script):
        yield from commands(inner)
    script = re.sub(r"\$\([^()]*\)", "$x", script)
    lexer = shlex.shlex(script, posix=True, punctuation_chars="();|&")
    lexer.whitespace_split, lexer.commenters = True, ""
    found: list[str] = []
    for word in [*lexer, ";"]:
        starts = not found
        if set(word) <= set("();|&") or (starts and word in WORDS):
            if found:
                yield found
            found = []
        elif word in ("for", "case", "esac", "in") and starts:
            found = [":"]
        elif starts and re.match(r"[A-Za-z_]\w*=", word):
            continue  # variable assignment
        else:
            found.append(word)


def faults(makefile: str) -> Iterator[str]:
    """Yield the parts of a Makefile that need a newer make, another shell, or tools that are not in POSIX."""
    yield from (f"make 3.81 has no {name}" for pattern, name in NEWER_MAKE.items() if re.search(pattern, makefile))
    for script in scripts(makefile):
        yield from (f"sh has no {name}: {script}" for pattern, name in NOT_OF_SH.items() if re.search(pattern, script))
        for name, *words in commands(script):
            yield from (f"{fault}: {shlex.join([name, *words])}" for fault in _faults(name, words))


def _faults(name: str, words: list[str]) -> Iterator[str]:
    if PLACEHOLDER in name or name.startswith(("$", "-", "/", "*", "build/")) or name in OTHERS:
        return
    if name not in OPTIONS:
        yield f"{name} is not POSIX's"
        return
    allowed, options = OPTIONS[name], [word for word in words if re.match(r"-\w|--\w", word)]
    if name == "find":
        options = [word for word in options if word[1:] not in FIND]
    if name in ("xargs", "env", "command", "exec"):  # later options belong to the command that it runs
        before = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
        options = words[:before]
    if allowed is not None:
        yield from (f"{name} has no {word}" for word in options if not set(word[1:]) <= set(allowed))
    if name == "sed":
        yield from ("sed has no such escape" for word in words if re.search(r"\\[tswbSWB+?|]", word))
    if name == "grep":
        yield from ("grep has no such escape" for word in words if re.search(r"\\[tswbdSWBD+?|]", word))
    if name in ("test", "["):
        yield from ("test has no ==" for word in words if word == "==")


def test_makefile_needs_only_make_3_81_and_posix_tools() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert sum(len(list(commands(script))) for script in scripts(makefile)) > 150
    assert not list(faults(makefile))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("\t@sed 's/x/\\t/' file", "sed has no such escape"),
        ('\t@x=$$(readlink -f "$$0"); echo "$$x"', "readlink has no -f"),
        ("\t@find . -name '*.h' | xargs -r rm", "xargs has no -r"),
        ("\t@true && sed -i 's/a/b/' file", "sed has no -i"),
        ("\t@ln -sfn a b", "ln has no -sfn"),
        ("\t@cp --reflink=auto a b", "cp has no --reflink=auto"),
        ("\t@find . -maxdepth 1 -type f", "find has no -maxdepth"),
        ("\t@grep -P 'a' file", "grep has no -P"),
        ("\t@if [ a == b ]; then echo x; fi", "test has no =="),
        ("\t@mktemp -d", "mktemp is not POSIX's"),
        ("\t@date -d yesterday", "date has no -d"),
        ("\t@echo -e 'a'", "echo has no -e"),
        ("\t@cat <<<word", "sh has no <<<"),
        ("X := $(shell nproc)", "nproc is not POSIX's"),
        ("X != date", "make 3.81 has no !="),
        (".ONESHELL:", "make 3.81 has no .ONESHELL"),
        ("$(file >x,y)", "make 3.81 has no a function"),
    ],
)
def test_makefile_features_missing_on_macos_are_found(line: str, fault: str) -> None:
    found = list(faults(f"all:\n{line}\n"))
    assert len(found) == 1 and fault in found[0], found


def test_make_help_lists_the_targets() -> None:
    command = ["make", "--no-print-directory", "help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == "help          list these commands" and len(said) > 30
