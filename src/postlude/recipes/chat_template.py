"""What training on messages needs of a chat template: that there is one to export, and that turns end."""

from __future__ import annotations

import logging
from typing import Any

from postlude.data.chat import Encoder
from postlude.data.chat_template import PLACEHOLDER, PLAIN_TEMPLATE, QUESTION, ChatTemplate
from postlude.data.turn_encoding import turn_ends
from postlude.recipes.run.directory import is_rank0

LOG = logging.getLogger("postlude")


def prepare_chat(tokenizer: Any, model: str) -> None:
    """Prepares the tokenizer of a run that trains on or samples messages. Rank 0 logs what a user should know.

    A tokenizer without a chat template gets the plain one, which is exported with the model.
    """
    answer = {"role": "assistant", "content": PLACEHOLDER}
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE
        if is_rank0():
            example = ChatTemplate(tokenizer, {}).render([QUESTION, answer])
            LOG.warning(
                "%s has no chat template, so messages are written like %r, and this template is exported with the "
                "model. Set chat_template for another.",
                model,
                example,
            )
    try:
        last = Encoder(tokenizer=tokenizer).conversation([QUESTION, answer])[-1]
    except ValueError:  # a template for other conversations
        return
    trained = [token for token, mask in zip(last.tokens, last.mask, strict=True) if mask]
    if trained[-1] not in turn_ends(tokenizer) and is_rank0():
        LOG.warning(
            "the chat template of %s ends an assistant's turn with %r, which is no special token, so training on turns "
            "does not teach the model to stop. Set chat_template to one that ends turns with a special token (in its "
            "generation marks, if it has any).",
            model,
            tokenizer.decode(trained[-8:]),
        )
