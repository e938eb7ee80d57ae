"""A causal language model: its network, tokenizer and shape, and passes over a sequence.

Not for loading one: that is `kvpolicy.inference.loading`; nor for finding one: `kvpolicy.models.reference`.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvpolicy.config.specs import ModelSpec
from kvpolicy.errors import InputError
from kvpolicy.models.finite import is_finite, not_finite_error
from kvpolicy.models.rotary_length import frequencies_of_length, length_of_change

_REQUIRED_COUNTS = ("num_hidden_layers", "num_attention_heads")
_LAYER_TYPES = {"full_attention", "sliding_attention"}  # a window is refused where a sample is longer than it
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A model with its tokenizer and shape.

    Attributes:
        network: The transformers model, in evaluation mode.
        tokenizer: Its tokenizer.
        spec: Counts that every tensor layout follows.
        digest: SHA-256 of its files, by which policies know it (`kvpolicy.inference.loading`); empty where nobody
        asked.
        sequence_tokens: Length of the sequence that all passes are of (`for_sequence`), where what a model computes
            depends on it; None: no longer than `change_tokens`.
    """

    network: nn.Module
    tokenizer: Any
    spec: ModelSpec
    digest: str = ""
    sequence_tokens: int | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.network.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights, keys and values are stored as."""
        return next(self.network.parameters()).dtype

    @property
    def decoder(self) -> Any:
        """The network without its product with the vocabulary."""
        return self.network.get_decoder()  # type: ignore[operator]  # of transformers

    @property
    def window(self) -> int | None:
        """Tokens of the sliding window that some of its layers attend to; None where all attend to everything."""
        config = self.network.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
        kinds = getattr(config, "layer_types", None)
        is_used = kinds is None or "sliding_attention" in kinds
        window: int | None = getattr(config, "sliding_window", None)
        return window if is_used and window else None

    @cached_property
    def change_tokens(self) -> int | None:
        """Tokens up to which a sequence has other rotary frequencies than a longer one; None where all have the same.

        Raises:
            InputError: If they change in a way that is not supported.
        """
        return length_of_change(self.decoder, self.spec.max_positions)

    def length_obstacle(self, num_prompt: int, num_tokens: int) -> str | None:
        """Why a sequence cannot be computed as the model would compute it; None if it can.

        Args:
            num_prompt: Tokens of its prompt: how long it is when the first token is predicted.
            num_tokens: Tokens of the whole.
        """
        change = self.change_tokens
        if num_tokens > self.spec.max_positions:
            return f"the model has {self.spec.max_positions} positions"
        if self.window and num_tokens > self.window:
            return f"some of the model's layers attend to a sliding window of {self.window} tokens"
        if change and num_prompt <= change < num_tokens:
            return (
                f"the model's rotary frequencies change after {change} tokens (LongRoPE), so that prompt and answer "
                "must be on one side of it"
            )
        return None

    def for_answer(self, num_prompt: int, num_answer: int, *, sample_id: str) -> "LanguageModel":
        """The model for passes over a sample's prompt, parts of it, and what follows the prompt.

        Args:
            num_prompt: Tokens of context and question.
            num_answer: The most tokens that follow.
            sample_id: Of the sample, for the error.

        Raises:
            InputError: If such a sequence cannot be computed as the model would compute it.
        """
        num_tokens = num_prompt + num_answer
        if (obstacle := self.length_obstacle(num_prompt, num_tokens)) is not None:
            raise InputError(f"sample {sample_id} takes {num_tokens} tokens with its answer, but {obstacle}")
        return self.for_sequence(num_tokens)

    def for_sequence(self, num_tokens: int) -> "LanguageModel":
        """The model for passes that are all of one sequence of at most so many tokens, however short each of them is.

        What is cached by one pass can be attended to by the next only if both have the same rotary frequencies.
        """
        return replace(self, sequence_tokens=num_tokens)

    @property
    def rotary_tokens(self) -> int:
        """Length for which to read the rotary embedding of the passes (`kvpolicy.models.rotary`)."""
        return self.sequence_tokens or self.change_tokens or self.spec.max_positions

    @property
    def embedding_table(self) -> Float[Tensor, "vocab width"]:
        """Embeddings of all tokens."""
        table: Tensor = self.network.get_input_embeddings().weight  # type: ignore[operator]  # of transformers
        return table

    @torch.inference_mode()
    def logits(
        self,
        token_ids: Int[Tensor, "row token"],
        positions: Int[Tensor, "row token"],
        num_logits: int,
    ) -> Float[Tensor, "row logit vocab"]:
        """Run the network and return the next-token logits of the last `num_logits` tokens of each row, if any.

        The attention is that of the active session (`kvpolicy.attention.session`).

        Raises:
            InputError: If a position is beyond what the model was made for, a token has no embedding, or the result is
                not finite.
        """
        self._require_positions(positions)
        embeddings = self.embedding_table.shape[0]
        if int(token_ids.max()) >= embeddings:
            raise InputError(
                f"token {int(token_ids.max())} has no embedding, the model has {embeddings}: "
                "its tokenizer and its weights do not belong together"
            )
        inputs = {"input_ids": token_ids.to(self.device), "position_ids": positions.to(self.device)}
        with self._frequencies(positions):
            if not num_logits:  # the product with the vocabulary alone takes more memory than all else on a short chunk
                states = self.decoder(**inputs, use_cache=False).last_hidden_state
                self._require_finite(states, "hidden states", inputs)
                return torch.zeros(len(token_ids), 0, embeddings, dtype=self.dtype, device=self.device)
            logits: Tensor = self.network(**inputs, use_cache=False, logits_to_keep=num_logits).logits
            self._require_finite(logits, "logits", inputs)
        return logits

    def run_embeddings(
        self, embeddings: Float[Tensor, "row token width"], positions: Int[Tensor, "row token"]
    ) -> Float[Tensor, "row token width"]:
        """Run the network on embeddings in the place of tokens, for what the active session keeps of it.

        Gradients flow to the embeddings where the caller allows them. They are cast to the network's type.

        Returns:
            The last hidden states.

        Raises:
            InputError: If a position is beyond what the model was made for, the width is not the model's, or the
                result is not finite.
        """
        self._require_positions(positions)
        width = self.embedding_table.shape[1]
        if embeddings.shape[-1] != width:
            raise InputError(
                f"embeddings have width {embeddings.shape[-1]}, the model's have {width}: they belong to another model"
            )
        inputs = {
            "inputs_embeds": embeddings.to(self.device, self.dtype),
            "position_ids": positions.to(self.device),
        }
        with self._frequencies(positions):
            states: Tensor = self.decoder(**inputs, use_cache=False).last_hidden_state
            self._require_finite(states, "hidden states", inputs)
        return states

    def _require_finite(self, result: Tensor, name: str, inputs: dict[str, Tensor]) -> None:
        """Where a result is not, the pass is run once more to find the first layer that is to blame."""
        if is_finite(result):
            return
        wrong: list[int] = []

        def note(index: int, output: Any) -> None:
            if not is_finite(output[0] if isinstance(output, tuple) else output):
                wrong.append(index)

        layers = enumerate(getattr(self.decoder, "layers", ()))
        hooks = [
            layer.register_forward_hook(lambda module, given, output, index=index: note(index, output))
            for index, layer in layers
        ]
        try:
            self.decoder(**inputs, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        raise not_finite_error(f"hidden states after layer {wrong[0]}" if wrong else name, self.dtype)

    def _require_positions(self, positions: Int[Tensor, "row token"]) -> None:
        last = int(positions.max())
        if last >= self.spec.max_positions:
            raise InputError(
                f"position {last} is beyond the model's {self.spec.max_positions} positions: "
                "use shorter samples or a model with a longer context"
            )
        if self.window and last >= self.window:
            raise InputError(
                f"position {last} is beyond the sliding window of {self.window} tokens that some of the model's layers "
                "attend to: use samples that fit in the window, or a model without one"
            )

    def _frequencies(self, positions: Int[Tensor, "row token"]) -> AbstractContextManager[None]:
        """Take the rotary frequencies of the whole sequence, and never those of another length than the cache has."""
        change = self.change_tokens
        if change is None:
            return nullcontext()
        last, whole = int(positions.max()), self.sequence_tokens or 0
        if last >= change >= whole:
            raise InputError(
                f"position {last} is beyond the {change} tokens after which the model's rotary frequencies change "
                "(LongRoPE), and the sequence began with those of shorter ones: use samples on one side of it"
            )
        return frequencies_of_length(self.decoder, whole) if last < change < whole else nullcontext()


def read_spec(config: Any) -> ModelSpec:
    """Read a model's counts from its transformers configuration.

    Raises:
        InputError: If it is not a decoder with (grouped) multi-head attention, or has layers that attend in a way that
            importance, as defined here, does not follow.
    """
    config = config.get_text_config(decoder=True)
    missing = [name for name in _REQUIRED_COUNTS if not getattr(config, name, None)]
    if missing or getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"architecture {config.model_type!r} has no {' and '.join(missing) or 'decoder-only stack'}: "
            "supported are decoders with rotary positions and (grouped) multi-head attention"
        )
    if getattr(config, "rope_parameters", None) is None and getattr(config, "rope_scaling", None) is None:
        raise InputError(f"architecture {config.model_type!r} has no rotary positions, which the method needs")
    if unknown := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        raise InputError(
            f"architecture {config.model_type!r} has layers of {', '.join(sorted(unknown))}, which is not supported: "
            f"expected {' or '.join(sorted(_LAYER_TYPES))}"
        )
    num_query_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_query_heads
    return ModelSpec(
        num_layers=config.num_hidden_layers,
        num_query_heads=num_query_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_query_heads,
        head_dim=head_dim,
        max_positions=config.max_position_embeddings,
    )
