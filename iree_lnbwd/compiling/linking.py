"""Copies functions of ``ir/math/`` and ``ir/parts/`` into the kernels that declare them, by type.

A kernel's module declares ``func.func private @widen_of_dy(!dy_chunk) -> !chunk``. The declaration
is replaced by a copy of ``@widen`` from ``ir/math/``, for these types and under that name. The part
of the name after ``_of_`` only tells copies apart. (A function of MLIR has one type.) What such a
copy calls by a name that ends in ``_of_it`` has the same part after ``_of_`` as the copy.

A kernel declares what it calls itself. What a copy calls beyond that is copied with it, for the
types of the call. MLIR does not inline functions with operations of nvgpu: the text of such a
function stands where it is called.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from iree_lnbwd.ops.dtypes import DTYPES

_TYPES = r"(?:!?\w+(?:, !?\w+)*)?"
_RESULTS = rf"(?: -> (?:(!?\w+)|\(({_TYPES})\)))?"  # one, or several in parentheses
_DECLARATION = re.compile(
    rf"^( *)func\.func private @(\w+)\(({_TYPES})\){_RESULTS}\n", re.MULTILINE
)
_DEFINITION = re.compile(
    rf"func\.func private @(\w+)\(((?:%\w+: !?\w+(?:, %\w+: !?\w+)*)?)\){_RESULTS} \{{\n"
    r".*?^\}\n",
    re.MULTILINE | re.DOTALL,
)
_CALL = re.compile(
    rf"func\.call @(\w+)\([^)]*\)\s*: \(({_TYPES})\)\s+-> (?:(!?\w+)|\(({_TYPES})\))"
)
_NAMED = re.compile(r"func\.func (?:\w+ )?@(\w+)\(")
_KERNELS = re.compile(r"^(?= *builtin\.module)", re.MULTILINE)  # each has its own functions
_NEVER_INLINED = "nvgpu."  # a dialect that does not say what may be inlined
_FUNCTION = re.compile(
    r"^( *)func\.func private @(\w+)\(([^()]*)\) \{\n((?:.*\n)*?)\1  return\n\1\}\n\n?",
    re.MULTILINE,
)
_NAME = re.compile(r"%(\w+)")
_OF_IT = "_of_it"  # in a name that a function calls: the same part of the copy's own name
_ALIAS = re.compile(r"![a-z_]+(?![a-z_.])")  # "!llvm.ptr" is of a dialect
_OWN = re.compile(r"[!#][a-z_]+(?![a-z_.])")  # likewise, or the alias of a number
_PARAMETER_TYPE = re.compile(r"%\w+: (!?\w+)")
_VECTOR = re.compile(r"vector<(\d+)x(\w+)>")
_STORED = re.compile(r"memref<(?:[?\d]+x)+(\w+)[,>]")


@dataclass(frozen=True)
class Function:
    """A function of a library, with the types that it has there.

    Attributes:
        name: Its name.
        types: The types of its parameters and of its results; most are aliases.
        text: Its whole text.
    """

    name: str
    types: tuple[str, ...]
    text: str


def functions(texts: Iterable[str]) -> dict[str, Function]:
    """The functions that files define, by name.

    Raises:
        ValueError: Two have one name.
    """
    found: dict[str, Function] = {}
    for text in texts:
        for match in _DEFINITION.finditer(text):
            types = (*_PARAMETER_TYPE.findall(match[2]), *_names(match[3] or match[4]))
            if match[1] in found:
                raise ValueError(f"@{match[1]}: expected one function of that name, got two")
            found[match[1]] = Function(match[1], types, match[0])
    return found


def link(
    text: str,
    aliases: Mapping[str, str],
    library: Mapping[str, Function],
    choose: Callable[[str, tuple[str, ...]], str],
) -> str:
    """A text whose declarations are replaced by functions.

    Args:
        text: The kernels.
        aliases: The types in the text, by alias.
        library: The functions.
        choose: Gives the function's name for the name and the types in a declaration.

    Raises:
        KeyError: There is no such function.
        ValueError: It has other types, or one type where the declaration has two.
    """
    return "".join(_linked(part, aliases, library, choose) for part in _KERNELS.split(text))


def _linked(
    text: str,
    aliases: Mapping[str, str],
    library: Mapping[str, Function],
    choose: Callable[[str, tuple[str, ...]], str],
) -> str:
    """One module of functions, linked."""
    known = set(_NAMED.findall(text))

    def linked(declaration: re.Match[str]) -> str:
        indent, name, parameters, result, results = declaration.groups()
        named = (*_names(parameters), *_names(result or results))
        return textwrap.indent(copied(name, tuple(map(resolved_here, named))), indent)

    def copied(name: str, types: tuple[str, ...]) -> str:
        """A function for these types, and what it calls that the module lacks."""
        base, _, which = name.partition("_of_")
        function = library[choose(base, types)]
        own = dict(zip(function.types, types, strict=False))
        if tuple(map(own.get, function.types)) != types:
            raise ValueError(
                f"@{name}: expected types like ({', '.join(function.types)}) of @{function.name}, "
                f"got ({', '.join(types)})"
            )
        if types:
            own |= _of_vector(types[0]) | _of_memory(types[0])
        body = _OWN.sub(lambda alias: own.get(alias[0], alias[0]), function.text)
        body = body.replace(f"@{function.name}(", f"@{name}(", 1)
        bodies = [body.replace(f"{_OF_IT}(", f"_of_{which}(")]
        for called, parameters, result, results in _CALL.findall(function.text):
            other = called.replace(_OF_IT, f"_of_{which}")
            if other not in known:
                known.add(other)
                named = (*_names(parameters), *_names(result or results))
                bodies.append(copied(other, tuple(own.get(n) or resolved_here(n) for n in named)))
        return "\n".join(bodies)

    def resolved_here(named: str) -> str:
        return _ALIAS.sub(lambda alias: resolved(alias[0], aliases), named)

    return _in_place(_DECLARATION.sub(linked, text))


def _in_place(text: str) -> str:
    """With the text of functions that MLIR does not inline where they are called.

    They have no results. Each copy has names of its own.
    """
    copies = itertools.count(1)
    while found := next((f for f in _FUNCTION.finditer(text) if _NEVER_INLINED in f[4]), None):
        _, name, parameters, body = found.groups()
        named = _NAME.findall(parameters)
        text = text.replace(found[0], "")
        call = re.compile(rf"^( *)func\.call @{name}\(([^)]*)\)\s*: \(.*\) -> \(\)\n", re.MULTILINE)

        def copied(call: re.Match[str], named: list[str] = named, body: str = body) -> str:
            given = dict(zip(named, call[2].split(", "), strict=True))
            copy = next(copies)
            own = _NAME.sub(lambda n: given.get(n[1], f"{n[0]}_{copy}"), body)
            return textwrap.indent(textwrap.dedent(own), call[1])

        text = call.sub(copied, text)
    return text


def _names(listed: str | None) -> tuple[str, ...]:
    """The types of a list."""
    return tuple(listed.split(", ")) if listed else ()


def resolved(alias: str, aliases: Mapping[str, str]) -> str:
    """The type that an alias stands for, without aliases in it."""
    return _ALIAS.sub(lambda inner: resolved(inner[0], aliases), aliases[alias])


def _of_vector(narrow: str) -> dict[str, str]:
    """For a vector: the types of its bits and their numbers, of parts, and of a comparison.

    Its number of elements is there, too.
    """
    vector = _VECTOR.fullmatch(narrow)
    if vector is None or vector[2] not in DTYPES:
        return {}
    whole = int(vector[1])
    return {
        "!element": vector[2],
        "#elements": f"{whole} : index",
        "!words": f"vector<{bits(narrow) // 32}xi32>",
        "!long_words": f"vector<{bits(narrow) // 32}xi64>",
        "!word_indices": f"vector<{bits(narrow) // 32}xindex>",
        "!wide_words": f"vector<{whole}xi32>",
        "!short_words": f"vector<{whole}xi16>",
        "!halves": f"vector<{whole // 2}xf32>",
        "!bits": f"vector<{whole}xi{bits(narrow) // whole}>",
        "!pair": f"vector<{64 * whole // bits(narrow)}x{vector[2]}>",
        "!lanes": f"vector<{whole}xi1>",
    }


def _of_memory(stored: str) -> dict[str, str]:
    """For what is in memory: the type of an element."""
    memory = _STORED.match(stored)
    return {} if memory is None else {"!element": memory[1]}


def bits(vector: str) -> int:
    """How many a vector type has."""
    found = _VECTOR.fullmatch(vector)
    assert found is not None, vector
    return 8 * int(found[1]) * DTYPES[found[2]].numpy.itemsize
