"""Choice of kernels: the best family by default, a named one, errors on CPUs without it; and their object files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from notso.qtensor import _native
from notso.qtensor.backends.cpu import kernel_choice
from notso.qtensor.errors import KernelChoiceError

ROOT = Path(__file__).parents[2]

# Families in order of preference, and the name of each one's requirement in cpu_features.
NEEDS = {
    "amx": "amx_int8",
    "avx512": "avx512_vnni",
    "avxvnni": "avx_vnni",
    "avx2": "avx2",
    "neon_i8mm": "i8mm",
    "neon": "dotprod",
}


def test_generic_kernels_are_always_available_and_last() -> None:
    assert kernel_choice.available_kernels()[-1] == "generic"
    assert _native.known_kernels()[-1] == "generic"


def test_available_kernels_match_cpu_features_best_first() -> None:
    features = kernel_choice.cpu_features()
    known = list(_native.known_kernels())
    assert known == [name for name in (*NEEDS, "generic") if name in known]
    expected = [name for name in known if name == "generic" or NEEDS[name] in features]
    if "amx" in expected and "amx" not in kernel_choice.available_kernels():
        expected.remove("amx")  # the system may deny the tile state although the CPU supports it
    assert kernel_choice.available_kernels() == expected


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="the system does not list the CPU's features")
def test_features_agree_with_the_system() -> None:
    flags = set(re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[:1] or [""])
    words = set(" ".join(flags).split())
    assert ("avx2" in kernel_choice.cpu_features()) == ({"avx2", "fma", "f16c"} <= words)
    assert ("avx_vnni" in kernel_choice.cpu_features()) == ({"avx2", "fma", "f16c", "avx_vnni"} <= words)
    vnni = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
    assert ("avx512_vnni" in kernel_choice.cpu_features()) == (vnni <= words and "avx2" in words)
    assert ("dotprod" in kernel_choice.cpu_features()) == ("asimddp" in words)
    assert ("i8mm" in kernel_choice.cpu_features()) == ({"asimddp", "i8mm"} <= words)


def test_every_available_family_can_be_forced() -> None:
    for family in kernel_choice.available_kernels():
        kernel_choice.use_kernels(family)
        assert kernel_choice.kernels() == family


@pytest.mark.parametrize("name", ["sse9", "", "AVX2", "generic ", "avx2,avx512"])
def test_unknown_kernel_family_is_rejected_with_the_choices(name: str) -> None:
    before = kernel_choice.kernels()
    with pytest.raises(KernelChoiceError) as caught:
        kernel_choice.use_kernels(name)
    assert all(choice in str(caught.value) for choice in kernel_choice.available_kernels())
    assert kernel_choice.kernels() == before


def test_kernels_variable_selects_or_rejects_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in kernel_choice.available_kernels():
        monkeypatch.setenv(kernel_choice.KERNELS_VARIABLE, f" {family}\n")
        kernel_choice.configure(1)
        assert kernel_choice.kernels() == family
    monkeypatch.setenv(kernel_choice.KERNELS_VARIABLE, "")
    kernel_choice.configure(1)
    monkeypatch.setenv(kernel_choice.KERNELS_VARIABLE, "nonsense")
    with pytest.raises(KernelChoiceError, match="nonsense"):
        kernel_choice.configure(1)


def test_attention_variable_selects_tiles_only_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in kernel_choice.available_kernels():
        monkeypatch.setenv(kernel_choice.KERNELS_VARIABLE, family)
        for way in ("auto", "vectors"):
            monkeypatch.setenv(kernel_choice.ATTENTION_VARIABLE, f" {way}\n")
            kernel_choice.configure(1)
        assert kernel_choice.attention_variant() == "vectors"
        monkeypatch.setenv(kernel_choice.ATTENTION_VARIABLE, "tiles")
        if family == "amx":
            kernel_choice.configure(1)
            assert kernel_choice.attention_variant() == "tiles"
        else:
            with pytest.raises(KernelChoiceError, match="no tiles"):
                kernel_choice.configure(1)
        kernel_choice.use_attention("auto")
    for wrong in ("nonsense", "Tiles", "vectors,tiles"):
        monkeypatch.setenv(kernel_choice.ATTENTION_VARIABLE, wrong)
        with pytest.raises(KernelChoiceError, match="NOTSO_ATTENTION"):
            kernel_choice.configure(1)


def test_fresh_process_selects_the_best_family() -> None:
    environment = {name: value for name, value in os.environ.items() if name != kernel_choice.KERNELS_VARIABLE}
    code = "from notso.qtensor.backends.cpu import kernel_choice as it; it.configure(1); print(it.kernels())"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == [kernel_choice.available_kernels()[0]], run.stderr


def test_family_unsupported_by_the_cpu_is_rejected() -> None:
    lacking = [name for name in _native.known_kernels() if name not in kernel_choice.available_kernels()]
    if not lacking:
        pytest.skip(f"this CPU supports every family: {', '.join(_native.known_kernels())}")
    for name in lacking:
        with pytest.raises(KernelChoiceError, match="does not support"):
            kernel_choice.use_kernels(name)


# ---- object files ----


def objects(family: str) -> list[Path]:
    found = sorted(ROOT.glob(f"build/*/CMakeFiles/kernels_{family}.dir/**/*.o"))
    if not found:
        pytest.skip("the build folder of the native module is not in this tree")
    return found


def output_of(tool: str, *arguments: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("family", _native.known_kernels())
def test_kernel_objects_export_only_their_kernel_table(family: str) -> None:
    """A weak symbol compiled for one instruction set could replace the generic copy at link time."""
    for path in objects(family):
        defined = [line.split() for line in output_of("nm", "--defined-only", str(path)).splitlines() if line.strip()]
        weak = [words for words in defined if len(words) == 3 and words[1] in "VWuvw"]
        assert not weak, f"{path.name} defines {weak[:3]}"
        visible = [words[2] for words in defined if len(words) == 3 and words[1].isupper()]
        assert len(visible) == 1 and "Kernels" in visible[0], f"{path.name} shows {visible}, not its table alone"


# Registers and instructions that a family must not contain, because its CPUs may lack them.
TABOO = {"generic": "ymm|zmm|tmm", "avx2": "zmm|tmm|k[1-7]}", "avxvnni": "zmm|tmm|k[1-7]}", "avx512": "tmm"}


@pytest.mark.parametrize("family", TABOO)
def test_kernel_objects_use_only_allowed_instructions(family: str) -> None:
    if family not in _native.known_kernels():
        pytest.skip(f"{family} is not compiled for this processor")
    for path in objects(family):
        code = output_of("objdump", "-d", "--no-show-raw-insn", str(path))
        assert "ret" in code
        wrong = re.findall(rf"^.*%(?:{TABOO[family]}).*$", code, re.M)
        assert not wrong, f"{path.name}: {wrong[:3]}"
        if family == "generic":
            vex = re.findall(r"^\s*[0-9a-f]+:\s+(v[a-z]+\S*)", code, re.M)
            assert not [name for name in vex if name not in ("verr", "verw")], f"{path.name}: {vex[:3]}"


@pytest.mark.parametrize(("family", "are_there"), [("avx2", False), ("avxvnni", True)])
def test_vnni_products_are_vex_encoded_and_absent_from_avx2(family: str, are_there: bool) -> None:
    """AVX-VNNI and AVX-512 VNNI have the same instructions in different encodings."""
    if family not in _native.known_kernels():
        pytest.skip(f"{family} is not compiled for this processor")
    for path in objects(family):
        code = output_of("objdump", "-d", "--no-show-raw-insn", str(path))
        found = re.findall(r"(\{vex\} )?(vpdpbusd|vpdpwssd)\b", code)
        assert {name for _, name in found} == ({"vpdpbusd", "vpdpwssd"} if are_there else set())
        assert all(vex for vex, _ in found), f"{path.name} has products that AVX-512 encodes"


def test_non_kernel_objects_use_no_wide_registers() -> None:
    """Bindings, dispatcher and thread pool run before the CPU's features are checked."""
    plain = sorted(ROOT.glob("build/*/CMakeFiles/_native.dir/**/*.o"))
    if not plain:
        pytest.skip("the build folder of the native module is not in this tree")
    for path in plain:
        code = output_of("objdump", "-d", "--no-show-raw-insn", str(path))
        assert not re.findall(r"^.*%(?:ymm|zmm|tmm).*$", code, re.M), path.name
