"""The private names of torch that regard uses, each with its reason.

No other module uses private names of torch; tests/regard/test_torch_internals.py detects changes.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear as OutProjection  # what torch's module has
from torch.utils._python_dispatch import TorchDispatchMode  # as torch's FLOP counter is made
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _dispatch_modes
from torch.utils._pytree import tree_map_only

#: The CPU kernel of ``F.scaled_dot_product_attention``, which also returns the log-sum-exp, and its backward pass,
#: which takes the log-sum-exp of a whole row: (query, key, value, dropout_p, is_causal, *, attn_mask, scale).
flash_attention: Any = torch._scaled_dot_product_flash_attention_for_cpu  # faster to call than the torch.ops version
flash_attention_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

#: The fast paths of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``, which compute attention and
#: have no public name.
fused_attention: Any = torch._native_multi_head_attention
fused_layer: Any = torch._transformer_encoder_layer_fwd

#: The operators of ``softmax`` and of dtype conversions, as dispatch modes see them.
softmaxes: Any = frozenset({torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default})
to_copy: Any = torch.ops.aten._to_copy.default

# Bound once, because every call uses them.
_is_compiling = torch.compiler.is_compiling
_interpreter = torch._C._functorch.peek_interpreter_stack
_forward_mode = torch.autograd.forward_ad
_modes = torch._C._len_torch_dispatch_stack
_jit_tracing = torch._C._get_tracing_state
_keys = torch._C.DispatchKey


class _Observers(threading.local):
    count = 0


_observers = _Observers()
_DERIVATIVES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)

#: Whether autocast is on for any device type: the public function checks only one.
is_autocast_enabled: Any = torch._C._is_any_autocast_enabled


class Observer(TorchDispatchMode):
    """A dispatch mode that observes the operators of a thread without changing them.

    Compiled code still runs under it; under other modes, Dynamo skips frames.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Observer:
        _observers.count += 1
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        _observers.count -= 1
        super().__exit__(*raised)


def in_functorch() -> bool:
    """Whether a transform of ``torch.func`` is active; there is no public function for this."""
    return _interpreter() is not None


def functorch_derivatives() -> int:
    """Return the nesting depth of ``torch.func`` derivatives; above 1, derivatives of derivatives are computed."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return sum(level.key() in _DERIVATIVES for level in stack)


def evaluated_by_compilers(function: Any) -> Any:
    """Let compilers evaluate a function at compile time; the public decorator imports the compiler (a second)."""
    function._dynamo_marked_constant = True
    return function


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for those of all examples of a ``torch.func.vmap`` that is running."""
    while torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return bool(torch._C._functorch.is_batchedtensor(tensor))


evaluated_by_compilers(in_functorch)
evaluated_by_compilers(functorch_derivatives)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active; there is no public function for this."""
    return _forward_mode._current_level >= 0


def is_dispatched() -> bool:
    """Whether a ``TorchDispatchMode`` other than :class:`Observer`, such as the FLOP counter, is active."""
    return _modes() > _observers.count


def dispatch_modes() -> list[Any]:
    """Return the ``TorchDispatchMode`` objects that are active."""
    return [*_dispatch_modes()]


def is_proxied() -> bool:
    """Whether ``make_fx`` is recording operators."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_jit_tracing() -> bool:
    """Whether ``torch.jit.trace`` is recording, outside the implementation of an operator."""
    return _jit_tracing() is not None and not torch._C._dispatch_tls_is_dispatch_key_excluded("Tracer")


def recording() -> Any:
    """Return a context in which autograd records even inside an operator, where torch disables it."""
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in (_keys.AutogradFunctionality, _keys.AutogradOther, _keys.AutogradNestedTensor):
        exclude = exclude.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)


def is_eager() -> bool:
    """Whether operations run eagerly: no compiler, tracer, mode or transform. One function, for speed."""
    return not (
        _is_compiling()
        or _interpreter() is not None
        or _forward_mode._current_level >= 0
        or (_modes() and is_dispatched())
        or (_jit_tracing() is not None and is_jit_tracing())
    )


