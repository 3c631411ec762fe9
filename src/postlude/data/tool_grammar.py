"""ToolGrammar: which completions are tool calls, in the form in which a chat template writes them.

A grammar is text in llguidance's form of Lark, in which <[7]> is the token 7 and %json begins a JSON schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from postlude.data.chat_template import NAME, ChatTemplate
from postlude.data.tool_calls import Llama3, Qwen3Coder, ToolCallFormat, written_call

ARGUMENTS = re.compile(r'\{\s*"probe"\s*:\s*1\s*\}')
PARAMETER = re.compile(r"<parameter=probe(>\s*)1(\s*</parameter>)(\s*)")
TEXT = r"/(.|\n)*/"
SPACE = r"[ \n\t]{0,20}"  # between two parts of JSON; without a limit a completion may have nothing else


class ToolGrammar:
    """Writes the grammars of a template's calls, whose format was detected."""

    def __init__(self, template: ChatTemplate, form: ToolCallFormat) -> None:
        self.template, self.format = template, form
        self._special = {
            str(token): id for id, token in template.tokenizer.added_tokens_decoder.items() if token.special
        }
        written = written_call(template)
        start = min((written.find(opening) for opening in form.openings if opening in written), default=0)
        self._head, _, rest = written[start:].lstrip().partition(NAME)
        pattern = PARAMETER if isinstance(form, Qwen3Coder) else ARGUMENTS
        arguments = pattern.search(rest)
        closing = next((text for text in form.closings if arguments and text in rest[arguments.end() :]), None)
        if arguments is None or closing is None:
            raise ValueError(
                f"tools: calls cannot be enforced in the form of the model's chat template, {written!r:.80}."
            )
        self._middle, self._groups = rest[: arguments.start()], arguments.groups()
        self._tail = rest[arguments.end() : rest.index(closing, arguments.end()) + len(closing)]

    def required(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, in_thought: bool) -> str:
        """Returns the grammar of a call or, if `parallel`, several, which a thought may precede.

        `in_thought` says that the prompt ended inside a thought.
        """
        thoughts, several = self.template.thoughts, parallel and not isinstance(self.format, Llama3)
        rules, thought = self._calls(tools, self._head), ""
        if in_thought:
            rules += self._until("thought", thoughts.close)
            thought = r"thought /\s*/ "
        elif thoughts.is_in("\n".join([self.template.source(), *self.template.tokenizer.get_added_vocab()])):
            rules += self._until("thought", thoughts.close)
            thought = rf"({self._literal(thoughts.open)} thought /\s*/)? "
        calls = " | ".join(f"call_{place}" for place in range(len(tools)))
        more = r" (/\s{0,2}/ call)*" if several else ""
        return "\n".join([f"start: {thought}call{more}", f"call: {calls}", *rules])

    def strict(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Returns the grammar of text in which every call follows the schema of its tool."""
        opening = next((text for text in self.format.openings if self._head.startswith(text)), None)
        if opening is None:
            raise ValueError(
                "function.strict is true, but the model writes calls as it may write an answer, so they follow the "
                'schema only where they are forced: give tool_choice "required", or leave strict out.'
            )
        calls = " | ".join(f"call_{place}" for place in range(len(tools)))
        start = ["start: called* text", f"called: opening ({calls})", f"text: {TEXT}"]
        return "\n".join(
            [*start, *self._until("opening", opening), *self._calls(tools, self._head.removeprefix(opening))]
        )

    def _calls(self, tools: Sequence[Mapping[str, Any]], before_name: str) -> list[str]:
        rules = []
        for place, tool in enumerate(tools):
            name, schema = tool["function"]["name"], {"additionalProperties": False, **tool["function"]["parameters"]}
            head, tail = self._literal(f"{before_name}{name}{self._middle}"), self._literal(self._tail)
            if isinstance(self.format, Qwen3Coder):
                arguments, values = self._parameters(f"value_{place}", schema)
                rules += [f"call_{place}: {head} {' '.join(arguments)} {tail}", *values]
            else:
                rules += [f"call_{place}: {head} arguments_{place} {tail}", f"arguments_{place}: {_json(schema)}"]
        return rules

    def _parameters(self, rule: str, schema: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Returns the parameters of a call in tags of their own, and the rules of their values."""
        before, after, between = self._groups
        parameters, rules = [], []
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        for place, (name, given) in enumerate(schema.get("properties", {}).items()):
            value, kind = f"{rule}_{place}", given if isinstance(given, Mapping) else {}
            choices = kind.get("enum", [kind["const"]] if "const" in kind else None)
            if choices is not None:
                texts = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
                rules.append(f"{value}: ({' | '.join(map(self._literal, texts))}) {self._literal(after)}")
            elif kind.get("type") in ("integer", "number", "boolean", "array", "object"):
                rules += [f"{value}: {value}_json {self._literal(after)}", f"{value}_json: {_json({**kind, **shared})}"]
            else:
                rules += self._until(value, after)
            parameter = f"{self._literal(f'<parameter={name}{before}')} {value} {self._literal(between)}"
            parameters.append(parameter if name in schema.get("required", ()) else f"({parameter})?")
        return parameters, rules

    def _until(self, rule: str, end: str) -> list[str]:
        """Returns the rule of any text up to an end, with it."""
        if any(token in end for token in self._special):
            return [f"{rule}: {TEXT} {self._literal(end)}"]
        return [f"{rule}[lazy]: {TEXT} {self._literal(end)}"]

    def _literal(self, text: str) -> str:
        """Returns a text as the grammar writes it. Special tokens have no text in llguidance."""
        longest_first = sorted(self._special, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if longest_first else [text]
        written = [
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]
        return " ".join(written)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': SPACE}})}"
