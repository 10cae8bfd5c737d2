"""Load the weights of a model: on this machine's CPU and GPUs, or on RPC servers."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
from llama_cpp._logger import set_verbose
from llama_cpp._utils import suppress_stdout_stderr

from ..errors import ModelError
from ..library.devices import why_no_gpu
from ..library.products import may_rearrange
from ..library.rpc import Offloading
from ..models.damage import LOGGER, check_file, check_header, load_failure, native_model
from ..models.file_identity import identify
from .parameters import Parameters

_backend_lock = threading.Lock()
_backend_is_ready = False


class Weights:
    """A GGUF file loaded by llama.cpp.

    Args:
        rpc_servers: host:port of other machines that compute layers.
        loaded: False to load no weights and allocate no rows, to find out sizes only.
        rearranged: whether ggml may repack weights for the processor; None to test first whether
            the results are correct.
    """

    def __init__(
        self,
        path: str,
        parameters: Parameters,
        *,
        rpc_servers: Sequence[str] = (),
        loaded: bool = True,
        rearranged: bool | None = None,
        progress: Callable[[float], None] | None = None,
        verbose: bool = False,
    ) -> None:
        self.path, self.loaded, self.verbose = path, loaded, verbose
        self.rpc_servers = tuple(rpc_servers)
        check_file(path)
        self.file = identify(path)
        wants_gpu = bool(parameters.n_gpu_layers)
        missing_gpu = why_no_gpu() if wants_gpu and not rpc_servers else None
        on_cpu = loaded and (not wants_gpu or missing_gpu is not None)
        can_be_mapped, types = check_header(path, on_cpu=on_cpu, verbose=verbose)
        self._offloading = Offloading(self.rpc_servers) if rpc_servers else None
        if missing_gpu is not None:
            warnings.warn(missing_gpu, RuntimeWarning, stacklevel=5)
        params = self.params = parameters.for_model(can_be_mapped=can_be_mapped and loaded)
        params.no_alloc = not loaded
        params.use_extra_bufts = rearranged is not False
        if loaded and not parameters.vocab_only and rearranged is None:
            has_gpu = wants_gpu and why_no_gpu() is None
            params.use_extra_bufts = may_rearrange(types, on_gpus=has_gpu)
        if self._offloading is not None:
            self._offloading.hand_to(params)
        _begin_backend(parameters.numa, verbose=verbose)
        self.native = self._load(progress)
        try:
            self.metadata: dict[str, str] = self.native.metadata()
        except UnicodeDecodeError as error:
            self.native.close()
            raise ModelError(load_failure(path)) from error
        self.n_layer = int(llama_cpp.llama_model_n_layer(self.native.model))
        self.n_vocab = int(self.native.n_vocab())
        if self._offloading is not None:
            self._offloading.hold()

    def _load(self, progress: Callable[[float], None] | None) -> Any:
        errors: list[BaseException] = []

        def on_progress(fraction: float, _user_data: Any) -> bool:
            try:
                if progress is not None:
                    progress(fraction)
            except BaseException as error:
                # no exception can pass through llama.cpp: stop loading, and raise it afterwards
                errors.append(error)
            return not errors

        # ctypes does not keep the callback alive
        self._progress = llama_cpp.llama_progress_callback(on_progress)
        self.params.progress_callback = self._progress
        try:
            native = native_model(self.path, self.params, verbose=self.verbose)
        except ModelError:
            for raised in errors:
                raise raised from None
            raise
        if not self.verbose:
            # llama_cpp logs llama.cpp's frequent warnings as errors
            LOGGER.setLevel(logging.CRITICAL)
        return native

    def close(self) -> None:
        if self._offloading is not None:
            self._offloading.release()
        self.native.close()

    @property
    def architecture(self) -> str:
        """Architecture from the metadata, such as "llama"."""
        return self.metadata.get("general.architecture", "")

    @property
    def address(self) -> int:
        return address(self.native.model)


def address(pointer: Any) -> int:
    """Return the address in a ctypes pointer or integer."""
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)


def _begin_backend(numa: bool | int, *, verbose: bool) -> None:
    """Initialise llama.cpp, once per process."""
    global _backend_is_ready
    set_verbose(verbose)
    with _backend_lock, suppress_stdout_stderr(disable=verbose):
        if not _backend_is_ready:
            llama_cpp.llama_backend_init()
            _backend_is_ready = True
        if numa:
            distribute = llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE
            llama_cpp.llama_numa_init(distribute if numa is True else numa)
    if verbose:
        print(llama_cpp.llama_print_system_info().decode(), file=sys.stderr)