def flattened(mesh: Any, name: str) -> Any:
    """Flatten a ``DeviceMesh`` to one dimension."""
    return mesh._flatten(name)


def joined(*meshes: Any) -> Any:
    """Concatenate submeshes of one ``DeviceMesh`` to a mesh of all their dimensions."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(list(meshes))


def in_backward() -> bool:
    """Whether a backward pass is running in this thread, in which checkpointed layers recompute their output."""
    return torch._C._current_graph_task_id() != -1


def uncompiled(function: Any) -> Any:
    """Return the original of a compiled function or module; others are returned unchanged."""
    if type(function) is FunctionType:
        return vars(function).get("_torchdynamo_orig_callable", function)
    return function._orig_mod if _is_optimized(function) else function


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    return _is_optimized(module) or module._compiled_call_impl is not None


def is_forced_eager() -> bool:
    """Whether compiled code runs eagerly because of ``torch.compiler.set_stance("force_eager")``."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and dynamo._stance.stance == "force_eager"


def _is_optimized(value: Any) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # its import takes a second; until then nothing is compiled
    return dynamo is not None and type(value) is dynamo.OptimizedModule


def is_compiled_frame(frame: FrameType) -> bool:
    """Whether a frame is the one in which ``torch.compile`` calls compiled code."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    code = frame.f_code
    return dynamo is not None and code.co_filename == dynamo.__file__ and "DisableContext" not in code.co_qualname


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is fake: it has a shape but no values."""
    return isinstance(tensor, FakeTensor)


def has_bfloat16_cells() -> bool:
    """Whether oneDNN supports recurrent cells in bfloat16 on this processor; otherwise it raises."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def replaced(kind: type, function: Any, values: Any) -> Any:
    """Apply a function to all objects of a type in nested lists, tuples and dictionaries."""
    return tree_map_only(kind, function, values)


def as_plain_tensors() -> Any:
    """Return a context in which tensor subclasses behave as plain tensors; there is no public context for this."""
    return torch._C.DisableTorchFunctionSubclass()


def without_storage(cls: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tensor subclass with metadata but no storage; there is no public function for this."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)


def changes_of(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor and its views; there is no public counter."""
    return int(tensor._version)


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor is a view of another, which compilers tell apart."""
    return tensor._base is not None


def assert_when_it_runs(condition: Tensor, message: str) -> None:
    """Raise RuntimeError at run time in a compiled function, in which Python assertions are traced away."""
    torch._assert_async(condition, message)


def compilation_errors() -> tuple[type[Exception], ...]:
    """Return what ``torch.compile`` raises if it cannot compile something; there are no public names for it."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return TorchDynamoException, InductorError


def distinct_sizes() -> Any:
    """Return a context in which compilers take sizes that happen to be equal for different ones.

    A function is then not compiled again when there are no longer as many blocks as sequences.
    """
    from torch.fx.experimental import _config

    settings: Any = _config
    return settings.patch(use_duck_shape=False)


def scan(step: Any, start: Any, rows: Any, dim: int) -> Any:
    """Return the last state of ``step(state, row) -> (state, output)`` over rows, a loop that ONNX has as well."""
    from torch._higher_order_ops.scan import scan

    return scan(step, start, rows, dim=dim)[0]


__all__ = [
    "Observer",
    "OutProjection",
    "as_plain_tensors",
    "assert_when_it_runs",
    "changes_of",
    "compilation_errors",
    "dispatch_modes",
    "distinct_sizes",
    "evaluated_by_compilers",
    "flash_attention",
    "flash_attention_backward",
    "flattened",
    "functorch_derivatives",
    "fused_attention",
    "fused_layer",
    "has_bfloat16_cells",
    "in_backward",
    "in_forward_mode",
    "in_functorch",
    "is_autocast_enabled",
    "is_batched",
    "is_compiled",
    "is_compiled_frame",
    "is_dispatched",
    "is_eager",
    "is_fake",
    "is_forced_eager",
    "is_jit_tracing",
    "is_proxied",
    "is_view",
    "joined",
    "recording",
    "replaced",
    "scan",
    "softmaxes",
    "to_copy",
    "uncompiled",
    "without_storage",
]
