"""Text that the emulator cannot take for PTX."""

from __future__ import annotations

import pytest

from iree_lnbwd.emulator import PtxError
from iree_lnbwd.emulator.ptx import parser

_TARGET = ".target sm_90\n"


def _kernel(body: str, parameters: str = "") -> str:
    return f"{_TARGET}.visible .entry f({parameters}) {{\n{body}\n}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text does not say what it is for"),
        (f"{_TARGET}.visible .entry f() {{ ret;", "a kernel's body does not end"),
        (f"{_TARGET}.visible .entry f(.param .u64 p", "f: the parameters do not end"),
        (_kernel("\tret;\n\t%r1 = 2;"), "line 4: expected an instruction, got %r1"),
        (
            _kernel("ret;") + ".visible .entry g() {\n\tret;\n\t%r1 = 2;\n}",
            "line 6: expected an instruction, got %r1",
        ),
        (_kernel(".reg .b16 %a; .reg .b32 %a; ret;"), "%a is declared twice"),
        (_kernel(".reg .b16 %a; .reg .b16 %a<4>; ret;"), "%a is declared twice"),
        (_kernel(".reg .b16 %a-;"), "line 3: expected registers, got .reg .b16 %a-"),
        (_kernel("$a:\n\tret;\n$a:\n\tret;"), r"line 5: the label \$a: is there twice"),
        (_kernel("ret;") + _kernel("ret;"), "f is there twice"),
        (_kernel("ret;", ".param .u64 p, .param .u32 p"), "f: expected a parameter of its own"),
        (_kernel("ret;", ".param .b8 p[16]"), r"f: expected a parameter .*, got .param .b8 p\[16"),
        (_kernel("ret;", "p"), "f: expected a parameter of its own, got p"),
        (_kernel("ret\0;"), r"line 3: expected ASCII text, got '\\x00'"),
        (_kernel("/* two\nlines */ r\u00e9t;"), r"line 4: expected ASCII text, got '\\xe9'"),
        (_kernel(f"add {'x' * 5000};"), r"line 3: expected an instruction, got add x{70,76}\.\.\."),
        (f"{_TARGET}.shared .align 0 .b8 a[4];", "a: expected an alignment that is a power of two"),
        (f"{_TARGET}.shared .align 3 .b8 a[4];", "a: expected an alignment .*, got 3"),
        (f"{_TARGET}.const .b8 a[2] = {{1, 2, 3}};", "a: 3 values for 2 bytes"),
        (f"{_TARGET}.const .b8 a[2] = {{x}};", "expected a number, got x"),
        (f"{_TARGET}.const .b8 a[{1 << 40}] = {{1}};", f"a: {1 << 40} bytes, expected at most"),
        (f"{_TARGET}.shared .b8 a[{'9' * 5000}];", r"expected a number, got 9{80}\.\.\."),
    ],
)
def test_text_that_is_no_ptx(text: str, message: str) -> None:
    with pytest.raises(PtxError, match=message) as caught:
        parser.parse(text)
    assert "\n" not in str(caught.value)


_MANY = 100_000


@pytest.mark.parametrize(
    "text",
    [
        _kernel("/*" * _MANY),
        ".entry f(" * _MANY,
        ".entry f(a);" * _MANY + ".entry f(",
        ".global .b8 a[1] = {" * _MANY,
        _kernel(".reg .b32 " * _MANY),
        _kernel("add [" + "[," * _MANY + ";"),
        _kernel("ret;", ".param .u64 " + ".a " * _MANY),
        _kernel("ret;", ".param .u64 " + "a" * _MANY),
        _kernel("{" * _MANY),
        "@" * _MANY,
    ],
    ids=lambda text: text[-12:],
)
def test_text_of_which_much_is_looked_at_again_and_again(text: str) -> None:
    """It is not: were the parser's time to grow as the square of the text, this took hours."""
    try:
        kernels = parser.parse(f"{_TARGET}{text}")
    except PtxError:
        return
    assert all(len(kernel.code) <= 1 for kernel in kernels.values())


