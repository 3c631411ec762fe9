"""Sizes shared by the small models of all families."""

SMALL = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
# transformers gives the padding token's embedding no gradient. Packed batches have no padding, so ours always learns.
SMALL |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 2}
