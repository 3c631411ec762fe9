"""The fused head inside other people's models: transformers' and Megatron-Core's."""
