"""Where a C++ kernel finds each of its arguments, read from the struct that it declares.

Every field of such a struct is 8 bytes wide, so a field's place among the others is its address.
"""

import re
from collections.abc import Iterator
from functools import cache

from tokenfleet.kernels.build import HERE

_COMMENT = re.compile(r"//.*")
_STRUCT = re.compile(r"^struct (\w+) \{(.*?)^\};", re.MULTILINE | re.DOTALL)
_KERNEL = re.compile(r"^EXPORT void (\w+)\(const (\w+)\*", re.MULTILINE)
_DECLARATION = re.compile(r"\s*(?:const )?(\w+)\s*([^;]+);")  # as `const float *a, *b;`


@cache
def fields_of(kernel: str) -> tuple[str, ...]:
    """Names of the kernel's arguments, in order; those of a struct within as `batch.sequences`.

    Raises:
        LookupError: no C++ file exports a kernel of this name.
    """
    structs, kernels = _declared()
    if kernel not in kernels:
        raise LookupError(f"no C++ file exports a kernel called {kernel}")
    return tuple(_fields(kernels[kernel], structs))


@cache
def _declared() -> tuple[dict[str, str], dict[str, str]]:
    """What stands in each struct, and each kernel's struct."""
    files = [*HERE.glob("*.h"), *HERE.glob("*.cpp")]
    text = "\n".join(_COMMENT.sub("", file.read_text(encoding="utf-8")) for file in files)
    return dict(_STRUCT.findall(text)), dict(_KERNEL.findall(text))


def _fields(struct: str, structs: dict[str, str]) -> Iterator[str]:
    for kind, names in _DECLARATION.findall(structs[struct]):
        for name in re.findall(r"\w+", names):
            if kind in structs and "*" not in names:
                yield from (f"{name}.{field}" for field in _fields(kind, structs))
            else:
                yield name
