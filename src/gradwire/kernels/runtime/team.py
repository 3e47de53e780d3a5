# pyright: basic
"""Several calls of one compiled kernel at once, by the threads that torch's own operators use.

Between two operators torch's OpenMP threads wait busily for a while. Threads of our own would have to be woken for each
tensor, which takes as long as coding a small one, and would share the processors with those that wait. OpenMP asks for
a C function of one pointer: `CompiledEntry` makes one that unpacks a table of arguments, a row for each call.

With two threads and grains of 2^20 elements a step of `int4` or `sign` codes for 1.5 times as long on threads of ours.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Sequence
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.np.arrayobj import populate_array
from numba.np.numpy_support import as_dtype

_WORD = ir.IntType(64)
_WORD_STRUCT, _ANSWER = struct.Struct("=q"), struct.Struct("=qq")


@functools.cache
def _openmp() -> Any:
    """The OpenMP that torch loaded, or None: not every platform's can be entered by this name."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        library = ctypes.CDLL(None)
        for name in ("omp_get_thread_num", "omp_get_num_threads"):
            getattr(library, name)
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
    except (AttributeError, OSError, TypeError):
        return None
    return library


_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


# OpenMP believes that threads exist which a forked child does not have, and would wait for them.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def available() -> bool:
    """Whether this process can hand kernels to OpenMP."""
    return not _forked and _openmp() is not None


_entries: dict[str, CompiledEntry | None] = {}


def entry_of(dispatcher: Any) -> CompiledEntry | None:
    """The entry of a kernel that is compiled for one signature, or None where it returns more than a number."""
    compiled = next(iter(dispatcher.overloads.values()))  # of the signature it was declared with
    name, result = compiled.fndesc.mangled_name, compiled.signature.return_type
    with global_compiler_lock:  # two threads may want it first, and its name must be compiled once
        if name not in _entries:
            simple = isinstance(result, (types.NoneType, types.Integer, types.Boolean))
            _entries[name] = CompiledEntry(compiled) if simple else None
        return _entries[name]


