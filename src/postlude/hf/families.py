"""FAMILIES: the families that can be read and written. A new one is a file in this folder and a line here."""

from __future__ import annotations

from types import MappingProxyType

from postlude.hf.deepseek_v3 import DEEPSEEK_V3, GLM4_MOE
from postlude.hf.family import Families
from postlude.hf.gpt_oss import GPT_OSS
from postlude.hf.granitemoehybrid import GRANITEMOEHYBRID
from postlude.hf.llama import GEMMA3, LLAMA, MISTRAL, OLMO3, QWEN2, QWEN3, QWEN3_MOE
from postlude.hf.mamba2 import MAMBA2
from postlude.hf.nemotron_h import NEMOTRON_H
from postlude.hf.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_VISION, QWEN3_5_VISION
from postlude.hf.qwen3_next import QWEN3_NEXT

FAMILIES: Families = MappingProxyType(
    {
        family.model_type: family
        for family in (
            DEEPSEEK_V3,
            GEMMA3,
            GLM4_MOE,
            GPT_OSS,
            GRANITEMOEHYBRID,
            LLAMA,
            MAMBA2,
            MISTRAL,
            NEMOTRON_H,
            OLMO3,
            QWEN2,
            QWEN3,
            QWEN3_5,
            QWEN3_5_MOE,
            QWEN3_5_MOE_VISION,
            QWEN3_5_VISION,
            QWEN3_MOE,
            QWEN3_NEXT,
        )
    }
)
