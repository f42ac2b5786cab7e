"""DecodeStep: a model's forward of one token for each sequence, captured once and replayed while its cache grows."""

from __future__ import annotations

from typing import Any

import torch

from vtensor.errors import RequestError
from vtensor.integrations import attention_function
from vtensor.integrations.virtual_cache import VirtualCache
from vtensor.integrations.virtual_layer import VirtualLayer

__all__ = ["DecodeStep"]

_WARM_UPS = 2  # forwards before the capture, in which kernels are compiled and workspaces made


class DecodeStep:
    """The forward of one new token for each sequence of a `VirtualCache`: on a GPU one CUDA graph, captured once.

    What changes from step to step lies on the device, at fixed addresses: the tokens, their positions, and the lengths
    of the sequences, by which K and V are written and read. What the host does in a step is to see to it that there is
    memory for the new tokens, before the graph is replayed; so a shortage leaves all as it was. On a CPU each call is a
    forward.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With ``set_attn_implementation("vtensor")``, and no layers but attention that our kernels compute.
    cache : VirtualCache
        Of the model, with the prompts in it.
    attention_mask : Tensor, optional
        [B, tokens held], 0 for padding, which is all on the left. None: no padding.
    compile : bool or dict
        Whether to have the forward compiled, by torch.compile with these options, before it is captured. (On a CPU that
        compiles it for each length.)

    Raises
    ------
    RequestError
        A cache or a model that it does not serve; the message says why.

    Notes
    -----
    As long as it is used, sequences may be shortened. After `reset`, and where they have changed places, it takes a new
    one, and says so.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...                                      num_attention_heads=2, max_position_embeddings=4096)).eval()
    >>> model.set_attn_implementation("vtensor")
    >>> with torch.no_grad(), VirtualCache.for_model(model) as cache:
    ...     logits = model(torch.tensor([[1, 2, 3]]), past_key_values=cache).logits
    ...     step = DecodeStep(model, cache)
    ...     for _ in range(5):
    ...         logits = step(logits[:, -1:].argmax(-1))
    ...     logits.shape, cache.get_seq_length()
    (torch.Size([1, 1, 64]), 8)
    """

    def __init__(
        self,
        model: Any,
        cache: VirtualCache,
        attention_mask: torch.Tensor | None = None,
        *,
        compile: bool | dict[str, Any] = False,
    ) -> None:
        self._model, self._cache, self._call = model, cache, model
        if compile is not False:
            self._call = torch.compile(model.forward, **{"dynamic": False, **({} if compile is True else compile)})
        self._layers = _layers_of(cache)
        name = model.config.get_text_config(decoder=True)._attn_implementation
        if name != attention_function.NAME:
            raise RequestError(
                f"the model's attention is {name!r}; call model.set_attn_implementation('vtensor') first"
            )
        group = self._layers[0].group
        self._changes = group.changes
        self._batch, held = group.batch_size, self._layers[0].num_tokens
        device = self._layers[0].device
        self._padding: attention_function.LeftPadding | None = None
        with torch.inference_mode(False):  # calls may be in any mode
            starts = torch.zeros(self._batch, dtype=torch.int32, device=device)
            self._tokens = torch.zeros(self._batch, 1, dtype=torch.long, device=device)
            self._positions = torch.zeros(self._batch, 1, dtype=torch.long, device=device)  # without padding
            self._places = torch.zeros(1, dtype=torch.long, device=device)  # the same with padding
        if attention_mask is not None:
            padding = attention_function.left_padding(attention_mask.to(device).bool())
            if attention_mask.shape != (self._batch, held):
                raise RequestError(
                    f"attention_mask has shape {list(attention_mask.shape)}; it must be [{self._batch}, {held}], one "
                    "value for each token held"
                )
            if padding is None:
                raise RequestError("attention_mask has zeros behind ones: padding must be all on the left")
            if padding.most_start:
                self._padding, starts = padding, padding.starts
        self._starts = starts
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: torch.Tensor | None = None

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Write one token for each sequence, and tell what may come next.

        Parameters
        ----------
        tokens : Tensor
            [B, 1] or [B], of integers, on any device.

        Returns
        -------
        Tensor
            Logits [B, 1, vocabulary]; on a GPU in memory that the next call writes to.

        Raises
        ------
        OutOfPagesError
            No memory for the new tokens; nothing has changed.
        RequestError
            Tokens of another batch, or more of them than `max_cache_len`.
        """
        group = self._layers[0].group
        if group.changes != self._changes or group.batch_size != self._batch:
            raise RequestError("the cache was reset, or its sequences have changed places: make a new DecodeStep")
        if tokens.numel() != self._batch:
            raise RequestError(f"tokens has shape {list(tokens.shape)}; it must be [{self._batch}, 1], one a sequence")
        if tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
            raise RequestError(f"tokens has dtype {tokens.dtype}; they must be integers")
        self._check_padding(self._layers[0].num_tokens)
        held = self._cache.begin_step()
        try:
            return self._run(tokens, held)
        except BaseException:
            self._cache.end_step(held)
            raise

    def _check_padding(self, held: int) -> None:
        if self._padding is None:
            return
        most_start, limit = self._padding.most_start, self._cache.max_cache_len
        if held + 1 + most_start > limit:
            raise RequestError(
                f"{held + 1:,} tokens, of which {most_start:,} are padding, need addresses for "
                f"{held + 1 + most_start:,}: make the VirtualCache with that max_cache_len or more, which is {limit:,} "
                "(it costs addresses only)"
            )
        if held < most_start:
            raise RequestError(
                f"the cache was cropped to {held} tokens, into its padding of up to {most_start}: make a new DecodeStep"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodeStep:
        raise RequestError("a DecodeStep is captured over one cache: copy that, and make another step for the copy")

    def _run(self, tokens: torch.Tensor, held: int) -> torch.Tensor:
        self._tokens.copy_(tokens.reshape(-1, 1))
        self._places.fill_(held)
        torch.sub(self._places, self._starts[:, None], out=self._positions)
        if self._tokens.device.type != "cuda":
            return self._forward(held)
        if self._graph is None:
            self._capture(held)
        assert self._graph is not None
        assert self._logits is not None
        self._graph.replay()
        for layer in self._layers:
            layer.hold(held + 1)
        return self._logits

    def _capture(self, held: int) -> None:
        device = self._tokens.device
        new_stream: Any = torch.cuda.Stream
        stream = new_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):  # each writes the same rows
                self._forward(held)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._forward(held)
        self._graph = graph

    def _forward(self, held: int) -> torch.Tensor:
        """A forward whose tensors are all fixed; leaves the layers with the new tokens."""
        for layer in self._layers:
            layer.hold(held)
        mask = None if self._padding is None else self._padding.mask_of(held + 1)
        arguments: dict[str, Any] = {"cache_position": self._places} if attention_function.TAKES_POSITIONS else {}
        with self._cache.writing_in_place(), attention_function.known(self._padding):
            found = self._call(
                input_ids=self._tokens,
                attention_mask=mask,
                position_ids=self._positions,
                past_key_values=self._cache,
                use_cache=True,
                **arguments,
            )
        for layer in self._layers:
            if not layer.was_read_in_place:
                raise RequestError(
                    f"layer {layer.index} of {type(self._model).__name__} is not computed by kernels over the cache "
                    "itself, so its forward cannot be repeated while the cache grows; call the model instead"
                )
        logits: torch.Tensor = found.logits
        return logits


def _layers_of(cache: VirtualCache) -> list[VirtualLayer]:
    layers = [layer for layer in cache.layers if isinstance(layer, VirtualLayer)]
    others = sorted(
        {type(layer).__name__ for layer in cache.layers if not isinstance(layer, VirtualLayer)} - {"DummyLayer"}
    )
    if others:
        raise RequestError(f"the cache has layers that are not attention ({', '.join(others)}); call the model instead")
    if not layers[0].num_tokens:
        raise RequestError("the cache holds no prompt: call the model with it first")
    if len({layer.num_tokens for layer in layers}) > 1:
        raise RequestError("the cache's layers hold different numbers of tokens, after a forward that failed: crop it")
    if len({layer.device for layer in layers}) > 1:
        raise RequestError("the cache's layers are on several devices, which one CUDA graph does not reach")
    return layers
