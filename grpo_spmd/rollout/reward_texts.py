"""What a reward model reads of a rollout: token ids, by its own tokenizer and chat template where they differ."""

from __future__ import annotations

from typing import Any

from grpo_spmd.model.hf_files import load_tokenizer
from grpo_spmd.model.reward_model_files import RewardModelFiles, said_of
from grpo_spmd.records import Completion, Prompt


class TextError(ValueError):
    """A rollout that cannot be shown to the model, and why."""


class RewardTexts:
    """Chat messages, and episodes, go through the model's chat template, the completion as the assistant's message,
    without a generation prompt. Plain text is prompt and completion, one behind the other: the token ids as the policy
    read and sampled them where the model has the policy's whole vocabulary, else the text encoded anew."""

    def __init__(self, files: RewardModelFiles, policy_tokenizer: Any) -> None:
        """Raises ConfigError where there is no tokenizer."""
        with said_of(f"{files.where}.model"):
            self.tokenizer = load_tokenizer(str(files.folder))
        self._files = files
        self._shares_ids = policy_tokenizer.get_vocab().items() <= self.tokenizer.get_vocab().items()

    def ids_of(self, prompt: Prompt, completion: Completion, text: str) -> list[int] | None:
        """`text`: the completion, decoded. None where it is too long for a score. Raises TextError."""
        ids = self._ids(prompt, completion, text)
        if not ids:
            raise TextError("has no token to read")
        longest = self._files.longest
        if len(ids) <= longest:
            return ids
        return ids[-longest:] if self._files.drops_start else None

    def _ids(self, prompt: Prompt, completion: Completion, text: str) -> list[int]:
        asked, episode = prompt.text, completion.episode
        if isinstance(asked, str) and episode is None:
            if self._shares_ids:
                return [*prompt.token_ids, *completion.token_ids]
            return list(self.tokenizer(asked + text)["input_ids"])
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        messages += [{"role": "assistant", "content": text}] if episode is None else episode.messages
        options = {"chat_template": self._files.template, "add_generation_prompt": False, "return_dict": False}
        try:
            return list(self.tokenizer.apply_chat_template(messages, tokenize=True, **options))
        except Exception as error:  # a template may refuse with any error, e.g. roles in an order that it does not know
            raise TextError(f"cannot be shown in its chat template: {type(error).__name__}: {error}") from None
