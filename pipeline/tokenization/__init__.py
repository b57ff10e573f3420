"""Text to token ids: sentences, words, tokenizers."""
