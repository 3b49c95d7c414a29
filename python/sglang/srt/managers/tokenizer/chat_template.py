"""Rendering of chat messages to a prompt, by the model's own template or one from a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2

from sglang.srt.function_call.gpt_oss_detector import CHANNEL
from sglang.srt.managers.tokenizer.generate_request import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

_PROGRAM_ERRORS: Final = (
    ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
)  # fmt: skip
"""Errors that a template's expressions raise for values of a wrong type or size."""


class ChatTemplate:
    """Renders conversations; made once per server."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, path: str | None = None) -> None:
        """Use the template in file `path`; None: the tokenizer's. Raises as `read_template`."""
        self._tokenizer = tokenizer
        self._template: str | None = None if path is None else read_template(path)
        self.exists = self._template is not None or tokenizer.chat_template is not None
        """True if there is a template to render with."""
        source = self._template or tokenizer.chat_template or ""
        self.source = "\n".join(source.values()) if isinstance(source, dict) else source
        """Text of the template, or of all that the tokenizer has."""
        self.takes_tools = "tools" in self.source
        """True if the template shows tools to the model."""
        self.has_channels = CHANNEL in self.source
        """True if it writes messages as gpt-oss does."""
        self._has_warned = False

    def warn_of_ignored_tools(self) -> None:
        """Log that a request's tools are ignored; once for all requests."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Tools of requests are ignored, because the chat template shows the model no "
                "tools: start the server with a --chat-template that does, or send tool_choice: "
                "required, which a grammar enforces. This is logged once."
            )

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`; special tokens are part of its text.

        Args:
            tools: Tools in OpenAI's form; see `takes_tools`.
            variables: More variables for the template (`chat_template_kwargs`).

        Raises:
            InvalidRequest: There is no template, or it refuses the messages.
        """
        if not self.exists:
            raise InvalidRequest(
                "messages: this model has no chat template; start the server with "
                "--chat-template FILE, or use /v1/completions",
                field="messages",
            )
        options = {
            **(variables or {}),
            "tools": None if tools is None else list(tools),
            "chat_template": self._template,
            "tokenize": False,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        try:
            try:
                text = self._tokenizer.apply_chat_template(list(messages), **options)
            except TypeError:
                # DeepSeek's templates join the arguments of calls with strings.
                text = self._tokenizer.apply_chat_template(_with_texts(messages), **options)
        # A template is a program of the model's author; input that it cannot process is the
        # client's mistake.
        except (jinja2.TemplateError, *_PROGRAM_ERRORS) as error:
            cause = " ".join(str(error).split())[:300] or type(error).__name__
            raise InvalidRequest(
                f"messages: the chat template refuses them: {cause}", field="messages"
            ) from error
        except RecursionError:
            raise InvalidRequest(
                "messages, tools or chat_template_kwargs are nested too deeply: flatten them",
                field="messages",
            ) from None
        assert isinstance(text, str)
        return text


def _with_texts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, with the arguments of their tool calls as JSON texts."""
    made = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or []:
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            calls.append({**call, "function": {**function, "arguments": arguments}})
        made.append({**message, "tool_calls": calls} if calls else message)
    return made


def read_template(path: str) -> str:
    """The template in file `path`. Raises ValueError if it cannot be read, or has no template."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except FileNotFoundError:
        # SGLang has templates by name, such as chatml.
        raise ValueError(
            f"--chat-template {path}: no such file; give a Jinja file: templates have no names here"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template {path}: cannot be read: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"--chat-template {path}: line {error.lineno}: {error.message}") from error
    return text
