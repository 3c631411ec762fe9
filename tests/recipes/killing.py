"""An objective that kills its own run, once, as the file DIRECTORY/order says: moment, victim, step, signal.

Steps are those of GRPO since the run was started or continued. Where it was when it was killed is left in
DIRECTORY/killed, and the order is taken away, so that the same command goes through when it is given again.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from postlude.model import LanguageModel, OutputInputs
from postlude.objectives import Loss, PolicyGradient, ReferenceKL

HEARING = 600.0  # seconds; a rank that does not end by itself when its launcher is gone goes on after them
TOKEN = 2  # of a step's answers, for a kill in the rollout
FILES = {  # an event of Python's audit, and the end of the path it is about
    "reference": ("os.rename", ".reference.partial"),
    "save": ("open", ".step-000004.partial/state.json"),
    "prune": ("shutil.rmtree", ".step-000002.deleting"),
}


class Killing:
    """GRPO with a penalty that kills its run as the order file in `directory` says."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.policy = PolicyGradient(clip_high=0.28, kl=ReferenceKL(coefficient=0.1))
        self.steps = self.tokens = 0
        order = self.directory / "order"
        words = order.read_text().split() if order.is_file() else ["", "", "0", "SIGKILL"]
        self.moment, self.victim, self.step, self.signal = words[0], words[1], int(words[2]), signal.Signals[words[3]]
        if self.moment == "rollout":
            nn.modules.module.register_module_forward_pre_hook(self.on_forward)
        elif self.moment in FILES:
            sys.addaudithook(self.on_event)

    def __call__(self, inputs: OutputInputs) -> Loss:
        self.steps += inputs.microbatch.index == 0
        if self.moment == "backward" and self.steps == self.step and dist.is_initialized():  # in a rank
            inputs.hidden.register_hook(self.on_gradient)  # when the head's backward is done and the layers' is not
        return self.policy(inputs)

    def on_gradient(self, gradient: Tensor) -> None:
        self.kill()

    def on_forward(self, module: nn.Module, inputs: Any) -> None:
        if self.steps == self.step - 1 and isinstance(module, LanguageModel) and not torch.is_grad_enabled():
            self.tokens += 1
            if self.tokens == TOKEN:
                self.kill()

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.moment and event == FILES[self.moment][0] and str(arguments[0]).endswith(FILES[self.moment][1]):
            self.kill()

    def kill(self) -> None:
        self.moment = ""
        (self.directory / "killed").write_text(_stacks())
        (self.directory / "order").unlink()
        os.kill(os.getppid() if self.victim == "launcher" else os.getpid(), self.signal)
        if self.victim == "launcher" and self.signal == signal.SIGKILL:
            time.sleep(HEARING)


def _stacks() -> str:
    """Returns the stack of every thread."""
    return "".join(line for frame in sys._current_frames().values() for line in traceback.format_stack(frame))
