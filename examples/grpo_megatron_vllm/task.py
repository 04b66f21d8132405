"""The task: say some digits backwards. A prompt is three digits and "=", the answer the same digits from last to first.

    prompt [3, 1, 4, 10]    answer [4, 1, 3]

A policy that knows nothing is right in one token of `VOCABULARY`. Nothing but attention to the right place helps.
"""

from __future__ import annotations

import torch

DIGITS, SYMBOLS, EQUALS = 3, 10, 10
VOCABULARY = 64  # vLLM pads a vocabulary to a multiple of 64
PROMPT_TOKENS, ANSWER_TOKENS = DIGITS + 1, DIGITS


def prompts(count: int, generator: torch.Generator) -> torch.Tensor:
    """Random prompts, int64 [count, PROMPT_TOKENS]."""
    digits = torch.randint(SYMBOLS, (count, DIGITS), generator=generator)
    return torch.cat([digits, torch.full((count, 1), EQUALS)], 1)


def rewards(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """1 for each right token, float32 [n, ANSWER_TOKENS]; of prompts [n, PROMPT_TOKENS] and answers [n, ANSWER_TOKENS]."""
    return (answers == prompts[:, :DIGITS].flip(1)).float()
