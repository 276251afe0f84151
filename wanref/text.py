"""Text encoding, as the stock pipeline does it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wanref.checkpoint import Checkpoint


class TextEncoder:
    """The checkpoint's tokenizer and UMT5 encoder."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        import transformers

        tokenizer_class, encoder_class = (getattr(transformers, name) for name in checkpoint.text_classes)
        self.tokenizer = tokenizer_class.from_pretrained(checkpoint.path / "tokenizer")
        encoder = encoder_class.from_pretrained(checkpoint.path / "text_encoder", dtype=dtype, use_safetensors=True)
        self.encoder = encoder.to(device).eval().requires_grad_(False)

    def check_length(self, texts: Sequence[str], max_sequence_length: int) -> None:
        """Raise ValueError for a text that has more tokens than this: stock diffusers cuts it silently."""
        for text in texts:
            tokens = len(self.tokenizer(_clean(text)).input_ids)
            if tokens > max_sequence_length:
                raise ValueError(
                    f"max_sequence_length={max_sequence_length} is less than the {tokens} tokens of the prompt "
                    f"{text[:60]!r}: shorten the prompt, or raise max_sequence_length."
                )

    def encode(self, texts: Sequence[str], videos_per_prompt: int, max_sequence_length: int) -> torch.Tensor:
        """[prompts * videos, max_sequence_length, text_dim], zero behind each text's end."""
        inputs = self.tokenizer(
            [_clean(text) for text in texts], padding="max_length", max_length=max_sequence_length, return_tensors="pt"
        )
        ids, mask = inputs.input_ids.to(self.encoder.device), inputs.attention_mask.to(self.encoder.device)
        embeds: torch.Tensor = self.encoder(ids, mask).last_hidden_state
        # The padded rows are replaced, not multiplied, as in the stock pipeline: zero even where they are NaN.
        embeds = embeds.masked_fill(mask.unsqueeze(-1) == 0, 0)
        return embeds.repeat_interleave(videos_per_prompt, dim=0)


def _clean(text: str) -> str:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    return str(prompt_clean(text))
