"""Machine code of the kernels: compiled by Numba, cached in files, and loaded from there.

Loaded code runs with the user's permissions, so files that other users could have written are ignored.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import logging
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch

from regard._utils.files import write_atomically
from regard.engines.fused.kernels.arguments import TYPES

# The cache: a folder that only this user can write, with one file per kernel and dtype --------------------------------


@dataclass(frozen=True)
class Code:
    """One kernel as machine code for this CPU."""

    signature: tuple[str, ...]
    symbol: str
    object: bytes


class Entry:
    """
    The cache file of one kernel: a line of JSON, then the object code. Any failure counts as a missing file.

    Parameters
    ----------
    name : str
        ``"module.function"``.
    dtype : str
        ``"float32"`` or ``"float64"``.
    key : str
        Hash of everything the code depends on. Files with another key are ignored, and replaced on the next write.
    """

    def __init__(self, name: str, dtype: str, key: str) -> None:
        self.family = f"{name}-{dtype}-"
        self.key = key

    @property
    def file(self) -> str:
        """The file's name."""
        return f"{self.family}{self.key[:32]}.kernel"

    def read(self) -> Code | None:
        """Return the cached code; None if it is missing, damaged, outdated or not trusted."""
        try:
            with (_directory() / self.file).open("rb") as file:
                if not _is_private(os.fstat(file.fileno())):
                    return None
                head, code = json.loads(file.readline()), file.read()
            if (head["kernel"], head["key"]) != (self.family, self.key):
                return None
            if head["sha256"] != hashlib.sha256(code).hexdigest():
                return None
            signature = tuple(head["signature"])
            return Code(signature, str(head["symbol"]), code) if set(signature) <= TYPES else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, code: Code) -> None:
        """Write the code atomically, and remove the files it replaces."""
        head = {
            "kernel": self.family,
            "key": self.key,
            "signature": code.signature,
            "symbol": code.symbol,
            "sha256": hashlib.sha256(code.object).hexdigest(),
        }
        with suppress(OSError):
            directory = _directory(make=True)
            write_atomically(directory / self.file, json.dumps(head).encode() + b"\n" + code.object, private=True)
            for path in directory.glob(f"{self.family}*.kernel"):
                if path.name != self.file:
                    with suppress(OSError):
                        path.unlink()


def folder() -> Path | None:
    """Return the cache folder, created if missing; None if it cannot be written."""
    with suppress(OSError):
        directory = _directory(make=True)
        if os.access(directory, os.W_OK):
            return directory
    return None


def _directory(make: bool = False) -> Path:
    """Return the cache folder; raise OSError if it is missing or not trusted."""
    directory = root() / "kernels"
    if make:
        directory.parent.parent.mkdir(parents=True, exist_ok=True)
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(directory.stat()):
        raise PermissionError(f"{directory} can be written by others, who could put machine code there")
    return directory


def _is_private(status: os.stat_result) -> bool:
    """Whether only this user can have written a file with this status."""
    if sys.platform == "win32":  # user profile folders are private, and file modes are meaningless
        return True
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def root() -> Path:
    """Return regard's cache folder: $REGARD_CACHE_DIR, $XDG_CACHE_HOME/regard, or the platform's default."""
    if chosen := os.environ.get("REGARD_CACHE_DIR"):
        return Path(chosen).absolute()
    if (shared := os.environ.get("XDG_CACHE_HOME")) and Path(shared).is_absolute():
        return Path(shared) / "regard"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "regard" / "cache"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise FileNotFoundError("no home folder") from error
    return home / ("Library/Caches/regard" if sys.platform == "darwin" else ".cache/regard")


# Compiling and loading kernels ----------------------------------------------------------------------------------------
# Reading Numba's own cache requires importing Numba, which takes 0.2 s. Here a compiled kernel is an object file, which
# LLVM's linker (``llvmlite.binding``) loads in a few milliseconds without Numba.
#
# Kernels run without Python, so they must follow these rules, which are checked at compile time:
#
# * It cannot raise. Helpers are compiled with ``error_model="numpy"``, steps of ranges and slices are constants.
# * It cannot allocate: no new arrays and no array expressions such as ``a + b``; views of arguments are free.
# * It may call only the functions in `SYMBOLS`: memcpy and similar, and the C library's math functions.


