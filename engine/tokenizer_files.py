"""What stands beside a checkpoint about its text: tokenizer, EOS ids, chat template.

Light on purpose: `tokenizers` reads tokenizer.json, and transformers is imported only where there
is none. A file that cannot be read is a CheckpointError that names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenfleet.engine.errors import CheckpointError, unreadable
from tokenfleet.engine.json_files import eos_token_ids, read_json_if_there

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What those of one checkpoint say."""

    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    """Of generation_config.json, else of config.json; any of them ends an output."""
    chat_template: str | None
    """Jinja; the default one where there are several."""
    named_tokens: dict[str, str]
    """Special tokens by the names that chat templates use."""

    @classmethod
    def read(cls, path: str | Path) -> TokenizerFiles:
        """Read those of a checkpoint's directory.

        Raises:
            CheckpointError: there is no tokenizer, or a file cannot be read.
        """
        path = Path(path)
        try:
            config = read_json_if_there(path / "tokenizer_config.json")
            return cls(
                _load_tokenizer(path),
                frozenset(eos_token_ids(path)),
                _chat_template(path, config),
                _named_tokens(config),
            )
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(path, error) from error


def _load_tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    try:
        if file.is_file():
            ready = Tokenizer.from_file(str(file))
            ready.no_truncation()  # what a training script left in the file
            ready.no_padding()
            return ready
        from transformers import AutoTokenizer

        slow: Any = AutoTokenizer.from_pretrained(str(path))
        tokenizer: Tokenizer = slow._tokenizer
        return tokenizer
    except Exception as error:  # both libraries raise bare Exceptions for bad files
        raise CheckpointError(
            f"{path} has no tokenizer that can be read ({error}); it needs tokenizer.json"
        ) from error


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            named[name] = text
    return named
