"""The fused head for other people's models: transformers' and Megatron-Core's."""
