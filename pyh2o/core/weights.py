"""The weights of a model, as llama.cpp loads them: here, on GPUs, or on other machines."""

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
    """What llama.cpp has loaded of a GGUF file.

    Args:
        path: a GGUF file.
        parameters: what llama.cpp gets.
        rpc_servers: host:port of other machines that compute layers.
        loaded: False to load no weights, and to take no memory for rows either: the sizes of all
            are then known, and nothing can be computed.
        rearranged: whether ggml may lay weights out as the processor likes them; None to try first
            whether it multiplies those rightly.
        progress: called with 0 .. 1 while the weights load.
        verbose: show llama.cpp's log.

    Raises:
        PyH2OError: as `Llama` says.

    Attributes:
        native: llama_cpp's internal object.
        params: llama_model_params that it was made with.
        file: which file was loaded, whatever has its name by now.
        metadata: of the file.
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
                # No exception can pass through llama.cpp: stop the loading, and raise it after.
                errors.append(error)
            return not errors

        # ctypes does not keep the callback alive by itself
        self._progress = llama_cpp.llama_progress_callback(on_progress)
        self.params.progress_callback = self._progress
        try:
            native = native_model(self.path, self.params, verbose=self.verbose)
        except ModelError:
            for raised in errors:
                raise raised from None
            raise
        if not self.verbose:
            # llama_cpp takes warnings for errors, and there are some for many contexts
            LOGGER.setLevel(logging.CRITICAL)
        return native

    def close(self) -> None:
        """Free them."""
        if self._offloading is not None:
            self._offloading.release()
        self.native.close()

    @property
    def architecture(self) -> str:
        """As the file has it."""
        return self.metadata.get("general.architecture", "")

    @property
    def address(self) -> int:
        """Of the `llama_model`."""
        return address(self.native.model)


def address(pointer: Any) -> int:
    """The address in a ctypes pointer or integer."""
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)


def _begin_backend(numa: bool | int, *, verbose: bool) -> None:
    """Let llama.cpp get ready, once in a process."""
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