class CompiledEntry:
    """A compiled kernel as OpenMP calls it: each thread takes rows of a table, and writes the results there."""

    def __init__(self, compiled: Any) -> None:
        kinds = compiled.signature.args
        self._returns = compiled.signature.return_type != types.void
        self._arrays = [(i, as_dtype(kind.dtype), kind.ndim) for i, kind in enumerate(kinds) if _is_array(kind)]
        slots = "".join("q" * (1 + k.ndim) if _is_array(k) else "d" if _is_float(k) else "q" for k in kinds)
        self._row = struct.Struct("=" + slots + "qq")  # what it is called with, its status and its result
        self._library, name = _compile_entry(compiled, self._row.size // 8)
        self._address = self._library.get_pointer_to_function(name)

    def __call__(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        """Call the kernel with each row's arguments, at once, and return what it returned.

        Raises:
            TypeError: an array of another kind than the kernel was compiled for.
            RuntimeError: the kernel failed.
        """
        table = ctypes.create_string_buffer(8 + len(rows) * self._row.size)
        _WORD_STRUCT.pack_into(table, 0, len(rows))
        for i, row in enumerate(rows):
            self._row.pack_into(table, 8 + i * self._row.size, *self._words(row), 0, 0)
        _openmp().GOMP_parallel(self._address, ctypes.addressof(table), len(rows), 0)
        answers = [_ANSWER.unpack_from(table, 8 + (i + 1) * self._row.size - _ANSWER.size) for i in range(len(rows))]
        if any(failed for failed, _ in answers):
            raise RuntimeError("a kernel could not go on, most likely for want of memory for its scratch")
        return [result if self._returns else None for _, result in answers]

    def _words(self, row: Sequence[Any]) -> list[Any]:
        """The arguments as the table holds them: an array is its address and its shape."""
        words, done = [], 0
        for i, dtype, ndim in self._arrays:
            array = row[i]
            if array.dtype != dtype or array.ndim != ndim or not array.flags.c_contiguous:
                raise TypeError(f"argument {i} is to be a contiguous array of {ndim} dimensions of {dtype}")
            words += row[done:i]
            # a third of what asking the array itself takes, which builds a dict or an object to say it
            words.append(ctypes.addressof(ctypes.c_char.from_buffer(array)) if array.size else 0)
            words += array.shape
            done = i + 1
        return words + list(row[done:])


def _is_array(kind: Any) -> bool:
    return isinstance(kind, types.Array)


def _is_float(kind: Any) -> bool:
    return isinstance(kind, types.Float)


def _compile_entry(compiled: Any, width: int) -> tuple[Any, str]:
    """Compile `void entry(int64 *table)` for a kernel whose rows have `width` words; return its library and name."""
    context, signature = compiled.target_context, compiled.signature
    name = "gradwire_entry_" + compiled.fndesc.mangled_name
    library = context.codegen().create_library(name)
    module = library.create_ir_module(name)
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [_WORD.as_pointer()]), name)
    builder = ir.IRBuilder(entry.append_basic_block())
    kernel = context.declare_function(module, compiled.fndesc)
    [table] = entry.args
    mine = _call_openmp(builder, "omp_get_thread_num")
    threads = _call_openmp(builder, "omp_get_num_threads")  # may be fewer than asked for
    with cgutils.for_range_slice(builder, mine, builder.load(table), threads) as (index, _):
        at = builder.add(builder.mul(index, ir.Constant(_WORD, width)), ir.Constant(_WORD, 1))
        row = builder.gep(table, [at])
        arguments, place = [], 0
        for kind in signature.args:
            arguments.append(_argument(context, builder, kind, row, place))
            place += 1 + (kind.ndim if _is_array(kind) else 0)
        status, result = context.call_conv.call_function(
            builder, kernel, signature.return_type, signature.args, arguments
        )
        failed = builder.zext(status.is_error, _WORD)
        builder.store(failed, _place(builder, row, width - 2))
        if isinstance(result.type, ir.IntType):
            signed = getattr(signature.return_type, "signed", False)
            wide = result if result.type.width == 64 else (builder.sext if signed else builder.zext)(result, _WORD)
            builder.store(wide, _place(builder, row, width - 1))
    builder.ret_void()
    library.add_ir_module(module)
    library.finalize()
    return library, name


def _call_openmp(builder: Any, name: str) -> Any:
    """Call an OpenMP function of no arguments, by its address, and widen what it returns."""
    address = ctypes.cast(getattr(_openmp(), name), ctypes.c_void_p).value
    kind = ir.FunctionType(ir.IntType(32), [])
    return builder.zext(builder.call(builder.inttoptr(ir.Constant(_WORD, address), kind.as_pointer()), []), _WORD)


def _place(builder: Any, row: Any, i: int) -> Any:
    return builder.gep(row, [ir.Constant(_WORD, i)])


def _argument(context: Any, builder: Any, kind: Any, row: Any, place: int) -> Any:
    """What the row says from `place` on, as numba has it."""
    word = builder.load(_place(builder, row, place))
    if _is_float(kind):
        double = builder.bitcast(word, ir.DoubleType())
        return double if kind.bitwidth == 64 else builder.fptrunc(double, ir.FloatType())
    if not _is_array(kind):
        wanted = context.get_value_type(kind)
        return word if wanted.width == 64 else builder.trunc(word, wanted)
    array = context.make_array(kind)(context, builder)
    shape = [builder.load(_place(builder, row, place + 1 + axis)) for axis in range(kind.ndim)]
    itemsize = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides = [ir.Constant(_WORD, itemsize)]
    for size in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], size))
    data = builder.inttoptr(word, array.data.type)
    populate_array(array, data, shape, strides, itemsize, None)
    return array._getvalue()