_MATH: Final = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign", "cos", "cosh", "erf"),
    *("erfc", "exp", "exp2", "exp10", "expm1", "fabs", "floor", "fma", "fmax", "fmin", "fmod", "hypot", "lgamma"),
    *("log", "log10", "log1p", "log2", "nearbyint", "pow", "rint", "round", "roundeven", "sin", "sincos", "sinh"),
    *("sqrt", "tan", "tanh", "tgamma", "trunc"),
)
#: The C library's functions that compiled code may call; any other name fails the link instead of being searched for.
SYMBOLS: Final = (
    *("memcpy", "memmove", "memset", "bzero", "__bzero", "memset_pattern16"),
    *_MATH,
    *(f"{name}f" for name in _MATH),
)

#: Called by the wrapper if a kernel raises. It is undefined: LLVM removes the call if it can prove that the kernel
#: never raises, and otherwise linking fails.
RAISED: Final = "regard_kernel_raised"

#: LLVM and ctypes types of arguments, for float32 and float64.
_LLVM_TYPES: Final = {
    "real*": ("ptr", "ptr"),
    "int*": ("ptr", "ptr"),
    "byte*": ("ptr", "ptr"),
    "real": ("float", "double"),
    "int": ("i64", "i64"),
}
_C_TYPES: Final[dict[str, tuple[type[Any], type[Any]]]] = {
    "real*": (ctypes.c_void_p, ctypes.c_void_p),
    "int*": (ctypes.c_void_p, ctypes.c_void_p),
    "byte*": (ctypes.c_void_p, ctypes.c_void_p),
    "real": (ctypes.c_float, ctypes.c_double),
    "int": (ctypes.c_int64, ctypes.c_int64),
}
_DTYPES: Final = {torch.float32: "float32", torch.float64: "float64"}

_FASTMATH: Final = {"contract", "nsz", "reassoc"}  # sums may be reordered; NaN and infinity stay what they are

#: Modules whose kernels compile within two seconds, which are not worth a warning.
_QUICK: Final = ("decoding",)

Function = Callable[..., None]

#: Compilation is logged as a warning because Python shows only warnings if logging is not configured.
#: ``logging.getLogger("regard").setLevel(logging.ERROR)`` silences it.
_log = logging.getLogger("regard")


class BuildError(RuntimeError):
    """A kernel breaks the rules for standalone machine code; a bug in the kernel, not in the user's call."""


def load(name: str, dtype: torch.dtype) -> Function:
    """
    Return a kernel of ``kernels/`` as a function of pointers and numbers.

    Parameters
    ----------
    name : str
        ``"module.function"``, the function being marked with ``@kernel``.
    dtype : {torch.float32, torch.float64}
        The type "real" in the kernel's signature.

    Returns
    -------
    Callable
        Takes ``tensor.data_ptr()`` for pointers, ints and floats for scalars. It runs without the GIL and without
        checks. Equal arguments return the same object, in every thread.

    Raises
    ------
    BuildError
        If the kernel can raise, allocates, or calls a function that is not in `SYMBOLS`.
    """
    return KERNELS.load(name, dtype)


