"""A vLLM beside the native generator: a process with another interpreter, asked over pipes (`vllm_worker.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from decode_bytes import DecodeBytes
from decode_workloads import Workload
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from workloads import GIB

SPARE = 4 * GIB
START_SECONDS = 300.0
CALL_SECONDS = 300.0


class VLLMFailed(RuntimeError):
    """vLLM did not start, did not answer, or answered something else than was asked."""


class VLLM:
    """Starts at once, without waiting; `wait` returns when the model can generate. Use it as a context manager.

    The weights, the cache and the graphs stay in the GPU's memory until it is closed. The cache is as large as the
    workloads need, so that the native generator fits beside it.
    """

    def __init__(self, python: str, config: PretrainedConfig, cases: Sequence[Workload], **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-")
        cache_bytes = vllm_cache_bytes(config, cases)
        settings = {
            "config": str(write_config(config, Path(self._folder.name) / "model")),
            "rows": max(case.rows for case in cases),
            "max_length": max(len(p) + n for case in cases for p, n in zip(case.prompts, case.lengths, strict=True)),
            "cache_bytes": cache_bytes,
            "gated_delta": hasattr(config, "linear_num_value_heads"),
            "options": options,
        }
        self.version = "unknown"
        self.start_seconds = 0.0
        self._log = (Path(self._folder.name) / "log").open("w+")
        worker = Path(__file__).with_name("vllm_worker.py")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)  # that of this interpreter
        try:
            self._process = subprocess.Popen(
                [python, str(worker), json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._folder.cleanup()
            raise VLLMFailed(
                f"--vllm {python} cannot be run ({error.strerror}): name a Python interpreter that has vLLM."
            ) from error

    def __enter__(self) -> VLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Returns when the model can generate. Raises VLLMFailed if vLLM ends before, or is not ready in time."""
        ready = self._answer(seconds)
        self.version, self.start_seconds = ready["ready"], ready["seconds"]

    def generate(self, case: Workload, logprobs: int | None) -> float:
        """Returns the seconds of one whole call of `LLM.generate`."""
        call = {
            "prompts": case.prompts, "lengths": case.lengths, "group": case.group, "filters": case.filters,
            "logprobs": logprobs,
        }  # fmt: skip
        try:
            self._pipe(self._process.stdin).write(json.dumps(call) + "\n")
            self._pipe(self._process.stdin).flush()
        except BrokenPipeError as error:
            raise VLLMFailed(self._end()) from error
        answer = self._answer(CALL_SECONDS)
        if answer["lengths"] != [[length] * case.group for length in case.lengths]:
            raise VLLMFailed(f"{case.name}: vLLM returned completions of other lengths than asked.")
        return float(answer["seconds"])

    def close(self) -> None:
        """Ends the process and those that it started, and frees what they hold."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
        self._folder.cleanup()

    def log_tail(self, lines: int = 40) -> str:
        """Returns the last lines of what vLLM wrote."""
        return "\n".join(Path(self._log.name).read_text(errors="replace").splitlines()[-lines:])

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def _answer(self, seconds: float) -> dict[str, Any]:
        output = self._pipe(self._process.stdout)
        ready, _, _ = select.select([output], [], [], seconds)
        if not ready:
            raise VLLMFailed(f"vLLM did not answer in {seconds:.0f} s.")
        line = output.readline()
        if not line:
            raise VLLMFailed(self._end())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> str:
        """Returns why the process ended: its last line that names an error."""
        try:
            status = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "vLLM closed its output"
        lines = [line.strip() for line in self.log_tail(400).splitlines()]
        errors = [line for line in lines if "Error" in line and "Engine core initialization failed" not in line]
        return f"vLLM ended with status {status}: {(errors or lines or ['no output'])[-1][-300:]}"


def vllm_cache_bytes(config: PretrainedConfig, cases: Sequence[Workload]) -> int:
    """Returns the size of a cache for any of the workloads. vLLM rounds tokens and states of a row up to blocks."""
    needed = DecodeBytes.of(config)
    return max(needed.cache(case.rows, case.cache_tokens) for case in cases) * 5 // 4 + SPARE


def write_config(config: PretrainedConfig, folder: Path) -> Path:
    """Writes config.json with the name of the model's class, by which vLLM finds its own. Returns the folder."""
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    return folder
