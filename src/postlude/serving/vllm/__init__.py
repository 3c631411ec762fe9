"""What vLLM's own interpreter runs: its server, and a part of its workers that loads the trainer's weights.

`vllm_versions.py`, the table of versions, is the trainer's as well. None of these files imports postlude.
"""