class Kernels:
    """
    The kernels of one package.

    Parameters
    ----------
    package : str
        The package's full name. It is imported only when a kernel must be compiled.
    folder : Path
        Folder of its files. A change in any of them invalidates all cached code, as kernels share helpers.
    """

    def __init__(self, package: str, folder: Path) -> None:
        self.package = package
        self.folder = folder
        self._loaded: dict[tuple[str, torch.dtype], Function] = {}

    def load(self, name: str, dtype: torch.dtype) -> Function:
        """Return a kernel, as `load` does."""
        function = self._loaded.get((name, dtype))
        if function is not None:
            return function
        assert dtype in _DTYPES, f"a kernel's dtype must be float32 or float64, got {dtype}"
        with _lock:
            if (name, dtype) not in self._loaded:
                self._loaded[name, dtype] = self._make(name, dtype)
            return self._loaded[name, dtype]

    def names(self) -> list[str]:
        """Return the names of all kernels; this imports the package, and with it Numba."""
        modules = [path.stem for path in sorted(self.folder.glob("*.py"))]
        return [
            f"{module}.{name}"
            for module in modules
            for name, value in vars(importlib.import_module(f"{self.package}.{module}")).items()
            if isinstance(getattr(value, "signature", None), tuple)
        ]

    def is_cached(self, name: str, dtype: torch.dtype) -> bool:
        """Return whether a kernel's machine code is in the cache."""
        return self._entry(name, dtype).read() is not None

    def _entry(self, name: str, dtype: torch.dtype) -> Entry:
        return Entry(name, _DTYPES[dtype], self.key)

    def _make(self, name: str, dtype: torch.dtype) -> Function:
        entry = self._entry(name, dtype)
        code = entry.read()
        if code is not None:
            with suppress(RuntimeError):  # if it does not link, compile again
                return _linked(code, dtype)
        has_cache = folder() is not None
        often = "once on this machine" if has_cache else "in every process, because the cache folder is not writable"
        _log.log(
            logging.INFO if has_cache and name.partition(".")[0] in _QUICK else logging.WARNING,
            "regard is compiling its kernel %s for %s, %s; this may take a minute (regard warmup compiles them all).",
            *(name, _DTYPES[dtype], often),
        )
        code = self._compiled(name, dtype)
        try:
            function = _linked(code, dtype)
        except RuntimeError as error:
            raise BuildError(f"{self.package}.{name}: {_why(code)} ({error})") from error
        if self._digest() == self.key:  # otherwise a source file changed during compilation
            entry.write(code)
        return function

    @cached_property
    def key(self) -> str:
        """Hash of everything the machine code depends on: sources, compiler, CPU."""
        return self._digest()

    def _digest(self) -> str:
        digest = hashlib.sha256(repr((self.package, _compiler(), _machine())).encode())
        for path in (Path(__file__), *sorted(self.folder.glob("*.py"))):
            source = path.read_bytes()
            digest.update(f"{path.name} {len(source)} ".encode() + source)
        return digest.hexdigest()

    def _compiled(self, name: str, dtype: torch.dtype) -> Code:
        """Compile a kernel with Numba and LLVM."""
        module, _, function = name.rpartition(".")
        source = getattr(importlib.import_module(f"{self.package}.{module}"), function)
        signature: tuple[str, ...] = source.signature
        symbol = f"regard_{name.replace('.', '_')}_{_DTYPES[dtype]}"
        text = _numba_code(source, signature, dtype)
        return Code(signature, symbol, _target_machine().emit_object(_module(text, signature, dtype, symbol)))


# Threads that load the same kernel compile it once. A fork waits for a running load, so that no child inherits LLVM in
# an inconsistent state. Re-entrant, as compiling may itself fork.
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)

#: The kernels of engine ``fused``.
KERNELS = Kernels("regard.engines.fused.kernels", Path(__file__).parent / "kernels")


# Compiling: from Python to object code


@cache
def _compiler() -> tuple[str, str]:
    return version("numba"), version("llvmlite")  # from the packages' metadata: no import


@cache
def _machine() -> tuple[str, str, str]:
    """Return the compilation target, as Numba would choose it: triple, CPU, features."""
    llvm = _llvm()
    try:
        features = llvm.get_host_cpu_features().flatten()
    except RuntimeError:  # not available on every system
        features = ""
    return llvm.get_process_triple(), llvm.get_host_cpu_name(), features


@cache
def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def _numba_code(source: Function, signature: Sequence[str], dtype: torch.dtype) -> str:
    """Return a kernel and the helpers it needs as optimized LLVM code."""
    import numba
    from numba import types

    njit: Any = numba.njit  # two of the options are not in its annotations

    real = types.float32 if dtype == torch.float32 else types.float64
    numba_types = {
        "real*": types.CPointer(real),
        "int*": types.CPointer(types.int64),
        "byte*": types.CPointer(types.uint8),
        "real": real,
        "int": types.int64,
    }
    dispatcher = njit(
        types.void(*(numba_types[type] for type in signature)),
        error_model="numpy",
        fastmath=_FASTMATH,
        boundscheck=False,
        no_cpython_wrapper=True,  # wrappers call Python; ours is three lines of LLVM
        no_cfunc_wrapper=True,
    )(source)
    text: str = dispatcher.inspect_llvm(dispatcher.signatures[0])
    return text


def _target_machine() -> Any:
    """Return LLVM's code generator with the settings of Numba's."""
    triple, cpu, features = _machine()
    return (
        _llvm()
        .Target.from_triple(triple)
        .create_target_machine(
            cpu=cpu,
            features=features,
            opt=3,
            # Static code on x86, where the large code model that "jitdefault" means there reaches any address.
            reloc="static" if re.match(r"x86|i[3-6]86", triple) else "default",
            codemodel="jitdefault",
            jit=True,
        )
    )