@pytest.mark.parametrize(
    ("register", "type_"),
    [
        ("%r0", "b32"),
        ("%r9", "b32"),
        ("%r10", None),
        ("%r09", None),
        ("%r", None),
        ("%s12", "b64"),  # of %s1<3>
        ("%s13", None),
        ("%s1", None),
        ("tmp", "b16"),
        ("tmp0", None),
        ("x4", "f32"),  # a name of its own
        ("x", None),
        ("%q1", None),
    ],
)
def test_registers_that_are_declared(register: str, type_: str | None) -> None:
    body = ".reg .b32 %r<7>;\n.reg\t.b64 \t%s1<3>, %t;\n.reg .b16 tmp; .reg .f32 x4;\n"
    body += "{ .reg .b32 %r<10>; }\nret;"
    kernel = parser.parse(_kernel(body))["f"]
    if type_ is not None:
        assert kernel.type_of(register) == type_
        return
    with pytest.raises(PtxError, match=f"{register} is not declared"):
        kernel.type_of(register)


def test_registers_of_a_scope() -> None:
    """Compilers call what they do not need by one name, whatever its type."""
    body = ".reg .b32 %r<3>; .reg .b64 %rd<2>;\n{ .reg .b16 tmp; mov.b32 {tmp, %rs1}, %r1; }\n"
    body += "{ .reg .b32 tmp; mov.b64 {%r2, tmp}, %rd1; }\nret;"
    kernel = parser.parse(_kernel(body))["f"]
    assert [kernel.type_of(f"tmp_{type_}") for type_ in ("b16", "b32")] == ["b16", "b32"]
    assert [i.operands for i in kernel.code[:2]] == [
        ("{tmp_b16, %rs1}", "%r1"),
        ("{%r2, tmp_b32}", "%rd1"),
    ]


def test_shared_memory_of_another_kernel_is_none_of_this_one() -> None:
    """Compilers put it beside the kernels; 48 KiB are what each may have."""
    both = "".join(f".shared .align 16 .b8 {name}[40960];\n" for name in ("one", "two"))
    entries = "".join(
        f".visible .entry of_{name}() {{ st.shared.b32 [{name}+16], 0; ret; }}\n"
        for name in ("one", "two")
    )
    kernels = parser.parse(f"{_TARGET}{both}{entries}")
    for name in ("one", "two"):
        kernel = kernels[f"of_{name}"]
        assert kernel.nbytes["shared"] == 40960
        assert kernel.variables[name].offset == 0


def test_what_kernels_declare() -> None:
    text = f"""{_TARGET}
.extern .shared .align 16 .b8 dynamic[];
.shared .align 4 .b8 one[6];
.entry declared_only(.param .u64 p);
.entry f(.param .u64 .ptr .global .align 16 p, .param .u32 q)
.maxntid 64, 2, 1
.minnctapersm 1
{{
  .shared .align 8 .b64 two;
  .local .align 8 .b8 depot[24];
  st.shared.b8 [one+2], 0;
  st.shared.b64 [two], 0;
  st.local.b64 [depot], 0;
  ret;
}}
.const .align 2 .b16 table[4] = {{1, -1}};
.entry g() .reqntid 32 {{ ld.const.b16 %rs1, [table]; ret; }}
"""
    kernels = parser.parse(text)
    assert kernels.keys() == {"f", "g"}
    f, g = kernels["f"], kernels["g"]
    assert (f.target, f.parameters) == ("sm_90", {"p": "u64", "q": "u32"})
    assert (f.max_threads, f.required_size) == (128, None)
    assert (g.max_threads, g.required_size) == (None, (32, 1, 1))
    assert (f.nbytes["shared"], f.nbytes["local"]) == (16, 24)
    assert (g.nbytes["shared"], g.nbytes["local"]) == (0, 0)  # it uses none
    assert f.variables["two"].offset == 8
    assert g.variables.keys() == {"table"}
    assert g.variables["table"].content == bytes.fromhex("0100ffff00000000")
