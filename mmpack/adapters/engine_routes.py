"""Routes as engines return them: a row per token that the engine ran, so none for the last one that it sampled."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

import numpy as np

from mmpack.errors import ArgumentError, kind_of
from mmpack.schema.routes import compact_routes, layers_with_experts


def routes_of_rows(rows: Any, length: int, where: str) -> np.ndarray:
    """uint8 or uint16 [length, layers, k] of an engine's rows [length − 1, layers, k]; the last token's are zeros.

    Engines have a layer without experts too, of zeros: it is left out, so `layers` are those with experts. uint8 where
    all ids are below 256.

    Raises: ArgumentError for rows of other tokens, and for what are no expert ids.
    """
    try:
        array = np.asarray(rows)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        array = np.zeros(0)
    if array.ndim != 3 or array.dtype.kind not in "iu" or not array.size or array.min() < 0:
        known = isinstance(rows, np.ndarray)
        found = f"{array.dtype} {list(array.shape)}" if known else kind_of(rows)
        raise ArgumentError(
            f"{where}: routed_experts is {found}, expected expert ids [{length - 1}, layers, k]. "
            "Fix: pass them as the engine returned them"
        )
    if len(array) not in (length - 1, length):
        raise ArgumentError(
            f"{where}: routed_experts has {len(array)} rows for {length} tokens, of which the engine ran {length - 1}. "
            "Fix: pass routes from the first token on (no routed_experts_prompt_start, no routed_experts_start_len)"
        )
    if array.shape[2] > 1 and not array.any():
        raise ArgumentError(
            f"{where}: routed_experts is zero everywhere: the engine recorded nothing. "
            "Fix: use an engine that returns them for this model"
        )
    array = layers_with_experts(array)
    out = np.zeros((length, *array.shape[1:]), array.dtype)
    out[: length - 1] = array[: length - 1]
    return compact_routes(out, 256 if int(out.max()) < 256 else 65_536)


def decoded_rows(text: Any, config: Any, where: str) -> np.ndarray:
    """int32 [rows, layers, k] of SGLang's base64, whose shape the model's config says.

    Raises: ArgumentError for a text that is no base64, no config, or one of another model.
    """
    try:
        flat = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    except (TypeError, ValueError, binascii.Error):
        raise ArgumentError(
            f"{where}: routed_experts is not base64 of int32. Fix: pass meta_info as the engine returned it"
        ) from None
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = getattr(text_config, "num_hidden_layers", None)
    names = "num_experts_per_tok", "top_k_experts"  # the second one: Gemma 4
    k = next((k for name in names if (k := getattr(text_config, name, None))), None)
    if not isinstance(layers, int) or not isinstance(k, int):
        raise ArgumentError(
            f"{where}: it has routed_experts, whose layers and experts per token only the model's config says. "
            "Fix: pass config=AutoConfig.from_pretrained(…)"
        )
    if not flat.size or flat.size % (layers * k):
        raise ArgumentError(
            f"{where}: routed_experts has {flat.size} ids, no rows of {layers} layers with {k} each. "
            "Fix: pass the config of the engine's model"
        )
    return flat.reshape(-1, layers, k)


def npy_rows(text: Any, where: str) -> np.ndarray:
    """The array of a `.npy` file in base64, as vLLM's server writes routes. Raises: ArgumentError."""
    try:
        rows = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
        if not isinstance(rows, np.ndarray):  # of an archive
            raise TypeError
        return rows
    except Exception:  # base64's, numpy's, and what a broken header raises
        raise ArgumentError(
            f"{where}: routed_experts is not base64 of a .npy file. Fix: pass the choice whole"
        ) from None


def encoded_rows(routes: np.ndarray) -> str:
    """SGLang's base64 of routes [length, layers, k], without the last token's."""
    return base64.b64encode(routes[:-1].astype("<i4").tobytes()).decode("ascii")