def _module(text: str, signature: Sequence[str], dtype: torch.dtype, symbol: str) -> Any:
    """Return Numba's code as an LLVM module with one visible function, ``void symbol(arguments)``."""
    llvm = _llvm()
    module = llvm.parse_assembly(_with_wrapper(_without_counts(text), signature, dtype, symbol))
    module.verify()
    for definition in (*module.functions, *module.global_variables):
        if not definition.is_declaration and definition.name != symbol:
            definition.linkage = "internal"  # so that unused definitions are removed
    # Numba has already optimized. These passes inline the kernel, prove that it never raises, and remove dead code.
    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.add_ipsccp_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes.run(module, llvm.create_pass_builder(_target_machine(), options))
    return module


def _without_counts(text: str) -> str:
    """Remove reference counting, which kernels do not need."""
    text = re.sub(r"^define [^\n]*@(NRT_(?:in|de)cref)\(.*?^}", r"declare void @\1(ptr)", text, flags=re.M | re.S)
    return re.sub(
        r"^declare [^\n]*@(NRT_(?:in|de)cref)\([^\n]*",
        r"define internal void @\1(ptr %0) alwaysinline { ret void }",
        text,
        flags=re.M,
    )


def _with_wrapper(text: str, signature: Sequence[str], dtype: torch.dtype, symbol: str) -> str:
    """Add a function `symbol` to LLVM code that calls the kernel with C conventions.

    Numba's functions take two pointers before the arguments, for the result and for an exception, and return a status.
    """
    # The kernel is the only function with external linkage; helpers are "linkonce_odr".
    kernels = re.findall(
        r"^define (?!linkonce_odr|internal|private|available)[^\n]*?@([\w.$]+|\"[^\"\n]+\")\(", text, re.M
    )
    assert len(kernels) == 1, f"exactly one function must have external linkage, got {kernels}"
    types = [_LLVM_TYPES[type][dtype == torch.float64] for type in signature]
    parameters = ", ".join(f"{type} %a{i}" for i, type in enumerate(types))
    arguments = "".join(f", {type} %a{i}" for i, type in enumerate(types))
    return f"""{text}
declare void @{RAISED}(ptr) noreturn
define void @{symbol}({parameters}) {{
  %result = alloca ptr
  %exception = alloca ptr
  %status = call i32 @{kernels[0]}(ptr %result, ptr %exception{arguments}) alwaysinline
  %raised = icmp ne i32 %status, 0
  br i1 %raised, label %bad, label %good
bad:
  call void @{RAISED}(ptr %exception)
  unreachable
good:
  ret void
}}
"""


def _why(code: Code) -> str:
    """Return why object code does not link, from the symbol names in it, which are text in every object format."""
    names = sorted({name.decode() for name in re.findall(rb"NRT_\w+|numba_\w+|Py[A-Z_]\w+", code.object)})
    reasons = [f"not allocate nor call Python, got {', '.join(names)}"] if names else []
    if RAISED.encode() in code.object:
        # Numba stores exceptions as pickles; those that cannot occur have been removed.
        found = re.findall(rb"builtins\x94\x8c.(\w+)\x94\x93\x94(?:\x8c.([ -~]*))?", code.object, re.DOTALL)
        raised = sorted({f"{kind.decode()}({message.decode()})" for kind, message in found})
        reasons.append(f"not raise {', '.join(raised)} (divide with error_model='numpy', keep steps constant)")
    return f"a kernel must {', and '.join(reasons) or 'call only what SYMBOLS lists'}"


# Linking: from object code to a function


@cache
def _linker() -> tuple[Any, dict[str, int]]:
    """Return LLVM's linker and the addresses it may use.

    ORC rather than MCJIT: for a missing symbol, MCJIT aborts the process and ORC raises.
    """
    llvm = _llvm()
    linker = llvm.create_lljit_compiler(use_jit_link=sys.platform != "win32", suppress_errors=True)
    addresses = {name: llvm.address_of_symbol(name) for name in SYMBOLS}
    return linker, {name: address for name, address in addresses.items() if address}


_libraries = count()


def _linked(code: Code, dtype: torch.dtype) -> Function:
    """Link machine code into a function; raise RuntimeError if it is not an object file or needs unknown symbols."""
    linker, addresses = _linker()
    builder = _llvm().JITLibraryBuilder().add_object_img(code.object).export_symbol(code.symbol)
    for name, address in addresses.items():
        builder.import_symbol(name, address)
    library = builder.link(linker, f"{code.symbol}.{next(_libraries)}")
    address = library[code.symbol]
    library.detach()  # otherwise the code is freed with `library`
    c_types = (_C_TYPES[type][dtype == torch.float64] for type in code.signature)
    return ctypes.CFUNCTYPE(None, *c_types)(address)  # ctypes releases the GIL
