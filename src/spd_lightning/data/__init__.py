"""Text to batches. Knows tokenizers, not models."""
